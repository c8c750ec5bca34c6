package suite

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// transferCases are about put, get and prepared transfers.
func transferCases(short bool) []Case {
	needs, puts := []string{"transfers"}, []string{Puts}
	cases := []Case{
		{Name: "transfer/ring_put", Needs: puts, Run: ringPutCase},
		{Name: "transfer/ring_get", Needs: needs, Run: ringGetCase},
		{Name: "transfer/all_to_all", Needs: puts, Run: allToAllCase},
		{Name: "transfer/prepared_write", Needs: puts, Run: func(ctx context.Context, e *Env) error { return preparedCase(ctx, e, backend.Write) }},
		{Name: "transfer/prepared_read", Needs: needs, Run: func(ctx context.Context, e *Env) error { return preparedCase(ctx, e, backend.Read) }},
		{Name: "transfer/prepared_graph", Needs: append(puts, "graphs"), Run: preparedGraphCase},
		{Name: "transfer/wait_on", Needs: needs, Run: waitOnCase},
		{Name: "transfer/states", Needs: puts, Run: transferStatesCase},
		{Name: "transfer/errors", Needs: needs, Run: transferErrorsCase},
		{Name: "transfer/source_closed", Needs: puts, Run: sourceClosedCase},
		{Name: "transfer/closed_sides", Needs: needs, Run: closedSidesCase},
		{Name: "transfer/closed_graph", Needs: append(puts, "graphs"), Run: closedGraphCase},
	}
	sizes := []int64{1, 15, 16, 17, 4095, 4097, 1 << 20}
	if !short {
		sizes = append(sizes, 16<<20)
	}
	for _, n := range sizes {
		cases = append(cases, Case{Name: fmt.Sprintf("transfer/put_get/%d", n), Needs: needs, Run: func(ctx context.Context, e *Env) error {
			return putGetCase(ctx, e, n)
		}})
	}
	return cases
}

func ring(e *Env) (next, prev int) {
	n := e.R.WorldSize()
	return (e.R.Rank() + 1) % n, (e.R.Rank() + n - 1) % n
}

// pattern is n bytes that only this rank and round have.
func pattern(rank, round int, n int64) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8 + rank*31 + round*101)
	}
	return b
}

// ringPutCase passes a message around the ring until it is back, with a signal at each hop and nothing else.
func ringPutCase(ctx context.Context, e *Env) error {
	const n = 1000
	next, prev := ring(e)
	box, err := newGuarded(ctx, e, tensor.Uint8, n)
	if err != nil {
		return err
	}
	for round := range 3 {
		if e.R.Rank() == 0 {
			if err := writeBytes(box.Local(), pattern(0, round, n)); err != nil {
				return err
			}
			if err := errors.Join(box.Put(e.S, next, box), box.Signal(e.S, next, 2), box.Wait(e.S, prev, 2)); err != nil {
				return err
			}
		} else if err := errors.Join(box.Wait(e.S, prev, 2), box.Put(e.S, next, box), box.Signal(e.S, next, 2)); err != nil {
			return err
		}
		if err := e.S.Synchronize(ctx); err != nil {
			return err
		}
		got, err := readBytes(box.Local())
		if err != nil {
			return err
		}
		if err := sameBytes(tensor.Uint8, got, pattern(0, round, n)); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if err := e.R.Barrier(ctx); err != nil {
			return err
		}
	}
	if err := box.bands(); err != nil {
		return err
	}
	return box.Close(ctx)
}

func ringGetCase(ctx context.Context, e *Env) error {
	const n = 5000
	_, prev := ring(e)
	src, err := newGuarded(ctx, e, tensor.Uint8, n)
	if err != nil {
		return err
	}
	dst, err := newGuarded(ctx, e, tensor.Uint8, n)
	if err != nil {
		return err
	}
	for round := range 3 {
		if err := writeBytes(src.Local(), pattern(e.R.Rank(), round, n)); err != nil {
			return err
		}
		e.Skew()
		if err := errors.Join(src.Barrier(e.S, 0), src.Get(e.S, prev, dst), src.Barrier(e.S, 0), e.S.Synchronize(ctx)); err != nil {
			return err
		}
		got, err := readBytes(dst.Local())
		if err != nil {
			return err
		}
		if err := sameBytes(tensor.Uint8, got, pattern(prev, round, n)); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
	}
	if err := errors.Join(src.bands(), dst.bands()); err != nil {
		return err
	}
	return closeAll(ctx, dst, src)
}

