package backendtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// FarOptions sets how far away the peers are. Nil and zero values mean as near as possible.
type FarOptions struct {
	// Delay is how long each transfer and each write of a flag takes, besides the time of the copy itself.
	Delay time.Duration
	// Name is the backend's; default "far".
	Name string
	// Islands are numbers, by rank: ranks with the same one are near each other and have addresses of each other's memory. Nil is none.
	Islands []int
	// Fail, unless nil, is called by each transfer that begins, which fails with the error that it returns.
	Fail func() error
}

// Far turns a backend for the host device, whose ranks share memory, into one without peer pointers, as if the peers were on other hosts: all data
// goes through transfers, which take their time, and flags, but for that between ranks that the options put on one island. It is for tests of code that works on backends without peer pointers.
func Far(near backend.Backend, g *group.Group, opts *FarOptions) backend.Backend {
	f := &far{Backend: near, group: g, name: "far"}
	if opts != nil {
		f.name, f.delay, f.fail, f.islands = cmp.Or(opts.Name, f.name), opts.Delay, opts.Fail, opts.Islands
	}
	return f
}

type far struct {
	backend.Backend
	name    string
	group   *group.Group
	delay   time.Duration
	fail    func() error // nil if none does
	islands []int
	moves   atomic.Int64 // under way
}

var (
	_ backend.Transferrer = (*far)(nil)
	_ backend.Flagger     = (*far)(nil)
	_ backend.Quiescer    = (*far)(nil)
	_ backend.Islander    = (*far)(nil)
)

// Name returns "far", unless the options say otherwise.
func (f *far) Name() string { return f.name }

func (f *far) Capabilities() backend.Capabilities {
	c := FarCapabilities(f.Backend.Capabilities())
	c.PeerPointers = f.islands != nil
	for r := range f.islands {
		if !f.near(r) {
			c.PeerPointers = false
		} else if r != f.group.Rank() {
			c.PointerPeers++
		}
	}
	return c
}

// near reports whether a rank is on this rank's island.
func (f *far) near(rank int) bool {
	return rank == f.group.Rank() || f.islands != nil && f.islands[rank] == f.islands[f.group.Rank()]
}

// Islands returns, by rank, the lowest rank of its island.
func (f *far) Islands() []int {
	var of []int
	for _, island := range f.islands {
		of = append(of, slices.Index(f.islands, island))
	}
	return of
}

// FarCapabilities returns the capabilities of Far over a backend with the capabilities near.
func FarCapabilities(near backend.Capabilities) backend.Capabilities {
	c := near
	c.PeerPointers, c.Contiguous, c.Multicast = false, false, false
	c.Why = map[string]string{"peer_pointers": "the peers are far", "contiguous": "the peers are far", "multicast": "the peers are far"}
	for name, why := range near.Why {
		c.Why[name] = why
	}
	return c
}

func (f *far) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	near, err := f.Backend.Rendezvous(ctx, a)
	if err != nil {
		return nil, err
	}
	return &farMapping{far: f, near: near}, nil
}

// Quiesce waits for what was given up.
func (f *far) Quiesce(ctx context.Context) error {
	for f.moves.Load() > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
	return nil
}

// farMapping hides the addresses of the peers that are far.
type farMapping struct {
	far  *far
	near backend.Mapping
}

func (m *farMapping) Peer(rank int) (device.Ptr, error) {
	if !m.far.near(rank) {
		return 0, fmt.Errorf("rank %d is far: %w", rank, errs.ErrNotReachable)
	}
	return m.near.Peer(rank)
}

func (m *farMapping) Unmap(ctx context.Context) error { return m.near.Unmap(ctx) }

// farMove is a transfer.
type farMove struct {
	far    *far
	copies []farCopy

	mu  sync.Mutex
	end time.Time // of the run under way; zero if none is
}

type farCopy struct{ dst, src []byte }

func (f *far) PrepareTransfer(
	op backend.TransferOp, peer int, blocks []backend.Block,
) (backend.PreparedTransfer, error) {
	t := &farMove{far: f}
	for _, b := range blocks {
		m, ok := b.Remote.(*farMapping)
		if !ok {
			return nil, fmt.Errorf("a window of another backend: %w", errs.ErrInvalid)
		}
		remote, err := m.near.Peer(peer)
		if err != nil {
			return nil, err
		}
		theirs, err := f.bytes(remote.Add(b.Offset), b.Bytes)
		if err != nil {
			return nil, err
		}
		mine, err := f.bytes(b.Local, b.Bytes)
		if err != nil {
			return nil, err
		}
		if op == backend.Read {
			t.copies = append(t.copies, farCopy{mine, theirs})
		} else {
			t.copies = append(t.copies, farCopy{theirs, mine})
		}
	}
	return t, nil
}

