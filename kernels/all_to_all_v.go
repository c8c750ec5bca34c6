package kernels

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"sync"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/tensor"
)

// NewAllToAllV prepares an all-to-all whose blocks are of any length, which is read from memory of the device when the plan runs: as for the tokens
// of a mixture of experts. In and out have rows: what is left of their shape without the first dimension, which is alike, and any number of them
// each, below 2^31. Counts is int64 of shape [W] for W ranks, how many rows this rank has for each rank; or of shape [2, W], and then counts[1] is at
// which row of in those for each rank begin. Without that they follow each other in the order of the ranks. After a run, out has the rows of rank
// 0 for this rank first, then those of rank 1, and so on; what is behind them is not touched. Received is int64 of shape [2, W]: received[0] is then
// how many rows came from each rank, and received[1] at which row of out they begin. All four are apart from each other in memory.
//
// A run whose counts are none (below 0, or beyond in), or that has more rows for a rank than its out holds, fails with a [*CountsError] on every rank,
// and writes nothing anywhere; the plan has then failed. Collective: all ranks come with the same tensors and options (ErrMismatch with
// everybody's value if not), and these must have had their rendezvous. It blocks until all ranks have come. Close the plan.
//
// Auto takes a kernel (OneShot on the host device, OneShotPush on GPUs) where every peer's memory has an address: over host, native and nvshmem, over nccl on
// one host, and over nixl where all ranks share memory. Elsewhere it takes Transfers: over nixl, and over nccl between hosts where NCCL can put (2.29.2 and newer
// with GIN, see package nccl). Where NCCL cannot, there is no form, and the error is ErrNotReachable with what is missing: neither NCCL nor NVSHMEM has an
// all-to-all of its own whose counts are on the device.
//
// By transfers the ranks exchange their counts first, and then write the rows straight to where they go, by copies where there are addresses and by puts of the
// backend elsewhere: only those that there are. On a GPU the CPU looks at the counts when the stream comes there, also at each launch of a graph, and the stream
// waits for it. A run allocates nothing, but for puts of the backend to other places, or of other lengths, than in the run before: these are prepared anew.
//
// Its errors are those of [collective.New], ErrInvalid for shapes, dtypes and tensors that do not go together, and options that do not exist, and
// ErrUnsupported for a form that there is not on the device.
func NewAllToAllV(ctx context.Context, in, out, counts, received tensor.SymmetricTensor, opts *Options) (*Plan, error) {
	m := newMaker("NewAllToAllV", in, out, opts)
	m.more = []argument{{"counts", counts}, {"received", received}}
	return m.plan(ctx, &allToAllV{maker: m, counts: counts, received: received})
}

// CountsError is the error of a run of NewAllToAllV that counts do not allow: ErrInvalid holds. Every rank of the run has the same.
type CountsError struct {
	Op       string // the collective
	Rank     int    // whose counts it is, or whose output is too short
	To       int    // whom the count is for; -1 if the output is too short
	Negative bool   // the count, or where the rows begin, is below 0; else beyond the input
	Rows     int64  // how many rows the output would get, or 2^32-1 for more
	Most     int64  // rows of the output, or of the input
}

// Error says what does not fit.
func (e *CountsError) Error() string {
	switch {
	case e.To < 0:
		return fmt.Sprintf("%s: the ranks have %d rows for rank %d, whose output has %d: make out larger, or send fewer; nothing was moved", e.Op, e.Rows, e.Rank, e.Most)
	case e.Negative:
		return fmt.Sprintf("%s: rank %d's count for rank %d, or where its rows begin, is below 0; nothing was moved", e.Op, e.Rank, e.To)
	}
	return fmt.Sprintf("%s: rank %d's rows for rank %d reach beyond the %d rows of its input; nothing was moved", e.Op, e.Rank, e.To, e.Most)
}

// Is reports whether target is ErrInvalid.
func (e *CountsError) Is(target error) bool { return target == errs.ErrInvalid }

type allToAllV struct {
	*maker
	counts, received tensor.SymmetricTensor
}

// The numbers of the tensors in the Spec, behind specOut.
const (
	specCounts = specOut + 1 + iota
	specReceived
)

// mostRows is how many rows input and output may have.
const mostRows = math.MaxInt32

