package kernels

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// floats is n elements of a rank: of all sizes.
func floats(dtype tensor.DType, n int64, seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 5))
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(r.NormFloat64()) * float32(int(1)<<r.IntN(6))
	}
	b := make([]byte, n*dtype.Bytes())
	_, store := float32Of(dtype)
	store(b, x)
	return b
}

// sumOf is what an all-reduce gives.
func sumOf(dtype tensor.DType, size int, n int64) []byte {
	var ins [][]byte
	for r := range size {
		ins = append(ins, floats(dtype, n, uint64(r)))
	}
	sum := make([]byte, n*dtype.Bytes())
	newReducer(dtype, Sum, size)(sum, ins, 0, n)
	return sum
}

// TestRMSNormOnCUDA runs the kernels of all forms as their plans launch them, on simulated devices: they give the bits of the host.
func TestRMSNormOnCUDA(t *testing.T) {
	smallLimits(t)
	for _, size := range []int{1, 2, 3, ptx.Inline + 1} {
		for i, algorithm := range []Algorithm{OneShotPush, TwoShotPush, TwoShotPull, Transfers, Auto} {
			if size%2 == 1 && size < ptx.Inline && (i+size)%4 != 0 {
				continue // one of each is enough
			}
			dtype := []tensor.DType{tensor.BFloat16, tensor.Float32, tensor.Float16}[(i+size)%3]
			rows, columns := int64(3), []int64{64, 520}[i%2]
			t.Run(fmt.Sprintf("size=%d/%s/%s", size, algorithm, dtype), func(t *testing.T) {
				onSimulated(t, size, func(ctx context.Context, dev *simDevice, m *memory.Memory) error {
					return normOnCUDA(ctx, dev, m, algorithm, dtype, rows, columns, 0)
				})
			})
		}
	}
}

// TestRMSNormBlocks: a table or a bound may leave fewer blocks than there are rows, as the device does (8 here), and each then has several rows.
func TestRMSNormBlocks(t *testing.T) {
	smallLimits(t)
	const rows = 9
	for _, c := range []struct {
		size, blocks, bound int
		form                string
		want                uint32
	}{{2, 0, 0, "one_shot_push", 8}, {2, 16, 0, "one_shot_push", 8}, {2, 2, 0, "one_shot_push", 2}, {3, 0, 2, "one_shot_push", 2}, {2, 4, 1, "two_shot_push", 1}, {3, 2, 8, "two_shot_push", 2}} {
		t.Run(fmt.Sprintf("%s/size=%d/blocks=%d/bound=%d", c.form, c.size, c.blocks, c.bound), func(t *testing.T) {
			onSimulated(t, c.size, func(ctx context.Context, dev *simDevice, m *memory.Memory) error {
				m.SetTuning(&tuning.Set{Tables: []*tuning.Table{{Rules: []tuning.Rule{{
					Collective: tuning.AllReduceRMSNorm, Ranks: c.size, Steps: []tuning.Step{{Form: c.form, Blocks: c.blocks}},
				}}}}})
				before := len(dev.launches)
				err := normOnCUDA(ctx, dev, m, Auto, tensor.BFloat16, rows, 520, c.bound)
				for _, l := range dev.launches[before:] {
					if l.grid != c.want {
						err = errors.Join(err, fmt.Errorf("%s in %d blocks", l.name, l.grid))
					}
				}
				return err
			})
		})
	}
}

