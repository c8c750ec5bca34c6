package memory_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// TestErrorOfTransfer: a transfer that failed says why to whoever waits for it or asks, and so does its stream; the next post begins anew.
func TestErrorOfTransfer(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		var broken atomic.Bool
		b := backendtest.Far(near, g, &backendtest.FarOptions{Fail: func() error {
			if broken.Load() {
				return errBroken
			}
			return nil
		}})
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error {
			return backendtest.WithWindow(ctx, m, 4096, func(w *memory.Window) error { return failingTransfer(ctx, m, w, &broken) })
		})
	}))
}

func failingTransfer(ctx context.Context, m *memory.Memory, w *memory.Window, broken *atomic.Bool) (err error) {
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	peer := 1 - m.Group().Rank()
	x, err := m.PrepareTransfer(backend.Write, peer, []memory.TransferBlock{{Local: w.Allocation().Ptr(), Window: w, Offset: 2048, Bytes: 64}})
	if err != nil {
		return err
	}
	if err := errors.Join(x.Post(s), x.Wait(ctx), s.Synchronize(ctx)); err != nil {
		return fmt.Errorf("before anything is broken: %w", err)
	}
	broken.Store(true)
	if err := x.Post(s); err != nil {
		return err
	}
	if err := x.Wait(ctx); !errors.Is(err, errBroken) {
		return fmt.Errorf("waiting for a transfer that fails: %w", err)
	}
	if state, err := x.Status(); state != memory.TransferDone || !errors.Is(err, errBroken) {
		return fmt.Errorf("a transfer that failed is %v: %w", state, err)
	}
	if err := s.Synchronize(ctx); !errors.Is(err, errBroken) {
		return fmt.Errorf("its stream says %w", err)
	}
	broken.Store(false)
	if err := errors.Join(x.Post(s), x.Wait(ctx), s.Synchronize(ctx)); err != nil {
		return fmt.Errorf("posted again: %w", err)
	}
	if state, err := x.Status(); state != memory.TransferDone || err != nil {
		return fmt.Errorf("a transfer that ended well after one that failed is %v: %w", state, err)
	}
	return x.Close()
}

// TestTransferWithoutEvent: a transfer that is in a stream, but whose end could not be recorded there, is in progress until the stream has come past it: it is
// not closed, nor posted again. Then it has ended with the error, and the next post begins anew.
func TestTransferWithoutEvent(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		for _, far := range []bool{true, false} {
			near, err := host.New(g, nil)
			if err != nil {
				return err
			}
			var b backend.Backend = near
			if far {
				b = backendtest.Far(near, g, nil)
			}
			err = backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error {
				return backendtest.WithWindow(ctx, m, 4096, func(w *memory.Window) error { return unmarkedTransfer(ctx, m, w) })
			})
			if err != nil {
				return fmt.Errorf("far %v: %w", far, err)
			}
		}
		return nil
	}))
}

// failingStream refuses to record events if it is broken, and copies and work when it has taken as many as are left.
type failingStream struct {
	device.Stream
	broken bool
	left   int
}

func (s *failingStream) HostWork(w device.HostWork) error {
	if s.left == 0 {
		return errBroken
	}
	s.left--
	return device.EnqueueHostWork(s.Stream, w)
}

func (s *failingStream) Copy(dst, src device.Ptr, bytes int64) error {
	if s.left == 0 {
		return errBroken
	}
	s.left--
	return s.Stream.Copy(dst, src, bytes)
}

func (s *failingStream) Record(e device.Event) error {
	if s.broken {
		return errBroken
	}
	return s.Stream.Record(e)
}

