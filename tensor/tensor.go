package tensor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// Tensor is one rank's part of a symmetric tensor, which [Zeros], [ZerosNamed], [FromPtr] and [Heap.Zeros] make, or a slice of one. See [SymmetricTensor] for
// what its methods have in common.
type Tensor struct {
	storage *storage
	whole   *Tensor // what it is a slice of; nil for one whose Close frees the storage
	name    string  // "" if it has none
	offset  int64   // of the first element in the allocation, in bytes
	bytes   int64
	dtype   DType
	shape   Shape

	window atomic.Pointer[memory.Window] // nil before a rendezvous of this very tensor
	closed atomic.Bool

	mu    sync.Mutex // serialises PeerTable
	table device.Ptr
}

var _ SymmetricTensor = (*Tensor)(nil)

// storage is the allocation that a tensor and its slices share.
type storage struct {
	memory *memory.Memory
	alloc  backend.Allocation
	piece  *memory.HeapAllocation // of a heap, which alloc is; else nil
	freed  atomic.Bool

	mu     sync.Mutex
	tables []device.Ptr // peer tables of the tensor and its slices
}

// Zeros allocates a symmetric tensor, filled with zeros, on the memory's device. Every rank does the same, and then Rendezvous. It is local,
// except over a backend that must allocate collectively (see [backend.Capabilities]): there it blocks until all ranks have come, and sizes
// that differ are ErrMismatch. No dimension is a scalar; a dimension of 0 is an empty tensor, valid without memory. ErrInvalid for an unknown
// dtype, a negative dimension or a size that overflows; ErrNoMemory; ErrClosed; ErrPeerLost. Close the tensor.
func Zeros(ctx context.Context, m *memory.Memory, dtype DType, shape ...int64) (*Tensor, error) {
	return ZerosNamed(ctx, m, "", dtype, shape...)
}

// ZerosNamed is Zeros with a name that the ranks compare at rendezvous (ErrMismatch) and that errors and logs show.
func ZerosNamed(ctx context.Context, m *memory.Memory, name string, dtype DType, shape ...int64) (*Tensor, error) {
	if err := given("Zeros", ctx, m); err != nil {
		return nil, named(name, err)
	}
	bytes, err := checkShape("Zeros", dtype, shape)
	if err != nil {
		return nil, named(name, err)
	}
	a, err := m.Allocate(ctx, bytes, name)
	if err != nil {
		return nil, named(name, err)
	}
	return newOwner(m, a, name, bytes, dtype, shape), nil
}

// FromPtr makes a symmetric tensor of memory that the caller owns, at p on the memory's device; the caller keeps it until the
// tensor is closed. Its elements stay as they are. Local. ErrUnsupported where the backend cannot adopt memory; ErrInvalid for memory that it
// cannot adopt, for a p that is no multiple of an element's size, and for what Zeros refuses. Close the tensor: the memory is the caller's again.
func FromPtr(ctx context.Context, m *memory.Memory, p device.Ptr, dtype DType, shape ...int64) (*Tensor, error) {
	if err := given("FromPtr", ctx, m); err != nil {
		return nil, err
	}
	bytes, err := checkShape("FromPtr", dtype, shape)
	if err != nil {
		return nil, err
	}
	var a backend.Allocation
	switch size := dtype.Bytes(); {
	case bytes == 0:
		a, err = m.Empty("")
	case uint64(p)%uint64(size) != 0:
		err = errs.Invalid("FromPtr", "p", p, fmt.Sprintf("a multiple of %d bytes, the size of an element", size))
	default:
		a, err = m.Register(ctx, p, bytes, "")
	}
	if err != nil {
		return nil, err
	}
	return newOwner(m, a, "", bytes, dtype, shape), nil
}

// given checks what every tensor is made with.
func given(op string, ctx context.Context, m *memory.Memory) error {
	return errors.Join(errs.Given(op, "ctx", ctx, "a context"), errs.Given(op, "memory", m, "the symmetric memory of a rank"))
}

// named is an error about a tensor of that name, if it has one.
func named(name string, err error) error {
	if name == "" || err == nil {
		return err
	}
	return fmt.Errorf("tensor %q: %w", name, err)
}

