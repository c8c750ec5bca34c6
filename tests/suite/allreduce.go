package suite

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// mode is how an all-reduce is run.
type mode string

const (
	blocked mode = "blocked" // the host waits at once
	delayed mode = "delayed" // work is queued before it, and everything is closed before the device has come to it
	graph   mode = "graph"   // captured once and replayed
)

// delay is the work queued before a delayed all-reduce; the lifetime cases use longer ones.
const delay = 10 * time.Millisecond

// reduction is one all-reduce case.
type reduction struct {
	algorithm kernels.Algorithm
	dtype     tensor.DType
	op        kernels.Op
	out       bool // out of place
	n         int64
	mode      mode
	even      bool // at a place that is a multiple of two elements; otherwise it is at none
}

func (r reduction) name() string {
	s := fmt.Sprintf("all_reduce/%s/%s", r.algorithm, r.dtype)
	if r.op != kernels.Sum {
		s += "/" + r.op.String()
	}
	if r.out {
		s += "/out"
	}
	return fmt.Sprintf("%s/%d/%s", s, r.n, r.mode)
}

// allReduceCases: every dtype and op, every form, sizes around every boundary, the three modes.
func allReduceCases(kind device.Kind, backend string, world int, short bool) []Case {
	var cases []Case
	var needs []string
	add := func(r reduction) {
		if !kernels.Supported(kind, r.algorithm, r.dtype, r.op, world) || overRails(kind, r.algorithm) && !exactInParts(r.op, world) {
			return
		}
		c := Case{Name: r.name(), Needs: slices.Clone(needs), Run: func(ctx context.Context, e *Env) error { return allReduceCase(ctx, e, r) }}
		if r.mode == graph {
			c.Needs = append(c.Needs, "graphs")
		}
		cases = append(cases, c)
	}
	for _, alg := range ownForms("NewAllReduce", kind, backend) {
		needs = needsOn(kind, alg)
		for _, dtype := range tensor.DTypes() {
			for _, n := range []int64{0, 1, 15, 16, 17, 1023, 4096, 65537} {
				add(reduction{alg, dtype, kernels.Sum, n%2 == 1, n, blocked, false})
			}
			for _, op := range kernels.Ops()[1:] {
				add(reduction{alg, dtype, op, op == kernels.Max, 1009, blocked, false})
			}
			add(reduction{alg, dtype, kernels.Sum, false, 2050, delayed, false})
			add(reduction{alg, dtype, kernels.Sum, true, 2051, graph, false})
		}
		if !short {
			for _, dtype := range []tensor.DType{tensor.BFloat16, tensor.Float32} {
				for _, m := range []mode{blocked, delayed, graph} {
					add(reduction{alg, dtype, kernels.Sum, false, 1048577, m, false})
					add(reduction{alg, dtype, kernels.Sum, true, 1048577, m, false})
				}
			}
		}
		special := func(name string, run func(ctx context.Context, e *Env, alg kernels.Algorithm) error) {
			cases = append(cases, Case{Name: fmt.Sprintf("all_reduce/%s/%s", alg, name), Needs: slices.Clone(needs), Run: func(ctx context.Context, e *Env) error {
				return run(ctx, e, alg)
			}})
		}
		if kernels.Supported(kind, alg, tensor.Float32, kernels.Sum, world) {
			special("every_count", everyCountCase)
			if !overRails(kind, alg) || backend != kernels.NCCL.Backend() { // whose minimum of NaN and a number is its own
				special("special_values", specialValuesCase)
			}
			special("rounding", roundingCase)
			if alg == kernels.Hierarchical {
				special("stated_order", statedOrderCase)
			}
			special("two_plans", twoPlansCase)
			special("replay_100", replayCase)
			special("epoch_wrap", epochWrapCase)
			if alg == kernels.Transfers {
				special("captured_meanwhile", capturedMeanwhileCase)
				cases[len(cases)-1].Needs = append(cases[len(cases)-1].Needs, "graphs")
				if !short {
					special("two_large_plans", twoLargePlansCase)
				}
			}
		}
	}
	needs = needsOf(kernels.Auto)
	return append(cases,
		Case{Name: "all_reduce/auto/back_to_back", Needs: needs, Run: backToBackCase},
		Case{Name: "all_reduce/auto/choice", Needs: needs, Run: choiceCase},
		Case{Name: "all_reduce/errors", Needs: needs, Run: planErrorsCase},
	)
}

// ownForms lists the forms of a constructor that are not a library's alone: they take every dtype and count that a device has kernels for.
func ownForms(constructor string, kind device.Kind, backend string) []kernels.Algorithm {
	return slices.DeleteFunc(kernels.Forms(constructor, kind, backend), func(a kernels.Algorithm) bool { return a.Backend() != "" })
}