// TestRMSNormClusters: a cluster of blocks has each of few rows where there are blocks for all of them, as the device has for one (8 here), and else a block has each. Both give the bits of the host.
func TestRMSNormClusters(t *testing.T) {
	smallLimits(t)
	for _, c := range []struct {
		size          int
		rows, columns int64
		dtype         tensor.DType
		algorithm     Algorithm
		bound         int
		capability    int
		blocks        uint32
		clusters      bool
	}{
		{2, 1, 4096, tensor.BFloat16, Auto, 0, 90, 8, true}, {2, 1, 1032, tensor.Float16, OneShotPush, 8, 90, 8, true}, {2, 1, 5000, tensor.Float32, OneShotPush, 0, 100, 8, true},
		{2, 2, 4096, tensor.BFloat16, OneShotPush, 0, 90, 2, false}, // there is room for one only
		{4, 1, 4096, tensor.BFloat16, OneShotPush, 0, 90, 1, false}, // and here half of it, since more ranks share it
		{2, 1, 1024, tensor.BFloat16, OneShotPush, 0, 90, 1, false}, // shorter than so many threads
		{2, 1, 4096, tensor.BFloat16, OneShotPush, 7, 90, 1, false}, {2, 1, 4096, tensor.BFloat16, OneShotPush, 0, 80, 1, false},
		{3, 1, 4096, tensor.BFloat16, OneShotPush, 0, 90, 1, false}, {2, 1, 4096, tensor.BFloat16, TwoShotPush, 0, 90, 1, false},
	} {
		for _, none := range []bool{false, true} { // it runs none
			if none {
				c.blocks, c.clusters = uint32(c.rows), false
			}
			t.Run(fmt.Sprintf("size=%d/%dx%d/%s/bound=%d/%d/none=%t", c.size, c.rows, c.columns, c.algorithm, c.bound, c.capability, none), func(t *testing.T) {
				onSimulated(t, c.size, func(ctx context.Context, dev *simDevice, m *memory.Memory) error {
					dev.capability, dev.noClusters = c.capability, none
					before := len(dev.launches)
					err := normOnCUDA(ctx, dev, m, c.algorithm, c.dtype, c.rows, c.columns, c.bound)
					for _, l := range dev.launches[before:] {
						if l.grid != c.blocks || strings.Contains(l.name, "_cluster_") != c.clusters {
							err = errors.Join(err, fmt.Errorf("%s in %d blocks", l.name, l.grid))
						}
					}
					return err
				})
			})
		}
	}
	for size, most := range map[int]int64{2: 8, 4: 16, 8: 16} {
		assert.Equal(t, most, clusterRows(size))
	}
}

func normOnCUDA(ctx context.Context, dev *simDevice, m *memory.Memory, algorithm Algorithm, dtype tensor.DType, rows, columns int64, bound int) error {
	rank, size, all := m.Group().Rank(), m.Group().Size(), rows*columns
	in, err := tensor.Zeros(ctx, m, dtype, rows, columns)
	if err != nil {
		return err
	}
	if err := in.Rendezvous(ctx); err != nil {
		return err
	}
	local := func(dtype tensor.DType, n int64, b []byte) Local {
		p, allocErr := dev.Alloc(n * dtype.Bytes())
		err = errors.Join(err, allocErr)
		if allocErr == nil && b != nil {
			err = errors.Join(err, dev.CopyFromHost(p, b))
		}
		return Local{p, dtype, n}
	}
	residual, weight := floats(dtype, all, uint64(100+rank)), floats(dtype, columns, 1000)
	n := RMSNorm{Residual: local(dtype, all, residual), ResidualOut: local(dtype, all, nil), Weight: local(dtype, columns, weight), WeightBias: 0.5, Epsilon: 1e-5,
		Out: local(dtype, all, nil), Quantized: local(tensor.Uint8, all, nil), Scale: 0.1}
	scale := n.Scale
	if size%2 == 0 {
		b := make([]byte, 4)
		binary.LittleEndian.PutUint32(b, math.Float32bits(scale))
		n.Scale, n.ScaleAt = 0, local(tensor.Float32, 1, b)
	}
	if err != nil {
		return err
	}
	plan, err := NewAllReduceRMSNorm(ctx, in, n, &Options{Algorithm: algorithm, FirstEpoch: 1<<32 - 2, MaxBlocks: bound})
	if err != nil {
		return err
	}
	s, err := dev.NewStream()
	if err != nil {
		return err
	}
	want := hostRows{
		rowBytes: columns * dtype.Bytes(), residual: residual, residualOut: make([]byte, all*dtype.Bytes()), weight: weight, out: make([]byte, all*dtype.Bytes()), quantized: make([]byte, all),
		epsilon: n.Epsilon, bias: n.WeightBias, inverse: 1 / scale, x: make([]float32, columns), y: make([]float32, columns), weights: make([]float32, columns),
		row: make([]byte, columns*dtype.Bytes()), lanes: make([]float32, normThreads(columns*dtype.Bytes())), perLine: int(16 / dtype.Bytes()),
	}
	want.load, want.store = float32Of(dtype)
	want.all(sumOf(dtype, size, all))
	for run := range 3 {
		err := errors.Join(dev.CopyFromHost(in.Ptr(), floats(dtype, all, uint64(rank))), m.Group().Barrier(ctx, "filled"), plan.Run(s), s.Synchronize(ctx), m.Group().Barrier(ctx, "ended"))
		if err != nil {
			return err
		}
		for _, o := range []struct {
			name string
			l    Local
			want []byte
		}{{"residual", n.ResidualOut, want.residualOut}, {"out", n.Out, want.out}, {"fp8", n.Quantized, want.quantized}} {
			got := make([]byte, len(o.want))
			if err := dev.CopyToHost(got, o.l.Ptr); err != nil {
				return err
			}
			if !bytes.Equal(got, o.want) {
				return fmt.Errorf("rank %d, run %d: %s is % x, not % x", rank, run, o.name, got[:16], o.want[:16])
			}
		}
	}
	err = errors.Join(plan.Close(ctx), s.Close(), in.Close(ctx))
	for _, l := range []Local{n.Residual, n.ResidualOut, n.Weight, n.Out, n.Quantized, n.ScaleAt} {
		if l.none() {
			continue
		}
		err = errors.Join(err, dev.Free(l.Ptr))
	}
	return err
}

