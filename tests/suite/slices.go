package suite

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tensor"
)

// sliceCases: a slice, whichever way it was made, has all that the whole tensor has.
func sliceCases() []Case {
	return []Case{
		{Name: "slice/moves", Needs: []string{"transfers"}, Run: sliceMovesCase},
		{Name: "slice/transfer", Needs: []string{"transfers"}, Run: sliceTransferCase},
		{Name: "slice/window", Run: sliceWindowCase},
		{Name: "slice/empty", Run: emptySliceCase},
		{Name: "slice/closed", Run: closedSliceCase},
		{Name: "slice/refused_put_signal", Needs: []string{"transfers"}, Run: refusedPutSignalCase},
		{Name: "slice/host_slice", Run: hostSliceCase},
		{Name: "slice/host_slice_contiguous", Needs: []string{"contiguous"}, Run: hostSliceContiguousCase},
	}
}

// Tensors that are sliced have slicedRows rows of slicedColumns elements, and each part has partElements.
const slicedRows, slicedColumns, partElements = 12, 5, 25

// part is a slice of such a tensor.
type part struct {
	tensor.SymmetricTensor
	how   string
	first int64 // of its elements in the whole tensor
}

// partsOf gives parts of t, made in each way.
func partsOf(t tensor.SymmetricTensor) ([]part, error) {
	upper, err1 := t.Slice(1, 10)
	lower, err2 := t.Slice(2, slicedRows)
	slice, err3 := t.Slice(3, 8)
	sub, err4 := t.Sub(13, partElements)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return nil, err
	}
	sliceOfSlice, err1 := upper.Slice(3, 8)
	subOfSlice, err2 := lower.Sub(7, 5, 5)
	sliceOfSub, err3 := sub.Slice(0, partElements)
	return []part{
		{slice, "a slice", 15}, {sub, "a sub", 13}, {sliceOfSlice, "a slice of a slice", 20}, {subOfSlice, "a sub of a slice", 17}, {sliceOfSub, "a slice of a sub", 13},
	}, errors.Join(err1, err2, err3)
}

// earlyAndLateParts are parts of t that were made before its rendezvous, which this makes, and such that were made after it.
func earlyAndLateParts(ctx context.Context, t tensor.SymmetricTensor) ([]part, error) {
	early, err := partsOf(t)
	if err != nil {
		return nil, err
	}
	for i := range early {
		early[i].how += " from before the rendezvous"
	}
	if err := t.Rendezvous(ctx); err != nil {
		return nil, err
	}
	late, err := partsOf(t)
	return append(early, late...), err
}

// numbered is what a rank's whole tensor has.
func numbered(rank int) []int16 {
	all := make([]int16, slicedRows*slicedColumns)
	for i := range all {
		all[i] = int16(1000*(rank+1) + i)
	}
	return all
}

// blank is a whole tensor that has nothing.
func blank() []int16 {
	all := make([]int16, slicedRows*slicedColumns)
	for i := range all {
		all[i] = -1
	}
	return all
}

// holds fails unless t has at first what from has at its own first, and else nothing.
func holds(t tensor.SymmetricTensor, first int64, from []int16, at int64) error {
	got, err := tensor.ReadAll[int16](t.Local())
	if err != nil {
		return err
	}
	for i, x := range got {
		want := int16(-1)
		if k := int64(i) - first; k >= 0 && k < partElements {
			want = from[at+k]
		}
		if x != want {
			return fmt.Errorf("element %d is %d, expected %d", i, x, want)
		}
	}
	return nil
}

