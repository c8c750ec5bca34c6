package measure

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/cmd/symmem/internal/bytesize"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

const (
	// A repetition moves about this many bytes on each rank, in at least minIterations and at most maxIterations iterations. A
	// GPU moves more, because its clocks and links need some milliseconds of work to leave their idle states.
	bytesPerRepetition    = 1 << 28
	gpuBytesPerRepetition = 1 << 34
	minIterations         = 4
	maxIterations         = 50000
	gpuMaxIterations      = 15000 // which are 25 ms of the shortest messages
	// graphRuns is the number of runs in a captured graph: enough to hide the cost of its launch.
	graphRuns = 20
	// quantizedTolerance is how far the sum of numbers between 1 and 2 may be off: 2/126 of it, and what the dtype rounds.
	quantizedTolerance = 0.02
	// rendezvousBytes is the size of the memory that rendezvous is measured with.
	rendezvousBytes = 64 << 20
	// barrierChannel and signalChannel are the channels that bench uses.
	barrierChannel, signalChannel = 0, 0
)

// Run takes the measurements of spec on this rank and blocks until they are done. It is collective, and all ranks pass the same spec. Rank 0 reports
// the results to rep. After an error the ranks may be at different places, and the process has to end.
func Run(ctx context.Context, r *symmem.Rank, spec Spec, rep Reporter) error {
	b, err := newBencher(r, spec, rep)
	if err != nil {
		return err
	}
	return b.run(ctx)
}

// newBencher returns what measures spec on this rank.
func newBencher(r *symmem.Rank, spec Spec, rep Reporter) (*bencher, error) {
	b := &bencher{spec: spec, r: r, rep: rep, openNCCL: nccl.Load}
	var err error
	if b.dtype, err = tensor.ParseDType(spec.DType); err != nil {
		return nil, err
	}
	if b.op, err = kernels.ParseOp(spec.Op); err != nil {
		return nil, err
	}
	return b, nil
}

// bencher measures on one rank. All of its methods are collective.
type bencher struct {
	spec  Spec
	dtype tensor.DType // what spec names
	op    kernels.Op   // the same
	r     *symmem.Rank
	rep   Reporter
	s     device.Stream
	peer  *ncclPeer // nil if none is measured

	nvshmem *nvshmemPeer // the same
	sglang  *sglangPeer  // the same
	pytorch *pytorchPeer // the same

	openNCCL func(*nccl.Options) (*nccl.Library, error) // loads the library of the peer

	unchecked bool // results are not checked before they are measured
	most      int  // iterations of a repetition; 0 for as many as the size asks for

	pool *pool // of tensors; nil makes new ones each time
}