// allToAllCase puts a block to every rank and waits for one from each.
func allToAllCase(ctx context.Context, e *Env) error {
	const n = 333
	w := int64(e.R.WorldSize())
	src, err := newGuarded(ctx, e, tensor.Uint8, n*w)
	if err != nil {
		return err
	}
	dst, err := newGuarded(ctx, e, tensor.Uint8, n*w)
	if err != nil {
		return err
	}
	for round := range 5 {
		for peer := range w {
			from, err := src.Sub(peer*n, n)
			if err != nil {
				return err
			}
			if err := writeBytes(from.Local(), pattern(e.R.Rank()*64+int(peer), round, n)); err != nil {
				return err
			}
		}
		e.Skew()
		for peer := range w {
			from, err := src.Sub(peer*n, n)
			if err != nil {
				return err
			}
			to, err := dst.Sub(int64(e.R.Rank())*n, n)
			if err != nil {
				return err
			}
			if err := errors.Join(to.Put(e.S, int(peer), from), to.Signal(e.S, int(peer), 5)); err != nil {
				return err
			}
		}
		for peer := range int(w) {
			if err := dst.Wait(e.S, peer, 5); err != nil {
				return err
			}
		}
		if err := e.S.Synchronize(ctx); err != nil {
			return err
		}
		for peer := range w {
			part, err := dst.Sub(peer*n, n)
			if err != nil {
				return err
			}
			got, err := readBytes(part.Local())
			if err != nil {
				return err
			}
			if err := sameBytes(tensor.Uint8, got, pattern(int(peer)*64+e.R.Rank(), round, n)); err != nil {
				return fmt.Errorf("round %d, from rank %d: %w", round, peer, err)
			}
		}
		if err := errors.Join(dst.Barrier(e.S, 6), e.S.Synchronize(ctx)); err != nil {
			return err
		}
	}
	if err := errors.Join(src.bands(), dst.bands()); err != nil {
		return err
	}
	return closeAll(ctx, dst, src)
}

func putGetCase(ctx context.Context, e *Env, n int64) error {
	next, prev := ring(e)
	box, err := newGuarded(ctx, e, tensor.Uint8, n)
	if err != nil {
		return err
	}
	mine, err := newGuarded(ctx, e, tensor.Uint8, n)
	if err != nil {
		return err
	}
	if err := writeBytes(mine.Local(), pattern(e.R.Rank(), 0, n)); err != nil {
		return err
	}
	e.Skew()
	if err := errors.Join(box.Put(e.S, next, mine), box.Signal(e.S, next, 0), box.Wait(e.S, prev, 0), e.S.Synchronize(ctx)); err != nil {
		return err
	}
	got, err := readBytes(box.Local())
	if err != nil {
		return err
	}
	if err := sameBytes(tensor.Uint8, got, pattern(prev, 0, n)); err != nil {
		return fmt.Errorf("put: %w", err)
	}
	// What the next rank's box has came from here.
	if err := errors.Join(box.Barrier(e.S, 0), box.Get(e.S, next, mine), box.Barrier(e.S, 0), e.S.Synchronize(ctx)); err != nil {
		return err
	}
	if got, err = readBytes(mine.Local()); err != nil {
		return err
	}
	if err := sameBytes(tensor.Uint8, got, pattern(e.R.Rank(), 0, n)); err != nil {
		return fmt.Errorf("get: %w", err)
	}
	if err := errors.Join(box.bands(), mine.bands()); err != nil {
		return err
	}
	return closeAll(ctx, mine, box)
}

