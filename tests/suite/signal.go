package suite

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// signalCases are about signal, wait and barrier by themselves.
func signalCases(short bool) []Case {
	cases := []Case{
		{Name: "signal/counted", Needs: []string{Puts}, Run: countedCase},
		{Name: "signal/channels", Needs: []string{Puts}, Run: channelsCase},
		{Name: "signal/self", Run: selfSignalCase},
		{Name: "signal/holds_up", MinWorld: 2, Needs: []string{Puts}, Run: holdsUpCase},
		{Name: "signal/barrier", Needs: []string{Puts}, Run: barrierCase},
		{Name: "signal/graph", Needs: []string{"graphs", Puts}, Run: signalGraphCase},
		{Name: "signal/two_streams", Needs: []string{Puts}, Run: twoStreamsCase},
		{Name: "signal/put", Needs: []string{Puts}, Run: putSignalCase},
		{Name: "signal/put_wait", Needs: []string{Puts}, Run: putSignalWaitCase},
	}
	if short {
		return cases
	}
	return append(cases,
		Case{Name: "signal/in_vain", MinWorld: 2, Needs: []string{Puts}, Run: func(ctx context.Context, e *Env) error { return inVainCase(ctx, e, WaitsInVain) }},
		Case{Name: "signal/in_vain/graph", MinWorld: 2, Needs: []string{"graphs", Puts}, Run: func(ctx context.Context, e *Env) error {
			return inVainCase(ctx, e, graphWaitsInVain)
		}},
	)
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

// putSignalCase puts pieces of many sizes, to and from where they happen to lie, each with a signal behind it. Small ones are moved another way
// than large ones. What has come goes on to the next rank.
func putSignalCase(ctx context.Context, e *Env) error {
	const most, half, room = 64<<10 + 2, 128 << 10, 256 << 10
	box, err1 := e.mapped(ctx, tensor.Uint8, room)
	src, err2 := e.R.Zeros(ctx, tensor.Uint8, room)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	next, prev := ring(e)
	for round, p := range []struct{ to, from, n int64 }{
		{0, 0, 1}, {16, 32, 16}, {3, 3, 33}, {1, 2, 1000}, {2, 6, 4099}, {4, 0, 16 << 10}, {8, 16, 40000}, {0, 16, 64<<10 - 1}, {16, 0, 64 << 10}, {5, 4, most},
	} {
		to, err1 := box.Slice(p.to, p.to+p.n)
		from, err2 := src.Slice(p.from, p.from+p.n)
		further, err3 := box.Slice(half+p.to, half+p.to+p.n)
		if err := errors.Join(err1, err2, err3, writeBytes(box.Local(), poisoned(room)), writeBytes(src.Local(), pattern(e.R.Rank(), round, room)), e.R.Barrier(ctx)); err != nil {
			return err
		}
		e.Skew()
		const channel = 5
		err := errors.Join(to.PutSignal(e.S, next, from, channel), to.Wait(e.S, prev, channel))
		err = errors.Join(err, further.PutSignal(e.S, next, to, channel), to.Wait(e.S, prev, channel), e.S.Synchronize(ctx)) // what has come goes further
		if err != nil {
			return fmt.Errorf("%d bytes from %d to %d: %w", p.n, p.from, p.to, err)
		}
		want := poisoned(room)
		first := (prev + e.R.WorldSize() - 1) % e.R.WorldSize()
		copy(want[p.to:p.to+p.n], pattern(prev, round, room)[p.from:])
		copy(want[half+p.to:half+p.to+p.n], pattern(first, round, room)[p.from:])
		got, err := readBytes(box.Local())
		if err == nil {
			err = sameBytes(tensor.Uint8, got, want)
		}
		if err != nil {
			return fmt.Errorf("%d bytes from %d to %d: %w", p.n, p.from, p.to, err)
		}
		if err := e.R.Barrier(ctx); err != nil {
			return err
		}
	}
	return closeAll(ctx, box, src)
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
	src, err := e.R.Zeros(ctx, tensor.Int64, 1)
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
	if err := enqueued(e.odd(), 50, func() error { return t.Barrier(e.S, 0) }, func() error { return t.Barrier(other, 1) }); err != nil {
		return err
	}
	return errors.Join(e.S.Synchronize(ctx), other.Synchronize(ctx), other.Close(), t.Close(ctx))
}

// putSignalWaitCase goes around a ring in steps of one call, by which data of every rank come to every other, in pieces of many sizes. Ranks with odd numbers take two
// calls for a step, which is the same to their neighbours; in each round one rank is late.
func putSignalWaitCase(ctx context.Context, e *Env) error {
	const room, channel = 128 << 10, 4
	w := e.R.WorldSize()
	box, err1 := e.mapped(ctx, tensor.Uint8, int64(w), room)
	src, err2 := e.R.Zeros(ctx, tensor.Uint8, room)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	me := e.R.Rank()
	next, prev := ring(e)
	for round, n := range []int64{0, 1, 33, 4099, 16 << 10, 40000, 64 << 10, 64<<10 + 16, 0, room} {
		// Row s of a box is what has come in step s, at a place that is not aligned but for the longest.
		lead := min(3, room-n)
		row := func(step int) (tensor.SymmetricTensor, error) { return box.Sub(int64(step)*room+lead, n) }
		own, err := src.Slice(lead, lead+n)
		if err := errors.Join(err, writeBytes(box.Local(), poisoned(int64(w)*room)), writeBytes(src.Local(), pattern(me, round, room)), e.R.Barrier(ctx)); err != nil {
			return err
		}
		if me == round%w {
			time.Sleep(lateness)
		}
		e.Skew()
		from := own
		for step := range w {
			to, err := row(step)
			switch {
			case err != nil:
				return err
			case me%2 == 1:
				err = errors.Join(to.PutSignal(e.S, next, from, channel), to.Wait(e.S, prev, channel))
			default:
				err = to.PutSignalWait(e.S, next, from, prev, channel)
			}
			if err != nil {
				return fmt.Errorf("%d bytes, step %d: %w", n, step, err)
			}
			from = to // what has come goes further
		}
		if err := e.S.Synchronize(ctx); err != nil {
			return fmt.Errorf("%d bytes: %w", n, err)
		}
		want := poisoned(int64(w) * room)
		for step := range w {
			first := ((me-1-step)%w + w) % w
			at := int64(step)*room + lead
			copy(want[at:at+n], pattern(first, round, room)[lead:])
		}
		got, err := readBytes(box.Local())
		if err == nil {
			err = sameBytes(tensor.Uint8, got, want)
		}
		if err := errors.Join(err, e.R.Barrier(ctx)); err != nil {
			return fmt.Errorf("%d bytes: %w", n, err)
		}
	}
	return closeAll(ctx, box, src)
}

// inVainCase runs f on memory of its own, whose waits are short.
func inVainCase(ctx context.Context, e *Env, f func(context.Context, *memory.Memory) error) (err error) {
	all := make([]int, e.R.WorldSize())
	for i := range all {
		all[i] = i
	}
	g, err := e.R.Group().Sub(ctx, all)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Close(ctx)) }()
	env := &backend.Env{
		Group: g, Opened: e.R.Device(), Parent: e.R.Memory().Backend(), ShareDevice: true, Multicast: "off", Getenv: os.Getenv,
	}
	m, err := memory.Open(ctx, e.R.Backend(), env, &memory.Options{Channels: 3, KernelTimeout: time.Second})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.Barrier(ctx, "end"), m.Close(ctx)) }()
	a, err := m.Allocate(ctx, 4096, "")
	if err != nil {
		return err
	}
	_, err = m.Rendezvous(ctx, a, memory.Record{}) // the first makes the signal pads
	if err == nil {
		err = f(ctx, m)
	}
	return errors.Join(err, m.Free(ctx, a))
}

