package nccl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
)

// offer is what a rank tells the others about its memory in a rendezvous.
type offer struct {
	Offset     int64 // of the memory in its allocation, in bytes
	Span       int64 // bytes of the allocation, all of which become the window
	Registered bool  // the allocation has its window already
	Puts       bool  // this rank can make it one for puts too
}

// mapping is an allocation as one rank sees it after rendezvous.
type mapping struct {
	backend *Backend
	alloc   *allocation
	window  *window      // nil after Unmap
	peers   []device.Ptr // by rank; nil where the rank has no address
	offsets []int64      // by rank: of the memory in its allocation

	base          device.Ptr // of the contiguous view
	stride        int64
	notContiguous string // why there is no contiguous view; "" if there is
	noMulticast   string // why there can be no multicast address, the same on all ranks; "" if there may be one
}

var (
	_ backend.Multicaster      = (*mapping)(nil)
	_ backend.WindowHandler    = (*mapping)(nil)
	_ backend.ContiguousViewer = wholeMapping{}
)

// wholeMapping is a mapping with addresses of all ranks.
type wholeMapping struct{ *mapping }

// Rendezvous registers the allocation that the memory is in, unless it has its window, and finds the ranks' addresses in it.
func (b *Backend) Rendezvous(ctx context.Context, ba backend.Allocation) (backend.Mapping, error) {
	a, ok := ba.(*allocation)
	var mine offer
	var failure error
	if !ok || a.backend != b {
		failure = fmt.Errorf("an allocation of another backend: %w", errs.ErrInvalid)
	} else {
		failure = b.ready()
		mine = offer{Offset: a.offset, Span: a.span, Registered: b.registered(a.base) != nil, Puts: b.putting()}
	}
	offers, err := backend.Tell(ctx, b.group, "registering", mine, failure)
	if err != nil {
		return nil, err
	}
	if err := fit(offers); err != nil {
		return nil, err
	}
	w := b.registered(a.base)
	fresh := w == nil
	if fresh {
		w, err = b.register(ctx, a.base, a.span)
	}
	far := allPut(offers)
	if far {
		// The window has ranks of one host, and the next call takes all: nobody comes to that where a host has none.
		if voted := b.group.Vote(ctx, "a window", err); voted != nil {
			if err == nil && fresh {
				voted = errors.Join(voted, b.deregister(context.WithoutCancel(ctx), w, a.base))
			}
			return nil, voted
		}
	}
	if err != nil {
		return nil, err
	}
	if fresh {
		b.mu.Lock()
		b.windows[a.base] = w
		b.mu.Unlock()
	}
	if far {
		if err := b.registerFar(ctx, b.puts, a); err != nil {
			if w.users == 0 {
				err = errors.Join(err, b.drop(ctx, w, a.base))
			}
			return nil, err
		}
	}
	w.users++
	b.mapped(a, 1)
	m := &mapping{backend: b, alloc: a, window: w, peers: make([]device.Ptr, len(offers)), offsets: make([]int64, len(offers))}
	m.place(offers)
	if b.isle.whole() {
		return wholeMapping{m}, nil
	}
	return m, nil
}

// mapped counts mappings of an allocation.
func (b *Backend) mapped(a *allocation, more int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	a.mapped += more
}

// ready returns an error if the communicator can make no more windows.
func (b *Backend) ready() error {
	if b.near == nil || b.comm == nil {
		return fmt.Errorf("backend %s is %w", Name, errs.ErrClosed)
	}
	for _, comm := range []*nccl.Comm{b.near, b.comm} {
		if comm.Handle() == 0 || comm.Stuck() {
			return fmt.Errorf("the communicator was given up after a call that failed; close the rank and open it again: %w",
				errs.ErrClosed)
		}
	}
	if b.apart() {
		if err := b.near.Err(); err != nil {
			return err
		}
	}
	return b.comm.Err()
}

// registered returns the window of the allocation at base, or nil.
func (b *Backend) registered(base device.Ptr) *window {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.windows[base]
}

// fit returns an error if the ranks' memory cannot become one window.
func fit(offers []offer) error {
	return cmp.Or(
		backend.Alike("size in bytes of the allocation that the memory is in", offers, func(o *offer) int64 { return o.Span }),
		backend.Alike("whether the allocation is registered already", offers, func(o *offer) bool { return o.Registered }),
	)
}