// preparedCase posts one transfer of several blocks many times.
func preparedCase(ctx context.Context, e *Env, op backend.TransferOp) error {
	next, prev := ring(e)
	const n = 700
	local, err := newGuarded(ctx, e, tensor.Uint8, 4*n)
	if err != nil {
		return err
	}
	remote, err := newGuarded(ctx, e, tensor.Uint8, 4*n)
	if err != nil {
		return err
	}
	// Blocks 0, 3 and 1, to the places 1, 0 and 3, one of them empty.
	var pairs []tensor.Pair
	for _, b := range []struct{ local, remote, n int64 }{{0, n, n}, {3 * n, 0, n}, {n, 3 * n, n}, {2 * n, 2 * n, 0}} {
		l, err := local.Sub(b.local, b.n)
		if err != nil {
			return err
		}
		r, err := remote.Sub(b.remote, b.n)
		if err != nil {
			return err
		}
		pairs = append(pairs, tensor.Pair{Local: l, Remote: r})
	}
	x, err := tensor.PrepareTransfer(op, next, pairs...)
	if err != nil {
		return err
	}
	from, to, source := local, remote, prev
	if op == backend.Read {
		from, to, source = remote, local, next
	}
	for round := range 20 {
		if err := writeBytes(from.Local(), pattern(e.R.Rank(), round, 4*n)); err != nil {
			return err
		}
		e.Skew()
		if err := errors.Join(from.Barrier(e.S, 0), x.Post(e.S), x.WaitOn(e.S), from.Barrier(e.S, 0)); err != nil {
			return err
		}
		if err := x.Wait(ctx); err != nil {
			return err
		}
		if err := e.S.Synchronize(ctx); err != nil {
			return err
		}
		if st, err := x.Status(); st != memory.TransferDone || err != nil {
			return fmt.Errorf("after waiting, the transfer is %v (%v)", st, err)
		}
		got, err := readBytes(to.Local())
		if err != nil {
			return err
		}
		src := pattern(source, round, 4*n)
		for _, p := range [][2]int64{{0, n}, {3 * n, 0}, {n, 3 * n}} {
			at, was := p[1], p[0]
			if op == backend.Read {
				at, was = p[0], p[1]
			}
			if err := sameBytes(tensor.Uint8, got[at:at+n], src[was:was+n]); err != nil {
				return fmt.Errorf("round %d, block at %d: %w", round, at, err)
			}
		}
		if err := e.R.Barrier(ctx); err != nil {
			return err
		}
	}
	// Once it is closed it is refused, and moves nothing.
	before, err := readBytes(to.Local())
	if err != nil {
		return err
	}
	if err := errors.Join(x.Close(), writeBytes(from.Local(), pattern(e.R.Rank(), 20, 4*n)), e.R.Barrier(ctx)); err != nil {
		return err
	}
	for what, err := range map[string]error{"Post": x.Post(e.S), "Close": x.Close()} {
		if err := wantError(what+" of a closed transfer", err, symmem.ErrClosed); err != nil {
			return err
		}
	}
	if err := errors.Join(e.S.Synchronize(ctx), e.R.Barrier(ctx)); err != nil {
		return err
	}
	after, err := readBytes(to.Local())
	if err != nil {
		return err
	}
	if err := errors.Join(sameBytes(tensor.Uint8, after, before), local.bands(), remote.bands()); err != nil {
		return err
	}
	return closeAll(ctx, remote, local)
}

// preparedGraphCase captures a post with its signal and replays it.
func preparedGraphCase(ctx context.Context, e *Env) error {
	next, prev := ring(e)
	const n = 3000
	src, err := newGuarded(ctx, e, tensor.Uint8, n)
	if err != nil {
		return err
	}
	dst, err := newGuarded(ctx, e, tensor.Uint8, n)
	if err != nil {
		return err
	}
	x, err := tensor.PrepareTransfer(backend.Write, next, tensor.Pair{Local: src, Remote: dst})
	if err != nil {
		return err
	}
	if err := e.S.BeginCapture(); err != nil {
		return err
	}
	if err := errors.Join(x.Post(e.S), x.WaitOn(e.S), dst.Signal(e.S, next, 1), dst.Wait(e.S, prev, 1)); err != nil {
		return err
	}
	g, err := e.S.EndCapture()
	if err != nil {
		return err
	}
	if err := wantError("Wait for a captured post", x.Wait(ctx), errs.ErrNotPosted); err != nil {
		return err
	}
	for round := range 100 {
		if err := writeBytes(src.Local(), pattern(e.R.Rank(), round, n)); err != nil {
			return err
		}
		if err := errors.Join(g.Launch(e.S), e.S.Synchronize(ctx)); err != nil {
			return err
		}
		got, err := readBytes(dst.Local())
		if err != nil {
			return err
		}
		if err := sameBytes(tensor.Uint8, got, pattern(prev, round, n)); err != nil {
			return fmt.Errorf("replay %d: %w", round, err)
		}
		// The next round must not overwrite what a slower rank still compares.
		if err := errors.Join(dst.Barrier(e.S, 1), e.S.Synchronize(ctx)); err != nil {
			return err
		}
	}
	if err := errors.Join(g.Close(), x.Close()); err != nil {
		return err
	}
	return closeAll(ctx, dst, src)
}