func (b *bencher) run(ctx context.Context) (err error) {
	if b.s, err = b.r.NewStream(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.s.Close()) }()
	defer b.closePyTorch()
	// Nothing is measured if a required peer is missing.
	lib, refused, err := b.loadPeer(ctx)
	if err != nil || refused {
		return err
	}
	if b.r.Rank() == 0 {
		if err := b.rep.Rows(b.rows()); err != nil {
			return err
		}
	}
	for _, kind := range b.spec.Kinds {
		if kind == Rendezvous { // before anything else: it also measures the first time
			if err := b.rendezvous(ctx); err != nil {
				return fmt.Errorf("measuring rendezvous: %w", err)
			}
		}
	}
	// Repetitions begin with a barrier of the memory, which its first rendezvous makes. A barrier's plan has no tensors of its own.
	first, err := b.tensorOf(ctx, tensor.Uint8, 16)
	if err != nil {
		return err
	}
	if err := first.Close(ctx); err != nil {
		return err
	}
	if lib != nil {
		if refused, err := b.connectPeer(ctx, lib); err != nil || refused {
			return err
		}
	}
	if b.peer != nil {
		var end func(error) error
		ctx, end = b.untilLost(ctx)
		defer func() { err = end(err) }()
	}
	for _, kind := range b.spec.Kinds {
		switch kind {
		case AllReduce:
			for _, bytes := range b.spec.Sizes {
				if err := b.allReduces(ctx, bytes); err != nil {
					return err
				}
			}
		case Broadcast, Reduce, AllGather, ReduceScatter, AllToAll, AllToAllV, Barrier, AllReduceMany, AllGatherMany, ReduceScatterMany, BroadcastMany:
			for _, bytes := range b.collectiveSizes(kind) {
				if err := b.collectives(ctx, kind, bytes); err != nil {
					return err
				}
			}
		case AllReduceRMSNorm:
			for _, bytes := range b.spec.Sizes {
				if err := b.allReduceRMSNorm(ctx, bytes); err != nil {
					return fmt.Errorf("measuring %s of %s: %w", kind, bytesize.Text(bytes), err)
				}
			}
		case AllReduceMatMul:
			if err := b.allReduceMatMul(ctx, b.openProduct); err != nil {
				return fmt.Errorf("measuring %s: %w", kind, err)
			}
		case PlanRun:
			if err := b.planRun(ctx); err != nil {
				return fmt.Errorf("measuring Plan.Run: %w", err)
			}
		case HeapAlloc:
			for _, bytes := range b.spec.Sizes {
				if err := b.heapAlloc(ctx, bytes); err != nil {
					return fmt.Errorf("measuring %s of %s: %w", kind, bytesize.Text(bytes), err)
				}
			}
		case Put, Get, PutSignal, PutSignalWait, SignalWait, Enqueue:
			if !b.moves(kind) {
				if err := b.skip(kind); err != nil {
					return err
				}
				continue
			}
			if kind == Enqueue {
				if err := b.enqueuing(ctx); err != nil {
					return fmt.Errorf("measuring %s: %w", kind, err)
				}
				continue
			}
			for _, bytes := range b.transferSizes(kind) {
				if err := b.transfer(ctx, kind, bytes); err != nil {
					return fmt.Errorf("measuring %s of %s: %w", kind, bytesize.Text(bytes), err)
				}
			}
		}
	}
	return errors.Join(b.closeNVSHMEM(ctx), b.closePeer(ctx))
}

// allReduces measures all forms of an all-reduce of bytes and, right after them, that of the peer.
func (b *bencher) allReduces(ctx context.Context, bytes int64) error {
	var row *Row
	for _, alg := range b.algorithms() {
		var err error
		if row, err = b.allReduce(ctx, bytes, alg); err != nil {
			return fmt.Errorf("measuring all-reduce of %s, %s: %w", bytesize.Text(bytes), alg, err)
		}
	}
	if b.nvshmem != nil && row != nil {
		if err := b.nvshmemAllReduce(ctx, *row); err != nil {
			return fmt.Errorf("measuring NVSHMEM's all-reduce of %s: %w", bytesize.Text(bytes), err)
		}
	}
	if b.sglang != nil && row != nil {
		if err := b.sglangAllReduce(ctx, *row); err != nil {
			return fmt.Errorf("measuring SGLang's all-reduce of %s: %w", bytesize.Text(bytes), err)
		}
	}
	if b.pytorch != nil && row != nil {
		if err := b.pytorchAllReduce(ctx, *row); err != nil {
			return fmt.Errorf("measuring PyTorch's all-reduce of %s: %w", bytesize.Text(bytes), err)
		}
	}
	if b.peer == nil || row == nil {
		return nil
	}
	return b.ncclCollective(ctx, *row)
}

