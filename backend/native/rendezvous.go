package native

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"time"
	"unsafe"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

// offer is what a rank tells the others about its memory in a rendezvous.
type offer struct {
	Kind   kind
	Offset int64  // of the first byte in what is exported
	Span   int64  // bytes to map, of virtual memory
	Fabric []byte `json:",omitempty"` // the handle for other hosts
	IPC    []byte `json:",omitempty"` // the handle of legacy memory
	Ptr    uint64 // where legacy memory is in the rank's own process
}

// mapping is an allocation as one rank sees it after rendezvous.
type mapping struct {
	backend *Backend
	alloc   *allocation
	rank    int
	peers   []device.Ptr // by rank

	base          device.Ptr // of the contiguous view
	stride        int64
	notContiguous string // why there is no contiguous view; "" if there is
	noMulticast   string // why there can be no multicast address, the same on all ranks; "" if there may be one

	undo undo
}

var (
	_ backend.Multicaster      = (*mapping)(nil)
	_ backend.ContiguousViewer = (*mapping)(nil)
)

// Rendezvous exports the memory, passes it around and maps all ranks' memory.
func (b *Backend) Rendezvous(ctx context.Context, ba backend.Allocation) (backend.Mapping, error) {
	if b.unreachable != "" {
		// Every rank knows it, so every rank stops here.
		return nil, fmt.Errorf("%s: %w", b.unreachable, errs.ErrNotReachable)
	}
	a, ok := ba.(*allocation)
	var mine offer
	var own *os.File
	var failure error
	steps := stopwatch{last: time.Now()}
	if !ok || a.backend != b {
		failure = fmt.Errorf("an allocation of another backend: %w", errs.ErrInvalid)
	} else {
		failure = b.device.WithContext(func() error {
			var err error
			mine, own, err = a.offer()
			return err
		})
	}
	steps.note("exporting")
	offers, err := backend.Tell(ctx, b.group, "exporting", mine, failure)
	steps.note("telling")
	if err == nil {
		err = sameKind(offers)
	}
	if err != nil {
		return nil, errors.Join(err, closeFile(own))
	}
	m := &mapping{backend: b, alloc: a, rank: b.group.Rank(), peers: make([]device.Ptr, len(offers))}
	if a.kind == legacy {
		err = b.device.WithContext(func() error { return m.openLegacy(a, offers) })
		m.notContiguous = "the memory was adopted from cuMemAlloc, which is mapped where the driver likes"
		m.noMulticast = "the memory was adopted from cuMemAlloc, which cannot be bound to a multicast object"
	} else {
		err = m.mapVirtual(ctx, a, offers, own, &steps)
		m.noMulticast = b.notAlike(offers)
	}
	if err != nil {
		return nil, errors.Join(err, m.Unmap(context.WithoutCancel(ctx)))
	}
	b.log.Debug("ranks mapped", append(steps.took, "address", a.ptr, "bytes", a.bytes, "view", m.base, "stride", m.stride)...)
	return m, nil
}

// stopwatch notes how long the steps of a rendezvous took, for the log.
type stopwatch struct {
	last time.Time
	took []any
}

// note ends a step.
func (s *stopwatch) note(step string) {
	now := time.Now()
	s.took = append(s.took, step, now.Sub(s.last))
	s.last = now
}

// sameKind returns an error if the ranks bring memory that is shared in different ways.
func sameKind(offers []offer) error {
	return backend.Alike("kind of memory (bring the same on all ranks)", offers, func(o *offer) string { return string(o.Kind) })
}

// offer describes how the others can reach the memory, and exports it as a file if it is to be passed as one; the context is current.
func (a *allocation) offer() (o offer, f *os.File, err error) {
	b := a.backend
	o = offer{Kind: a.kind, Offset: a.offset, Span: a.span, Ptr: uint64(a.ptr)}
	switch {
	case a.kind == legacy && b.otherProcess():
		// A handle always refers to the beginning of the allocation.
		var h cu.IPCMemHandle
		r := b.drv.IPCGetMemHandle(&h, a.ptr.Add(-a.offset))
		if err := b.drv.Check("cuIpcGetMemHandle", r); err != nil {
			return o, nil, fmt.Errorf("exporting the adopted memory at %s (was it freed?): %w", a.ptr, err)
		}
		o.IPC = unsafe.Slice((*byte)(unsafe.Pointer(&h.Reserved)), unsafe.Sizeof(h.Reserved))
	case a.kind == legacy:
		var base device.Ptr
		var size uint64
		r := b.drv.MemGetAddressRange(&base, &size, a.ptr)
		if err := b.drv.Check("cuMemGetAddressRange", r); err != nil {
			return o, nil, fmt.Errorf("finding the adopted memory at %s (was it freed?): %w", a.ptr, err)
		}
	case b.islands.Count() > 1:
		if !a.fabric {
			return o, nil, fmt.Errorf("the adopted memory at %s was not created with CU_MEM_HANDLE_TYPE_FABRIC, so that it cannot be "+
				"passed to other hosts: %w", a.ptr, errs.ErrNotReachable)
		}
		var h cu.FabricHandle
		r := b.drv.MemExportFabric(&h, a.handle, cu.HandleFabric, 0)
		if err := b.drv.Check("cuMemExportToShareableHandle", r); err != nil {
			return o, nil, fmt.Errorf("exporting %d bytes of memory as a fabric handle: %w", a.span, err)
		}
		o.Fabric = h[:]
	case b.group.Size() > 1:
		if f, err = a.export(); err != nil {
			return o, nil, fmt.Errorf("exporting %d bytes of memory: %w", a.span, err)
		}
	}
	return o, f, nil
}