// WaitsInVain lets every rank wait in vain on several streams, for as long as the memory's kernel timeout: each of them tells of its own
// wait or barrier, once and whichever is asked first, and a stream with none tells nothing. Then signals and barriers go on. Collective,
// for 2 ranks and more; the memory has had its first rendezvous, and 3 channels or more that were not used yet.
func WaitsInVain(ctx context.Context, m *memory.Memory) (err error) {
	g := m.Group()
	me := g.Rank()
	next, prev := (me+1)%g.Size(), (me+g.Size()-1)%g.Size()
	var s [3]device.Stream
	for i := range s {
		if s[i], err = m.Device().NewStream(); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s[i].Close()) }()
	}
	a, b, idle := s[0], s[1], s[2]

	// Rank 0 comes to a barrier alone.
	op, channel := "wait", 1
	enqueue := func() error { return m.Wait(b, prev, 1) }
	if me == 0 {
		op, channel = "barrier", 2
		enqueue = func() error { return m.Barrier(b, 2) }
	}
	if err := errors.Join(m.Wait(a, prev, 0), enqueue()); err != nil {
		return err
	}
	tellA := func() error { return inVain(ctx, "the first stream", a, "wait", 0) }
	tellB := func() error { return inVain(ctx, "the second stream", b, op, channel) }
	if me%2 == 1 {
		tellA, tellB = tellB, tellA
	}
	if err := errors.Join(tellA(), idle.Synchronize(ctx), tellB(), a.Synchronize(ctx), b.Synchronize(ctx)); err != nil {
		return err
	}
	if err := g.Barrier(ctx, "given up"); err != nil {
		return err
	}

	// The waits have taken the next signals all the same, and so has the barrier of rank 0.
	if me != 0 {
		if err := errors.Join(m.Barrier(a, 2), m.Signal(b, next, 1)); err != nil {
			return err
		}
	} else if err := m.Signal(b, next, 1); err != nil {
		return err
	}
	err = errors.Join(m.Signal(a, next, 0), m.Signal(a, next, 0), a.Synchronize(ctx), b.Synchronize(ctx), g.Barrier(ctx, "signalled"),
		m.Wait(a, prev, 0), m.Barrier(b, 2), m.Barrier(b, 2), b.Synchronize(ctx), a.Synchronize(ctx))
	if err != nil {
		return fmt.Errorf("after waits in vain: %w", err)
	}
	return nil
}

