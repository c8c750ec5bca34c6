package suite

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// heapCases: tensors of a symmetric heap.
func heapCases(kind device.Kind, backend string, world int) []Case {
	cases := []Case{
		{Name: "heap/tensors", Run: heapTensorsCase},
		{Name: "heap/moves", Needs: []string{"transfers"}, Run: heapMovesCase},
		{Name: "heap/rank_all_reduce", Needs: needsOf(kernels.Auto), Run: heapRankCase},
		{Name: "heap/late_writer", Needs: []string{"transfers"}, MinWorld: 2, Run: heapLateWriterCase},
		{Name: "heap/late_reader", Needs: []string{"transfers"}, MinWorld: 2, Run: heapLateReaderCase},
		{Name: "heap/busy", Needs: []string{"transfers"}, Run: heapBusyCase},
		{Name: "heap/full", Run: heapFullCase},
		{Name: "heap/closed", Run: heapClosedCase},
		{Name: "heap/closed_graph", Needs: []string{"transfers", "graphs"}, Run: heapClosedGraphCase},
		{Name: "heap/bad_input", Run: heapBadInputCase},
		{Name: "heap/one_rank_fails", MinWorld: 2, Run: heapOneFailsCase},
		{Name: "heap/programs", Needs: []string{"transfers"}, Run: heapProgramsCase},
		{Name: "heap/ahead", MinWorld: 2, Run: heapAheadCase},
		{Name: "heap/table", Needs: []string{"peer_pointers"}, Run: heapTableCase},
	}
	for _, alg := range ownForms("NewAllReduce", kind, backend) {
		if alg.Backend() != "" || alg.NeedsMulticast() || !kernels.Supported(kind, alg, tensor.Float32, kernels.Sum, world) {
			continue
		}
		cases = append(cases, Case{Name: "heap/all_reduce/" + alg.String(), Needs: needsOn(kind, alg), Run: func(ctx context.Context, e *Env) error {
			return heapAllReduceCase(ctx, e, alg)
		}})
	}
	for _, where := range []string{"check", "reclaim", "plan", "rendezvous", "full", "close"} {
		cases = append(cases, Case{Name: "heap/differ/" + where, MinWorld: 2, Needs: []string{"transfers"}, Run: func(ctx context.Context, e *Env) error {
			if err := heapDifferCase(ctx, e, where); err != nil {
				return err
			}
			return worksAfterwards(ctx, e)
		}})
	}
	return cases
}

// sameNumber fails unless all ranks bring the same number.
func sameNumber(ctx context.Context, e *Env, what string, number uint64) error {
	all, err := e.R.Group().AllGather(ctx, "suite: compare", binary.LittleEndian.AppendUint64(nil, number))
	if err != nil {
		return err
	}
	for rank, b := range all {
		if n := binary.LittleEndian.Uint64(b); n != number {
			return fmt.Errorf("%s is %d here and %d on rank %d", what, number, n, rank)
		}
	}
	return nil
}

// zeroes fails unless the tensor has nothing but zeros.
func zeroes(t *tensor.Tensor) error {
	got, err := readBytes(t.Local())
	if err != nil {
		return err
	}
	if i := slices.IndexFunc(got, func(b byte) bool { return b != 0 }); i >= 0 {
		return fmt.Errorf("byte %d of the new tensor %s at %d is %#x", i, t, t.Offset(), got[i])
	}
	return nil
}

