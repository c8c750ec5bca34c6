package suite

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// sameBitsCases: every form that promises to combine in the order of the ranks gives the bits of that order, whatever the tensor is a part of, however
// it is split, with whatever else it is in a plan, in whatever form, and whoever is late.
func sameBitsCases(short bool) []Case {
	var cases []Case
	for _, dtype := range []tensor.DType{tensor.Float32, tensor.BFloat16, tensor.Float16, tensor.Float64} {
		for _, op := range []kernels.Op{kernels.Sum, kernels.Avg, kernels.Prod} {
			if op == kernels.Prod && dtype != tensor.Float32 || short && (op != kernels.Sum || dtype > tensor.Float32 || dtype == tensor.Float16) {
				continue
			}
			cases = append(cases, Case{Name: fmt.Sprintf("same_bits/%s/%s", dtype, op), Needs: needsOf(kernels.Auto), Run: func(ctx context.Context, e *Env) error {
				b := &bits{e: e, dtype: dtype, op: op}
				return b.run(ctx)
			}})
		}
	}
	return cases
}

// bits is one such case.
type bits struct {
	e       *Env
	dtype   tensor.DType
	op      kernels.Op
	n       int64
	in, out *tensor.Tensor
	values  [][]float64 // by rank
	want    []byte
}

// ordered is what the values give in the order of the ranks from 0 on, or in that from the last one on.
func (b *bits) ordered(backwards bool) []byte {
	var out []byte
	for i := range b.n {
		var column []float64
		for _, v := range b.values {
			column = append(column, v[i])
		}
		if backwards {
			slices.Reverse(column)
		}
		if b.dtype == tensor.Float64 {
			acc := column[0]
			for _, x := range column[1:] {
				if b.op == kernels.Prod {
					acc = float64(acc * x)
				} else {
					acc = float64(acc + x)
				}
			}
			if b.op == kernels.Avg {
				acc /= float64(len(column))
			}
			out = binary.LittleEndian.AppendUint64(out, math.Float64bits(acc))
			continue
		}
		acc := float32(column[0])
		for _, x := range column[1:] {
			if b.op == kernels.Prod {
				acc = float32(acc * float32(x))
			} else {
				acc = float32(acc + float32(x))
			}
		}
		if b.op == kernels.Avg {
			acc /= float32(len(column))
		}
		out = appendFloat(out, b.dtype, float64(acc))
	}
	return out
}

// exactly is the float64 of a dtype's value.
func exactly(dtype tensor.DType, x float64) float64 {
	switch dtype {
	case tensor.Float16:
		return float64(tensor.F16From(float32(x)).Float32())
	case tensor.BFloat16:
		return float64(tensor.BF16From(float32(x)).Float32())
	case tensor.Float32:
		return float64(float32(x))
	}
	return x
}

// statedOrderCase: a sum over islands has the bits of the order that is stated, that of an island's ranks, rounded, and then that of the islands; whatever the tensor is a part of, and however it
// is split.
func statedOrderCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	for _, dtype := range []tensor.DType{tensor.Float32, tensor.BFloat16} {
		b := &bits{e: e, dtype: dtype, op: kernels.Sum}
		b.fill()
		b.want = b.byIslands()
		// An island behind another one, or before it, may give the order of the ranks one way round, and never both.
		if want := string(b.want); e.R.WorldSize() > 2 && dtype == tensor.Float32 && want == string(b.ordered(true)) && want == string(b.ordered(false)) {
			return errors.New("the order does not show in these values")
		}
		if err := b.bring(ctx); err != nil {
			return err
		}
		opts := kernels.AllReduceOptions{Algorithm: alg}
		if err := errors.Join(b.whole(ctx, opts), b.split(ctx, opts), closeAll(ctx, b.out, b.in)); err != nil {
			return fmt.Errorf("%s: %w", dtype, err)
		}
	}
	return nil
}

// byIslands is what the values give in the order of the islands, of which each is rounded.
func (b *bits) byIslands() []byte {
	islands := b.e.R.Memory().Islands()
	var out []byte
	for i := range b.n {
		var all float32
		for first, of := range islands {
			if first != of {
				continue // not the lowest rank of one
			}
			var sum float32
			for r, v := range b.values {
				if islands[r] == first {
					sum += float32(v[i])
				}
			}
			all += float32(exactly(b.dtype, float64(sum)))
		}
		out = appendFloat(out, b.dtype, float64(all))
	}
	return out
}

