package suite

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// rmsNormCases: all-reduce, residual, RMSNorm and fp8 in one plan, in each form.
func rmsNormCases(kind device.Kind) []Case {
	const what = "all_reduce_rms_norm"
	algorithms := []kernels.Algorithm{kernels.OneShot, kernels.TwoShot, kernels.Transfers}
	if kind == device.CUDA {
		algorithms = []kernels.Algorithm{kernels.OneShotPush, kernels.TwoShotPush, kernels.TwoShotPull, kernels.Transfers}
	}
	var cases []Case
	for _, alg := range algorithms {
		add := func(name string, run func(ctx context.Context, e *Env, c normed) error, needs ...string) {
			cases = append(cases, Case{Name: fmt.Sprintf("%s/%s/%s", what, alg, name), Needs: append(needsOf(alg), needs...), Run: func(ctx context.Context, e *Env) error {
				return run(ctx, e, normed{algorithm: alg, dtype: tensor.BFloat16, tokens: 5, hidden: 72, scale: 0.25, epsilon: 1e-5})
			}})
		}
		add("values", normValues)
		add("same_bits", normSameBits)
		add("overtaken", normOvertaken)
		add("replay_100", normReplay, "graphs")
	}
	return append(cases, Case{Name: what + "/errors", Needs: needsOf(kernels.Auto), Run: normErrors})
}

// normed is one all-reduce with a norm.
type normed struct {
	algorithm      kernels.Algorithm
	dtype          tensor.DType
	tokens, hidden int64
	inPlace        bool // out is in, and the residual's is the residual
	noOut          bool // with a scale: fp8 only
	scale          float32
	scaleAt        bool // the scale is on the device, another one for each set
	bias, epsilon  float32
	first          uint32 // epoch
	random         bool   // values that are rounded, in place of small integers
}

// normTensors is its memory: each with poison around it.
type normTensors struct {
	normed
	e      *Env
	in     tensor.SymmetricTensor
	whole  *tensor.Tensor
	n      kernels.RMSNorm
	local  []region // what is not symmetric, without the poison
	closes []func() error
}

// normGuard is how many elements of poison there are in front of each and behind it: whole vectors in every dtype.
const normGuard = 16

func newNormTensors(ctx context.Context, e *Env, c normed) (*normTensors, error) {
	t := &normTensors{normed: c, e: e}
	var err error
	if t.whole, err = e.mapped(ctx, c.dtype, c.tokens*c.hidden+2*normGuard); err != nil {
		return nil, err
	}
	if t.in, err = t.whole.Sub(normGuard, c.tokens, c.hidden); err != nil {
		return nil, err
	}
	all := c.tokens * c.hidden
	take := func(name string, dtype tensor.DType, n int64) kernels.Local {
		bytes, guard := n*dtype.Bytes(), normGuard*dtype.Bytes()
		p, free, allocErr := private(e, bytes+2*guard)
		if allocErr != nil {
			err = errors.Join(err, allocErr)
			return kernels.Local{}
		}
		err = errors.Join(err, e.R.Device().CopyFromHost(p, poisoned(bytes+2*guard)))
		t.closes = append(t.closes, free)
		t.local = append(t.local, region{name, dtype, p.Add(guard), bytes})
		return kernels.Local{Ptr: p.Add(guard), DType: dtype, NumElements: n}
	}
	t.n = kernels.RMSNorm{Epsilon: c.epsilon, WeightBias: c.bias, Scale: c.scale}
	t.n.Weight = take("weight", c.dtype, c.hidden)
	t.n.Residual = take("residual", c.dtype, all)
	if !c.inPlace {
		t.n.ResidualOut = take("residual out", c.dtype, all)
		if !c.noOut {
			t.n.Out = take("out", c.dtype, all)
		}
	} else if !c.noOut {
		t.n.Out = kernels.LocalOf(t.in.Local())
	}
	if c.scale != 0 {
		t.n.Quantized = take("fp8", tensor.Uint8, all)
	}
	if c.scaleAt {
		t.n.Scale, t.n.ScaleAt = 0, take("scale", tensor.Float32, 1)
	}
	if err != nil {
		return nil, err
	}
	return t, t.writeWeight()
}

