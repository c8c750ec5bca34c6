package kernels

import (
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/internal/errs"
)

// onHost makes the spec that of a kernel on the host device: between two meetings each rank combines its share of all inputs. In place is
// safe: nobody else reads or writes the share of the input that this rank works on. Small messages go through slots, and of larger ones that
// one rank is to have, every rank combines a part.
func (r *reduction) onHost(s *collective.Spec) {
	s.Program = nil
	width := r.in.DType().Bytes()
	slots := hostSlotsOf(s, r.in.NumElements()*width)
	if slots == nil && !r.scatter {
		r.byParts(s)
		return
	}
	s.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
		combine := newReducer(r.in.DType(), r.op, at.WorldSize())
		if combine == nil {
			return nil, errs.Invalid(r.call, "dtype", r.in.DType(), "a dtype that has kernels")
		}
		rank := at.Rank()
		lo, hi := r.share(rank)
		var ins [][]byte
		var out []byte
		for i := range at.WorldSize() {
			ins = append(ins, at.Bytes(at.Tensor(specIn, i).Add(lo*width), (hi-lo)*width))
		}
		if hi > lo {
			out = at.Bytes(r.out.Ptr(), (hi-lo)*width)
		}
		sources, readers := r.peers()
		if slots != nil {
			slots.prepare(at, r.in.NumElements()*width, sources, readers)
			return func(run *collective.HostRun) error {
				slot, err := slots.exchange(run)
				if err != nil || hi == lo {
					return err
				}
				for _, source := range sources {
					ins[source] = slots.ranks[source][slot][lo*width : hi*width]
				}
				combine(out, ins, 0, hi-lo)
				slots.release(run)
				return nil
			}, nil
		}
		return func(run *collective.HostRun) error {
			if err := meet(run, flagStart, readers, sources); err != nil {
				return err
			}
			if hi > lo {
				combine(out, ins, 0, hi-lo)
			}
			return meet(run, flagEnd, sources, readers)
		}, nil
	}
}

// byParts makes the spec that of a kernel in which every rank combines a part of all inputs, and writes it to root's output. All meet before
// and after, as each reads from all.
func (r *reduction) byParts(s *collective.Spec) {
	n := r.in.Bytes()
	s.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
		combine := newReducer(r.in.DType(), r.op, at.WorldSize())
		if combine == nil {
			return nil, errs.Invalid(r.call, "dtype", r.in.DType(), "a dtype that has kernels")
		}
		var ins [][]byte
		for i := range at.WorldSize() {
			ins = append(ins, at.Bytes(at.Tensor(specIn, i), n))
		}
		out := at.Bytes(at.Tensor(r.specOut(), r.root), n)
		lo, hi := partOf(r.in.NumElements(), r.in.DType().Bytes(), at.WorldSize(), at.Rank())
		return func(run *collective.HostRun) error {
			if err := run.Barrier(flagStart); err != nil {
				return err
			}
			combine(out, ins, lo, hi)
			return run.Barrier(flagEnd)
		}, nil
	}
}

// peers gives the ranks whose inputs this one reads, and those that read its own.
func (r *reduction) peers() (sources, readers []int) {
	rank, size := r.in.Rank(), r.in.WorldSize()
	own, end := r.share(rank)
	for k := 1; k < size; k++ {
		peer := (rank + k) % size
		if end > own {
			sources = append(sources, peer)
		}
		if lo, hi := r.share(peer); hi > lo {
			readers = append(readers, peer)
		}
	}
	return sources, readers
}
