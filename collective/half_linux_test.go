package collective_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/tensor"
)

// together makes sure that New fails on every rank without anybody waiting for the rest, and that the ranks are in step after it.
func (r *rank) together(ctx context.Context, bad, good collective.Spec) error {
	soon, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := r.refused(soon, bad, nil); err != nil {
		return err
	}
	if err := soon.Err(); err != nil {
		return fmt.Errorf("it took too long: %w", err)
	}
	p, err := collective.New(soon, r.m, good)
	if err != nil {
		return fmt.Errorf("the next plan: %w", err)
	}
	return errors.Join(p.Run(r.s), r.s.Synchronize(soon), p.Close(soon))
}

// TestFitsDiffer: where Fit is not the same function on all ranks, all are told, whatever follows from it: that one has no launch at all, or that
// only one has enough workspace already.
func TestFitsDiffer(t *testing.T) {
	for _, c := range []struct {
		what   string
		blocks [2]int
	}{{"another launch", [2]int{1, 2}}, {"no launch", [2]int{1, 0}}, {"more workspace", [2]int{1, 8}}} {
		t.Run(c.what, func(t *testing.T) {
			m := newMachine(2, map[string]fake{"still": still})
			onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
				spec := func(blocks int) collective.Spec {
					return collective.Spec{Name: "fit", CUDA: &collective.Kernel{
						Image: []byte(image), Function: "still", BlockWorkspace: 2 << 20, Fit: func(int) (int, int) { return blocks, 64 },
					}}
				}
				return r.together(ctx, spec(c.blocks[r.Rank()]), spec(1))
			})
			assert.Empty(t, m.left())
		})
	}
}

// TestBuildComesTogether: a rank that fails before Build does not leave the others alone in it.
func TestBuildComesTogether(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	var broken atomic.Bool
	open := func(g *group.Group, near backend.Backend) (backend.Backend, error) {
		d := m.driver()
		create := d.EventCreate
		d.EventCreate = func(e *cu.EventHandle, flags uint32) cu.Result {
			if g.Rank() == 1 && broken.CompareAndSwap(true, false) {
				return cu.OutOfMemory
			}
			return create(e, flags)
		}
		gpu, err := cuda.Open(&cuda.Options{Driver: d, LocalRank: g.Rank()})
		return &gpuBackend{near, gpu}, err
	}
	onRanks(t, 2, patience, open, func(ctx context.Context, r *rank) error {
		spec := collective.Spec{Name: "together", Program: &collective.Program{Build: func(ctx context.Context, b *collective.Builder) error {
			return r.Barrier(ctx, "building")
		}}}
		p, err := collective.New(ctx, r.m, spec)
		if err != nil {
			return err
		}
		if err := r.Barrier(ctx, "made"); err != nil {
			return err
		}
		broken.Store(true)
		if err := r.Barrier(ctx, "broken"); err != nil {
			return err
		}
		return errors.Join(r.together(ctx, spec, spec), p.Close(ctx))
	})
	assert.False(t, broken.Load(), "no event was made")
	assert.Empty(t, m.left())
}

// unrecorded is a stream that cannot record events.
type unrecorded struct {
	device.Stream
}

func (unrecorded) Record(device.Event) error { return errOwn }

// TestRunWithoutEnd: a run whose end cannot be noted is the plan's last, since all of it was enqueued.
func TestRunWithoutEnd(t *testing.T) {
	onRanks(t, 1, patience, onHost, func(ctx context.Context, r *rank) error {
		w := &watched{}
		p, err := collective.New(ctx, r.m, r.program(false, func(b *collective.Builder) { b.Launch(w) }))
		if err != nil {
			return err
		}
		if err := p.Run(unrecorded{r.s}); !errors.Is(err, errOwn) {
			return fmt.Errorf("the run gave %w", err)
		}
		if err := p.Run(r.s); !errors.Is(err, errOwn) || w.launched.Load() != 1 {
			return fmt.Errorf("the next run gave %w, after %d launches", err, w.launched.Load())
		}
		return p.Close(ctx)
	})
}

// lent is a backend whose device outlives it, as that of a sub-group does.
type lent struct {
	backend.Backend
	device *cuda.Device
}

func (b *lent) Device() device.Device { return b.device }