// mapVirtual passes this rank's file around, if there is one, and maps the memory of all ranks side by side in one range of addresses.
func (m *mapping) mapVirtual(ctx context.Context, a *allocation, offers []offer, own *os.File, steps *stopwatch) error {
	b := m.backend
	files := make([]*os.File, len(offers))
	var err error
	if own != nil {
		files, err = b.group.ExchangeFile(ctx, "GPU memory", own)
	}
	steps.note("passing_files")
	if err == nil {
		err = b.device.WithContext(func() error { return m.mapAll(a, offers, files, steps) })
	}
	m.closeLater(append(files, own))
	return err
}

// closeLater closes files while the rank goes on, and lets undo wait for that: the driver takes a millisecond to close a file that it has exported. The
// mapping needs none of them.
func (m *mapping) closeLater(files []*os.File) {
	closed := make(chan error, 1)
	go func() {
		var err error
		for _, f := range files {
			err = errors.Join(err, closeFile(f))
		}
		closed <- err
	}()
	m.undo.add(func() error { return <-closed })
}

// mapAll maps the offers side by side; the context is current.
func (m *mapping) mapAll(a *allocation, offers []offer, files []*os.File, steps *stopwatch) error {
	b := m.backend
	m.stride = 0
	whole := true // every byte of the range will be mapped
	for r, o := range offers {
		if o.Span < a.bytes || o.Offset < 0 || o.Offset > o.Span-a.bytes {
			return fmt.Errorf("rank %d offers %d bytes at offset %d of %d: %w", r, a.bytes, o.Offset, o.Span, errs.ErrMismatch)
		}
		m.stride = max(m.stride, roundUp(o.Span, b.granularity))
		whole = whole && o.Span == offers[0].Span && o.Span%b.granularity == 0
		if o.Offset != offers[0].Offset {
			m.notContiguous = fmt.Sprintf("the adopted memory is at different offsets of its allocation: %d on rank 0, %d on rank %d",
				offers[0].Offset, o.Offset, r)
		}
	}
	if m.stride > math.MaxInt64/int64(len(offers)) {
		return fmt.Errorf("%d ranks times %d bytes: %w", len(offers), m.stride, errs.ErrNoMemory)
	}
	base, err := reserve(b.drv, m.stride*int64(len(offers)), b.granularity, &m.undo)
	if err != nil {
		return err
	}
	m.base = base.Add(offers[0].Offset)
	of := func(r int, err error) error {
		if err == nil {
			return nil
		}
		if r != m.rank {
			err = b.explain(r, err)
		}
		return fmt.Errorf("mapping %d bytes of rank %d (GPU %s) on rank %d (GPU %s): %w",
			offers[r].Span, r, b.peers[r].UUID, m.rank, b.device.UUID(), err)
	}
	for r, o := range offers {
		at := base.Add(int64(r) * m.stride)
		if m.peers[r] = at.Add(o.Offset); r == m.rank {
			m.peers[r] = a.ptr
		}
		if err := of(r, m.mapOne(r, at, a, &o, files[r])); err != nil {
			return err
		}
	}
	steps.note("mapping")
	defer func() { steps.note("allowing") }()
	// One call for all takes about as long as a call for one.
	var refused error
	if whole {
		if refused = allow(b.device, base, m.stride*int64(len(offers))); refused == nil {
			return nil
		}
	}
	// One by one, to find out whose memory it is.
	for r, o := range offers {
		if err := of(r, allow(b.device, base.Add(int64(r)*m.stride), o.Span)); err != nil {
			return err
		}
	}
	return refused
}

// mapOne imports one rank's memory, unless it is this rank's own, and maps it.
func (m *mapping) mapOne(r int, at device.Ptr, a *allocation, o *offer, file *os.File) error {
	b := m.backend
	h := a.handle
	if r != m.rank {
		var err error
		if file != nil {
			h, err = importFile(b.drv, file)
		} else {
			h, err = importFabric(b.drv, o.Fabric)
		}
		if err != nil {
			return fmt.Errorf("importing: %w", err)
		}
	}
	err := mapAt(b.drv, at, o.Span, h, &m.undo)
	if r != m.rank {
		// The mapping keeps the memory, so that nothing else needs the handle.
		err = errors.Join(err, release(b.drv, h))
	}
	return err
}

