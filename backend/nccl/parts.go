package nccl

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
)

// A collective over islands is made of kernels on each, and of NCCL's between ranks of several, the rails: each rail has a communicator that is
// split from that of all ranks. All rails of a group are split in one call, and are one reducer: what fails on one ends all.

// formOf names the communicator of a collective, the same on every rank: ranks in parts have another than those that are not.
func formOf(r *backend.AllReduce) string {
	if r.Parts == nil {
		return r.Name
	}
	parts := fmt.Sprint(r.Parts)
	if len(parts) > 64 { // it is part of the keys of the group's store
		parts = fmt.Sprintf("%x", sha256.Sum256([]byte(parts)))
	}
	return r.Name + " in parts " + parts
}

// inParts makes p the calls of a collective among the ranks of each part of the group.
func (b *Backend) inParts(p *reduction, r *backend.AllReduce) error {
	const op = "PrepareAllReduce"
	rank, size := b.group.Rank(), b.group.Size()
	switch {
	case len(r.Parts) != size:
		return errs.Invalid(op, "parts", r.Parts, fmt.Sprintf("one number for each of %d ranks", size))
	case r.Name != plainForm:
		return fmt.Errorf("NCCL's form %s takes all ranks: %w", r.Name, errs.ErrUnsupported)
	case len(r.Calls) == 0:
		return errs.Invalid(op, "calls", "none", "at least one")
	}
	for i, first := range r.Parts {
		if first < 0 || first > i || r.Parts[first] != first {
			return errs.Invalid(op, "parts", r.Parts, "by rank, the lowest rank of its part")
		}
	}
	if err := b.ready(); err != nil {
		return err
	}
	part := newIsle(r.Parts, rank)
	p.part = part.part()
	for i := range r.Calls {
		c := &r.Calls[i]
		call, err := b.callOf(r.Name, c)
		if err != nil {
			return err
		}
		if err := b.lib.Has(call.What); err != nil {
			return err
		}
		call.Send, call.Recv = uint64(c.In), uint64(c.Out)
		if call.Root = 0; call.What == nccl.Broadcast || call.What == nccl.Reduce || call.What.IsMessage() {
			if call.Root = slices.Index(part.ranks, c.Root); call.Root < 0 || call.What.IsMessage() && c.Root == rank {
				return errs.Invalid(op, "root", c.Root, fmt.Sprintf("a rank of the part, %v, and of a message another than this one, %d", part.ranks, rank))
			}
		}
		p.calls = append(p.calls, call)
	}
	return nil
}

// Fail gives up the communicator that it runs on, and tells the other ranks to do so: this rank does not come to a run again that they wait in.
func (p *reduction) Fail(err error) {
	b, red := p.backend, p.of
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.watched == nil || red.given() != nil || red.failing.Swap(true) { // a plan has several runs of one communicator
		return
	}
	b.watching.Go(func() {
		if err := b.runFailed(red, err); err != nil {
			b.log.Debug("a communicator of NCCL's was given up", "form", red.form, "error", err)
		}
	})
}

// Ask makes the backend's goroutine that watches communicators ask. Whoever has given up calls Fail.
func (p *reduction) Ask(gaveUp func() error) {
	b := p.backend
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked[p] = gaveUp
}

// askAll asks for all plans whether they have given up.
func (b *Backend) askAll() {
	b.mu.Lock()
	all := slices.Collect(maps.Values(b.asked))
	b.mu.Unlock()
	for _, gaveUp := range all {
		if err := gaveUp(); err != nil {
			b.log.Debug("a plan has given up while NCCL waits", "error", err)
		}
	}
}

// Abandoned is the word of the communicator, which is written before any of its kernels is ended.
func (p *reduction) Abandoned() device.Ptr { return p.of.fault.Ptr() }

// Islands returns which ranks have addresses of each other's windows.
func (b *Backend) Islands() []int {
	if b.isle == nil {
		return nil
	}
	return slices.Clone(b.isle.firsts)
}