// rows returns how many rows run reports, not counting those of peers.
func (b *bencher) rows() int {
	n := 0
	for _, kind := range b.spec.Kinds {
		switch {
		case kind == Rendezvous:
			n += 2 // the first time, and later
		case kind == PlanRun:
			n++
		case kind == AllReduce, kind == AllReduceMatMul:
			n += len(b.spec.Sizes) * len(b.algorithms())
		case kind == AllReduceRMSNorm, kind == HeapAlloc:
			n += len(b.spec.Sizes)
		case slices.Contains(Lists, kind) || constructors[kind] != "":
			n += len(b.collectiveSizes(kind)) * len(b.collectiveForms(kind))
		case kind == Enqueue && b.moves(kind):
			n += enqueueRows
		case b.moves(kind):
			n += len(b.transferSizes(kind))
		case !slices.Equal(b.spec.Kinds, DefaultKinds):
			n++ // that says why not
		}
	}
	return n
}

// moves reports whether a kind of transfer is measured: not where there is nobody else, and of the kinds that nobody asked for only what reaches all ranks.
func (b *bencher) moves(kind string) bool {
	if b.r.WorldSize() == 1 {
		return false
	}
	if !slices.Equal(b.spec.Kinds, DefaultKinds) {
		return true
	}
	return b.r.Capabilities().Transfers || kind != Get && b.r.Memory().CanSignal()
}

// skip says of a kind of transfer that was asked for why it is not measured.
func (b *bencher) skip(kind string) error {
	if b.r.Rank() != 0 || slices.Equal(b.spec.Kinds, DefaultKinds) {
		return nil
	}
	return b.rep.Row(Row{Kind: kind, Backend: b.r.Backend(), Note: kind + " is between ranks, and there is one; give --ranks 2 or more"})
}

// algorithms returns the forms to measure. AllAlgorithms stands for those that the device, or the library below the backend, has for the
// dtype and the operation, without what needs multicast, addresses, transfers or several islands where there are none.
func (b *bencher) algorithms() []string {
	if !slices.Equal(b.spec.Algorithms, []string{AllAlgorithms}) {
		return b.spec.Algorithms
	}
	var names []string
	kind, have, islands := b.r.Device().Kind(), b.r.Capabilities(), b.r.Memory().Islands()
	for _, alg := range kernels.Forms("NewAllReduce", kind, b.r.Backend()) {
		if overRails(kind, alg) && oneIsland(islands) {
			continue
		}
		if kernels.Supported(kind, alg, b.dtype, b.op, b.r.WorldSize()) && (have.Multicast || !alg.NeedsMulticast()) &&
			(have.PeerPointers || !alg.NeedsPeerPointers() && alg != kernels.NCCLSymmetric) && (have.Transfers || alg != kernels.Transfers) {
			names = append(names, alg.String())
		}
	}
	return names
}

// iterations returns how often a message of bytes is sent in one repetition. Without peer pointers the CPU takes part in each message,
// and a small one takes a hundred times as long.
func iterations(kind device.Kind, pointers bool, bytes int64) int {
	total, most := int64(bytesPerRepetition), int64(maxIterations)
	if kind == device.CUDA {
		total, most = gpuBytesPerRepetition, gpuMaxIterations
	}
	if !pointers {
		most /= 100
	}
	return int(min(max(total/bytes, minIterations), most))
}

// iterations calls iterations for the backend of this rank.
func (b *bencher) iterations(bytes int64) int {
	n := iterations(b.r.Device().Kind(), b.r.Capabilities().PeerPointers, bytes)
	if b.most > 0 {
		n = min(n, b.most)
	}
	return n
}

// timings holds the times per iteration on one rank, in microseconds, by repetition.
type timings struct{ total, host []float64 }

// meet returns when all ranks have come and the stream has nothing left to do. The barrier is one of streams, after which the ranks begin closer together,
// unless there is none between these ranks.
func meet(ctx context.Context, r *symmem.Rank, s device.Stream) error {
	if !r.Memory().CanSignal() {
		return errors.Join(s.Synchronize(ctx), r.Barrier(ctx))
	}
	if err := r.Memory().Barrier(s, barrierChannel); err != nil {
		return err
	}
	return s.Synchronize(ctx)
}

