package collective_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tensor"
)

// The flags of the broadcast.
const (
	flagWritten = iota
	flagRead
)

// broadcast is a collective for the CPU as somebody outside of this module writes one: the root's x goes to every rank. The root writes it
// to every rank's workspace, which has two places for it by the epoch's parity, and each rank takes it from its own.
func broadcast(x tensor.SymmetricTensor, root int) collective.Spec {
	n := x.Bytes()
	return collective.Spec{
		Name:       "broadcast",
		Tensors:    []tensor.SymmetricTensor{x},
		Parameters: fmt.Sprintf("root %d", root),
		Workspace:  2*n + 8,
		Host: func(a *collective.Addresses) (collective.HostKernel, error) {
			own := a.Bytes(a.Tensor(0, a.Rank()), n)
			var boxes [][]byte
			for r := range a.WorldSize() {
				boxes = append(boxes, a.Bytes(a.Workspace(r), 2*n+8))
			}
			for _, b := range boxes[a.Rank()] {
				if b != 0 {
					return nil, errors.New("the workspace does not begin as zeros")
				}
			}
			return func(r *collective.HostRun) error {
				box := func(rank int) []byte { return boxes[rank][int64(r.Epoch()&1)*n:][:n] }
				if r.Rank() == root {
					for to := range r.WorldSize() {
						copy(box(to), own)
						if to != root {
							r.Signal(to, flagWritten, r.Epoch())
						}
					}
				} else if err := r.Wait(root, flagWritten, r.Epoch()); err != nil {
					return err
				}
				copy(own, box(r.Rank()))
				// What a rank keeps in its workspace stays there from run to run.
				runs := boxes[r.Rank()][2*n:]
				binary.LittleEndian.PutUint64(runs, binary.LittleEndian.Uint64(runs)+1)
				return r.Barrier(flagRead)
			}, nil
		},
	}
}

// fill writes to x what the rank has in a run, and check looks whether the root's is there.
func (r *rank) fill(x *tensor.Tensor, run int) error {
	values := make([]float32, elements)
	for i := range values {
		values[i] = float32(1000*run + 100*r.Rank() + i)
	}
	return tensor.Write(x.Local(), values, 0)
}

func (r *rank) check(x *tensor.Tensor, run, root int) error {
	got, err := tensor.ReadAll[float32](x.Local())
	if err != nil {
		return err
	}
	for i, v := range got {
		if want := float32(1000*run + 100*root + i); v != want {
			return fmt.Errorf("run %d: element %d is %v, not %v", run, i, v, want)
		}
	}
	return nil
}

// TestHostKernel: a kernel for the CPU has workspace, flags and barriers, run after run and from graphs, over the end of the epochs too, and
// a second plan begins as the first did.
func TestHostKernel(t *testing.T) {
	for size := 1; size <= 4; size++ {
		for _, first := range []uint32{0, 7, 1<<32 - 3} {
			t.Run(fmt.Sprintf("size=%d/first=%d", size, first), func(t *testing.T) {
				onRanks(t, size, patience, onHost, func(ctx context.Context, r *rank) error {
					root := size - 1
					spec := broadcast(r.x, root)
					spec.FirstEpoch = first
					for range 2 {
						p, err := collective.New(ctx, r.m, spec)
						if err != nil {
							return err
						}
						if p.String() != "broadcast" || p.Err() != nil {
							return fmt.Errorf("the plan is %s with the error %w", p, p.Err())
						}
						g, err := r.graph(p)
						if err != nil {
							return err
						}
						for run := range 8 {
							launch := func() error { return p.Run(r.s) }
							if run%3 == 2 {
								launch = func() error { return g.Launch(r.s) }
							}
							if err := errors.Join(r.fill(r.x, run), launch(), r.s.Synchronize(ctx), r.check(r.x, run, root)); err != nil {
								return err
							}
						}
						if err := errors.Join(g.Close(), p.Close(ctx)); err != nil {
							return err
						}
					}
					return nil
				})
			})
		}
	}
}