// heapTensorsCase: a heap's tensors are at the same place on every rank, apart from each other, zero, and need no rendezvous.
func heapTensorsCase(ctx context.Context, e *Env) error {
	h, err := e.R.NewHeap(ctx, 1<<20)
	if err != nil {
		return err
	}
	var all []*tensor.Tensor
	windows := map[uint64]bool{}
	for _, dtype := range tensor.DTypes() {
		for _, shape := range []tensor.Shape{{}, {0}, {1}, {3, 0, 2}, {2, 3, 5}, {333}} {
			e.Skew()
			t, err := h.Zeros(ctx, dtype, shape...)
			if err != nil {
				return err
			}
			if t.DType() != dtype || t.Shape().String() != shape.String() || t.Bytes() != shape.NumElements()*dtype.Bytes() || t.Offset()%memory.HeapAlign != 0 {
				return fmt.Errorf("%s of %v is %s, of %d bytes at %d", dtype, shape, t, t.Bytes(), t.Offset())
			}
			if t.Ptr().IsNil() != (t.Bytes() == 0) {
				return fmt.Errorf("%s is at %s", t, t.Ptr())
			}
			if err := errors.Join(zeroes(t), writeBytes(t.Local(), pattern(e.R.Rank(), len(all), t.Bytes()))); err != nil {
				return err
			}
			w, at, err := t.Window()
			if err != nil || at != t.Offset() || windows[w.Number()] || w.Number() == h.Window().Number() {
				return fmt.Errorf("%s is at %d of window %d (%v)", t, at, w.Number(), err)
			}
			windows[w.Number()] = true
			if err := errors.Join(sameNumber(ctx, e, "the offset", uint64(at)), sameNumber(ctx, e, "the window", w.Number())); err != nil {
				return err
			}
			if t.Bytes() > 0 {
				if _, found, offset, err := e.R.Memory().Find(t.Ptr()); err != nil || found != w || offset != at {
					return fmt.Errorf("%s is found at %d of window %v (%v)", t, offset, found, err)
				}
				if _, _, _, err := e.R.Memory().Find(t.Ptr().Add(t.Bytes())); t.Bytes()%memory.HeapAlign != 0 && !errors.Is(err, errs.ErrNotSymmetric) {
					return fmt.Errorf("behind %s: %w", t, err)
				}
			}
			all = append(all, t)
		}
	}
	if err := errors.Join(h.Check(ctx), e.R.Barrier(ctx)); err != nil {
		return err
	}
	for i, t := range all {
		for peer := range e.R.WorldSize() {
			v, err := t.Remote(peer)
			if errors.Is(err, errs.ErrNotReachable) {
				v, err, peer = t.Local(), nil, e.R.Rank()
			}
			if err != nil {
				return err
			}
			got, err := readBytes(v)
			if err != nil {
				return err
			}
			if err := sameBytes(tensor.Uint8, got, pattern(peer, i, t.Bytes())); err != nil {
				return fmt.Errorf("rank %d's copy of %s: %w", peer, t, err)
			}
		}
	}
	if err := e.R.Barrier(ctx); err != nil {
		return err
	}
	for _, i := range rand.New(rand.NewPCG(1, 2)).Perm(len(all)) { // the same on every rank
		if err := all[i].Close(ctx); err != nil {
			return err
		}
	}
	if u := h.Usage(); u.Used != 0 || u.Waiting == 0 || u.Waiting+u.Free != u.Bytes {
		return fmt.Errorf("with all tensors closed the usage is %+v", u)
	}
	if err := h.Reclaim(ctx); err != nil {
		return err
	}
	if u := h.Usage(); u.Free != u.Bytes || u.Largest != u.Bytes || u.Bytes != 1<<20 {
		return fmt.Errorf("with everything reclaimed the usage is %+v", u)
	}
	return h.Close(ctx)
}

// heapMovesCase puts, gets, signals and transfers between tensors of a heap, whose memory is used again and again, with ranks that are late.
func heapMovesCase(ctx context.Context, e *Env) error {
	h, err := e.R.NewHeap(ctx, 64<<10)
	if err != nil {
		return err
	}
	next, prev := ring(e)
	for round := range 8 {
		n := int64(1000 + 700*round)
		box, err1 := h.Zeros(ctx, tensor.Uint8, n)
		src, err2 := h.Zeros(ctx, tensor.Uint8, n)
		back, err3 := h.Zeros(ctx, tensor.Uint8, n)
		if err := errors.Join(err1, err2, err3); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if err := errors.Join(zeroes(src), zeroes(back), writeBytes(src.Local(), pattern(e.R.Rank(), round, n))); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		e.Skew()
		x, err := tensor.PrepareTransfer(backend.Read, next, tensor.Pair{Local: back, Remote: box})
		if err != nil {
			return err
		}
		if err := errors.Join(box.PutSignal(e.S, next, src, 1), box.Wait(e.S, prev, 1), e.S.Synchronize(ctx)); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		got, err := readBytes(box.Local())
		if err != nil {
			return err
		}
		if err := sameBytes(tensor.Uint8, got, pattern(prev, round, n)); err != nil {
			return fmt.Errorf("round %d: a put: %w", round, err)
		}
		if err := errors.Join(x.Post(e.S), x.WaitOn(e.S), e.S.Synchronize(ctx)); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if got, err = readBytes(back.Local()); err != nil {
			return err
		}
		if err := sameBytes(tensor.Uint8, got, pattern(e.R.Rank(), round, n)); err != nil {
			return fmt.Errorf("round %d: a transfer: %w", round, err)
		}
		e.Skew()
		if err := closeAll(ctx, src, box, back); err != nil { // a peer may still read box
			return err
		}
		for what, err := range map[string]error{"post": x.Post(e.S), "put": box.Put(e.S, next, src), "get": box.Get(e.S, next, back), "signal": box.Signal(e.S, next, 0)} {
			if err := wantError(what+" of a closed tensor", err, symmem.ErrClosed); err != nil {
				return err
			}
		}
		if err := x.Close(); err != nil {
			return err
		}
	}
	return h.Close(ctx)
}

