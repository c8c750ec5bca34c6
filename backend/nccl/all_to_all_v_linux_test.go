package nccl

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
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/internal/simlib"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// dispatch is an all-to-all of rows of 16 bytes whose counts are in memory of the GPU. A rank's rows are full of its number and one. The output is in the
// middle of a larger tensor.
type dispatch struct {
	m                         *memory.Memory
	in, out, counts, received *tensor.Tensor
	middle                    tensor.SymmetricTensor
	s                         device.Stream
	plan                      *kernels.Plan
	graph                     device.Graph // nil if it is run without
}

const (
	dispatchRows  = 12
	dispatchWidth = 16
)

// newDispatch makes the tensors and the plan, and a graph if it is to be run by one. Collective.
func newDispatch(ctx context.Context, m *memory.Memory, graph bool, form kernels.Algorithm) (*dispatch, error) {
	d := &dispatch{m: m}
	size := int64(m.Group().Size())
	of := func(t **tensor.Tensor, dtype tensor.DType, shape ...int64) (err error) {
		if *t, err = tensor.Zeros(ctx, m, dtype, shape...); err == nil {
			err = (*t).Rendezvous(ctx)
		}
		return err
	}
	err := errors.Join(of(&d.in, tensor.Int8, dispatchRows, dispatchWidth), of(&d.out, tensor.Int8, dispatchRows*(size+2), dispatchWidth),
		of(&d.counts, tensor.Int64, size), of(&d.received, tensor.Int64, 2, size))
	if err != nil {
		return nil, err
	}
	if d.middle, err = d.out.Sub(dispatchRows*dispatchWidth, dispatchRows*size, dispatchWidth); err != nil {
		return nil, err
	}
	if d.plan, err = kernels.NewAllToAllV(ctx, d.in, d.middle, d.counts, d.received, &kernels.Options{Algorithm: form}); err != nil {
		return nil, errors.Join(err, d.closeTensors(ctx))
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

// fill writes rows and the counts of a run, and clears the output. Collective.
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

// output is what is in the output, and checks that nothing is around it.
func (d *dispatch) output() ([]byte, error) {
	whole := make([]byte, d.out.Bytes())
	if err := d.m.Device().CopyToHost(whole, d.out.Ptr()); err != nil {
		return nil, err
	}
	const edge = dispatchRows * dispatchWidth
	if around := append(bytes.Clone(whole[:edge]), whole[len(whole)-edge:]...); !bytes.Equal(around, make([]byte, 2*edge)) {
		return nil, fmt.Errorf("around the output there is %v", around)
	}
	return whole[edge : len(whole)-edge], nil
}

// check looks whether so many rows of each rank have come.
func (d *dispatch) check(from []int64) error {
	var want []byte
	for r, n := range from {
		want = append(want, bytes.Repeat([]byte{byte(r + 1)}, int(n)*dispatchWidth)...)
	}
	got, err := d.output()
	if err != nil {
		return err
	}
	if want = append(want, make([]byte, len(got)-len(want))...); !bytes.Equal(got, want) {
		return fmt.Errorf("of %v rows came %v", from, got)
	}
	return nil
}

func (d *dispatch) closeTensors(ctx context.Context) error {
	return errors.Join(d.received.Close(ctx), d.counts.Close(ctx), d.out.Close(ctx), d.in.Close(ctx))
}

// close releases everything. The stream of a plan that has failed may tell it again.
func (d *dispatch) close(ctx context.Context) error {
	var err error
	if d.graph != nil {
		err = d.graph.Close()
	}
	told := d.s.Close()
	if d.plan.Err() != nil {
		told = nil
	}
	return errors.Join(err, told, d.plan.Close(ctx), d.closeTensors(ctx))
}

// spoilt is simulated hosts of two ranks each, between which NCCL puts, until a rank's puts go wrong.
type spoilt struct {
	machine *simcuda.Machine
	lib     *simlib.NCCL
	puts    atomic.Int64 // that NCCL has taken

	rank    atomic.Int64 // whose puts go wrong
	good    atomic.Int64 // so many are left that do not
	refuses atomic.Bool  // NCCL refuses them then; otherwise they never arrive
	over    chan struct{}
}

func newSpoilt(t *testing.T, ranks int, gin bool) *spoilt {
	t.Helper()
	m, err := simcuda.New(simcuda.Config{GPUs: ranks, Seed: 1})
	require.NoError(t, err)
	x := &spoilt{machine: m, lib: simlib.NewNCCL(m), over: make(chan struct{})}
	x.rank.Store(-1)
	x.lib.Spread(2)
	if gin {
		x.lib.GIN()
	}
	return x
}

// spoil makes the puts of a rank go wrong, but for the next few.
func (x *spoilt) spoil(rank, good int, refuses bool) {
	x.good.Store(int64(good))
	x.refuses.Store(refuses)
	x.rank.Store(int64(rank))
}

// options are those of a rank, whose waits last for timeout.
func (x *spoilt) options(rank int, timeout time.Duration) *Options {
	f := *x.lib.Functions()
	put := f.PutSignal
	f.PutSignal = func(send uint64, count uintptr, t nccl.DataType, peer int32, to nccl.WindowHandle, offset uintptr, signal, context int32, flags uint32, h nccl.CommHandle, stream uintptr) nccl.Result {
		if x.rank.Load() == int64(rank) && x.good.Add(-1) < 0 {
			if x.refuses.Load() {
				return nccl.SystemError
			}
			x.machine.EnqueueLibrary(cu.StreamHandle(stream), func(bool) func() simcuda.Step {
				return func() simcuda.Step {
					return func(*simcuda.Access) (done, moved bool, err error) {
						select {
						case <-x.over:
							return true, true, nil
						default:
							return false, false, nil
						}
					}
				}
			})
			return nccl.Success
		}
		r := put(send, count, t, peer, to, offset, signal, context, flags, h, stream)
		if r == nccl.Success {
			x.puts.Add(1)
		}
		return r
	}
	return &Options{
		Driver: x.machine.Driver(), Functions: &f, LocalRank: rank, Multicast: "off", KernelTimeout: timeout,
		Getenv: func(name string) string { return map[string]string{hostEnv: fmt.Sprint(rank / 2)}[name] },
	}
}

// onHosts runs f on the ranks.
func (x *spoilt) onHosts(t *testing.T, ranks int, timeout time.Duration, f func(ctx context.Context, g *group.Group, mem *memory.Memory) error) []error {
	t.Helper()
	return backendtest.OnRanks(t, ranks, nil, func(ctx context.Context, g *group.Group) error {
		b, err := New(ctx, g, x.options(g.Rank(), timeout))
		if err != nil {
			return err
		}
		mem := memory.New(b, g, &memory.Options{Channels: 1, KernelTimeout: timeout})
		err = f(ctx, g, mem)
		if err != nil && g.Err() == nil {
			g.Abort("the test has failed") // the others may be waiting
		}
		return errors.Join(err, mem.Close(ctx))
	})
}

// TestAllToAllVBetweenHosts: NCCL puts what goes between hosts, counts and rows, and of these those that there are, in each run and replay anew.
func TestAllToAllVBetweenHosts(t *testing.T) {
	const size = 3
	for _, graph := range []bool{false, true} {
		t.Run(fmt.Sprintf("graph=%t", graph), func(t *testing.T) {
			x := newSpoilt(t, size, true)
			backendtest.RequireAll(t, x.onHosts(t, size, 20*time.Second, func(ctx context.Context, g *group.Group, mem *memory.Memory) error {
				me := g.Rank()
				d, err := newDispatch(ctx, mem, graph, kernels.Auto)
				if err != nil {
					return err
				}
				assert.Equal(t, kernels.Transfers, d.plan.Algorithm())
				for run, rows := range []int64{0, 1, 4, 0, 3, 3} {
					counts, from := make([]int64, size), make([]int64, size)
					counts[(me+1)%size], from[(me+size-1)%size] = rows, rows // of the three ways one is on a host
					if err := d.fill(ctx, counts); err != nil {
						return err
					}
					before := x.puts.Load()
					err := errors.Join(g.Barrier(ctx, "counted"), d.run(), d.s.Synchronize(ctx), g.Barrier(ctx, "moved"), d.check(from))
					if err != nil {
						return fmt.Errorf("run %d: %w", run, err)
					}
					// Four ways are between hosts: on each go counts, a word behind them, and a word behind the rows. Rows go on two of them.
					want := int64(4 * 3)
					if rows > 0 {
						want += 2
					}
					assert.Equal(t, want, x.puts.Load()-before, "run %d", run)
					if err := g.Barrier(ctx, "looked"); err != nil {
						return err
					}
				}
				return d.close(ctx)
			}))
			assert.Empty(t, x.lib.Left())
			require.NoError(t, x.machine.Err())
		})
	}
}

// TestAllToAllVWithoutPuts: where NCCL cannot put between hosts there is no form, which every rank is told with what is missing.
func TestAllToAllVWithoutPuts(t *testing.T) {
	x := newSpoilt(t, 3, false)
	backendtest.RequireAll(t, x.onHosts(t, 3, 20*time.Second, func(ctx context.Context, _ *group.Group, mem *memory.Memory) error {
		for _, form := range []kernels.Algorithm{kernels.Auto, kernels.Transfers, kernels.OneShotPush} {
			_, err := newDispatch(ctx, mem, false, form)
			if !errors.Is(err, errs.ErrNotReachable) || !strings.Contains(err.Error(), "cannot put to ranks without addresses") {
				return fmt.Errorf("%s: %w", form, err)
			}
		}
		return nil
	}))
	require.NoError(t, x.machine.Err())
}

// TestAllToAllVFails: whatever goes wrong in a run or a replay is every rank's error, long before the time of waits is over where NCCL says what it is. The
// plan has failed then, nothing is written outside of the outputs, and in them no row that a rank was not sent.
func TestAllToAllVFails(t *testing.T) {
	const size, wrong = 3, 2
	for _, c := range []struct {
		name    string
		timeout time.Duration
		good    int // of the puts of the rank, which are counts to two ranks, a word behind each, rows to two, and a word behind each
		refuses bool
		leaves  bool
		want    error
	}{
		{"counts are refused", time.Minute, 0, true, false, nil},
		{"the word behind counts is refused", time.Minute, 3, true, false, nil},
		{"rows are refused", time.Minute, 4, true, false, nil},
		{"the word behind rows is refused", time.Minute, 7, true, false, nil},
		{"counts do not arrive", 2 * time.Second, 0, false, false, os.ErrDeadlineExceeded},
		{"rows do not arrive", 2 * time.Second, 4, false, false, os.ErrDeadlineExceeded},
		{"a rank is lost", time.Minute, 4, false, true, errs.ErrPeerLost},
	} {
		for _, graph := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/graph=%t", c.name, graph), func(t *testing.T) {
				x := newSpoilt(t, size, true)
				results := make([]error, size)
				failed := x.onHosts(t, size, c.timeout, func(ctx context.Context, g *group.Group, mem *memory.Memory) (failure error) {
					defer func() { results[g.Rank()] = failure }()
					d, err := newDispatch(ctx, mem, graph, kernels.Transfers)
					if err != nil {
						return err
					}
					counts, from := []int64{2, 2, 2}, []int64{2, 2, 2}
					if err := errors.Join(d.fill(ctx, counts), d.run(), d.s.Synchronize(ctx), d.check(from), g.Barrier(ctx, "run"), d.fill(ctx, counts)); err != nil {
						return fmt.Errorf("before: %w", err)
					}
					if g.Rank() == wrong {
						x.spoil(wrong, c.good, c.refuses)
					}
					before := x.puts.Load()
					if err := g.Barrier(ctx, "spoilt"); err != nil {
						return err
					}
					if g.Rank() == wrong && c.good == 0 { // the others have put all that they can, and wait
						for began := time.Now(); x.puts.Load() < before+4; time.Sleep(time.Millisecond) {
							if time.Since(began) > 20*time.Second {
								return errors.New("the others put nothing")
							}
						}
						time.Sleep(20 * time.Millisecond)
					}
					if c.leaves && g.Rank() == wrong {
						err := d.run()
						g.Abort("it is killed")
						return errors.Join(errors.New("killed"), err)
					}
					told := errors.Join(d.run(), d.s.Synchronize(ctx))
					again := d.plan.Run(d.s)
					if told == nil { // all that was for this rank had come, and the next run is told
						told = d.check(from)
						again = errors.Join(again, d.s.Synchronize(ctx))
						if told == nil && c.good > 4 {
							told = again
						}
					}
					for _, err := range []error{told, again} {
						switch {
						case err == nil:
							return errors.New("no error")
						case c.want != nil && !errors.Is(err, c.want):
							return fmt.Errorf("the error is %w", err)
						case c.want == nil && (errors.Is(err, os.ErrDeadlineExceeded) || !strings.Contains(err.Error(), "ncclPutSignal")):
							return fmt.Errorf("the error is %w", err)
						}
					}
					out, err := d.output()
					if err != nil {
						return err
					}
					for i, v := range out { // two of each rank, in their order
						if r := i / (2 * dispatchWidth); v != 0 && (r >= size || int(v) != r+1) {
							return fmt.Errorf("byte %d of the output is %d", i, v)
						}
					}
					if c.leaves {
						return nil
					}
					if err := g.Barrier(ctx, "failed"); err != nil {
						return err
					}
					if g.Rank() == wrong {
						close(x.over)
					}
					return d.close(ctx)
				})
				if c.leaves {
					require.ErrorContains(t, results[wrong], "killed")
					failed = results[:wrong] // closing says that a rank is lost
				}
				backendtest.RequireAll(t, failed)
				if !c.leaves { // what the lost rank and its peers had stays
					require.NoError(t, x.machine.Err())
				}
			})
		}
	}
}
