// Package backendtest is the conformance suite that every backend passes: what [backend.Backend], [backend.Allocation] and
// [backend.Mapping] promise, checked without tensors or kernels. The package of a backend calls [Run] from a test.
//
// It also holds what the backends' own tests have in common: [OnRanks] runs code on every rank of a group in one process,
// [WithMemory] and [WithWindow] make what it works on, and [ExchangeBytes] shows that every rank reaches every copy.
package backendtest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/symmem/symmem/backend"
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
	// Unreachable is set when Peer of another rank is ErrNotReachable by design.
	Unreachable bool
}

// Run runs the suite.
func Run(t *testing.T, h Harness) {
	if h.WorldSizes == nil {
		h.WorldSizes = []int{1, 2, 3}
	}
	tests := []struct {
		name string
		run  func(ctx context.Context, h Harness, r *rank) error
	}{
		{"Capabilities", capabilities},
		{"Allocate", allocate},
		{"AllocateErrors", allocateErrors},
		{"Register", register},
		{"Rendezvous", rendezvous},
		{"RendezvousAgain", rendezvousAgain},
		{"Contiguous", contiguous},
		{"Multicast", multicast},
		{"ForeignAllocation", foreignAllocation},
		{"ManyRounds", manyRounds},
	}
	for _, size := range h.WorldSizes {
		for _, tt := range tests {
			t.Run(fmt.Sprintf("World=%d/%s", size, tt.name), func(t *testing.T) {
				onBackends(t, h, size, func(ctx context.Context, r *rank) error { return tt.run(ctx, h, r) })
			})
		}
	}
}

// rank is what a test works with on one rank.
type rank struct {
	backend.Backend
	group *group.Group
}

// onBackends opens the backend on size ranks of this process and runs f on each.
func onBackends(t *testing.T, h Harness, size int, f func(ctx context.Context, r *rank) error) {
	for r, err := range OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
		// Whoever has failed must not leave the others waiting: all come to the barrier.
		b, err := h.Open(ctx, g)
		if err != nil {
			return errors.Join(fmt.Errorf("opening: %w", err), g.Barrier(ctx, "end of test"))
		}
		err = f(ctx, &rank{b, g})
		return errors.Join(err, g.Barrier(ctx, "end of test"), b.Close(ctx))
	}) {
		if err != nil {
			t.Errorf("rank %d: %v", r, err)
		}
	}
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

func register(ctx context.Context, _ Harness, r *rank) error {
	if r.Capabilities().Register {
		return nil // what can be adopted differs; the backend's own tests say
	}
	_, err := r.Register(ctx, 4096, 64)
	if !errors.Is(err, errs.ErrUnsupported) {
		return fmt.Errorf("registering without the capability: %w", err)
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
		if peer != me && h.Unreachable {
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
	if !h.Unreachable {
		got := make([]byte, n)
		if err := r.Device().CopyToHost(got, a.Ptr()); err != nil {
			return err
		}
		for peer := range r.group.Size() {
			if got[peer] != byte(peer+1) || got[n-1-peer] != byte(peer+101) {
				return fmt.Errorf("rank %d wrote %d and %d, and they read %d and %d", peer, peer+1, peer+101, got[peer], got[n-1-peer])
			}
		}
	}
	return r.done(ctx, a, m)
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

func contiguous(ctx context.Context, _ Harness, r *rank) error {
	a, m, err := r.mapped(ctx, 4097)
	if err != nil {
		return err
	}
	v, ok := m.(backend.ContiguousViewer)
	if ok != r.Capabilities().Contiguous {
		return fmt.Errorf("the capability says %t and the mapping %t", r.Capabilities().Contiguous, ok)
	}
	if ok {
		if err := r.Device().CopyFromHost(a.Ptr().Add(4096), []byte{byte(r.group.Rank() + 50)}); err != nil {
			return err
		}
		if err := r.group.Barrier(ctx, "written"); err != nil {
			return err
		}
		base, stride, err := v.Contiguous()
		if err != nil {
			return err
		}
		if stride < 4097 {
			return fmt.Errorf("copies of 4097 bytes lie %d apart", stride)
		}
		for peer := range r.group.Size() {
			var got [1]byte
			if err := r.Device().CopyToHost(got[:], base.Add(int64(peer)*stride+4096)); err != nil {
				return err
			}
			if got[0] != byte(peer+50) {
				return fmt.Errorf("rank %d's last byte reads %d through the view", peer, got[0])
			}
		}
	}
	return r.done(ctx, a, m)
}

func multicast(ctx context.Context, _ Harness, r *rank) error {
	a, m, err := r.mapped(ctx, 64)
	if err != nil {
		return err
	}
	mc, ok := m.(backend.Multicaster)
	if r.Capabilities().Multicast {
		if !ok {
			return errors.New("the capability says multicast, and the mapping has none")
		}
		if p, err := mc.EnableMulticast(ctx); err != nil || p.IsNil() {
			return fmt.Errorf("the multicast address is %s: %w", p, err)
		}
	} else if ok {
		if _, err := mc.EnableMulticast(ctx); !errors.Is(err, errs.ErrUnsupported) {
			return fmt.Errorf("multicast without the capability: %w", err)
		}
	}
	return r.done(ctx, a, m)
}

// foreignAllocation: an allocation of another backend is refused on the rank that brings it, and the others are told.
func foreignAllocation(ctx context.Context, _ Harness, r *rank) error {
	a, err := r.Allocate(ctx, 64)
	if err != nil {
		return err
	}
	if _, err := r.Rendezvous(ctx, foreign{a}); err == nil {
		return errors.New("an allocation of another backend was mapped")
	}
	return a.Release(ctx)
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
