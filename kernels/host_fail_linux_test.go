package kernels

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestOneShotIsNotOverrun: a rank that has ended a run and begins the next does not overwrite what a slower one still reduces.
func TestOneShotIsNotOverrun(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		if err := slowReduction(ctx, m); err != nil {
			g.Abort("the test has failed") // the other may be waiting
			return err
		}
		return errors.Join(g.Barrier(ctx, "end"), m.Close(ctx))
	}))
}

func slowReduction(ctx context.Context, m *memory.Memory) error {
	const n, runs = 100, 4
	t, err := tensor.Zeros(ctx, m, tensor.Float32, n)
	if err != nil {
		return err
	}
	if err := t.Rendezvous(ctx); err != nil {
		return err
	}
	a := &allReduce{in: t, out: t, op: Sum, algorithm: OneShot, inPlace: true}
	spec := a.spec()
	spec.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
		k, err := a.hostKernel(at)
		if err != nil {
			return nil, err
		}
		if reduce := k.reduce; k.rank == 1 {
			k.reduce = func(dst []byte, srcs [][]byte, lo, hi int64) {
				time.Sleep(10 * time.Millisecond)
				reduce(dst, srcs, lo, hi)
			}
		}
		return k.oneShot, nil
	}
	p, err := collective.New(ctx, m, spec)
	if err != nil {
		return err
	}
	// What goes in and what came out, run by run.
	in, err := tensor.Zeros(ctx, m, tensor.Float32, runs, n)
	if err != nil {
		return err
	}
	out, err := tensor.Zeros(ctx, m, tensor.Float32, runs, n)
	if err != nil {
		return err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	for i := range int64(runs) {
		for j := range int64(n) {
			if err := tensor.Write(in.Local(), []float32{float32(1000*i + j)}, i*n+j); err != nil {
				return err
			}
		}
		at := i * t.Bytes()
		if err := errors.Join(s.Copy(t.Ptr(), in.Ptr().Add(at), t.Bytes()), p.Run(s), s.Copy(out.Ptr().Add(at), t.Ptr(), t.Bytes())); err != nil {
			return err
		}
	}
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	got, err := tensor.ReadAll[float32](out.Local())
	if err != nil {
		return err
	}
	for i, v := range got {
		if want := float32(2 * (1000*(i/n) + i%n)); v != want {
			return fmt.Errorf("run %d: element %d is %v, not %v", i/n, i%n, v, want)
		}
	}
	return errors.Join(s.Close(), p.Close(ctx), out.Close(ctx), in.Close(ctx), t.Close(ctx))
}
