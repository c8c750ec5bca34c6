package suite

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/symmem/symmem/tensor"
)

// signalCases are about signal, wait and barrier by themselves.
func signalCases() []Case {
	return []Case{
		{Name: "signal/counted", Run: countedCase},
		{Name: "signal/channels", Run: channelsCase},
		{Name: "signal/self", Run: selfSignalCase},
		{Name: "signal/holds_up", MinWorld: 2, Run: holdsUpCase},
		{Name: "signal/barrier", Needs: []string{"transfers"}, Run: barrierCase},
		{Name: "signal/graph", Needs: []string{"graphs"}, Run: signalGraphCase},
		{Name: "signal/two_streams", Run: twoStreamsCase},
	}
}

// countedCase sends many signals before the first is waited for: none is lost, none is too many.
func countedCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Int64, 16)
	if err != nil {
		return err
	}
	next, prev := ring(e)
	const n = 300
	for range n {
		if err := t.Signal(e.S, next, 3); err != nil {
			return err
		}
	}
	for range n {
		if err := t.Wait(e.S, prev, 3); err != nil {
			return err
		}
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return err
	}
	// One more wait has nothing to take until the signal comes.
	if err := t.Wait(e.S, prev, 3); err != nil {
		return err
	}
	done, err := e.S.Query()
	if err != nil {
		return err
	}
	if done && e.R.WorldSize() > 1 && e.R.Rank() == 0 {
		return errors.New("a wait without a signal has passed")
	}
	if err := e.R.Barrier(ctx); err != nil {
		return err
	}
	other, err := e.R.NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(t.Signal(other, next, 3), e.S.Synchronize(ctx), other.Synchronize(ctx), other.Close()); err != nil {
		return err
	}
	return t.Close(ctx)
}

// channelsCase: a signal on one channel is none on another.
func channelsCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Int64, 16)
	if err != nil {
		return err
	}
	next, prev := ring(e)
	last := e.R.Memory().Channels() - 1
	for round := range 10 {
		// Waited for in another order than sent.
		for _, c := range []int{0, 1, last} {
			if err := t.Signal(e.S, next, c); err != nil {
				return err
			}
		}
		for _, c := range []int{last, 0, 1} {
			if err := t.Wait(e.S, prev, c); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
		}
	}
	return errors.Join(e.S.Synchronize(ctx), t.Close(ctx))
}

func selfSignalCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Int64, 16)
	if err != nil {
		return err
	}
	me := e.R.Rank()
	return errors.Join(t.Signal(e.S, me, 0), t.Signal(e.S, me, 0), t.Wait(e.S, me, 0), t.Wait(e.S, me, 0), e.S.Synchronize(ctx), t.Close(ctx))
}

// holdsUpCase: a wait holds its stream up until the signal, and work enqueued behind it has not run before.
func holdsUpCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Int64, 16)
	if err != nil {
		return err
	}
	next, prev := ring(e)
	ran := make(chan time.Time, 1)
	if err := errors.Join(t.Wait(e.S, prev, 0), e.S.HostFunc(func() { ran <- time.Now() })); err != nil {
		return err
	}
	time.Sleep(30 * time.Millisecond)
	select {
	case <-ran:
		return errors.New("work behind a wait has run before the signal")
	default:
	}
	if err := e.R.Barrier(ctx); err != nil {
		return err
	}
	s, err := e.R.NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(t.Signal(s, next, 0), e.S.Synchronize(ctx), s.Synchronize(ctx), s.Close()); err != nil {
		return err
	}
	return t.Close(ctx)
}

// barrierCase: what was written before a barrier is seen by all after it, many times, with ranks that come late.
func barrierCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Int64, int64(e.R.WorldSize()))
	if err != nil {
		return err
	}
	src, err := e.R.Empty(ctx, tensor.Int64, 1)
	if err != nil {
		return err
	}
	for round := range 50 {
		if err := tensor.Write(src.Local(), []int64{int64(round*100 + e.R.Rank())}, 0); err != nil {
			return err
		}
		slot, err := t.Sub(int64(e.R.Rank()), 1)
		if err != nil {
			return err
		}
		if round%10 == 0 {
			e.Skew()
		}
		for peer := range e.R.WorldSize() {
			if err := slot.Put(e.S, peer, src); err != nil {
				return err
			}
		}
		if err := errors.Join(t.Barrier(e.S, 4), e.S.Synchronize(ctx)); err != nil {
			return err
		}
		got, err := tensor.ReadAll[int64](t.Local())
		if err != nil {
			return err
		}
		for r, x := range got {
			if x != int64(round*100+r) {
				return fmt.Errorf("round %d: rank %d's mark is %d", round, r, x)
			}
		}
		if err := errors.Join(t.Barrier(e.S, 4), e.S.Synchronize(ctx)); err != nil {
			return err
		}
	}
	return closeAll(ctx, src, t)
}

// signalGraphCase: counters are advanced by the device, so that a graph can be replayed.
func signalGraphCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Int64, 16)
	if err != nil {
		return err
	}
	next, prev := ring(e)
	if err := e.S.BeginCapture(); err != nil {
		return err
	}
	if err := errors.Join(t.Signal(e.S, next, 0), t.Wait(e.S, prev, 0), t.Barrier(e.S, 1)); err != nil {
		return err
	}
	g, err := e.S.EndCapture()
	if err != nil {
		return err
	}
	for range 100 {
		if err := g.Launch(e.S); err != nil {
			return err
		}
	}
	// Eager work takes part in the same counting.
	if err := errors.Join(t.Signal(e.S, next, 0), t.Wait(e.S, prev, 0), t.Barrier(e.S, 1)); err != nil {
		return err
	}
	return errors.Join(e.S.Synchronize(ctx), g.Close(), t.Close(ctx))
}

// twoStreamsCase: barriers of two streams on two channels do not disturb each other, whichever a rank enqueues first.
func twoStreamsCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Int64, 16)
	if err != nil {
		return err
	}
	other, err := e.R.NewStream()
	if err != nil {
		return err
	}
	for range 50 {
		first := func() error { return t.Barrier(e.S, 0) }
		second := func() error { return t.Barrier(other, 1) }
		if e.R.Rank()%2 == 1 {
			first, second = second, first
		}
		if err := errors.Join(first(), second()); err != nil {
			return err
		}
	}
	return errors.Join(e.S.Synchronize(ctx), other.Synchronize(ctx), other.Close(), t.Close(ctx))
}