// measure runs the repetitions, of n iterations each, after one that does not count. A call of enqueue is worth each iterations, and a
// repetition ends when the stream has.
func (b *bencher) measure(ctx context.Context, n, each int, enqueue func() error) (timings, error) {
	return b.measureTimes(ctx, b.spec.Repetitions, n, each, enqueue)
}

// measureTimes is measure with so many repetitions.
func (b *bencher) measureTimes(ctx context.Context, repetitions, n, each int, enqueue func() error) (timings, error) {
	var t timings
	launches := n / each
	repeat := func(launches int) (host, total time.Duration, err error) {
		if err := meet(ctx, b.r, b.s); err != nil {
			return 0, 0, err
		}
		began := time.Now()
		for range launches {
			if err := enqueue(); err != nil {
				return 0, 0, err
			}
		}
		host = time.Since(began)
		err = b.s.Synchronize(ctx)
		return host, time.Since(began), err
	}
	runtime.GC() // what came before must not be collected within a measurement
	if _, _, err := repeat(launches); err != nil {
		return t, err
	}
	for range repetitions {
		host, total, err := repeat(launches)
		if err != nil {
			return t, err
		}
		perIteration := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 / float64(launches*each) }
		t.host, t.total = append(t.host, perIteration(host)), append(t.total, perIteration(total))
	}
	return t, nil
}

// report completes a row with the times of the slowest rank in each repetition, and rank 0 reports it.
func (b *bencher) report(ctx context.Context, row Row, times []float64) error {
	slowest, err := b.slowest(ctx, times)
	if err != nil {
		return err
	}
	return b.tellRow(row, slowest)
}

// slowest returns, on every rank, the time of the slowest rank in each repetition, sorted.
func (b *bencher) slowest(ctx context.Context, times []float64) ([]float64, error) {
	mine, err := json.Marshal(times)
	if err != nil {
		return nil, err
	}
	all, err := b.r.Group().AllGather(ctx, "measurement", mine)
	if err != nil {
		return nil, err
	}
	slowest := make([]float64, len(times))
	for rank, text := range all {
		var theirs []float64
		if err := json.Unmarshal(text, &theirs); err != nil {
			return nil, fmt.Errorf("reading the times of rank %d: %w", rank, err)
		}
		if len(theirs) != len(times) {
			return nil, fmt.Errorf("rank %d measured %d times, and this rank %d", rank, len(theirs), len(times))
		}
		for i, t := range theirs {
			slowest[i] = max(slowest[i], t)
		}
	}
	slices.Sort(slowest)
	return slowest, nil
}

// tellRow completes a row with the sorted times of the slowest rank, and rank 0 reports it.
func (b *bencher) tellRow(row Row, slowest []float64) error {
	if b.r.Rank() != 0 {
		return nil
	}
	if row.Backend == "" {
		row.Backend = b.r.Backend()
	}
	row.Exclusive = b.spec.Exclusive && slices.Contains(Collectives, row.Kind)
	row.Ranks, row.Repetitions = b.r.WorldSize(), len(slowest)
	row.Median, row.Min, row.Max = median(slowest), slowest[0], slowest[len(slowest)-1]
	if row.Median > 0 && row.Kind != PlanRun && !slices.Contains([]string{Rendezvous, HeapAlloc, Enqueue, AllReduceMatMul}, row.Kind) {
		row.Bandwidth = float64(row.Bytes) / row.Median / 1e3
	}
	row.Bus = row.Bandwidth * busFactor(row.Kind, row.Ranks)
	return b.rep.Row(row)
}

