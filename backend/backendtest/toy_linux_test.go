package backendtest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// toys are backends of one process that have all optional interfaces but the contiguous view, and one flaw each, or none: "".
type toys struct {
	device device.Device // of all ranks, so that each knows the others' memory
	flaw   string

	mu      sync.Mutex
	cond    *sync.Cond
	adopted map[device.Ptr]int64 // what callers have made, with its size
	came    int                  // of the ranks that meet in an all-reduce
	round   int
}

func newToys(d device.Device, flaw string) *toys {
	t := &toys{device: d, flaw: flaw, adopted: map[device.Ptr]int64{}}
	t.cond = sync.NewCond(&t.mu)
	return t
}

// meet waits for all ranks.
func (t *toys) meet(size int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.came++; t.came == size {
		t.came = 0
		t.round++
		t.cond.Broadcast()
		return
	}
	for round := t.round; round == t.round; {
		t.cond.Wait()
	}
}

// adoptable is the Adoptable of a Harness.
func (t *toys) adoptable(_ backend.Backend, _ int, bytes int64) (device.Ptr, func() error, error) {
	p, err := t.device.Alloc(bytes)
	if err != nil {
		return 0, nil, err
	}
	t.mu.Lock()
	t.adopted[p] = bytes
	t.mu.Unlock()
	return p, func() error {
		t.mu.Lock()
		delete(t.adopted, p)
		t.mu.Unlock()
		return t.device.Free(p)
	}, nil
}

// toy is one rank's.
type toy struct {
	*toys
	group *group.Group
	casts int // how many windows had multicast
	made  int // windows
}

func (t *toy) Name() string          { return "toy" }
func (t *toy) Device() device.Device { return t.device }

func (t *toy) Capabilities() backend.Capabilities {
	return backend.Capabilities{PeerPointers: true, Register: true, Multicast: true, Transfers: true, Graphs: true, RanksInOneProcess: true,
		Why: map[string]string{"contiguous": "it is a toy", "several_hosts": "it is a toy"}}
}

func (t *toy) Close(context.Context) error { return nil }

type toyAllocation struct {
	ptr     device.Ptr
	bytes   int64
	release func() error
}

func (a *toyAllocation) Ptr() device.Ptr               { return a.ptr }
func (a *toyAllocation) Bytes() int64                  { return a.bytes }
func (a *toyAllocation) RoundedBytes() int64           { return a.bytes }
func (a *toyAllocation) Release(context.Context) error { return a.release() }

func (t *toy) Allocate(_ context.Context, bytes int64) (backend.Allocation, error) {
	p, err := t.device.Alloc(bytes)
	if err != nil {
		return nil, err
	}
	return &toyAllocation{p, bytes, func() error { return t.device.Free(p) }}, nil
}

const toyAlign = 16

func (t *toy) Register(_ context.Context, p device.Ptr, bytes int64) (backend.Allocation, error) {
	bad := func(what string) error { return errs.Invalid("Register", "memory", what, "memory that can be adopted") }
	if t.flaw == "bad memory is ErrUnsupported" {
		bad = func(what string) error { return fmt.Errorf("%s: %w", what, errs.ErrUnsupported) }
	}
	if bytes <= 0 && t.flaw != "no bytes are adopted" {
		return nil, bad("no bytes")
	}
	if p%toyAlign != 0 && t.flaw != "misaligned memory is adopted" {
		return nil, bad("misaligned")
	}
	t.mu.Lock()
	known := t.flaw == "any memory is adopted" && !p.IsNil() && bytes < 1<<62
	for base, size := range t.adopted {
		inside := p >= base && p < base.Add(size)
		known = known || inside && (bytes <= size-int64(p-base) || t.flaw == "more than there is is adopted" && bytes < 1<<62)
	}
	t.mu.Unlock()
	if !known {
		return nil, bad("not the caller's")
	}
	a := &toyAllocation{p, bytes, func() error { return nil }}
	switch t.flaw {
	case "adopted memory is copied":
		return t.Allocate(context.Background(), bytes)
	case "releasing clears adopted memory":
		a.release = func() error { return t.device.CopyFromHost(p, make([]byte, bytes)) }
	case "memory is adopted once":
		a.release = func() error {
			t.mu.Lock()
			defer t.mu.Unlock()
			clear(t.adopted)
			return nil
		}
	}
	return a, nil
}