// TestEpochs: every run has the next epoch, the same on every rank, and flags count in a circle with it: what was set to an earlier value is
// waited for, and what was set to a later one is not.
func TestEpochs(t *testing.T) {
	const first = 1<<32 - 2
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		var epochs []uint32
		spec := collective.Spec{Name: "epochs", FirstEpoch: first, Host: func(*collective.Addresses) (collective.HostKernel, error) {
			return func(h *collective.HostRun) error {
				epochs = append(epochs, h.Epoch())
				peer := 1 - h.Rank()
				if h.Rank() == 0 {
					time.Sleep(5 * time.Millisecond) // so that the peer waits
					h.Signal(peer, 2, h.Epoch())
				} else if err := errors.Join(h.Wait(peer, 2, h.Epoch()), h.Wait(peer, 2, h.Epoch()-1)); err != nil {
					return err
				}
				return h.Barrier(0)
			}, nil
		}}
		p, err := collective.New(ctx, r.m, spec)
		if err != nil {
			return err
		}
		for range 4 {
			if err := p.Run(r.s); err != nil {
				return err
			}
		}
		if err := r.s.Synchronize(ctx); err != nil {
			return err
		}
		if got, want := fmt.Sprint(epochs), fmt.Sprint([]uint32{first + 1, 0, 1, 2}); got != want {
			return fmt.Errorf("epochs %s and not %s", got, want)
		}
		return p.Close(ctx)
	})
}

// TestFlagsAreApart: each flag of each rank is a flag of its own, and a value waits for itself.
func TestFlagsAreApart(t *testing.T) {
	onRanks(t, 3, 50*time.Millisecond, onHost, func(ctx context.Context, r *rank) error {
		spec := collective.Spec{Name: "flags", Host: func(*collective.Addresses) (collective.HostKernel, error) {
			return func(h *collective.HostRun) error {
				if h.Rank() == 0 {
					h.Signal(1, 1, 5)
					return nil
				}
				if h.Rank() != 1 {
					return nil
				}
				if err := h.Wait(0, 1, 5); err != nil {
					return err
				}
				for _, c := range []struct {
					rank, flag int
					value      uint32
				}{{0, 0, 1}, {0, 2, 1}, {2, 1, 1}, {0, 1, 6}} {
					err := h.Wait(c.rank, c.flag, c.value)
					wait, ok := errors.AsType[*device.WaitError](err)
					if !ok || wait.Op != "flags" || wait.Peer != c.rank || wait.Channel != -1 || !errors.Is(err, os.ErrDeadlineExceeded) {
						return fmt.Errorf("%w: waiting for %+v gave %w", errOwn, c, err)
					}
				}
				return nil
			}, nil
		}}
		p, err := collective.New(ctx, r.m, spec)
		if err != nil {
			return err
		}
		// Rank 1 begins when rank 0 has signalled, as its waits are short: most of them are in vain.
		if r.Rank() == 1 {
			err = r.Barrier(ctx, "signalled")
		}
		err = errors.Join(err, p.Run(r.s), r.s.Synchronize(ctx))
		if r.Rank() != 1 {
			err = errors.Join(err, r.Barrier(ctx, "signalled"))
		}
		return errors.Join(err, p.Close(ctx))
	})
}

// ending is a plan whose kernel waits for its peers unless end, at a rank, does something else.
func (r *rank) ending(ctx context.Context, end func(h *collective.HostRun) error) (*collective.Plan, error) {
	return collective.New(ctx, r.m, collective.Spec{
		Name: "ending", Tensors: []tensor.SymmetricTensor{r.x},
		Host: func(*collective.Addresses) (collective.HostKernel, error) {
			return func(h *collective.HostRun) error {
				if end != nil {
					return end(h)
				}
				return h.Barrier(0)
			}, nil
		},
	})
}