// waitOnCase: a stream that waits for a transfer posted on another one goes on when the data is there, and not before.
func waitOnCase(ctx context.Context, e *Env) error {
	_, prev := ring(e)
	const n = 70000
	src, err := newGuarded(ctx, e, tensor.Uint8, n)
	if err != nil {
		return err
	}
	dst, err := newGuarded(ctx, e, tensor.Uint8, n)
	if err != nil {
		return err
	}
	kept, err := newGuarded(ctx, e, tensor.Uint8, n)
	if err != nil {
		return err
	}
	if err := errors.Join(writeBytes(src.Local(), pattern(e.R.Rank(), 0, n)), e.R.Barrier(ctx)); err != nil {
		return err
	}
	x, err := tensor.PrepareTransfer(backend.Read, prev, tensor.Pair{Local: dst, Remote: src})
	if err != nil {
		return err
	}
	other, err := e.R.NewStream()
	if err != nil {
		return err
	}
	hold, release := holdUp()
	err = errors.Join(e.S.HostFunc(hold), x.Post(e.S), x.WaitOn(other), other.Copy(kept.Ptr(), dst.Ptr(), n))
	time.Sleep(20 * time.Millisecond)
	done, queryErr := other.Query()
	release()
	if err := errors.Join(err, queryErr, other.Synchronize(ctx), e.S.Synchronize(ctx)); err != nil {
		return err
	}
	if done {
		return errors.New("a stream that waits for a transfer went on before it was posted")
	}
	got, err := readBytes(kept.Local())
	if err != nil {
		return err
	}
	if err := sameBytes(tensor.Uint8, got, pattern(prev, 0, n)); err != nil {
		return err
	}
	if err := errors.Join(x.Close(), other.Close(), e.R.Barrier(ctx)); err != nil {
		return err
	}
	return closeAll(ctx, kept, dst, src)
}

// transferStatesCase walks a transfer through its states.
func transferStatesCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Float32, 100)
	if err != nil {
		return err
	}
	x, err := tensor.PrepareTransfer(backend.Write, e.R.Rank(), tensor.Pair{Local: t, Remote: t})
	if err != nil {
		return err
	}
	if st, err := x.Status(); st != memory.TransferPrepared || err != nil {
		return fmt.Errorf("a new transfer is %v (%v)", st, err)
	}
	if err := wantError("Wait before Post", x.Wait(ctx), errs.ErrNotPosted); err != nil {
		return err
	}
	if err := wantError("WaitOn before Post", x.WaitOn(e.S), errs.ErrNotPosted); err != nil {
		return err
	}
	gate := make(chan struct{})
	if err := errors.Join(e.S.HostFunc(func() { <-gate }), x.Post(e.S)); err != nil {
		close(gate)
		return err
	}
	st, statusErr := x.Status()
	again := x.Post(e.S)
	closing := x.Close()
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	waited := x.Wait(short)
	close(gate)
	if st != memory.TransferInProgress || statusErr != nil {
		return fmt.Errorf("a posted transfer behind other work is %v (%v)", st, statusErr)
	}
	for what, err := range map[string]error{"a second Post": again, "Close": closing} {
		if err := wantError(what+" in progress", err, errs.ErrInProgress); err != nil {
			return err
		}
	}
	if err := wantError("Wait with a context that ends", waited, context.DeadlineExceeded); err != nil {
		return err
	}
	if err := x.Wait(ctx); err != nil {
		return err
	}
	if err := errors.Join(x.Post(e.S), x.Wait(ctx), x.Close()); err != nil {
		return err
	}
	for what, err := range map[string]error{"Post": x.Post(e.S), "Wait": x.Wait(ctx), "WaitOn": x.WaitOn(e.S), "Close": x.Close()} {
		if err := wantError(what+" of a closed transfer", err, symmem.ErrClosed); err != nil {
			return err
		}
	}
	if _, err := x.Status(); !errors.Is(err, symmem.ErrClosed) {
		return fmt.Errorf("Status of a closed transfer: %v", err)
	}
	return t.Close(ctx)
}