// overRails reports whether a form is that of kernels inside islands of GPUs, and of something else between them.
func overRails(kind device.Kind, alg kernels.Algorithm) bool {
	return alg == kernels.Hierarchical && kind == device.CUDA
}

// exactInParts reports whether what is combined in parts, rounded, and then the parts, has the bits of the order of the ranks, for the values of these cases.
func exactInParts(op kernels.Op, world int) bool {
	return op != kernels.Avg && op != kernels.Prod || world == 1 || world == 2 || world == 4
}

// libraryCases: the all-reduces of the library below the backend, on the same tensors.
func libraryCases(kind device.Kind, backend string, world int) []Case {
	var cases []Case
	for _, alg := range kernels.LibraryAlgorithms(backend) {
		var needs []string
		if alg == kernels.NCCLSymmetric {
			needs = []string{"peer_pointers"} // they end at the host
		}
		for _, dtype := range tensor.DTypes() {
			for _, op := range kernels.Ops() {
				// Libraries multiply and average in an order of their own, which shows where a result has to be rounded.
				if !exactInParts(op, world) || !kernels.Supported(kind, alg, dtype, op, world) {
					continue
				}
				for i, m := range []mode{blocked, delayed, graph} {
					if m != blocked && op != kernels.Sum {
						continue
					}
					// NCCL's symmetric kernels take elements of 2 bytes at even places only, before 2.30.3; the case odd_place shows the rest.
					even := alg == kernels.NCCLSymmetric && dtype.Bytes() == 2
					r := reduction{alg, dtype, op, i%2 == 0, 2050 + int64(i), m, even}
					c := Case{Name: r.name(), Needs: slices.Clone(needs), Run: func(ctx context.Context, e *Env) error { return allReduceCase(ctx, e, r) }}
					if m == graph {
						c.Needs = append(c.Needs, "graphs")
					}
					cases = append(cases, c)
				}
			}
		}
		for _, n := range []int64{0, 1, 17, 1048577} {
			r := reduction{algorithm: alg, dtype: tensor.Float32, op: kernels.Sum, out: n%2 == 1, n: n, mode: blocked}
			cases = append(cases, Case{Name: r.name(), Needs: needs, Run: func(ctx context.Context, e *Env) error { return allReduceCase(ctx, e, r) }})
		}
		cases = append(cases, Case{Name: fmt.Sprintf("all_reduce/%s/replay_100", alg), Needs: append(slices.Clone(needs), "graphs"), Run: func(ctx context.Context, e *Env) error {
			return replayCase(ctx, e, alg)
		}}, Case{Name: fmt.Sprintf("all_reduce/%s/odd_place", alg), Needs: needs, Run: func(ctx context.Context, e *Env) error { return oddPlaceCase(ctx, e, alg) }})
	}
	return cases
}

// oddPlaceCase: a library that cannot take elements where they are says so; otherwise the result is right.
func oddPlaceCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	for _, dtype := range []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32} {
		r := reduction{algorithm: alg, dtype: dtype, op: kernels.Sum, n: 2050, mode: blocked}
		o, err := newOperands(ctx, e, r)
		if err != nil {
			return err
		}
		p, err := o.plan(ctx, r)
		if errors.Is(err, symmem.ErrUnsupported) && dtype.Bytes() == 2 {
			if err := o.Close(ctx); err != nil {
				return err
			}
			continue
		}
		if err != nil {
			return err
		}
		if err := errors.Join(p.Run(e.S), e.S.Synchronize(ctx), o.check(ctx, e, r), closeAll(ctx, p, o)); err != nil {
			return fmt.Errorf("%s: %w", dtype, err)
		}
	}
	return nil
}

// needsOf gives the capabilities that a form needs. Auto takes Transfers where peers have no pointers; a backend that has pointers
// has transfers too.
func needsOf(alg kernels.Algorithm) []string {
	needs := []string{"transfers"}
	if alg.NeedsPeerPointers() && alg != kernels.Auto {
		needs = []string{"peer_pointers"}
	}
	if alg.NeedsMulticast() {
		needs = append(needs, "multicast")
	}
	return needs
}

// needsOn is needsOf on a kind of device. Over rails it is several islands: NCCL needs no transfers there.
func needsOn(kind device.Kind, alg kernels.Algorithm) []string {
	if overRails(kind, alg) {
		return []string{SeveralIslands}
	}
	return needsOf(alg)
}

