package collective_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds the waits of work that must come to its end.
const patience = 20 * time.Second

var errOwn = errors.New("the collective's own error")

// rank is a rank of a test, with a tensor of f32 that has had its rendezvous, and a stream.
type rank struct {
	*group.Group
	m       *memory.Memory
	backend *counting
	x       *tensor.Tensor
	s       device.Stream
	over    bool // the test has closed the memory
}

// elements is how many f32 the tensors of tests have.
const elements = 100

// counting is a backend that counts the bytes that it has given out.
type counting struct {
	backend.Backend
	bytes atomic.Int64
}

func (b *counting) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	a, err := b.Backend.Allocate(ctx, bytes)
	if err != nil {
		return nil, err
	}
	b.bytes.Add(bytes)
	return &counted{a, b}, nil
}

func (b *counting) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	return b.Backend.Rendezvous(ctx, a.(*counted).Allocation)
}

type counted struct {
	backend.Allocation
	backend *counting
}

func (a *counted) Release(ctx context.Context) error {
	a.backend.bytes.Add(-a.Bytes())
	return a.Allocation.Release(ctx)
}

// opener makes the backend of a rank from the host backend, that of onHost.
type opener func(g *group.Group, near backend.Backend) (backend.Backend, error)

func onHost(_ *group.Group, near backend.Backend) (backend.Backend, error) { return near, nil }

// onRanks runs f on ranks over a backend whose waits last no longer than timeout. What a rank leaves open when f fails goes with its group.
func onRanks(t *testing.T, size int, timeout time.Duration, open opener, f func(ctx context.Context, r *rank) error) {
	t.Helper()
	onRanksWith(t, size, func(int) memory.Options { return memory.Options{KernelTimeout: timeout} }, open, f)
}

// onRanksWith is onRanks with the options of each rank's memory.
func onRanksWith(t *testing.T, size int, options func(rank int) memory.Options, open opener, f func(ctx context.Context, r *rank) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) (err error) {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		r := &rank{Group: g, backend: &counting{Backend: near}}
		b, err := open(g, r.backend)
		if err != nil {
			return err
		}
		opts := options(g.Rank())
		r.m = memory.New(b, g, &opts)
		lost := func(err error) error { // which is what closing tells when a peer has gone
			if g.Err() != nil && errors.Is(err, errs.ErrPeerLost) || r.over && errors.Is(err, errs.ErrClosed) {
				return nil
			}
			return err
		}
		defer func() { err = errors.Join(err, lost(r.m.Close(ctx))) }()
		if r.x, err = tensor.Zeros(ctx, r.m, tensor.Float32, elements); err != nil {
			return err
		}
		if err = r.x.Rendezvous(ctx); err != nil {
			return err
		}
		if r.s, err = r.m.Device().NewStream(); err != nil {
			return err
		}
		if err = f(ctx, r); err != nil && g.Err() == nil {
			g.Abort("the test has failed") // the other ranks may be waiting
		}
		return errors.Join(err, lost(r.s.Close()), lost(r.x.Close(ctx)))
	}))
}

// tensor makes another tensor as r.x is.
func (r *rank) tensor(ctx context.Context, shape ...int64) (*tensor.Tensor, error) {
	t, err := tensor.Zeros(ctx, r.m, tensor.Float32, shape...)
	if err != nil {
		return nil, err
	}
	return t, t.Rendezvous(ctx)
}

// runner is how a plan is run: by Run, or by launching a graph of one run, which is nil otherwise.
func (r *rank) runner(p *collective.Plan, graph bool) (run func() error, g device.Graph, err error) {
	if !graph {
		return func() error { return p.Run(r.s) }, nil, nil
	}
	if g, err = r.graph(p); err != nil {
		return nil, nil, err
	}
	return func() error { return g.Launch(r.s) }, g, nil
}

// graph records a run.
func (r *rank) graph(p *collective.Plan) (device.Graph, error) {
	err := errors.Join(r.s.BeginCapture(), p.Run(r.s))
	g, ended := r.s.EndCapture()
	return g, errors.Join(err, ended)
}

// refused makes sure that New fails with the condition, unless that is nil, and that its error says what.
func (r *rank) refused(ctx context.Context, spec collective.Spec, want error, says ...string) error {
	p, err := collective.New(ctx, r.m, spec)
	if err == nil {
		return fmt.Errorf("a plan was made, and %v was expected; %w", want, p.Close(ctx))
	}
	if want != nil && !errors.Is(err, want) {
		return fmt.Errorf("%v, and not %w", err, want)
	}
	for _, text := range says {
		if !strings.Contains(err.Error(), text) {
			return fmt.Errorf("%w does not say %q", err, text)
		}
	}
	return nil
}