// transferErrorsCase: each way to ask for a transfer that cannot be is an error of its own.
func transferErrorsCase(ctx context.Context, e *Env) error {
	m := e.R.Memory()
	t, err := e.mapped(ctx, tensor.Float32, 100)
	if err != nil {
		return err
	}
	other, err := e.mapped(ctx, tensor.Int32, 100)
	if err != nil {
		return err
	}
	longer, err := e.mapped(ctx, tensor.Float32, 101)
	if err != nil {
		return err
	}
	alone, err := e.R.Zeros(ctx, tensor.Float32, 100)
	if err != nil {
		return err
	}
	gone, err := e.R.Zeros(ctx, tensor.Float32, 100)
	if err != nil {
		return err
	}
	if err := gone.Close(ctx); err != nil {
		return err
	}
	prepare := func(op backend.TransferOp, peer int, pairs ...tensor.Pair) error {
		x, err := tensor.PrepareTransfer(op, peer, pairs...)
		if err == nil {
			err = errors.Join(errors.New("no error"), x.Close())
		}
		return err
	}
	pair := func(l, r tensor.SymmetricTensor) tensor.Pair { return tensor.Pair{Local: l, Remote: r} }
	checks := []error{
		wantArgument("an empty list", prepare(backend.Write, 0)),
		wantArgument("an unknown direction", prepare(7, 0, pair(t, t)), "7"),
		wantArgument("a rank that does not exist", prepare(backend.Write, e.R.WorldSize(), pair(t, t)), fmt.Sprint(e.R.WorldSize())),
		wantArgument("a negative rank", prepare(backend.Read, -1, pair(t, t)), "-1"),
		wantArgument("dtypes that differ", prepare(backend.Write, 0, pair(other, t)), "i32", "f32"),
		wantArgument("sizes that differ", prepare(backend.Write, 0, pair(longer, t)), "101", "100"),
		wantArgument("no local side", prepare(backend.Write, 0, pair(nil, t))),
		wantArgument("no remote side", prepare(backend.Write, 0, pair(t, nil))),
		wantError("no rendezvous", prepare(backend.Write, 0, pair(t, alone)), errs.ErrNoRendezvous),
		wantError("a closed local side", prepare(backend.Write, 0, pair(gone, t)), symmem.ErrClosed),
		wantError("a closed remote side", prepare(backend.Write, 0, pair(t, gone)), symmem.ErrClosed),
		wantArgument("Put of another dtype", t.Put(e.S, 0, other), "i32", "f32"),
		wantArgument("Get of another size", t.Get(e.S, 0, longer), "101", "100"),
		wantArgument("Put to a rank that does not exist", t.Put(e.S, e.R.WorldSize(), t)),
		wantError("Put before rendezvous", alone.Put(e.S, 0, t), errs.ErrNoRendezvous),
	}
	p, free, err := private(e, 400)
	if err != nil {
		return err
	}
	w, _, err := t.Window()
	if err != nil {
		return err
	}
	block := func(local, bytes, offset int64) error {
		b := memory.TransferBlock{Local: t.Ptr().Add(local), Window: w, Offset: offset, Bytes: bytes}
		_, err := m.PrepareTransfer(backend.Write, 0, []memory.TransferBlock{b})
		return err
	}
	_, empty := m.PrepareTransfer(backend.Write, 0, nil)
	_, err = m.PrepareTransfer(backend.Write, 0, []memory.TransferBlock{{Local: p, Window: w, Bytes: 400}})
	checks = append(checks,
		wantArgument("no blocks", empty),
		wantError("memory that is not registered", err, errs.ErrNotSymmetric),
		wantArgument("a negative size", block(0, -1, 0), "-1"),
		wantArgument("a size beyond the window", block(0, 401, 0), "401"),
		wantArgument("a negative offset", block(0, 8, -8), "-8"),
		wantArgument("an offset beyond the window", block(0, 8, 396), "396"),
		wantArgument("a local range beyond the allocation", block(396, 8, 0), "8"),
		free())
	// A tensor of another group.
	sub, err := e.R.Sub(ctx, []int{e.R.Rank()})
	if err != nil {
		return err
	}
	foreign, err := sub.Zeros(ctx, tensor.Float32, 100)
	if err != nil {
		return err
	}
	foreignHalf, err1 := foreign.Slice(50, 100)
	half, err2 := t.Slice(50, 100)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	checks = append(checks,
		wantError("a tensor of another group", prepare(backend.Write, 0, pair(foreign, t)), errs.ErrNotSymmetric),
		wantError("Put of a tensor of another group", t.Put(e.S, 0, foreign), errs.ErrNotSymmetric),
		wantError("Put of a slice of another group", half.Put(e.S, 0, foreignHalf), errs.ErrNotSymmetric, "src is memory of another group"),
		wantError("PutSignal of a slice of another group", half.PutSignal(e.S, 0, foreignHalf, 0), errs.ErrNotSymmetric),
		wantError("Get to a slice of another group", half.Get(e.S, 0, foreignHalf), errs.ErrNotSymmetric, "dst is memory of another group"),
		wantError("a slice of another group", prepare(backend.Read, 0, pair(foreignHalf, half)), errs.ErrNotSymmetric),
		wantError("PutSignal before rendezvous", alone.PutSignal(e.S, 0, t, 0), errs.ErrNoRendezvous),
		wantError("PutSignalWait before rendezvous", alone.PutSignalWait(e.S, 0, t, 0, 0), errs.ErrNoRendezvous),
		wantError("PutSignalWait of a closed tensor", t.PutSignalWait(e.S, 0, gone, 0, 0), symmem.ErrClosed),
		wantArgument("PutSignal of another dtype", t.PutSignal(e.S, 0, other, 0), "i32", "f32"),
		wantError("PutSignal of a closed tensor", t.PutSignal(e.S, 0, gone, 0), symmem.ErrClosed),
		foreign.Close(ctx), sub.Close(ctx))
	if err := errors.Join(checks...); err != nil {
		return err
	}
	return closeAll(ctx, alone, longer, other, t)
}