// importFabric returns the memory behind a fabric handle.
func importFabric(drv *cu.Driver, bytes []byte) (cu.MemHandle, error) {
	var fabric cu.FabricHandle
	if copy(fabric[:], bytes) != len(fabric) {
		return 0, fmt.Errorf("a fabric handle of %d bytes came: %w", len(bytes), errs.ErrMismatch)
	}
	var h cu.MemHandle
	return h, drv.Check("cuMemImportFromShareableHandle", drv.MemImportFabric(&h, &fabric, cu.HandleFabric))
}

// explain turns the driver's refusals to reach rank r's memory into ErrNotReachable.
func (b *Backend) explain(r int, err error) error {
	var failed *cuda.Error
	if !errors.As(err, &failed) || b.peers[r].UUID == b.device.UUID() {
		return err
	}
	switch cu.Result(failed.Code) {
	case cu.InvalidValue, cu.InvalidHandle, cu.InvalidDevice, cu.NotSupported, cu.NotPermitted, cu.PeerAccessUnsupported,
		cu.MapFailed:
	default:
		return err
	}
	why := "there is no peer access between the two GPUs"
	if _, seen := b.cudaDevices[b.peers[r].UUID]; !seen {
		why = "there is no peer access between the two GPUs, or this process must see both (let CUDA_VISIBLE_DEVICES list those of all ranks)"
	}
	return fmt.Errorf("%w: perhaps %s: %w", errs.ErrNotReachable, why, err)
}

// openLegacy opens the ranks' memory of cuMemAlloc; the context is current.
func (m *mapping) openLegacy(a *allocation, offers []offer) error {
	b := m.backend
	members := b.group.Members()
	for r, o := range offers {
		var err error
		switch {
		case r == m.rank:
			m.peers[r] = a.ptr
		case members[r].Process == members[m.rank].Process:
			m.peers[r] = device.Ptr(o.Ptr)
			err = b.enablePeer(r)
		default:
			m.peers[r], err = m.openIPC(o)
		}
		if err != nil {
			return fmt.Errorf("opening %d bytes of rank %d (GPU %s) on rank %d (GPU %s): %w",
				a.bytes, r, b.peers[r].UUID, m.rank, b.device.UUID(), b.explain(r, err))
		}
	}
	return nil
}

// openIPC opens memory of another process. The driver counts how often one allocation is opened.
func (m *mapping) openIPC(o offer) (device.Ptr, error) {
	drv := m.backend.drv
	var h cu.IPCMemHandle
	into := unsafe.Slice((*byte)(unsafe.Pointer(&h.Reserved)), unsafe.Sizeof(h.Reserved))
	if copy(into, o.IPC) != len(into) {
		return 0, fmt.Errorf("an IPC handle of %d bytes came: %w", len(o.IPC), errs.ErrMismatch)
	}
	var p device.Ptr
	if err := drv.Check("cuIpcOpenMemHandle", drv.IPCOpenMemHandle(&p, h, cu.IPCLazyEnablePeerAccess)); err != nil {
		return 0, err
	}
	m.undo.add(func() error { return drv.Check("cuIpcCloseMemHandle", drv.IPCCloseMemHandle(p)) })
	return p.Add(o.Offset), nil
}

// enablePeer lets this rank's context use all memory of rank r's, which is in this process. That is not undone: other users of the two contexts may
// rely on it, and the driver does not count them.
func (b *Backend) enablePeer(r int) error {
	if b.peers[r].UUID == b.device.UUID() {
		return nil
	}
	ordinal, seen := b.cudaDevices[b.peers[r].UUID]
	if !seen {
		return fmt.Errorf("GPU %s of rank %d is not visible: %w", b.peers[r].UUID, r, errs.ErrNotReachable)
	}
	var peer cu.ContextHandle
	// The rank holds its context already, so that this creates none.
	err := b.drv.Check("cuDevicePrimaryCtxRetain", b.drv.PrimaryCtxRetain(&peer, cu.DeviceOrdinal(ordinal)))
	if err != nil {
		return err
	}
	if r := b.drv.CtxEnablePeerAccess(peer, 0); r != cu.PeerAccessAlreadyEnabled {
		err = b.drv.Check("cuCtxEnablePeerAccess", r)
	}
	return errors.Join(err, b.drv.Check("cuDevicePrimaryCtxRelease", b.drv.PrimaryCtxRelease(cu.DeviceOrdinal(ordinal))))
}

// Peer returns the place of rank's memory in the range, and for this rank the allocation itself.
func (m *mapping) Peer(rank int) (device.Ptr, error) { return m.peers[rank], nil }

// Contiguous returns the range: the ranks' copies lie one rounded size apart.
func (m *mapping) Contiguous() (device.Ptr, int64, error) {
	if m.notContiguous != "" {
		return 0, 0, fmt.Errorf("%s: %w", m.notContiguous, errs.ErrUnsupported)
	}
	return m.base, m.stride, nil
}

// Unmap unmaps the ranks' memory, multicast first.
func (m *mapping) Unmap(context.Context) error {
	if len(m.undo) == 0 {
		return nil
	}
	if err := m.backend.giveBack(&m.undo); err != nil {
		return fmt.Errorf("unmapping the ranks' memory: %w", err)
	}
	return nil
}