// supported reports whether this rank's device has the kernel.
func (e *Env) supported(alg kernels.Algorithm, dtype tensor.DType, op kernels.Op) bool {
	return kernels.Supported(e.R.Device().Kind(), alg, dtype, op, e.R.WorldSize())
}

// exactOverRails reports whether what goes over rails has the bits that are expected of the order of the ranks. An average is that of the islands' averages there.
func (e *Env) exactOverRails(op kernels.Op) bool {
	size := map[int]int{}
	for _, first := range e.R.Memory().Islands() {
		size[first]++
	}
	for _, n := range size {
		if op == kernels.Avg && n&(n-1) != 0 {
			return false
		}
	}
	return exactInParts(op, e.R.WorldSize())
}

// operands are an all-reduce's tensors, input filled in and output poisoned.
type operands struct {
	in, out *guarded // out is in when in place
}

func newOperands(ctx context.Context, e *Env, r reduction) (*operands, error) {
	band := int64(guardElements)
	if r.even {
		band++
	}
	in, err := newGuardedAt(ctx, e, r.dtype, r.n, band)
	if err != nil {
		return nil, err
	}
	o := &operands{in: in, out: in}
	if r.out {
		if o.out, err = newGuardedAt(ctx, e, r.dtype, r.n, band); err != nil {
			return nil, err
		}
	}
	return o, writeBytes(in.Local(), input(r.dtype, r.op, e.R.Rank(), r.n))
}

func (o *operands) plan(ctx context.Context, r reduction) (*kernels.Plan, error) {
	opts := &kernels.AllReduceOptions{Algorithm: r.algorithm}
	if r.out {
		opts.Out = o.out.SymmetricTensor
	}
	return kernels.NewAllReduce(ctx, o.in.SymmetricTensor, r.op, opts)
}

// check compares the output with what is expected, with every other rank's, and looks at the guard bands.
func (o *operands) check(ctx context.Context, e *Env, r reduction) error {
	got, err := readBytes(o.out.Local())
	if err != nil {
		return err
	}
	compare := sameBytes
	if overRails(e.R.Device().Kind(), r.algorithm) && !e.exactOverRails(r.op) {
		compare = nearAverages
	}
	return errors.Join(compare(r.dtype, got, expected(r.dtype, r.op, e.R.WorldSize(), r.n)), sameEverywhere(ctx, e, got), o.in.bands(), o.out.bands())
}

func (o *operands) Close(ctx context.Context) error {
	if o.out != o.in {
		if err := o.out.Close(ctx); err != nil {
			return err
		}
	}
	return o.in.Close(ctx)
}

func allReduceCase(ctx context.Context, e *Env, r reduction) error {
	o, err := newOperands(ctx, e, r)
	if err != nil {
		return err
	}
	p, err := o.plan(ctx, r)
	if err != nil {
		return err
	}
	if family := r.algorithm <= kernels.TwoShot && e.R.Device().Kind() == device.CUDA; p.Algorithm() != r.algorithm && !family {
		return fmt.Errorf("%s was asked for and %s came", r.algorithm, p.Algorithm())
	}
	e.Skew()
	switch r.mode {
	case blocked:
		if err := errors.Join(p.Run(e.S), e.S.Synchronize(ctx)); err != nil {
			return err
		}
		if err := o.check(ctx, e, r); err != nil {
			return err
		}
		return closeAll(ctx, p, o)
	case graph:
		return graphCase(ctx, e, r, o, p, 5)
	}
	return delayedCase(ctx, e, r, o, p, delay, 0)
}

// graphCase captures the copy of the input and the plan, and replays both.
func graphCase(ctx context.Context, e *Env, r reduction, o *operands, p *kernels.Plan, replays int) error {
	src, free, err := private(e, o.in.Bytes())
	if err != nil {
		return err
	}
	if in := input(r.dtype, r.op, e.R.Rank(), r.n); len(in) > 0 {
		if err := e.R.Device().CopyFromHost(src, in); err != nil {
			return err
		}
	}
	if err := e.S.BeginCapture(); err != nil {
		return err
	}
	if err := errors.Join(e.S.Copy(o.in.Local().Ptr(), src, o.in.Bytes()), p.Run(e.S)); err != nil {
		return err
	}
	g, err := e.S.EndCapture()
	if err != nil {
		return err
	}
	for i := range replays {
		if i%3 == 0 {
			e.Skew()
		}
		if err := g.Launch(e.S); err != nil {
			return err
		}
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return err
	}
	if err := o.check(ctx, e, r); err != nil {
		return err
	}
	if err := errors.Join(g.Close(), free()); err != nil {
		return err
	}
	return closeAll(ctx, p, o)
}