// heapAllReduceCase runs plans on tensors of a heap, whose memory the next round's tensors get.
func heapAllReduceCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	if !e.supported(alg, tensor.Float32, kernels.Sum) {
		return nil
	}
	const n = 5000
	h, err := e.R.NewHeap(ctx, 3*n*4)
	if err != nil {
		return err
	}
	for round := range 4 {
		in, err1 := h.Zeros(ctx, tensor.Float32, n+int64(round))
		out, err2 := h.Zeros(ctx, tensor.Float32, n+int64(round))
		if err := errors.Join(err1, err2); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		mine := make([]float32, in.NumElements())
		for i := range mine {
			mine[i] = float32((e.R.Rank() + 1) * (i%100 + round))
		}
		if err := errors.Join(zeroes(out), tensor.Write(in.Local(), mine, 0)); err != nil {
			return err
		}
		p, err := kernels.NewAllReduce(ctx, in, kernels.Sum, &kernels.AllReduceOptions{Out: out, Algorithm: alg})
		if err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		e.Skew()
		if err := errors.Join(p.Run(e.S), p.Run(e.S), e.S.Synchronize(ctx)); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		got, err := tensor.ReadAll[float32](out.Local())
		if err != nil {
			return err
		}
		ranks := float32(e.R.WorldSize() * (e.R.WorldSize() + 1) / 2)
		for i, x := range got {
			if want := ranks * float32(i%100+round); x != want {
				return fmt.Errorf("round %d: element %d is %v, expected %v", round, i, x, want)
			}
		}
		if err := closeAll(ctx, in, out); err != nil {
			return err
		}
		if err := wantError("running a plan of a closed tensor", p.Run(e.S), symmem.ErrClosed); err != nil {
			return err
		}
		if err := p.Close(ctx); err != nil {
			return err
		}
	}
	return h.Close(ctx)
}

// heapRankCase: the plans that a rank keeps are not taken for those of other tensors that have come to the same place.
func heapRankCase(ctx context.Context, e *Env) error {
	h, err := e.R.NewHeap(ctx, 4096)
	if err != nil {
		return err
	}
	for round := range 4 {
		t, err := h.Zeros(ctx, tensor.Int32, 1000)
		if err != nil {
			return err
		}
		for range 2 {
			mine := slices.Repeat([]int32{int32(e.R.Rank() + round)}, 1000)
			if err := errors.Join(e.R.Barrier(ctx), tensor.Write(t.Local(), mine, 0), e.R.AllReduce(ctx, t, kernels.Max), e.R.Synchronize(ctx)); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
			got, err := tensor.ReadAll[int32](t.Local())
			if err != nil || got[0] != int32(e.R.WorldSize()-1+round) || got[999] != got[0] {
				return fmt.Errorf("round %d: the maximum is %d (%w)", round, got[0], err)
			}
		}
		if t.Offset() != 0 {
			return fmt.Errorf("round %d: the only tensor is at %d", round, t.Offset())
		}
		if err := t.Close(ctx); err != nil {
			return err
		}
		if err := wantError("AllReduce of a closed tensor", e.R.AllReduce(ctx, t, kernels.Max), symmem.ErrClosed); err != nil {
			return err
		}
	}
	return h.Close(ctx)
}

// lateBy is how late a device is in the cases about reuse.
func (e *Env) lateBy() time.Duration {
	if e.Short {
		return 300 * time.Millisecond
	}
	return 2 * time.Second
}