func (t *toy) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	own, ok := a.(*toyAllocation)
	var failure error
	if !ok {
		failure, own = errs.Invalid("Rendezvous", "allocation", "of another backend", "a toy's"), &toyAllocation{}
	}
	places, err := backend.Tell(ctx, t.group, "rendezvous", own.ptr, failure)
	if err != nil {
		return nil, err
	}
	t.made++
	m := &toyMapping{toy: t, peers: places, number: t.made}
	if t.flaw == "a part is mapped at its neighbour's place" && t.made%2 == 0 {
		for r := range m.peers {
			if r != t.group.Rank() {
				m.peers[r] = m.peers[r].Add(1)
			}
		}
	}
	return m, nil
}

type toyMapping struct {
	*toy
	peers  []device.Ptr
	number int
	asked  int
}

func (m *toyMapping) Peer(rank int) (device.Ptr, error) { return m.peers[rank], nil }
func (m *toyMapping) Unmap(context.Context) error       { return nil }

func (m *toyMapping) EnableMulticast(context.Context) (device.Ptr, error) {
	m.casts++
	switch {
	case m.flaw == "multicast is nil":
		return 0, nil
	case m.flaw == "multicast is one address for all windows":
		return 1 << 60, nil
	case m.flaw == "multicast fails on one rank" && m.group.Rank() == 1:
		return 0, errs.ErrNoMemory
	case m.flaw == "multicast is gone the second time" && m.casts > 2:
		return 0, errs.ErrUnsupported
	}
	return 1<<60 + device.Ptr(m.casts)<<20, nil
}

func (m *toyMapping) WindowHandle() (uint64, int64, error) {
	m.asked++
	switch {
	case m.flaw == "windows have no handle and say no error":
		return 0, 0, nil
	case m.flaw == "windows have one name":
		return 7, 0, nil
	case m.flaw == "a window's name changes":
		return uint64(m.number + m.asked), 0, nil
	case m.flaw == "a window has a name on some ranks" && m.group.Rank() == 0:
		return 0, 0, errs.ErrUnsupported
	}
	return uint64(m.number), 0, nil
}

func (t *toy) PrepareAllReduce(ctx context.Context, r *backend.AllReduce) (backend.PreparedAllReduce, error) {
	if known := r.DType == "f32" && r.Op == "sum" || t.flaw == "unknown operations are prepared"; r.Name != "toy" || !known {
		if t.flaw == "what the library has not is ErrInvalid" {
			return nil, errs.ErrInvalid
		}
		return nil, errs.ErrUnsupported
	}
	type places struct{ In, Out device.Ptr }
	all, err := backend.Tell(ctx, t.group, "preparing", places{r.In.Ptr().Add(r.InOffset), r.Out.Ptr().Add(r.OutOffset)}, nil)
	if err != nil {
		return nil, err
	}
	p := &toyReduce{toy: t, count: r.Count, to: all[t.group.Rank()].Out}
	for _, x := range all {
		p.from = append(p.from, x.In)
	}
	switch t.flaw {
	case "an all-reduce forgets a rank":
		p.from = p.from[:len(p.from)-1]
	case "an all-reduce goes beyond its end":
		p.count++
	case "an all-reduce forgets its last element":
		p.count--
	case "an all-reduce forgets the offset of its output":
		p.to = r.Out.Ptr()
	}
	return p, nil
}

type toyReduce struct {
	*toy
	from  []device.Ptr
	to    device.Ptr
	count int64
	runs  int
}