// graphWaitsInVain is WaitsInVain for what one stream has recorded and another one runs.
func graphWaitsInVain(ctx context.Context, m *memory.Memory) (err error) {
	g := m.Group()
	next, prev := (g.Rank()+1)%g.Size(), (g.Rank()+g.Size()-1)%g.Size()
	var s [3]device.Stream
	for i := range s {
		if s[i], err = m.Device().NewStream(); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s[i].Close()) }()
	}
	a, b, idle := s[0], s[1], s[2]
	if err := errors.Join(a.BeginCapture(), m.Wait(a, prev, 0)); err != nil {
		return err
	}
	graph, err := a.EndCapture()
	if err != nil {
		return err
	}
	if err := errors.Join(graph.Launch(b), graph.Launch(b), inVain(ctx, "the stream of the launches", b, "wait", 0), a.Synchronize(ctx),
		b.Synchronize(ctx), g.Barrier(ctx, "given up")); err != nil {
		return err
	}
	for range 3 {
		if err := m.Signal(a, next, 0); err != nil {
			return err
		}
	}
	if err := errors.Join(a.Synchronize(ctx), g.Barrier(ctx, "signalled"), graph.Launch(idle), idle.Synchronize(ctx), graph.Close()); err != nil {
		return fmt.Errorf("a graph after waits in vain: %w", err)
	}
	return nil
}

// inVain is an error unless the stream tells of a wait in vain.
func inVain(ctx context.Context, what string, s device.Stream, op string, channel int) error {
	err := s.Synchronize(ctx)
	wait, ok := errors.AsType[*device.WaitError](err)
	if !ok || wait.Op != op || wait.Channel != channel || !errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("%s has the error %v, and not one of a %s on channel %d", what, err, op, channel)
	}
	return nil
}