// TestHostKernelFails: a kernel that returns an error or panics is its stream's error and the plan's last run, and its peers' waits end in
// time; one whose peer is lost does not wait so long.
func TestHostKernelFails(t *testing.T) {
	boom := "the kernel is at its end"
	for _, c := range []struct {
		name    string
		end     func(h *collective.HostRun) error // what rank 0 does
		own     error                             // its error; nil is a panic
		timeout time.Duration
		peers   error
	}{
		{"error", func(*collective.HostRun) error { return errOwn }, errOwn, 100 * time.Millisecond, os.ErrDeadlineExceeded},
		{"panic", func(*collective.HostRun) error { panic(boom) }, nil, 100 * time.Millisecond, os.ErrDeadlineExceeded},
		{"no rank", func(h *collective.HostRun) error { h.Signal(2, 0, 1); return nil }, errs.ErrInvalid, 100 * time.Millisecond, os.ErrDeadlineExceeded},
		{"no flag", func(h *collective.HostRun) error { return h.Wait(1, collective.Flags, 1) }, errs.ErrInvalid, 100 * time.Millisecond, os.ErrDeadlineExceeded},
		{"no flag of a barrier", func(h *collective.HostRun) error { return h.Barrier(-1) }, errs.ErrInvalid, 100 * time.Millisecond, os.ErrDeadlineExceeded},
	} {
		for _, graph := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/graph=%t", c.name, graph), func(t *testing.T) {
				onRanks(t, 2, c.timeout, onHost, func(ctx context.Context, r *rank) error {
					end, want := c.end, c.own
					if r.Rank() == 1 {
						end, want = nil, c.peers
					}
					p, err := r.ending(ctx, end)
					if err != nil {
						return err
					}
					run, g, err := r.runner(p, graph)
					if err != nil {
						return err
					}
					if err := run(); err != nil {
						return err
					}
					told := r.s.Synchronize(ctx)
					if told == nil || want != nil && !errors.Is(told, want) {
						return fmt.Errorf("Synchronize gave %v, and %v was expected", told, want)
					}
					if c.name == "panic" && r.Rank() == 0 && !strings.Contains(told.Error(), boom) {
						return fmt.Errorf("the stream has not the panic: %w", told)
					}
					failed := p.Err()
					if failed == nil || want != nil && !errors.Is(failed, want) {
						return fmt.Errorf("the plan's error is %v", failed)
					}
					if c.name == "panic" && r.Rank() == 0 {
						if _, ok := errors.AsType[*device.PanicError](failed); !ok || !strings.Contains(failed.Error(), boom) {
							return fmt.Errorf("the plan has not the panic: %w", failed)
						}
					}
					if err := p.Run(r.s); !errors.Is(err, failed) {
						return fmt.Errorf("the next run gave %v, and %w was expected", err, failed)
					}
					if g != nil {
						err = g.Close()
					}
					return errors.Join(err, r.Barrier(ctx, "failed"), p.Close(ctx))
				})
			})
		}
	}
}

// TestPeerIsLost: a kernel that waits for a peer that is lost ends at once, and no run begins any more.
func TestPeerIsLost(t *testing.T) {
	waits := make(chan struct{})
	onRanks(t, 2, time.Hour, onHost, func(ctx context.Context, r *rank) error {
		p, err := r.ending(ctx, func(h *collective.HostRun) error {
			close(waits) // only rank 0 runs
			return h.Barrier(0)
		})
		if err != nil {
			return err
		}
		if r.Rank() == 1 {
			select {
			case <-waits:
			case <-ctx.Done():
			}
			r.Abort("test")
			return ctx.Err()
		}
		if err := p.Run(r.s); err != nil {
			return err
		}
		if err := r.s.Synchronize(ctx); !errors.Is(err, errs.ErrPeerLost) {
			return fmt.Errorf("waiting for a rank that is lost: %w", err)
		}
		if err := p.Run(r.s); !errors.Is(err, errs.ErrPeerLost) {
			return fmt.Errorf("the next run: %w", err)
		}
		if err := p.Close(ctx); err != nil && !errors.Is(err, errs.ErrPeerLost) {
			return err
		}
		return nil
	})
}