// heapLateWriterCase: rank 0's device comes to a put long after all ranks have closed the tensor that it writes. Whoever gets the memory next does not
// see it.
func heapLateWriterCase(ctx context.Context, e *Env) error {
	const n = 3000
	h, err := e.R.NewHeap(ctx, 2*4096)
	if err != nil {
		return err
	}
	src, err1 := h.Zeros(ctx, tensor.Uint8, n)
	old, err2 := h.Zeros(ctx, tensor.Uint8, n)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	if err := writeBytes(src.Local(), pattern(e.R.Rank(), 1, n)); err != nil {
		return err
	}
	if e.R.Rank() == 0 {
		hold, release := holdUp()
		timer := time.AfterFunc(e.lateBy(), release)
		defer func() {
			if timer.Stop() {
				release()
			}
		}()
		err = e.S.HostFunc(hold)
		for peer := 1; peer < e.R.WorldSize(); peer++ {
			err = errors.Join(err, old.Put(e.S, peer, src))
		}
		if err != nil {
			return err
		}
	}
	at := old.Offset()
	if err := old.Close(ctx); err != nil {
		return err
	}
	// There is room for one only where the old one was: this waits for rank 0's device.
	fresh, err := h.Zeros(ctx, tensor.Uint8, 4096)
	if err != nil {
		return err
	}
	if fresh.Offset() != at {
		return fmt.Errorf("the new tensor is at %d, and the old one was at %d", fresh.Offset(), at)
	}
	want := pattern(e.R.Rank(), 2, 4096)
	if err := errors.Join(zeroes(fresh), writeBytes(fresh.Local(), want), e.S.Synchronize(ctx), e.R.Barrier(ctx)); err != nil {
		return err
	}
	got, err := readBytes(fresh.Local())
	if err != nil {
		return err
	}
	if err := sameBytes(tensor.Uint8, got, want); err != nil {
		return fmt.Errorf("somebody has written where a tensor was before: %w", err)
	}
	return closeAll(ctx, src, fresh, h)
}

// heapLateReaderCase: rank 0's device comes to a get long after all ranks have closed the tensor that it reads. What it gets is the old tensor's.
func heapLateReaderCase(ctx context.Context, e *Env) error {
	const n = 3000
	h, err := e.R.NewHeap(ctx, 2*4096)
	if err != nil {
		return err
	}
	dst, err1 := h.Zeros(ctx, tensor.Uint8, n)
	old, err2 := h.Zeros(ctx, tensor.Uint8, n)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	if err := errors.Join(writeBytes(old.Local(), pattern(e.R.Rank(), 1, n)), e.R.Barrier(ctx)); err != nil {
		return err
	}
	last := e.R.WorldSize() - 1
	if e.R.Rank() == 0 {
		hold, release := holdUp()
		timer := time.AfterFunc(e.lateBy(), release)
		defer func() {
			if timer.Stop() {
				release()
			}
		}()
		if err := errors.Join(e.S.HostFunc(hold), old.Get(e.S, last, dst)); err != nil {
			return err
		}
	}
	if err := errors.Join(old.Close(ctx), h.Reclaim(ctx)); err != nil {
		return err
	}
	fresh, err := h.Zeros(ctx, tensor.Uint8, n)
	if err != nil {
		return err
	}
	if err := errors.Join(writeBytes(fresh.Local(), pattern(e.R.Rank(), 2, n)), e.S.Synchronize(ctx)); err != nil {
		return err
	}
	if e.R.Rank() == 0 {
		got, err := readBytes(dst.Local())
		if err != nil {
			return err
		}
		if err := sameBytes(tensor.Uint8, got, pattern(last, 1, n)); err != nil {
			return fmt.Errorf("what was read late: %w", err)
		}
	}
	return closeAll(ctx, dst, fresh, h)
}

// heapBusyCase: Reclaim and Close, with a context that ends while the device still works on the heap, take nothing away, and work later.
func heapBusyCase(ctx context.Context, e *Env) error {
	h, err := e.R.NewHeap(ctx, 8192)
	if err != nil {
		return err
	}
	old, err1 := h.Zeros(ctx, tensor.Uint8, 1000)
	kept, err2 := h.Zeros(ctx, tensor.Uint8, 1000)
	if err := errors.Join(err1, err2, writeBytes(kept.Local(), pattern(e.R.Rank(), 1, 1000))); err != nil {
		return err
	}
	hold, release := holdUp()
	if err := errors.Join(e.S.HostFunc(hold), old.Put(e.S, e.R.Rank(), kept), old.Close(ctx)); err != nil {
		release()
		return err
	}
	end := func(what string, f func(ctx context.Context) error) error {
		short, cancel := context.WithTimeout(ctx, 30*time.Millisecond)
		defer cancel()
		return wantError(what+" while the device works", f(short), context.DeadlineExceeded)
	}
	err = errors.Join(end("Reclaim", h.Reclaim), e.R.Barrier(ctx))
	waiting := h.Usage().Waiting
	err = errors.Join(err, kept.Err(), end("Close", h.Close), e.R.Barrier(ctx), kept.Err(), h.Err())
	release()
	if err != nil {
		return err
	}
	if waiting != 1024 {
		return fmt.Errorf("after a Reclaim that failed %d bytes wait", waiting)
	}
	got, err := readBytes(kept.Local())
	if err != nil {
		return err
	}
	if err := errors.Join(sameBytes(tensor.Uint8, got, pattern(e.R.Rank(), 1, 1000)), e.S.Synchronize(ctx), h.Reclaim(ctx), kept.Close(ctx)); err != nil {
		return err
	}
	return h.Close(ctx)
}

