package kernels

import (
	"math"

	"github.com/symmem/symmem/collective"
)

// onHost makes the spec that of a kernel on the host device: the all-reduce of the same form into the workspace, and the norm of that.
func (n *norm) onHost(s *collective.Spec) {
	s.Program = nil
	buffer := alignUp(n.in.Bytes(), cacheLine)
	s.Workspace = buffer
	if n.algorithm == OneShot {
		s.Workspace += 2 * buffer
	}
	s.Host = func(at *collective.Addresses) (collective.HostKernel, error) {
		rows := n.hostRows(at)
		k := &hostAllReduce{
			rank: at.Rank(), size: at.WorldSize(), elements: n.in.NumElements(), width: n.in.DType().Bytes(),
			reduce: newReducer(n.in.DType(), Sum, at.WorldSize()),
		}
		for r := range k.size {
			k.ins = append(k.ins, at.Bytes(at.Tensor(specIn, r), n.in.Bytes()))
			k.outs = append(k.outs, at.Bytes(at.Workspace(r), n.in.Bytes()))
			if n.algorithm == OneShot {
				for parity := range k.buffers {
					k.buffers[parity] = append(k.buffers[parity], at.Bytes(at.Workspace(r).Add(int64(1+parity)*buffer), n.in.Bytes()))
				}
			}
		}
		k.in, k.out = k.ins[k.rank], k.outs[k.rank]
		sum := k.twoShot
		if n.algorithm == OneShot {
			sum = k.oneShot
		}
		return func(r *collective.HostRun) error {
			if err := sum(r); err != nil {
				return err
			}
			rows.all(k.out)
			return nil
		}, nil
	}
}

// hostRows is the norm on the host: what rms_norm.cuh does, with the same bits. It is used by one goroutine at a time.
type hostRows struct {
	rowBytes                                      int64
	residual, residualOut, weight, out, quantized []byte
	scale                                         []byte // of quantized; nil where it is inverse
	epsilon, bias, inverse                        float32

	load  func(dst []float32, src []byte)
	store func(dst []byte, src []float32)

	x, y    []float32 // a row
	weights []float32 // with the bias
	row     []byte    // in the dtype
	lanes   []float32 // sums of squares, by thread of a block
	perLine int       // elements in 16 bytes
}

func (n *norm) hostRows(at *collective.Addresses) *hostRows {
	k := &hostRows{rowBytes: n.rowBytes(), epsilon: n.Epsilon, bias: n.WeightBias, perLine: int(16 / n.in.DType().Bytes())}
	k.load, k.store = float32Of(n.in.DType())
	if !n.Quantized.none() && n.ScaleAt.none() {
		k.inverse = 1 / n.Scale
	}
	for _, l := range []struct {
		to   *[]byte
		from Local
	}{{&k.residual, n.Residual}, {&k.residualOut, n.ResidualOut}, {&k.weight, n.Weight}, {&k.out, n.Out}, {&k.quantized, n.Quantized}, {&k.scale, n.ScaleAt}} {
		if !l.from.none() {
			*l.to = at.Bytes(l.from.Ptr, l.from.bytes())
		}
	}
	k.x, k.y, k.weights = make([]float32, n.columns), make([]float32, n.columns), make([]float32, n.columns)
	k.row, k.lanes = make([]byte, k.rowBytes), make([]float32, normThreads(k.rowBytes))
	return k
}

// all does every row of a sum.
func (k *hostRows) all(sum []byte) {
	if k.scale != nil {
		k.inverse = 1 / slice[float32](k.scale)[0]
	}
	k.load(k.weights, k.weight)
	for i, w := range k.weights {
		k.weights[i] = k.bias + w
	}
	for lo := int64(0); lo < int64(len(sum)); lo += k.rowBytes {
		k.one(sum, lo, lo+k.rowBytes)
	}
}

// one does the row of the bytes from lo to hi. Explicit conversions keep the compiler from fusing a product with what follows.
func (k *hostRows) one(sum []byte, lo, hi int64) {
	x, y := k.x, k.y
	k.load(x, sum[lo:hi])
	k.load(y, k.residual[lo:hi])
	for i, r := range y {
		x[i] += r
	}
	k.store(k.residualOut[lo:hi], x)
	k.load(x, k.residualOut[lo:hi])
	mean := k.squares(x) / float32(len(x))
	scale := 1 / float32(math.Sqrt(float64(mean+k.epsilon)))
	for i, w := range k.weights[:len(y)] {
		y[i] = float32(x[i]*scale) * w
	}
	row := k.row
	if k.out != nil {
		row = k.out[lo:hi]
	}
	k.store(row, y)
	if k.quantized == nil {
		return
	}
	k.load(y, row)
	at := lo / k.rowBytes * int64(len(y))
	for i, v := range y {
		k.quantized[at+int64(i)] = e4m3(v * k.inverse)
	}
}

// squares adds the squares of a row up: each thread of a block those of every so many-th 16 bytes, then threads 16 apart, 8, 4, 2 and 1, and
// then the warps in order.
func (k *hostRows) squares(x []float32) float32 {
	threads := len(k.lanes)
	clear(k.lanes)
	for v := 0; v*k.perLine < len(x); v++ {
		line := x[v*k.perLine:][:k.perLine]
		sum := float32(line[0] * line[0])
		for _, e := range line[1:] {
			sum += float32(e * e)
		}
		k.lanes[v%threads] += sum
	}
	total := float32(0)
	for w := 0; w < threads; w += 32 {
		warp := k.lanes[w:][:32]
		for d := 16; d > 0; d /= 2 {
			for i := range d {
				warp[i] += warp[i+d]
			}
		}
		total += warp[0] // 0 + the first is the first
	}
	return total
}

// e4m3 rounds to an 8-bit float: nearest, ties to even; what is beyond 448 becomes that, and NaN 0x7f.
func e4m3(x float32) byte {
	bits := math.Float32bits(x)
	sign, m := byte(bits>>24&0x80), bits&0x7fffffff
	switch {
	case m > 0x7f800000:
		return 0x7f
	case m >= 0x43e00000: // 448
		return sign | 0x7e
	case m < 0x3c800000: // below 2^-6, in steps of 2^-9, which is what the last bit of a float32 from 16384 on counts
		return sign | byte(math.Float32bits(math.Float32frombits(m)+16384)-0x46800000)
	}
	m += 0x7ffff + m>>20&1
	return sign | byte(m>>20-960)
}