// quantizedWant is the all-reduce of floats in blocks.
func quantizedWant(dtype tensor.DType, size int, n int64) []byte {
	load, store := float32Of(dtype)
	out := make([]byte, n*dtype.Bytes())
	width := dtype.Bytes()
	for lo := int64(0); lo < n; lo += ptx.QuantizedBlock {
		hi := min(lo+ptx.QuantizedBlock, n)
		var sum, x [ptx.QuantizedBlock]float32
		var sent [ptx.QuantizedBlock]byte
		for r := range size {
			x = [ptx.QuantizedBlock]float32{}
			load(x[:hi-lo], floats(dtype, n, uint64(r))[lo*width:hi*width])
			dequantizeBlock(&x, &sent, quantizeBlock(&sent, &x))
			for i := range sum {
				sum[i] += x[i]
			}
		}
		dequantizeBlock(&sum, &sent, quantizeBlock(&sent, &sum))
		store(out[lo*width:hi*width], sum[:hi-lo])
	}
	return out
}

// TestQuantizedOnCUDA runs the kernels of the lossy all-reduce as their plans launch them, on simulated devices, with pointers and by transfers:
// they give the bits of the host.
func TestQuantizedOnCUDA(t *testing.T) {
	for _, size := range []int{2, 3, ptx.Inline + 1} {
		for i, far := range []bool{false, true} {
			dtype := []tensor.DType{tensor.BFloat16, tensor.Float32, tensor.Float16}[(i+size)%3]
			for _, n := range []int64{1, 64*7 + 3} {
				t.Run(fmt.Sprintf("size=%d/far=%t/%s/%d", size, far, dtype, n), func(t *testing.T) {
					onSimulated(t, size, func(ctx context.Context, dev *simDevice, m *memory.Memory) error {
						return quantizedOnCUDA(ctx, dev, m, far, dtype, n)
					})
				})
			}
		}
	}
}

func quantizedOnCUDA(ctx context.Context, dev *simDevice, m *memory.Memory, far bool, dtype tensor.DType, n int64) error {
	x, err := tensor.Zeros(ctx, m, dtype, n)
	if err != nil {
		return err
	}
	if err := x.Rendezvous(ctx); err != nil {
		return err
	}
	a := &allReduce{in: x, out: x, op: Sum, algorithm: QuantizedInt8, opts: &AllReduceOptions{}, inPlace: true}
	spec := a.spec()
	if far {
		a.newQuantizedForm().byTransfers(&spec)
		spec.CUDA = nil
	}
	plan, err := collective.New(ctx, m, spec)
	if err != nil {
		return err
	}
	s, err := dev.NewStream()
	if err != nil {
		return err
	}
	for run := range 3 {
		got := make([]byte, x.Bytes())
		err := errors.Join(dev.CopyFromHost(x.Ptr(), floats(dtype, n, uint64(m.Group().Rank()))), m.Group().Barrier(ctx, "filled"), plan.Run(s), s.Synchronize(ctx), dev.CopyToHost(got, x.Ptr()),
			m.Group().Barrier(ctx, "ended"))
		if err != nil {
			return err
		}
		if want := quantizedWant(dtype, m.Group().Size(), n); !bytes.Equal(got, want) {
			return fmt.Errorf("rank %d, run %d: % x, not % x", m.Group().Rank(), run, got[:min(16, len(got))], want[:min(16, len(want))])
		}
	}
	return errors.Join(plan.Close(ctx), s.Close(), x.Close(ctx))
}

