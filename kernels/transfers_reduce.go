package kernels

import (
	"encoding/binary"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
)

// newReduce makes the reduction for the plan's device: a function that adds a lap to the plan.
func (f transferForm) newReduce(b *collective.Builder) (func(lap int), error) {
	if f.in.Device().Kind() == device.CUDA {
		return f.newCUDAReduce(b)
	}
	return f.newHostReduce(b)
}

// sources says where every rank's part of a lap of this rank's shard is, by rank, and where the result goes; all of them are n
// bytes.
func (f transferForm) sources(b *collective.Builder, lap int) (srcs []device.Ptr, dst device.Ptr, n int64) {
	lo, hi := f.piece(f.rank, lap)
	for r := range f.size {
		if r == f.rank {
			srcs = append(srcs, f.in.Ptr().Add(lo))
			continue
		}
		srcs = append(srcs, b.Workspace(f.rank).Add(f.slot(f.rank, r, lap)))
	}
	return srcs, f.out.Ptr().Add(lo), hi - lo
}

func (f transferForm) newHostReduce(b *collective.Builder) (func(lap int), error) {
	reduce := newReducer(f.in.DType(), f.op, f.size)
	if reduce == nil {
		return nil, errs.Invalid("NewAllReduce", "dtype", f.in.DType(), "a dtype that has kernels")
	}
	return func(lap int) {
		srcs, dst, n := f.sources(b, lap)
		if n == 0 {
			return
		}
		out := b.Bytes(dst, n)
		var ins [][]byte
		for _, src := range srcs {
			ins = append(ins, b.Bytes(src, n))
		}
		elements := n / f.in.DType().Bytes()
		b.Host(func() error {
			reduce(out, ins, 0, elements)
			return nil
		})
	}, nil
}

// newCUDAReduce is the kernel that loads every input, on places that are all this rank's own.
func (f transferForm) newCUDAReduce(b *collective.Builder) (func(lap int), error) {
	kernel, image, err := findKernel(ptx.OneShotPull, f.in.Device(), f.in.DType(), f.op, f.size)
	if err != nil {
		return nil, err
	}
	dead := b.Upload(make([]byte, 4))
	return func(lap int) {
		srcs, dst, n := f.sources(b, lap)
		if n == 0 {
			return
		}
		params := ptx.Params{
			Count: uint64(n / f.in.DType().Bytes()), Dead: uint64(dead), Rank: uint32(f.rank), World: uint32(f.size),
			Op: uint32(f.op), Flags: ptx.NoBarrier,
		}
		if f.size <= ptx.Inline {
			for r, src := range srcs {
				params.In[r] = uint64(src)
			}
			params.Out[f.rank] = uint64(dst)
		} else {
			// The rows of the table are inputs, outputs, and workspaces, which are not used.
			words := make([]byte, 3*f.size*8)
			for r, src := range srcs {
				binary.LittleEndian.PutUint64(words[8*r:], uint64(src))
			}
			binary.LittleEndian.PutUint64(words[8*(f.size+f.rank):], uint64(dst))
			params.Table = uint64(b.Upload(words))
		}
		b.Kernel(&collective.Kernel{
			Image: image, Function: kernel.Name, Overlap: kernel.Overlap,
			Fit: func(multiprocessors int) (blocks, threads int) {
				g := geometry(OneShotPull, n, f.size, multiprocessors)
				return g.blocks, g.threads
			},
			Params: func(*collective.Addresses) []any { return []any{params.Bytes()} },
		})
	}, nil
}
