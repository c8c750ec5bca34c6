package measure

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/symmem/symmem/cmd/symmem/internal/bytesize"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/internal/cublas"
	"github.com/symmem/symmem/tensor"
)

const (
	// matMulSide is the side of the square matrices of bf16 that are multiplied: what a layer of a large model multiplies, long enough that the
	// beginning and the end of a product do not matter.
	matMulSide = 8192
	// matMulTime is about how long a repetition takes of either alone, in microseconds.
	matMulTime = 20000
)

// product multiplies matrices on a stream of its own.
type product interface {
	// Enqueue enqueues one product.
	Enqueue() error
	// Stream is where it is enqueued.
	Stream() device.Stream
	// About says what multiplies.
	About() string
	// Close gives everything back, the stream too.
	Close() error
}

// cublasProduct is product by cuBLAS.
type cublasProduct struct {
	d       *cuda.Device
	s       *cuda.Stream
	handle  *cublas.Handle
	a, b, c device.Ptr
	about   string
}

// openProduct makes the matrices and cuBLAS's handle on this rank.
func (b *bencher) openProduct() (_ product, err error) {
	d, ok := b.r.Device().(*cuda.Device)
	if !ok {
		return nil, fmt.Errorf("cuBLAS works on CUDA devices, and this backend is on a %s device", b.r.Device().Kind())
	}
	lib, err := cublas.Load()
	if err != nil {
		return nil, err
	}
	p := &cublasProduct{d: d}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	s, err := b.r.NewStream()
	if err != nil {
		return nil, err
	}
	if p.s, ok = s.(*cuda.Stream); !ok {
		return nil, errors.Join(fmt.Errorf("the stream is a %T, which cuBLAS cannot work on", s), s.Close())
	}
	// Not zeros, which need less power than other numbers.
	values := make([]byte, 0, matMulSide*matMulSide*2)
	for i := range uint32(matMulSide * matMulSide) {
		values = binary.LittleEndian.AppendUint16(values, uint16(tensor.BF16From(float32(i*2654435761>>20)/4096-0.5)))
	}
	for _, m := range []*device.Ptr{&p.a, &p.b, &p.c} {
		if *m, err = d.Alloc(int64(len(values))); err != nil {
			return nil, err
		}
		if err := d.CopyFromHost(*m, values); err != nil {
			return nil, err
		}
	}
	err = d.WithContext(func() error {
		var err error
		if p.handle, err = lib.New(); err != nil {
			return err
		}
		p.about = fmt.Sprintf("cuBLAS %s (%s), matrices of bf16 with a side of %d", p.handle.Version(), lib.Path(), matMulSide)
		return p.handle.SetStream(uintptr(p.s.Handle()))
	})
	if err == nil {
		err = p.check(values)
	}
	if err != nil {
		return nil, err
	}
	return p, nil
}

// check multiplies once and sees that the result is other than what was there.
func (p *cublasProduct) check(was []byte) error {
	got := make([]byte, 1<<16)
	if err := errors.Join(p.Enqueue(), p.s.Synchronize(context.Background()), p.d.CopyToHost(got, p.c)); err != nil {
		return err
	}
	if string(got) == string(was[:len(got)]) {
		return errors.New("cuBLAS has multiplied nothing")
	}
	return nil
}

func (p *cublasProduct) Enqueue() error {
	return p.d.WithContext(func() error { return p.handle.Multiply(matMulSide, uint64(p.a), uint64(p.b), uint64(p.c)) })
}

func (p *cublasProduct) Stream() device.Stream { return p.s }

func (p *cublasProduct) About() string { return p.about }

func (p *cublasProduct) Close() error {
	var err error
	if p.handle != nil {
		err = p.d.WithContext(p.handle.Close)
	}
	if p.s != nil {
		err = errors.Join(err, p.s.Close())
	}
	for _, m := range []device.Ptr{p.a, p.b, p.c} {
		if m != 0 {
			err = errors.Join(err, p.d.Free(m))
		}
	}
	return err
}