func (a *allToAllV) check() (whole tensor.SymmetricTensor, err error) {
	size := int64(a.in.WorldSize())
	shapes := func(name string, t tensor.SymmetricTensor, allowed ...[]int64) error {
		if t.DType() != tensor.Int64 {
			return errs.Invalid(a.call, name+".DType", t.DType(), tensor.Int64.String())
		}
		for _, s := range allowed {
			if fmt.Sprint(t.Shape()) == fmt.Sprint(s) {
				return nil
			}
		}
		return errs.Invalid(a.call, name+".Shape", t.Shape(), fmt.Sprintf("one of %v, of %d ranks", allowed, size))
	}
	in, out := a.in.Shape(), a.out.Shape()
	switch {
	case len(in) == 0:
		return nil, errs.Invalid(a.call, "in.Shape", in, "at least one dimension, the rows")
	case len(out) != len(in) || fmt.Sprint(out[1:]) != fmt.Sprint(in[1:]):
		return nil, errs.Invalid(a.call, "out.Shape", out, fmt.Sprintf("rows of %v, those of in", in[1:]))
	case in[0] > mostRows || out[0] > mostRows:
		return nil, errs.Invalid(a.call, "rows", max(in[0], out[0]), fmt.Sprintf("at most %d", int64(mostRows)))
	}
	if err := shapes("counts", a.counts, []int64{size}, []int64{2, size}); err != nil {
		return nil, err
	}
	if err := shapes("received", a.received, []int64{2, size}); err != nil {
		return nil, err
	}
	all := []argument{{"in", a.in}, {"out", a.out}, {"counts", a.counts}, {"received", a.received}}
	for i, x := range all {
		for _, y := range all[:i] {
			if x.tensor.Bytes() == 0 || y.tensor.Bytes() == 0 {
				continue
			}
			if from, to := x.tensor.Ptr(), y.tensor.Ptr(); from < to.Add(y.tensor.Bytes()) && to < from.Add(x.tensor.Bytes()) {
				return nil, errs.Invalid(a.call, x.name, fmt.Sprintf("%d bytes at %s", x.tensor.Bytes(), from),
					fmt.Sprintf("memory apart from %s, %d bytes at %s", y.name, y.tensor.Bytes(), to))
			}
		}
	}
	return nil, nil
}

func (a *allToAllV) describe() string {
	return fmt.Sprintf("all-to-all of at most %d to %d rows of %d bytes", rowsOf(a.in), rowsOf(a.out), a.rowBytes())
}

// rowsOf is the number of rows of a tensor; 0 if it has none.
func rowsOf(t tensor.SymmetricTensor) int64 {
	if s := t.Shape(); len(s) > 0 {
		return s[0]
	}
	return 0
}

// rowBytes is the size of a row.
func (a *allToAllV) rowBytes() int64 {
	n := a.in.DType().Bytes()
	for i, d := range a.in.Shape() {
		if i > 0 {
			n *= d
		}
	}
	return n
}

// displaced reports whether the counts have displacements behind them.
func (a *allToAllV) displaced() bool { return len(a.counts.Shape()) == 2 }

func (a *allToAllV) algorithms(kind device.Kind) []Algorithm {
	if kind == device.CUDA {
		return []Algorithm{OneShotPush}
	}
	return []Algorithm{OneShot}
}

func (a *allToAllV) spec(s *collective.Spec) {
	s.Parameters += fmt.Sprintf(", rows of %d bytes", a.rowBytes())
	cuda := a.in.Device().Kind() == device.CUDA
	switch {
	case a.algorithm == Transfers:
		a.byTransfers(s)
	case cuda:
		a.onCUDA(s)
	default:
		a.onHost(s)
	}
}

func (a *allToAllV) onCUDA(s *collective.Spec) {
	s.Program = nil
	image, err := ptx.Image(ptx.PushAllToAllV.File)
	if err != nil {
		s.Failure = err
		return
	}
	size := a.in.WorldSize()
	block := ptx.AllToAllVBlockBytes(size)
	message := max(a.in.Bytes(), a.out.Bytes())
	s.CUDA = &collective.Kernel{
		Image: image, Function: ptx.PushAllToAllV.Name, Overlap: ptx.PushAllToAllV.Overlap, BlockWorkspace: block,
		Fit: func(multiprocessors int) (blocks, threads int) {
			g := chunkGeometry(message, size, 2*multiprocessors).atMost(a.opts.MaxBlocks)
			return g.blocks, g.threads
		},
		Params: func(at *collective.Addresses) []any {
			p := ptx.AllToAllV{
				In: uint64(a.in.Ptr()), Counts: uint64(a.counts.Ptr()), Received: uint64(a.received.Ptr()), Rows: uint64(rowsOf(a.in)), Room: uint64(rowsOf(a.out)),
				RowBytes: uint64(a.rowBytes()), BlockBytes: uint64(block),
			}
			if a.displaced() {
				p.Displaced = 1
			}
			var outs []uint64
			for r := range size {
				outs = append(outs, uint64(at.Tensor(specOut, r)))
			}
			if copy(p.Out[:], outs) < size {
				var table bytes.Buffer
				_ = binary.Write(&table, binary.LittleEndian, outs) // a Buffer takes everything
				p.Outputs = uint64(at.Upload(table.Bytes()))
			}
			return []any{at.Comm(), p}
		},
		Fault: a.fault,
	}
}

