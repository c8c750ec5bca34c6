package measure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/kernels"
)

// symmetricBlocks are the numbers of blocks that NCCL's symmetric kernels are tried with, so that the peer is at its best. 0 is NCCL's
// own choice, which is far from the best at many sizes.
var symmetricBlocks = []int{0, 16, 32, 64}

// symmetricComm is a communicator whose kernels have a number of blocks.
type symmetricComm struct {
	blocks int
	comm   *nccl.Comm
}

// name describes how many blocks the kernels have.
func (c symmetricComm) name() string {
	if c.blocks == 0 {
		return "NCCL's own number of blocks"
	}
	return fmt.Sprintf("%d blocks", c.blocks)
}

// connectSymmetric makes a communicator for each number of blocks. If that fails the peer is measured on plain memory alone, and rank 0
// reports why, unless NCCL has no such kernels for what is measured. Collective.
func (b *bencher) connectSymmetric(ctx context.Context) error {
	if b.r.WorldSize() < 2 || !slices.ContainsFunc(b.spec.Kinds, b.symmetricHas) {
		return nil
	}
	within, cancel := context.WithTimeout(ctx, b.spec.Peer.Timeout/2)
	defer cancel()
	failure := b.peer.lib.Require("ncclCommSplit", "ncclMemAlloc", "ncclCommWindowRegister")
	reason, err := b.agree(ctx, "looking for symmetric windows", failure)
	for i := 0; err == nil && reason == "" && i < len(symmetricBlocks); i++ {
		n := symmetricBlocks[i]
		comm, failure := b.peer.comm.Split(within, &nccl.Config{MinCTAs: n, MaxCTAs: n, NoMulticast: !b.spec.Peer.Multicast})
		if comm != nil {
			b.peer.symmetric = append(b.peer.symmetric, symmetricComm{n, comm})
		}
		if reason, err = b.agree(ctx, "connecting the peer's symmetric kernels", failure); err == nil && reason == "" && i == 0 {
			reason, err = b.trySymmetric(within, comm)
		}
	}
	if err != nil || reason == "" {
		return err
	}
	if err := b.closeSymmetric(ctx); err != nil || b.r.Rank() != 0 {
		return err
	}
	return b.rep.Row(Row{Kind: AllReduce, Backend: NCCLSymmetric, Beside: b.r.Backend(), Note: reason})
}

// closeSymmetric destroys the communicators. Collective.
func (b *bencher) closeSymmetric(ctx context.Context) error {
	var err error
	for _, c := range slices.Backward(b.peer.symmetric) {
		err = errors.Join(err, c.comm.Destroy(ctx))
	}
	b.peer.symmetric = nil
	return err
}

// trySymmetric makes a window and looks whether it is one, because NCCL reports success even where it can make none. It returns the
// reason why the ranks cannot, "" if they can. Collective.
func (b *bencher) trySymmetric(ctx context.Context, comm *nccl.Comm) (reason string, err error) {
	w, failure := b.newWindow(ctx, 1)
	if reason, err = b.agree(ctx, "memory for the peer's symmetric windows", failure); err == nil && reason == "" {
		failure = w.register(ctx, comm)
		if failure == nil {
			failure = errors.Join(w.guard(), w.deregister(ctx))
		}
		reason, err = b.agree(ctx, "trying the peer's symmetric windows", failure)
	}
	if w != nil {
		err = errors.Join(err, w.free())
	}
	return reason, err
}

// peerWindow is memory of NCCL's that can be a symmetric window of one communicator at a time.
type peerWindow struct {
	peer   *ncclPeer
	ptr    device.Ptr
	bytes  int64
	window *nccl.Window
}

// newWindow allocates memory and fills it with zeros.
func (b *bencher) newWindow(ctx context.Context, bytes int64) (*peerWindow, error) {
	w := &peerWindow{peer: b.peer, bytes: bytes}
	err := b.peer.device.WithContext(func() error {
		p, err := b.peer.lib.MemAlloc(bytes)
		w.ptr = device.Ptr(p)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := errors.Join(b.s.Fill(w.ptr, 0, bytes), b.s.Synchronize(ctx)); err != nil {
		return nil, err
	}
	return w, nil
}

// register makes the memory a window of comm. Collective.
func (w *peerWindow) register(ctx context.Context, comm *nccl.Comm) error {
	var err error
	w.window, err = comm.Register(ctx, uint64(w.ptr), w.bytes, nccl.WindowSymmetric)
	return err
}

// guard returns an error if NCCL has made no window of the memory.
func (w *peerWindow) guard() error {
	var where cu.MemoryType
	return w.peer.device.WithContext(func() error {
		r := w.peer.device.Driver().PointerGetAttribute(unsafe.Pointer(&where), cu.PointerMemoryType, device.Ptr(w.window.Handle()))
		if w.window.Handle() == 0 || r != cu.Success || where != cu.MemoryDevice {
			return errors.New("NCCL makes no symmetric windows here")
		}
		return nil
	})
}

func (w *peerWindow) deregister(ctx context.Context) error { return w.window.Deregister(ctx) }

func (w *peerWindow) free() error {
	return w.peer.device.WithContext(func() error { return w.peer.lib.MemFree(uint64(w.ptr)) })
}

// symmetricHas reports whether NCCL may have symmetric kernels for a kind: of those that combine, for some dtypes and operations.
func (b *bencher) symmetricHas(kind string) bool {
	switch kind {
	case Broadcast, AllGather, AllToAll:
		return true
	case AllReduce, Reduce, ReduceScatter:
		return kernels.Supported(device.CUDA, kernels.NCCLSymmetric, b.dtype, b.op, b.r.WorldSize())
	}
	return false
}

// symmetricCollective is ncclCollective over symmetric windows with each number of blocks, of which it reports the
// fastest. Collective.
func (b *bencher) symmetricCollective(ctx context.Context, like Row) error {
	if len(b.peer.symmetric) == 0 || !b.symmetricHas(like.Kind) {
		return nil
	}
	ins, outs := b.sides(like)
	in, failure := b.newWindow(ctx, ins)
	out := in
	if failure == nil && like.Place != inPlace {
		out, failure = b.newWindow(ctx, outs)
	}
	if err := b.r.Group().Vote(ctx, "memory for the peer's symmetric windows", failure); err != nil {
		return err // what there is of it ends with the process
	}
	var best []float64 // of the slowest rank, by repetition
	chosen := ""
	for _, c := range b.peer.symmetric {
		windows := []*peerWindow{in}
		if out != in {
			windows = append(windows, out)
		}
		for _, w := range windows {
			if err := w.register(ctx, c.comm); err != nil {
				return err
			}
		}
		times, err := b.measureNCCL(ctx, like, c.comm, in.ptr, out.ptr)
		if err != nil {
			return fmt.Errorf("with %s: %w", c.name(), err)
		}
		slowest, err := b.slowest(ctx, times)
		if err != nil {
			return err
		}
		// All ranks see the same times, so they choose the same.
		if best == nil || median(slowest) < median(best) {
			best, chosen = slowest, c.name()
		}
		for _, w := range windows {
			if err := w.deregister(ctx); err != nil {
				return err
			}
		}
	}
	row := like
	row.Backend, row.Beside, row.Algorithm, row.Chosen = NCCLSymmetric, b.r.Backend(), "", chosen
	row.Note = b.peer.about + ", symmetric windows instead of plain memory, the fastest of several numbers of blocks"
	if err := b.tellRow(row, best); err != nil {
		return err
	}
	var err error
	if out != in {
		err = out.free()
	}
	return errors.Join(err, in.free())
}
