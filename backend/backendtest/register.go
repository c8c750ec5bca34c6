package backendtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// Parts that are adopted have so many bytes, and begin at multiples of partAlign.
const (
	partBytes = 3000
	partAlign = 4096
)

// register adopts two parts of one piece of memory, at different places on each rank: peers reach both, each is let go of by itself, and
// the memory stays the caller's.
func register(ctx context.Context, h Harness, r *rank) error {
	if !r.Capabilities().Register {
		_, err := r.Register(ctx, partAlign, 64)
		if !errors.Is(err, errs.ErrUnsupported) {
			return fmt.Errorf("registering without the capability: %w", err)
		}
		return nil
	}
	if h.Adoptable == nil {
		return errors.New("the backend adopts memory, and the harness gives none")
	}
	me := r.group.Rank()
	p, free, err := h.Adoptable(r.Backend, me, 4<<20)
	if err != nil {
		return err
	}
	whole := bytes.Repeat([]byte{0x5a}, 4<<20)
	if err := r.Device().CopyFromHost(p, whole); err != nil {
		return err
	}
	at := [2]int64{partAlign * int64(1+me), 2<<20 + partAlign*int64(5+me)}
	var allocs [2]backend.Allocation
	var maps [2]backend.Mapping
	for i := range at {
		a, err := r.Register(ctx, p.Add(at[i]), partBytes)
		if err != nil {
			return fmt.Errorf("part %d: %w", i, err)
		}
		if a.Ptr() != p.Add(at[i]) || a.Bytes() != partBytes || a.RoundedBytes() < partBytes {
			return fmt.Errorf("%d bytes at %s were adopted, and the allocation says %d, %d rounded, at %s",
				partBytes, p.Add(at[i]), a.Bytes(), a.RoundedBytes(), a.Ptr())
		}
		allocs[i] = a
		if maps[i], err = r.Rendezvous(ctx, a); err != nil {
			return fmt.Errorf("mapping part %d: %w", i, err)
		}
		if own, err := maps[i].Peer(me); err != nil || own != a.Ptr() {
			return fmt.Errorf("the own address of part %d is %s and not the caller's %s: %w", i, own, a.Ptr(), err)
		}
	}
	// Every rank writes to its place in both parts of all; then one part goes, and the other is written once more.
	send := func(i, round int) error {
		for peer := range r.group.Size() {
			if _, moves := backend.TransferrerOf(r.Backend); !moves && peer != me && h.unreachable(me, peer) {
				continue
			}
			if err := r.place(ctx, h, maps[i], allocs[i], peer, int64(10+me), byte(1+100*i+10*round+me)); err != nil {
				return err
			}
			whole[at[i]+10+int64(peer)] = byte(1 + 100*i + 10*round + peer)
		}
		return r.group.Barrier(ctx, "written")
	}
	err = errors.Join(send(0, 0), send(1, 0), r.done(ctx, allocs[0], maps[0]), send(1, 1), r.done(ctx, allocs[1], maps[1]))
	if err != nil {
		return err
	}
	got := make([]byte, len(whole))
	if err := r.Device().CopyToHost(got, p); err != nil {
		return fmt.Errorf("the memory after it was let go of: %w", err)
	}
	for i := range got {
		if got[i] != whole[i] {
			return fmt.Errorf("byte %d of the caller's memory is %d and not %d", i, got[i], whole[i])
		}
	}
	// What has been let go of can be adopted again.
	a, err := r.Register(ctx, p.Add(at[0]), partBytes)
	if err != nil {
		return fmt.Errorf("adopting again: %w", err)
	}
	return errors.Join(a.Release(ctx), free())
}

// place writes a byte to a place of a peer's copy: by its address or, where that cannot be, by a transfer from the first byte of the own
// part.
func (r *rank) place(ctx context.Context, h Harness, m backend.Mapping, a backend.Allocation, peer int, offset int64, value byte) error {
	p, err := m.Peer(peer)
	if err == nil {
		return r.Device().CopyFromHost(p.Add(offset), []byte{value})
	}
	mover, ok := backend.TransferrerOf(r.Backend)
	if !errors.Is(err, errs.ErrNotReachable) || !ok {
		return fmt.Errorf("Peer(%d): %w", peer, err)
	}
	src := a.Ptr()
	var before [1]byte
	if err := errors.Join(r.Device().CopyToHost(before[:], src), r.Device().CopyFromHost(src, []byte{value})); err != nil {
		return err
	}
	x, err := mover.PrepareTransfer(backend.Write, peer, []backend.Block{{Alloc: a, Local: src, Remote: m, Offset: offset, Bytes: 1}})
	if err != nil {
		return err
	}
	return errors.Join(h.runTransfer(ctx, x), x.Close(), r.Device().CopyFromHost(src, before[:]))
}

// registerErrors: memory that cannot be adopted is an error of the rank that brings it, which says so and keeps nothing.
func registerErrors(ctx context.Context, h Harness, r *rank) error {
	if !r.Capabilities().Register || h.Adoptable == nil {
		return nil // register says what is wrong then
	}
	const n = 2 << 20
	p, free, err := h.Adoptable(r.Backend, r.group.Rank(), n)
	if err != nil {
		return err
	}
	type attempt struct {
		what  string
		p     device.Ptr
		bytes int64
	}
	tries := []attempt{
		{"no bytes", p, 0}, {"less than no bytes", p, -1}, {"nil", 0, 64}, {"more than all addresses", p, 1<<63 - 1},
		{"what nobody has allocated", 4096, 64}, {"more than was allocated", p, 1 << 40},
	}
	if h.AdoptAlign > 1 {
		tries = append(tries, attempt{"misaligned memory", p.Add(h.AdoptAlign / 2), 64})
	}
	for _, try := range tries {
		a, err := r.Register(ctx, try.p, try.bytes)
		if err == nil {
			return errors.Join(fmt.Errorf("%s was adopted", try.what), a.Release(ctx))
		}
		if !errors.Is(err, errs.ErrInvalid) {
			return fmt.Errorf("adopting %s is not ErrInvalid: %w", try.what, err)
		}
	}
	a, err := r.Register(ctx, p, n)
	if err != nil {
		return fmt.Errorf("adopting good memory after bad: %w", err)
	}
	return errors.Join(a.Release(ctx), free())
}