func (t *normTensors) Close(ctx context.Context) error {
	var err error
	for _, f := range t.closes {
		err = errors.Join(err, f())
	}
	return errors.Join(err, t.whole.Close(ctx))
}

// scaleOf is the scale of a set.
func (c normed) scaleOf(set int) float32 {
	if c.scaleAt {
		return c.scale * float32(1+set%5)
	}
	return c.scale
}

// weightRank is the rank whose inputs are the weights.
const weightRank = 1000

// at is one value: an input of a rank, or, for rank -1-r, the residual of rank r.
func (c normed) at(set, rank int, i int64) float64 {
	mix := uint64(i+1)*0x9e3779b97f4a7c15 + uint64(rank+77)*0xbf58476d1ce4e5b9 + uint64(set)*0x94d049bb133111eb
	mix ^= mix >> 31
	mix *= 0x94d049bb133111eb
	mix ^= mix >> 29
	switch {
	case c.random:
		return (float64(mix%(1<<20))/(1<<19) - 1) * math.Ldexp(1, int(mix>>40%9)-4)
	case rank == weightRank:
		return float64(mix%8)/4 - 1
	}
	return float64(mix%17) - 8
}

func (c normed) bytesOf(n int64, f func(i int64) float64) []byte {
	b := make([]byte, 0, n*c.dtype.Bytes())
	for i := range n {
		b = appendFloat(b, c.dtype, f(i))
	}
	return b
}

func (t *normTensors) writeWeight() error {
	return t.e.R.Device().CopyFromHost(t.n.Weight.Ptr, t.bytesOf(t.hidden, func(i int64) float64 { return t.at(0, weightRank, i) }))
}

// ins and outs are what changes from run to run.
func (t *normTensors) ins() []region {
	all := []region{{"in", t.dtype, t.in.Ptr(), t.in.Bytes()}, {"residual", t.dtype, t.n.Residual.Ptr, t.in.Bytes()}}
	if t.scaleAt {
		all = append(all, region{"scale", tensor.Float32, t.n.ScaleAt.Ptr, 4})
	}
	return all
}

func (t *normTensors) before(set int) [][]byte {
	rank, all := t.e.R.Rank(), t.tokens*t.hidden
	values := [][]byte{
		t.bytesOf(all, func(i int64) float64 { return t.at(set, rank, i) }),
		t.bytesOf(all, func(i int64) float64 { return t.at(set, -1-rank, i) }),
	}
	if t.scaleAt {
		values = append(values, appendFloat(nil, tensor.Float32, float64(t.scaleOf(set))))
	}
	return values
}

func (t *normTensors) outs() []region {
	to := t.n.ResidualOut
	if t.inPlace {
		to = t.n.Residual
	}
	all := []region{{"residual out", t.dtype, to.Ptr, t.in.Bytes()}}
	if !t.noOut {
		all = append(all, region{"out", t.dtype, t.n.Out.Ptr, t.in.Bytes()})
	}
	if t.scale != 0 {
		all = append(all, region{"fp8", tensor.Uint8, t.n.Quantized.Ptr, t.tokens * t.hidden})
	}
	return all
}

