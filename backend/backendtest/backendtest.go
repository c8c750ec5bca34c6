// Package backendtest is the conformance suite that every backend passes: what [backend.Backend], [backend.Allocation] and
// [backend.Mapping] promise, and those of the optional interfaces that a backend implements, checked without tensors or kernels. The
// package of a backend calls [Run] from a test.
//
// It also holds what the backends' own tests have in common: [OnRanks] runs code on every rank of a group in one process,
// [WithMemory] and [WithWindow] make what it works on, and [ExchangeBytes] shows that every rank reaches every copy.
package backendtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// Harness opens the backend under test.
type Harness struct {
	// Open opens the backend for one rank of a group whose ranks share this process. It is called once for each rank, at the
	// same time.
	Open func(ctx context.Context, g *group.Group) (backend.Backend, error)
	// WorldSizes are the sizes to test at; default 1, 2 and 3.
	WorldSizes []int
	// Unreachable is set if Peer of another rank returns ErrNotReachable by design.
	Unreachable bool
	// Hosts pretends, by rank, that ranks are on several hosts, by names; those of other hosts are unreachable by design then. WorldSizes are at most
	// its length. Nil is one host.
	Hosts []string
	// Adoptable makes memory of this rank's device, as a caller would that wants the backend to adopt it, and a function that frees it. It must be
	// set if the backend has the capability.
	Adoptable func(b backend.Backend, rank int, bytes int64) (p device.Ptr, free func() error, err error)
	// AdoptAlign is what adopted memory must be aligned to, in bytes; 0 if it need not be aligned.
	AdoptAlign int64
	// AllReduces are the forms of all-reduce, by name, that the backend's library has; all add f32.
	AllReduces []string
	// patience bounds each wait for something that must come; default 20 s.
	patience time.Duration
}

// test is one of the suite.
type test struct {
	name string
	run  func(ctx context.Context, h Harness, r *rank) error
	// loses is set where a rank leaves without a word: what follows is an error of the others.
	loses bool
}

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	if h.WorldSizes == nil {
		h.WorldSizes = []int{1, 2, 3}
	}
	for _, size := range h.WorldSizes {
		for _, tt := range tests {
			t.Run(fmt.Sprintf("World=%d/%s", size, tt.name), func(t *testing.T) {
				for r, err := range onBackends(t, h, size, tt) {
					if err != nil {
						t.Errorf("rank %d: %v", r, err)
					}
				}
			})
		}
	}
}

// tests are the suite.
var tests = []test{
	{name: "Capabilities", run: capabilities},
	{name: "Allocate", run: allocate},
	{name: "AllocateErrors", run: allocateErrors},
	{name: "Register", run: register},
	{name: "RegisterErrors", run: registerErrors},
	{name: "Rendezvous", run: rendezvous},
	{name: "RendezvousAgain", run: rendezvousAgain},
	{name: "Contiguous", run: contiguous},
	{name: "Multicast", run: multicast},
	{name: "WindowHandle", run: windowHandle},
	{name: "Transfers", run: transfers},
	{name: "TransfersOverlap", run: transfersOverlap},
	{name: "TransferToTheDead", run: transferToTheDead, loses: true},
	{name: "Flags", run: flags},
	{name: "FlagsFollowData", run: flagsFollowData},
	{name: "Quiesce", run: quiesce},
	{name: "AllReduce", run: allReduce},
	{name: "AllReduceErrors", run: allReduceErrors},
	{name: "ForeignAllocation", run: foreignAllocation},
	{name: "ManyRounds", run: manyRounds},
}

// rank is what a test works with on one rank.
type rank struct {
	backend.Backend
	group *group.Group
	// others counts the ranks that are not through with the test yet, but for one that is lost.
	others *sync.WaitGroup
}