// delayedCase enqueues everything, closes everything while the device has not even begun, and looks at what came out.
func delayedCase(ctx context.Context, e *Env, r reduction, o *operands, p *kernels.Plan, before, after time.Duration) error {
	kept, free, err := private(e, o.out.Bytes())
	if err != nil {
		return err
	}
	began := make(chan struct{})
	gate := make(chan struct{})
	err = errors.Join(
		e.S.HostFunc(func() { close(began); <-gate; time.Sleep(before) }),
		p.Run(e.S),
		e.S.Copy(kept, o.out.Local().Ptr(), o.out.Bytes()),
		e.S.HostFunc(func() { time.Sleep(after) }),
	)
	<-began
	done, queryErr := e.S.Query()
	close(gate)
	if err := errors.Join(err, queryErr); err != nil {
		return err
	}
	if done {
		return errors.New("the stream has nothing left to do while work in front of the all-reduce is held up")
	}
	// Closing waits for the work; nothing may be taken from under it.
	if err := closeAll(ctx, p, o); err != nil {
		return err
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return err
	}
	got := make([]byte, r.n*r.dtype.Bytes())
	if len(got) > 0 {
		if err := e.R.Device().CopyToHost(got, kept); err != nil {
			return err
		}
	}
	return errors.Join(sameBytes(r.dtype, got, expected(r.dtype, r.op, e.R.WorldSize(), r.n)), sameEverywhere(ctx, e, got), free())
}

func replayCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	r := reduction{alg, tensor.Float32, kernels.Sum, true, 3001, graph, false}
	o, err := newOperands(ctx, e, r)
	if err != nil {
		return err
	}
	p, err := o.plan(ctx, r)
	if err != nil {
		return err
	}
	return graphCase(ctx, e, r, o, p, 100)
}

// everyCountCase runs every element count from 0 to 70 and around powers of two, in dtypes of each width.
func everyCountCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	var counts []int64
	for n := range int64(71) {
		counts = append(counts, n)
	}
	counts = append(counts, 127, 128, 129, 255, 256, 257, 511, 513, 1025)
	for _, dtype := range []tensor.DType{tensor.Int8, tensor.BFloat16, tensor.Float32, tensor.Float64} {
		if !e.supported(alg, dtype, kernels.Sum) {
			continue
		}
		whole, err := e.mapped(ctx, dtype, 1100)
		if err != nil {
			return err
		}
		for i, n := range counts {
			if i%int(dtype.Bytes()) != 0 && n > 20 {
				continue // fewer of the wide ones
			}
			t, err := whole.Sub(int64(i%9), n)
			if err != nil {
				return err
			}
			if err := writeBytes(whole.Local(), poisoned(whole.Bytes())); err != nil {
				return err
			}
			if err := writeBytes(t.Local(), input(dtype, kernels.Sum, e.R.Rank(), n)); err != nil {
				return err
			}
			p, err := kernels.NewAllReduce(ctx, t, kernels.Sum, &kernels.AllReduceOptions{Algorithm: alg})
			if err != nil {
				return err
			}
			if err := errors.Join(p.Run(e.S), e.S.Synchronize(ctx)); err != nil {
				return err
			}
			want := poisoned(whole.Bytes())
			copy(want[int64(i%9)*dtype.Bytes():], expected(dtype, kernels.Sum, e.R.WorldSize(), n))
			got, err := readBytes(whole.Local())
			if err != nil {
				return err
			}
			if err := sameBytes(dtype, got, want); err != nil {
				return fmt.Errorf("%d elements of %s: %w", n, dtype, err)
			}
			if err := p.Close(ctx); err != nil {
				return err
			}
		}
		if err := whole.Close(ctx); err != nil {
			return err
		}
	}
	return nil
}