// heapFullCase: a heap without room says so, alike on every rank, and goes on.
func heapFullCase(ctx context.Context, e *Env) error {
	h, err := e.R.NewHeap(ctx, 10*1024)
	if err != nil {
		return err
	}
	var all []*tensor.Tensor
	for range 10 {
		t, err := h.Zeros(ctx, tensor.Uint8, 1000)
		if err != nil {
			return err
		}
		all = append(all, t)
	}
	refused := func(bytes, free, largest int64) error {
		_, err := h.Zeros(ctx, tensor.Uint8, bytes)
		full, ok := errors.AsType[*memory.HeapFullError](err)
		if !ok || !errors.Is(err, symmem.ErrNoMemory) || *full != (memory.HeapFullError{Bytes: bytes, Size: 10 * 1024, Free: free, Largest: largest}) {
			return fmt.Errorf("%d bytes of a heap that has %d: %w", bytes, largest, err)
		}
		return nil
	}
	if err := refused(1, 0, 0); err != nil {
		return err
	}
	empty, err := h.Zeros(ctx, tensor.Uint8, 0)
	if err != nil {
		return fmt.Errorf("an empty tensor of a full heap: %w", err)
	}
	for _, i := range []int{8, 3, 2} {
		if err := all[i].Close(ctx); err != nil {
			return err
		}
	}
	e.Skew()
	if err := errors.Join(refused(2049, 3072, 2048), refused(1<<40, 3072, 2048), refused(1<<62, 3072, 2048)); err != nil {
		return err
	}
	two, err := h.Zeros(ctx, tensor.Uint8, 2048)
	if err != nil {
		return err
	}
	one, err := h.Zeros(ctx, tensor.Uint8, 1024)
	if err != nil {
		return err
	}
	if two.Offset() != all[2].Offset() || one.Offset() != all[8].Offset() {
		return fmt.Errorf("the new tensors are at %d and %d", two.Offset(), one.Offset())
	}
	if err := errors.Join(zeroes(two), zeroes(one), refused(1, 0, 0), h.Check(ctx), closeAll(ctx, two, one, empty)); err != nil {
		return err
	}
	for i, t := range all {
		if !slices.Contains([]int{8, 3, 2}, i) {
			if err := t.Close(ctx); err != nil {
				return err
			}
		}
	}
	whole, err := h.Zeros(ctx, tensor.Uint8, 10*1024)
	if err != nil {
		return fmt.Errorf("all of the heap: %w", err)
	}
	return closeAll(ctx, whole, h)
}

// heapClosedCase: what was closed stays closed, once each; a heap takes along what was not.
func heapClosedCase(ctx context.Context, e *Env) error {
	h, err := e.R.NewHeap(ctx, 4096)
	if err != nil {
		return err
	}
	t, err1 := h.Zeros(ctx, tensor.Int32, 100)
	left, err2 := h.Zeros(ctx, tensor.Int32, 100)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	part, err := t.Slice(10, 20)
	if err != nil {
		return err
	}
	ofLeft, err := left.Slice(10, 20)
	if err != nil {
		return err
	}
	if err := errors.Join(t.Rendezvous(ctx), part.Rendezvous(ctx), part.Err(), t.Close(ctx)); err != nil { // a rendezvous is nothing
		return err
	}
	w, _, _ := left.Window()
	for what, err := range map[string]error{"a second Close": t.Close(ctx), "Err": t.Err(), "a slice's Err": part.Err(), "Rendezvous": t.Rendezvous(ctx), "Write": tensor.Write(t.Local(), []int32{1}, 0)} {
		if err := wantError(what, err, symmem.ErrClosed); err != nil {
			return err
		}
	}
	if err := errors.Join(h.Reclaim(ctx), wantError("Close after Reclaim", t.Close(ctx), symmem.ErrClosed), left.Err(), w.Err(), h.Close(ctx)); err != nil {
		return err
	}
	_, err = h.Zeros(ctx, tensor.Int32, 1)
	for what, err := range map[string]error{
		"Zeros": err, "Check": h.Check(ctx), "Reclaim": h.Reclaim(ctx), "Close": h.Close(ctx), "Err": h.Err(), "a tensor's Err": left.Err(), "its slice's": ofLeft.Err(),
		"its window's": w.Err(), "its Close": left.Close(ctx), "Put": left.Put(e.S, 0, left),
	} {
		if err := wantError(what+" after the heap was closed", err, symmem.ErrClosed); err != nil {
			return err
		}
	}
	return nil
}