func (p *toyReduce) Enqueue(s device.Stream) error {
	return s.HostFunc(func() {
		p.meet(p.group.Size())
		sums, one := make([]byte, 4*p.count), make([]byte, 4*p.count)
		for _, from := range p.from {
			_ = p.device.CopyToHost(one, from)
			for i := 0; i < len(one); i += 4 {
				at := func(b []byte) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(b[i:])) }
				binary.LittleEndian.PutUint32(sums[i:], math.Float32bits(at(sums)+at(one)))
			}
		}
		p.meet(p.group.Size())
		if p.runs++; p.runs == 1 || p.flaw != "an all-reduce runs once" {
			_ = p.device.CopyFromHost(p.to, sums)
		}
	})
}

func (p *toyReduce) Close() error { return nil }

// farToy is a backend made far that has a flaw in its transfers, flags, or in quiescing.
type farToy struct {
	*far
	flaw string
	made int // flags
	sets []backend.Flags
}

func (f *farToy) PrepareTransfer(op backend.TransferOp, peer int, blocks []backend.Block) (backend.PreparedTransfer, error) {
	blocks = slices.Clone(blocks)
	last := &blocks[len(blocks)-1]
	switch f.flaw {
	case "a transfer forgets its last block":
		if len(blocks) > 1 {
			blocks = blocks[:len(blocks)-1]
		}
	case "a transfer moves a byte too many":
		blocks[0].Bytes++
	case "a transfer moves a byte too few":
		blocks[2%len(blocks)].Bytes--
	case "a transfer goes one byte too far":
		last.Offset--
	case "a read is a write":
		op = backend.Write
	}
	p, err := f.far.PrepareTransfer(op, peer, blocks)
	if err != nil {
		return nil, err
	}
	return &toyTransfer{farMove: p.(*farMove), flaw: f.flaw}, nil
}

// toyTransfer is a transfer with a flaw.
type toyTransfer struct {
	*farMove
	flaw   string
	starts int
	late   *time.Timer
}

func (x *toyTransfer) Start() (device.HostProgress, error) {
	x.starts++
	switch {
	case x.flaw == "a transfer runs once" && x.starts > 1:
		return ended{}, nil
	case x.flaw == "a run that overlaps is started":
		if _, err := x.farMove.Start(); err != nil && !errors.Is(err, errs.ErrInProgress) {
			return nil, err
		}
		return x, nil
	}
	if _, err := x.farMove.Start(); err != nil {
		if errors.Is(err, errs.ErrInProgress) && x.flaw == "a run that overlaps disturbs the first" {
			x.mu.Lock()
			x.copies = nil
			x.mu.Unlock()
		}
		return nil, err
	}
	if x.flaw == "a transfer ends before the data is there" {
		return ended{after: func() {
			x.late = time.AfterFunc(5*time.Millisecond, func() { _, _ = x.farMove.Poll() })
		}}, nil
	}
	return x, nil
}

func (x *toyTransfer) Poll() (bool, error) {
	done, err := x.farMove.Poll()
	switch {
	case err != nil && x.flaw == "the loss of a peer is another error":
		return false, errs.ErrUnavailable
	case err != nil && x.flaw == "a transfer to the dead succeeds":
		return true, nil
	case err != nil && x.flaw == "a transfer to the dead never ends":
		return false, nil
	}
	return done, err
}

func (x *toyTransfer) Close() error {
	switch {
	case x.flaw == "a transfer that never ran cannot be closed" && x.starts == 0:
		return errs.ErrInvalid
	case x.flaw == "a transfer cannot be closed":
		return errs.ErrInvalid
	}
	return x.farMove.Close()
}

// ended is a run that has.
type ended struct{ after func() }

func (e ended) Poll() (bool, error) {
	if e.after != nil {
		e.after()
	}
	return true, nil
}

