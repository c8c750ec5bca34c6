package nccl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"
	"unsafe"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
)

// window is an allocation that is registered with the communicator, as one rank sees it. Several adopted parts of the
// allocation share it.
type window struct {
	native *nccl.Window
	users  int
	peers  []device.Ptr // of the allocation's first byte, by rank; the own rank's is NCCL's second address of it
	stride int64        // from one rank's copy to the next, or 0 if that is not known
	none   error        // why NCCL has made none, which a rank that is alone can do without; nil if it has
}

// reach is what the trial window has shown about all windows of the communicator.
type reach struct {
	first, ranks  int    // the ranks that have addresses here
	notContiguous string // why there is no contiguous view; "" if there is
	unreachable   string // which ranks have none; "" if all have
	none          error  // why there are no windows, of a rank that is alone; nil if there are
}

// register makes the window of a whole allocation. Collective; every rank's allocation has the same size.
func (b *Backend) register(ctx context.Context, base device.Ptr, bytes int64) (*window, error) {
	began := time.Now()
	defer b.lib.Log()
	within, end := b.together(ctx, "registering a window")
	native, err := b.near.Register(within, uint64(base), bytes, b.flags)
	b.givenUp(err, base)
	if err := end(err); err != nil {
		return nil, err
	}
	w := &window{native: native, peers: make([]device.Ptr, b.group.Size())}
	err = b.device.WithContext(func() error { return b.guard(native) })
	switch {
	case err == nil:
		err = b.resolve(w)
	case b.near.Ranks() == 1 && errors.Is(err, errs.ErrUnsupported) && !ofDriver(err):
		// One rank needs no window: 2.28.3 makes none for it (ncclTransportCheckP2pType in transport.cc).
		w.peers[b.group.Rank()], w.none, err = base, err, nil
	}
	if err != nil {
		return nil, errors.Join(err, b.deregister(ctx, w, base))
	}
	b.log.Info("window registered", "communicator", fmt.Sprintf("%#x", uintptr(b.near.Handle())), "address", base, "bytes", bytes, "window", fmt.Sprintf("%#x",
		native.Handle()),
		"symmetric", b.flags == nccl.WindowSymmetric, "milliseconds", float64(time.Since(began).Microseconds())/1e3)
	return w, nil
}

// guard makes sure that NCCL has made a window. Where NCCL cannot make one, it reports success and returns no handle, or a handle of something else
// (ncclCommWindowRegister in dev_runtime.cc of 2.28). The context is current.
func (b *Backend) guard(w *nccl.Window) error {
	if w.Handle() == 0 {
		return b.noWindows("it gave none")
	}
	var where cu.MemoryType
	r := b.drv.PointerGetAttribute(unsafe.Pointer(&where), cu.PointerMemoryType, device.Ptr(w.Handle()))
	if r != cu.Success {
		return b.noWindows("what it gave is none, as the driver has it: " + b.drv.Check("cuPointerGetAttribute", r).Error())
	}
	if where != cu.MemoryDevice {
		return b.noWindows("what it gave is none")
	}
	return nil
}

// noWindows returns the error for a library that reports success and has made no window, with the possible reasons.
func (b *Backend) noWindows(how string) error {
	return fmt.Errorf("NCCL %s (%s) makes no symmetric windows here: it said success, and %s. %s: %w", b.lib.Version(),
		b.lib.Path(), how,
		strings.Join(b.reasons(), "; "), errs.ErrUnsupported)
}

// reasons lists what keeps NCCL from making windows, with what is known about each here.
func (b *Backend) reasons() []string {
	state := func(name string) string {
		if v := b.getenv(name); v != "" {
			return name + "=" + v
		}
		return name + " is not set"
	}
	return []string{
		"It needs peer access between all GPUs of the host, also as NCCL sees it (" + state("NCCL_P2P_DISABLE") + ", " + state("NCCL_P2P_LEVEL") + ")",
		"virtual memory (" + state("NCCL_CUMEM_ENABLE") + ")",
		"windows switched on (" + state("NCCL_WIN_ENABLE") + ", " + state("NCCL_LOCAL_REGISTER") + ")",
		"and all ranks on one host before 2.28.9; NCCL's configuration files (/etc/nccl.conf, ~/.nccl.conf) may set these too",
	}
}

// resolve finds the addresses of all ranks' copies.
func (b *Backend) resolve(w *window) error {
	if b.lib.PeerPointers() {
		return b.askPeers(w)
	}
	var raw [nccl.LayoutBytes]byte
	if err := b.device.CopyToHost(raw[:], device.Ptr(w.native.Handle())); err != nil {
		return fmt.Errorf("reading the window's structure: %w", err)
	}
	layout, err := nccl.DecodeWindow(b.lib.Version(), raw[:])
	if err != nil {
		return err
	}
	me := b.near.Rank()
	if layout.WorldRank != me {
		return fmt.Errorf("the window's structure says that this is rank %d, and it is %d: %w", layout.WorldRank, me,
			errs.ErrUnsupported)
	}
	team, err := b.near.Lsa()
	if err != nil {
		return err
	}
	if int(team.Rank) != layout.LsaRank || team.Stride != 1 {
		return fmt.Errorf("the window's structure says rank %d of those that reach each other, and NCCL says %d of %d, %d apart: %w",
			layout.LsaRank, team.Rank, team.Ranks, team.Stride, errs.ErrUnsupported)
	}
	w.stride = layout.Stride()
	first := me - layout.LsaRank
	for r := max(first, 0); r < min(first+int(team.Ranks), len(b.isle.ranks)); r++ {
		w.peers[b.isle.ranks[r]] = device.Ptr(layout.Peer(r))
	}
	return nil
}