func (f *far) bytes(p device.Ptr, n int64) ([]byte, error) {
	return f.Device().(device.HostMemory).Bytes(p, n)
}

func (t *farMove) Start() (device.HostProgress, error) {
	if t.far.fail != nil {
		if err := t.far.fail(); err != nil {
			return nil, err
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.end.IsZero() {
		return nil, fmt.Errorf("starting a transfer: %w", errs.ErrInProgress)
	}
	t.end = time.Now().Add(t.far.delay)
	t.far.moves.Add(1)
	return t, nil
}

func (t *farMove) Poll() (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.far.group.Err(); err != nil {
		t.over()
		return false, err
	}
	if time.Now().Before(t.end) {
		return false, nil
	}
	for _, c := range t.copies {
		copy(c.dst, c.src)
	}
	t.over()
	return true, nil
}

func (t *farMove) over() {
	t.end = time.Time{}
	t.far.moves.Add(-1)
}

func (t *farMove) Close() error { return nil }

// farFlags are words in shared memory.
type farFlags struct {
	far     *far
	alloc   backend.Allocation
	mapping backend.Mapping
	words   []atomic.Uint64
	count   int
}

func (f *far) NewFlags(ctx context.Context, count int) (backend.Flags, error) {
	a, err := f.Backend.Allocate(ctx, int64(8*count))
	if voted := f.group.Vote(ctx, "flags", err); voted != nil {
		if err == nil {
			voted = errors.Join(voted, a.Release(ctx))
		}
		return nil, voted
	}
	mapping, err := f.Backend.Rendezvous(ctx, a)
	if voted := f.group.Vote(ctx, "mapping flags", err); voted != nil {
		if err == nil {
			voted = errors.Join(voted, mapping.Unmap(ctx))
		}
		return nil, errors.Join(voted, a.Release(ctx))
	}
	flags := &farFlags{far: f, alloc: a, mapping: mapping, count: count}
	if flags.words, err = flags.of(f.group.Rank()); err != nil {
		return nil, errors.Join(err, flags.Close())
	}
	return flags, nil
}

// of returns the words of a rank.
func (f *farFlags) of(rank int) ([]atomic.Uint64, error) {
	p, err := f.mapping.Peer(rank)
	if err != nil {
		return nil, err
	}
	b, err := f.far.bytes(p, int64(8*f.count))
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(b))), f.count), nil
}

func (f *farFlags) Words() []atomic.Uint64 { return f.words }

func (f *farFlags) Progress() {}

func (f *farFlags) PrepareStore(peer, index int) (backend.FlagStore, error) {
	words, err := f.of(peer)
	if err != nil {
		return nil, err
	}
	if f.far.near(peer) {
		return nearStore{&words[index]}, nil
	}
	return &farStore{far: f.far, word: &words[index]}, nil
}

func (f *farFlags) Close() error {
	ctx := context.Background()
	return errors.Join(f.mapping.Unmap(ctx), f.alloc.Release(ctx))
}

// nearStore writes a word at once.
type nearStore struct{ word *atomic.Uint64 }

func (s nearStore) Post(value uint64) error { s.word.Store(value); return nil }
func (s nearStore) Poll() (bool, error)     { return true, nil }
func (s nearStore) Close() error            { return nil }

// farStore writes a word, one half after the other.
type farStore struct {
	far   *far
	word  *atomic.Uint64
	value uint64
	end   time.Time
	half  bool
}

func (s *farStore) Post(value uint64) error {
	s.value, s.end, s.half = value, time.Now().Add(s.far.delay), false
	return nil
}

func (s *farStore) Poll() (bool, error) {
	switch {
	case time.Now().Before(s.end):
		return false, nil
	case !s.half:
		s.word.Store(s.word.Load()&^0xffffffff | s.value&0xffffffff)
		s.half = true
		return false, nil
	}
	s.word.Store(s.value)
	return true, nil
}

func (s *farStore) Close() error { return nil }
