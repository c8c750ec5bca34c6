package collective_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tensor"
)

// TestNewFailsAtEachCall: whichever call of the driver fails on one rank while a plan is made, either all ranks have the plan or none, nothing is
// left on the device, and the ranks are in step.
func TestNewFailsAtEachCall(t *testing.T) {
	for _, program := range []bool{false, true} {
		t.Run(fmt.Sprintf("program=%t", program), func(t *testing.T) {
			m := newMachine(2, map[string]fake{"still": still, "exchange": exchange})
			var left atomic.Int64 // calls of rank 1 until one fails; none does from -1 on
			left.Store(-1)
			call := m.Call
			m.Call = func(name string, gpu int) cu.Result {
				// A context that cannot be made current any more is the end of a device.
				if gpu == 1 && !strings.HasPrefix(name, "cuCtx") && !strings.HasSuffix(name, "Query") && left.Load() >= 0 && left.Add(-1) < 0 {
					return cu.OutOfMemory
				}
				return call(name, gpu)
			}
			onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
				var had cuda.Stats
				for i := range 40 {
					spec := r.exchanging()
					if program {
						spec = r.program(true, func(b *collective.Builder) {
							b.Send(0)
							b.Upload([]byte{1})
							b.Kernel(&collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32})
							b.Finish(0)
						})
					}
					if err := r.Barrier(ctx, "before"); err != nil {
						return err
					}
					if r.Rank() == 1 {
						left.Store(int64(i))
					}
					if err := r.Barrier(ctx, "a call fails"); err != nil {
						return err
					}
					p, err := collective.New(ctx, r.m, spec)
					made, told := r.AllGather(ctx, "made", fmt.Append(nil, err == nil))
					left.Store(-1)
					if told != nil || string(made[0]) != string(made[1]) {
						return fmt.Errorf("call %d: plans were made: %s; %w", i, made, errors.Join(told, err))
					}
					if err == nil {
						if err := errors.Join(r.Barrier(ctx, "all well again"), p.Close(ctx)); err != nil {
							return err
						}
					}
					now := held(r)
					now.Modules = 0 // they stay with the memory
					if i == 0 {
						had = now
					}
					had.StopWords = max(had.StopWords, now.StopWords) // as the first one does
					if now != had {
						return fmt.Errorf("call %d: the device holds %+v, and had %+v; %w", i, now, had, err)
					}
				}
				return nil
			})
			assert.Empty(t, m.left())
		})
	}
}

// TestErrorIsToldOnce: what was wrong with a step is not told twice.
func TestErrorIsToldOnce(t *testing.T) {
	onRanks(t, 1, patience, onHost, func(ctx context.Context, r *rank) error {
		_, err := collective.New(ctx, r.m, collective.Spec{Name: "steps", Tensors: []tensor.SymmetricTensor{r.x}, Program: &collective.Program{
			Build: func(_ context.Context, b *collective.Builder) error { b.Wait(5); return nil },
		}})
		if n := strings.Count(err.Error(), "Builder.Wait"); n != 1 {
			return fmt.Errorf("it is told %d times: %w", n, err)
		}
		return nil
	})
}

// TestNoTensors: a spec with tensors that are none is an error on every rank, also where only one has it.
func TestNoTensors(t *testing.T) {
	host := func(*collective.Addresses) (collective.HostKernel, error) {
		return func(*collective.HostRun) error { return nil }, nil
	}
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		var none *tensor.Tensor
		for _, x := range []tensor.SymmetricTensor{nil, none, &tensor.Tensor{}} {
			if r.Rank() == 0 {
				x = r.x
			}
			_, err := collective.New(ctx, r.m, collective.Spec{Name: "of nothing", Tensors: []tensor.SymmetricTensor{x}, Host: host})
			if !errors.Is(err, errs.ErrInvalid) {
				return fmt.Errorf("a tensor that is none: %w", err)
			}
		}
		return nil
	})
}
