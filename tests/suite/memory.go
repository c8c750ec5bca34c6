package suite

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// dimensions writes a shape so that it can be part of a case's name: "2x3x5".
func dimensions(shape tensor.Shape) string {
	if len(shape) == 0 {
		return "scalar"
	}
	text := make([]string, len(shape))
	for i, n := range shape {
		text[i] = strconv.FormatInt(n, 10)
	}
	return strings.Join(text, "x")
}

// memoryCases are about allocating, rendezvous and addresses.
func memoryCases(short bool) []Case {
	cases := []Case{
		{Name: "memory/remote", Run: remoteCase},
		{Name: "memory/slices", Run: slicesCase},
		{Name: "memory/slice_rendezvous", Run: sliceRendezvousCase},
		{Name: "memory/peer_table", Run: peerTableCase},
		{Name: "memory/contiguous", Needs: []string{"contiguous"}, Run: contiguousCase},
		{Name: "memory/multicast", Run: multicastCase},
		{Name: "memory/multicast_agreement", MinWorld: 2, Run: multicastAgreementCase},
		{Name: "memory/find", Run: findCase},
		{Name: "memory/rendezvous_twice", Run: rendezvousTwiceCase},
		{Name: "memory/empty_all_reduce", Needs: []string{"transfers"}, Run: emptyAllReduceCase},
		{Name: "memory/many_tensors", Run: manyTensorsCase},
		{Name: "memory/adopted", Needs: []string{"register", "transfers"}, Run: adoptedCase},
	}
	for _, dtype := range tensor.DTypes() {
		cases = append(cases, Case{Name: "memory/allocate/" + dtype.String(), Run: func(ctx context.Context, e *Env) error {
			return allocateCase(ctx, e, dtype)
		}})
	}
	for _, shape := range []tensor.Shape{{}, {0}, {1}, {3, 0, 2}, {2, 3, 5}} {
		cases = append(cases, Case{Name: "memory/shape/" + dimensions(shape), Needs: []string{Puts}, Run: func(ctx context.Context, e *Env) error {
			return shapeCase(ctx, e, shape)
		}})
	}
	if !short {
		cases = append(cases, Case{Name: "memory/large", Needs: []string{"peer_pointers"}, Run: largeCase})
	}
	return cases
}

// granularity is what the backend rounds sizes to.
func granularity(ctx context.Context, e *Env) (int64, error) {
	a, err := e.R.Memory().Allocate(ctx, 1, "")
	if err != nil {
		return 0, err
	}
	return a.RoundedBytes(), e.R.Memory().Free(ctx, a)
}

func allocateCase(ctx context.Context, e *Env, dtype tensor.DType) error {
	g, err := granularity(ctx, e)
	if err != nil {
		return err
	}
	g /= dtype.Bytes()
	for _, n := range []int64{0, 1, 15, 16, 17, g - 1, g, g + 1} {
		t, err := e.R.Zeros(ctx, dtype, n)
		if err != nil {
			return fmt.Errorf("%d elements: %w", n, err)
		}
		if t.Bytes() != n*dtype.Bytes() || t.NumElements() != n || t.DType() != dtype {
			return fmt.Errorf("%d elements: the tensor says %d elements of %s, %d bytes", n, t.NumElements(), t.DType(), t.Bytes())
		}
		if t.Ptr().IsNil() != (n == 0) {
			return fmt.Errorf("%d elements: address %s", n, t.Ptr())
		}
		got, err := readBytes(t.Local())
		if err != nil {
			return fmt.Errorf("%d elements: %w", n, err)
		}
		if err := sameBytes(dtype, got, make([]byte, len(got))); err != nil {
			return fmt.Errorf("%d elements: new memory is not zero: %w", n, err)
		}
		if err := t.Close(ctx); err != nil {
			return err
		}
	}
	return nil
}

