package collective_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
)

// TestPlanHeardLate: a rank whose context ends before it hears that all have made a plan has it as the others have. They would run it and wait for that rank.
func TestPlanHeardLate(t *testing.T) {
	const size = 2
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var held sync.Mutex
	addr := l.Addr().String()
	deaf := backendtest.Silenced(t, addr, &held)
	made := make(chan struct{}) // by rank 0
	within, giveUp := context.WithCancel(ctx)
	defer giveUp()
	// last holds up what rank 1 is told until long after rank 0 has been told.
	last := func() {
		held.Lock()
		go func() {
			select {
			case <-made:
			case <-ctx.Done():
			}
			giveUp()
			time.AfterFunc(1300*time.Millisecond, held.Unlock) // later than a rank that has given up waits for most answers
		}()
	}
	rank := func(number int) error {
		o := &group.Options{Rank: number, WorldSize: size, Addr: addr, Timeout: 20 * time.Second}
		mine := ctx
		if number == 0 {
			o.Listener = l
		} else {
			o.Addr, mine = deaf, within
		}
		g, err := group.Join(ctx, o)
		if err != nil {
			return err
		}
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(b, g, &memory.Options{KernelTimeout: patience})
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		p, err := collective.New(mine, m, collective.Spec{Name: "barrier", Host: func(*collective.Addresses) (collective.HostKernel, error) {
			if number == 1 {
				last() // all that is left is the vote
			}
			return func(r *collective.HostRun) error { return r.Barrier(0) }, nil
		}})
		if number == 0 {
			close(made)
		}
		if err != nil {
			return fmt.Errorf("rank %d: %w", number, err)
		}
		return errors.Join(p.Run(s), s.Synchronize(ctx), p.Close(ctx), m.Close(ctx), g.Close(ctx))
	}
	failed := make(chan error, size)
	for number := range size {
		go func() { failed <- rank(number) }()
	}
	for range size {
		err = errors.Join(err, <-failed)
	}
	require.NoError(t, err)
}