func unmarkedTransfer(ctx context.Context, m *memory.Memory, w *memory.Window) (err error) {
	inner, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	s := &failingStream{Stream: inner, broken: true}
	defer func() { err = errors.Join(err, inner.Close()) }()
	own := w.Allocation().Ptr()
	x, err := m.PrepareTransfer(backend.Write, 1-m.Group().Rank(), []memory.TransferBlock{
		{Local: own, Window: w, Offset: 2048, Bytes: 64}, {Local: own.Add(64), Window: w, Offset: 3072, Bytes: 64},
	})
	if err != nil {
		return err
	}
	if err := x.Post(s); !errors.Is(err, errBroken) {
		return fmt.Errorf("a post of which nothing is enqueued: %w", err)
	}
	if state, err := x.Status(); state != memory.TransferPrepared || err != nil {
		return fmt.Errorf("a transfer of which nothing was enqueued is %v: %w", state, err)
	}
	// Once with all of it enqueued, and once with some, which for a library's is all too.
	for _, copies := range []int{2, 1} {
		if err := unmarkedPost(ctx, x, s, copies); err != nil {
			return fmt.Errorf("with %d copies: %w", copies, err)
		}
	}
	s.broken, s.left = false, 2
	if err := errors.Join(x.Post(s), x.WaitOn(s), x.Wait(ctx), s.Synchronize(ctx)); err != nil {
		return fmt.Errorf("posted again: %w", err)
	}
	if state, err := x.Status(); state != memory.TransferDone || err != nil {
		return fmt.Errorf("a transfer that was posted well is %v: %w", state, err)
	}
	return x.Close()
}

func unmarkedPost(ctx context.Context, x *memory.Transfer, s *failingStream, copies int) error {
	held := make(chan struct{})
	if err := s.HostFunc(func() { <-held }); err != nil {
		return err
	}
	s.left = copies
	failed := func() error {
		if err := x.Post(s); !errors.Is(err, errBroken) {
			return fmt.Errorf("a post that is not recorded: %w", err)
		}
		if state, err := x.Status(); state != memory.TransferInProgress || err != nil {
			return fmt.Errorf("a transfer behind work that goes on is %v: %w", state, err)
		}
		if err := x.Close(); !errors.Is(err, errs.ErrInProgress) {
			return fmt.Errorf("closing it: %w", err)
		}
		if err := x.Post(s); !errors.Is(err, errs.ErrInProgress) {
			return fmt.Errorf("posting it again: %w", err)
		}
		if err := x.WaitOn(s); !errors.Is(err, errBroken) {
			return fmt.Errorf("a stream that waits for it: %w", err)
		}
		short, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
		defer cancel()
		if err := x.Wait(short); !errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("waiting for it a short time: %w", err)
		}
		return nil
	}()
	close(held)
	if failed != nil {
		return failed
	}
	if err := x.Wait(ctx); !errors.Is(err, errBroken) {
		return fmt.Errorf("waiting for it: %w", err)
	}
	if state, err := x.Status(); state != memory.TransferDone || !errors.Is(err, errBroken) {
		return fmt.Errorf("when it has ended it is %v: %w", state, err)
	}
	return nil
}

// fullStream is a stream whose queue is full: copies wait for room.
type fullStream struct {
	device.Stream
	came, room chan struct{}
}

func (s fullStream) Copy(dst, src device.Ptr, bytes int64) error {
	s.came <- struct{}{}
	<-s.room
	return s.Stream.Copy(dst, src, bytes)
}

// TestTransferBehindAFullQueue: who asks about a transfer, waits for it or closes it waits for no Post that waits for room in the queue of its stream.
func TestTransferBehindAFullQueue(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error {
			return backendtest.WithWindow(ctx, m, 4096, func(w *memory.Window) error { return askedWhilePosted(ctx, m, w) })
		})
	}))
}

func askedWhilePosted(ctx context.Context, m *memory.Memory, w *memory.Window) (err error) {
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	x, err := m.PrepareTransfer(backend.Write, 1-m.Group().Rank(), []memory.TransferBlock{{Local: w.Allocation().Ptr(), Window: w, Offset: 2048, Bytes: 64}})
	if err != nil {
		return err
	}
	full := fullStream{s, make(chan struct{}), make(chan struct{})}
	posted, asked := make(chan error, 1), make(chan error, 1)
	go func() { posted <- x.Post(full) }()
	<-full.came
	go func() {
		soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		state, err := x.Status()
		waited, closed := x.Wait(soon), x.Close()
		if state != memory.TransferInProgress || err != nil || !errors.Is(waited, errs.ErrNotPosted) || !errors.Is(closed, errs.ErrInProgress) {
			err = fmt.Errorf("while it is posted it is %v: %w; waited for: %w; closed: %w", state, err, waited, closed)
		}
		asked <- err
	}()
	var late error
	select {
	case late = <-asked:
	case <-time.After(5 * time.Second):
		late = errors.New("who asks waits, too")
	}
	close(full.room)
	return errors.Join(late, <-posted, x.Wait(ctx), x.Close())
}