// shapeCase makes every call of a tensor of the shape; empty ones and scalars behave like all others.
func shapeCase(ctx context.Context, e *Env, shape tensor.Shape) error {
	t, err := e.mapped(ctx, tensor.Int32, shape...)
	if err != nil {
		return err
	}
	n := t.NumElements()
	mine := make([]int32, n)
	for i := range mine {
		mine[i] = int32(1000*e.R.Rank() + i)
	}
	if err := tensor.Write(t.Local(), mine, 0); err != nil {
		return err
	}
	if err := t.Barrier(e.S, 0); err != nil {
		return err
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return err
	}
	for peer := range e.R.WorldSize() {
		v, err := t.Remote(peer)
		if err != nil && !errors.Is(err, errs.ErrNotReachable) {
			return err
		}
		if err != nil {
			continue
		}
		got, err := tensor.ReadAll[int32](v)
		if err != nil {
			return err
		}
		if int64(len(got)) != n || v.Shape().String() != shape.String() {
			return fmt.Errorf("rank %d's copy has %d elements and shape %v", peer, len(got), v.Shape())
		}
		for i, x := range got {
			if x != int32(1000*peer+i) {
				return fmt.Errorf("rank %d's element %d is %d, expected %d", peer, i, x, 1000*peer+i)
			}
		}
	}
	if e.R.Capabilities().Contiguous {
		v, err := t.Contiguous()
		if err != nil {
			return err
		}
		if v.NumElements() != n*int64(e.R.WorldSize()) {
			return fmt.Errorf("the contiguous view has %d elements", v.NumElements())
		}
	}
	if _, err := t.Multicast(); err != nil && !errors.Is(err, symmem.ErrUnsupported) && !errors.Is(err, errs.ErrNoMulticast) {
		return err
	}
	peer := (e.R.Rank() + 1) % e.R.WorldSize()
	other, err := e.mapped(ctx, tensor.Int32, shape...)
	if err != nil {
		return err
	}
	if err := errors.Join(other.Put(e.S, peer, t), other.Barrier(e.S, 1)); err != nil {
		return err
	}
	if err := e.gets(other.Get(e.S, peer, t)); err != nil {
		return err
	}
	if err := other.Barrier(e.S, 1); err != nil {
		return err
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return err
	}
	return closeAll(ctx, other, t)
}

// gets is the error of a get, unless there are none from ranks without addresses here, and it says so.
func (e *Env) gets(err error) error {
	if !e.R.Capabilities().Transfers && errors.Is(err, errs.ErrNotReachable) {
		return nil
	}
	return err
}

func remoteCase(ctx context.Context, e *Env) error {
	const n = 4097
	t, err := e.R.Zeros(ctx, tensor.Uint32, n)
	if err != nil {
		return err
	}
	e.Skew()
	if err := t.Rendezvous(ctx); err != nil {
		return err
	}
	mine := make([]uint32, n)
	for i := range mine {
		mine[i] = uint32(e.R.Rank()<<16 + i)
	}
	if err := tensor.Write(t.Local(), mine, 0); err != nil {
		return err
	}
	if err := e.R.Barrier(ctx); err != nil {
		return err
	}
	have, reached := e.R.Capabilities(), 0
	for peer := range e.R.WorldSize() {
		v, err := t.Remote(peer)
		if peer != e.R.Rank() && !have.PeerPointers && errors.Is(err, errs.ErrNotReachable) {
			continue
		}
		if err != nil {
			return err
		}
		if peer != e.R.Rank() {
			reached++
		}
		if peer == e.R.Rank() && v.Ptr() != t.Ptr() {
			return fmt.Errorf("the own copy is at %s and not at %s", v.Ptr(), t.Ptr())
		}
		got, err := tensor.ReadAll[uint32](v)
		if err != nil {
			return err
		}
		for i, x := range got {
			if x != uint32(peer<<16+i) {
				return fmt.Errorf("rank %d's element %d reads %#x", peer, i, x)
			}
		}
	}
	want := have.PointerPeers
	if have.PeerPointers {
		want = e.R.WorldSize() - 1
	}
	if reached != want {
		return fmt.Errorf("%d peers have an address here, and the capabilities say %d", reached, want)
	}
	if err := e.R.Barrier(ctx); err != nil {
		return err
	}
	// Every rank writes its own element of every copy.
	for peer := range e.R.WorldSize() {
		v, err := t.Remote(peer)
		if !have.PeerPointers && errors.Is(err, errs.ErrNotReachable) {
			continue
		}
		if err != nil {
			return err
		}
		if err := tensor.Write(v, []uint32{uint32(7000 + e.R.Rank())}, int64(e.R.Rank())); err != nil {
			return err
		}
	}
	if err := e.R.Barrier(ctx); err != nil {
		return err
	}
	got := make([]uint32, e.R.WorldSize())
	if err := tensor.Read(t.Local(), got, 0); err != nil {
		return err
	}
	for writer, x := range got {
		if _, err := t.Remote(writer); x != uint32(7000+writer) && !errors.Is(err, errs.ErrNotReachable) { // it reaches this rank as this one reaches it
			return fmt.Errorf("what rank %d wrote here reads %d", writer, x)
		}
	}
	return t.Close(ctx)
}