// place finds the addresses of the memory in the window.
func (m *mapping) place(offers []offer) {
	b, me := m.backend, m.backend.group.Rank()
	m.notContiguous = b.reach.notContiguous
	for r, o := range offers {
		m.offsets[r] = o.Offset
		if p := m.window.peers[r]; !p.IsNil() {
			m.peers[r] = p.Add(o.Offset)
		}
		if o.Offset != offers[0].Offset && m.noMulticast == "" {
			m.noMulticast = fmt.Sprintf("the adopted memory is at different offsets of its allocation: %d on rank 0, %d on rank %d",
				offers[0].Offset, o.Offset, r)
			m.notContiguous = cmp.Or(m.notContiguous, m.noMulticast)
		}
	}
	m.base, m.stride = m.peers[0], m.window.stride
	if m.stride == 0 {
		m.stride = m.alloc.span // of one rank, where nobody looks at it
	}
	m.peers[me] = m.alloc.ptr
}

// Peer returns the place of rank's memory in NCCL's range of addresses, and for this rank the allocation itself.
func (m *mapping) Peer(rank int) (device.Ptr, error) {
	if m.peers[rank].IsNil() {
		if err := m.backend.far(rank); err != nil {
			return 0, err
		}
		return 0, fmt.Errorf("NCCL has no address of rank %d on rank %d: %w", rank, m.backend.group.Rank(), errs.ErrNotReachable)
	}
	return m.peers[rank], nil
}

// Contiguous returns NCCL's range: the ranks' copies lie one stride of some GiB apart.
func (m wholeMapping) Contiguous() (device.Ptr, int64, error) {
	if m.notContiguous != "" {
		return 0, 0, fmt.Errorf("%s: %w", m.notContiguous, errs.ErrUnsupported)
	}
	return m.base, m.stride, nil
}

// WindowHandle returns the ncclWindow_t of the allocation that the memory is in, and the memory's offset in that window.
func (m *mapping) WindowHandle() (uint64, int64, error) {
	if m.window == nil {
		return 0, 0, fmt.Errorf("the window's handle: %w", errs.ErrClosed)
	}
	if m.window.none != nil {
		return 0, 0, m.window.none
	}
	return uint64(m.window.native.Handle()), m.alloc.offset, nil
}

// Unmap releases the window. The last mapping of a window deregisters it, on the library's own communicators too.
func (m *mapping) Unmap(ctx context.Context) error {
	w, b := m.window, m.backend
	if w == nil {
		return nil
	}
	m.window = nil
	b.mapped(m.alloc, -1)
	if w.users--; w.users > 0 {
		return nil
	}
	return b.drop(ctx, w, m.alloc.base)
}

// drop deregisters the window of the allocation at base, and those that the library's own communicators have of it.
func (b *Backend) drop(ctx context.Context, w *window, base device.Ptr) error {
	b.mu.Lock()
	delete(b.windows, base)
	if b.puts != nil {
		delete(b.puts.spans, base)
	}
	b.mu.Unlock()
	return errors.Join(b.forget(ctx, base), b.deregister(ctx, w, base))
}

// whyNoMulticast says why there is no multicast; "" if it may be tried.
func (b *Backend) whyNoMulticast() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.noCast
}

// EnableMulticast asks NCCL for the window's multicast address. NCCL makes one multicast object for all windows of the communicator, when
// it is first asked. If a rank gets no address, no window has one on any rank.
func (m *mapping) EnableMulticast(ctx context.Context) (device.Ptr, error) {
	b := m.backend
	if why := cmp.Or(b.whyNoMulticast(), m.noMulticast); why != "" { // every rank knows it
		return 0, fmt.Errorf("%s: %w", why, errs.ErrUnsupported)
	}
	// A rank that cannot ask must not leave the others waiting inside NCCL.
	if err := b.group.Vote(ctx, "asking for multicast", b.ready()); err != nil {
		return 0, err
	}
	defer b.lib.Log()
	within, end := b.together(ctx, "making the multicast address")
	p, err := m.window.native.Multicast(within, b.multicast, m.alloc.offset)
	if err = end(err); err == nil && p == 0 {
		err = fmt.Errorf("NCCL %s gives no multicast address: %w", b.lib.Version(), errs.ErrUnsupported)
	}
	err = b.group.Vote(ctx, "multicast address", err)
	if err == nil {
		return device.Ptr(p), nil
	}
	vote, agreed := errors.AsType[*group.VoteError](err)
	if !agreed {
		return 0, err
	}
	b.mu.Lock()
	b.noCast = "it was tried and failed: " + vote.Error()
	b.mu.Unlock()
	b.log.Warn("multicast does not work here", "error", err)
	return 0, fmt.Errorf("multicast does not work here: %w: %w", errs.ErrUnsupported, err)
}