// sourceClosedCase closes the sources of a put and of a posted transfer, with and without a rendezvous behind them, while both are under
// way: all of the data arrives.
func sourceClosedCase(ctx context.Context, e *Env) error {
	const n = 1 << 20
	next, prev := ring(e)
	for _, rendezvous := range []bool{false, true} {
		box, err := e.mapped(ctx, tensor.Uint8, 2*n)
		if err != nil {
			return err
		}
		first, err1 := box.Slice(0, n)
		second, err2 := box.Slice(n, 2*n)
		put, err3 := e.R.Zeros(ctx, tensor.Uint8, n)
		posted, err4 := e.R.Zeros(ctx, tensor.Uint8, n)
		if err := errors.Join(err1, err2, err3, err4); err != nil {
			return err
		}
		if rendezvous {
			if err := errors.Join(put.Rendezvous(ctx), posted.Rendezvous(ctx)); err != nil {
				return err
			}
		}
		if err := errors.Join(writeBytes(put.Local(), pattern(e.R.Rank(), 1, n)), writeBytes(posted.Local(), pattern(e.R.Rank(), 2, n))); err != nil {
			return err
		}
		x, err := tensor.PrepareTransfer(backend.Write, next, tensor.Pair{Local: posted, Remote: second})
		if err != nil {
			return err
		}
		hold, release := holdUp()
		err = errors.Join(e.S.HostFunc(hold), first.Put(e.S, next, put), x.Post(e.S), x.WaitOn(e.S), box.Signal(e.S, next, 3), box.Wait(e.S, prev, 3))
		time.AfterFunc(10*time.Millisecond, release)
		if err := errors.Join(err, put.Close(ctx), posted.Close(ctx), e.S.Synchronize(ctx), x.Close()); err != nil {
			return fmt.Errorf("rendezvous %t: %w", rendezvous, err)
		}
		got, err := readBytes(box.Local())
		if err != nil {
			return err
		}
		if err := sameBytes(tensor.Uint8, got, append(pattern(prev, 1, n), pattern(prev, 2, n)...)); err != nil {
			return fmt.Errorf("rendezvous %t: %w", rendezvous, err)
		}
		if err := box.Close(ctx); err != nil {
			return err
		}
	}
	return nil
}