// heapClosedGraphCase launches a graph with a put and a transfer to a tensor of a heap that was closed, when another has its place: what the CPU has a hand in
// is an error of the stream, and the other tensor stays as it is.
func heapClosedGraphCase(ctx context.Context, e *Env) error {
	if e.R.Capabilities().PeerPointers && e.R.Device().Kind() != device.Host {
		return nil // a GPU follows pointers by itself
	}
	next, _ := ring(e)
	h, err := e.R.NewHeap(ctx, 4096)
	if err != nil {
		return err
	}
	src, err := h.Zeros(ctx, tensor.Uint8, 100)
	if err != nil {
		return err
	}
	if err := writeBytes(src.Local(), pattern(e.R.Rank(), 0, src.Bytes())); err != nil {
		return err
	}
	_, err = src.Remote(next)
	looks := errors.Is(err, errs.ErrNotReachable) || e.R.Device().Kind() == device.Host // else the GPU itself copies to the address
	for _, what := range []string{"put", "transfer"} {
		old, err := h.Zeros(ctx, tensor.Uint8, 100)
		if err != nil {
			return err
		}
		x, err := tensor.PrepareTransfer(backend.Write, next, tensor.Pair{Local: src, Remote: old})
		if err != nil {
			return err
		}
		g, err := e.capture(func() error {
			if what == "put" {
				return old.Put(e.S, next, src)
			}
			return errors.Join(x.Post(e.S), x.WaitOn(e.S))
		})
		if err != nil {
			return err
		}
		if err := errors.Join(g.Launch(e.S), e.S.Synchronize(ctx), old.Close(ctx), h.Reclaim(ctx)); err != nil {
			return err
		}
		t, err := h.Zeros(ctx, tensor.Uint8, 100)
		if err != nil {
			return err
		}
		if t.Offset() != old.Offset() {
			return fmt.Errorf("the new tensor is at %d of the heap, and the closed one was at %d", t.Offset(), old.Offset())
		}
		if looks {
			if err := g.Launch(e.S); err != nil {
				return err
			}
			if err := wantError("launching a graph with a "+what+" to a tensor that was closed", e.S.Synchronize(ctx), symmem.ErrClosed); err != nil {
				return err
			}
		}
		if err := errors.Join(e.R.Barrier(ctx), zeroes(t), g.Close(), x.Close(), t.Close(ctx), h.Reclaim(ctx)); err != nil {
			return err
		}
	}
	return h.Close(ctx)
}

// heapBadInputCase: wrong arguments are refused on the rank itself, and change nothing.
func heapBadInputCase(ctx context.Context, e *Env) error {
	var none context.Context
	_, err := e.R.NewHeap(none, 4096)
	if err := wantArgument("NewHeap without a context", err, "ctx"); err != nil {
		return err
	}
	_, err = tensor.NewHeap(ctx, nil, 4096)
	if err := wantArgument("NewHeap without a memory", err, "memory"); err != nil {
		return err
	}
	for _, bytes := range []int64{0, -1, -1 << 63, 1<<63 - 1} {
		_, err := e.R.NewHeap(ctx, bytes)
		if err := wantError("NewHeap", err, symmem.ErrInvalid, "bytes", fmt.Sprint(bytes)); err != nil {
			return err
		}
	}
	if _, err := e.R.NewHeap(ctx, 1<<55); err == nil {
		return errors.New("there is a heap of 32 PiB")
	}
	h, err := e.R.NewHeap(ctx, 1)
	if err != nil {
		return err
	}
	_, noContext := h.Zeros(none, tensor.Uint8, 1)
	_, negative := h.Zeros(ctx, tensor.Uint8, -1)
	_, unknown := h.Zeros(ctx, tensor.DType(99), 1)
	_, overflow := h.Zeros(ctx, tensor.Float64, 1<<40, 1<<40)
	_, noHeap := (&tensor.Heap{}).Zeros(ctx, tensor.Uint8, 1)
	_, below := h.Allocate(ctx, -1, "", nil)
	t, err := h.Zeros(ctx, tensor.Uint8, 1)
	if err != nil {
		return err
	}
	for what, err := range map[string]error{"Zeros without a context": noContext, "a negative dimension": negative, "an unknown dtype": unknown, "an overflow": overflow,
		"no heap": noHeap, "a negative size": below, "Check without a context": h.Check(none), "Reclaim without a context": h.Reclaim(none), "Close without a context": h.Close(none), "a tensor's": t.Close(none)} {
		if err := wantArgument(what, err); err != nil {
			return err
		}
	}
	return closeAll(ctx, t, h)
}