// specialValuesCase reduces NaN, infinities, signed zeros and subnormals: where they must come out, and the same bits on
// every rank.
func specialValuesCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	inf, nan, tiny := math.Inf(1), math.NaN(), math.Float64frombits(1)
	zero, minus := 0.0, math.Copysign(0, -1)
	w := e.R.WorldSize()
	// One rank has the first value, all others the second.
	pairs := [][2]float64{{nan, 1}, {inf, 1}, {-inf, 1}, {inf, -inf}, {minus, minus}, {minus, zero}, {zero, minus}, {tiny, tiny}, {nan, nan}, {nan, inf}, {math.MaxFloat64, math.MaxFloat64}}
	n := int64(len(pairs) * w)
	for _, dtype := range []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64} {
		for _, op := range kernels.Ops() {
			if !e.supported(alg, dtype, op) {
				continue
			}
			t, err := e.mapped(ctx, dtype, n)
			if err != nil {
				return err
			}
			at := func(rank int, i int64) float64 {
				p := pairs[int(i)/w]
				if int(i)%w == rank {
					return p[0]
				}
				return p[1]
			}
			var in []byte
			for i := range n {
				in = appendFloat(in, dtype, at(e.R.Rank(), i))
			}
			if err := writeBytes(t.Local(), in); err != nil {
				return err
			}
			p, err := kernels.NewAllReduce(ctx, t, op, &kernels.AllReduceOptions{Algorithm: alg})
			if err != nil {
				return err
			}
			if err := errors.Join(p.Run(e.S), e.S.Synchronize(ctx)); err != nil {
				return err
			}
			got, err := readBytes(t.Local())
			if err != nil {
				return err
			}
			// What every rank loads from the switch by itself, in whatever order, may differ.
			if alg != kernels.OneShotMultimem {
				if err := sameEverywhere(ctx, e, got); err != nil {
					return fmt.Errorf("%s %s: %w", op, dtype, err)
				}
			}
			for i := range n {
				vals := make([]float64, w)
				for r := range vals {
					vals[r] = floatAt(appendFloat(nil, dtype, at(r, i)), dtype, 0)
				}
				want, have := referenceFloat(dtype, op, vals), floatAt(got, dtype, i)
				if !alg.RankOrder() {
					want, have = want+0, have+0 // of zeros, the switch's sign is its own
				}
				if math.IsNaN(want) != math.IsNaN(have) || !math.IsNaN(want) && math.Float64bits(want) != math.Float64bits(have) {
					return fmt.Errorf("%s %s of %v is %v, expected %v", op, dtype, vals, have, want)
				}
			}
			if err := closeAll(ctx, p, t); err != nil {
				return err
			}
		}
	}
	return nil
}

// roundingCase: 16-bit floats are accumulated in float32 and rounded once, in rank order; float32 in rank order. The switch's order and
// precision in between are its own: its results are near, and with one rank that reduces for all, the same everywhere.
func roundingCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	const n = 2003
	w := e.R.WorldSize()
	at := func(rank int, i int64) float64 {
		return math.Ldexp(float64(1+(i*7919+int64(rank)*104729)%2039)/1024, int((i+int64(rank)*5)%11)-5)
	}
	for _, dtype := range []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32, tensor.Float64} {
		for _, op := range []kernels.Op{kernels.Sum, kernels.Avg, kernels.Prod} {
			if !e.supported(alg, dtype, op) {
				continue
			}
			t, err := e.mapped(ctx, dtype, n)
			if err != nil {
				return err
			}
			var in, want []byte
			grow := make([]float64, n) // how much what was rounded before may grow with the values of other ranks
			for i := range int64(n) {
				in = appendFloat(in, dtype, at(e.R.Rank(), i))
				vals := make([]float64, w)
				grow[i] = 1
				for r := range vals {
					vals[r] = floatAt(appendFloat(nil, dtype, at(r, i)), dtype, 0)
					if op == kernels.Prod {
						grow[i] *= max(1, vals[r])
					}
				}
				want = appendFloat(want, dtype, referenceFloat(dtype, op, vals))
			}
			if err := writeBytes(t.Local(), in); err != nil {
				return err
			}
			p, err := kernels.NewAllReduce(ctx, t, op, &kernels.AllReduceOptions{Algorithm: alg})
			if err != nil {
				return err
			}
			if err := errors.Join(p.Run(e.S), e.S.Synchronize(ctx)); err != nil {
				return err
			}
			got, err := readBytes(t.Local())
			if err != nil {
				return err
			}
			if !alg.RankOrder() {
				err = nearBytes(dtype, got, want, w, grow)
			} else {
				err = sameBytes(dtype, got, want)
			}
			if err != nil {
				return fmt.Errorf("%s %s: %w", op, dtype, err)
			}
			if alg != kernels.OneShotMultimem {
				if err := sameEverywhere(ctx, e, got); err != nil {
					return fmt.Errorf("%s %s: %w", op, dtype, err)
				}
			}
			if err := closeAll(ctx, p, t); err != nil {
				return err
			}
		}
	}
	return nil
}

// ulps are what the last digit of 1 is worth.
var ulps = map[tensor.DType]float64{tensor.Float16: 0x1p-10, tensor.BFloat16: 0x1p-7, tensor.Float32: 0x1p-23, tensor.Float64: 0x1p-52}

