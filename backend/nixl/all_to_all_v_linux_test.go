package nixl

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// dispatch is an all-to-all of rows of 16 bytes whose counts are in memory of the GPU. A rank's rows are full of its number and one.
type dispatch struct {
	m                         *memory.Memory
	in, out, counts, received *tensor.Tensor
	s                         device.Stream
	plan                      *kernels.Plan
	graph                     device.Graph // nil if it is run without
}

const (
	dispatchRows  = 12
	dispatchWidth = 16
)

func newDispatch(ctx context.Context, m *memory.Memory, graph bool) (*dispatch, error) {
	d := &dispatch{m: m}
	size := int64(m.Group().Size())
	make2 := func(t **tensor.Tensor, dtype tensor.DType, shape ...int64) (err error) {
		if *t, err = tensor.Zeros(ctx, m, dtype, shape...); err == nil {
			err = (*t).Rendezvous(ctx)
		}
		return err
	}
	err := errors.Join(make2(&d.in, tensor.Int8, dispatchRows, dispatchWidth), make2(&d.out, tensor.Int8, dispatchRows*size, dispatchWidth),
		make2(&d.counts, tensor.Int64, size), make2(&d.received, tensor.Int64, 2, size))
	if err != nil {
		return nil, err
	}
	if d.plan, err = kernels.NewAllToAllV(ctx, d.in, d.out, d.counts, d.received, nil); err != nil {
		return nil, err
	}
	if d.s, err = m.Device().NewStream(); err != nil || !graph {
		return d, err
	}
	if err := errors.Join(d.s.BeginCapture(), d.plan.Run(d.s)); err != nil {
		return nil, err
	}
	d.graph, err = d.s.EndCapture()
	return d, err
}

// fill writes rows and the counts of a run, and clears the output.
func (d *dispatch) fill(ctx context.Context, counts []int64) error {
	dev := d.m.Device()
	b, _ := binary.Append(nil, binary.LittleEndian, counts)
	return errors.Join(dev.CopyFromHost(d.in.Ptr(), bytes.Repeat([]byte{byte(d.m.Group().Rank() + 1)}, int(d.in.Bytes()))), dev.CopyFromHost(d.counts.Ptr(), b),
		dev.CopyFromHost(d.out.Ptr(), make([]byte, d.out.Bytes())), d.m.Group().Barrier(ctx, "filled"))
}

func (d *dispatch) run() error {
	if d.graph != nil {
		return d.graph.Launch(d.s)
	}
	return d.plan.Run(d.s)
}

// check looks whether so many rows of each rank have come.
func (d *dispatch) check(from []int64) error {
	var want []byte
	for r, n := range from {
		want = append(want, bytes.Repeat([]byte{byte(r + 1)}, int(n)*dispatchWidth)...)
	}
	got := make([]byte, d.out.Bytes())
	if err := d.m.Device().CopyToHost(got, d.out.Ptr()); err != nil {
		return err
	}
	if want = append(want, make([]byte, len(got)-len(want))...); !bytes.Equal(got, want) {
		return fmt.Errorf("of %v rows came %v", from, got)
	}
	return nil
}

func (d *dispatch) close(ctx context.Context) error {
	var err error
	if d.graph != nil {
		err = d.graph.Close()
	}
	return errors.Join(err, d.s.Close(), d.plan.Close(ctx), d.received.Close(ctx), d.counts.Close(ctx), d.out.Close(ctx), d.in.Close(ctx))
}

// TestAllToAllVMovesWhatThereIs: the library moves the counts, and of the rows those that there are, in each run anew. A graph of a plan that was closed
// moves nothing, and says so.
func TestAllToAllVMovesWhatThereIs(t *testing.T) {
	for _, graph := range []bool{false, true} {
		t.Run(fmt.Sprintf("graph=%t", graph), func(t *testing.T) {
			n := &network{}
			gpuWorld{hosts: []string{"a", "b", "a"}, net: n}.run(t, func(ctx context.Context, m *memory.Memory) error {
				g := m.Group()
				me, size := g.Rank(), int64(g.Size())
				d, err := newDispatch(ctx, m, graph)
				if err != nil {
					return err
				}
				assert.Equal(t, kernels.Transfers, d.plan.Algorithm())
				for run, rows := range []int64{0, 1, 4, 0, 3, 3} {
					counts, from := make([]int64, size), make([]int64, size)
					counts[(me+1)%3] = rows // of the three one is to a rank of the same host
					from[(me+2)%3] = rows
					if err := d.fill(ctx, counts); err != nil {
						return err
					}
					before := n.moved.Load()
					if err := errors.Join(g.Barrier(ctx, "counted"), d.run(), d.s.Synchronize(ctx), g.Barrier(ctx, "moved"), d.check(from)); err != nil {
						return fmt.Errorf("run %d: %w", run, err)
					}
					// Of the six ways between ranks four are between hosts, and so are two of the three that rows go.
					assert.Equal(t, 4*8*size+2*rows*dispatchWidth, n.moved.Load()-before, "run %d", run)
					if err := g.Barrier(ctx, "looked"); err != nil {
						return err
					}
				}
				if err := d.plan.Close(ctx); err != nil {
					return err
				}
				if graph {
					assert.ErrorIs(t, errors.Join(d.run(), d.s.Synchronize(ctx)), errs.ErrClosed)
				}
				err = d.close(ctx)
				if !errors.Is(err, errs.ErrClosed) { // the plan
					return fmt.Errorf("closing again: %w", err)
				}
				return nil
			})
		})
	}
}

