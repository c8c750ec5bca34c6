package kernels

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	_ "github.com/symmem/symmem/kernels/ptx/images" // the host backend brings none
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// simDevice passes the host device off as a CUDA device: it runs "compiled" kernels by doing in Go what those that an all-reduce by
// transfers launches do with the same parameters.
type simDevice struct {
	device.Device // of the host, without its HostMemory
	mem           device.HostMemory
	atomics       bool
	launches      []*simLaunch // that were prepared
	moved         func(phase uint32, to, block uint64)
	casts         sync.Map // castCopies by multicast address
	noClusters    bool     // it runs none
	capability    int      // 0: 90
	uuid          string   // "": the host's, so that all ranks share one device
}

func (d *simDevice) Kind() device.Kind                                         { return device.CUDA }
func (d *simDevice) ComputeCapability() int                                    { return cmp.Or(d.capability, 90) }
func (d *simDevice) Multiprocessors() int                                      { return 4 }
func (d *simDevice) UUID() string                                              { return cmp.Or(d.uuid, d.Device.UUID()) }
func (d *simDevice) PeerAtomics(string) bool                                   { return d.atomics }
func (d *simDevice) LoadModule(image []byte) (device.Module, error)            { return simModule{d, image}, nil }
func (d *simDevice) NewStopWord() (device.StopWord, error)                     { return d.word() }
func (d *simDevice) NewFaultWord(func(uint64) error) (device.FaultWord, error) { return d.word() }

func (d *simDevice) NewStream() (device.Stream, error) {
	s, err := d.Device.NewStream()
	return &simStream{s, d}, err
}

func (d *simDevice) word() (*simWord, error) {
	p, err := d.Alloc(8)
	return &simWord{d, p}, err
}

// at is the word at p.
func (d *simDevice) at(p uint64) *atomic.Uint32 {
	b, err := d.mem.Bytes(device.Ptr(p), 4)
	if err != nil {
		panic(err)
	}
	return (*atomic.Uint32)(unsafe.Pointer(unsafe.SliceData(b)))
}

type simStream struct {
	device.Stream
	dev *simDevice
}

func (s *simStream) Device() device.Device { return s.dev }

type simWord struct {
	dev *simDevice
	ptr device.Ptr
}

func (w *simWord) Ptr() device.Ptr { return w.ptr }
func (w *simWord) Stop()           { w.dev.at(uint64(w.ptr)).Store(1) }
func (w *simWord) Load() uint64 {
	return uint64(w.dev.at(uint64(w.ptr)).Load()) | uint64(w.dev.at(uint64(w.ptr)+4).Load())<<32
}
func (w *simWord) Close() error { return w.dev.Free(w.ptr) }

type simModule struct {
	dev   *simDevice
	image []byte
}

func (m simModule) Function(name string) (device.Function, error) {
	return simFunction{m.dev, name, m.image}, nil
}
func (m simModule) Close() error { return nil }

type simFunction struct {
	dev   *simDevice
	name  string
	image []byte
}

func (f simFunction) MaxBlocks(int, int) (int, error) {
	if f.dev.noClusters && strings.Contains(f.name, "_cluster_") {
		return 0, nil
	}
	return 64, nil
}
func (f simFunction) Prepare(l device.Launch) (device.PreparedLaunch, error) {
	launch := &simLaunch{simFunction: f, grid: l.Grid[0]}
	switch {
	case f.compiled():
		launch.compiled = &compiledLaunch{launch: l, simFunction: f}
		if strings.HasPrefix(f.name, "symmem_allreduce_") && !strings.HasPrefix(f.name, wholeLists) {
			simParam(&launch.p, l.Params[0])
		}
	case f.name == ptx.Pull(false).Name:
		simParam(&launch.comm, l.Params[0])
		simParam(&launch.pieces, l.Params[1])
	case strings.HasPrefix(f.name, "symmem_many_"):
		simParam(&launch.list, l.Params[len(l.Params)-1])
		if len(l.Params) > 1 {
			simParam(&launch.p, l.Params[0])
		}
	case strings.Contains(f.name, "_push_whole_"): // which is prepared, and not run
	default:
		simParam(&launch.p, l.Params[0])
	}
	f.dev.launches = append(f.dev.launches, launch)
	return launch, nil
}