// after is what there is after a run with a set of small integers, whose sums and sums of squares are exact in whatever order.
func (t *normTensors) after(set int) [][]byte {
	var residual, out, fp8 []byte
	rank := t.e.R.Rank()
	weight := make([]float32, t.hidden)
	for i := range weight {
		weight[i] = t.bias + float32(t.at(0, weightRank, int64(i)))
	}
	x := make([]float32, t.hidden)
	for row := range t.tokens {
		var squares float32
		for i := range x {
			at := row*t.hidden + int64(i)
			v := t.at(set, -1-rank, at)
			for r := range t.e.R.WorldSize() {
				v += t.at(set, r, at)
			}
			x[i] = float32(v)
			squares += float32(x[i] * x[i])
			residual = appendFloat(residual, t.dtype, v)
		}
		scale := 1 / float32(math.Sqrt(float64(squares/float32(t.hidden)+t.epsilon)))
		for i, v := range x {
			out = appendFloat(out, t.dtype, float64(float32(float32(v*scale)*weight[i])))
			if t.scale != 0 {
				fp8 = append(fp8, nearestFP8(float32(floatAt(out, t.dtype, row*t.hidden+int64(i)))*(1/t.scaleOf(set))))
			}
		}
	}
	all := [][]byte{residual}
	if !t.noOut {
		all = append(all, out)
	}
	if t.scale != 0 {
		all = append(all, fp8)
	}
	return all
}

// nearestFP8 looks for the nearest of all e4m3 numbers, the even one of two.
func nearestFP8(x float32) byte {
	if x != x {
		return 0x7f
	}
	sign := byte(math.Float32bits(x) >> 24 & 0x80)
	best, off := byte(0), math.Inf(1)
	for b := range byte(0x7f) {
		v := math.Ldexp(float64(8+b%8), int(b>>3)-10)
		if b < 8 {
			v = math.Ldexp(float64(b), -9)
		}
		if d := math.Abs(min(math.Abs(float64(x)), 448) - v); d < off || d == off && b%2 == 0 {
			best, off = b, d
		}
	}
	return sign | best
}

func (t *normTensors) newPlan(ctx context.Context) (*kernels.Plan, error) {
	p, err := kernels.NewAllReduceRMSNorm(ctx, t.in, t.n, &kernels.Options{Algorithm: t.algorithm, FirstEpoch: t.first})
	if err == nil && t.algorithm != kernels.Auto && p.Algorithm() != t.algorithm {
		err = errors.Join(fmt.Errorf("%s was asked for and %s came", t.algorithm, p.Algorithm()), p.Close(ctx))
	}
	return p, err
}

// fill writes the values of a set, with poison around them and in the outputs.
func (t *normTensors) fill(set int) error {
	before := t.before(set)
	whole := poisoned(t.whole.Bytes())
	copy(whole[normGuard*t.dtype.Bytes():], before[0])
	err := writeBytes(t.whole.Local(), whole)
	for _, g := range t.outs() {
		if g.ptr != t.in.Ptr() {
			err = errors.Join(err, t.e.R.Device().CopyFromHost(g.ptr, poisoned(g.bytes)))
		}
	}
	if t.scaleAt {
		err = errors.Join(err, t.e.R.Device().CopyFromHost(t.n.ScaleAt.Ptr, before[2]))
	}
	return errors.Join(err, t.e.R.Device().CopyFromHost(t.n.Residual.Ptr, before[1]))
}

// check compares everything there is after one run with a set.
func (t *normTensors) check(set int) error {
	after := map[string][]byte{"residual": t.before(set)[1], "weight": t.bytesOf(t.hidden, func(i int64) float64 { return t.at(0, weightRank, i) })}
	if t.scaleAt {
		after["scale"] = t.before(set)[2]
	}
	in := t.before(set)[0]
	for i, g := range t.outs() {
		after[g.name] = t.after(set)[i]
		switch g.ptr {
		case t.in.Ptr():
			in = after[g.name]
		case t.n.Residual.Ptr:
			after["residual"] = after[g.name]
		}
	}
	want := poisoned(t.whole.Bytes())
	copy(want[normGuard*t.dtype.Bytes():], in)
	got, err := readBytes(t.whole.Local())
	if err != nil {
		return err
	}
	if err := sameBytes(t.dtype, got, want); err != nil {
		return fmt.Errorf("in, from element %d on: %w", normGuard, err)
	}
	for _, g := range t.local {
		guard := normGuard * g.dtype.Bytes()
		want, got := poisoned(g.bytes+2*guard), make([]byte, g.bytes+2*guard)
		copy(want[guard:], after[g.name])
		if err := t.e.R.Device().CopyToHost(got, g.ptr.Add(-guard)); err != nil {
			return err
		}
		if err := sameBytes(g.dtype, got, want); err != nil {
			return fmt.Errorf("%s, from element %d on: %w", g.name, normGuard, err)
		}
	}
	return nil
}