// TestAllToAllVFails: where the rows of one rank cannot be moved, that rank has the library's error, and whom they were for wait in vain: nobody is told that
// they have come.
func TestAllToAllVFails(t *testing.T) {
	for _, hosts := range [][]string{{"", ""}, {"a", "b", "a"}} {
		t.Run(strings.Join(hosts, ""), func(t *testing.T) {
			var failing atomic.Bool
			n := &network{fail: func(engine, call string) error {
				if failing.Load() && call == "NewRequest" && strings.HasPrefix(engine, "world-1-") {
					return errBackend
				}
				return nil
			}}
			options := func(int) Options { return Options{Islands: islandsOff, KernelTimeout: 2 * time.Second} }
			gpuWorld{hosts: hosts, net: n, options: options}.run(t, func(ctx context.Context, m *memory.Memory) error {
				g := m.Group()
				d, err := newDispatch(ctx, m, false)
				if err != nil {
					return err
				}
				counts := make([]int64, g.Size())
				for q := range counts {
					counts[q] = 1
				}
				if err := errors.Join(d.fill(ctx, counts), d.run(), d.s.Synchronize(ctx), d.check(counts), d.fill(ctx, []int64{2, 2, 2}[:g.Size()])); err != nil {
					return err
				}
				failing.Store(true) // requests for other rows than before
				err = errors.Join(g.Barrier(ctx, "failing"), d.run())
				if err != nil {
					return err
				}
				told := d.s.Synchronize(ctx)
				if g.Rank() == 1 {
					assert.ErrorIs(t, told, errBackend)
				} else {
					assert.ErrorIs(t, told, os.ErrDeadlineExceeded)
				}
				assert.ErrorIs(t, d.plan.Run(d.s), d.plan.Err())
				if err := g.Barrier(ctx, "failed"); err != nil {
					return err
				}
				failing.Store(false)
				return errors.Join(g.Barrier(ctx, "working"), d.close(ctx))
			})
		})
	}
}

// TestAllToAllVLosesARank: the others are told in the run that waits for it, and give everything back.
func TestAllToAllVLosesARank(t *testing.T) {
	for _, graph := range []bool{false, true} {
		t.Run(fmt.Sprintf("graph=%t", graph), func(t *testing.T) {
			gpuWorld{hosts: []string{"a", "b", "a", "b"}, loses: true}.run(t, func(ctx context.Context, m *memory.Memory) error {
				g := m.Group()
				d, err := newDispatch(ctx, m, graph)
				if err != nil {
					return err
				}
				counts := []int64{1, 2, 3, 0}
				from := make([]int64, 4)
				for r := range from {
					from[r] = counts[g.Rank()]
				}
				if err := errors.Join(d.fill(ctx, counts), d.run(), d.s.Synchronize(ctx), d.check(from)); err != nil {
					return err
				}
				if g.Rank() != 1 {
					err = d.run()
				}
				if err := errors.Join(err, g.Barrier(ctx, "the last run")); err != nil {
					return err
				}
				if g.Rank() == 1 {
					g.Abort("test")
					_ = d.close(ctx) // in which it is lost to itself
					return nil
				}
				assert.ErrorIs(t, d.s.Synchronize(ctx), errs.ErrPeerLost)
				assert.ErrorIs(t, d.plan.Run(d.s), errs.ErrPeerLost)
				if err := d.close(ctx); err != nil && !errors.Is(err, errs.ErrPeerLost) {
					return err
				}
				return nil
			})
		})
	}
}