// sliceMovesCase puts from and to each kind of slice with a signal behind it, and gets what has come.
func sliceMovesCase(ctx context.Context, e *Env) error {
	box, err1 := e.R.Zeros(ctx, tensor.Int16, slicedRows, slicedColumns)
	src, err2 := e.R.Zeros(ctx, tensor.Int16, slicedRows, slicedColumns)
	dst, err3 := e.R.Zeros(ctx, tensor.Int16, slicedRows, slicedColumns)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	to, err := earlyAndLateParts(ctx, box)
	if err != nil {
		return err
	}
	from, err1 := partsOf(src) // neither has a rendezvous
	into, err2 := partsOf(dst)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	next, prev := ring(e)
	for i, remote := range to {
		local, back := from[(i+1)%len(from)], into[(i+2)%len(into)]
		what := fmt.Sprintf("%s, from %s, and back to %s", remote.how, local.how, back.how)
		if err := errors.Join(tensor.Write(box.Local(), blank(), 0), tensor.Write(src.Local(), numbered(e.R.Rank()), 0), tensor.Write(dst.Local(), blank(), 0), e.R.Barrier(ctx)); err != nil {
			return err
		}
		e.Skew()
		if err := errors.Join(remote.PutSignal(e.S, next, local, 1), remote.Wait(e.S, prev, 1), e.S.Synchronize(ctx)); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		if err := holds(box, remote.first, numbered(prev), local.first); err != nil {
			return fmt.Errorf("a put to %s: %w", what, err)
		}
		// What the next rank's box has came from here.
		if err := errors.Join(remote.Barrier(e.S, 0), remote.Get(e.S, next, back), remote.Signal(e.S, next, 2), remote.Wait(e.S, prev, 2), e.S.Synchronize(ctx)); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		if err := holds(dst, back.first, numbered(e.R.Rank()), local.first); err != nil {
			return fmt.Errorf("a get of %s: %w", what, err)
		}
		if err := e.R.Barrier(ctx); err != nil { // all have compared
			return err
		}
	}
	return closeAll(ctx, dst, src, box)
}

// sliceTransferCase prepares transfers between slices, several in one.
func sliceTransferCase(ctx context.Context, e *Env) error {
	box, err1 := e.R.Zeros(ctx, tensor.Int16, slicedRows, slicedColumns)
	src, err2 := e.R.Zeros(ctx, tensor.Int16, slicedRows, slicedColumns)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	to, err := earlyAndLateParts(ctx, box)
	if err != nil {
		return err
	}
	from, err := partsOf(src)
	if err != nil {
		return err
	}
	next, prev := ring(e)
	for i, remote := range to {
		local := from[(i+1)%len(from)]
		// Its first half and its second, by two pairs.
		const half = partElements / 2
		var pairs []tensor.Pair
		for _, span := range [][2]int64{{0, half}, {half, partElements - half}} {
			l, err1 := local.Sub(span[0], span[1])
			r, err2 := remote.Sub(span[0], span[1])
			if err := errors.Join(err1, err2); err != nil {
				return err
			}
			pairs = append(pairs, tensor.Pair{Local: l, Remote: r})
		}
		x, err := tensor.PrepareTransfer(backend.Write, next, pairs...)
		if err != nil {
			return err
		}
		if err := errors.Join(tensor.Write(box.Local(), blank(), 0), tensor.Write(src.Local(), numbered(e.R.Rank()), 0), e.R.Barrier(ctx)); err != nil {
			return err
		}
		if err := errors.Join(x.Post(e.S), x.WaitOn(e.S), remote.Signal(e.S, next, 3), remote.Wait(e.S, prev, 3), e.S.Synchronize(ctx), x.Close()); err != nil {
			return fmt.Errorf("%s from %s: %w", remote.how, local.how, err)
		}
		if err := errors.Join(holds(box, remote.first, numbered(prev), local.first), e.R.Barrier(ctx)); err != nil {
			return fmt.Errorf("%s from %s: %w", remote.how, local.how, err)
		}
	}
	return closeAll(ctx, src, box)
}

