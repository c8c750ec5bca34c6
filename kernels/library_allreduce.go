package kernels

import (
	"context"
	"errors"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// libraryForm is the all-reduce of the library below the memory's backend.
type libraryForm struct{}

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

func (libraryForm) purpose() string { return "" }

func (libraryForm) channelBytes() int64 { return 1 }

// libraryWork is a plan's work that the library does.
type libraryWork struct {
	reduce libraryAllReduce // nil for an empty tensor
	ended  device.Event     // of the last run that was not recorded
}

// libraryAllReduce is what a backend prepares.
type libraryAllReduce interface {
	Enqueue(s device.Stream) error
	Close() error
}

func (libraryForm) prepare(ctx context.Context, p *Plan, op Op, _ uint32) (work, error) {
	w := &libraryWork{}
	if p.in.Bytes() == 0 {
		return w, nil
	}
	var err error
	if w.ended, err = p.device.NewEvent(); err != nil {
		return nil, err
	}
	var in, out memory.Place
	if in.Window, in.Offset, err = p.in.Window(); err == nil {
		out.Window, out.Offset, err = p.out.Window()
	}
	if err != nil {
		return nil, errors.Join(err, w.ended.Close())
	}
	w.reduce, err = p.in.Memory().PrepareAllReduce(ctx, p.algorithm.String(), in, out, p.in.NumElements(), p.in.Bytes(), p.in.DType().String(), op.String())
	if err != nil {
		return nil, errors.Join(err, w.ended.Close())
	}
	return w, nil
}

func (w *libraryWork) enqueue(s device.Stream, recorded bool) error {
	if w.reduce == nil {
		return nil
	}
	if err := w.reduce.Enqueue(s); err != nil || recorded {
		return err
	}
	return s.Record(w.ended)
}

func (w *libraryWork) settled() (bool, error) {
	if w.reduce == nil {
		return true, nil
	}
	return w.ended.Query()
}

func (w *libraryWork) close() error {
	if w.reduce == nil {
		return nil
	}
	return errors.Join(w.reduce.Close(), w.ended.Close())
}