// normValues: every dtype, short and long rows, few and many, with all that may be left out and be in one place.
func normValues(ctx context.Context, e *Env, c normed) error {
	shapes := [][2]int64{{3, 40}, {1, 1032}, {17, 8}, {0, 64}}
	if !e.Short {
		shapes = append(shapes, [2]int64{2, 8192}, [2]int64{40, 136}, [2]int64{1, 8}, [2]int64{9, 2048})
	}
	for i, dtype := range []tensor.DType{tensor.BFloat16, tensor.Float16, tensor.Float32} {
		for j, shape := range shapes {
			if e.Short && (i+j)%3 != e.R.WorldSize()%3 {
				continue
			}
			c.dtype, c.tokens, c.hidden = dtype, shape[0], shape[1]
			c.inPlace, c.bias = (i+j)%2 == 0, float32(j%2)
			c.scale = []float32{0, 0.03, 0.5}[(i+2*j)%3]
			c.noOut = c.scale == 0.5
			c.scaleAt = c.scale != 0 && (i+j)%2 == 1
			t, err := newNormTensors(ctx, e, c)
			if err != nil {
				return err
			}
			if err := t.fill(j); err != nil {
				return err
			}
			p, err := t.newPlan(ctx)
			if err != nil {
				return err
			}
			e.Skew()
			if err := errors.Join(p.Run(e.S), e.S.Synchronize(ctx), t.check(j), p.Close(ctx), t.Close(ctx)); err != nil {
				return fmt.Errorf("%d rows of %d %s, in place %t, scale %v: %w", c.tokens, c.hidden, dtype, c.inPlace, c.scale, err)
			}
		}
	}
	return nil
}

// normSameBits: floats that are rounded have the bits of an all-reduce and a norm by itself, and a token has the same bits with other tokens
// and alone.
func normSameBits(ctx context.Context, e *Env, c normed) error {
	c.random = true
	for i, dtype := range []tensor.DType{tensor.BFloat16, tensor.Float16, tensor.Float32} {
		if e.Short && i != e.R.WorldSize()%3 {
			continue
		}
		c.dtype, c.tokens, c.hidden, c.bias = dtype, 7, []int64{1096, 72, 520}[i], float32(i%2)
		t, err := newNormTensors(ctx, e, c)
		if err != nil {
			return err
		}
		all, err := e.mapped(ctx, dtype, c.tokens, c.hidden)
		if err != nil {
			return err
		}
		if err := t.fill(0); err != nil {
			return err
		}
		read := func() (got [][]byte, err error) {
			for _, g := range t.outs() {
				b := make([]byte, g.bytes)
				err = errors.Join(err, e.R.Device().CopyToHost(b, g.ptr))
				got = append(got, b)
			}
			return got, err
		}
		sum, err := kernels.NewAllReduce(ctx, t.in, kernels.Sum, &kernels.AllReduceOptions{Out: all, Algorithm: kernels.Transfers})
		if err != nil {
			return err
		}
		behind, err := kernels.NewRMSNorm(ctx, all, t.n, nil)
		if err != nil {
			return err
		}
		if err := errors.Join(sum.Run(e.S), behind.Run(e.S), e.S.Synchronize(ctx)); err != nil {
			return err
		}
		want, err := read()
		if err != nil {
			return err
		}
		// All tokens, and then two parts of them.
		for _, part := range [][2]int64{{0, c.tokens}, {c.tokens - 1, c.tokens}, {1, 4}} {
			if err := errors.Join(t.fill(0), e.R.Barrier(ctx)); err != nil {
				return err
			}
			p, err := t.part(ctx, part[0], part[1])
			if err != nil {
				return err
			}
			if err := errors.Join(p.Run(e.S), e.S.Synchronize(ctx)); err != nil {
				return err
			}
			got, err := read()
			if err != nil {
				return err
			}
			for k, g := range t.outs() {
				row := c.hidden * g.dtype.Bytes()
				if err := sameBytes(g.dtype, got[k][part[0]*row:part[1]*row], want[k][part[0]*row:part[1]*row]); err != nil {
					return fmt.Errorf("rows %v of %d %s, %s: %w", part, c.hidden, dtype, g.name, err)
				}
			}
			if err := p.Close(ctx); err != nil {
				return err
			}
		}
		if err := closeAll(ctx, behind, sum, all, t); err != nil {
			return err
		}
	}
	return nil
}