// TestNothingIsLoadedAfterClose: a plan of a memory that was closed loads no kernel, which nobody would give back.
func TestNothingIsLoadedAfterClose(t *testing.T) {
	m := newMachine(1, map[string]fake{"still": still})
	var d *cuda.Device
	onRanks(t, 1, patience, func(g *group.Group, near backend.Backend) (backend.Backend, error) {
		var err error
		d, err = cuda.Open(&cuda.Options{Driver: m.driver()})
		return &lent{near, d}, err
	}, func(ctx context.Context, r *rank) error {
		if err := errors.Join(r.s.Close(), r.x.Close(ctx), r.m.Close(ctx)); err != nil {
			return err
		}
		r.over = true
		had := d.Stats().Modules
		err := r.refused(ctx, collective.Spec{Name: "late", CUDA: &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32}}, errs.ErrClosed)
		if now := d.Stats().Modules; now != had {
			return fmt.Errorf("%d modules are loaded, and %d were: %w", now, had, err)
		}
		return err
	})
	assert.NoError(t, d.Close())
	assert.Empty(t, m.left())
}

// TestFailedPlanGivesLargeWorkspaceBack: a plan that could not be made on one rank leaves no large workspace behind, on any.
func TestFailedPlanGivesLargeWorkspaceBack(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		const large = 257 << 20
		had := r.backend.bytes.Load()
		spec := collective.Spec{Name: "a large plan", Workspace: large, Host: func(*collective.Addresses) (collective.HostKernel, error) {
			if r.Rank() == 1 {
				return nil, errOwn
			}
			return func(*collective.HostRun) error { return nil }, nil
		}}
		if err := r.refused(ctx, spec, nil, errOwn.Error()); err != nil {
			return err
		}
		if held := r.backend.bytes.Load() - had; held >= large {
			return fmt.Errorf("%d bytes more are held", held)
		}
		return nil
	})
}

// TestNoAddressIsNil: what has no address has none that looks like one.
func TestNoAddressIsNil(t *testing.T) {
	onRanks(t, 1, patience, onHost, func(ctx context.Context, r *rank) error {
		var got device.Ptr
		err := r.refused(ctx, collective.Spec{Name: "lost", Host: func(a *collective.Addresses) (collective.HostKernel, error) {
			got = a.Workspace(1)
			return func(*collective.HostRun) error { return nil }, nil
		}}, errs.ErrInvalid)
		if !got.IsNil() {
			err = errors.Join(err, fmt.Errorf("the workspace of a rank that does not exist is at %s", got))
		}
		return err
	})
}

// TestEmptyTensorOfNoRank: a rank that does not exist is refused for an empty tensor as for any other, which has no address on a rank that does.
func TestEmptyTensorOfNoRank(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		empty, err := r.tensor(ctx, 0)
		if err != nil {
			return err
		}
		for _, of := range []int{-1, 2, 1 << 30, 0, 1} {
			var got device.Ptr
			spec := collective.Spec{Name: "of no rank", Tensors: []tensor.SymmetricTensor{empty}, Host: func(a *collective.Addresses) (collective.HostKernel, error) {
				got = a.Tensor(0, of)
				return func(*collective.HostRun) error { return nil }, nil
			}}
			if of < 0 || of > 1 {
				err = r.refused(ctx, spec, errs.ErrInvalid, fmt.Sprint(of), "0 to 1")
			} else if p, made := collective.New(ctx, r.m, spec); made != nil {
				err = made
			} else {
				err = p.Close(ctx)
			}
			if !got.IsNil() {
				err = errors.Join(err, fmt.Errorf("an empty tensor is at %s", got))
			}
			if err != nil {
				return err
			}
		}
		return empty.Close(ctx)
	})
}

// TestPlanIsClosedLast: a plan that is closed after its rank is not kept for the sake of its room on a device that has gone.
func TestPlanIsClosedLast(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		p, err := collective.New(ctx, r.m, collective.Spec{Name: "last", CUDA: &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 1, Threads: 32}})
		if err != nil {
			return err
		}
		if err := errors.Join(p.Run(r.s), r.s.Synchronize(ctx), r.s.Close(), r.x.Close(ctx), r.m.Close(ctx)); err != nil {
			return err
		}
		r.over = true
		if err := p.Close(ctx); err != nil && !errors.Is(err, errs.ErrClosed) {
			return err
		}
		return nil
	})
	assert.Zero(t, collective.Tenants())
	assert.Empty(t, m.left())
}