func (f *farToy) NewFlags(ctx context.Context, count int) (backend.Flags, error) {
	f.made++
	if f.flaw == "all flags are one" && f.made > 1 {
		return f.sets[0], nil
	}
	n := count
	if f.flaw == "a flag is missing" {
		n--
	}
	flags, err := f.far.NewFlags(ctx, n)
	if err != nil {
		return nil, err
	}
	if f.flaw == "new flags are not 0" {
		flags.Words()[0].Store(5)
	}
	f.sets = append(f.sets, flags)
	return &toyFlags{flags, f}, nil
}

type toyFlags struct {
	backend.Flags
	of *farToy
}

func (f *toyFlags) Words() []atomic.Uint64 { return f.Flags.Words() }

func (f *toyFlags) PrepareStore(peer, index int) (backend.FlagStore, error) {
	switch f.of.flaw {
	case "a store writes another word":
		index = (index + 1) % len(f.Words())
	case "a store writes its own rank":
		peer = f.of.group.Rank()
	}
	s, err := f.Flags.PrepareStore(peer, index)
	if err != nil {
		return nil, err
	}
	return &toyStore{FlagStore: s, flaw: f.of.flaw}, nil
}

func (f *toyFlags) Close() error {
	if f.of.flaw == "flags cannot be closed" {
		return errors.Join(errs.ErrInvalid, f.Flags.Close())
	}
	return f.Flags.Close()
}

type toyStore struct {
	backend.FlagStore
	flaw  string
	posts int
}

func (s *toyStore) Post(value uint64) error {
	s.posts++
	switch {
	case s.flaw == "half of a word is written":
		value &= 0xffffffff
	case s.flaw == "a word is written once" && s.posts > 1:
		return nil
	}
	return s.FlagStore.Post(value)
}

func (s *toyStore) Poll() (bool, error) {
	done, err := s.FlagStore.Poll()
	if s.flaw == "a store never ends" {
		return false, err
	}
	return done, err
}

func (f *farToy) Quiesce(ctx context.Context) error {
	switch f.flaw {
	case "it never comes to rest":
		return errs.ErrUnavailable
	case "quiescing outlasts its context":
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), 600*time.Millisecond)
		defer cancel()
		return f.far.Quiesce(late)
	}
	return f.far.Quiesce(ctx)
}

// silent is a far backend without what is needed to reach peers.
type silent struct{ backend.Backend }

// views returns a view of the contiguous range with a flaw.
type views struct {
	backend.Backend
	group *group.Group
	flaw  string
	first *device.Ptr
}

func (v *views) Capabilities() backend.Capabilities {
	c := v.Backend.Capabilities()
	if v.flaw == "a view without the capability" {
		c.Contiguous = false
	}
	return c
}

func (v *views) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	m, err := v.Backend.Rendezvous(ctx, a)
	if err != nil {
		return nil, err
	}
	if v.flaw == "no view in spite of the capability" {
		return struct{ backend.Mapping }{m}, nil
	}
	return &viewMapping{m, m.(backend.ContiguousViewer), v}, nil
}

type viewMapping struct {
	backend.Mapping
	backend.ContiguousViewer
	of *views
}

func (m *viewMapping) Contiguous() (device.Ptr, int64, error) {
	base, stride, err := m.ContiguousViewer.Contiguous()
	switch m.of.flaw {
	case "copies overlap in the view":
		stride = 4096
	case "the view begins too late":
		return base.Add(1), stride, err
	case "the view is reversed":
		return base.Add(stride * int64(m.of.group.Size()-1)), -stride, err
	case "all windows have one view":
		if m.of.first == nil {
			m.of.first = &base
		}
		return *m.of.first, stride, err
	}
	return base, stride, err
}

var (
	_ backend.Transferrer   = (*farToy)(nil)
	_ backend.Flagger       = (*farToy)(nil)
	_ backend.Quiescer      = (*farToy)(nil)
	_ backend.AllReducer    = (*toy)(nil)
	_ backend.Multicaster   = (*toyMapping)(nil)
	_ backend.WindowHandler = (*toyMapping)(nil)
)