// TestRMSNormChoice: small messages go one-shot, larger ones by loads, the largest by copies; nothing goes to who is alone.
func TestRMSNormChoice(t *testing.T) {
	onSimulated(t, 2, func(ctx context.Context, _ *simDevice, m *memory.Memory) error {
		want := []Algorithm{OneShotPush, OneShotPush, TwoShotPull, Transfers}
		for i, rows := range []int64{1, 384, 512, 12289} {
			in, err := tensor.Zeros(ctx, m, tensor.BFloat16, rows, 8192)
			if err != nil {
				return err
			}
			n := newNorm("NewAllReduceRMSNorm", in, RMSNorm{Weight: Local{NumElements: 8192}}, nil)
			if err := in.Rendezvous(ctx); err != nil {
				return err
			}
			n.fill()
			if got := n.chosen(Auto, device.CUDA); got != want[i] {
				return fmt.Errorf("%d rows go by %s, not %s", rows, got, want[i])
			}
			if err := in.Close(ctx); err != nil {
				return err
			}
		}
		return nil
	})
	require.Equal(t, 512, normThreads(8192*2))
	require.Equal(t, 32, normThreads(16))
	require.Equal(t, 64, normThreads(33*16))
}

// TestRMSNormBehindTheLastAddress: memory whose end wraps around is none, on every rank; compared with other memory it would be apart from all of it.
func TestRMSNormBehindTheLastAddress(t *testing.T) {
	onSimulated(t, 2, func(ctx context.Context, _ *simDevice, m *memory.Memory) error {
		in, err := tensor.Zeros(ctx, m, tensor.Float32, 2, 64)
		if err == nil {
			err = in.Rendezvous(ctx)
		}
		if err != nil {
			return err
		}
		own := func(at device.Ptr, n int64) Local { return Local{Ptr: at, DType: tensor.Float32, NumElements: n} }
		n := RMSNorm{Residual: own(1<<20, 128), Weight: own(1<<21, 64)} // which nothing looks at
		n.ResidualOut = own(^device.Ptr(15), 128)
		if p, err := NewAllReduceRMSNorm(ctx, in, n, nil); !errors.Is(err, errs.ErrInvalid) || !bytes.Contains([]byte(err.Error()), []byte("ResidualOut.Ptr")) {
			return fmt.Errorf("%v was made: %v", p, err)
		}
		return nil
	})
}