// sliceWindowCase: a slice tells the window of its memory and its place in it, which other ranks know by the same number.
func sliceWindowCase(ctx context.Context, e *Env) error {
	t, err := tensor.ZerosNamed(ctx, e.R.Memory(), "suite: sliced", tensor.Int16, slicedRows, slicedColumns)
	if err != nil {
		return err
	}
	early, err := t.Slice(3, 8)
	if err != nil {
		return err
	}
	_, _, err = early.Window()
	if err := wantError("Window before the rendezvous", err, errs.ErrNoRendezvous, `"suite: sliced"`); err != nil {
		return err
	}
	parts, err := earlyAndLateParts(ctx, t)
	if err != nil {
		return err
	}
	whole, at, err := t.Window()
	if err != nil || at != 0 || whole == nil || whole.Bytes() != t.Bytes() {
		return fmt.Errorf("the window of a tensor is %v, at %d (%v)", whole, at, err)
	}
	numbers, err := e.R.Group().AllGather(ctx, "number", binary.LittleEndian.AppendUint64(nil, whole.Number()))
	if err != nil {
		return err
	}
	for rank, b := range numbers {
		if n := binary.LittleEndian.Uint64(b); n != whole.Number() {
			return fmt.Errorf("the window is number %d here and %d on rank %d", whole.Number(), n, rank)
		}
	}
	handle, base, noHandle := whole.Handle(0)
	if noHandle != nil {
		if err := wantError("Handle", noHandle, symmem.ErrUnsupported); err != nil {
			return err
		}
	}
	for _, p := range parts {
		w, at, err := p.Window()
		if err != nil || w != whole || at != 2*p.first || at != p.Offset() {
			return fmt.Errorf("%s is at %d of window %v, offset %d; expected %d of %v (%v)", p.how, at, w, p.Offset(), 2*p.first, whole, err)
		}
		if _, found, offset, err := e.R.Memory().Find(p.Ptr()); err != nil || found != w || offset != at {
			return fmt.Errorf("%s is found at %d of window %v, and is at %d of %v (%v)", p.how, offset, found, at, w, err)
		}
		if p.Name() != t.Name() || p.Memory() != t.Memory() || p.Device() != t.Device() || p.Rank() != t.Rank() || p.WorldSize() != t.WorldSize() {
			return fmt.Errorf("%s is another's: %s", p.how, p)
		}
		for peer := range e.R.WorldSize() {
			there, err := w.Peer(peer, at)
			v, viewErr := p.Remote(peer)
			if errors.Is(err, errs.ErrNotReachable) && errors.Is(viewErr, errs.ErrNotReachable) {
				continue
			}
			if err := errors.Join(err, viewErr); err != nil {
				return err
			}
			if v.Ptr() != there || peer == e.R.Rank() && v.Ptr() != p.Ptr() || v.NumElements() != partElements {
				return fmt.Errorf("%s has %d elements at %s on rank %d, and its place in the window is at %s", p.how, v.NumElements(), v.Ptr(), peer, there)
			}
		}
		if h, inside, err := w.Handle(at); noHandle == nil && (err != nil || h != handle || inside != base+at) {
			return fmt.Errorf("%s is at %d of handle %#x; expected %d of %#x (%v)", p.how, inside, h, base+at, handle, err)
		}
		if err := p.Rendezvous(ctx); err != nil { // which is nothing, on this rank alone as well
			return err
		}
	}
	if err := t.Close(ctx); err != nil {
		return err
	}
	_, _, err = early.Window()
	return errors.Join(wantError("Window of a closed tensor's slice", err, symmem.ErrClosed, `"suite: sliced"`), wantError("Err", whole.Err(), symmem.ErrClosed))
}