// least are the smallest numbers above 0, which those near 0 are multiples of.
var least = map[tensor.DType]float64{tensor.Float16: 0x1p-24, tensor.BFloat16: 0x1p-133, tensor.Float32: 0x1p-149, tensor.Float64: 0x1p-1074}

// nearBytes compares sums or products of size positive values that may have been rounded after each operation. Near 0 that changes more than the last digit, and grows with what follows.
func nearBytes(dtype tensor.DType, got, want []byte, size int, grow []float64) error {
	for i := range int64(len(want)) / dtype.Bytes() {
		g, w := floatAt(got, dtype, i), floatAt(want, dtype, i)
		if !(math.Abs(g-w) <= float64(size)*(ulps[dtype]*w+least[dtype]*grow[i])) {
			return fmt.Errorf("element %d of %s is %v, and %v is not near", i, dtype, g, w)
		}
	}
	return nil
}

// nearAverages compares averages of islands' averages with averages.
func nearAverages(dtype tensor.DType, got, want []byte) error {
	for i := range int64(len(want)) / dtype.Bytes() {
		g, w := floatAt(got, dtype, i), floatAt(want, dtype, i)
		if !(math.Abs(g-w) <= 4*ulps[dtype]*(1+math.Abs(w))) {
			return fmt.Errorf("element %d of %s is %v, and %v is not near", i, dtype, g, w)
		}
	}
	return nil
}

// appendFloat appends v rounded to the dtype.
func appendFloat(b []byte, dtype tensor.DType, v float64) []byte {
	switch dtype {
	case tensor.Float16:
		return binary.LittleEndian.AppendUint16(b, uint16(tensor.F16From(float32(v))))
	case tensor.BFloat16:
		return binary.LittleEndian.AppendUint16(b, uint16(tensor.BF16From(float32(v))))
	case tensor.Float32:
		return binary.LittleEndian.AppendUint32(b, math.Float32bits(float32(v)))
	}
	return binary.LittleEndian.AppendUint64(b, math.Float64bits(v))
}

func floatAt(b []byte, dtype tensor.DType, i int64) float64 {
	switch dtype {
	case tensor.Float16:
		return float64(tensor.F16(binary.LittleEndian.Uint16(b[2*i:])).Float32())
	case tensor.BFloat16:
		return float64(tensor.BF16(binary.LittleEndian.Uint16(b[2*i:])).Float32())
	case tensor.Float32:
		return float64(math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:])))
	}
	return math.Float64frombits(binary.LittleEndian.Uint64(b[8*i:]))
}

// referenceFloat combines the ranks' values as the package comment of kernels defines it.
func referenceFloat(dtype tensor.DType, op kernels.Op, vals []float64) float64 {
	step := func(x, y float64) float64 {
		switch op {
		case kernels.Prod:
			return x * y
		case kernels.Min:
			return min(x, y)
		case kernels.Max:
			return max(x, y)
		}
		return x + y
	}
	acc := vals[0]
	for _, v := range vals[1:] {
		acc = step(acc, v)
		if dtype != tensor.Float64 {
			acc = float64(float32(acc)) // one float32 operation: float64 has bits enough for its exact result before rounding
		}
	}
	if op == kernels.Avg {
		if dtype == tensor.Float64 {
			acc /= float64(len(vals))
		} else {
			acc = float64(float32(acc) / float32(len(vals)))
		}
	}
	return floatAt(appendFloat(nil, dtype, acc), dtype, 0)
}

// epochWrapCase counts runs across the point where the epoch wraps around.
func epochWrapCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	t, err := e.mapped(ctx, tensor.Float32, 300)
	if err != nil {
		return err
	}
	p, err := kernels.NewAllReduce(ctx, t, kernels.Sum, &kernels.AllReduceOptions{Algorithm: alg, FirstEpoch: math.MaxUint32 - 9})
	if err != nil {
		return err
	}
	for round := range 20 {
		if err := writeBytes(t.Local(), input(tensor.Float32, kernels.Sum, e.R.Rank(), 300)); err != nil {
			return err
		}
		if err := errors.Join(p.Run(e.S), e.S.Synchronize(ctx)); err != nil {
			return fmt.Errorf("run %d: %w", round, err)
		}
		got, err := readBytes(t.Local())
		if err != nil {
			return err
		}
		if err := sameBytes(tensor.Float32, got, expected(tensor.Float32, kernels.Sum, e.R.WorldSize(), 300)); err != nil {
			return fmt.Errorf("run %d: %w", round, err)
		}
	}
	return closeAll(ctx, p, t)
}

// twoPlansCase runs two plans on two streams at once, in an order that differs between ranks.
func twoPlansCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	return twoPlans(ctx, e, alg, 5000, 30)
}