// heapOneFailsCase: a heap that one rank cannot make is none, and the others are told.
func heapOneFailsCase(ctx context.Context, e *Env) error {
	last := e.R.Rank() == e.R.WorldSize()-1
	bytes := int64(4096)
	if last {
		bytes = 0
	}
	_, err := e.R.NewHeap(ctx, bytes)
	if err := wantError("a heap of nothing on one rank", err, symmem.ErrInvalid, fmt.Sprintf("rank %d", e.R.WorldSize()-1)); err != nil {
		return err
	}
	if last {
		bytes = 8192
	}
	_, err = e.R.NewHeap(ctx, bytes)
	if err := namesAll(e, err, "4096", "8192"); err != nil {
		return err
	}
	return worksAfterwards(ctx, e)
}

// heapAheadCase: a rank that is ahead of the others does not disagree with them.
func heapAheadCase(ctx context.Context, e *Env) error {
	h, err := e.R.NewHeap(ctx, 1<<20)
	if err != nil {
		return err
	}
	var all []*tensor.Tensor
	add := func(n int) error {
		for range n {
			t, err := h.Zeros(ctx, tensor.Uint8, 100+int64(len(all)))
			if err != nil {
				return err
			}
			all = append(all, t)
		}
		return nil
	}
	for _, n := range []int{3, 40} { // 40 are more than are remembered
		first, second := n, 0
		if e.R.Rank() > 0 {
			first, second = 0, n
		}
		if err := add(first); err != nil {
			return err
		}
		t, err := e.mapped(ctx, tensor.Uint8, 10)
		if err != nil {
			return fmt.Errorf("rank 0 is ahead by %d: %w", n, err)
		}
		if err := errors.Join(add(second), h.Check(ctx), t.Close(ctx)); err != nil {
			return err
		}
	}
	for _, t := range all {
		if err := t.Close(ctx); err != nil {
			return err
		}
	}
	return h.Close(ctx)
}

// heapDifferCase: ranks that ask a heap for different things are told where they meet, with the request.
func heapDifferCase(ctx context.Context, e *Env, where string) error {
	h, err := e.R.NewHeap(ctx, 8192)
	if err != nil {
		return err
	}
	first, err := h.Zeros(ctx, tensor.Uint8, 1000)
	if err != nil {
		return err
	}
	last := e.R.Rank() == e.R.WorldSize()-1
	n := int64(1024)
	if last {
		n = 2048
	}
	if err := first.Close(ctx); err != nil { // request 2
		return err
	}
	t, err := h.Zeros(ctx, tensor.Uint8, n)
	if where != "full" && err != nil {
		return err
	}
	values := []string{"request 3 of heap", "1024 bytes", "2048 bytes"}
	switch where {
	case "check":
		err = h.Check(ctx)
	case "reclaim":
		err = h.Reclaim(ctx)
	case "plan":
		_, err = kernels.NewAllReduce(ctx, t, kernels.Max, nil)
	case "rendezvous": // of anything
		other, zerosErr := e.R.Zeros(ctx, tensor.Uint8, 8)
		if zerosErr != nil {
			err = zerosErr // allocated collectively: it is told already there
			break
		}
		err = other.Rendezvous(ctx)
		if closeErr := other.Close(ctx); closeErr != nil {
			return closeErr
		}
	case "full": // both reclaim, for different requests
		if err != nil {
			return err
		}
		m := int64(7000)
		if last {
			m = 6900
		}
		_, err = h.Zeros(ctx, tensor.Uint8, m)
	case "close":
		err = h.Close(ctx)
	}
	if err := namesAll(e, err, values...); err != nil {
		return fmt.Errorf("%s: %w", where, err)
	}
	if where == "close" {
		return wantError("after Close", t.Err(), symmem.ErrClosed)
	}
	_, err = h.Zeros(ctx, tensor.Uint8, 1)
	for what, err := range map[string]error{"Zeros": err, "Check": h.Check(ctx), "Reclaim": h.Reclaim(ctx), "Err": h.Err()} {
		if _, ok := errors.AsType[*group.MismatchError](err); !ok {
			return fmt.Errorf("%s of a heap in which the ranks differ: %w", what, err)
		}
	}
	return closeAll(ctx, t, h)
}