// simParam is a parameter as the kernel gets it.
func simParam[T any](p *T, b []byte) {
	if n := copy(unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p)), b); n != int(unsafe.Sizeof(*p)) {
		panic(fmt.Sprintf("a parameter of %d bytes", n))
	}
}

type simLaunch struct {
	simFunction
	grid   uint32
	p      ptx.Params
	comm   ptx.Comm // of the kernel that loads pieces, and its pieces
	pieces ptx.Pieces
	list   ptx.Many // of the kernels of lists

	compiled *compiledLaunch // of a kernel that is run as it was compiled
}

func (l *simLaunch) Launch(s device.Stream) error {
	return s.(*simStream).Stream.(device.HostLauncher).Launch(l)
}
func (l *simLaunch) Close() error { return nil }

// pointer is a rank's address in row 0, 1 or 2: of the inputs, the outputs, the workspaces.
func (l *simLaunch) pointer(row, rank int) uint64 {
	if int(l.p.World) <= ptx.Inline {
		return [...]*[ptx.Inline]uint64{&l.p.In, &l.p.Out, &l.p.Workspace}[row][rank]
	}
	at := l.p.Table + uint64(row*int(l.p.World)+rank)*8
	return uint64(l.dev.at(at).Load()) | uint64(l.dev.at(at+4).Load())<<32
}

// The signal pad, as kernels/cuda/signals.cu has it.
func (l *simLaunch) counter(owner, writer int) *atomic.Uint32 {
	return l.dev.at(l.pointer(2, owner) + uint64(l.p.Index)*2*uint64(l.p.World)*128 + uint64(writer)*128)
}

func (l *simLaunch) state(array, peer int) *atomic.Uint32 {
	world := uint64(l.p.World)
	state := l.pointer(2, int(l.p.Rank)) + uint64(l.p.Channels)*2*world*128 + uint64(l.p.Index)*((32+12*world+127)/128*128)
	return l.dev.at(state + 32 + (uint64(array)*world+uint64(peer))*4)
}

// RunKernel does the kernel's work.
func (l *simLaunch) RunKernel() error {
	switch {
	case l.compiled != nil:
		return l.compiled.run()
	case l.name == ptx.Pull(false).Name:
		return l.pull()
	}
	if strings.HasPrefix(l.name, "symmem_many_") {
		return l.many()
	}
	world, rank := int(l.p.World), int(l.p.Rank)
	if l.dev.at(l.p.Dead).Load() != 0 {
		return nil
	}
	switch l.name {
	case "symmem_signal_all":
		for r := range world {
			switch {
			case r == rank:
			case l.p.Flags&ptx.Atomics != 0:
				l.counter(r, rank).Add(1)
			default:
				l.counter(r, rank).Store(l.state(0, r).Add(1))
				l.state(2, r).Add(1)
			}
		}
	case "symmem_wait_all":
		for r := range world {
			if r == rank {
				continue
			}
			want := l.state(1, r).Add(1)
			for began := time.Now(); int32(l.counter(rank, r).Load()-want) < 0; runtime.Gosched() {
				if time.Since(began) > 20*time.Second {
					return fmt.Errorf("rank %d waits for rank %d in vain", rank, r)
				}
			}
		}
	default:
		form, ok := strings.CutPrefix(l.name, "symmem_allreduce_oneshot_pull_")
		barrier := l.p.Flags&ptx.NoBarrier == 0
		if flags := l.p.Flags; !ok || flags != ptx.NoBarrier && flags != 0 {
			return fmt.Errorf("kernel %s with flags %d", l.name, l.p.Flags)
		}
		run := simRun{dev: l.dev, world: world, rank: rank, workspace: func(r int) uint64 { return l.pointer(2, r) }}
		if barrier {
			run.open()
			if err := run.meet(0); err != nil {
				return err
			}
			defer run.close()
		}
		name, _, _ := strings.Cut(form, "_")
		dtype, err := tensor.ParseDType(name)
		if err != nil {
			return err
		}
		bytes := func(p uint64) []byte {
			if l.p.Count == 0 {
				return nil
			}
			b, err := l.dev.mem.Bytes(device.Ptr(p), int64(l.p.Count)*dtype.Bytes())
			if err != nil {
				panic(err)
			}
			return b
		}
		var srcs [][]byte
		for r := range world {
			if in := l.pointer(0, r); in%16 != l.pointer(0, rank)%16 {
				return fmt.Errorf("the input of rank %d is at %x, that of rank %d at %x: not alike in 16", r, in, rank, l.pointer(0, rank))
			}
			srcs = append(srcs, bytes(l.pointer(0, r)))
		}
		newReducer(dtype, Op(l.p.Op), world)(bytes(l.pointer(1, rank)), srcs, 0, int64(l.p.Count))
		if barrier {
			return run.meet(1)
		}
	}
	return nil
}