// checkCopies writes this rank's mark to t and compares every rank's copy, addressed through t.
func checkCopies(ctx context.Context, e *Env, t tensor.SymmetricTensor, mark int64) error {
	return checkCopiesBy(ctx, e, t, mark, func(peer int) ([]int64, error) {
		v, err := t.Remote(peer)
		if err != nil {
			return nil, err
		}
		return tensor.ReadAll[int64](v)
	})
}

// checkCopiesBy is checkCopies with read, which reads a rank's copy.
func checkCopiesBy(ctx context.Context, e *Env, t tensor.SymmetricTensor, mark int64, read func(peer int) ([]int64, error)) error {
	n := t.NumElements()
	mine := make([]int64, n)
	for i := range mine {
		mine[i] = mark + int64(e.R.Rank())*1_000_000 + int64(i)
	}
	if err := tensor.Write(t.Local(), mine, 0); err != nil {
		return err
	}
	if err := e.R.Barrier(ctx); err != nil {
		return err
	}
	for peer := range e.R.WorldSize() {
		got, err := read(peer)
		if err != nil {
			return err
		}
		for i, x := range got {
			if want := mark + int64(peer)*1_000_000 + int64(i); x != want {
				return fmt.Errorf("rank %d's element %d is %d, expected %d", peer, i, x, want)
			}
		}
	}
	return e.R.Barrier(ctx)
}

func slicesCase(ctx context.Context, e *Env) error {
	if !e.R.Capabilities().PeerPointers {
		return nil
	}
	t, err := e.mapped(ctx, tensor.Int64, 11, 7)
	if err != nil {
		return err
	}
	mid, err := t.Slice(3, 8)
	if err != nil {
		return err
	}
	inner, err := mid.Slice(1, 4)
	if err != nil {
		return err
	}
	if want := t.Ptr().Add(4 * 7 * 8); inner.Local().Ptr() != want || inner.Shape().String() != "[3 7]" {
		return fmt.Errorf("a slice of a slice is %v at %s, expected [3 7] at %s", inner.Shape(), inner.Local().Ptr(), want)
	}
	odd, err := t.Sub(13, 3, 5)
	if err != nil {
		return err
	}
	empty, err := t.Slice(11, 11)
	if err != nil {
		return err
	}
	for i, s := range []tensor.SymmetricTensor{t, mid, inner, odd, empty} {
		if err := checkCopies(ctx, e, s, int64(i+1)*100_000_000); err != nil {
			return fmt.Errorf("tensor %d, %v: %w", i, s.Shape(), err)
		}
	}
	if err := inner.Close(ctx); err != nil {
		return err
	}
	if err := wantError("a closed slice", inner.Err(), symmem.ErrClosed); err != nil {
		return err
	}
	if err := mid.Err(); err != nil {
		return fmt.Errorf("closing a slice closed the one it came from: %w", err)
	}
	if err := t.Close(ctx); err != nil {
		return err
	}
	return wantError("a slice of a closed tensor", mid.Err(), symmem.ErrClosed)
}

// sliceRendezvousCase makes the rendezvous of a slice before that of the tensor.
func sliceRendezvousCase(ctx context.Context, e *Env) error {
	t, err := e.R.Zeros(ctx, tensor.Int64, 100)
	if err != nil {
		return err
	}
	s, err := t.Slice(33, 66)
	if err != nil {
		return err
	}
	if err := s.Rendezvous(ctx); err != nil {
		return err
	}
	if _, err := t.Remote(0); !errors.Is(err, errs.ErrNoRendezvous) {
		return fmt.Errorf("the tensor can be used though only its slice has had a rendezvous: %v", err)
	}
	if err := t.Rendezvous(ctx); err != nil {
		return err
	}
	if e.R.Capabilities().PeerPointers {
		if err := checkCopies(ctx, e, s, 5); err != nil {
			return err
		}
		if err := checkCopies(ctx, e, t, 7); err != nil {
			return err
		}
	}
	return t.Close(ctx)
}

func peerTableCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Float32, 50)
	if err != nil {
		return err
	}
	s, err := t.Slice(9, 20)
	if err != nil {
		return err
	}
	for _, x := range []tensor.SymmetricTensor{t, s} {
		table, err := x.PeerTable()
		if err != nil {
			return err
		}
		words := make([]byte, 8*e.R.WorldSize())
		if err := e.R.Device().CopyToHost(words, table); err != nil {
			return err
		}
		for peer := range e.R.WorldSize() {
			var at device.Ptr // nil if there is no address
			v, err := x.Remote(peer)
			if err == nil {
				at = v.Ptr()
			} else if !errors.Is(err, errs.ErrNotReachable) {
				return err
			}
			if got := binary.LittleEndian.Uint64(words[8*peer:]); got != uint64(at) {
				return fmt.Errorf("the table has %#x for rank %d, and its copy is at %s", got, peer, at)
			}
		}
		again, err := x.PeerTable()
		if err != nil || again != table {
			return fmt.Errorf("a second table at %s, the first is at %s (%v)", again, table, err)
		}
	}
	return t.Close(ctx)
}

func contiguousCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Int64, 513)
	if err != nil {
		return err
	}
	s, err := t.Slice(101, 377)
	if err != nil {
		return err
	}
	for i, x := range []tensor.SymmetricTensor{t, s} {
		if err := checkCopies(ctx, e, x, int64(i+1)*50_000_000); err != nil {
			return err
		}
		v, err := x.Contiguous()
		if err != nil {
			return err
		}
		n := x.NumElements()
		if v.Shape().String() != (tensor.Shape{int64(e.R.WorldSize()), n}).String() {
			return fmt.Errorf("the view has shape %v", v.Shape())
		}
		all, err := tensor.ReadAll[int64](v)
		if err != nil {
			return err
		}
		for j, got := range all {
			peer, k := int64(j)/n, int64(j)%n
			if want := int64(i+1)*50_000_000 + peer*1_000_000 + k; got != want {
				return fmt.Errorf("tensor %d: rank %d's element %d is %d in the view, expected %d", i, peer, k, got, want)
			}
		}
		row, err := v.Index(int64(e.R.Rank()))
		if err != nil {
			return err
		}
		if err := e.R.Barrier(ctx); err != nil { // all have read
			return err
		}
		if err := tensor.Write(row, []int64{-5}, 0); err != nil {
			return err
		}
		var first [1]int64
		if err := tensor.Read(x.Local(), first[:], 0); err != nil {
			return err
		}
		if first[0] != -5 {
			return fmt.Errorf("a write through the view does not reach the copy: %d", first[0])
		}
		if err := e.R.Barrier(ctx); err != nil {
			return err
		}
	}
	return t.Close(ctx)
}

func multicastCase(ctx context.Context, e *Env) error {
	t, err := e.R.Zeros(ctx, tensor.Float32, 64)
	if err != nil {
		return err
	}
	_, err = t.Multicast()
	if err := wantError("Multicast before rendezvous", err, errs.ErrNoRendezvous); err != nil {
		return err
	}
	if err := wantError("EnableMulticast before rendezvous", t.EnableMulticast(ctx), errs.ErrNoRendezvous); err != nil {
		return err
	}
	if err := t.Rendezvous(ctx); err != nil {
		return err
	}
	if _, err = t.Multicast(); e.R.Capabilities().Multicast {
		if err := wantError("Multicast before EnableMulticast", err, errs.ErrNoMulticast); err != nil {
			return err
		}
	}
	enabled := t.EnableMulticast(ctx)
	part, err := t.Slice(16, 32)
	if err != nil {
		return err
	}
	// Whether it works may be known only now.
	if c := e.R.Capabilities(); !c.Multicast {
		_, err = t.Multicast()
		return errors.Join(wantError("EnableMulticast", enabled, symmem.ErrUnsupported, c.Why["multicast"]),
			wantError("EnableMulticast of a slice", part.EnableMulticast(ctx), symmem.ErrUnsupported, c.Why["multicast"]),
			wantError("Multicast", err, symmem.ErrUnsupported, c.Why["multicast"]), t.Close(ctx))
	}
	if err := errors.Join(enabled, part.EnableMulticast(ctx)); err != nil { // again it is nothing
		return fmt.Errorf("the backend has multicast: %w", err)
	}
	p, err := t.Multicast()
	q, partErr := part.Multicast()
	if err := errors.Join(err, partErr); err != nil || p.IsNil() || q != p.Add(64) {
		return fmt.Errorf("the backend has multicast, and gives %s, and %s for a slice: %w", p, q, err)
	}
	return t.Close(ctx)
}