// median returns the median of sorted values, NaN if there are none.
func median(sorted []float64) float64 {
	n := len(sorted)
	if n == 0 {
		return math.NaN()
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// tensorOf makes a tensor of at least bytes and calls its rendezvous.
func (b *bencher) tensorOf(ctx context.Context, dtype tensor.DType, bytes int64) (tensor.SymmetricTensor, error) {
	if b.pool != nil {
		return b.pool.take(ctx, b, dtype, bytes)
	}
	return b.newTensor(ctx, dtype, bytes)
}

// newTensor is tensorOf for memory of its own.
func (b *bencher) newTensor(ctx context.Context, dtype tensor.DType, bytes int64) (*tensor.Tensor, error) {
	t, err := b.r.Zeros(ctx, dtype, (bytes+dtype.Bytes()-1)/dtype.Bytes())
	if err != nil {
		return nil, err
	}
	if err := t.Rendezvous(ctx); err != nil {
		return nil, errors.Join(err, t.Close(ctx))
	}
	return t, nil
}

// plan makes the tensors and the plan of an all-reduce of bytes and checks a first result. It leaves zeros, which can be reduced again
// and again. closeAll closes what it made.
func (b *bencher) plan(ctx context.Context, bytes int64, algorithm string) (p *kernels.Plan, closeAll func(context.Context) error, err error) {
	alg, err := kernels.ParseAlgorithm(algorithm)
	if err != nil {
		return nil, nil, err
	}
	t, err := b.tensorOf(ctx, b.dtype, bytes)
	if err != nil {
		return nil, nil, err
	}
	opts := &kernels.AllReduceOptions{Algorithm: alg, Exclusive: b.spec.Exclusive}
	out := t
	if b.spec.OutOfPlace {
		if out, err = b.tensorOf(ctx, b.dtype, bytes); err != nil {
			return nil, nil, errors.Join(err, t.Close(ctx))
		}
		opts.Out = out
	}
	closeTensors := func(ctx context.Context) error {
		if out != t {
			return errors.Join(out.Close(ctx), t.Close(ctx))
		}
		return t.Close(ctx)
	}
	p, err = kernels.NewAllReduce(ctx, t, b.op, opts)
	if err != nil {
		return nil, nil, errors.Join(err, closeTensors(ctx))
	}
	closeAll = func(ctx context.Context) error { return errors.Join(p.Close(ctx), closeTensors(ctx)) }
	check := reduction{name: p.String(), dtype: b.dtype, elements: t.NumElements(), op: b.op,
		in: t.Ptr(), out: out.Ptr(), enqueue: func() error { return p.Run(b.s) }}
	if p.Algorithm() == kernels.QuantizedInt8 {
		check.tolerance = quantizedTolerance
	}
	if b.unchecked {
		return p, closeAll, nil
	}
	if err := b.checkResult(ctx, check); err != nil {
		return nil, nil, errors.Join(err, closeAll(ctx))
	}
	return p, closeAll, nil
}

// allReduce measures one form of an all-reduce of bytes, and returns its row without the times.
func (b *bencher) allReduce(ctx context.Context, bytes int64, algorithm string) (_ *Row, err error) {
	p, closeAll, err := b.plan(ctx, bytes, algorithm)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, closeAll(ctx)) }()
	row := Row{Kind: AllReduce, Bytes: p.Bytes(), Place: inPlace, DType: b.spec.DType, Op: b.spec.Op, Algorithm: algorithm,
		Chosen: p.Algorithm().String()}
	if b.spec.OutOfPlace {
		row.Place = "out of place"
	}
	if p.Algorithm() == kernels.QuantizedInt8 {
		w := int64(b.r.WorldSize())
		row.Wire = 2 * (w - 1) * kernels.QuantizedBytes(p.Bytes()/b.dtype.Bytes()) / w
	}
	enqueue := func() error { return p.Run(b.s) }
	if p.Algorithm() == kernels.NVSHMEM {
		if row.Iterations, err = b.affordable(ctx, b.iterations(p.Bytes()), enqueue); err != nil {
			return nil, err
		}
	}
	if err := b.timed(ctx, &row, enqueue); err != nil {
		return nil, err
	}
	return &row, nil
}