// simRun is a launch of a kernel with a record in front of its workspace, as symmem.cuh has it: of the first block, which stands for all.
type simRun struct {
	dev         *simDevice
	world, rank int
	workspace   func(rank int) uint64
	epoch       uint32
}

func (r *simRun) open()  { r.epoch = r.dev.at(r.workspace(r.rank)).Load() + 1 }
func (r *simRun) close() { r.dev.at(r.workspace(r.rank)).Store(r.epoch) }

// flag is what writer sets for reader.
func (r *simRun) flag(reader, which, writer int) *atomic.Uint32 {
	return r.dev.at(r.workspace(reader) + 32 + uint64(which*((r.world+7)/8*8)+writer)*4)
}

// meet is a barrier.
func (r *simRun) meet(which int) error {
	for peer := range r.world {
		r.flag(peer, which, r.rank).Store(r.epoch)
	}
	for peer := range r.world {
		for began := time.Now(); int32(r.flag(r.rank, which, peer).Load()-r.epoch) < 0; runtime.Gosched() {
			if time.Since(began) > 20*time.Second {
				return fmt.Errorf("rank %d waits for rank %d in vain", r.rank, peer)
			}
		}
	}
	return nil
}

// pull is the kernel that copies pieces: the chunks that pull.cu gives to each block, one piece after the other. What that stores of several pieces at a time goes in other chunks, whose blocks nobody counts on.
func (l *simLaunch) pull() error {
	world := int(l.comm.World)
	run := simRun{dev: l.dev, world: world, rank: int(l.comm.Rank), workspace: func(r int) uint64 {
		if world <= ptx.Inline {
			return l.comm.Workspace[r]
		}
		return uint64(l.dev.at(l.comm.Table+8*uint64(r)).Load()) | uint64(l.dev.at(l.comm.Table+8*uint64(r)+4).Load())<<32
	}}
	bytes := func(p, n uint64) []byte {
		b, err := l.dev.mem.Bytes(device.Ptr(p), int64(n))
		if err != nil {
			panic(err)
		}
		return b
	}
	first, count := uint32(0), l.pieces.Counts[0]
	pieces := l.pieces.Inlined[:]
	if total := count + l.pieces.Counts[1]; total > ptx.InlinePieces {
		pieces = unsafe.Slice((*ptx.Piece)(unsafe.Pointer(unsafe.SliceData(bytes(l.pieces.Table, uint64(total)*32)))), total)
	}
	run.open()
	if err := run.meet(0); err != nil {
		return err
	}
	for phase := range l.pieces.Phases {
		if phase > 0 {
			if err := run.meet(1); err != nil {
				return err
			}
			first, count = count, l.pieces.Counts[1]
		}
		chunk, grid := uint64(ptx.ChunkBytes), uint64(l.grid)
		if l.pieces.Chunks > 0 {
			chunk = uint64(l.pieces.Chunk)
		}
		for block := range grid {
			for i := range count {
				c := pieces[first+(i+uint32(block))%count]
				begin := (block + grid - uint64(c.Turn)%grid) % grid
				if l.pieces.Chunks > 0 { // a block has the same chunks of all pieces, of the first list no more than it counts
					if begin = block; phase == 0 && c.Bytes > uint64(l.pieces.Chunks)*chunk {
						return fmt.Errorf("a piece of %d bytes has more than %d chunks of %d", c.Bytes, l.pieces.Chunks, chunk)
					}
				}
				for at := begin * chunk; at < c.Bytes; at += grid * chunk {
					n := min(c.Bytes-at, chunk)
					if l.dev.moved != nil {
						l.dev.moved(phase, c.To+at, block)
					}
					copy(bytes(c.To+at, n), bytes(c.From+at, n))
				}
			}
		}
	}
	if err := run.meet(2); err != nil {
		return err
	}
	run.close()
	return nil
}