// fault makes an error of what the kernel has found wrong with the counts.
func (a *allToAllV) fault(f ptx.Fault) error {
	e := &CountsError{Op: a.describe(), Rank: int(f.Peer), To: -1, Rows: int64(f.Number()), Most: rowsOf(a.out)}
	switch f.Why {
	case ptx.FaultRoom:
		return e
	case ptx.FaultCount:
		e.To, e.Negative, e.Rows, e.Most = int(f.Number()&0xffff), f.Number()>>16 == ptx.CountNegative, 0, rowsOf(a.in)
		return e
	}
	return nil
}

// places is all that the ranks know of a run: how many rows who has for whom, and where they come from and go to. A plan has one, for all its runs.
type places struct {
	words  [][]int64 // by rank: what it has written, as it was when the run looked
	rows   [][]int64 // by sender and receiver: part of words
	from   [][]int64 // at which row of the sender's input they begin
	behind [][]int64 // at which row of the receiver's output they begin
}

// newPlaces makes the places of size ranks, each of which writes so many words.
func newPlaces(size int, words int64) *places {
	p := &places{}
	for range size {
		mine := make([]int64, words)
		p.words, p.rows = append(p.words, mine), append(p.rows, mine[:size])
		p.from, p.behind = append(p.from, make([]int64, size)), append(p.behind, make([]int64, size))
	}
	return p
}

// settle finds out from the counts of all ranks what goes where, alike on each, or what is wrong.
func (a *allToAllV) settle(p *places) error {
	rows, room := rowsOf(a.in), rowsOf(a.out)
	for r, from := range p.from {
		at := int64(0)
		for q, n := range p.rows[r] {
			if from[q] = at; a.displaced() {
				from[q] = p.words[r][len(from)+q]
			}
			if negative := n < 0 || n > 0 && from[q] < 0; negative || n > rows || n > 0 && from[q] > rows-n {
				return &CountsError{Op: a.describe(), Rank: r, To: q, Negative: negative, Most: rows}
			}
			at += n
		}
	}
	for q := range p.rows {
		all := int64(0)
		for r := range p.rows {
			p.behind[r][q] = all
			all += p.rows[r][q]
		}
		if all > room {
			return &CountsError{Op: a.describe(), Rank: q, To: -1, Rows: min(all, math.MaxUint32), Most: room}
		}
	}
	return nil
}

// onHost makes the spec that of a kernel of the host: between two meetings each rank looks at the counts of all, and loads what it is to have.
func (a *allToAllV) onHost(s *collective.Spec) {
	s.Program = nil
	s.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
		rank, size := at.Rank(), at.WorldSize()
		var counts [][]int64
		var ins [][]byte
		var others []int
		for r := range size {
			counts = append(counts, collective.Slice[int64](at, at.Tensor(specCounts, r), a.counts.NumElements()))
			ins = append(ins, at.Bytes(at.Tensor(specIn, r), a.in.Bytes()))
			if r != rank {
				others = append(others, r)
			}
		}
		out := at.Bytes(at.Tensor(specOut, rank), a.out.Bytes())
		received := collective.Slice[int64](at, at.Tensor(specReceived, rank), a.received.NumElements())
		width := a.rowBytes()
		p := newPlaces(size, a.counts.NumElements())
		return func(run *collective.HostRun) error {
			if err := meet(run, flagStart, others, others); err != nil {
				return err
			}
			for r, words := range counts {
				copy(p.words[r], words) // the program may write its own while it is looked at, against the rules
			}
			wrong := a.settle(p)
			if wrong == nil {
				for r := range size {
					received[r], received[size+r] = p.rows[r][rank], p.behind[r][rank]
				}
				for k := 1; k <= size; k++ {
					r := (rank + k) % size
					from := p.from[r][rank] * width
					if n := p.rows[r][rank] * width; n > 0 {
						copy(out[p.behind[r][rank]*width:][:n], ins[r][from:from+n])
					}
				}
			}
			// Whatever is behind a run that is wrong must not change the counts before all have seen them.
			if err := meet(run, flagEnd, others, others); err != nil {
				return err
			}
			return wrong
		}, nil
	}
}