// onBackends opens the backend on size ranks of this process, runs the test on each, and returns what came of it, by rank.
func onBackends(t *testing.T, h Harness, size int, tt test) []error {
	opts := &group.LocalOptions{}
	if h.Hosts != nil {
		opts.BootIDs = h.Hosts[:size]
	}
	if h.patience == 0 {
		h.patience = 20 * time.Second
	}
	var others sync.WaitGroup
	others.Add(size - 1)
	return OnRanks(t, size, opts, func(ctx context.Context, g *group.Group) error {
		// Whoever has failed must not leave the others waiting: all come to the barrier.
		b, err := h.Open(ctx, g)
		if err != nil {
			return errors.Join(fmt.Errorf("opening: %w", err), g.Barrier(ctx, "end of test"))
		}
		err = tt.run(ctx, h, &rank{b, g, &others})
		end := errors.Join(g.Barrier(ctx, "end of test"), b.Close(ctx))
		if tt.loses && size > 1 && errors.Is(end, errs.ErrPeerLost) {
			end = nil
		}
		return errors.Join(err, end)
	})
}

func (r *rank) mapped(ctx context.Context, bytes int64) (backend.Allocation, backend.Mapping, error) {
	a, err := r.Allocate(ctx, bytes)
	if err != nil {
		return nil, nil, err
	}
	m, err := r.Rendezvous(ctx, a)
	if err != nil {
		return nil, nil, errors.Join(err, a.Release(ctx))
	}
	return a, m, nil
}

// done takes a mapping apart as Memory does: nobody unmaps before all have come.
func (r *rank) done(ctx context.Context, a backend.Allocation, m backend.Mapping) error {
	if err := r.group.Barrier(ctx, "closing"); err != nil {
		return err
	}
	return errors.Join(m.Unmap(ctx), a.Release(ctx))
}

func capabilities(_ context.Context, _ Harness, r *rank) error {
	if r.Name() == "" || strings.ToLower(r.Name()) != r.Name() {
		return fmt.Errorf("the name is %q", r.Name())
	}
	for _, c := range r.Capabilities().List() {
		if !c.Have && c.Why == "" && c.Name != "collective_allocate" {
			return fmt.Errorf("capability %s is missing without a reason", c.Name)
		}
	}
	return nil
}

func allocate(ctx context.Context, _ Harness, r *rank) error {
	for _, n := range []int64{1, 15, 4096, 4097, 1 << 21, 1<<21 + 1} {
		a, err := r.Allocate(ctx, n)
		if err != nil {
			return fmt.Errorf("%d bytes: %w", n, err)
		}
		if a.Bytes() != n || a.RoundedBytes() < n || a.Ptr().IsNil() {
			return fmt.Errorf("%d bytes: the allocation says %d bytes, %d rounded, at %s", n, a.Bytes(), a.RoundedBytes(), a.Ptr())
		}
		got := make([]byte, n)
		if err := r.Device().CopyToHost(got, a.Ptr()); err != nil {
			return err
		}
		for i, b := range got {
			if b != 0 {
				return fmt.Errorf("%d bytes: byte %d of new memory is %#x", n, i, b)
			}
		}
		if err := r.Device().CopyFromHost(a.Ptr().Add(n-1), []byte{7}); err != nil {
			return fmt.Errorf("%d bytes: writing the last byte: %w", n, err)
		}
		if err := a.Release(ctx); err != nil {
			return err
		}
	}
	return nil
}

func allocateErrors(ctx context.Context, _ Harness, r *rank) error {
	for _, n := range []int64{0, -1, 1<<63 - 1} {
		if a, err := r.Allocate(ctx, n); err == nil {
			return errors.Join(fmt.Errorf("%d bytes were allocated", n), a.Release(ctx))
		} else if !errors.Is(err, errs.ErrInvalid) && !errors.Is(err, errs.ErrNoMemory) {
			return fmt.Errorf("%d bytes: %w", n, err)
		}
	}
	if a, err := r.Allocate(ctx, 1<<52); !errors.Is(err, errs.ErrNoMemory) {
		if err == nil {
			err = a.Release(ctx)
		}
		return fmt.Errorf("4 PiB: %w", err)
	}
	return nil
}

