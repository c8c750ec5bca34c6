package tensor

import (
	"fmt"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// pair checks that other can be the local side of a transfer to or from remote.
func pair(op, arg string, other, remote SymmetricTensor) error {
	if err := errs.Given(op, arg, other, "a symmetric tensor"); err != nil {
		return err
	}
	switch err := other.Err(); {
	case err != nil:
		return fmt.Errorf("%s: %s: %w", op, arg, err)
	case other.Memory() != remote.Memory():
		return fmt.Errorf("%s: %s is memory of another group or device: %w", op, arg, errs.ErrNotSymmetric)
	case other.DType() != remote.DType():
		return errs.Invalid(op, arg+".DType", other.DType(), remote.DType().String()+", the dtype of the remote side")
	case other.Bytes() != remote.Bytes():
		return errs.Invalid(op, arg+".NumElements", other.NumElements(), fmt.Sprintf("%d, the size of the remote side", remote.NumElements()))
	}
	return nil
}

// Put enqueues copying this rank's copy of src, of the same dtype and number of elements, to peer's copy of t. It returns at once, and later
// work of s runs after it; the peer does nothing for it, and knows that it has come only by a signal behind it (see PutSignal). src needs no
// rendezvous, and may be t: its copy on this rank. ErrNoRendezvous before the rendezvous of t; ErrClosed for either side; ErrNotSymmetric for
// a src of another group; ErrInvalid for what is nil, a dtype or size that differs, a peer that does not exist, a stream of another device, or, where
// peer is this rank, a src that overlaps with t in part; ErrPeerLost once a rank is lost.
func (t *Tensor) Put(s device.Stream, peer int, src SymmetricTensor) error {
	w, local, err := t.move("Put", "src", src)
	if err != nil {
		return err
	}
	return named(t.name, t.storage.memory.Copy(s, backend.Write, peer, w, t.offset, local, t.bytes))
}

// PutSignal is Put with Signal behind it: when peer has waited for the signal, it sees the data. What either refuses it refuses, and
// enqueues nothing then. Where the CPU signals behind a put that the backend carries out, or that a graph keeps, one that fails when it runs is followed by no signal: the peer goes on
// waiting, and both can be enqueued again.
func (t *Tensor) PutSignal(s device.Stream, peer int, src SymmetricTensor, channel int) error {
	w, local, err := t.move("PutSignal", "src", src)
	if err != nil {
		return err
	}
	return named(t.name, t.storage.memory.PutSignal(s, peer, w, t.offset, local, t.bytes, channel))
}

// PutSignalWait is PutSignal to peer with Wait for the rank from behind it, on the same channel: what a rank of a ring does in one step. Between GPUs that reach each other
// and for up to 64 KiB it is one launch, which takes half of the time that the CPU needs for two. What either refuses it refuses, and enqueues nothing then. See
// [memory.Memory.PutSignalWait].
func (t *Tensor) PutSignalWait(s device.Stream, peer int, src SymmetricTensor, from, channel int) error {
	w, local, err := t.move("PutSignalWait", "src", src)
	if err != nil {
		return err
	}
	return named(t.name, t.storage.memory.PutSignalWait(s, peer, w, t.offset, local, t.bytes, from, channel))
}

// Get enqueues copying peer's copy of t to this rank's copy of dst, of the same dtype and number of elements. Otherwise it is as Put.
func (t *Tensor) Get(s device.Stream, peer int, dst SymmetricTensor) error {
	w, local, err := t.move("Get", "dst", dst)
	if err != nil {
		return err
	}
	return named(t.name, t.storage.memory.Copy(s, backend.Read, peer, w, t.offset, local, t.bytes))
}

// move gives the two sides of a move between a peer's copy of t and this rank's copy of other.
func (t *Tensor) move(op, arg string, other SymmetricTensor) (*memory.Window, device.Ptr, error) {
	w, err := t.mapped()
	if err != nil {
		return nil, 0, err
	}
	if err := pair(op, arg, other, t); err != nil {
		return nil, 0, named(t.name, err)
	}
	return w, other.Ptr(), nil
}

// Signal enqueues telling peer, on channel, that all earlier work of s has ended. It returns at once. The channels are those of the memory,
// which all its tensors share. ErrNoRendezvous before the rendezvous, ErrInvalid for a peer or channel that does not exist or a stream of
// another device, ErrPeerLost once a rank is lost. See [memory.Memory.Signal].
func (t *Tensor) Signal(s device.Stream, peer, channel int) error {
	if _, err := t.mapped(); err != nil {
		return err
	}
	return named(t.name, t.storage.memory.Signal(s, peer, channel))
}

// Wait enqueues waiting for one signal of peer on channel. It returns at once; the later work of s is held up for at most the kernel timeout,
// and then, or when peer is lost, the stream has an error. Refusals are those of Signal. See [memory.Memory.Wait].
func (t *Tensor) Wait(s device.Stream, peer, channel int) error {
	if _, err := t.mapped(); err != nil {
		return err
	}
	return named(t.name, t.storage.memory.Wait(s, peer, channel))
}

// Barrier enqueues waiting until every rank's stream has come to its barrier on channel. It is bounded as Wait is, and refusals are those of
// Signal. See [memory.Memory.Barrier].
func (t *Tensor) Barrier(s device.Stream, channel int) error {
	if _, err := t.mapped(); err != nil {
		return err
	}
	return named(t.name, t.storage.memory.Barrier(s, channel))
}

// Pair is one piece of a transfer: this rank's copy of Local, which needs no rendezvous, and the peer's copy of Remote, of the same dtype
// and number of elements. Either may be a slice.
type Pair struct {
	Local, Remote SymmetricTensor
}

// PrepareTransfer prepares moving the pairs between this rank and peer, once, to be posted many times: [backend.Write] copies each Local to
// the peer's Remote, [backend.Read] the other way. Local; the peer does nothing for it. Remote must have had its rendezvous (ErrNoRendezvous),
// Local need not. ErrInvalid for no pairs, what is nil, a dtype or size that differs, or a peer that does not exist; ErrClosed for a side that
// was closed; ErrNotSymmetric for tensors of different groups. Close the transfer. See [memory.Memory.PrepareTransfer].
func PrepareTransfer(op backend.TransferOp, peer int, pairs ...Pair) (*memory.Transfer, error) {
	if len(pairs) == 0 {
		return nil, errs.Invalid("PrepareTransfer", "pairs", "an empty list", "at least one pair")
	}
	var m *memory.Memory
	blocks := make([]memory.TransferBlock, len(pairs))
	for i, p := range pairs {
		arg := fmt.Sprintf("pairs[%d]", i)
		if err := errs.Given("PrepareTransfer", arg+".Remote", p.Remote, "a symmetric tensor"); err != nil {
			return nil, err
		}
		w, offset, err := p.Remote.Window()
		if err != nil {
			return nil, fmt.Errorf("preparing a transfer: %s.Remote: %w", arg, err)
		}
		if err := pair("PrepareTransfer", arg+".Local", p.Local, p.Remote); err != nil {
			return nil, named(p.Remote.Name(), err)
		}
		if m == nil {
			m = p.Remote.Memory()
		}
		if m != p.Remote.Memory() {
			return nil, named(p.Remote.Name(), fmt.Errorf("preparing a transfer: %s is memory of another group or device than pairs[0]: %w", arg, errs.ErrNotSymmetric))
		}
		blocks[i] = memory.TransferBlock{Local: p.Local.Ptr(), Window: w, Offset: offset, Bytes: p.Remote.Bytes()}
	}
	x, err := m.PrepareTransfer(op, peer, blocks)
	return x, named(pairs[0].Remote.Name(), err)
}