// multicastAgreementCase: ranks that ask for multicast of different tensors, or of which one cannot, are all told, and go on. It needs no
// multicast.
func multicastAgreementCase(ctx context.Context, e *Env) error {
	a, err := e.mapped(ctx, tensor.Float32, 64)
	if err != nil {
		return err
	}
	b, err := e.mapped(ctx, tensor.Float32, 64)
	if err != nil {
		return err
	}
	mine := a
	if e.R.Rank() == 0 {
		mine = b
	}
	if err := wantError("EnableMulticast of different tensors", mine.EnableMulticast(ctx), symmem.ErrMismatch, "multicast of window"); err != nil {
		return err
	}
	part, err := a.Slice(0, 32)
	if err != nil {
		return err
	}
	if e.R.Rank() == 0 {
		if err := part.Close(ctx); err != nil {
			return err
		}
		err = wantError("EnableMulticast of a closed slice", part.EnableMulticast(ctx), symmem.ErrClosed)
	} else {
		told := part.EnableMulticast(ctx)
		err = wantError("EnableMulticast where rank 0 cannot", told, told, "rank 0", "closed")
	}
	if err != nil {
		return err
	}
	// The ranks are still in step.
	if err := a.EnableMulticast(ctx); (err == nil) != e.R.Capabilities().Multicast {
		return fmt.Errorf("EnableMulticast after that: %w", err)
	}
	return closeAll(ctx, a, b)
}

func findCase(ctx context.Context, e *Env) error {
	m := e.R.Memory()
	a, err := e.R.Zeros(ctx, tensor.Uint8, 1000)
	if err != nil {
		return err
	}
	b, err := e.mapped(ctx, tensor.Uint8, 5000)
	if err != nil {
		return err
	}
	for _, at := range []int64{0, 1, 2500, 4999} {
		alloc, w, off, err := m.Find(b.Ptr().Add(at))
		if err != nil || off != at || w == nil || alloc.Ptr() != b.Ptr() {
			return fmt.Errorf("address %d bytes into a tensor is found at offset %d (%v)", at, off, err)
		}
	}
	if _, w, off, err := m.Find(a.Ptr().Add(999)); err != nil || off != 999 || w != nil {
		return fmt.Errorf("an address before rendezvous is found at offset %d, window %v (%v)", off, w, err)
	}
	_, _, _, err = m.Find(a.Ptr().Add(1000))
	if err := wantError("an address just behind", err, errs.ErrNotSymmetric); err != nil {
		return err
	}
	// Whatever lies beyond the last allocation, or before the first.
	first, last := min(a.Ptr(), b.Ptr()), max(a.Ptr(), b.Ptr())
	for _, p := range []device.Ptr{last.Add(1 << 46), last + 1<<63, last + 1<<63 - 1, math.MaxUint64, first - 1, 1} {
		alloc, _, off, err := m.Find(p)
		if err == nil && p == alloc.Ptr().Add(off) && off >= 0 && off < alloc.Bytes() && alloc.Ptr() != a.Ptr() && alloc.Ptr() != b.Ptr() {
			continue // it is in another allocation, that of the workspace
		}
		if err := wantError(fmt.Sprintf("the address %s, with a tensor at %s, found at offset %d", p, last, off), err, errs.ErrNotSymmetric); err != nil {
			return err
		}
	}
	_, _, _, err = m.Find(0)
	if err := wantError("the nil address", err, errs.ErrNotSymmetric); err != nil {
		return err
	}
	was := b.Ptr()
	if err := closeAll(ctx, a, b); err != nil {
		return err
	}
	_, _, _, err = m.Find(was)
	return wantError("an address of a closed tensor", err, errs.ErrNotSymmetric)
}