// twoLargePlansCase does so with messages that go in laps, on GPUs too.
func twoLargePlansCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	return twoPlans(ctx, e, alg, 2<<20+3, 8)
}

func twoPlans(ctx context.Context, e *Env, alg kernels.Algorithm, n int64, rounds int) error {
	other, err := e.R.NewStream()
	if err != nil {
		return err
	}
	r := reduction{alg, tensor.Float32, kernels.Sum, true, n, blocked, false}
	a, err := newOperands(ctx, e, r)
	if err != nil {
		return err
	}
	b, err := newOperands(ctx, e, r)
	if err != nil {
		return err
	}
	pa, err := a.plan(ctx, r)
	if err != nil {
		return err
	}
	pb, err := b.plan(ctx, r)
	if err != nil {
		return err
	}
	if err := enqueued(e.crosses(alg), rounds, func() error { return pa.Run(e.S) }, func() error { return pb.Run(other) }); err != nil {
		return err
	}
	if err := errors.Join(e.S.Synchronize(ctx), other.Synchronize(ctx), other.Close()); err != nil {
		return err
	}
	if err := errors.Join(a.check(ctx, e, r), b.check(ctx, e, r)); err != nil {
		return err
	}
	return closeAll(ctx, pb, pa, b, a)
}

// backToBackCase runs plans of changing sizes one after the other without any host wait.
func backToBackCase(ctx context.Context, e *Env) error {
	sizes := []int64{1, 3000, 17, 40000, 255, 9000}
	var ops []*operands
	var plans []*kernels.Plan
	var rs []reduction
	for _, n := range sizes {
		r := reduction{kernels.Auto, tensor.BFloat16, kernels.Sum, true, n, blocked, false}
		o, err := newOperands(ctx, e, r)
		if err != nil {
			return err
		}
		p, err := o.plan(ctx, r)
		if err != nil {
			return err
		}
		ops, plans, rs = append(ops, o), append(plans, p), append(rs, r)
	}
	for round := range 200 {
		i := (round*5 + round/7) % len(plans)
		if round%50 == 0 {
			e.Skew()
		}
		if err := plans[i].Run(e.S); err != nil {
			return err
		}
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return err
	}
	for i, o := range ops {
		if err := o.check(ctx, e, rs[i]); err != nil {
			return fmt.Errorf("%d elements: %w", sizes[i], err)
		}
		if err := closeAll(ctx, plans[i], o); err != nil {
			return err
		}
	}
	return nil
}

// choiceCase: Auto picks a form by size, and it is the same on every rank (or the plan could not be made).
func choiceCase(ctx context.Context, e *Env) error {
	for _, n := range []int64{1, 1 << 10, 1 << 14, 1 << 18} {
		t, err := e.mapped(ctx, tensor.Float32, n)
		if err != nil {
			return err
		}
		p, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil)
		if err != nil {
			return err
		}
		if p.Algorithm() == kernels.Auto {
			return errors.New("the plan does not say which form was chosen")
		}
		if err := closeAll(ctx, p, t); err != nil {
			return err
		}
	}
	return nil
}