// capture records what work enqueues.
func (b *bencher) capture(work func() error) (device.Graph, error) {
	if err := b.s.BeginCapture(); err != nil {
		return nil, err
	}
	err := work()
	graph, endErr := b.s.EndCapture()
	if err := errors.Join(err, endErr); err != nil {
		return nil, err
	}
	return graph, nil
}

// repeated returns a function that calls enqueue n times.
func repeated(n int, enqueue func() error) func() error {
	return func() error {
		for range n {
			if err := enqueue(); err != nil {
				return err
			}
		}
		return nil
	}
}

// planRun measures what one Run costs its caller, without the work itself.
func (b *bencher) planRun(ctx context.Context) (err error) {
	bytes := b.spec.Sizes[0]
	p, closeAll, err := b.plan(ctx, bytes, b.algorithms()[0])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll(ctx)) }()
	row := Row{Kind: PlanRun, Bytes: p.Bytes(), DType: b.spec.DType, Op: b.spec.Op, Algorithm: b.algorithms()[0],
		Chosen: p.Algorithm().String(), Iterations: b.iterations(p.Bytes())}
	return b.hostTime(ctx, row, func() error { return p.Run(b.s) })
}

// neighbours returns the ranks after and before this one in a ring.
func (b *bencher) neighbours() (next, before int) {
	w := b.r.WorldSize()
	return (b.r.Rank() + 1) % w, (b.r.Rank() + w - 1) % w
}

// transferSizes returns the sizes of a kind of transfer to measure: a signal has none.
func (b *bencher) transferSizes(kind string) []int64 {
	if kind == SignalWait {
		return []int64{0}
	}
	return b.spec.Sizes
}

// enqueueRows is how many things enqueuing measures, and enqueueBurst how many of one are enqueued back to back: fewer than a driver's queue has room for, which the host
// would have to wait for otherwise.
const enqueueRows, enqueueBurst = 5, 500

// enqueuing measures what enqueuing costs the host of what programs put together themselves.
func (b *bencher) enqueuing(ctx context.Context) error {
	bytes := b.spec.Sizes[0]
	remote, err := b.tensorOf(ctx, tensor.Uint8, bytes)
	if err != nil {
		return err
	}
	local, err := b.tensorOf(ctx, tensor.Uint8, bytes)
	if err != nil {
		return err
	}
	whole, err := b.tensorOf(ctx, b.dtype, bytes)
	if err != nil {
		return err
	}
	reduce := func() error { return b.r.AllReduce(ctx, whole, b.op) }
	if err := errors.Join(reduce(), b.r.Synchronize(ctx)); err != nil { // which makes its plan
		return err
	}
	own, err := b.r.Stream()
	if err != nil {
		return err
	}
	next, before := b.neighbours()
	for _, one := range [enqueueRows]struct {
		what    string
		bytes   int64
		own     bool // on the rank's own stream
		enqueue func() error
	}{
		{"put", bytes, false, func() error { return remote.Put(b.s, next, local) }},
		// Signals are counted: the waits find them, as many as there are.
		{"signal", 0, false, func() error { return remote.Signal(b.s, next, signalChannel) }},
		{"wait", 0, false, func() error { return remote.Wait(b.s, before, signalChannel) }},
		{"barrier", 0, false, func() error { return remote.Barrier(b.s, barrierChannel) }},
		{"AllReduce", bytes, true, reduce},
	} {
		row := Row{Kind: Enqueue, Bytes: one.bytes, Note: one.what, Iterations: min(b.iterations(max(one.bytes, 1)), enqueueBurst)}
		at := *b
		if one.own {
			at.s = own
		}
		if err := at.hostTime(ctx, row, one.enqueue); err != nil {
			return fmt.Errorf("%s: %w", one.what, err)
		}
	}
	return errors.Join(b.r.Synchronize(ctx), whole.Close(ctx), local.Close(ctx), remote.Close(ctx))
}