// rendezvousTwiceCase: the window is made once for an allocation.
func rendezvousTwiceCase(ctx context.Context, e *Env) error {
	t, err := e.R.Zeros(ctx, tensor.Int64, 32)
	if err != nil {
		return err
	}
	_, err = t.Remote(0)
	if err := wantError("Remote before rendezvous", err, errs.ErrNoRendezvous); err != nil {
		return err
	}
	for range 3 {
		if err := t.Rendezvous(ctx); err != nil {
			return err
		}
	}
	s, err := t.Sub(3, 4)
	if err != nil {
		return err
	}
	if err := s.Rendezvous(ctx); err != nil {
		return err
	}
	if e.R.Capabilities().PeerPointers {
		before, err := t.Remote(0)
		if err != nil {
			return err
		}
		after, err := s.Remote(0)
		if err != nil {
			return err
		}
		if after.Ptr() != before.Ptr().Add(24) {
			return fmt.Errorf("a slice of a mapped tensor is at %s, the tensor at %s", after.Ptr(), before.Ptr())
		}
	}
	return t.Close(ctx)
}

func manyTensorsCase(ctx context.Context, e *Env) error {
	var all []*tensor.Tensor
	for i := range 40 {
		t, err := e.R.Zeros(ctx, tensor.Int64, int64(1+i*37))
		if err != nil {
			return err
		}
		all = append(all, t)
	}
	for i, t := range all {
		e.Skew()
		if err := t.Rendezvous(ctx); err != nil {
			return fmt.Errorf("tensor %d: %w", i, err)
		}
	}
	if e.R.Capabilities().PeerPointers {
		for i, t := range all {
			if err := checkCopies(ctx, e, t, int64(i)*10_000_000_000); err != nil {
				return fmt.Errorf("tensor %d: %w", i, err)
			}
		}
	}
	// In another order than they were made in, the same on every rank.
	for i := range all {
		if err := all[(i*17+5)%len(all)].Close(ctx); err != nil {
			return err
		}
	}
	return nil
}

// adoptable gives memory that belongs to somebody else and that the backend can adopt: the device's, or, where the backend takes only
// memory that can be mapped by others, that of a group of this rank alone. It is nil where nothing that this library allocates can be
// adopted, which the backend must have said.
func adoptable(ctx context.Context, e *Env, bytes int64) (device.Ptr, func() error, error) {
	p, free, err := private(e, bytes)
	if err != nil {
		return 0, nil, err
	}
	a, err := e.R.Memory().Register(ctx, p, bytes, "")
	if err == nil {
		return p, free, e.R.Memory().Free(ctx, a)
	}
	if err = errors.Join(wantError("adopting memory of the device", err, symmem.ErrInvalid, p.String()), free()); err != nil {
		return 0, nil, err
	}
	alone, err := e.R.Sub(ctx, []int{e.R.Rank()})
	if err != nil {
		return 0, nil, err
	}
	t, err := alone.Zeros(ctx, tensor.Uint8, bytes)
	if err != nil {
		return 0, nil, errors.Join(err, alone.Close(ctx))
	}
	free = func() error { return errors.Join(t.Close(ctx), alone.Close(ctx)) }
	if e.R.Backend() == "nvshmem" {
		// All that this library allocates there is of one heap, which is symmetric already.
		_, err = e.R.Memory().Register(ctx, t.Ptr(), bytes, "")
		return 0, nil, errors.Join(wantError("adopting memory of the heap", err, symmem.ErrInvalid, "symmetric heap"), free())
	}
	return t.Ptr(), free, nil
}

// checkFetched is checkCopies by get, for memory that has no addresses at peers.
func checkFetched(ctx context.Context, e *Env, t tensor.SymmetricTensor, mark int64) error {
	return checkCopiesBy(ctx, e, t, mark, func(peer int) ([]int64, error) {
		here, err := e.R.Zeros(ctx, tensor.Int64, t.NumElements())
		if err != nil {
			return nil, err
		}
		err = t.Get(e.S, peer, here)
		if e.gets(err) != err { //nolint:errorlint // what is let be is nil
			return nil, here.Close(ctx)
		}
		if err := errors.Join(err, e.S.Synchronize(ctx)); err != nil {
			return nil, err
		}
		got, err := tensor.ReadAll[int64](here.Local())
		return got, errors.Join(err, here.Close(ctx))
	})
}