// simBackend is the host backend over a simDevice.
type simBackend struct {
	*host.Backend
	dev  *simDevice
	left atomic.Int64 // bytes that can still be allocated
}

func (b *simBackend) Device() device.Device { return b.dev }

func (b *simBackend) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	if left := b.left.Add(-bytes); left < 0 {
		b.left.Add(bytes)
		return nil, fmt.Errorf("%d bytes, %d too many: %w", bytes, -left, errs.ErrNoMemory)
	}
	return b.Backend.Allocate(ctx, bytes)
}

// TestTransfersOnCUDA runs the launches, streams and events of CUDA devices on the simulated one: small and in laps, with the table of
// large worlds, eager and from a graph, at odd places.
func TestTransfersOnCUDA(t *testing.T) {
	small, lap, two := cudaTransferSmallBytes, cudaTransferLapBytes, nearTwoLapsBytes
	t.Cleanup(func() { cudaTransferSmallBytes, cudaTransferLapBytes, nearTwoLapsBytes = small, lap, two })
	nearTwoLapsBytes = 2000
	for i := range cudaTransferSmallBytes {
		cudaTransferSmallBytes[i] = 2000
	}
	for _, size := range []int{1, 2, 3, 4, ptx.Inline + 1} {
		cudaTransferLapBytes = int64(size * 1024)
		for _, c := range []struct {
			dtype  tensor.DType
			op     Op
			n      int64
			offset int64
		}{
			{tensor.Float32, Sum, 300, 1}, {tensor.Float32, Sum, 30011, 3}, {tensor.BFloat16, Avg, 9001, 5}, {tensor.Int8, Max, 20001, 7},
			{tensor.Float64, Prod, 5000, 1}, {tensor.Uint16, Min, 0, 0}, {tensor.Int64, Sum, 1, 0},
		} {
			for _, atomics := range []bool{false, true} {
				t.Run(fmt.Sprintf("size=%d/%s/%s/%d/atomics=%t", size, c.dtype, c.op, c.n, atomics), func(t *testing.T) {
					groups, err := group.Local(size, nil)
					require.NoError(t, err)
					want := make([]byte, c.n*c.dtype.Bytes())
					var inputs [][]byte
					for r := range size {
						in := make([]byte, len(want))
						for i := range in {
							in[i] = byte(i*31+r*17) & 0x3f // small numbers in every dtype
						}
						inputs = append(inputs, in)
					}
					if c.n > 0 {
						newReducer(c.dtype, c.op, size)(want, inputs, 0, c.n)
					}
					var g errgroup.Group
					for _, gr := range groups {
						g.Go(func() error { return simulatedRun(gr, c.dtype, c.op, c.n, c.offset, atomics, inputs[gr.Rank()], want) })
					}
					require.NoError(t, g.Wait())
				})
			}
		}
	}
}

