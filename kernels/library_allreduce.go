package kernels

import (
	"context"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// libraryHas reports whether a library has the form for elements of dtype and op.
func libraryHas(a Algorithm, dtype tensor.DType, op Op) bool {
	switch a {
	case NCCL: // nccl.h: ncclDataType_t has no 16-bit integers; ncclRedOp_t has all five operations
		return dtype != tensor.Int16 && dtype != tensor.Uint16
	case NCCLSymmetric: // the symmetric kernels add floats; NCCL takes its other kernels for the rest
		return (dtype == tensor.Float32 || dtype == tensor.Float16 || dtype == tensor.BFloat16) && op == Sum
	case NVSHMEM: // nvshmemx_coll_api.h: reductions of every standard type, without an average
		return op != Avg
	}
	return false
}

// libraryAllReduces are the all-reduces of a backend's library that Auto takes where ranks cannot signal each other.
func libraryAllReduces(backend string) []Algorithm {
	if backend == NCCL.Backend() {
		return []Algorithm{NCCL}
	}
	return nil
}

// byLibrary makes the spec that of the library below the memory's backend.
func (a *allReduce) byLibrary(s *collective.Spec) {
	s.Program.Build = func(ctx context.Context, b *collective.Builder) error {
		var in, out memory.Place
		in.Window, in.Offset, in.Err = a.in.Window()
		out.Window, out.Offset, out.Err = a.out.Window()
		reduce, err := a.in.Memory().PrepareAllReduce(ctx, a.algorithm.String(), in, out, a.in.NumElements(), a.in.Bytes(), a.in.DType().String(), a.op.String())
		if err != nil {
			return err
		}
		b.Launch(libraryLaunch{reduce})
		return nil
	}
}

// libraryLaunch is an all-reduce that a backend has prepared, as a launch.
type libraryLaunch struct {
	reduce interface {
		Enqueue(s device.Stream) error
		Close() error
	}
}

func (l libraryLaunch) Launch(s device.Stream) error { return l.reduce.Enqueue(s) }
func (l libraryLaunch) Close() error                 { return l.reduce.Close() }

// Fail tells the backend that this rank comes to no other run.
func (l libraryLaunch) Fail(err error) {
	if f, ok := l.reduce.(interface{ Fail(err error) }); ok {
		f.Fail(err)
	}
}

// Ask makes the backend ask whether this rank has given up while the run waits for other ranks.
func (l libraryLaunch) Ask(gaveUp func() error) {
	if a, ok := l.reduce.(interface{ Ask(gaveUp func() error) }); ok {
		a.Ask(gaveUp)
	}
}

// watchLaunch makes the plan's stream tell of a library's run that has gone beside it. It comes before the run and behind it.
type watchLaunch struct{ of libraryLaunch }

func (l watchLaunch) Launch(s device.Stream) error {
	if w, ok := l.of.reduce.(interface{ Watch(s device.Stream) error }); ok {
		return w.Watch(s)
	}
	return nil
}

func (l watchLaunch) Close() error { return nil }
