package symmem

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// Rank is one rank's place in a group: the group, a device, and symmetric memory on it. Methods may be called from several
// goroutines; collective ones must come in the same order on every rank.
type Rank struct {
	group    *group.Group
	memory   *memory.Memory
	name     string // of the backend
	refusals []backend.Refusal
	env      backend.Env
	memOpts  memory.Options
	log      *slog.Logger
	timeout  time.Duration // of Close, when its context has no deadline

	mu     sync.Mutex
	closed bool
	parent *Rank
	subs   []*Rank
}

// Rank returns this rank's number in its group, from 0.
func (r *Rank) Rank() int { return r.group.Rank() }

// WorldSize returns the number of ranks in the group.
func (r *Rank) WorldSize() int { return r.group.Size() }

// Group returns the group: who the ranks are, and how they exchange small things.
func (r *Rank) Group() *group.Group { return r.group }

// Device returns the device that the rank's memory is on.
func (r *Rank) Device() device.Device { return r.memory.Device() }

// Memory returns the rank's symmetric memory, below the tensors.
func (r *Rank) Memory() *memory.Memory { return r.memory }

// Backend returns the name of the backend that was chosen.
func (r *Rank) Backend() string { return r.name }

// Refusals says why the backends that were preferred to the chosen one could not be used.
func (r *Rank) Refusals() []backend.Refusal { return slices.Clone(r.refusals) }

// Capabilities says what the backend can do here.
func (r *Rank) Capabilities() backend.Capabilities { return r.memory.Backend().Capabilities() }

// Zeros allocates a symmetric tensor, filled with zeros: every rank does the same, then Rendezvous. See [tensor.Zeros].
func (r *Rank) Zeros(ctx context.Context, dtype tensor.DType, shape ...int64) (*tensor.Tensor, error) {
	return tensor.Zeros(ctx, r.memory, dtype, shape...)
}

// FromPtr makes a symmetric tensor of device memory that the caller owns. See [tensor.FromPtr].
func (r *Rank) FromPtr(ctx context.Context, p device.Ptr, dtype tensor.DType, shape ...int64) (*tensor.Tensor, error) {
	return tensor.FromPtr(ctx, r.memory, p, dtype, shape...)
}

// NewStream returns a stream of the rank's device. Close it before the rank.
func (r *Rank) NewStream() (device.Stream, error) { return r.Device().NewStream() }

// Barrier waits until every rank has come; it does not wait for devices. Collective.
func (r *Rank) Barrier(ctx context.Context) error {
	if err := errs.Given("Barrier", "ctx", ctx, "a context"); err != nil {
		return err
	}
	return r.group.Barrier(ctx, "barrier")
}

// Err returns nil as long as the rank can be used: otherwise ErrClosed or, when another rank has died, ErrPeerLost. It is cheap.
func (r *Rank) Err() error { return r.memory.Err() }

// Sub makes a group of some of the ranks, given in ascending order as they are numbered in r; their numbers in the new group
// are their places in the list. Collective over those ranks only. The new rank has memory of its own and shares the device,
// so its tensors can be used on r's streams. Groups may overlap. Close it before r.
func (r *Rank) Sub(ctx context.Context, ranks []int) (*Rank, error) {
	if err := errs.Given("Sub", "ctx", ctx, "a context"); err != nil {
		return nil, err
	}
	g, err := r.group.Sub(ctx, ranks)
	if err != nil {
		return nil, fmt.Errorf("making a sub-group: %w", err)
	}
	env := r.env
	env.Group, env.Opened, env.Parent = g, r.Device(), r.memory.Backend()
	m, err := memory.Open(ctx, r.name, &env, &r.memOpts)
	if err != nil {
		err = because(ctx, err)
		ctx, cancel := afterwards(ctx, r.timeout)
		defer cancel()
		return nil, fmt.Errorf("making a sub-group: %w", errors.Join(err, g.Close(ctx)))
	}
	s := &Rank{group: g, memory: m, name: r.name, env: r.env, memOpts: r.memOpts, log: r.log, timeout: r.timeout, parent: r}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.subs = append(r.subs, s)
	return s, nil
}

// Close releases everything and leaves the group. Collective. Sub-groups and tensors that were not closed are logged as leaks and closed, the
// youngest first. If ctx ends while the rank's device still works on symmetric memory, that memory is kept: close again. Otherwise the rank is closed
// whatever the error says. A second Close returns ErrClosed.
func (r *Rank) Close(ctx context.Context) error {
	if err := errs.Given("Close", "ctx", ctx, "a context"); err != nil {
		return err
	}
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return fmt.Errorf("closing rank %d: %w", r.Rank(), ErrClosed)
	}
	r.closed = true
	subs := slices.Clone(r.subs) // each takes itself out of the list
	r.mu.Unlock()
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, r.timeout)
		defer cancel()
	}
	var err error
	for _, s := range slices.Backward(subs) {
		r.log.Warn("a sub-group was not closed before its parent", "group", s.group.Name(), "rank", s.Rank())
		err = errors.Join(err, s.Close(ctx))
	}
	memErr := r.memory.Close(ctx)
	if memErr != nil && r.memory.Busy() {
		r.mu.Lock()
		r.closed = false
		r.mu.Unlock()
		return fmt.Errorf("closing rank %d: %w", r.Rank(), errors.Join(err, memErr))
	}
	err = errors.Join(err, memErr, r.group.Close(ctx))
	if p := r.parent; p != nil {
		p.mu.Lock()
		p.subs = slices.DeleteFunc(p.subs, func(s *Rank) bool { return s == r })
		p.mu.Unlock()
	}
	if err != nil {
		return fmt.Errorf("closing rank %d: %w", r.Rank(), err)
	}
	return nil
}