// askPeers asks the library for the addresses.
func (b *Backend) askPeers(w *window) error {
	for at, r := range b.isle.ranks {
		p, err := w.native.Peer(at, 0)
		if err != nil {
			return fmt.Errorf("asking for the address of rank %d: %w", r, err)
		}
		w.peers[r] = device.Ptr(p)
	}
	if len(w.peers) > 1 && !w.peers[0].IsNil() && w.peers[1] > w.peers[0] {
		w.stride = int64(w.peers[1] - w.peers[0])
	}
	for r := range w.peers {
		if w.peers[r] != w.peers[0].Add(int64(r)*w.stride) {
			w.stride = 0
		}
	}
	return nil
}

// deregister removes the window of the allocation at base from this process. Of a communicator with a call that did not end no window can be removed: it is aborted, with
// all its windows, once nothing uses one of them, and the memory stays until then.
func (b *Backend) deregister(ctx context.Context, w *window, base device.Ptr) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.timeout)
	defer cancel()
	if b.near.Stuck() {
		if b.windowsInUse() {
			b.staysWith(b.near, base)
			return nil
		}
		return errors.Join(b.abandon(ctx), b.freeLate())
	}
	return b.remove(ctx, b.near, w.native, base)
}

// abandon aborts the communicator of the windows, unless that was done before.
func (b *Backend) abandon(ctx context.Context) error {
	if b.near.Handle() == 0 {
		return nil
	}
	cause := b.group.Err()
	if cause == nil {
		cause = errors.New("a call of NCCL's did not end")
	}
	return b.near.Abort(ctx, cause)
}

// try makes a window and uses it, so that what does not work here is known when the backend is opened: whether there are windows at all, and whether
// the addresses that were computed from the window's structure are right. Collective.
func (b *Backend) try(ctx context.Context) error {
	a, err := b.Allocate(ctx, 1)
	if err := b.group.Vote(ctx, opening+": memory to try", err); err != nil {
		if a != nil {
			err = errors.Join(err, a.Release(ctx))
		}
		return err
	}
	mine := a.(*allocation)
	w, err := b.register(ctx, mine.base, mine.span)
	if err == nil {
		err = b.tryWindow(mine, w)
	}
	// A window is not removed while a peer may still use it.
	err = b.group.Vote(ctx, opening+": trying a window", err)
	if w != nil {
		err = errors.Join(err, b.deregister(ctx, w, mine.base))
	}
	return b.agreeReach(ctx, errors.Join(err, a.Release(ctx)))
}

// tryWindow looks at the addresses of the trial window: NCCL's second address of this rank's own memory shows what the first
// one holds, and the driver knows memory of a GPU at those of the others.
func (b *Backend) tryWindow(a *allocation, w *window) error {
	me := b.group.Rank()
	if !b.isle.whole() {
		b.reach.unreachable, b.reach.notContiguous = b.isle.why(), b.isle.why()
	}
	if w.none != nil {
		b.reach.none, b.reach.first, b.reach.ranks = w.none, me, 1
		return nil
	}
	if w.peers[me].IsNil() {
		return b.noWindows("the window has no address for this rank")
	}
	wrote, read := make([]byte, 8), make([]byte, 8)
	binary.LittleEndian.PutUint64(wrote, 0x53594d4d454d0000|uint64(me)<<8|0xa5)
	err := b.device.CopyFromHost(a.ptr, wrote)
	if err == nil {
		err = b.device.CopyToHost(read, w.peers[me])
	}
	if err != nil {
		return fmt.Errorf("trying the window: %w", err)
	}
	if string(read) != string(wrote) {
		return fmt.Errorf("the window of NCCL %s does not show the memory that was registered (%x was written, %x read): its structure is "+
			"another than is known: %w", b.lib.Version(), wrote, read, errs.ErrUnsupported)
	}
	var missing []string
	b.reach.first, b.reach.ranks = me, 0
	err = b.device.WithContext(func() error {
		for r, p := range w.peers {
			var where cu.MemoryType
			if p.IsNil() {
				if b.far(r) == nil {
					missing = append(missing, fmt.Sprint(r))
				}
				continue
			}
			err := b.drv.Check("cuPointerGetAttribute", b.drv.PointerGetAttribute(unsafe.Pointer(&where), cu.PointerMemoryType, p))
			if err != nil {
				return fmt.Errorf("at %s, where rank %d's memory should be, the driver knows none: %w: %w", p, r, err, errs.ErrUnsupported)
			}
			if where != cu.MemoryDevice {
				return fmt.Errorf("at %s, where rank %d's memory should be, is none of a GPU: %w", p, r, errs.ErrUnsupported)
			}
			b.reach.first = min(b.reach.first, r)
			b.reach.ranks++
		}
		return nil
	})
	switch {
	case err != nil:
		return err
	case len(missing) > 0:
		b.reach.unreachable = fmt.Sprintf("rank %d has no addresses of rank %s", me, strings.Join(missing, ", "))
		b.reach.notContiguous = b.reach.unreachable
	case len(w.peers) > 1 && w.stride == 0 && b.isle.whole():
		b.reach.notContiguous = "NCCL's addresses of the ranks are not one stride apart"
	}
	return nil
}