// emptySliceCase: a slice without elements has no addresses, wherever in its tensor it is.
func emptySliceCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Int32, 6, 3)
	if err != nil {
		return err
	}
	for _, at := range []int64{0, 2, 6} {
		s, err := t.Slice(at, at)
		if err != nil {
			return err
		}
		w, offset, err := s.Window()
		if err != nil || w == nil || offset != 12*at {
			return fmt.Errorf("an empty slice at row %d is at byte %d of window %v (%v)", at, offset, w, err)
		}
		if !s.Ptr().IsNil() || !s.Local().Ptr().IsNil() {
			return fmt.Errorf("an empty slice is at %s, its view at %s", s.Ptr(), s.Local().Ptr())
		}
		for peer := range e.R.WorldSize() {
			if v, err := s.Remote(peer); err == nil && !v.Ptr().IsNil() || err != nil && !errors.Is(err, errs.ErrNotReachable) {
				return fmt.Errorf("rank %d's copy of an empty slice: %v (%w)", peer, v, err)
			}
		}
		if v, err := s.Contiguous(); e.R.Capabilities().Contiguous && (err != nil || !v.Ptr().IsNil() || v.NumElements() != 0) {
			return fmt.Errorf("the contiguous view of an empty slice: %v (%w)", v, err)
		}
		if p, err := s.Multicast(); err == nil && !p.IsNil() {
			return fmt.Errorf("the multicast address of an empty slice is %s", p)
		}
		if e.R.Capabilities().PeerPointers {
			table, err := s.PeerTable()
			if err != nil {
				return err
			}
			words := make([]byte, 8*e.R.WorldSize())
			if err := e.R.Device().CopyToHost(words, table); err != nil {
				return err
			}
			if string(words) != string(make([]byte, len(words))) {
				return fmt.Errorf("the peer table of an empty slice is % x", words)
			}
		}
		if e.R.Capabilities().Transfers {
			next, prev := ring(e)
			if err := errors.Join(s.PutSignal(e.S, next, s, 0), s.Wait(e.S, prev, 0), s.PutSignalWait(e.S, next, s, prev, 0), s.Get(e.S, next, s), e.S.Synchronize(ctx)); err != nil {
				return err
			}
		}
	}
	return t.Close(ctx)
}

// closedSliceCase: closing a slice ends it and slices of it, and neither what it is a slice of nor its neighbours.
func closedSliceCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Float32, 10, 4)
	if err != nil {
		return err
	}
	mid, err1 := t.Slice(2, 8)
	neighbour, err2 := t.Slice(2, 8)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	inner, err := mid.Slice(1, 3)
	if err != nil {
		return err
	}
	views := []*tensor.View{mid.Local(), inner.Local()}
	if err := mid.Close(ctx); err != nil {
		return err
	}
	var checks []error
	for i, s := range []tensor.SymmetricTensor{mid, inner} {
		for what, err := range everyRefusal(ctx, e, s) {
			checks = append(checks, wantError(fmt.Sprintf("%s of closed slice %d", what, i), err, symmem.ErrClosed))
		}
		checks = append(checks, wantError("Put of a closed slice", t.Put(e.S, 0, s), symmem.ErrClosed), wantError("Get to a closed slice", t.Get(e.S, 0, s), symmem.ErrClosed),
			wantError("PutSignal of a closed slice", t.PutSignal(e.S, 0, s, 0), symmem.ErrClosed),
			wantError("PutSignalWait of a closed slice", t.PutSignalWait(e.S, 0, s, 0, 0), symmem.ErrClosed),
			wantError("Read from the view of a closed slice", tensor.Read(views[i], make([]float32, 1), 0), symmem.ErrClosed))
	}
	checks = append(checks, wantError("Close of a closed slice", mid.Close(ctx), symmem.ErrClosed), t.Err(), neighbour.Err())
	if _, err := neighbour.Remote(e.R.Rank()); err != nil {
		checks = append(checks, fmt.Errorf("the neighbour of a closed slice: %w", err))
	}
	return errors.Join(append(checks, t.Close(ctx))...)
}