func rendezvous(ctx context.Context, h Harness, r *rank) error {
	const n = 5000
	a, m, err := r.mapped(ctx, n)
	if err != nil {
		return err
	}
	me := r.group.Rank()
	if own, err := m.Peer(me); err != nil || own != a.Ptr() {
		return fmt.Errorf("the own address is %s, and the allocation is at %s (%w)", own, a.Ptr(), err)
	}
	// Every rank writes its number plus one at its place of every copy, and reads what all wrote to its own.
	for peer := range r.group.Size() {
		p, err := m.Peer(peer)
		if peer != me && h.unreachable(me, peer) {
			if !errors.Is(err, errs.ErrNotReachable) {
				return fmt.Errorf("Peer(%d): %w", peer, err)
			}
			continue
		}
		if err != nil {
			return fmt.Errorf("Peer(%d): %w", peer, err)
		}
		if err := r.Device().CopyFromHost(p.Add(int64(me)), []byte{byte(me + 1)}); err != nil {
			return err
		}
		if err := r.Device().CopyFromHost(p.Add(n-1-int64(me)), []byte{byte(me + 101)}); err != nil {
			return err
		}
	}
	if err := r.group.Barrier(ctx, "written"); err != nil {
		return err
	}
	got := make([]byte, n)
	if err := r.Device().CopyToHost(got, a.Ptr()); err != nil {
		return err
	}
	for peer := range r.group.Size() {
		if peer != me && h.unreachable(me, peer) {
			continue
		}
		if got[peer] != byte(peer+1) || got[n-1-peer] != byte(peer+101) {
			return fmt.Errorf("rank %d wrote %d and %d, and they read %d and %d", peer, peer+1, peer+101, got[peer], got[n-1-peer])
		}
	}
	return r.done(ctx, a, m)
}

// unreachable reports whether two ranks have no addresses of each other's memory by design.
func (h Harness) unreachable(a, b int) bool {
	return h.Unreachable || h.Hosts != nil && h.Hosts[a] != h.Hosts[b]
}

// rendezvousAgain: an allocation whose mapping was undone, as after a failed vote, can be mapped again.
func rendezvousAgain(ctx context.Context, _ Harness, r *rank) error {
	a, m, err := r.mapped(ctx, 100)
	if err != nil {
		return err
	}
	for range 3 {
		if err := r.group.Barrier(ctx, "undo"); err != nil {
			return err
		}
		if err := m.Unmap(ctx); err != nil {
			return err
		}
		if m, err = r.Rendezvous(ctx, a); err != nil {
			return err
		}
	}
	return r.done(ctx, a, m)
}

// foreignAllocation: an allocation of another backend is refused on the rank that brings it, and the others are told: all ranks are in step afterwards, whether all
// have brought one or one of them, and can map what is the backend's.
func foreignAllocation(ctx context.Context, _ Harness, r *rank) error {
	a, err := r.Allocate(ctx, 64)
	if err != nil {
		return err
	}
	if _, err := r.Rendezvous(ctx, foreign{a}); err == nil {
		return errors.New("an allocation of another backend was mapped")
	}
	brought, brings := a, r.group.Rank() == r.group.Size()-1
	if brings {
		brought = foreign{a}
	}
	m, err := r.Rendezvous(ctx, brought)
	if brings && err == nil {
		err = errors.Join(errors.New("an allocation of another backend was mapped beside those of other ranks"), m.Unmap(ctx))
		m = nil
	}
	// What Memory does behind a rendezvous.
	if vote := r.group.Vote(ctx, "mapping", err); !errors.Is(vote, errs.ErrInvalid) {
		return fmt.Errorf("one rank has brought an allocation of another backend: %w", vote)
	}
	if m != nil {
		if err := m.Unmap(ctx); err != nil {
			return err
		}
	}
	if m, err = r.Rendezvous(ctx, a); err != nil {
		return fmt.Errorf("after an allocation of another backend: %w", err)
	}
	return r.done(ctx, a, m)
}

type foreign struct{ backend.Allocation }

func manyRounds(ctx context.Context, _ Harness, r *rank) error {
	for i := range 50 {
		a, m, err := r.mapped(ctx, int64(1+i*100))
		if err != nil {
			return err
		}
		if err := r.done(ctx, a, m); err != nil {
			return err
		}
	}
	return nil
}