// fill makes the values.
func (b *bits) fill() {
	if b.n = 1_037; !b.e.Short {
		b.n = 70_001
	}
	for r := range b.e.R.WorldSize() {
		random := rand.New(rand.NewPCG(uint64(r), uint64(b.dtype)))
		var v []float64
		for range b.n { // numbers of sizes that are far apart lose digits, other ones in another order
			v = append(v, exactly(b.dtype, (random.Float64()-0.5)*math.Ldexp(1, random.IntN(8))))
		}
		b.values = append(b.values, v)
	}
}

func (b *bits) run(ctx context.Context) (err error) {
	e := b.e
	w := e.R.WorldSize()
	b.fill()
	b.want = b.ordered(false)
	// Two give the same in both orders. 16-bit floats are summed up in 24 bits, which is enough for few.
	if w > 2 && b.dtype.Bytes() >= 4 && string(b.want) == string(b.ordered(true)) {
		return errors.New("the order of the ranks does not show in these values")
	}
	if err := b.bring(ctx); err != nil {
		return err
	}
	for _, alg := range append(kernels.Algorithms(e.R.Device().Kind()), kernels.Auto) {
		if !alg.RankOrder() || !e.R.Capabilities().PeerPointers && alg.NeedsPeerPointers() && alg != kernels.Auto {
			continue
		}
		opts := kernels.AllReduceOptions{Algorithm: alg, RankOrder: true}
		if alg == kernels.Auto || e.supported(alg, b.dtype, b.op) {
			err = errors.Join(b.whole(ctx, opts), b.split(ctx, opts))
		}
		if err = errors.Join(err, b.listed(ctx, alg), b.shared(ctx, alg)); err != nil {
			return fmt.Errorf("%s: %w", alg, err)
		}
	}
	return closeAll(ctx, b.out, b.in)
}

// bring makes the tensors, and writes the values.
func (b *bits) bring(ctx context.Context) (err error) {
	e := b.e
	if b.in, err = e.mapped(ctx, b.dtype, b.n+20); err != nil {
		return err
	}
	if b.out, err = e.mapped(ctx, b.dtype, b.n+20); err != nil {
		return err
	}
	mine := make([]byte, 0, b.in.Bytes())
	for range 7 { // so that nothing is aligned
		mine = appendFloat(mine, b.dtype, 1)
	}
	for _, x := range b.values[e.R.Rank()] {
		mine = appendFloat(mine, b.dtype, x)
	}
	for range 13 {
		mine = appendFloat(mine, b.dtype, 1)
	}
	return writeBytes(b.in.Local(), mine)
}

// ran runs plans, this rank late or not, and compares elements of the output with what they have to be: out, from `at` of the values on.
func (b *bits) ran(ctx context.Context, what string, out tensor.SymmetricTensor, at int64, plans ...*kernels.Plan) error {
	width := b.dtype.Bytes()
	runs := 2
	if b.e.Short {
		runs = 1
	}
	for i := range runs {
		if err := errors.Join(writeBytes(b.out.Local(), poisoned(b.out.Bytes())), b.e.R.Barrier(ctx)); err != nil {
			return err
		}
		if (i+b.e.R.Rank())%2 == 1 {
			time.Sleep(200 * time.Microsecond)
		}
		for _, p := range plans {
			if err := p.Run(b.e.S); err != nil {
				return err
			}
		}
		if err := b.e.S.Synchronize(ctx); err != nil {
			return err
		}
		if out.NumElements() > 0 {
			got, err := readBytes(out.Local())
			if err != nil {
				return err
			}
			if err := sameBytes(b.dtype, got, b.want[at*width:at*width+out.Bytes()]); err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
		}
		if err := b.e.R.Barrier(ctx); err != nil {
			return err
		}
	}
	var err error
	for _, p := range plans {
		err = errors.Join(err, p.Close(ctx))
	}
	return err
}

// parts are the values between two elements, in the input and in the output, where they lie otherwise.
func (b *bits) parts(from, to int64) (in, out tensor.SymmetricTensor, err error) {
	if in, err = b.in.Sub(7+from, to-from); err != nil {
		return nil, nil, err
	}
	out, err = b.out.Sub(4+from, to-from)
	return in, out, err
}

// cuts are where the values are split, at places that mean nothing to any form.
func (b *bits) cuts() []int64 { return []int64{0, 1, b.n / 3, b.n/3 + 130, b.n} }

// whole: the tensor alone, and as a part of a larger one.
func (b *bits) whole(ctx context.Context, opts kernels.AllReduceOptions) error {
	in, out, err := b.parts(0, b.n)
	if err != nil {
		return err
	}
	opts.Out = out
	p, err := kernels.NewAllReduce(ctx, in, b.op, &opts)
	if err != nil {
		return err
	}
	if err := b.ran(ctx, "the tensor", out, 0, p); err != nil {
		return err
	}
	opts.Out = b.out
	larger, err := kernels.NewAllReduce(ctx, b.in, b.op, &opts)
	if err != nil {
		return err
	}
	if out, err = b.out.Sub(7, b.n); err != nil {
		return err
	}
	return b.ran(ctx, "a part of a larger tensor", out, 0, larger)
}