// everyRefusal is what each method of t says that needs memory and is not collective, t being closed or without rendezvous.
func everyRefusal(ctx context.Context, e *Env, t tensor.SymmetricTensor) map[string]error {
	first := func(_ any, err error) error { return err }
	_, _, window := t.Window()
	return map[string]error{
		"Window": window, "Remote": first(t.Remote(0)), "Multicast": first(t.Multicast()), "Contiguous": first(t.Contiguous()), "PeerTable": first(t.PeerTable()),
		"Put": t.Put(e.S, 0, t), "PutSignal": t.PutSignal(e.S, 0, t, 0), "Get": t.Get(e.S, 0, t),
		"Signal": t.Signal(e.S, 0, 0), "Wait": t.Wait(e.S, 0, 0), "Barrier": t.Barrier(e.S, 0),
		"PrepareTransfer": first(tensor.PrepareTransfer(backend.Write, 0, tensor.Pair{Local: t, Remote: t})),
	}
}

// refusedPutSignalCase: where either half cannot be, nothing is put and nothing is signalled.
func refusedPutSignalCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Int32, 40)
	if err != nil {
		return err
	}
	src, err := e.R.Zeros(ctx, tensor.Int32, 40)
	if err != nil {
		return err
	}
	box, err1 := t.Slice(10, 20)
	part, err2 := src.Slice(30, 40)
	short, err3 := src.Slice(0, 9)
	if err := errors.Join(err1, err2, err3, tensor.Write(part.Local(), []int32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 0)); err != nil {
		return err
	}
	me, channels := e.R.Rank(), e.R.Memory().Channels()
	err = errors.Join(
		wantArgument("PutSignal on channel -1", box.PutSignal(e.S, me, part, -1), "channel", "-1"),
		wantArgument("PutSignal beyond the last channel", box.PutSignal(e.S, me, part, channels), "channel", fmt.Sprint(channels)),
		wantArgument("PutSignal to a rank that does not exist", box.PutSignal(e.S, e.R.WorldSize(), part, 0), fmt.Sprint(e.R.WorldSize())),
		wantArgument("PutSignal of another size", box.PutSignal(e.S, me, short, 0), "9", "10"),
		wantArgument("PutSignal of nothing", box.PutSignal(e.S, me, nil, 0), "src"),
		wantArgument("PutSignalWait on channel -1", box.PutSignalWait(e.S, me, part, me, -1), "channel", "-1"),
		wantArgument("PutSignalWait to a rank that does not exist", box.PutSignalWait(e.S, e.R.WorldSize(), part, me, 0), "rank", fmt.Sprint(e.R.WorldSize())),
		wantArgument("PutSignalWait for rank -1", box.PutSignalWait(e.S, me, part, -1, 0), "from", "-1"),
		wantArgument("PutSignalWait for a rank that does not exist", box.PutSignalWait(e.S, me, part, e.R.WorldSize(), 0), "from", fmt.Sprint(e.R.WorldSize())),
		wantArgument("PutSignalWait of another size", box.PutSignalWait(e.S, me, short, me, 0), "9", "10"),
		wantArgument("PutSignalWait of nothing", box.PutSignalWait(e.S, me, nil, me, 0), "src"),
		e.S.Synchronize(ctx))
	if err != nil {
		return err
	}
	got, err := tensor.ReadAll[int32](t.Local())
	if err != nil {
		return err
	}
	for i, x := range got {
		if x != 0 {
			return fmt.Errorf("a put with a signal that was refused has written %d to element %d", x, i)
		}
	}
	// Had one of them signalled, this wait would take that signal, and what is put behind it would not have come yet.
	hold, release := holdUp()
	waiting, err := e.R.NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(e.S.HostFunc(hold), box.PutSignal(e.S, me, part, 0), box.Wait(waiting, me, 0)); err != nil {
		release()
		return err
	}
	came := make(chan error, 1)
	go func() { came <- waiting.Synchronize(ctx) }()
	select {
	case err := <-came:
		release()
		return fmt.Errorf("a put that was refused has signalled all the same (%w)", err)
	case <-time.After(20 * time.Millisecond):
	}
	release()
	if err := errors.Join(<-came, e.S.Synchronize(ctx), waiting.Close()); err != nil {
		return err
	}
	if got, err = tensor.ReadAll[int32](box.Local()); err != nil || got[9] != 10 {
		return fmt.Errorf("the put reads %v (%w)", got, err)
	}
	return closeAll(ctx, src, t)
}

