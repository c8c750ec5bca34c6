package kernels

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/memory"
)

// wire is what ranks of this process put over whose simulated GPUs are on several islands: backend native, with the addresses of other islands hidden.
type wire struct {
	islands [][]int
	delay   time.Duration                         // of each put
	slow    func(from, to, put int) time.Duration // of a rank's so manieth put to another, besides; nil is none
	fail    func(from int) error                  // of a put that begins; nil is none

	mu    sync.Mutex
	flags map[string][][]atomic.Uint64 // of each group of flags the words, by rank
	puts  []int                        // how many have ended, by rank
	bytes int64                        // of all of them
}

// wired is a rank's side of it.
type wired struct {
	backend.Backend
	wire         *wire
	group        *group.Group
	device, card *cuda.Device // what puts read and write memory of GPUs with: no stream of the program's is in their way
	made         int          // flags
	under        atomic.Int64 // puts
	begun        map[int]int  // puts, by the rank that they go to
}

func (w *wired) Islands() []int {
	of := make([]int, w.group.Size())
	for _, ranks := range w.wire.islands {
		for _, r := range ranks {
			of[r] = slices.Min(ranks)
		}
	}
	return of
}

func (w *wired) near(rank int) bool {
	of := w.Islands()
	return of[rank] == of[w.group.Rank()]
}

func (w *wired) Capabilities() backend.Capabilities {
	c := w.Backend.Capabilities()
	if len(w.wire.islands) > 1 {
		c = backendtest.FarCapabilities(c)
		for r := range w.group.Size() {
			if w.near(r) && r != w.group.Rank() {
				c.PointerPeers++
			}
		}
	}
	return c
}

func (w *wired) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	m, err := w.Backend.Rendezvous(ctx, a)
	if err != nil || len(w.wire.islands) == 1 {
		return m, err
	}
	return &wiredMapping{m, w}, nil
}

func (w *wired) Quiesce(ctx context.Context) error {
	for w.under.Load() > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
	return nil
}

func (w *wired) Close(ctx context.Context) error {
	return errors.Join(w.Backend.Close(ctx), w.device.Close(), w.card.Close())
}

type wiredMapping struct {
	mapping backend.Mapping
	of      *wired
}

func (m *wiredMapping) Peer(rank int) (device.Ptr, error) {
	if !m.of.near(rank) {
		return 0, fmt.Errorf("rank %d is on another island: %w", rank, errs.ErrNotReachable)
	}
	return m.mapping.Peer(rank)
}

func (m *wiredMapping) Unmap(ctx context.Context) error { return m.mapping.Unmap(ctx) }

func (w *wired) PrepareTransfer(op backend.TransferOp, peer int, blocks []backend.Block) (backend.PreparedTransfer, error) {
	if op != backend.Write {
		return nil, fmt.Errorf("gets: %w", errs.ErrUnsupported)
	}
	p := &wiredPut{of: w, peer: peer}
	for _, b := range blocks {
		to, err := b.Remote.(*wiredMapping).mapping.Peer(peer)
		if err != nil {
			return nil, err
		}
		p.copies = append(p.copies, memory.WorkCopy{Dst: to.Add(b.Offset), Src: b.Local, Bytes: b.Bytes})
	}
	return p, nil
}

// wiredPut is a put. Only when its time has come is anything read or written.
type wiredPut struct {
	of     *wired
	peer   int
	copies []memory.WorkCopy
	end    time.Time
	busy   bool
}

func (p *wiredPut) Start() (device.HostProgress, error) {
	if f := p.of.wire.fail; f != nil {
		if err := f(p.of.group.Rank()); err != nil {
			return nil, err
		}
	}
	if p.busy {
		return nil, fmt.Errorf("starting a put: %w", errs.ErrInProgress)
	}
	p.busy, p.end = true, time.Now().Add(p.of.wire.delay)
	if slow := p.of.wire.slow; slow != nil {
		p.end = p.end.Add(slow(p.of.group.Rank(), p.peer, p.of.begun[p.peer]))
	}
	p.of.begun[p.peer]++ // all work of the CPU for a GPU is one goroutine's
	p.of.under.Add(1)
	return p, nil
}

