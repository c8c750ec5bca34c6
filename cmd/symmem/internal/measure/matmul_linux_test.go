package measure

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// rowsOf collects rows.
type rowsOf struct{ rows []Row }

func (r *rowsOf) Rows(int) error      { return nil }
func (r *rowsOf) Row(row Row) error   { r.rows = append(r.rows, row); return nil }
func (r *rowsOf) Refuse(string) error { return nil }

// fillProduct is a product that fills memory.
type fillProduct struct {
	s    device.Stream
	p    device.Ptr
	fail error
	runs atomic.Int64
}

func (p *fillProduct) Enqueue() error {
	p.runs.Add(1)
	return errors.Join(p.fail, p.s.Fill(p.p, 1, 4096))
}
func (p *fillProduct) Stream() device.Stream { return p.s }
func (p *fillProduct) About() string         { return "fills" }
func (p *fillProduct) Close() error          { return errors.Join(p.s.Close(), p.s.Device().Free(p.p)) }

func newFill(r *symmem.Rank, fail error) (*fillProduct, error) {
	s, err := r.NewStream()
	if err != nil {
		return nil, err
	}
	p, err := r.Device().Alloc(4096)
	return &fillProduct{s: s, p: p, fail: fail}, err
}

// matMul measures on ranks with the products that open makes, and returns what rank 0 reports.
func matMul(t *testing.T, ranks []*symmem.Rank, open func(r *symmem.Rank) (product, error)) ([]Row, []error) {
	t.Helper()
	var rep rowsOf
	failures := make([]error, len(ranks))
	onRanks(t, ranks, func(r *symmem.Rank) (err error) {
		s, err := r.NewStream()
		if err != nil {
			return err
		}
		b := &bencher{r: r, rep: &rep, s: s, dtype: tensor.BFloat16, op: kernels.Sum,
			spec: Spec{DType: "bf16", Op: "sum", Sizes: []int64{1 << 10, 4 << 10}, Algorithms: []string{"auto"}, Repetitions: 3}}
		failures[r.Rank()] = b.allReduceMatMul(t.Context(), func() (product, error) { return open(r) })
		return errors.Join(s.Synchronize(context.WithoutCancel(t.Context())), s.Close())
	})
	return rep.rows, failures
}

// TestMatMul: a row for each size has the times of both, together and alone, and as many products ran on every rank.
func TestMatMul(t *testing.T) {
	ranks := simulated(t, 2, "Somebody's GPU")
	var made [2]*fillProduct
	rows, failures := matMul(t, ranks, func(r *symmem.Rank) (p product, err error) {
		made[r.Rank()], err = newFill(r, nil)
		return made[r.Rank()], err
	})
	require.NoError(t, errors.Join(failures...))
	require.Len(t, rows, 2)
	for i, row := range rows {
		assert.Equal(t, int64(1<<10)<<(2*i), row.Bytes)
		assert.Equal(t, AllReduceMatMul, row.Kind)
		assert.Equal(t, "fills", row.Note)
		assert.Positive(t, row.Iterations)
		assert.Positive(t, row.Alone)
		assert.Positive(t, row.MatMul)
		assert.Positive(t, row.Median)
		assert.Zero(t, row.Bandwidth)
	}
	assert.Positive(t, made[0].runs.Load())
	assert.Equal(t, made[0].runs.Load(), made[1].runs.Load(), "the ranks came to different numbers")
}

// TestMatMulWithoutLibrary: what one rank lacks is one row that says so, and the other rank goes on too.
func TestMatMulWithoutLibrary(t *testing.T) {
	ranks := simulated(t, 2, "Somebody's GPU")
	rows, failures := matMul(t, ranks, func(r *symmem.Rank) (product, error) {
		if r.Rank() == 1 {
			return nil, fmt.Errorf("there is none: %w", symmem.ErrUnavailable)
		}
		p, err := newFill(r, nil)
		return p, err
	})
	require.NoError(t, errors.Join(failures...))
	require.Len(t, rows, 1)
	assert.Zero(t, rows[0].Iterations)
	assert.Contains(t, rows[0].Note, "rank 1: there is none")
}

// TestShare: what is done in all steps together is all of it, and evenly spread.
func TestShare(t *testing.T) {
	for _, c := range [][2]int{{1, 1}, {7, 3}, {3, 7}, {100, 12}, {12, 100}, {5, 0}} {
		steps, n, sum := max(c[0], c[1]), c[1], 0
		for i := range steps {
			one := share(i, steps, n)
			assert.InDelta(t, float64(n)/float64(steps), float64(one), 1)
			sum += one
		}
		assert.Equal(t, n, sum)
	}
}
