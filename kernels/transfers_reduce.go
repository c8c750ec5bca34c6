package kernels

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
)

// newReduce makes the reduction for the plan's device.
func (f transferForm) newReduce(op Op) (transferReduce, error) {
	if f.plan.device.Kind() == device.CUDA {
		return f.newCUDAReduce(op)
	}
	return f.newHostReduce(op)
}

// sources gives where every rank's part of a lap of this rank's shard is, by rank, and where the result goes; all of them are n
// bytes.
func (f transferForm) sources(lap int) (srcs []device.Ptr, dst device.Ptr, n int64, err error) {
	own, err := f.plan.channel.Peer(f.rank)
	if err != nil {
		return nil, 0, 0, err
	}
	lo, hi := f.piece(f.rank, lap)
	for r := range f.size {
		if r == f.rank {
			srcs = append(srcs, f.plan.in.Local().Ptr().Add(lo))
			continue
		}
		srcs = append(srcs, own.Add(f.slot(f.rank, r, lap)))
	}
	return srcs, f.plan.out.Local().Ptr().Add(lo), hi - lo, nil
}

// hostReduce is the reduction on the host device.
type hostReduce struct{ laps []hostReduceLap }

// hostReduceLap is one lap, as a stream runs it.
type hostReduceLap struct {
	plan    *Plan
	reduce  reducer
	running *atomic.Bool // the reducer is at work
	dst     []byte
	srcs    [][]byte
	n       int64 // elements
}

func (f transferForm) newHostReduce(op Op) (transferReduce, error) {
	t := f.plan.in
	hm, ok := t.Device().(device.HostMemory)
	if !ok {
		return nil, fmt.Errorf("all-reduce kernels for %s: %w", t.Device().Name(), ErrUnsupported)
	}
	reduce := newReducer(t.DType(), op, f.size)
	if reduce == nil {
		return nil, errs.Invalid("NewAllReduce", "dtype", t.DType(), "a dtype that has kernels")
	}
	h := &hostReduce{laps: make([]hostReduceLap, f.laps)}
	running := new(atomic.Bool)
	for l := range h.laps {
		srcs, dst, n, err := f.sources(l)
		if err != nil {
			return nil, err
		}
		lap := &h.laps[l]
		*lap = hostReduceLap{plan: f.plan, reduce: reduce, running: running, n: n / t.DType().Bytes()}
		if n == 0 {
			continue
		}
		if lap.dst, err = hm.Bytes(dst, n); err != nil {
			return nil, err
		}
		for _, src := range srcs {
			b, err := hm.Bytes(src, n)
			if err != nil {
				return nil, err
			}
			lap.srcs = append(lap.srcs, b)
		}
	}
	return h, nil
}

func (h *hostReduce) enqueue(s device.Stream, lap int) error {
	l, ok := s.(device.HostLauncher)
	if !ok {
		return fmt.Errorf("a stream of %s cannot run kernels of the host: %w", s.Device().Name(), ErrUnsupported)
	}
	if h.laps[lap].n == 0 {
		return nil
	}
	return l.Launch(&h.laps[lap])
}

func (h *hostReduce) close() error { return nil }

// RunKernel reduces the lap.
func (l *hostReduceLap) RunKernel() error {
	if err := l.plan.released(); err != nil {
		return err
	}
	if l.plan.failed.Load() != nil {
		return nil // told by a wait
	}
	// A graph may be launched on a stream that no Run was told of.
	if l.running.Swap(true) {
		return l.plan.fail(fmt.Errorf("running %s: %w", l.plan.name, ErrTwoStreams))
	}
	defer l.running.Store(false)
	l.reduce(l.dst, l.srcs, 0, l.n)
	return nil
}

// String describes the plan in errors of the stream.
func (l *hostReduceLap) String() string { return l.plan.name }

// cudaReduce is the reduction on a CUDA device: the kernel that loads every input, on places that are all this rank's own.
type cudaReduce struct {
	device device.Device
	laps   []device.PreparedLaunch // nil for a lap that is empty
	dead   device.Ptr
	table  device.Ptr
}

func (f transferForm) newCUDAReduce(op Op) (_ transferReduce, err error) {
	p := f.plan
	c := &cudaReduce{device: p.device, laps: make([]device.PreparedLaunch, f.laps)}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	processors, capability := 1, 0
	if g, ok := p.device.(gpu); ok {
		processors, capability = g.Multiprocessors(), g.ComputeCapability()
	}
	kernel, ok := ptx.AllReduce(ptx.OneShotPull, p.in.DType().String(), int(op), f.size, capability >= 90)
	if !ok {
		return nil, fmt.Errorf("no kernels for %s: %w", p.device.Name(), ErrUnsupported)
	}
	fn, err := p.in.Memory().Kernel(kernel)
	if err != nil {
		return nil, err
	}
	if c.dead, err = p.device.Alloc(4); err != nil {
		return nil, err
	}
	const rows = 3 // of the table of a large world: inputs, outputs, and channels, which are not used
	if f.size > ptx.Inline {
		if c.table, err = p.device.Alloc(int64(f.laps * rows * f.size * 8)); err != nil {
			return nil, err
		}
	}
	for l := range c.laps {
		srcs, dst, n, err := f.sources(l)
		if err != nil {
			return nil, err
		}
		if n == 0 {
			continue
		}
		params := ptx.Params{
			Count: uint64(n / p.in.DType().Bytes()), Dead: uint64(c.dead), Rank: uint32(f.rank), World: uint32(f.size),
			Op: uint32(op), Flags: ptx.NoBarrier,
		}
		if f.size <= ptx.Inline {
			for r, src := range srcs {
				params.In[r] = uint64(src)
			}
			params.Out[f.rank] = uint64(dst)
		} else {
			words := make([]byte, rows*f.size*8)
			for r, src := range srcs {
				binary.LittleEndian.PutUint64(words[8*r:], uint64(src))
			}
			binary.LittleEndian.PutUint64(words[8*(f.size+f.rank):], uint64(dst))
			at := c.table.Add(int64(l * len(words)))
			if err := p.device.CopyFromHost(at, words); err != nil {
				return nil, err
			}
			params.Table = uint64(at)
		}
		g := geometry(OneShotPull, n, f.size, processors)
		c.laps[l], err = fn.Prepare(device.Launch{
			Grid: [3]uint32{uint32(g.blocks)}, Block: [3]uint32{uint32(g.threads)}, Params: [][]byte{params.Bytes()}, Overlap: kernel.Overlap,
		})
		if err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (c *cudaReduce) enqueue(s device.Stream, lap int) error {
	if c.laps[lap] == nil {
		return nil
	}
	return c.laps[lap].Launch(s)
}

func (c *cudaReduce) close() error {
	var err error
	for _, l := range c.laps {
		if l != nil {
			err = errors.Join(err, l.Close())
		}
	}
	for _, p := range []device.Ptr{c.dead, c.table} {
		if !p.IsNil() {
			err = errors.Join(err, c.device.Free(p))
		}
	}
	return err
}