func (p *wiredPut) Poll() (bool, error) {
	err := p.of.group.Err()
	if err == nil && time.Now().Before(p.end) {
		return false, nil
	}
	for _, c := range p.copies {
		if err == nil {
			through := make([]byte, c.Bytes)
			err = errors.Join(p.of.card.CopyToHost(through, c.Src), p.of.card.CopyFromHost(c.Dst, through))
		}
		p.of.wire.mu.Lock()
		p.of.wire.bytes += c.Bytes
		p.of.wire.mu.Unlock()
	}
	p.busy = false
	p.of.under.Add(-1)
	p.of.wire.mu.Lock()
	defer p.of.wire.mu.Unlock()
	p.of.wire.puts[p.of.group.Rank()]++
	return err == nil, err
}

func (p *wiredPut) Close() error { return nil }

// wiredFlags are words of this process.
type wiredFlags struct {
	of    *wired
	words [][]atomic.Uint64
}

func (w *wired) NewFlags(ctx context.Context, count int) (backend.Flags, error) {
	name := fmt.Sprint(w.group.Name(), w.made)
	w.made++
	f := &wiredFlags{of: w}
	w.wire.mu.Lock()
	if f.words = w.wire.flags[name]; f.words == nil {
		f.words = make([][]atomic.Uint64, w.group.Size())
		for r := range f.words {
			f.words[r] = make([]atomic.Uint64, count)
		}
		w.wire.flags[name] = f.words
	}
	w.wire.mu.Unlock()
	return f, w.group.Vote(ctx, "flags", nil)
}

func (f *wiredFlags) Words() []atomic.Uint64 { return f.words[f.of.group.Rank()] }
func (f *wiredFlags) Progress()              {}
func (f *wiredFlags) Close() error           { return nil }

func (f *wiredFlags) PrepareStore(peer, index int) (backend.FlagStore, error) {
	return &wiredStore{word: &f.words[peer][index], delay: f.of.wire.delay}, nil
}

// wiredStore writes a word when its time has come.
type wiredStore struct {
	word  *atomic.Uint64
	delay time.Duration
	value uint64
	end   time.Time
}

func (s *wiredStore) Post(value uint64) error {
	s.value, s.end = value, time.Now().Add(s.delay)
	return nil
}

func (s *wiredStore) Poll() (bool, error) {
	if time.Now().Before(s.end) {
		return false, nil
	}
	s.word.Store(s.value)
	return true, nil
}

func (s *wiredStore) Close() error { return nil }

// onWired runs f on simulated GPUs of islands that put to each other over w. Kernels and signals wait for as long as timeout.
func onWired(t *testing.T, w *wire, seed uint64, timeout time.Duration, f func(ctx context.Context, g *group.Group, m *memory.Memory) error) []error {
	t.Helper()
	size := len(slices.Concat(w.islands...))
	w.flags, w.puts = map[string][][]atomic.Uint64{}, make([]int, size)
	machine, err := simcuda.New(simcuda.Config{GPUs: size, Seed: seed})
	require.NoError(t, err)
	failed := backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		// A wait that the device cuts off does not say whom it was for: the plan's own bound comes first.
		d, err := cuda.Open(&cuda.Options{Driver: machine.Driver(), LocalRank: g.Rank(), Err: g.Err, WaitTimeout: timeout + 30*time.Second})
		if err != nil {
			return err
		}
		n, err := native.New(ctx, g, &native.Options{Opened: d, Multicast: "off", KernelTimeout: timeout})
		if err != nil {
			return errors.Join(err, d.Close())
		}
		card, err := cuda.Open(&cuda.Options{Driver: machine.Driver(), LocalRank: g.Rank()})
		if err != nil {
			return errors.Join(err, n.Close(ctx), d.Close())
		}
		m := memory.New(&wired{Backend: n, wire: w, group: g, device: d, card: card, begun: map[int]int{}}, g, &memory.Options{Channels: 2, KernelTimeout: timeout})
		return errors.Join(f(ctx, g, m), g.Barrier(ctx, "end"), m.Close(ctx))
	})
	assert.NoError(t, machine.Err())
	assert.Empty(t, machine.Violations())
	return failed
}