// part is a plan for the rows from lo to hi.
func (t *normTensors) part(ctx context.Context, lo, hi int64) (*kernels.Plan, error) {
	in, err := t.in.Slice(lo, hi)
	if err != nil {
		return nil, err
	}
	n := t.n
	for _, l := range []*kernels.Local{&n.Residual, &n.ResidualOut, &n.Out, &n.Quantized} {
		if l.NumElements > 0 {
			l.Ptr, l.NumElements = l.Ptr.Add(lo*t.hidden*l.DType.Bytes()), (hi-lo)*t.hidden
		}
	}
	return kernels.NewAllReduceRMSNorm(ctx, in, n, &kernels.Options{Algorithm: t.algorithm})
}

func (t *normTensors) runs(p *kernels.Plan) *runs {
	return &runs{e: t.e, plan: p, ins: t.ins(), outs: t.outs(), before: t.before, after: t.after}
}

// normOvertaken queues runs with other values each, delayed and not, while counts go beyond the last number.
func normOvertaken(ctx context.Context, e *Env, c normed) error {
	for _, c.inPlace = range []bool{true, false} {
		c.first = 1<<32 - 3
		t, err := newNormTensors(ctx, e, c)
		if err != nil {
			return err
		}
		p, err := t.newPlan(ctx)
		if err != nil {
			return err
		}
		if err := errors.Join(t.runs(p).queued(ctx, 4, c.inPlace), p.Close(ctx), t.Close(ctx)); err != nil {
			return fmt.Errorf("in place %t: %w", c.inPlace, err)
		}
	}
	return nil
}

func normReplay(ctx context.Context, e *Env, c normed) error {
	c.inPlace, c.scaleAt = true, true // each replay reads the scale
	t, err := newNormTensors(ctx, e, c)
	if err != nil {
		return err
	}
	p, err := t.newPlan(ctx)
	if err != nil {
		return err
	}
	return errors.Join(t.runs(p).replay(ctx), p.Close(ctx), t.Close(ctx))
}