func newOwner(m *memory.Memory, a backend.Allocation, name string, bytes int64, dtype DType, shape Shape) *Tensor {
	st := &storage{memory: m, alloc: a}
	t := &Tensor{storage: st, name: name, bytes: bytes, dtype: dtype, shape: slices.Clone(shape)}
	// Symmetric memory is freed by all ranks together, so the garbage collector of one must not: it only tells of the leak.
	runtime.AddCleanup(t, func(st *storage) {
		if !st.freed.Load() && st.memory.Err() == nil {
			st.memory.Logger().Warn("a symmetric tensor was dropped without Close; its memory stays until the rank closes",
				slog.String("name", name), slog.Any("address", st.alloc.Ptr()), slog.Int64("bytes", st.alloc.Bytes()), slog.String("allocated at", st.memory.Place(st.alloc)))
		}
	}, st)
	return t
}

func (t *Tensor) tensor() *Tensor { return t }

// orZero is the tensor, or a zero one for nil.
func (t *Tensor) orZero() *Tensor {
	if t == nil {
		return new(Tensor)
	}
	return t
}

// DType is the type of the elements.
func (t *Tensor) DType() DType { return t.orZero().dtype }

// Shape is the size of each dimension. It must not be changed.
func (t *Tensor) Shape() Shape { return t.orZero().shape }

// NumElements is the number of elements of one rank's copy.
func (t *Tensor) NumElements() int64 {
	if t == nil || t.storage == nil {
		return 0 // and no scalar
	}
	return t.shape.NumElements()
}

// Bytes is the size of one rank's copy.
func (t *Tensor) Bytes() int64 { return t.orZero().bytes }

// Rank is this rank in the group that has the tensor.
func (t *Tensor) Rank() int {
	if t == nil || t.storage == nil {
		return 0
	}
	return t.storage.memory.Group().Rank()
}

// WorldSize is the number of ranks that have the tensor.
func (t *Tensor) WorldSize() int {
	if t == nil || t.storage == nil {
		return 0
	}
	return t.storage.memory.Group().Size()
}

// Device is the device that holds this rank's copy.
func (t *Tensor) Device() device.Device { return t.Memory().Device() }

// Memory is the symmetric memory that the tensor lies in.
func (t *Tensor) Memory() *memory.Memory {
	if t == nil || t.storage == nil {
		return nil
	}
	return t.storage.memory
}

// Offset is how many bytes into its allocation the tensor begins: 0 unless it is a slice, or from a [Heap], where it counts in the heap.
func (t *Tensor) Offset() int64 { return t.orZero().offset }

// Name is what the tensor was named, as are the slices of it; "" if it has no name.
func (t *Tensor) Name() string { return t.orZero().name }

// String describes the tensor for logs and errors.
func (t *Tensor) String() string {
	if t == nil || t.storage == nil {
		return "no tensor"
	}
	if t.name != "" {
		return fmt.Sprintf("%q %s%v on rank %d of %d", t.name, t.dtype, t.shape, t.Rank(), t.WorldSize())
	}
	return fmt.Sprintf("%s%v on rank %d of %d", t.dtype, t.shape, t.Rank(), t.WorldSize())
}

// Err is nil as long as the tensor can be used, and ErrClosed once it, what it is a slice of, or its group was closed. It is cheap. That a
// peer was lost is the group's to tell: see [memory.Memory.Err].
func (t *Tensor) Err() error {
	if t == nil || t.storage == nil {
		return errs.Invalid("using a tensor", "tensor", "the zero Tensor", "one that Zeros, ZerosNamed, FromPtr, Slice, Sub or a Heap gave")
	}
	if t.ended() {
		return fmt.Errorf("tensor %s: %w", t, errs.ErrClosed)
	}
	if err := t.storage.memory.Closed(); err != nil {
		return fmt.Errorf("tensor %s: %w", t, err)
	}
	if p := t.storage.piece; p != nil {
		if err := p.Err(); err != nil {
			return fmt.Errorf("tensor %s: %w", t, err)
		}
	}
	return nil
}

// ended reports whether the tensor, or what it is a slice of, was closed.
func (t *Tensor) ended() bool {
	for part := t; part != nil; part = part.whole {
		if part.closed.Load() {
			return true
		}
	}
	return false
}

// met gives the window, from the tensor's own rendezvous or that of what it is a slice of; nil before.
func (t *Tensor) met() *memory.Window {
	for part := t; part != nil; part = part.whole {
		if w := part.window.Load(); w != nil {
			return w
		}
	}
	return nil
}

// mapped gives the window, or says why there is none.
func (t *Tensor) mapped() (*memory.Window, error) {
	if err := t.Err(); err != nil {
		return nil, err
	}
	w := t.met()
	if w == nil {
		return nil, fmt.Errorf("tensor %s: %w", t, errs.ErrNoRendezvous)
	}
	return w, nil
}