// planErrorsCase: what a plan refuses.
func planErrorsCase(ctx context.Context, e *Env) error {
	t, err := e.R.Zeros(ctx, tensor.Float32, 100)
	if err != nil {
		return err
	}
	if _, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil); !errors.Is(err, symmem.ErrNoRendezvous) {
		return fmt.Errorf("a plan before rendezvous: %v", err)
	}
	if err := t.Rendezvous(ctx); err != nil {
		return err
	}
	longer, err := e.R.Zeros(ctx, tensor.Float32, 101)
	if err != nil {
		return err
	}
	ints, err := e.R.Zeros(ctx, tensor.Int32, 100)
	if err != nil {
		return err
	}
	if err := errors.Join(longer.Rendezvous(ctx), ints.Rendezvous(ctx)); err != nil {
		return err
	}
	a, err := t.Sub(0, 60)
	if err != nil {
		return err
	}
	b, err := t.Sub(30, 60)
	if err != nil {
		return err
	}
	refused := func(in tensor.SymmetricTensor, op kernels.Op, opts *kernels.AllReduceOptions) error {
		p, err := kernels.NewAllReduce(ctx, in, op, opts)
		if err == nil {
			err = errors.Join(errors.New("no error"), p.Close(ctx))
		}
		return err
	}
	foreign := kernels.NCCL
	if e.R.Backend() == foreign.Backend() {
		foreign = kernels.NVSHMEM
	}
	err = errors.Join(
		wantArgument("no tensor", refused(nil, kernels.Sum, nil)),
		wantArgument("the zero Tensor", refused(&tensor.Tensor{}, kernels.Sum, nil)),
		wantArgument("the zero Tensor as output", refused(t, kernels.Sum, &kernels.AllReduceOptions{Out: &tensor.Tensor{}})),
		wantArgument("an unknown op", refused(t, 0, nil), "Op(0)"),
		wantArgument("an unknown form", refused(t, kernels.Sum, &kernels.AllReduceOptions{Algorithm: 99}), "99"),
		wantError("the form of another backend's library", refused(t, kernels.Sum, &kernels.AllReduceOptions{Algorithm: foreign}),
			symmem.ErrUnsupported, foreign.Backend(), t.Memory().Backend().Name()),
		wantArgument("an output of another size", refused(t, kernels.Sum, &kernels.AllReduceOptions{Out: longer}), "101", "100"),
		wantArgument("an output of another dtype", refused(t, kernels.Sum, &kernels.AllReduceOptions{Out: ints}), "i32", "f32"),
		wantArgument("an output that overlaps", refused(a, kernels.Sum, &kernels.AllReduceOptions{Out: b})),
	)
	if err != nil {
		return err
	}
	for _, alg := range []kernels.Algorithm{kernels.Auto, kernels.Transfers} {
		if err := twoStreamsOnePlan(ctx, e, t, alg); err != nil {
			return fmt.Errorf("%s: %w", alg, err)
		}
	}
	q, err := kernels.NewAllReduce(ctx, ints, kernels.Sum, nil)
	if err != nil {
		return err
	}
	if err := ints.Close(ctx); err != nil {
		return err
	}
	if err := wantError("Run on a closed tensor", q.Run(e.S), symmem.ErrClosed); err != nil {
		return err
	}
	return closeAll(ctx, q, longer, t)
}

// twoStreamsOnePlan: a plan refuses a second stream while it runs on the first, and may move when it does not.
func twoStreamsOnePlan(ctx context.Context, e *Env, t tensor.SymmetricTensor, alg kernels.Algorithm) error {
	other, err := e.R.NewStream()
	if err != nil {
		return err
	}
	p, err := kernels.NewAllReduce(ctx, t, kernels.Sum, &kernels.AllReduceOptions{Algorithm: alg})
	if err != nil {
		return err
	}
	hold, release := holdUp()
	if err := errors.Join(e.S.HostFunc(hold), p.Run(e.S)); err != nil {
		release()
		return err
	}
	twice := p.Run(other)
	release()
	if err := wantError("a plan on two streams at once", twice, symmem.ErrTwoStreams); err != nil {
		return err
	}
	if err := errors.Join(e.S.Synchronize(ctx), p.Run(other), other.Synchronize(ctx), other.Close()); err != nil {
		return fmt.Errorf("a plan that moves to another stream: %w", err)
	}
	if err := p.Close(ctx); err != nil {
		return err
	}
	if err := wantError("Run of a closed plan", p.Run(e.S), symmem.ErrClosed); err != nil {
		return err
	}
	return wantError("Close of a closed plan", p.Close(ctx), symmem.ErrClosed)
}

// capturedMeanwhileCase runs a plan on one stream while another records it: that is refused or works, and the graph is whole.
func capturedMeanwhileCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	r := reduction{alg, tensor.Int32, kernels.Max, true, 300_000, blocked, false} // of maxima there may be any number
	o, err := newOperands(ctx, e, r)
	if err != nil {
		return err
	}
	p, err := o.plan(ctx, r)
	if err != nil {
		return err
	}
	other, err := e.R.NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(e.S.BeginCapture(), p.Run(e.S)); err != nil {
		return err
	}
	if err := p.Run(other); err != nil && !errors.Is(err, symmem.ErrTwoStreams) {
		return fmt.Errorf("a run while another stream records the plan: %w", err)
	}
	g, err := e.S.EndCapture()
	if err != nil {
		return err
	}
	if err := other.Synchronize(ctx); err != nil {
		return err
	}
	if err := errors.Join(g.Launch(e.S), e.S.Synchronize(ctx), p.Run(other), other.Synchronize(ctx)); err != nil {
		return err
	}
	if err := o.check(ctx, e, r); err != nil {
		return err
	}
	if err := errors.Join(g.Close(), other.Close()); err != nil {
		return err
	}
	return closeAll(ctx, p, o)
}

// holdUp gives a host function that blocks until release is called.
func holdUp() (hold func(), release func()) {
	gate := make(chan struct{})
	return func() { <-gate }, func() { close(gate) }
}