// TestFailedRunIsTheLast: of the runs that are queued behind one that failed none begins, so that a peer that comes late does not take
// what it finds for their result.
func TestFailedRunIsTheLast(t *testing.T) {
	for _, graph := range []bool{false, true} {
		t.Run(fmt.Sprintf("graph=%t", graph), func(t *testing.T) {
			onRanks(t, 2, 100*time.Millisecond, onHost, func(ctx context.Context, r *rank) error {
				var began atomic.Int32
				p, err := r.ending(ctx, func(h *collective.HostRun) error {
					began.Add(1)
					return h.Barrier(0)
				})
				if err != nil {
					return err
				}
				run := func() error { return p.Run(r.s) }
				var recorded device.Graph
				if graph {
					if recorded, err = r.graph(p); err != nil {
						return err
					}
					run = func() error { return recorded.Launch(r.s) }
				}
				// The first run waits until the second is queued.
				queued := make(chan struct{})
				runs := func() error {
					err := errors.Join(r.s.HostFunc(func() { <-queued }), run(), run())
					close(queued)
					return errors.Join(err, r.s.Synchronize(ctx))
				}
				if r.Rank() == 0 { // waits for nobody, in vain
					if err := runs(); !errors.Is(err, os.ErrDeadlineExceeded) {
						return fmt.Errorf("runs without the peer: %w", err)
					}
					if err := r.s.Synchronize(ctx); err != nil {
						return fmt.Errorf("told twice: %w", err)
					}
				}
				if err := r.Barrier(ctx, "failed"); err != nil {
					return err
				}
				want := int32(1)
				if r.Rank() == 1 { // the peer has begun one
					if want = 2; !errors.Is(runs(), os.ErrDeadlineExceeded) {
						return errors.New("two runs with a peer that began one have no error")
					}
				}
				if n := began.Load(); n != want {
					return fmt.Errorf("%d runs have begun and not %d", n, want)
				}
				if err := p.Run(r.s); !errors.Is(err, os.ErrDeadlineExceeded) {
					return fmt.Errorf("a plan that has failed: %w", err)
				}
				if graph {
					err = recorded.Close()
				}
				return errors.Join(err, p.Close(ctx))
			})
		})
	}
}

// TestHostRunAllocatesNothing: neither enqueueing a run nor running it allocates.
func TestHostRunAllocatesNothing(t *testing.T) {
	onRanks(t, 1, patience, onHost, func(ctx context.Context, r *rank) error {
		p, err := r.ending(ctx, nil)
		if err != nil {
			return err
		}
		if n := allocations(func() {
			if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx)); err != nil {
				panic(err)
			}
		}); n >= 1 {
			return fmt.Errorf("%v allocations a run", n)
		}
		return p.Close(ctx)
	})
}

// allocations is testing.AllocsPerRun, which must not be called from goroutines of parallel tests; these are not.
func allocations(f func()) float64 {
	runtime.GC()
	return testing.AllocsPerRun(200, f)
}

