package suite

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// windowCases are about windows and the memory below tensors, and about closing what the device of one rank still works on.
func windowCases() []Case {
	return []Case{
		{Name: "window/arguments", Needs: []string{"transfers"}, Run: windowArgumentsCase},
		{Name: "window/freed", Needs: []string{"transfers"}, Run: freedWindowCase},
		{Name: "window/busy_on_one_rank", MinWorld: 2, Run: busyOnOneRankCase},
		{Name: "window/busy_group", Run: busyGroupCase},
		{Name: "window/output", Needs: needsOf(kernels.Auto), Run: outputCase},
	}
}

// window is memory after its rendezvous.
func (e *Env) window(ctx context.Context, bytes int64) (backend.Allocation, *memory.Window, error) {
	m := e.R.Memory()
	a, err := m.Allocate(ctx, bytes, "")
	if err != nil {
		return nil, nil, err
	}
	w, err := m.Rendezvous(ctx, a, memory.Record{})
	return a, w, err
}

// windowArgumentsCase: places outside of a window, and ranks outside of the group, are refused.
func windowArgumentsCase(ctx context.Context, e *Env) error {
	const bytes = 1000
	m, me, world := e.R.Memory(), e.R.Rank(), e.R.WorldSize()
	a, w, err := e.window(ctx, bytes)
	if err != nil {
		return err
	}
	if again, err := m.Rendezvous(ctx, a, memory.Record{}); err != nil || again != w {
		return fmt.Errorf("a second rendezvous does not give the window of the first: %w", err)
	}
	first := func(_ any, err error) error { return err }
	view := func(offset int64) error {
		_, _, err := w.Contiguous(offset)
		return err
	}
	copied := func(peer int, offset, n int64) error { return m.Copy(e.S, backend.Write, peer, w, offset, a.Ptr(), n) }
	var wrong []error
	for _, offset := range []int64{-1, bytes + 1, math.MinInt64, math.MaxInt64} {
		wrong = append(wrong,
			wantArgument("Peer", first(w.Peer(me, offset)), fmt.Sprint(offset)),
			wantArgument("Multicast", first(w.Multicast(offset)), fmt.Sprint(offset)),
			wantArgument("Contiguous", view(offset), fmt.Sprint(offset)),
			wantArgument("Copy", copied(me, offset, 8), fmt.Sprint(offset)),
		)
	}
	wrong = append(wrong,
		wantArgument("Peer(-1)", first(w.Peer(-1, 0)), "-1"),
		wantArgument("Peer(size)", first(w.Peer(world, 0)), fmt.Sprint(world)),
		wantArgument("a copy beyond the end", copied(me, bytes-7, 8), "8"),
		wantArgument("a copy of more than there is", copied(me, 0, bytes+1), fmt.Sprint(bytes+1)),
		wantArgument("a copy of a negative size", copied(me, 0, -1), "-1"),
		wantArgument("a copy to a rank that does not exist", copied(world, 0, 8), fmt.Sprint(world)),
		wantArgument("a copy of nothing to a rank that does not exist", copied(-1, 0, 0), "-1"),
		wantArgument("a copy in no direction", m.Copy(e.S, 7, me, w, 0, a.Ptr(), 8), "7"),
	)
	// The end is a place, of which nothing can be copied.
	end, err := w.Peer(me, bytes)
	if err != nil || end != a.Ptr().Add(bytes) {
		wrong = append(wrong, fmt.Errorf("the end of the window at %s is %s: %w", a.Ptr(), end, err))
	}
	wrong = append(wrong, copied(me, bytes, 0))
	return errors.Join(errors.Join(wrong...), m.Free(ctx, a))
}

// freedWindowCase: a window of memory that was freed is closed, for everything.
func freedWindowCase(ctx context.Context, e *Env) error {
	m, me := e.R.Memory(), e.R.Rank()
	a, w, err := e.window(ctx, 1000)
	if err != nil {
		return err
	}
	src, err := m.Allocate(ctx, 1000, "")
	if err != nil {
		return err
	}
	peer := (me + 1) % e.R.WorldSize()
	block := []memory.TransferBlock{{Local: src.Ptr(), Window: w, Bytes: 8}}
	x, err := m.PrepareTransfer(backend.Write, peer, block)
	if err != nil {
		return err
	}
	if err := m.Copy(e.S, backend.Write, peer, w, 0, src.Ptr(), 8); err != nil {
		return err
	}
	if err := m.Free(ctx, a); err != nil {
		return err
	}
	first := func(_ any, err error) error { return err }
	_, _, viewErr := w.Contiguous(0)
	err = errors.Join(
		wantError("Err", w.Err(), symmem.ErrClosed),
		wantError("Peer", first(w.Peer(me, 0)), symmem.ErrClosed),
		wantError("Multicast", first(w.Multicast(0)), symmem.ErrClosed),
		wantError("Contiguous", viewErr, symmem.ErrClosed),
		wantError("Copy", m.Copy(e.S, backend.Write, peer, w, 0, src.Ptr(), 8), symmem.ErrClosed),
		wantError("Copy of nothing", m.Copy(e.S, backend.Read, me, w, 0, src.Ptr(), 0), symmem.ErrClosed),
		wantError("PrepareTransfer", first(m.PrepareTransfer(backend.Write, peer, block)), symmem.ErrClosed),
		wantError("Post", x.Post(e.S), symmem.ErrClosed),
		wantError("Free", m.Free(ctx, a), symmem.ErrClosed),
		x.Close(), e.S.Synchronize(ctx),
	)
	// After a free that one rank alone has not begun nobody could go on.
	return errors.Join(err, e.R.Barrier(ctx), m.Free(ctx, src))
}