// byTransfers makes the spec that of a program: every rank puts its counts into everybody's workspace, and when it has those of all, its rows to where
// they go. Where counts are wrong no rank gets that far. The CPU looks at the counts in memory of its own, which a run copies them to, and what the run
// tells this rank is copied from there. That memory is
//
//	counts   [writer] of span bytes each, as the workspace
//	received
func (a *allToAllV) byTransfers(s *collective.Spec) {
	const signalCounts, signalRows = 0, 1
	rank, size := a.in.Rank(), a.in.WorldSize()
	span := alignUp(a.counts.Bytes(), shardAlign)
	s.Workspace = int64(size) * span
	s.Program = &collective.Program{Build: func(_ context.Context, b *collective.Builder) error {
		all := int64(size) * span
		stage, at := b.Stage(all + a.received.Bytes())
		if at.IsNil() {
			return nil // the Builder has the error
		}
		if size > 1 {
			var puts []collective.Put
			for k := 1; k < size; k++ {
				puts = append(puts, collective.Put{Peer: (rank + k) % size, Tensor: collective.ToWorkspace, Offset: int64(rank) * span, Local: a.counts.Ptr(), Bytes: a.counts.Bytes()})
			}
			// Whose rows of the run before have come has looked at the counts of that run. Whose counts come has done with the output of that run.
			b.Send(signalCounts, puts...)
			b.Wait(signalCounts)
		}
		look := []collective.Copy{{Dst: at, Src: b.Workspace(rank), Bytes: all}, {Dst: at.Add(int64(rank) * span), Src: a.counts.Ptr(), Bytes: a.counts.Bytes()}}
		b.CopyComputed(func() ([]collective.Copy, error) { return look, nil })
		run := &settled{allToAllV: a, places: newPlaces(size, a.counts.NumElements()), stage: stage, at: at, span: span}
		b.CopyComputed(run.settle)
		if size > 1 {
			b.SendComputed(signalRows, run.putRows)
			b.Finish(signalRows)
		}
		return nil
	}}
	if size > 1 {
		s.Program.Signals = signalRows + 1
	}
}

// settled is what a run by transfers has found out. A graph may be launched on two streams, which is an error, but no crash: hence the lock.
type settled struct {
	*allToAllV
	*places
	stage []byte     // counts and received, as byTransfers has them
	at    device.Ptr // of the stage
	span  int64

	mu     sync.Mutex
	whole  bool // the places are those of one run
	copies [2]collective.Copy
	puts   []collective.Put
}

// settle looks at the counts, and gives what is copied within this rank: what it is told, and its own rows.
func (x *settled) settle() ([]collective.Copy, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for r, words := range x.words {
		for i := range words {
			words[i] = int64(binary.LittleEndian.Uint64(x.stage[int64(r)*x.span+8*int64(i):]))
		}
	}
	if err := x.allToAllV.settle(x.places); err != nil {
		x.whole = false
		return nil, err
	}
	x.whole = true
	rank, size, width := x.in.Rank(), x.in.WorldSize(), x.rowBytes()
	told := int64(size) * x.span
	for r := range size {
		binary.LittleEndian.PutUint64(x.stage[told+8*int64(r):], uint64(x.rows[r][rank]))
		binary.LittleEndian.PutUint64(x.stage[told+8*int64(size+r):], uint64(x.behind[r][rank]))
	}
	x.copies = [...]collective.Copy{
		{Dst: x.received.Ptr(), Src: x.at.Add(told), Bytes: x.received.Bytes()},
		{Dst: x.out.Ptr().Add(x.behind[rank][rank] * width), Src: x.in.Ptr().Add(x.from[rank][rank] * width), Bytes: x.rows[rank][rank] * width},
	}
	return x.copies[:], nil
}

// putRows is this rank's rows for every other one.
func (x *settled) putRows() ([]collective.Put, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.puts = x.puts[:0]
	if !x.whole {
		return nil, nil
	}
	rank, size, width := x.in.Rank(), x.in.WorldSize(), x.rowBytes()
	for k := 1; k < size; k++ {
		q := (rank + k) % size
		if n := x.rows[rank][q] * width; n > 0 {
			x.puts = append(x.puts, collective.Put{Peer: q, Tensor: specOut, Offset: x.behind[rank][q] * width, Local: x.in.Ptr().Add(x.from[rank][q] * width), Bytes: n})
		}
	}
	return x.puts, nil
}
