package nccl

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"slices"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
)

// A collective over islands is made of kernels on each, and of NCCL's all-reduce between ranks of several, the rails: each rail has a communicator that is
// split from that of all ranks. All rails of a group are split in one call, and are one reducer: what fails on one ends all.

// formOf names the communicator of an all-reduce, the same on every rank: ranks in parts have another than those that are not.
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

// partOf says which part of the group this rank reduces in: all of it, unless r says otherwise.
func (b *Backend) partOf(r *backend.AllReduce) (nccl.Part, error) {
	const op = "PrepareAllReduce"
	rank, size := b.group.Rank(), b.group.Size()
	switch {
	case r.Parts == nil && r.Told == 0 && r.Heard == 0:
		return nccl.Part{Ranks: size, Rank: rank}, nil
	case r.Parts == nil || (r.Told == 0) != (r.Heard == 0):
		return nccl.Part{}, errs.Invalid(op, "told and heard", fmt.Sprintf("%s and %s", r.Told, r.Heard), "both or none, and none without parts")
	case len(r.Parts) != size:
		return nccl.Part{}, errs.Invalid(op, "parts", r.Parts, fmt.Sprintf("one number for each of %d ranks", size))
	case r.Name != plainForm || r.Collective != "":
		return nccl.Part{}, fmt.Errorf("NCCL's %s of the form %s takes all ranks: %w", cmp.Or(r.Collective, "all_reduce"), r.Name, errs.ErrUnsupported)
	}
	for i, first := range r.Parts {
		if first < 0 || first > i || r.Parts[first] != first {
			return nccl.Part{}, errs.Invalid(op, "parts", r.Parts, "by rank, the lowest rank of its part")
		}
	}
	return newIsle(r.Parts, rank).part(), nil
}

// Fail gives up the communicator that it runs on, and tells the other ranks to do so: this rank does not come to a run again that they wait in.
func (p *reduction) Fail(err error) {
	b, red := p.backend, p.of
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.watched == nil || red.given() != nil {
		return
	}
	b.watching.Go(func() {
		if err := b.runFailed(red, err); err != nil {
			b.log.Debug("a communicator of NCCL's was given up", "form", red.form, "error", err)
		}
	})
}

// Islands returns which ranks have addresses of each other's windows.
func (b *Backend) Islands() []int {
	if b.isle == nil {
		return nil
	}
	return slices.Clone(b.isle.firsts)
}