// agreeReach tells the others which ranks have no addresses, and whether NCCL has multicast, so that the capabilities are the same
// everywhere, or why this rank has failed.
func (b *Backend) agreeReach(ctx context.Context, failure error) error {
	type found struct{ Unreachable, NotContiguous, NoCast string }
	mine := found{b.reach.unreachable, b.reach.notContiguous, ""}
	if failure == nil && b.noCast == "" {
		mine.NoCast, failure = b.lacksMulticast()
	}
	all, err := backend.Tell(ctx, b.group, opening+": reaching each other", mine, failure)
	if err != nil {
		return err
	}
	var unreachable, apart, casts []string
	for _, f := range all {
		if f.Unreachable != "" && !slices.Contains(unreachable, f.Unreachable) {
			unreachable = append(unreachable, f.Unreachable)
		}
		if f.NotContiguous != "" && !slices.Contains(apart, f.NotContiguous) {
			apart = append(apart, f.NotContiguous)
		}
		if f.NoCast != "" && !slices.Contains(casts, f.NoCast) {
			casts = append(casts, f.NoCast)
		}
	}
	b.reach.unreachable, b.reach.notContiguous = strings.Join(unreachable, "; "), strings.Join(apart, "; ")
	if b.noCast == "" {
		b.noCast = strings.Join(casts, "; ")
	}
	if b.mustCast && b.noCast != "" {
		return mustCastError(b.noCast)
	}
	return nil
}

// lacksMulticast says why NCCL has no multicast for the communicator; "" if it has.
func (b *Backend) lacksMulticast() (string, error) {
	has, err := b.near.MulticastSupport()
	switch {
	case errors.Is(err, errs.ErrUnsupported) && !ofDriver(err):
		return err.Error(), nil
	case err != nil || has:
		return "", err
	}
	return fmt.Sprintf("NCCL %s has no NVLink multicast for these GPUs (NVLS: see NCCL_NVLS_ENABLE, and NCCL's log)", b.lib.Version()), nil
}

// mustCastError returns the error for multicast that is required and not possible.
func mustCastError(why string) error {
	return fmt.Errorf("multicast is on, but %s; set it to auto or off: %w", why, errs.ErrUnsupported)
}

// DevComm is a device communicator: what kernels that were compiled with the library's own headers take by value, beside a
// window's handle, to use NCCL's barriers.
type DevComm struct {
	backend *Backend
	comm    *nccl.DevComm
}

// NewDevComm makes a device communicator of [Backend.WindowComm] with lsaBarriers barriers, as many as a kernel has blocks that use one each.
// Collective: all ranks of the group ask for the same number, or all get ErrMismatch. It has no multicast. It blocks until all ranks have come. The error is ErrUnsupported if the layout of the library's structure is
// not known, and ErrClosed after Close. Close it before the rank.
func (b *Backend) NewDevComm(ctx context.Context, lsaBarriers int) (*DevComm, error) {
	// NCCL compares nothing, and a rank that it refuses would leave the others in it.
	if err := b.group.Vote(ctx, fmt.Sprintf("device communicator with %d barriers", lsaBarriers), b.ready()); err != nil {
		return nil, err
	}
	defer b.lib.Log()
	within, end := b.together(ctx, "making a device communicator")
	c, err := b.near.NewDevComm(within, lsaBarriers)
	err = end(err)
	if voted := b.group.Vote(ctx, "device communicator made", err); voted != nil {
		if err == nil {
			voted = errors.Join(voted, c.Close(context.WithoutCancel(ctx)))
		}
		return nil, voted
	}
	d := &DevComm{backend: b, comm: c}
	b.mu.Lock()
	b.devComms = append(b.devComms, d)
	b.mu.Unlock()
	return d, nil
}

// Bytes returns the ncclDevComm, as it is passed by value. It must not be changed.
func (d *DevComm) Bytes() []byte { return d.comm.Bytes() }

// Close releases the device communicator, which no kernel may use any more. It is local. A second Close returns ErrClosed.
func (d *DevComm) Close(ctx context.Context) error {
	b := d.backend
	b.mu.Lock()
	i := slices.Index(b.devComms, d)
	if i >= 0 {
		b.devComms = slices.Delete(b.devComms, i, i+1)
	}
	b.mu.Unlock()
	if i < 0 {
		return fmt.Errorf("closing a device communicator: %w", errs.ErrClosed)
	}
	return d.comm.Close(ctx)
}

func (b *Backend) takeDevComms() []*DevComm {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := b.devComms
	b.devComms = nil
	return all
}