func (t *Tensor) view(p device.Ptr, shape Shape) *View {
	return newView(t.Device(), p, t.name, t.dtype, shape, t.Err)
}

// Ptr is the address of this rank's first element; nil for an empty tensor.
func (t *Tensor) Ptr() device.Ptr {
	if t.Bytes() == 0 {
		return 0
	}
	return t.storage.alloc.Ptr().Add(t.offset)
}

// Local is the view on this rank's copy. It needs no rendezvous.
func (t *Tensor) Local() *View {
	if t == nil || t.storage == nil {
		return new(View)
	}
	return t.view(t.Ptr(), t.shape)
}

// Rendezvous makes every rank's copy reachable by all. Collective: every rank comes with a tensor of the same name, dtype, shape and
// offset, in the same order; otherwise every rank gets ErrMismatch with everybody's value. A tensor that has had its
// rendezvous, or a slice of one, returns at once, on each rank by itself; that of a slice is not its tensor's. It blocks until all ranks
// have come or ctx has ended. A rank whose tensor was closed before comes too, and every rank gets an ErrClosed that names it.
func (t *Tensor) Rendezvous(ctx context.Context) error {
	t = t.orZero()
	if err := errs.Given("Rendezvous", "ctx", ctx, "a context"); err != nil {
		return named(t.name, err)
	}
	if t.storage == nil {
		return t.Err()
	}
	if t.met() != nil {
		return t.Err() // the others do not come again, also where this rank has closed it; a heap's tensor has had it from the beginning
	}
	m := t.storage.memory
	err := m.InTurn(ctx, "rendezvous", func(ctx context.Context, _ error) error {
		if t.met() != nil {
			return nil // an earlier call of another goroutine was its rendezvous, for the others too
		}
		if closed := t.Err(); closed != nil {
			return m.FailRendezvous(ctx, closed)
		}
		w, err := m.Rendezvous(ctx, t.storage.alloc, memory.Record{DType: t.dtype.String(), Shape: t.shape.String(), Offset: t.offset})
		if err == nil {
			t.window.Store(w) // the others have it too, whatever was closed meanwhile
		}
		return err
	})
	if closed := t.Err(); closed != nil {
		return closed
	}
	if err != nil {
		return fmt.Errorf("tensor %s: %w", t, err)
	}
	return nil
}

// Window is the window that the tensor's memory belongs to, and the tensor's first byte in it. The window is that of the whole allocation
// and the same object for all tensors in it (a tensor from a [Heap] has one of its own, with the addresses and offsets of the heap's); [memory.Window.Number] names it alike on every rank, and [memory.Window.Peer],
// [memory.Window.Multicast] and [memory.Window.Handle] take the offset. Local. ErrNoRendezvous before the rendezvous.
func (t *Tensor) Window() (w *memory.Window, offset int64, err error) {
	if w, err = t.mapped(); err != nil {
		return nil, 0, err
	}
	return w, t.offset, nil
}

// Remote is the view on rank's copy; for the own rank it is Local. Local. ErrNoRendezvous before the rendezvous, ErrNotReachable where the
// peer's memory has no address here, ErrInvalid for a rank that does not exist.
func (t *Tensor) Remote(rank int) (*View, error) {
	w, err := t.mapped()
	if err != nil {
		return nil, err
	}
	if size := t.WorldSize(); rank < 0 || rank >= size {
		return nil, named(t.name, errs.Invalid("Remote", "rank", rank, fmt.Sprintf("0 to %d, the ranks of the group", size-1)))
	}
	p, err := w.Peer(rank, t.offset)
	if err != nil {
		return nil, named(t.name, err)
	}
	if t.bytes == 0 {
		p = 0
	}
	return t.view(p, t.shape), nil
}

// EnableMulticast gives the memory of t, its slices' too, an address that reaches all ranks' copies at once. Collective, after the
// rendezvous: every rank comes, in the same order. Again, and for a slice of memory that has it, it is nothing. It blocks until all ranks
// have come or ctx has ended. See [memory.Memory.EnableMulticast] for the errors and for what it takes.
func (t *Tensor) EnableMulticast(ctx context.Context) error {
	t = t.orZero()
	if err := errs.Given("EnableMulticast", "ctx", ctx, "a context"); err != nil {
		return named(t.name, err)
	}
	if t.storage == nil {
		return t.Err()
	}
	w, err := t.mapped()
	// A rank that cannot comes all the same: the others may be waiting.
	if err := t.storage.memory.EnableMulticast(ctx, w, err); err != nil {
		return fmt.Errorf("tensor %s: %w", t, err)
	}
	return nil
}

