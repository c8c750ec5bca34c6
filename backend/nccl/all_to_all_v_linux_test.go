package nccl

import (
	"context"
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
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/internal/simlib"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/kernels/kernelstest"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// newDispatch makes an all-to-all with counts in a form. Collective.
func newDispatch(ctx context.Context, m *memory.Memory, graph bool, form kernels.Algorithm) (*kernelstest.Dispatch, error) {
	return kernelstest.NewDispatch(ctx, m, graph, func(in, out, counts, received tensor.SymmetricTensor) (kernelstest.Plan, error) {
		return kernels.NewAllToAllV(ctx, in, out, counts, received, &kernels.Options{Algorithm: form})
	})
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
				assert.Equal(t, kernels.Transfers, d.Plan.(*kernels.Plan).Algorithm())
				for run, rows := range []int64{0, 1, 4, 0, 3, 3} {
					counts, from := make([]int64, size), make([]int64, size)
					counts[(me+1)%size], from[(me+size-1)%size] = rows, rows // of the three ways one is on a host
					if err := d.Fill(ctx, counts); err != nil {
						return err
					}
					before := x.puts.Load()
					err := errors.Join(g.Barrier(ctx, "counted"), d.Run(), d.Stream.Synchronize(ctx), g.Barrier(ctx, "moved"), d.Check(from))
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
				return d.Close(ctx)
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
					if err := errors.Join(d.Fill(ctx, counts), d.Run(), d.Stream.Synchronize(ctx), d.Check(from), g.Barrier(ctx, "run"), d.Fill(ctx, counts)); err != nil {
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
						err := d.Run()
						g.Abort("it is killed")
						return errors.Join(errors.New("killed"), err)
					}
					told := errors.Join(d.Run(), d.Stream.Synchronize(ctx))
					again := d.Plan.Run(d.Stream)
					if told == nil { // all that was for this rank had come, and the next run is told
						told = d.Check(from)
						again = errors.Join(again, d.Stream.Synchronize(ctx))
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
					out, err := d.Output()
					if err != nil {
						return err
					}
					for i, v := range out { // two of each rank, in their order
						if r := i / (2 * kernelstest.DispatchWidth); v != 0 && (r >= size || int(v) != r+1) {
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
					return d.CloseFailed(ctx)
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
