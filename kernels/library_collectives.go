package kernels

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// LibraryCollectives lists the forms that the library below a backend has of what a constructor other than NewAllReduce makes, for the memory of
// that backend. What is shared out has to come out even: the libraries have no shares of different length. NVSHMEM has no reduction to one rank, its
// all-gather, reduce-scatter and all-to-all want input and output that do not overlap, and its reduce-scatter takes half of
// NVSHMEM_REDUCE_SCRATCH_SIZE (256 KiB unless that is set) as input at most; anything else is ErrUnsupported. NCCL has no barrier, and its
// all-reduce of one byte is taken for one.
func LibraryCollectives(constructor, backend string) []Algorithm {
	switch {
	case backend == NCCL.Backend() && (libraryNames[constructor] != "" || constructor == "NewBarrier"):
		return []Algorithm{NCCL}
	case backend == NVSHMEM.Backend() && (libraryNames[constructor] != "" && constructor != "NewReduce" || constructor == "NewBarrier"):
		return []Algorithm{NVSHMEM}
	}
	return nil
}

// farForm is the form that Auto takes where peers have no addresses: puts and signals, or else, where ranks cannot signal each other, what the library
// below the backend has. That it also has where puts and signals are the library's own calls, one by one by the CPU, and it has no gets, if the library's form does what is asked for.
func farForm(m *memory.Memory, does func(Algorithm) bool, library ...Algorithm) Algorithm {
	if len(library) > 0 && (!m.CanSignal() || !m.Capabilities().Transfers && does(library[0])) {
		return library[0]
	}
	return Transfers
}

// libraryNames are what backends call the collectives that have tensors.
var libraryNames = map[string]string{
	"NewBroadcast": "broadcast", "NewReduce": "reduce", "NewAllGather": "all_gather", "NewReduceScatter": "reduce_scatter", "NewAllToAll": "all_to_all",
}

// libraryBarrier is the program of a barrier of the library below a backend.
func libraryBarrier(m *memory.Memory, a Algorithm) *collective.Program {
	return &collective.Program{Build: func(ctx context.Context, b *collective.Builder) error {
		p, err := m.PrepareCollective(ctx, memory.Place{}, memory.Place{}, 0, 0, memory.LibraryCollective{Name: a.String(), Collective: "barrier"})
		if err != nil {
			return err
		}
		b.Launch(libraryLaunch{p})
		return nil
	}}
}

// byLibrary makes the spec that of the library below the memory's backend: count elements of dtype for each share, block or message. Where nothing is
// combined, op is 0.
func (m *maker) byLibrary(s *collective.Spec, count int64, dtype tensor.DType, op Op, root int) {
	what := libraryNames[m.call]
	c := memory.LibraryCollective{Name: m.algorithm.String(), Collective: what, Root: root, Count: count, DType: dtype.String(), Op: Sum.String()}
	if op != 0 {
		if c.Op = op.String(); !libraryHas(m.algorithm, dtype, op) {
			s.Failure = fmt.Errorf("%s has no %s %s of %s: %w", m.algorithm, what, op, dtype, errs.ErrUnsupported)
			return
		}
	}
	s.Program = &collective.Program{Build: func(ctx context.Context, b *collective.Builder) error {
		var in, out memory.Place
		in.Window, in.Offset, in.Err = m.in.Window()
		out.Window, out.Offset, out.Err = m.out.Window()
		p, err := m.in.Memory().PrepareCollective(ctx, in, out, m.in.Bytes(), m.out.Bytes(), c)
		if err != nil {
			return err
		}
		b.Launch(libraryLaunch{p})
		return nil
	}}
}

// evenly is the number of elements of each rank's share of n; it makes the spec fail if they are not alike.
func (m *maker) evenly(s *collective.Spec, n int64) int64 {
	size := int64(m.in.WorldSize())
	if n%size != 0 {
		s.Failure = fmt.Errorf("%s has shares of one length only, and %d elements between %d ranks are not even: %w", m.algorithm, n, size, errs.ErrUnsupported)
	}
	return n / size
}
