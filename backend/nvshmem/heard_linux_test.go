package nvshmem

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
)

// TestHeardLate: a rank whose context ends before it hears that all agree to take memory of the arena counts it as the others do, and one that finalizes the library
// comes to that: nothing but it would end the others' call.
func TestHeardLate(t *testing.T) {
	const size = 3
	m := newMachine(size)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var held sync.Mutex
	addr := l.Addr().String()
	deaf := backendtest.Silenced(t, addr, &held)
	// late runs a call that rank 1 gives up when another rank has heard how it went, and hears of itself later than a rank that has given up waits for most answers.
	late := func(number int, heard <-chan struct{}, call func(ctx context.Context) error) error {
		if number != 1 {
			return call(ctx)
		}
		held.Lock()
		within, giveUp := context.WithCancel(ctx)
		defer giveUp()
		go func() {
			select {
			case <-heard:
			case <-ctx.Done():
			}
			giveUp()
			time.AfterFunc(1250*time.Millisecond, held.Unlock)
		}()
		return call(within)
	}
	taken, finalizing := make(chan struct{}), make(chan struct{})
	var names [size]uint64
	rank := func(number int) error {
		o := &group.Options{Rank: number, WorldSize: size, Addr: addr, Timeout: 20 * time.Second}
		switch number {
		case 0:
			o.Listener = l
		case 1:
			o.Addr = deaf
		}
		g, err := group.Join(ctx, o)
		if err != nil {
			return err
		}
		opts := m.options(number)
		opts.KernelTimeout = 10 * time.Second // of what nothing ends
		b, err := New(ctx, g, opts)
		if err != nil {
			return err
		}
		if number < 2 {
			part, err := g.Sub(ctx, []int{0, 1})
			if err != nil {
				return err
			}
			own := *opts
			own.Parent = b
			s, err := New(ctx, part, &own)
			if err != nil {
				return err
			}
			err = late(number, taken, func(ctx context.Context) error {
				a, err := s.Allocate(ctx, 4096)
				if number == 0 {
					close(taken)
				}
				if err == nil {
					return a.Release(ctx)
				}
				if number == 1 { // it has no time to fill it
					return nil
				}
				return err
			})
			names[number] = s.parts.next
			if err = errors.Join(err, s.Close(ctx), part.Close(ctx)); err != nil {
				return err
			}
		}
		if err := g.Barrier(ctx, "closing"); err != nil {
			return err
		}
		if number == 0 {
			go func() { // PE 0 deals out the turn when it has heard that all have agreed
				for b.world.issuing.TryLock() && ctx.Err() == nil {
					b.world.issuing.Unlock()
					time.Sleep(time.Millisecond)
				}
				close(finalizing)
			}()
		}
		return errors.Join(late(number, finalizing, b.Close), m.homes[number].usable(), g.Close(ctx))
	}
	failed := make(chan error, size)
	for number := range size {
		go func() { failed <- rank(number) }()
	}
	for range size {
		err = errors.Join(err, <-failed)
	}
	m.release()
	require.NoError(t, err)
	assert.Equal(t, names[0], names[1])
	assert.Equal(t, 1, m.job.finalize)
	assert.Empty(t, m.left())
}