// adoptedCase makes symmetric tensors of memory that is there for other use: views, transfers and an all-reduce work
// on it, and it is the caller's again afterwards.
func adoptedCase(ctx context.Context, e *Env) error {
	const n = 5000
	p, free, err := adoptable(ctx, e, n*8)
	if err != nil || p.IsNil() {
		return err
	}
	for round := range 3 {
		t, err := e.R.FromPtr(ctx, p, tensor.Int64, n)
		if err != nil {
			return err
		}
		if t.Ptr() != p {
			return fmt.Errorf("adopted memory at %s has become %s", p, t.Ptr())
		}
		if err := t.Rendezvous(ctx); err != nil {
			return err
		}
		part, err := t.Sub(33, n-100)
		if err != nil {
			return err
		}
		check := checkCopies
		for peer := range e.R.WorldSize() {
			if _, err := part.Remote(peer); errors.Is(err, errs.ErrNotReachable) {
				check = checkFetched // what was not allocated for it may have no address at peers, nor has memory of other islands
			}
		}
		if err := check(ctx, e, part, int64(round)*7_000_000_000); err != nil {
			return err
		}
		if err := writeBytes(t.Local(), input(tensor.Int64, kernels.Sum, e.R.Rank(), n)); err != nil {
			return err
		}
		plan, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil)
		if err != nil {
			return err
		}
		if err := errors.Join(plan.Run(e.S), e.S.Synchronize(ctx)); err != nil {
			return err
		}
		got, err := readBytes(t.Local())
		if err != nil {
			return err
		}
		if err := sameBytes(tensor.Int64, got, expected(tensor.Int64, kernels.Sum, e.R.WorldSize(), n)); err != nil {
			return err
		}
		if err := closeAll(ctx, plan, t); err != nil {
			return err
		}
	}
	if err := e.R.Device().CopyFromHost(p, make([]byte, n*8)); err != nil {
		return fmt.Errorf("the memory after it was adopted: %w", err)
	}
	return free()
}

// largeCase reaches beyond 2 GiB, where 32-bit offsets end. It touches little of it, so that small machines have it too.
func largeCase(ctx context.Context, e *Env) error {
	const n = 1<<31 + 4096
	t, err := e.mapped(ctx, tensor.Uint8, n)
	if err != nil {
		return err
	}
	const at = n - 3
	if err := tensor.Write(t.Local(), []uint8{uint8(40 + e.R.Rank())}, at); err != nil {
		return err
	}
	if err := e.R.Barrier(ctx); err != nil {
		return err
	}
	for peer := range e.R.WorldSize() {
		v, err := t.Remote(peer)
		if err != nil {
			return err
		}
		var got [1]uint8
		if err := tensor.Read(v, got[:], at); err != nil {
			return err
		}
		if got[0] != uint8(40+peer) {
			return fmt.Errorf("rank %d's byte %d is %d", peer, int64(at), got[0])
		}
	}
	return t.Close(ctx)
}

// emptyAllReduceCase makes and runs all-reduces of tensors without elements, by every form, and of slices without any: they are nothing.
func emptyAllReduceCase(ctx context.Context, e *Env) error {
	t, err := e.mapped(ctx, tensor.Float32, 0, 7)
	if err != nil {
		return err
	}
	whole, err := e.mapped(ctx, tensor.Float32, 9)
	if err != nil {
		return err
	}
	slice, err := whole.Slice(4, 4)
	if err != nil {
		return err
	}
	forms := []kernels.Algorithm{kernels.Auto, kernels.Transfers}
	if e.R.Capabilities().PeerPointers {
		forms = append(forms, kernels.OneShot, kernels.TwoShot)
	}
	for _, alg := range forms {
		for _, in := range []tensor.SymmetricTensor{t, slice} {
			p, err := kernels.NewAllReduce(ctx, in, kernels.Sum, &kernels.AllReduceOptions{Algorithm: alg})
			if err != nil {
				return fmt.Errorf("%s of %v: %w", alg, in.Shape(), err)
			}
			if err := errors.Join(p.Run(e.S), p.Run(e.S), e.S.Synchronize(ctx), p.Close(ctx)); err != nil {
				return fmt.Errorf("%s of %v: %w", alg, in.Shape(), err)
			}
		}
	}
	return closeAll(ctx, whole, t)
}