// hostSliceCase: where the CPU can address memory, its elements are a Go slice; elsewhere the error says what to do.
func hostSliceCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Int64, 11, 7)
	if err != nil {
		return err
	}
	s, err := t.Slice(3, 8)
	if err != nil {
		return err
	}
	const n, before = 5 * 7, 3 * 7
	view := s.Local()
	mine, err := tensor.HostSlice[int64](view)
	if _, ok := e.R.Device().(device.HostMemory); !ok {
		return errors.Join(wantError("HostSlice of memory of a GPU", err, symmem.ErrUnsupported, "Read and Write"), t.Close(ctx))
	}
	if err != nil || len(mine) != n || cap(mine) != n {
		return fmt.Errorf("%d elements of %d as a Go slice of capacity %d: %w", len(mine), n, cap(mine), err)
	}
	me := e.R.Rank()
	for i := range mine {
		if mine[i] != 0 {
			return fmt.Errorf("element %d is %d at the beginning", i, mine[i])
		}
		mine[i] = int64(1000*(me+1) + i)
	}
	all, err := tensor.ReadAll[int64](t.Local())
	if err != nil {
		return err
	}
	for i, x := range all {
		want := int64(0)
		if k := i - before; k >= 0 && k < n {
			want = int64(1000*(me+1) + k)
		}
		if x != want {
			return fmt.Errorf("element %d reads %d, and %d was written to the slice", i, x, want)
		}
	}
	if err := e.R.Barrier(ctx); err != nil {
		return err
	}
	// Every rank reads every copy that has an address here, and writes an element of its own.
	for peer := range e.R.WorldSize() {
		v, err := s.Remote(peer)
		if errors.Is(err, errs.ErrNotReachable) {
			continue
		}
		theirs, sliceErr := tensor.HostSlice[int64](v)
		if err := errors.Join(err, sliceErr); err != nil {
			return err
		}
		if len(theirs) != n || theirs[n-1] != int64(1000*(peer+1)+n-1) {
			return fmt.Errorf("rank %d's copy has %d elements and ends on %d", peer, len(theirs), theirs[len(theirs)-1])
		}
		theirs[me] = int64(-1 - me)
	}
	if err := e.R.Barrier(ctx); err != nil {
		return err
	}
	for writer := range e.R.WorldSize() {
		if want := int64(-1 - writer); mine[writer] != want && (e.R.Capabilities().PeerPointers || writer == me) {
			return fmt.Errorf("element %d is %d, and rank %d has written %d", writer, mine[writer], writer, want)
		}
	}
	// What a peer puts is there for who has synchronized with its signal.
	if e.R.Capabilities().Transfers {
		next, prev := ring(e)
		box, err := e.mapped(ctx, tensor.Int64, n)
		if err != nil {
			return err
		}
		came, err := tensor.HostSlice[int64](box.Local())
		if err != nil {
			return err
		}
		mine[7] = int64(77 + me)
		if err := errors.Join(box.PutSignal(e.S, next, s, 0), box.Wait(e.S, prev, 0), e.S.Synchronize(ctx)); err != nil {
			return err
		}
		if came[7] != int64(77+prev) {
			return fmt.Errorf("rank %d has put %d, and the slice has %d", prev, 77+prev, came[7])
		}
		if err := box.Close(ctx); err != nil {
			return err
		}
	}
	if err := hostSliceOf16Bits(ctx, e); err != nil {
		return err
	}
	empty, err := s.Slice(5, 5)
	if err != nil {
		return err
	}
	nothing, err := tensor.HostSlice[int64](empty.Local())
	if err != nil || nothing == nil || len(nothing) != 0 {
		return fmt.Errorf("no elements are the slice %v (%w)", nothing, err)
	}
	first := func(_ any, err error) error { return err }
	err = errors.Join(
		wantArgument("HostSlice as another type", first(tensor.HostSlice[int32](view)), "i32", "i64"),
		wantArgument("HostSlice as the unsigned type", first(tensor.HostSlice[uint64](view)), "u64", "i64"),
		wantArgument("HostSlice of nothing", first(tensor.HostSlice[int64](nil)), "view is nil"),
		wantArgument("HostSlice of the zero view", first(tensor.HostSlice[int64](&tensor.View{})), "zero View"),
		s.Close(ctx), wantError("HostSlice of a closed slice", first(tensor.HostSlice[int64](view)), symmem.ErrClosed),
	)
	whole := t.Local()
	return errors.Join(err, t.Close(ctx), wantError("HostSlice of a closed tensor", first(tensor.HostSlice[int64](whole)), symmem.ErrClosed))
}