// hostTime measures what enqueuing costs the host, without the work itself, as often as the row says, and reports the row.
func (b *bencher) hostTime(ctx context.Context, row Row, enqueue func() error) error {
	times, err := b.measure(ctx, row.Iterations, 1, enqueue)
	if err != nil {
		return err
	}
	return b.report(ctx, row, times.host)
}

const (
	// heapBytes is how much memory the tensors of one repetition of HeapAlloc take, if that is more than one of them, and heapIterations how many they are at most.
	heapBytes      = 256 << 20
	heapIterations = 1000
)

// heapAlloc measures taking a tensor of bytes from a heap and closing it. What was closed is reclaimed between the repetitions.
func (b *bencher) heapAlloc(ctx context.Context, bytes int64) (err error) {
	each := (bytes + memory.HeapAlign - 1) / memory.HeapAlign * memory.HeapAlign
	n := min(max(heapBytes/each, 1), heapIterations)
	h, err := b.r.NewHeap(ctx, n*each)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close(ctx)) }()
	var times []float64
	for i := range b.spec.Repetitions + 1 {
		if err := errors.Join(h.Reclaim(ctx), b.r.Barrier(ctx)); err != nil {
			return err
		}
		began := time.Now()
		for range n {
			t, err := h.Zeros(ctx, tensor.Uint8, bytes)
			if err != nil {
				return err
			}
			if err := t.Close(ctx); err != nil {
				return err
			}
		}
		if i > 0 { // the first does not count
			times = append(times, float64(time.Since(began).Nanoseconds())/1e3/float64(n))
		}
	}
	return b.report(ctx, Row{Kind: HeapAlloc, Bytes: bytes, Iterations: int(n)}, times)
}

// transfer measures put, get, or a hop of a ring.
func (b *bencher) transfer(ctx context.Context, kind string, bytes int64) error {
	remote, err := b.tensorOf(ctx, tensor.Uint8, max(bytes, 1))
	if err != nil {
		return err
	}
	local, err := b.tensorOf(ctx, tensor.Uint8, max(bytes, 1))
	if err != nil {
		return err
	}
	next, before := b.neighbours()
	enqueue := func() error { return remote.Put(b.s, next, local) }
	switch kind {
	case Get:
		enqueue = func() error { return remote.Get(b.s, next, local) }
	case PutSignal:
		enqueue = func() error {
			if err := remote.PutSignal(b.s, next, local, signalChannel); err != nil {
				return err
			}
			return remote.Wait(b.s, before, signalChannel)
		}
	case SignalWait:
		enqueue = func() error {
			if err := remote.Signal(b.s, next, signalChannel); err != nil {
				return err
			}
			return remote.Wait(b.s, before, signalChannel)
		}
	case PutSignalWait:
		enqueue = func() error { return remote.PutSignalWait(b.s, next, local, before, signalChannel) }
	}
	if err := b.timed(ctx, &Row{Kind: kind, Bytes: bytes}, enqueue); err != nil {
		return err
	}
	return errors.Join(local.Close(ctx), remote.Close(ctx))
}

// rendezvous measures allocating memory and making it reachable, the first time and later.
func (b *bencher) rendezvous(ctx context.Context) error {
	once := func() (float64, error) {
		if err := b.r.Barrier(ctx); err != nil {
			return 0, err
		}
		began := time.Now()
		t, err := b.tensorOf(ctx, tensor.Uint8, rendezvousBytes)
		took := time.Since(began)
		if err != nil {
			return 0, err
		}
		return float64(took.Nanoseconds()) / 1e3, t.Close(ctx)
	}
	first, err := once()
	if err != nil {
		return err
	}
	row := Row{Kind: Rendezvous, Bytes: rendezvousBytes, Note: "first", Iterations: 1}
	if err := b.report(ctx, row, []float64{first}); err != nil {
		return err
	}
	var later []float64
	for range b.spec.Repetitions {
		took, err := once()
		if err != nil {
			return err
		}
		later = append(later, took)
	}
	row.Note = "later"
	return b.report(ctx, row, later)
}