// heapTableCase: the peer table of a tensor lives until its memory is reclaimed.
func heapTableCase(ctx context.Context, e *Env) error {
	h, err := e.R.NewHeap(ctx, 4096)
	if err != nil {
		return err
	}
	t, err := h.Zeros(ctx, tensor.Int32, 10)
	if err != nil {
		return err
	}
	table, err := t.PeerTable()
	if err != nil {
		return err
	}
	words := make([]byte, 8*e.R.WorldSize())
	if err := errors.Join(t.Close(ctx), e.R.Device().CopyToHost(words, table)); err != nil {
		return fmt.Errorf("the table of a tensor whose memory was not reclaimed: %w", err)
	}
	for rank := range e.R.WorldSize() {
		p, err := h.Window().Peer(rank, t.Offset())
		if have := device.Ptr(binary.LittleEndian.Uint64(words[8*rank:])); err != nil || have != p {
			return fmt.Errorf("rank %d's copy is at %s, in the table at %s (%v)", rank, p, have, err)
		}
	}
	if err := h.Reclaim(ctx); err != nil {
		return err
	}
	if err := wantError("freeing a table once more", e.R.Device().Free(table), symmem.ErrInvalid); err != nil {
		return err
	}
	return h.Close(ctx)
}

// heapProgramsCase runs random programs, the same on every rank: whatever is live has what was written last, on each rank by a peer, and what is new is zero.
func heapProgramsCase(ctx context.Context, e *Env) error {
	steps := 400
	if e.Short {
		steps = 80
	}
	h, err := e.R.NewHeap(ctx, 128<<10)
	if err != nil {
		return err
	}
	src, err := e.R.Zeros(ctx, tensor.Uint8, 20_000)
	if err != nil {
		return err
	}
	next, prev := ring(e)
	random := rand.New(rand.NewPCG(uint64(steps), 7)) // the same on every rank
	type held struct {
		*tensor.Tensor
		step int
	}
	var live []held
	check := func(t held) error {
		got, err := readBytes(t.Local())
		if err != nil {
			return err
		}
		return sameBytes(tensor.Uint8, got, pattern(prev, t.step, t.Bytes()))
	}
	for step := range steps {
		switch k := random.IntN(10); {
		case k < 6:
			n := int64(random.IntN(1 + random.IntN(20_000)))
			t, err := h.Zeros(ctx, tensor.Uint8, n)
			if errors.Is(err, symmem.ErrNoMemory) {
				continue
			}
			if err != nil {
				return fmt.Errorf("step %d: %w", step, err)
			}
			// The next rank's copy is written from here, at once: that rank need not have come to its Zeros yet.
			part, err := src.Sub(0, n)
			if err != nil {
				return err
			}
			if err := errors.Join(writeBytes(part.Local(), pattern(e.R.Rank(), step, n)), t.PutSignal(e.S, next, part, 0), t.Wait(e.S, prev, 0), e.S.Synchronize(ctx)); err != nil {
				return fmt.Errorf("step %d: %w", step, err)
			}
			live = append(live, held{t, step})
		case k < 9 && len(live) > 0:
			i := random.IntN(len(live))
			if err := check(live[i]); err != nil {
				return fmt.Errorf("step %d: the tensor of step %d: %w", step, live[i].step, err)
			}
			if err := live[i].Close(ctx); err != nil {
				return err
			}
			live = slices.Delete(live, i, i+1)
		case k == 9 && random.IntN(5) == 0:
			if err := h.Reclaim(ctx); err != nil {
				return fmt.Errorf("step %d: %w", step, err)
			}
		}
		e.Skew()
	}
	for _, t := range live {
		if err := errors.Join(check(t), t.Close(ctx)); err != nil {
			return fmt.Errorf("the tensor of step %d: %w", t.step, err)
		}
	}
	return errors.Join(h.Close(ctx), src.Close(ctx))
}
