package collective_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tensor"
)

// hooked is a launch that calls a function when it is enqueued.
type hooked func()

func (h hooked) Launch(device.Stream) error { h(); return nil }
func (h hooked) Close() error               { return nil }

// briefly bounds waiting for what happens only where something is wrong.
const briefly = 100 * time.Millisecond

// TestRunsOfGoroutines: the steps of a run stay together when several goroutines run the plan at once.
func TestRunsOfGoroutines(t *testing.T) {
	for _, lane := range []bool{false, true} {
		t.Run(fmt.Sprintf("lane=%t", lane), func(t *testing.T) {
			onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
				ran := 0
				spec := r.program(lane, func(b *collective.Builder) {
					b.Wait(1)
					b.Launch(hooked(func() { time.Sleep(2 * time.Millisecond) })) // another goroutine comes meanwhile
					b.Send(0)
					b.Finish(0)
					b.Host(func() error { ran++; return nil })
					b.Signal(1)
				})
				spec.Program.Granted = 1
				p, err := collective.New(ctx, r.m, spec)
				if err != nil {
					return err
				}
				const goroutines, runs = 3, 4
				var wg sync.WaitGroup
				told := make([]error, goroutines)
				for i := range told {
					wg.Go(func() {
						for range runs {
							told[i] = errors.Join(told[i], p.Run(r.s))
						}
					})
				}
				wg.Wait()
				if err := errors.Join(errors.Join(told...), r.s.Synchronize(ctx)); err != nil {
					return err
				}
				if ran != goroutines*runs {
					return fmt.Errorf("%d runs and not %d", ran, goroutines*runs)
				}
				return p.Close(ctx)
			})
		})
	}
}

// TestTwoStreamsAtOnce: of two goroutines that run a plan on streams of their own at the same time, the second is told.
func TestTwoStreamsAtOnce(t *testing.T) {
	onRanks(t, 1, patience, onHost, func(ctx context.Context, r *rank) error {
		hold := make(chan struct{})
		second := make(chan error, 1)
		var p *collective.Plan
		var once sync.Once
		other, err := r.streams()
		if err != nil {
			return err
		}
		p, err = collective.New(ctx, r.m, r.program(false, func(b *collective.Builder) {
			b.Launch(hooked(func() {
				once.Do(func() {
					ended := make(chan struct{})
					go func() { second <- p.Run(other); close(ended) }()
					select {
					case <-ended:
					case <-time.After(briefly):
					}
				})
			}))
			b.Host(func() error { <-hold; return nil })
		}))
		if err != nil {
			return err
		}
		err = p.Run(r.s)
		told := <-second
		close(hold)
		if !errors.Is(told, errs.ErrTwoStreams) {
			return fmt.Errorf("the second gave %w", told)
		}
		return errors.Join(err, r.s.Synchronize(ctx), p.Close(ctx), other.Close())
	})
}

// asked is a stream that calls a function when a plan asks whether it is capturing.
type asked struct {
	device.Stream
	f func()
}

func (s *asked) Capturing() bool { s.f(); return s.Stream.Capturing() }

// endsBehindRun is the error of end, which another goroutine calls while a run of p is being enqueued. That it ends before is an error.
func (r *rank) endsBehindRun(p *collective.Plan, end func() error) error {
	ended := make(chan error, 1)
	early := false
	err := p.Run(&asked{r.s, func() {
		over := make(chan struct{})
		go func() { ended <- end(); close(over) }()
		select {
		case <-over:
			early = true
		case <-time.After(briefly):
		}
	}})
	if early || !errors.Is(err, errs.ErrInvalid) { // the stream is none of the device's
		return fmt.Errorf("it ended while a run was being enqueued: %t; the run gave %w", early, err)
	}
	return <-ended
}

// TestRunWhileClosing: a run that has begun to be enqueued keeps the plan until it is, so that Close waits for it.
func TestRunWhileClosing(t *testing.T) {
	m := newMachine(1, map[string]fake{"still": still})
	onRanks(t, 1, patience, m.open, func(ctx context.Context, r *rank) error {
		p, err := collective.New(ctx, r.m, collective.Spec{Name: "still", CUDA: &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32}})
		if err != nil {
			return err
		}
		return r.endsBehindRun(p, func() error { return p.Close(ctx) })
	})
	assert.Empty(t, m.left())
}

