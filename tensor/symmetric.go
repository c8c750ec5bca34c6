package tensor

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/memory"
)

// SymmetricTensor is a tensor that every rank of a group has, alike: what collectives and programs are written against. A [Tensor] is one,
// over every backend, and so is each slice of one, which has all that the whole tensor has. Other packages cannot implement it: it grows.
//
// Methods may be called from several goroutines at once; the collective ones must come in the same order on every rank. Errors name the
// tensor, if it has a name. All methods that can fail are ErrClosed once the tensor was closed, see Err.
type SymmetricTensor interface {
	// String describes the tensor for logs and errors: its name, dtype, shape, rank and world size.
	fmt.Stringer

	// Name is what the tensor was named, as are the slices of it; "" if it has no name.
	Name() string
	// DType is the type of the elements.
	DType() DType
	// Shape is the size of each dimension, in elements. It must not be changed.
	Shape() Shape
	// NumElements is the number of elements of one rank's copy.
	NumElements() int64
	// Bytes is the size of one rank's copy.
	Bytes() int64
	// Offset is how many bytes into its allocation the tensor begins: 0 unless it is a slice, or from a [Heap], where it counts in the heap.
	Offset() int64
	// Rank is this rank, and WorldSize the number of ranks that have the tensor.
	Rank() int
	WorldSize() int
	// Device is the device that holds this rank's copy.
	Device() device.Device
	// Memory is the symmetric memory that the tensor lies in.
	Memory() *memory.Memory

	// Err is nil as long as the tensor can be used, and ErrClosed once it, what it is a slice of, or its group was closed. It is cheap.
	Err() error
	// Ptr is the address of this rank's first element; nil for an empty tensor.
	Ptr() device.Ptr
	// Local is the view on this rank's copy. It needs no rendezvous.
	Local() *View
	// Rendezvous makes every rank's copy reachable by all. Collective: it blocks until every rank has come with a tensor of the same dtype,
	// shape and offset, or ctx has ended; ErrMismatch where they differ. After the first time it is nothing, as it is for a slice of a
	// tensor that has had its rendezvous. What needs it is ErrNoRendezvous before.
	Rendezvous(ctx context.Context) error
	// Window is the window that the tensor's memory belongs to, and the tensor's first byte in it: where other ranks, kernels and
	// libraries find it. Local. ErrNoRendezvous before the rendezvous.
	Window() (w *memory.Window, offset int64, err error)
	// Remote is the view on rank's copy; for the own rank it is Local. Local. ErrNoRendezvous before the rendezvous, ErrNotReachable where
	// the peer's memory has no address here, ErrInvalid for a rank that does not exist.
	Remote(rank int) (*View, error)
	// EnableMulticast gives the memory that the tensor lies in an address that reaches all ranks' copies at once, for Multicast.
	// Collective: it blocks until every rank has come, or ctx has ended. After the first time it is nothing. ErrNoRendezvous before the
	// rendezvous; ErrUnsupported, with the reason, where there can be none. See [memory.Memory.EnableMulticast].
	EnableMulticast(ctx context.Context) error
	// Multicast is that address; nil for an empty tensor. Local. ErrNoRendezvous before the rendezvous, ErrNoMulticast before
	// EnableMulticast, ErrUnsupported, with the reason, where there can be none.
	Multicast() (device.Ptr, error)
	// Contiguous is the view on all ranks' copies: their shape with the world size in front. Local. ErrNoRendezvous before the rendezvous,
	// ErrUnsupported where the backend does not lay them side by side.
	Contiguous() (*View, error)
	// PeerTable is the address, in device memory, of the addresses of all ranks' copies: WorldSize little-endian 64-bit words, 0 for a
	// peer whose memory has no address here, nil for an empty tensor's. It is made once and lives as long as the memory. Local; it may block
	// while memory is found. ErrNoRendezvous before the rendezvous, ErrNoMemory where the device has no room for the table.
	PeerTable() (device.Ptr, error)

	// Put enqueues copying this rank's copy of src, of the same dtype and number of elements, to peer's copy of the tensor. It returns at
	// once; the peer does nothing for it, and knows that it has come only by a signal behind it. Later work of s runs after it. src needs
	// no rendezvous. ErrNoRendezvous before that of the tensor; ErrNotSymmetric where src is of another group; ErrInvalid for a dtype or
	// size that differs, a peer that does not exist or a stream of another device.
	Put(s device.Stream, peer int, src SymmetricTensor) error
	// PutSignal is Put with Signal behind it: when peer has waited for the signal, it sees the data. If it is refused, neither is enqueued.
	PutSignal(s device.Stream, peer int, src SymmetricTensor, channel int) error
	// PutSignalWait is PutSignal with Wait for the rank from behind it: what a rank of a ring does in one step, and for few bytes between GPUs
	// one launch. If any of it is refused, nothing is enqueued.
	PutSignalWait(s device.Stream, peer int, src SymmetricTensor, from, channel int) error
	// Get enqueues copying peer's copy of the tensor to this rank's copy of dst, as Put does the other way.
	Get(s device.Stream, peer int, dst SymmetricTensor) error
	// Signal enqueues telling peer, on channel, that all earlier work of s has ended. Signals are counted. It returns at once.
	// ErrNoRendezvous before the rendezvous, ErrInvalid for a peer or channel that does not exist or a stream of another device.
	// Channels are the memory's: tensors of one memory share them. See [memory.Memory.Signal].
	Signal(s device.Stream, peer, channel int) error
	// Wait enqueues waiting for one signal of peer on channel. It returns at once and holds the later work of s up, for at most the kernel
	// timeout; then, or when peer is lost, the stream has an error. Refusals are Signal's. See [memory.Memory.Wait].
	Wait(s device.Stream, peer, channel int) error
	// Barrier enqueues waiting until every rank's stream has come to its barrier on channel. It is bounded as Wait is, and its refusals are
	// Signal's. See [memory.Memory.Barrier].
	Barrier(s device.Stream, channel int) error

	// Slice is the part from start (included) to end (excluded) along the first dimension, on the same memory. It needs no rendezvous of
	// its own once this tensor has had one. Local. ErrInvalid for a scalar, or a range outside of the dimension.
	Slice(start, end int64) (SymmetricTensor, error)
	// Sub is a tensor of the given shape on the same memory, beginning offset elements after this one's first. Otherwise it is as Slice.
	// ErrInvalid where it does not lie inside of this one.
	Sub(offset int64, shape ...int64) (SymmetricTensor, error)

	// Close gives the tensor's memory back when this rank's device has nothing left to do. Collective after a rendezvous. Slices of it end
	// with it. A slice's Close ends that slice and slices of it, locally, and gives nothing back. See [Tensor.Close].
	Close(ctx context.Context) error

	// tensor is the tensor itself, which only this package makes.
	tensor() *Tensor
}