// TestClosedPlan: a plan whose own, its tensor's or its memory's end has come runs no more, neither by Run nor from a graph, and closing
// twice is told.
func TestClosedPlan(t *testing.T) {
	for _, what := range []string{"plan", "tensor", "memory"} {
		t.Run(what, func(t *testing.T) {
			onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
				x, err := r.tensor(ctx, elements)
				if err != nil {
					return err
				}
				var runs atomic.Int32
				spec := broadcast(x, 0)
				host := spec.Host
				spec.Host = func(a *collective.Addresses) (collective.HostKernel, error) {
					k, err := host(a)
					return func(h *collective.HostRun) error { runs.Add(1); return k(h) }, err
				}
				p, err := collective.New(ctx, r.m, spec)
				if err != nil {
					return err
				}
				g, err := r.graph(p)
				if err != nil {
					return err
				}
				if err := errors.Join(p.Run(r.s), g.Launch(r.s), r.s.Synchronize(ctx)); err != nil {
					return err
				}
				if what == "memory" {
					r.over = true
					if err := r.m.Close(ctx); err != nil {
						return err
					}
					if err := p.Run(r.s); !errors.Is(err, errs.ErrClosed) {
						return fmt.Errorf("a run after closing the memory: %w", err)
					}
					if err := p.Close(ctx); err != nil && !errors.Is(err, errs.ErrClosed) {
						return err
					}
					return nil
				}
				if what == "plan" {
					if err := p.Close(ctx); err != nil {
						return err
					}
					if err := p.Close(ctx); !errors.Is(err, errs.ErrClosed) {
						return fmt.Errorf("closed twice: %w", err)
					}
				} else if err := x.Close(ctx); err != nil {
					return err
				}
				if err := p.Run(r.s); !errors.Is(err, errs.ErrClosed) {
					return fmt.Errorf("a run after closing the %s: %w", what, err)
				}
				if err := errors.Join(g.Launch(r.s), r.s.Synchronize(ctx)); !errors.Is(err, errs.ErrClosed) {
					return fmt.Errorf("a graph after closing the %s: %w", what, err)
				}
				if n := runs.Load(); n != 2 {
					return fmt.Errorf("%d runs and not 2", n)
				}
				if what == "tensor" {
					return errors.Join(g.Close(), p.Close(ctx))
				}
				return errors.Join(g.Close(), x.Close(ctx))
			})
		})
	}
}

// TestPatienceOfPlans: the kernels of plans look for their peers as long as there are processors for all ranks.
func TestPatienceOfPlans(t *testing.T) {
	for _, size := range []int{1, runtime.GOMAXPROCS(0) + 1} {
		onRanks(t, size, patience, onHost, func(ctx context.Context, r *rank) error {
			p, err := collective.New(ctx, r.m, broadcast(r.x, 0))
			if err != nil {
				return err
			}
			if few := r.m.Oversubscribed(); p.Patient() == few || few != r.Oversubscribed() || !few && size > 1 {
				return fmt.Errorf("oversubscribed: memory %v, group %v; the plan is patient: %v", few, r.Oversubscribed(), p.Patient())
			}
			return p.Close(ctx)
		})
	}
}

// TestWaitBehindLongWaits: values of a flag may come in large steps, and a rank that waits long for each has not seen those that it waited for. It waits all the same
// when they have gone half around.
func TestWaitBehindLongWaits(t *testing.T) {
	const steps, step, late = 10, 1 << 29, 20 * time.Millisecond
	var signalled atomic.Uint32 // steps
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		p, err := collective.New(ctx, r.m, collective.Spec{Name: "long waits", Host: func(*collective.Addresses) (collective.HostKernel, error) {
			return func(h *collective.HostRun) error {
				for i := range uint32(steps) {
					value := (i + 1) * step
					if h.Rank() == 0 {
						time.Sleep(late)
						signalled.Store(i + 1)
						h.Signal(1, 0, value)
						if err := h.Wait(1, 1, i+1); err != nil { // or it may be half around ahead
							return err
						}
						continue
					}
					if err := h.Wait(0, 0, value); err != nil {
						return err
					}
					if n := signalled.Load(); n != i+1 {
						return fmt.Errorf("wait %d ended behind %d signals", i, n)
					}
					h.Signal(0, 1, i+1)
				}
				return nil
			}, nil
		}})
		if err != nil {
			return err
		}
		return errors.Join(p.Run(r.s), r.s.Synchronize(ctx), p.Close(ctx))
	})
}
