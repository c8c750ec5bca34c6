package suite

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// quantizedCases: the all-reduce of int8 blocks.
func quantizedCases() []Case {
	var cases []Case
	add := func(name string, run func(ctx context.Context, e *Env) error, needs ...string) {
		cases = append(cases, Case{Name: "all_reduce/quantized_int8/" + name, Needs: append([]string{"transfers"}, needs...), Run: run})
	}
	add("values", quantizedValues)
	add("overtaken", quantizedOvertaken)
	add("replay_100", quantizedReplay, "graphs")
	add("errors", quantizedErrors)
	return cases
}

// quantized is one such all-reduce. Blocks of its input are of all kinds, in turn.
type quantized struct {
	dtype tensor.DType
	op    kernels.Op
	n     int64
}

// at is a rank's element i: 0; numbers of one size; one large among small ones; the least there are; and, in sets below 0, what is no
// number.
func (q quantized) at(set, rank int, i int64) float64 {
	mix := uint64(i+1)*0x9e3779b97f4a7c15 + uint64(rank+3)*0xbf58476d1ce4e5b9 + uint64(set+9)*0x94d049bb133111eb
	mix ^= mix >> 31
	mix *= 0xbf58476d1ce4e5b9
	mix ^= mix >> 30
	x := float64(mix%(1<<21))/(1<<20) - 1
	switch i / 64 % 6 {
	case 0:
		return 0
	case 1:
		return 100 * x
	case 2:
		if i%64 == int64(mix%64) {
			return 30000 * x
		}
		return x
	case 3:
		return math.Ldexp(x, map[tensor.DType]int{tensor.Float16: -20, tensor.BFloat16: -128, tensor.Float32: -140}[q.dtype])
	case 4:
		if set < 0 && rank == 0 && i%64 == 5 {
			return []float64{math.NaN(), math.Inf(1), math.Inf(-1)}[i/384%3]
		}
	}
	return x
}

func (q quantized) bytesOf(set, rank int) []byte {
	b := make([]byte, 0, q.n*q.dtype.Bytes())
	for i := range q.n {
		b = appendFloat(b, q.dtype, q.at(set, rank, i))
	}
	return b
}

// rounded is what a block is once it was sent.
func rounded(x []float32) {
	most := 0.0
	for _, v := range x {
		most = max(most, math.Abs(float64(v)))
	}
	scale := max(float32(most)/127, 0x1p-126)
	for i, v := range x {
		if x[i] = float32(math.NaN()); most <= math.MaxFloat32 {
			x[i] = float32(int(math.RoundToEven(float64(float32(v*(1/scale)))))) * scale
		}
	}
}

// after is the right result, and bound how far an element may be from the exact one: as QuantizedBytes says it.
func (q quantized) after(set, world int) (b []byte, exact, bound []float64) {
	for lo := int64(0); lo < q.n; lo += 64 {
		hi := min(lo+64, q.n)
		sum, right := make([]float32, hi-lo), make([]float64, hi-lo)
		most := 0.0
		for r := range world {
			x := make([]float32, hi-lo)
			magnitude := 0.0
			for i := range x {
				v := floatAt(appendFloat(nil, q.dtype, q.at(set, r, lo+int64(i))), q.dtype, 0)
				x[i], right[i], magnitude = float32(v), right[i]+v, max(magnitude, math.Abs(v))
			}
			most += magnitude
			if world > 1 {
				rounded(x)
			}
			for i, v := range x {
				if r == 0 {
					sum[i] = v
				} else {
					sum[i] += v
				}
			}
		}
		allowed := most/126 + float64(world)*0x1p-126
		if q.op == kernels.Avg {
			for i := range sum {
				sum[i] /= float32(world)
				right[i] /= float64(world)
			}
			allowed /= float64(world)
		}
		if world > 1 {
			rounded(sum)
		} else {
			allowed = 0
		}
		for i, v := range sum {
			b = appendFloat(b, q.dtype, float64(v))
			// Rounding to the dtype: half of the last bit of what is rounded.
			bits := map[tensor.DType]int{tensor.Float16: 11, tensor.BFloat16: 8, tensor.Float32: 24}[q.dtype]
			last := map[tensor.DType]int{tensor.Float16: -25, tensor.BFloat16: -134, tensor.Float32: -150}[q.dtype]
			exact, bound = append(exact, right[i]), append(bound, allowed+max(math.Abs(float64(v))*math.Ldexp(1, -bits), math.Ldexp(1, last)))
		}
	}
	return b, exact, bound
}

// canonical makes every NaN the same: which one it is nobody promises.
func canonical(dtype tensor.DType, b []byte) []byte {
	var out []byte
	for i := range int64(len(b)) / dtype.Bytes() {
		out = appendFloat(out, dtype, floatAt(b, dtype, i)+0)
		if x := floatAt(b, dtype, i); x == 0 {
			copy(out[i*dtype.Bytes():], b[i*dtype.Bytes():(i+1)*dtype.Bytes()])
		} else if x != x {
			copy(out[i*dtype.Bytes():], appendFloat(nil, dtype, math.NaN()))
		}
	}
	return out
}