// split: in pieces.
func (b *bits) split(ctx context.Context, opts kernels.AllReduceOptions) error {
	var plans []*kernels.Plan
	cuts := b.cuts()
	for i, from := range cuts[:len(cuts)-1] {
		in, out, err := b.parts(from, cuts[i+1])
		if err != nil {
			return err
		}
		opts.Out = out
		p, err := kernels.NewAllReduce(ctx, in, b.op, &opts)
		if err != nil {
			return err
		}
		plans = append(plans, p)
	}
	_, out, err := b.parts(0, b.n)
	if err != nil {
		return err
	}
	return b.ran(ctx, "the tensor in pieces", out, 0, plans...)
}

// listed: the pieces in one plan of many, where there is the form.
func (b *bits) listed(ctx context.Context, alg kernels.Algorithm) error {
	float := b.dtype != tensor.Float64
	switch alg {
	case kernels.Auto, kernels.OneShot, kernels.TwoShot, kernels.TwoShotPull, kernels.Transfers:
	case kernels.OneShotPush:
		if !float {
			return nil
		}
	case kernels.OneShotLL:
		if float {
			return nil
		}
	default:
		return nil
	}
	if err := b.listedWhole(ctx, alg); err != nil {
		return err
	}
	var pairs []kernels.Pair
	cuts := b.cuts()
	for i, from := range cuts[:len(cuts)-1] {
		in, out, err := b.parts(from, cuts[i+1])
		if err != nil {
			return err
		}
		pairs = append(pairs, kernels.Pair{In: in, Out: out})
	}
	slices.Reverse(pairs)
	p, err := kernels.NewAllReduceMany(ctx, pairs, b.op, &kernels.Options{Algorithm: alg})
	if err != nil {
		return err
	}
	_, out, err := b.parts(0, b.n)
	if err != nil {
		return err
	}
	return b.ran(ctx, "the pieces in one plan", out, 0, p)
}

// listedWhole: pieces in one plan of many that are whole vectors of 16 bytes, for which there may be another kernel.
func (b *bits) listedWhole(ctx context.Context, alg kernels.Algorithm) error {
	const unit = 8          // elements, which are such in every dtype here
	from := int64(unit - 7) // of the values, which begin 7 elements into the input
	pieces := (b.n - from) / unit
	var pairs []kernels.Pair
	for _, cut := range [][2]int64{{pieces / 2, pieces}, {0, 1}, {1, pieces / 2}} {
		n := (cut[1] - cut[0]) * unit
		in, err := b.in.Sub(unit+cut[0]*unit, n)
		if err != nil {
			return err
		}
		out, err := b.out.Sub(cut[0]*unit, n)
		if err != nil {
			return err
		}
		pairs = append(pairs, kernels.Pair{In: in, Out: out})
	}
	p, err := kernels.NewAllReduceMany(ctx, pairs, b.op, &kernels.Options{Algorithm: alg})
	if err != nil {
		return err
	}
	out, err := b.out.Sub(0, pieces*unit)
	if err != nil {
		return err
	}
	return b.ran(ctx, "whole vectors in one plan", out, from, p)
}

// shared: a reduction whose result one rank has, or each a share of it.
func (b *bits) shared(ctx context.Context, alg kernels.Algorithm) error {
	switch alg {
	case kernels.Auto, kernels.OneShot, kernels.OneShotPull, kernels.Transfers:
	default:
		return nil
	}
	w, rank := int64(b.e.R.WorldSize()), int64(b.e.R.Rank())
	opts := &kernels.Options{Algorithm: alg, RankOrder: true}
	in, out, err := b.parts(0, b.n)
	if err != nil {
		return err
	}
	root := int(w - 1)
	p, err := kernels.NewReduce(ctx, in, out, b.op, root, opts)
	if err != nil {
		return err
	}
	seen := out
	if b.e.R.Rank() != root {
		if seen, err = out.Sub(0, 0); err != nil {
			return err
		}
	}
	if err := b.ran(ctx, "a reduce", seen, 0, p); err != nil {
		return err
	}
	each := (b.n + w - 1) / w
	share, err := b.out.Sub(3, each)
	if err != nil {
		return err
	}
	if p, err = kernels.NewReduceScatter(ctx, in, share, b.op, opts); err != nil {
		return err
	}
	from := min(rank*each, b.n)
	if share, err = share.Sub(0, min(each, b.n-from)); err != nil {
		return err
	}
	return b.ran(ctx, "a reduce-scatter", share, from, p)
}