// TestRunWhileFreeing: a run that has begun to be enqueued keeps the memory that it is on until it is, so that the Close of a tensor, of a heap or of the
// memory, or the Free of an allocation, waits for it.
func TestRunWhileFreeing(t *testing.T) {
	for _, c := range []string{"tensor", "allocation", "piece", "memory"} {
		t.Run(c, func(t *testing.T) {
			m := newMachine(1, map[string]fake{"still": still})
			onRanks(t, 1, patience, m.open, func(ctx context.Context, r *rank) error {
				heap, err := tensor.NewHeap(ctx, r.m, 1<<20)
				if err != nil {
					return err
				}
				piece, err := heap.Zeros(ctx, tensor.Float32, elements)
				if err != nil {
					return err
				}
				x := r.x
				if c == "piece" {
					x = piece
				}
				end := func() error { return errors.Join(x.Close(ctx), heap.Close(ctx)) }
				r.over = x == r.x
				if c == "allocation" { // of which the tensor does not hear
					w, _, err := x.Window()
					if err != nil {
						return err
					}
					end = func() error { return errors.Join(r.m.Free(ctx, w.Allocation()), heap.Close(ctx)) }
				}
				if c == "memory" {
					end = func() error { return r.m.Close(ctx) }
				}
				p, err := collective.New(ctx, r.m, collective.Spec{Name: "still", Tensors: []tensor.SymmetricTensor{x}, CUDA: &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32}})
				if err != nil {
					return err
				}
				if err := r.endsBehindRun(p, end); err != nil {
					return err
				}
				if err := p.Run(r.s); !errors.Is(err, errs.ErrClosed) {
					return fmt.Errorf("a run behind it gave %w", err)
				}
				if c == "memory" {
					return nil
				}
				return p.Close(ctx)
			})
			assert.Empty(t, m.left())
		})
	}
}

// TestRunOnClosedSlice: a plan on a slice does not run when that was closed, though its memory is there.
func TestRunOnClosedSlice(t *testing.T) {
	m := newMachine(1, map[string]fake{"still": still})
	onRanks(t, 1, patience, m.open, func(ctx context.Context, r *rank) error {
		part, err := r.x.Sub(10, 20)
		if err != nil {
			return err
		}
		p, err := collective.New(ctx, r.m, collective.Spec{Name: "still", Tensors: []tensor.SymmetricTensor{part}, CUDA: &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32}})
		if err != nil {
			return err
		}
		if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx), part.Close(ctx)); err != nil {
			return err
		}
		if err := p.Run(r.s); !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("on a closed slice it gave %w", err)
		}
		return p.Close(ctx)
	})
	assert.Empty(t, m.left())
}

// TestGraphBesideRun: a graph of a plan that is launched on another stream while a run that was not recorded is under way is an error of its
// stream, and does not disturb that run.
func TestGraphBesideRun(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		hold, began := make(chan struct{}), make(chan struct{}, 2)
		p, err := collective.New(ctx, r.m, r.forms(func() error { began <- struct{}{}; <-hold; return nil })[0].spec)
		if err != nil {
			return err
		}
		other, err := r.streams()
		if err != nil {
			return err
		}
		if err := p.Run(r.s); err != nil {
			return err
		}
		<-began
		err = errors.Join(other.BeginCapture(), p.Run(other))
		g, ended := other.EndCapture()
		if err := errors.Join(err, ended); err != nil {
			return err
		}
		err = g.Launch(other)
		soon, cancel := context.WithTimeout(ctx, 10*time.Second)
		told := other.Synchronize(soon)
		cancel()
		close(hold)
		if err != nil || !errors.Is(told, errs.ErrTwoStreams) {
			return fmt.Errorf("a graph beside a run: %w", errors.Join(err, told))
		}
		return errors.Join(r.s.Synchronize(ctx), g.Close(), other.Close(), p.Close(ctx))
	})
}