// hostSliceOf16Bits: 16-bit floats have Go types of their own.
func hostSliceOf16Bits(ctx context.Context, e *Env) error {
	t, err := e.R.Zeros(ctx, tensor.BFloat16, 9)
	if err != nil {
		return err
	}
	odd, err := t.Sub(3, 5)
	if err != nil {
		return err
	}
	b, err := tensor.HostSlice[tensor.BF16](odd.Local())
	if err != nil {
		return err
	}
	b[1] = tensor.BF16From(-2.5)
	all, err := tensor.ReadAll[tensor.BF16](t.Local())
	if err != nil || all[4].Float32() != -2.5 {
		return fmt.Errorf("-2.5 in a slice of bf16 reads %v (%w)", all, err)
	}
	_, f16 := tensor.HostSlice[tensor.F16](odd.Local())
	_, bits := tensor.HostSlice[uint16](odd.Local())
	return errors.Join(wantArgument("bf16 as f16", f16, "f16", "bf16"), wantArgument("bf16 as integers", bits, "u16", "bf16"), t.Close(ctx))
}

// hostSliceContiguousCase: all ranks' copies are one Go slice where they end on the next one's first byte, and else one each.
func hostSliceContiguousCase(ctx context.Context, e *Env) error {
	if _, ok := e.R.Device().(device.HostMemory); !ok {
		return nil
	}
	g, err := granularity(ctx, e)
	if err != nil {
		return err
	}
	t, err := e.mapped(ctx, tensor.Int32, g/4)
	if err != nil {
		return err
	}
	s, err := t.Sub(3, 8)
	if err != nil {
		return err
	}
	if err := errors.Join(tensor.Write(s.Local(), []int32{int32(40 + e.R.Rank())}, 0), e.R.Barrier(ctx)); err != nil {
		return err
	}
	v, err := t.Contiguous()
	if err != nil {
		return err
	}
	all, err := tensor.HostSlice[int32](v)
	if err != nil || int64(len(all)) != g/4*int64(e.R.WorldSize()) {
		return fmt.Errorf("%d ranks' copies of %d elements are a slice of %d: %w", e.R.WorldSize(), g/4, len(all), err)
	}
	parts, err := s.Contiguous()
	if err != nil {
		return err
	}
	_, err = tensor.HostSlice[int32](parts)
	if e.R.WorldSize() > 1 {
		err = wantArgument("HostSlice of a view with gaps", err, "Index", fmt.Sprint(g/4))
	}
	if err != nil {
		return err
	}
	for peer := range e.R.WorldSize() {
		row, err := parts.Index(int64(peer))
		if err != nil {
			return err
		}
		one, err := tensor.HostSlice[int32](row)
		if err != nil || len(one) != 8 || one[0] != int32(40+peer) || all[int64(peer)*g/4+3] != one[0] {
			return fmt.Errorf("rank %d's part is %v (%w)", peer, one, err)
		}
	}
	return errors.Join(e.R.Barrier(ctx), t.Close(ctx))
}
