package collective_test

import (
	"context"
	"errors"
	"testing"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
)

// BenchmarkRun is what a run costs the processors of a rank beside its kernel, which does nothing here: enqueueing it, and the stream's part. Batches
// of 1000 are enqueued and waited for. With -cpu 1 nothing of it is done at the same time.
func BenchmarkRun(b *testing.B) {
	backendtest.RequireAll(b, backendtest.OnRanks(b, 1, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(near, g, nil)
		p, err := collective.New(ctx, m, collective.Spec{Name: "nothing", Host: func(*collective.Addresses) (collective.HostKernel, error) {
			return func(*collective.HostRun) error { return nil }, nil
		}})
		if err != nil {
			return err
		}
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		const batch = 1000
		b.ReportAllocs()
		for b.Loop() {
			for range batch {
				if err := p.Run(s); err != nil {
					return err
				}
			}
			if err := s.Synchronize(ctx); err != nil {
				return err
			}
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/batch, "ns/run")
		return errors.Join(s.Close(), p.Close(ctx), m.Close(ctx))
	}))
}