// quantizedValues: results have the bits that are promised on every rank, and are as near as is promised, for every count and place.
func quantizedValues(ctx context.Context, e *Env) error {
	w := e.R.WorldSize()
	counts := []int64{0, 1, 63, 65, 130, 1153}
	if !e.Short {
		counts = append(counts, 64, 127, 128, 129, 640, 20_001, 64*384)
	}
	for i, dtype := range []tensor.DType{tensor.BFloat16, tensor.Float16, tensor.Float32} {
		for j, n := range counts {
			if e.Short && n != 1153 && (i+j)%3 > 0 {
				continue
			}
			q := quantized{dtype: dtype, op: []kernels.Op{kernels.Sum, kernels.Avg}[(i+j)%2], n: n}
			set := j - len(counts)/2
			t, err := newGuardedAt(ctx, e, dtype, n, []int64{guardElements, 16}[j%2])
			if err != nil {
				return err
			}
			out := t
			opts := &kernels.AllReduceOptions{Algorithm: kernels.QuantizedInt8}
			if (i+j)%2 == 0 {
				if out, err = newGuardedAt(ctx, e, dtype, n, []int64{16, 3}[j/2%2]); err != nil {
					return err
				}
				opts.Out = out
			}
			mine := q.bytesOf(set, e.R.Rank())
			if err := errors.Join(writeBytes(t.Local(), mine), e.R.Barrier(ctx)); err != nil {
				return err
			}
			p, err := kernels.NewAllReduce(ctx, t, q.op, opts)
			if err != nil {
				return err
			}
			e.Skew()
			if err := errors.Join(p.Run(e.S), e.S.Synchronize(ctx)); err != nil {
				return err
			}
			got, err := readBytes(out.Local())
			if err != nil {
				return err
			}
			want, exact, bound := q.after(set, w)
			where := fmt.Sprintf("%s of %d %s", q.op, n, dtype)
			if err := errors.Join(sameEverywhere(ctx, e, got), sameBytes(dtype, canonical(dtype, got), canonical(dtype, want)), t.bands(), out.bands()); err != nil {
				return fmt.Errorf("%s: %w", where, err)
			}
			for k := range exact {
				if have := floatAt(got, dtype, int64(k)); !math.IsNaN(have) && !math.IsInf(have, 0) && !(math.Abs(have-exact[k]) <= bound[k]) {
					return fmt.Errorf("%s: element %d is %v, %v away from %v; allowed are %v", where, k, have, math.Abs(have-exact[k]), exact[k], bound[k])
				}
			}
			if out != t {
				still, err := readBytes(t.Local())
				if err := errors.Join(err, sameBytes(dtype, still, mine), out.Close(ctx)); err != nil {
					return fmt.Errorf("%s: the input: %w", where, err)
				}
			}
			if err := closeAll(ctx, p, t); err != nil {
				return err
			}
		}
	}
	return nil
}

// onQuantized runs f with a plan of one in place, and its values.
func onQuantized(ctx context.Context, e *Env, q quantized, f func(r *runs) error) error {
	t, err := e.mapped(ctx, q.dtype, q.n)
	if err != nil {
		return err
	}
	p, err := kernels.NewAllReduce(ctx, t, q.op, &kernels.AllReduceOptions{Algorithm: kernels.QuantizedInt8, FirstEpoch: 1<<32 - 3})
	if err != nil {
		return err
	}
	all := []region{{"all-reduce", q.dtype, t.Ptr(), t.Bytes()}}
	r := &runs{e: e, plan: p, ins: all, outs: all,
		before: func(set int) [][]byte { return [][]byte{q.bytesOf(set, e.R.Rank())} },
		after: func(set int) [][]byte {
			b, _, _ := q.after(set, e.R.WorldSize())
			return [][]byte{b}
		}}
	return errors.Join(f(r), p.Close(ctx), t.Close(ctx))
}

func quantizedOvertaken(ctx context.Context, e *Env) error {
	for _, held := range []bool{false, true} {
		err := onQuantized(ctx, e, quantized{tensor.BFloat16, kernels.Sum, 1601}, func(r *runs) error { return r.queued(ctx, 4, held) })
		if err != nil {
			return err
		}
	}
	return nil
}

func quantizedReplay(ctx context.Context, e *Env) error {
	return onQuantized(ctx, e, quantized{tensor.Float32, kernels.Avg, 999}, func(r *runs) error { return r.replay(ctx) })
}

// quantizedErrors: there is none for other dtypes and operations, and nothing but the caller chooses it.
func quantizedErrors(ctx context.Context, e *Env) error {
	for _, c := range []struct {
		dtype tensor.DType
		op    kernels.Op
	}{{tensor.Int8, kernels.Sum}, {tensor.Float64, kernels.Sum}, {tensor.Float32, kernels.Max}, {tensor.BFloat16, kernels.Prod}} {
		t, err := e.mapped(ctx, c.dtype, 64)
		if err != nil {
			return err
		}
		p, err := kernels.NewAllReduce(ctx, t, c.op, &kernels.AllReduceOptions{Algorithm: kernels.QuantizedInt8})
		if err == nil {
			err = errors.Join(errors.New("no error"), p.Close(ctx))
		}
		if err := errors.Join(wantError("a lossy "+c.op.String(), err, symmem.ErrUnsupported, "quantized_int8"), t.Close(ctx)); err != nil {
			return err
		}
	}
	for _, alg := range kernels.Algorithms(e.R.Device().Kind()) {
		if alg == kernels.QuantizedInt8 {
			return errors.New("it is among the forms that give the same bits")
		}
	}
	return nil
}