// closedSidesCase: a transfer of which either side was closed is not posted.
func closedSidesCase(ctx context.Context, e *Env) error {
	next, _ := ring(e)
	for _, peer := range []int{e.R.Rank(), next} {
		for _, op := range []backend.TransferOp{backend.Write, backend.Read} {
			box, err := e.mapped(ctx, tensor.Uint8, 100)
			if err != nil {
				return err
			}
			other, err := e.mapped(ctx, tensor.Uint8, 100)
			if err != nil {
				return err
			}
			alone, err := e.R.Zeros(ctx, tensor.Uint8, 100)
			if err != nil {
				return err
			}
			local, err := tensor.PrepareTransfer(op, peer, tensor.Pair{Local: alone, Remote: box})
			if err != nil {
				return err
			}
			remote, err := tensor.PrepareTransfer(op, peer, tensor.Pair{Local: alone, Remote: other})
			if err != nil {
				return err
			}
			// Ranks write each other at the same time: the bytes do not matter, and nobody closes before all have been here.
			if err := errors.Join(local.Post(e.S), remote.Post(e.S), e.S.Synchronize(ctx), local.Wait(ctx), remote.Wait(ctx), e.R.Barrier(ctx)); err != nil {
				return err
			}
			if err := other.Close(ctx); err != nil {
				return err
			}
			if err := wantError("Post with a closed remote side", remote.Post(e.S), symmem.ErrClosed); err != nil {
				return fmt.Errorf("%s of rank %d: %w", op, peer, err)
			}
			if err := errors.Join(local.Post(e.S), local.Wait(ctx), e.R.Barrier(ctx), alone.Close(ctx)); err != nil {
				return err
			}
			if err := wantError("Post with a closed local side", local.Post(e.S), symmem.ErrClosed, "blocks[0]"); err != nil {
				return fmt.Errorf("%s of rank %d: %w", op, peer, err)
			}
			if err := errors.Join(e.S.Synchronize(ctx), local.Close(), remote.Close(), box.Close(ctx)); err != nil {
				return err
			}
		}
	}
	return nil
}

// closedGraphCase launches a graph of which a source, or a transfer, was closed: an error of the stream, and later work goes on. A GPU that
// follows pointers by itself cannot be kept from it.
func closedGraphCase(ctx context.Context, e *Env) error {
	if e.R.Capabilities().PeerPointers && e.R.Device().Kind() != device.Host {
		return nil
	}
	next, _ := ring(e)
	box, err := e.mapped(ctx, tensor.Uint8, 100)
	if err != nil {
		return err
	}
	_, err = box.Remote(next)
	far := errors.Is(err, errs.ErrNotReachable)
	for _, what := range []string{"put", "transfer", "closed transfer"} {
		alone, err := e.R.Zeros(ctx, tensor.Uint8, 100)
		if err != nil {
			return err
		}
		x, err := tensor.PrepareTransfer(backend.Write, next, tensor.Pair{Local: alone, Remote: box})
		if err != nil {
			return err
		}
		if err := e.S.BeginCapture(); err != nil {
			return err
		}
		if what == "put" {
			err = box.Put(e.S, next, alone)
		} else {
			err = errors.Join(x.Post(e.S), x.WaitOn(e.S))
		}
		g, endErr := e.S.EndCapture()
		if err := errors.Join(err, endErr); err != nil {
			return err
		}
		if err := errors.Join(g.Launch(e.S), e.S.Synchronize(ctx)); err != nil {
			return err
		}
		if what != "put" {
			if err := wantError("WaitOn outside of the graph that has the post", x.WaitOn(e.S), symmem.ErrNotPosted, "recorded in a graph"); err != nil {
				return err
			}
		}
		if what == "closed transfer" {
			err = x.Close()
		} else {
			err = alone.Close(ctx)
		}
		if err != nil {
			return err
		}
		if far || e.R.Device().Kind() == device.Host { // else the GPU itself copies from the address
			if err := g.Launch(e.S); err != nil {
				return err
			}
			err := e.S.Synchronize(ctx)
			switch {
			case far || what != "closed transfer": // a copy needs nothing of a transfer that was closed
				if err := wantError("launching a graph with a "+what+" that was closed", err, symmem.ErrClosed); err != nil {
					return err
				}
			case err != nil:
				return err
			}
		}
		if what == "closed transfer" {
			err = alone.Close(ctx)
		} else {
			err = x.Close()
		}
		if err := errors.Join(err, g.Close(), box.Barrier(e.S, 0), e.S.Synchronize(ctx)); err != nil {
			return err
		}
	}
	return box.Close(ctx)
}