// simulatedRun is one rank of TestTransfersOnCUDA.
func simulatedRun(g *group.Group, dtype tensor.DType, op Op, n, offset int64, atomics bool, in, want []byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	near, err := host.New(g, nil)
	if err != nil {
		return err
	}
	dev := &simDevice{Device: near.Device(), mem: near.Device().(device.HostMemory), atomics: atomics}
	b := &simBackend{Backend: near, dev: dev}
	b.left.Store(math.MaxInt64)
	m := memory.New(b, g, nil)
	whole, err := tensor.Zeros(ctx, m, dtype, n+offset+3)
	if err != nil {
		return err
	}
	outs, err := tensor.Zeros(ctx, m, dtype, n+offset+3)
	if err != nil {
		return err
	}
	if err := errors.Join(whole.Rendezvous(ctx), outs.Rendezvous(ctx)); err != nil {
		return err
	}
	x, err := whole.Sub(offset, n)
	if err != nil {
		return err
	}
	out, err := outs.Sub(max(offset-1, 0), n) // not aligned as the input is
	if err != nil {
		return err
	}
	more, err := tensor.Zeros(ctx, m, dtype, n)
	if err != nil {
		return err
	}
	if err := more.Rendezvous(ctx); err != nil {
		return err
	}
	s, err := dev.NewStream()
	if err != nil {
		return err
	}
	p, err := NewAllReduce(ctx, x, op, &AllReduceOptions{Algorithm: Transfers, Out: out, FirstEpoch: 1<<32 - 5})
	if err != nil {
		return err
	}
	fill := func() error {
		if n == 0 {
			return nil
		}
		return errors.Join(dev.CopyFromHost(x.Local().Ptr(), in), dev.CopyFromHost(out.Local().Ptr(), make([]byte, len(want))))
	}
	check := func(what string) error {
		got := make([]byte, len(want))
		if n == 0 {
			return nil
		}
		if err := dev.CopyToHost(got, out.Local().Ptr()); err != nil {
			return err
		}
		if string(got) != string(want) {
			return fmt.Errorf("%s: another result on rank %d", what, g.Rank())
		}
		return g.Barrier(ctx, "test")
	}
	if err := errors.Join(fill(), g.Barrier(ctx, "test"), p.Run(s), p.Run(s), p.Run(s), s.Synchronize(ctx), check("eager")); err != nil {
		return err
	}
	// Two plans on two streams at once, in an order that differs between ranks.
	other, err := dev.NewStream()
	if err != nil {
		return err
	}
	q, err := NewAllReduce(ctx, x, op, &AllReduceOptions{Algorithm: Transfers, Out: more})
	if err != nil {
		return err
	}
	for range 20 {
		first, second := func() error { return p.Run(s) }, func() error { return q.Run(other) }
		if g.Rank()%2 == 1 {
			first, second = second, first
		}
		if err := errors.Join(first(), second()); err != nil {
			return err
		}
	}
	if err := errors.Join(s.Synchronize(ctx), other.Synchronize(ctx), check("two plans"), q.Close(ctx), other.Close()); err != nil {
		return err
	}
	if err := errors.Join(s.BeginCapture(), p.Run(s)); err != nil {
		return err
	}
	graph, err := s.EndCapture()
	if err != nil {
		return err
	}
	if err := errors.Join(fill(), g.Barrier(ctx, "test")); err != nil {
		return err
	}
	for range 20 {
		if err := graph.Launch(s.(*simStream).Stream); err != nil {
			return err
		}
	}
	if err := errors.Join(s.Synchronize(ctx), check("graph"), fill(), g.Barrier(ctx, "test"), p.Run(s), s.Synchronize(ctx), check("eager again")); err != nil {
		return err
	}
	return errors.Join(graph.Close(), p.Close(ctx), s.Close(), more.Close(ctx), outs.Close(ctx), whole.Close(ctx), m.Close(ctx), g.Close(ctx))
}