// normErrors: what is refused, on every rank alike, with the value and what is allowed; and it works afterwards.
func normErrors(ctx context.Context, e *Env) error {
	c := normed{dtype: tensor.BFloat16, tokens: 4, hidden: 64, scale: 0.5, epsilon: 1e-6}
	t, err := newNormTensors(ctx, e, c)
	if err != nil {
		return err
	}
	fresh, err := e.R.Zeros(ctx, tensor.BFloat16, 4, 64)
	if err != nil {
		return err
	}
	ints, err := e.mapped(ctx, tensor.Int32, 4, 64)
	if err != nil {
		return err
	}
	flat, err := t.whole.Sub(normGuard, 4*60, 1)
	if err != nil {
		return err
	}
	odd, err := t.whole.Sub(normGuard+1, 3, 64)
	if err != nil {
		return err
	}
	nothing, err := t.whole.Sub(normGuard, 4, 0)
	if err != nil {
		return err
	}
	scalar, err := t.whole.Sub(normGuard)
	if err != nil {
		return err
	}
	refused := func(in tensor.SymmetricTensor, n kernels.RMSNorm, opts *kernels.Options) error {
		var all error
		for _, make := range []func(context.Context, tensor.SymmetricTensor, kernels.RMSNorm, *kernels.Options) (*kernels.Plan, error){kernels.NewAllReduceRMSNorm, kernels.NewRMSNorm} {
			p, err := make(ctx, in, n, opts)
			if err == nil {
				return errors.Join(errors.New("no error"), p.Close(ctx))
			}
			all = err
		}
		return all
	}
	with := func(change func(n *kernels.RMSNorm)) error {
		n := t.n
		change(&n)
		return refused(t.in, n, nil)
	}
	one := func(n *kernels.RMSNorm) kernels.Local {
		return kernels.Local{Ptr: n.Weight.Ptr, DType: tensor.Float32, NumElements: 1}
	}
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	err = errors.Join(
		wantArgument("no input", refused(nil, t.n, nil), "in"),
		wantArgument("the zero Tensor", refused(&tensor.Tensor{}, t.n, nil)),
		wantError("no rendezvous", refused(fresh, t.n, nil), symmem.ErrNoRendezvous),
		wantError("a dtype without kernels", refused(ints, t.n, nil), symmem.ErrUnsupported, "i32"),
		wantArgument("rows of one element", refused(flat, t.n, nil), "multiples of 8"),
		wantArgument("rows of nothing", refused(nothing, t.n, nil), "in.Shape", "[4 0]"),
		wantArgument("a scalar", refused(scalar, t.n, nil), "in.Shape", "[]"),
		wantArgument("an odd address", refused(odd, t.n, nil), "16"),
		wantArgument("a negative bound", refused(t.in, t.n, &kernels.Options{MaxBlocks: -1}), "-1", "MaxBlocks"),
		wantArgument("a negative epsilon", with(func(n *kernels.RMSNorm) { n.Epsilon = -1e-6 }), "Epsilon", "-1e-06"),
		wantArgument("no number as epsilon", with(func(n *kernels.RMSNorm) { n.Epsilon = nan }), "Epsilon", "NaN"),
		wantArgument("an infinite epsilon", with(func(n *kernels.RMSNorm) { n.Epsilon = inf }), "Epsilon", "Inf"),
		wantArgument("no number as bias", with(func(n *kernels.RMSNorm) { n.WeightBias = nan }), "WeightBias"),
		wantArgument("no scale", with(func(n *kernels.RMSNorm) { n.Scale = 0 }), "Scale"),
		wantArgument("a scale whose reciprocal is infinite", with(func(n *kernels.RMSNorm) { n.Scale = 1e-40 }), "Scale"),
		wantArgument("no number as scale", with(func(n *kernels.RMSNorm) { n.Scale = nan }), "Scale"),
		wantArgument("a scale for nothing", with(func(n *kernels.RMSNorm) { n.Quantized = kernels.Local{} }), "Scale"),
		wantArgument("a scale on the device for nothing", with(func(n *kernels.RMSNorm) { n.Scale, n.Quantized, n.ScaleAt = 0, kernels.Local{}, one(n) }), "ScaleAt"),
		wantArgument("two scales", with(func(n *kernels.RMSNorm) { n.ScaleAt = one(n) }), "Scale", "0"),
		wantArgument("a scale of another dtype", with(func(n *kernels.RMSNorm) { n.Scale, n.ScaleAt = 0, one(n); n.ScaleAt.DType = tensor.Int32 }), "ScaleAt.DType", "f32"),
		wantArgument("two elements as scale", with(func(n *kernels.RMSNorm) { n.Scale, n.ScaleAt = 0, one(n); n.ScaleAt.NumElements = 2 }), "ScaleAt.NumElements", "1"),
		wantArgument("a scale at an odd address", with(func(n *kernels.RMSNorm) { n.Scale, n.ScaleAt = 0, one(n); n.ScaleAt.Ptr = n.ScaleAt.Ptr.Add(2) }), "ScaleAt.Ptr", "4"),
		wantArgument("a scale in what is written", with(func(n *kernels.RMSNorm) { n.Scale, n.ScaleAt = 0, one(n); n.ScaleAt.Ptr = n.Out.Ptr }), "apart", "ScaleAt"),
		wantArgument("no weights", with(func(n *kernels.RMSNorm) { n.Weight = kernels.Local{} }), "Weight", "64"),
		wantArgument("weights of another length", with(func(n *kernels.RMSNorm) { n.Weight.NumElements = 56 }), "Weight", "56", "64"),
		wantArgument("weights of another dtype", with(func(n *kernels.RMSNorm) { n.Weight.DType = tensor.Float16 }), "Weight.DType", "f16"),
		wantArgument("no residual", with(func(n *kernels.RMSNorm) { n.Residual = kernels.Local{} }), "Residual"),
		wantArgument("a shorter residual", with(func(n *kernels.RMSNorm) { n.Residual.NumElements -= 64 }), "Residual"),
		wantArgument("a residual at nil", with(func(n *kernels.RMSNorm) { n.Residual.Ptr = 0 }), "Residual.Ptr"),
		wantArgument("an output at an odd address", with(func(n *kernels.RMSNorm) { n.Out.Ptr = n.Out.Ptr.Add(2) }), "Out.Ptr", "16"),
		wantArgument("fp8 of another dtype", with(func(n *kernels.RMSNorm) { n.Quantized.DType = tensor.Int8 }), "Quantized.DType", "u8"),
		wantArgument("fp8 of another size", with(func(n *kernels.RMSNorm) { n.Quantized.NumElements *= 2 }), "Quantized"),
		wantArgument("an output over half of the input", with(func(n *kernels.RMSNorm) { n.Out = kernels.LocalOf(t.in.Local()); n.Out.Ptr = n.Out.Ptr.Add(16) }), "Out", "apart"),
		wantArgument("one output for two", with(func(n *kernels.RMSNorm) { n.Out = n.ResidualOut }), "Out", "apart"),
		wantArgument("the weights as output", with(func(n *kernels.RMSNorm) { n.Quantized.Ptr = n.Weight.Ptr }), "Quantized", "apart"),
	)
	if err != nil {
		return err
	}
	form := func(alg kernels.Algorithm) error {
		p, err := kernels.NewAllReduceRMSNorm(ctx, t.in, t.n, &kernels.Options{Algorithm: alg})
		if err == nil {
			err = errors.Join(errors.New("no error"), p.Close(ctx))
		}
		return err
	}
	err = errors.Join(
		wantArgument("an unknown form", form(99), "99", "auto", "transfers"),
		wantError("a form that it has not", form(kernels.TwoShotFlow), symmem.ErrUnsupported, "two_shot_flow", "transfers"),
	)
	if err != nil {
		return err
	}
	if w := e.R.WorldSize(); w > 1 {
		last := e.R.Rank() / (w - 1) // 1 on the last rank
		differ := with(func(n *kernels.RMSNorm) { n.Epsilon = []float32{1e-6, 1e-5}[min(last, 1)] })
		if err := namesAll(e, differ, "epsilon 1e-06", "epsilon 1e-05"); err != nil {
			return err
		}
		one := with(func(n *kernels.RMSNorm) {
			if last == 1 {
				n.Weight = kernels.Local{}
			}
		})
		if err := wantError("one rank's bad argument", one, symmem.ErrInvalid); err != nil {
			return err
		}
	}
	if err := t.fill(1); err != nil {
		return err
	}
	p, err := t.newPlan(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(p.Run(e.S), e.S.Synchronize(ctx), t.check(1), p.Close(ctx)); err != nil {
		return fmt.Errorf("after what was refused: %w", err)
	}
	if err := wantError("Run of a closed plan", p.Run(e.S), symmem.ErrClosed); err != nil {
		return err
	}
	if err := closeAll(ctx, ints, fresh, t); err != nil {
		return err
	}
	return wantError("a closed input", refused(t.in, t.n, nil), symmem.ErrClosed)
}