// busyOnOneRankCase frees memory that the device of one rank still works on: that rank keeps it, and frees it again, with those of the
// others that have to. Everything goes on afterwards.
func busyOnOneRankCase(ctx context.Context, e *Env) error {
	m := e.R.Memory()
	a, _, err := e.window(ctx, 1000)
	if err != nil {
		return err
	}
	hold, release := holdUp()
	if e.R.Rank() == 0 {
		if err := e.S.HostFunc(hold); err != nil {
			release()
			return err
		}
	}
	short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
	defer cancel()
	if e.R.Rank() == 0 {
		err = m.Free(short, a)
	} else {
		err = m.Free(ctx, a)
	}
	release()
	if err == nil {
		return errors.New("memory that the device of rank 0 works on was freed without an error")
	}
	if e.R.Rank() == 0 {
		if err := wantError("freeing busy memory", err, context.DeadlineExceeded); err != nil {
			return err
		}
		if !m.Holds(a) {
			return errors.New("memory that the device works on was freed")
		}
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return err
	}
	if m.Holds(a) {
		if err := m.Free(ctx, a); err != nil {
			return fmt.Errorf("freeing again: %w", err)
		}
	}
	if m.Holds(a) {
		return errors.New("memory that was freed again is still there")
	}
	return worksAfterwards(ctx, e)
}

// busyGroupCase closes a group on whose device there is still work: it is kept, and closing again works.
func busyGroupCase(ctx context.Context, e *Env) error {
	all := make([]int, e.R.WorldSize())
	for i := range all {
		all[i] = i
	}
	sub, err := e.R.Sub(ctx, all)
	if err != nil {
		return err
	}
	t, err := (&Env{R: sub}).mapped(ctx, tensor.Float32, 100)
	if err != nil {
		return err
	}
	if err := t.Close(ctx); err != nil {
		return err
	}
	hold, release := holdUp()
	if err := e.S.HostFunc(hold); err != nil {
		release()
		return err
	}
	short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
	err = sub.Close(short)
	cancel()
	release()
	if err := wantError("closing a busy group", err, context.DeadlineExceeded); err != nil {
		return err
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return err
	}
	if err := sub.Close(ctx); err != nil {
		return fmt.Errorf("closing again: %w", err)
	}
	return errors.Join(
		wantError("closing a third time", sub.Close(ctx), symmem.ErrClosed),
		wantError("Signal in a closed group", sub.Memory().Signal(e.S, 0, 0), symmem.ErrClosed),
		wantError("Wait in a closed group", sub.Memory().Wait(e.S, 0, 0), symmem.ErrClosed),
		wantError("Barrier in a closed group", sub.Memory().Barrier(e.S, 0), symmem.ErrClosed),
	)
}

// outputCase: ranks agree on whether a plan has an output, which is not used once it is closed.
func outputCase(ctx context.Context, e *Env) error {
	in, err := e.mapped(ctx, tensor.Float32, 100)
	if err != nil {
		return err
	}
	out, err := e.mapped(ctx, tensor.Float32, 100)
	if err != nil {
		return err
	}
	p, err := kernels.NewAllReduce(ctx, in, kernels.Sum, &kernels.AllReduceOptions{Out: out})
	if err != nil {
		return err
	}
	if e.R.WorldSize() > 1 {
		// The ranks agree on whether there is an output, and on the count that runs begin at.
		odd := &kernels.AllReduceOptions{Out: out}
		if e.R.Rank() == 0 {
			odd.Out = nil
		}
		_, err := kernels.NewAllReduce(ctx, in, kernels.Sum, odd)
		if err := wantError("a plan that is in place on one rank", err, symmem.ErrMismatch); err != nil {
			return err
		}
		odd = &kernels.AllReduceOptions{Out: out, FirstEpoch: uint32(e.R.Rank())}
		_, err = kernels.NewAllReduce(ctx, in, kernels.Sum, odd)
		if err := wantError("a plan that counts from somewhere else on one rank", err, symmem.ErrMismatch); err != nil {
			return err
		}
	}
	if err := errors.Join(p.Run(e.S), out.Close(ctx)); err != nil {
		return err
	}
	if err := wantError("Run with a closed output", p.Run(e.S), symmem.ErrClosed); err != nil {
		return err
	}
	return errors.Join(e.S.Synchronize(ctx), closeAll(ctx, p, in))
}