// allReduceMatMul measures all-reduces of each size beside products of matrices, and after each size the peer's. Where nothing multiplies, rank 0 reports
// why. Collective.
func (b *bencher) allReduceMatMul(ctx context.Context, open func() (product, error)) (err error) {
	p, failure := open()
	defer func() {
		if p != nil {
			err = errors.Join(err, p.Close())
		}
	}()
	reason, err := b.agree(ctx, "multiplying matrices", failure)
	if err != nil {
		return err
	}
	if reason != "" {
		if b.r.Rank() != 0 {
			return nil
		}
		return b.rep.Row(Row{Kind: AllReduceMatMul, Backend: b.r.Backend(), Note: reason})
	}
	for _, bytes := range b.spec.Sizes {
		for _, alg := range b.algorithms() {
			if err := b.besideMatMul(ctx, p, bytes, alg); err != nil {
				return fmt.Errorf("%s, %s: %w", bytesize.Text(bytes), alg, err)
			}
		}
	}
	return nil
}

// besideMatMul measures one form of an all-reduce of bytes beside products, and then the peer's.
func (b *bencher) besideMatMul(ctx context.Context, p product, bytes int64, algorithm string) error {
	plan, closeAll, err := b.plan(ctx, bytes, algorithm)
	if err != nil {
		return err
	}
	row := Row{Kind: AllReduceMatMul, Bytes: plan.Bytes(), Place: inPlace, DType: b.spec.DType, Op: b.spec.Op, Algorithm: algorithm,
		Chosen: plan.Algorithm().String(), Mode: "eager", Note: p.About()}
	if b.spec.OutOfPlace {
		row.Place = "out of place"
	}
	err = b.overlap(ctx, &row, p, func() error { return plan.Run(b.s) })
	if err = errors.Join(err, closeAll(ctx)); err != nil || b.peer == nil {
		return err
	}
	row.Backend, row.Beside, row.Algorithm, row.Chosen, row.Note = NCCL, b.r.Backend(), "", "", b.peer.about
	return b.besideNCCL(ctx, row, p)
}

// besideNCCL is the same with NCCL's all-reduce, in as many blocks as NCCL takes by itself.
func (b *bencher) besideNCCL(ctx context.Context, row Row, p product) error {
	in, out, free, err := b.agreedBuffers(ctx, row)
	if err != nil {
		return err
	}
	enqueue, err := b.ncclCalls(ctx, row, b.peer.comm, in, out)
	if err != nil {
		return errors.Join(err, free())
	}
	return errors.Join(b.overlap(ctx, &row, p, func() error { return enqueue(1) }), free())
}

// overlap measures as many collectives and products as take about the same time, each alone and then both at once, and reports the row, whose times are
// those of one collective with its share of the products.
func (b *bencher) overlap(ctx context.Context, row *Row, p product, collective func() error) error {
	// run enqueues so many of both, of which neither is far ahead of the other, and waits for all of it.
	run := func(collectives, products int) (time.Duration, error) {
		if err := errors.Join(p.Stream().Synchronize(ctx), meet(ctx, b.r, b.s)); err != nil {
			return 0, err
		}
		began := time.Now()
		for i := range max(collectives, products) {
			for range share(i, max(collectives, products), products) {
				if err := p.Enqueue(); err != nil {
					return 0, err
				}
			}
			for range share(i, max(collectives, products), collectives) {
				if err := collective(); err != nil {
					return 0, err
				}
			}
		}
		err := errors.Join(b.s.Synchronize(ctx), p.Stream().Synchronize(ctx))
		return time.Since(began), err
	}
	several := func(collectives, products int) ([]float64, error) {
		times := make([]float64, 0, b.spec.Repetitions)
		for i := range b.spec.Repetitions + 1 {
			took, err := run(collectives, products)
			if err != nil {
				return nil, err
			}
			if i > 0 { // the first does not count
				times = append(times, float64(took.Nanoseconds())/1e3)
			}
		}
		return b.slowest(ctx, times)
	}
	one, err := several(4, 0)
	if err != nil {
		return err
	}
	other, err := several(0, 4)
	if err != nil {
		return err
	}
	// All ranks have the same times, so they come to the same numbers.
	n := min(max(int(matMulTime/(median(one)/4)), 1), maxIterations/10)
	m := max(int(matMulTime/(median(other)/4)), 1)
	alone, err := several(n, 0)
	if err != nil {
		return err
	}
	products, err := several(0, m)
	if err != nil {
		return err
	}
	together, err := several(n, m)
	if err != nil {
		return err
	}
	for i := range together {
		together[i] /= float64(n)
	}
	row.Iterations, row.Alone, row.MatMul = n, median(alone)/float64(n), median(products)/float64(n)
	return b.tellRow(*row, together)
}

// share is how many of n things are done in step i of so many, evenly spread.
func share(i, steps, n int) int { return (i+1)*n/steps - i*n/steps }