// Multicast is the address that reaches all ranks' copies at once; nil for an empty tensor. Local. ErrNoRendezvous before the rendezvous,
// ErrNoMulticast before EnableMulticast, and ErrUnsupported, with the reason, where there can be none.
func (t *Tensor) Multicast() (device.Ptr, error) {
	w, err := t.mapped()
	if err != nil {
		return 0, err
	}
	p, err := w.Multicast(t.offset)
	if t.bytes == 0 {
		p = 0
	}
	return p, named(t.name, err)
}

// Contiguous is the view on all ranks' copies: their shape with the world size in front. Between one rank's copy and the next one's there
// may be a gap, which the view's strides tell. Local. ErrNoRendezvous before the rendezvous, ErrUnsupported where the backend does not lay
// the copies side by side.
func (t *Tensor) Contiguous() (*View, error) {
	w, err := t.mapped()
	if err != nil {
		return nil, err
	}
	p, stride, err := w.Contiguous(t.offset)
	if err != nil {
		return nil, named(t.name, err)
	}
	if t.bytes == 0 {
		p = 0
	}
	v := t.view(p, append(Shape{int64(t.WorldSize())}, t.shape...))
	v.strides[0] = stride / t.dtype.Bytes()
	return v, nil
}

// PeerTable is the address, in device memory, of the addresses of all ranks' copies: WorldSize little-endian 64-bit words, 0 for a
// peer whose memory has no address here, and nil for an empty tensor. It is made once and lives until the memory is given back. Local; it may block
// while memory is found. ErrNoRendezvous before the rendezvous, ErrNoMemory where the device has no room for the table.
func (t *Tensor) PeerTable() (device.Ptr, error) {
	w, err := t.mapped()
	if err != nil {
		return 0, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.table.IsNil() {
		return t.table, nil
	}
	var words []byte
	for r := range t.WorldSize() {
		p, err := w.Peer(r, t.offset)
		if err != nil && !errors.Is(err, errs.ErrNotReachable) {
			return 0, named(t.name, err)
		}
		if t.bytes == 0 || err != nil {
			p = 0
		}
		words = binary.LittleEndian.AppendUint64(words, uint64(p))
	}
	st := t.storage
	st.mu.Lock()
	defer st.mu.Unlock()
	if err := t.Err(); err != nil {
		return 0, err
	}
	table, err := t.Device().Alloc(int64(len(words)))
	if err != nil {
		return 0, named(t.name, fmt.Errorf("peer table: %w", err))
	}
	if err := t.Device().CopyFromHost(table, words); err != nil {
		return 0, named(t.name, fmt.Errorf("peer table: %w", errors.Join(err, t.Device().Free(table))))
	}
	st.keepTable(table)
	t.table = table
	return table, nil
}

// Slice is the part from start (included) to end (excluded) along the first dimension, on the same memory. It needs no
// rendezvous of its own once t has had one, before or after. It ends with t. Local. ErrInvalid for a scalar, or a range outside of the
// dimension.
func (t *Tensor) Slice(start, end int64) (SymmetricTensor, error) {
	t = t.orZero()
	part, err := t.slice(start, end)
	if err != nil {
		return nil, named(t.name, err)
	}
	return part, nil
}

func (t *Tensor) slice(start, end int64) (*Tensor, error) {
	if len(t.shape) == 0 {
		return nil, errs.Invalid("Slice", "tensor", "a scalar", "a tensor of at least one dimension")
	}
	if start < 0 || start > t.shape[0] {
		return nil, errs.Invalid("Slice", "start", start, fmt.Sprintf("0 to %d", t.shape[0]))
	}
	if end < start || end > t.shape[0] {
		return nil, errs.Invalid("Slice", "end", end, fmt.Sprintf("%d to %d", start, t.shape[0]))
	}
	row := t.shape[1:].NumElements()
	shape := slices.Clone(t.shape)
	shape[0] = end - start
	return t.sub("Slice", start*row, shape)
}

// Sub is a tensor of the given shape on the same memory, beginning offset elements after t's first. Otherwise it is as Slice. ErrInvalid
// where it does not lie inside of t.
func (t *Tensor) Sub(offset int64, shape ...int64) (SymmetricTensor, error) {
	t = t.orZero()
	part, err := t.sub("Sub", offset, shape)
	if err != nil {
		return nil, named(t.name, err)
	}
	return part, nil
}

func (t *Tensor) sub(op string, offset int64, shape Shape) (*Tensor, error) {
	if err := t.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	bytes, err := checkShape(op, t.dtype, shape)
	if err != nil {
		return nil, err
	}
	if offset < 0 || offset > t.NumElements() {
		return nil, errs.Invalid(op, "offset", offset, fmt.Sprintf("0 to %d", t.NumElements()))
	}
	if left := t.bytes - offset*t.dtype.Bytes(); bytes > left {
		return nil, errs.Invalid(op, "shape", Shape(shape), fmt.Sprintf("at most %d elements after offset %d", left/t.dtype.Bytes(), offset))
	}
	return &Tensor{storage: t.storage, whole: t, name: t.name, offset: t.offset + offset*t.dtype.Bytes(), bytes: bytes, dtype: t.dtype, shape: slices.Clone(shape)}, nil
}

// Lasting returns a tensor of the elements of t, which may be closed already, that ends when their memory does and not with a slice: for who keeps t for
// longer than its caller. If t is no slice it is t. No elements have no memory that could be given back: without them it ends when the rank's symmetric memory is closed. It has had its
// rendezvous if t has, and is not to be closed. Local. ErrClosed once the memory was closed; ErrInvalid for no tensor.
func Lasting(t SymmetricTensor) (SymmetricTensor, error) {
	if err := errs.Given("Lasting", "t", t, "a tensor"); err != nil {
		return nil, err
	}
	part := t.tensor()
	owner := part
	for owner.whole != nil {
		owner = owner.whole
	}
	lasting := &Tensor{storage: part.storage, whole: owner, name: part.name, offset: part.offset, bytes: part.bytes, dtype: part.dtype, shape: part.shape}
	if part.storage != nil && part.bytes == 0 {
		m := part.storage.memory
		if err := m.Closed(); err != nil {
			return nil, fmt.Errorf("tensor %s: %w", part, err)
		}
		lasting.storage, lasting.whole = &storage{memory: m, alloc: part.storage.alloc}, nil // which knows of no heap, nor of who closes
	} else if err := owner.Err(); err != nil {
		return nil, err
	} else if owner == part {
		return t, nil
	}
	if w := part.met(); w != nil {
		lasting.window.Store(w)
	}
	return lasting, nil
}

// Close gives the memory back when this rank's device has nothing left to do, and no goroutine is enqueueing a plan's run, until when it blocks. After a rendezvous, of a slice too, it
// is collective: it waits for all ranks, so that nobody unmaps what a peer may still write. Slices end with it. If ctx ends while this rank's
// device still works, nothing is given back: close again. If a peer is lost (ErrPeerLost) this rank's memory is given back all the same. If the
// ranks close different tensors at once, or one of them is in another call, all get ErrMismatch: see [memory.Memory.Free]. A
// slice's Close ends the slice and slices of it, locally, and gives nothing back. That of a tensor from a [Heap] is local too, and waits for
// nothing: see [Heap.Zeros]. Closing twice is ErrClosed.
func (t *Tensor) Close(ctx context.Context) error {
	t = t.orZero()
	if err := errs.Given("Close", "ctx", ctx, "a context"); err != nil {
		return named(t.name, err)
	}
	if t.whole != nil {
		if err := t.Err(); err != nil {
			return err
		}
		if t.closed.Swap(true) {
			return fmt.Errorf("tensor %s: %w", t, errs.ErrClosed) // just now, by another goroutine
		}
		return nil
	}
	st := t.storage
	if st == nil {
		return t.Err()
	}
	if t.closed.Swap(true) {
		return fmt.Errorf("tensor %s: %w", t, errs.ErrClosed)
	}
	if st.piece != nil {
		st.freed.Store(true)
		return named(t.name, st.piece.Free())
	}
	if err := st.memory.Free(ctx, st.alloc); err != nil {
		if st.memory.Holds(st.alloc) {
			t.closed.Store(false)
		} else {
			st.freed.Store(true)
			err = errors.Join(err, st.freeTables())
		}
		return fmt.Errorf("tensor %s: %w", t, err)
	}
	st.freed.Store(true)
	return st.freeTables()
}

// freeTables gives the peer tables back.
func (st *storage) freeTables() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	var err error
	for _, p := range st.tables {
		err = errors.Join(err, st.memory.Device().Free(p))
	}
	st.tables = nil
	if errors.Is(err, errs.ErrClosed) {
		return nil // the device has gone, and its memory with it
	}
	return err
}
