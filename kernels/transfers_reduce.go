package kernels

import (
	"encoding/binary"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/tensor"
)

// newReduce makes the reduction for the plan's device: a function that adds a lap to the plan.
func (f transferForm) newReduce(b *collective.Builder) (func(lap int), error) {
	reduce, err := newLocalReduce(b, f.in.Device(), f.in.DType(), f.op, f.size, f.maxBlocks)
	if err != nil {
		return nil, err
	}
	return func(lap int) { reduce(f.sources(b, lap)) }, nil
}

// sources says where every rank's part of a lap of this rank's shard is, by rank, and where the result goes; all of them are n
// bytes.
func (f transferForm) sources(b *collective.Builder, lap int) (srcs []device.Ptr, dst device.Ptr, n int64) {
	lo, hi := f.piece(f.rank, lap)
	for r := range f.size {
		if r == f.rank {
			srcs = append(srcs, f.input(b).Add(lo))
			continue
		}
		srcs = append(srcs, b.Workspace(f.rank).Add(f.slot(f.rank, r, lap)))
	}
	return srcs, f.output(b).Add(lo), hi - lo
}

// localReduce adds the step that combines n bytes from each of srcs, by rank, to the plan, for its device; dst may be one of them. All are
// this rank's own memory. On CUDA devices, srcs are alike modulo 16.
type localReduce func(srcs []device.Ptr, dst device.Ptr, n int64)

func newLocalReduce(b *collective.Builder, d device.Device, dtype tensor.DType, op Op, size, maxBlocks int) (localReduce, error) {
	if d.Kind() == device.CUDA {
		return cudaReduce{dtype: dtype, op: op, rank: b.Rank(), size: size, dead: b.Upload(make([]byte, 4)), maxBlocks: maxBlocks}.prepare(b, d)
	}
	reduce := newReducer(dtype, op, size)
	if reduce == nil {
		return nil, errs.Invalid("New", "dtype", dtype, "a dtype that has kernels")
	}
	return func(srcs []device.Ptr, dst device.Ptr, n int64) {
		if n == 0 {
			return
		}
		out := b.Bytes(dst, n)
		var ins [][]byte
		for _, src := range srcs {
			ins = append(ins, b.Bytes(src, n))
		}
		b.Host(func() error {
			reduce(out, ins, 0, n/dtype.Bytes())
			return nil
		})
	}, nil
}

// cudaReduce is the kernel that loads every input, on places that are all this rank's own.
type cudaReduce struct {
	dtype      tensor.DType
	op         Op
	rank, size int        // which source is this rank's, and of how many
	dead       device.Ptr // of a word; if that is not 0, nothing is combined
	maxBlocks  int
}

func (c cudaReduce) prepare(b *collective.Builder, d device.Device) (localReduce, error) {
	rank, size := c.rank, c.size
	kernel, image, err := findKernel(ptx.AllReduce, ptx.OneShotPull, d, ptx.Hopper(d), c.dtype, c.op, size)
	if err != nil {
		return nil, err
	}
	return func(srcs []device.Ptr, dst device.Ptr, n int64) {
		if n == 0 {
			return
		}
		params := ptx.Params{
			Count: uint64(n / c.dtype.Bytes()), Dead: uint64(c.dead), Rank: uint32(rank), World: uint32(size), Op: uint32(c.op), Flags: ptx.NoBarrier,
		}
		if size <= ptx.Inline {
			for r, src := range srcs {
				params.In[r] = uint64(src)
			}
			params.Out[rank] = uint64(dst)
		} else {
			// The rows of the table are inputs, outputs, and workspaces, which are not used.
			words := make([]byte, 3*size*8)
			for r, src := range srcs {
				binary.LittleEndian.PutUint64(words[8*r:], uint64(src))
			}
			binary.LittleEndian.PutUint64(words[8*(size+rank):], uint64(dst))
			params.Table = uint64(b.Upload(words))
		}
		b.Kernel(&collective.Kernel{
			Image: image, Function: kernel.Name, Overlap: kernel.Overlap,
			Fit: func(multiprocessors int) (blocks, threads int) {
				g := localGeometry(n, multiprocessors).atMost(c.maxBlocks)
				return g.blocks, g.threads
			},
			Params: func(*collective.Addresses) []any { return []any{params.Bytes()} },
		})
	}, nil
}