// TestRMSNormSpecialValues: every form gives the bits of the host for rows of zeros without an epsilon, of infinities and of NaN, for rows that are longer than what the threads of a row keep, and for scales on
// the device that are none.
func TestRMSNormSpecialValues(t *testing.T) {
	smallLimits(t)
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	const rows = 4
	for i, algorithm := range []Algorithm{OneShotPush, TwoShotPush, TwoShotPull, Transfers} {
		for k, size := range []int{2, 3} {
			dtype := []tensor.DType{tensor.BFloat16, tensor.Float32, tensor.Float16}[(i+k)%3]
			columns := []int64{64, 4104, 8208, 72}[(i+2*k)%4]
			t.Run(fmt.Sprintf("size=%d/%s/%s/%d", size, algorithm, dtype, columns), func(t *testing.T) {
				onSimulated(t, size, func(ctx context.Context, dev *simDevice, m *memory.Memory) error {
					load, store := float32Of(dtype)
					all := rows * columns
					in := func(rank int) []byte {
						b := floats(dtype, all, uint64(rank))
						x := make([]float32, all)
						load(x, b)
						clear(x[columns : 2*columns])
						x[2*columns+5], x[3*columns+int64(rank)] = inf, nan
						store(b, x)
						return b
					}
					residual, weight := make([]byte, all*dtype.Bytes()), floats(dtype, columns, 1000)
					ins := make([][]byte, size)
					for r := range ins {
						ins[r] = in(r)
					}
					sum := make([]byte, len(residual))
					newReducer(dtype, Sum, size)(sum, ins, 0, all)
					x, err := tensor.Zeros(ctx, m, dtype, rows, columns)
					if err == nil {
						err = x.Rendezvous(ctx)
					}
					if err != nil {
						return err
					}
					local := func(dtype tensor.DType, n int64, b []byte) Local {
						p, allocErr := dev.Alloc(n * dtype.Bytes())
						if err = errors.Join(err, allocErr); allocErr == nil && b != nil {
							err = errors.Join(err, dev.CopyFromHost(p, b))
						}
						return Local{p, dtype, n}
					}
					n := RMSNorm{Residual: local(dtype, all, residual), ResidualOut: local(dtype, all, nil), Weight: local(dtype, columns, weight), Out: local(dtype, all, nil),
						Quantized: local(tensor.Uint8, all, nil), ScaleAt: local(tensor.Float32, 1, nil)}
					s, streamErr := dev.NewStream()
					if err := errors.Join(err, streamErr, dev.CopyFromHost(x.Ptr(), ins[m.Group().Rank()])); err != nil {
						return err
					}
					plan, err := NewAllReduceRMSNorm(ctx, x, n, &Options{Algorithm: algorithm})
					if err != nil {
						return err
					}
					for _, scale := range []float32{0.25, 0, -0.5, inf, nan, 1e-40, math.MaxFloat32} {
						want := hostRows{
							rowBytes: columns * dtype.Bytes(), residual: residual, residualOut: make([]byte, len(residual)), weight: weight, out: make([]byte, len(residual)), quantized: make([]byte, all),
							inverse: 1 / scale, x: make([]float32, columns), y: make([]float32, columns), weights: make([]float32, columns),
							row: make([]byte, columns*dtype.Bytes()), lanes: make([]float32, normThreads(columns*dtype.Bytes())), perLine: int(16 / dtype.Bytes()),
						}
						want.load, want.store = load, store
						want.all(sum)
						err := errors.Join(dev.CopyFromHost(n.ScaleAt.Ptr, binary.LittleEndian.AppendUint32(nil, math.Float32bits(scale))), m.Group().Barrier(ctx, "filled"), plan.Run(s), s.Synchronize(ctx))
						if err != nil {
							return err
						}
						for _, o := range []struct {
							name string
							l    Local
							want []byte
						}{{"residual", n.ResidualOut, want.residualOut}, {"out", n.Out, want.out}, {"fp8", n.Quantized, want.quantized}} {
							got := make([]byte, len(o.want))
							if err := dev.CopyToHost(got, o.l.Ptr); err != nil {
								return err
							}
							if o.l.DType != tensor.Uint8 { // of whatever bits a NaN is
								oneNaN(dtype, got)
								oneNaN(dtype, o.want)
							}
							for i := range got {
								if got[i] != o.want[i] {
									return fmt.Errorf("scale %v: byte %d of %d of %s is %#x, not %#x", scale, i, len(got), o.name, got[i], o.want[i])
								}
							}
						}
					}
					err = errors.Join(plan.Close(ctx), s.Close(), x.Close(ctx))
					for _, l := range []Local{n.Residual, n.ResidualOut, n.Weight, n.Out, n.Quantized, n.ScaleAt} {
						err = errors.Join(err, dev.Free(l.Ptr))
					}
					return err
				})
			})
		}
	}
}

// TestRMSNormLongestRow: a row that is longer than its length can be counted with is refused, and says how long one may be.
func TestRMSNormLongestRow(t *testing.T) {
	onHostRanks(t, 1, func(ctx context.Context, m *memory.Memory, x, _ *tensor.Tensor) error {
		for _, hidden := range []int64{mostHidden + 8, mostHidden} {
			in, err := tensor.Zeros(ctx, m, tensor.BFloat16, 1, hidden)
			if err == nil {
				err = in.Rendezvous(ctx)
			}
			if err != nil {
				return err
			}
			// Of one that is not too long, the weights are.
			_, err = NewRMSNorm(ctx, in, RMSNorm{Weight: LocalOf(x.Local())}, nil)
			bad, ok := errors.AsType[*errs.ArgumentError](err)
			if want := map[bool]string{true: "in.Shape", false: "Weight.DType"}[hidden > mostHidden]; !ok || bad.Arg != want {
				return fmt.Errorf("a row of %d: %w", hidden, err)
			}
			if err := in.Close(ctx); err != nil {
				return err
			}
		}
		return nil
	})
}

// oneNaN makes every NaN of a dtype the same.
func oneNaN(dtype tensor.DType, b []byte) {
	load, store := float32Of(dtype)
	x := make([]float32, int64(len(b))/dtype.Bytes())
	load(x, b)
	for i, v := range x {
		if v != v {
			x[i] = float32(math.NaN())
		}
	}
	store(b, x)
}