// TestCopyEnginesForLargeMessages: Auto takes transfers from some size on, and a kernel on every rank where one rank has no memory for
// their workspace.
func TestCopyEnginesForLargeMessages(t *testing.T) {
	for _, c := range []struct {
		bytes int64
		left  int64 // of rank 1's memory
		want  Algorithm
	}{{64 << 20, math.MaxInt64, Transfers}, {64<<20 - 4, math.MaxInt64, TwoShotFlow}, {64 << 20, 90 << 20, TwoShotFlow}} {
		t.Run(fmt.Sprintf("%d bytes, %d left", c.bytes, c.left), func(t *testing.T) {
			groups, err := group.Local(2, nil)
			require.NoError(t, err)
			var g errgroup.Group
			for _, gr := range groups {
				g.Go(func() error {
					left := int64(math.MaxInt64)
					if gr.Rank() == 1 {
						left = c.left
					}
					return chosenOnSimulated(gr, c.bytes, left, c.want)
				})
			}
			require.NoError(t, g.Wait())
		})
	}
}

// chosenOnSimulated is one rank of TestCopyEnginesForLargeMessages.
func chosenOnSimulated(g *group.Group, bytes, left int64, want Algorithm) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	near, err := host.New(g, nil)
	if err != nil {
		return err
	}
	dev := &simDevice{Device: near.Device(), mem: near.Device().(device.HostMemory)}
	b := &simBackend{Backend: near, dev: dev}
	b.left.Store(left)
	m := memory.New(b, g, nil)
	m.SetTuning(&tuning.Set{Tables: []*tuning.Table{{Rules: []tuning.Rule{{
		Collective: tuning.AllReduce, Ranks: 2, Steps: []tuning.Step{{UpTo: 64<<20 - 1, Form: "two_shot_flow"}, {Form: "transfers"}},
	}}}}})
	x, err := tensor.Zeros(ctx, m, tensor.Float32, bytes/4)
	if err != nil {
		return err
	}
	if err := x.Rendezvous(ctx); err != nil {
		return err
	}
	p, err := NewAllReduce(ctx, x, Sum, nil)
	if err != nil {
		return err
	}
	if p.Algorithm() != want {
		err = fmt.Errorf("%s was chosen in place of %s", p.Algorithm(), want)
	}
	return errors.Join(err, p.Close(ctx), x.Close(ctx), m.Close(ctx), g.Close(ctx))
}

// TestTransfersKeepBlocks: what reduces and copies in a program of transfers has no more blocks than the plan's options allow.
func TestTransfersKeepBlocks(t *testing.T) {
	const blocks = 2
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		dev := &simDevice{Device: near.Device(), mem: near.Device().(device.HostMemory), atomics: true}
		b := &simBackend{Backend: near, dev: dev}
		b.left.Store(math.MaxInt64)
		m := memory.New(b, g, nil)
		x, err := tensor.Zeros(ctx, m, tensor.Float32, 1<<18)
		if err == nil {
			err = x.Rendezvous(ctx)
		}
		if err != nil {
			return err
		}
		opts := Options{Algorithm: Transfers, MaxBlocks: blocks}
		for _, plan := range []func() (*Plan, error){
			func() (*Plan, error) {
				return NewAllReduce(ctx, x, Sum, &AllReduceOptions{Algorithm: Transfers, MaxBlocks: blocks})
			},
			func() (*Plan, error) { return NewAllReduceMany(ctx, []Pair{{In: x, Out: x}}, Sum, &opts) },
			func() (*Plan, error) { return NewReduce(ctx, x, x, Sum, 0, &opts) },
		} {
			dev.launches = nil
			p, err := plan()
			if err != nil {
				return err
			}
			var most uint32
			for _, l := range dev.launches {
				most = max(most, l.grid)
			}
			if g.Rank() == 0 && most != blocks || most > blocks { // of a reduce, root combines
				err = fmt.Errorf("%s: %d blocks, not %d", p, most, blocks)
			}
			if err := errors.Join(err, p.Close(ctx)); err != nil {
				return err
			}
		}
		return errors.Join(x.Close(ctx), m.Close(ctx))
	}))
}
