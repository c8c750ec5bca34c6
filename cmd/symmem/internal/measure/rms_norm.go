package measure

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// normHidden is the length of a row of what is normalised: that of models of 70 billion parameters.
const normHidden = 8192

// normBench is an all-reduce with RMSNorm, in one plan and in two.
type normBench struct {
	*bencher
	in   tensor.SymmetricTensor
	n    kernels.RMSNorm
	took []device.Ptr
}

// Close gives the memory back.
func (n *normBench) Close(ctx context.Context) error {
	var err error
	for _, p := range n.took {
		err = errors.Join(err, n.r.Device().Free(p))
	}
	return errors.Join(err, n.in.Close(ctx))
}

// take is elements in memory of this rank alone, all with the value 0 or 1.
func (n *normBench) take(elements int64, one bool) (kernels.Local, error) {
	bytes := elements * n.dtype.Bytes()
	p, err := n.r.Device().Alloc(bytes)
	if err != nil {
		return kernels.Local{}, err
	}
	n.took = append(n.took, p)
	var b []byte
	if one {
		b = n.values(elements, func(int64) float32 { return 1 })
	} else {
		b = make([]byte, bytes)
	}
	return kernels.Local{Ptr: p, DType: n.dtype, NumElements: elements}, n.r.Device().CopyFromHost(p, b)
}

// values is elements as bytes.
func (n *normBench) values(elements int64, f func(i int64) float32) []byte {
	b := make([]byte, 0, elements*n.dtype.Bytes())
	for i := range elements {
		switch n.dtype {
		case tensor.Float16:
			b = binary.LittleEndian.AppendUint16(b, uint16(tensor.F16From(f(i))))
		case tensor.BFloat16:
			b = binary.LittleEndian.AppendUint16(b, uint16(tensor.BF16From(f(i))))
		default:
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f(i)))
		}
	}
	return b
}

// canNorm reports whether there is an RMSNorm of a dtype.
func canNorm(dtype tensor.DType) bool {
	return slices.Contains([]tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32}, dtype)
}

// newNorm makes what an all-reduce with RMSNorm of as many rows as bytes are, at least one, works on. Close it.
func (b *bencher) newNorm(ctx context.Context, bytes int64) (n *normBench, err error) {
	n = &normBench{bencher: b}
	rows := max(bytes/(normHidden*b.dtype.Bytes()), 1)
	n.in, err = b.r.Zeros(ctx, b.dtype, rows, normHidden)
	if voted := b.r.Group().Vote(ctx, "memory for what is normalised", err); voted != nil {
		if err == nil {
			voted = errors.Join(voted, n.in.Close(ctx))
		}
		return nil, voted
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close(ctx))
		}
	}()
	if err := n.in.Rendezvous(ctx); err != nil {
		return nil, err
	}
	n.n.Epsilon = 1e-6
	for _, l := range []struct {
		to  *kernels.Local
		one bool
		all int64
	}{{&n.n.Weight, true, 1}, {&n.n.Residual, false, rows}, {&n.n.ResidualOut, false, rows}, {&n.n.Out, false, rows}} {
		if err == nil {
			*l.to, err = n.take(l.all*normHidden, l.one)
		}
	}
	return n, b.r.Group().Vote(ctx, "memory for an RMSNorm", err)
}

// allReduceRMSNorm measures an all-reduce with residual and RMSNorm of as many rows as bytes are, at least one, and beside it an all-reduce and a norm of
// its own.
func (b *bencher) allReduceRMSNorm(ctx context.Context, bytes int64) (err error) {
	if !canNorm(b.dtype) {
		return fmt.Errorf("there is no RMSNorm of %s; take --dtype f16, bf16 or f32", b.dtype)
	}
	name := b.spec.Algorithms[0]
	if name == AllAlgorithms {
		name = kernels.Auto.String()
	}
	alg, err := kernels.ParseAlgorithm(name)
	if err != nil {
		return err
	}
	n, err := b.newNorm(ctx, bytes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close(ctx)) }()
	fused, err := kernels.NewAllReduceRMSNorm(ctx, n.in, n.n, &kernels.Options{Algorithm: alg, Exclusive: b.spec.Exclusive})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, fused.Close(ctx)) }()
	sum, err := kernels.NewAllReduce(ctx, n.in, kernels.Sum, &kernels.AllReduceOptions{Exclusive: b.spec.Exclusive})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sum.Close(ctx)) }()
	behind, err := kernels.NewRMSNorm(ctx, n.in, n.n, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, behind.Close(ctx)) }()
	together := func() error { return fused.Run(b.s) }
	apart := func() error { return errors.Join(sum.Run(b.s), behind.Run(b.s)) }
	if err := n.same(ctx, together, apart); err != nil {
		return err
	}
	row := Row{Kind: AllReduceRMSNorm, Bytes: n.in.Bytes(), Place: "out of place", DType: b.spec.DType, Algorithm: name, Chosen: fused.Algorithm().String()}
	if err := b.timed(ctx, &row, together); err != nil {
		return err
	}
	row.Backend, row.Beside, row.Algorithm, row.Chosen = Unfused, b.r.Backend(), kernels.Auto.String(), sum.Algorithm().String()
	row.Note = "our all-reduce, in the form that it chooses, and then our RMSNorm, a launch of its own"
	return b.timed(ctx, &row, apart)
}

// same runs both on the same values, compares what comes of them, and leaves zeros. Collective.
func (n *normBench) same(ctx context.Context, runs ...func() error) error {
	var first []byte
	in := n.values(n.in.NumElements(), func(i int64) float32 { return float32((i*31+int64(n.r.Rank())*17)%61)/64 - 0.4 })
	for _, run := range runs {
		// No rank may begin while another one still fills.
		if err := errors.Join(n.r.Device().CopyFromHost(n.in.Ptr(), in), n.r.Barrier(ctx), run(), n.s.Synchronize(ctx), n.r.Barrier(ctx)); err != nil {
			return err
		}
		got := make([]byte, n.in.Bytes())
		if err := n.r.Device().CopyToHost(got, n.n.Out.Ptr); err != nil {
			return err
		}
		if first == nil {
			first = got
		}
		if !bytes.Equal(first, got) {
			return errors.New("an all-reduce with RMSNorm gave other bits than an all-reduce and then an RMSNorm")
		}
	}
	if bytes.Equal(first, make([]byte, len(first))) {
		return errors.New("an all-reduce with RMSNorm gave zeros")
	}
	return errors.Join(n.r.Device().CopyFromHost(n.in.Ptr(), make([]byte, n.in.Bytes())), n.r.Barrier(ctx))
}

// timed measures what enqueue does, eager or from a graph, and reports the row, with as many iterations as it says or, if that is 0, as are enough.
func (b *bencher) timed(ctx context.Context, row *Row, enqueue func() error) (err error) {
	n, each := row.Iterations, 1
	if n == 0 {
		n = b.iterations(max(row.Bytes, 1))
	}
	row.Mode = "eager"
	if b.spec.Graph {
		row.Mode, each = "graph", min(graphRuns, n)
		n -= n % each
		graph, err := b.capture(repeated(each, enqueue))
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(graph.Close(), err) }()
		enqueue = func() error { return graph.Launch(b.s) }
	}
	row.Iterations = n
	times, err := b.measure(ctx, n, each, enqueue)
	if err != nil {
		return err
	}
	return b.report(ctx, *row, times.total)
}
