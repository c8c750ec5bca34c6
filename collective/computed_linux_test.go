package collective_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// computing is a program whose puts are what puts gives when a run comes to it.
func (r *rank) computing(ctx context.Context, lane bool, puts func() ([]collective.Put, error)) (*collective.Plan, error) {
	return collective.New(ctx, r.m, r.program(lane, func(b *collective.Builder) {
		b.Fork()
		b.Signal(0) // the peer may write to x
		b.Wait(0)
		b.SendComputed(1, puts)
		b.Join()
		b.Finish(1)
	}))
}

// TestComputedSends: each run, and each replay, puts what is given when it comes to it, with peers near and far.
func TestComputedSends(t *testing.T) {
	onComputed(t, patience, []bool{false, true}, func(ctx context.Context, r *rank, lane, graph bool) error {
		n := 0
		x, err := r.m.Device().(device.HostMemory).Bytes(r.x.Ptr(), r.x.Bytes())
		if err != nil {
			return err
		}
		place := func(run int) (at, bytes int) { return run % 3 * 8, run / 2 * 4 } // two runs are alike sometimes, and the first put nothing
		p, err := r.computing(ctx, lane, func() ([]collective.Put, error) {
			at, bytes := place(n)
			n++
			return []collective.Put{{Peer: 1 - r.Rank(), Offset: int64(at), Local: r.x.Ptr().Add(200), Bytes: int64(bytes)}}, nil
		})
		if err != nil {
			return err
		}
		run, g, err := r.runner(p, graph)
		if err != nil {
			return err
		}
		if n != 0 {
			return errors.New("puts were computed before a run")
		}
		for k := range 12 {
			for i := range x {
				if x[i] = 0; i >= 200 {
					x[i] = byte(1 + k + 100*r.Rank())
				}
			}
			if err := errors.Join(r.Barrier(ctx, "filled"), run(), r.s.Synchronize(ctx)); err != nil {
				return err
			}
			at, bytes := place(k)
			for i, v := range x[:200] {
				want := byte(0)
				if i >= at && i < at+bytes {
					want = byte(1 + k + 100*(1-r.Rank()))
				}
				if v != want {
					return fmt.Errorf("run %d: byte %d is %d, and %d was expected", k, i, v, want)
				}
			}
			if err := r.Barrier(ctx, "looked"); err != nil {
				return err
			}
		}
		if n != 12 {
			return fmt.Errorf("puts were computed %d times in 12 runs", n)
		}
		// Only a graph can still ask: it is told, and computes nothing.
		if err := p.Close(ctx); err != nil || g == nil {
			return err
		}
		err = errors.Join(g.Launch(r.s), r.s.Synchronize(ctx))
		if !errors.Is(err, errs.ErrClosed) || n != 12 {
			return fmt.Errorf("a graph of a closed plan: %w, and %d times", err, n)
		}
		return g.Close()
	})
}

// TestComputedSendFails: what computes puts fails, panics, or gives puts that are none. That is the plan's failure on its rank: it puts nothing, and
// the peer gets no signal.
func TestComputedSendFails(t *testing.T) {
	for _, c := range []struct {
		name string
		want error // nil is any
		puts func(r *rank, good collective.Put) ([]collective.Put, error)
	}{
		{"error", errOwn, func(*rank, collective.Put) ([]collective.Put, error) { return nil, errOwn }},
		{"panic", nil, func(*rank, collective.Put) ([]collective.Put, error) { panic("nothing to put") }},
		{"outside", errs.ErrInvalid, func(r *rank, good collective.Put) ([]collective.Put, error) {
			good.Offset = r.x.Bytes() - 4
			return []collective.Put{good}, nil
		}},
		{"two", errs.ErrInvalid, func(_ *rank, good collective.Put) ([]collective.Put, error) {
			return []collective.Put{good, good}, nil
		}},
		{"itself", errs.ErrInvalid, func(r *rank, good collective.Put) ([]collective.Put, error) {
			good.Peer = r.Rank()
			return []collective.Put{good}, nil
		}},
		{"from nowhere", errs.ErrNotSymmetric, func(_ *rank, good collective.Put) ([]collective.Put, error) {
			good.Local = 0
			return []collective.Put{good}, nil
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			ways := []bool{false}
			if c.want == errOwn {
				ways = append(ways, true)
			}
			onComputed(t, time.Second, ways, func(ctx context.Context, r *rank, lane, graph bool) error {
				runs, done := 0, false
				good := collective.Put{Peer: 1 - r.Rank(), Local: r.x.Ptr().Add(200), Bytes: 8}
				p, err := r.computing(ctx, lane, func() ([]collective.Put, error) {
					if runs++; runs == 2 && r.Rank() == 0 {
						return c.puts(r, good)
					}
					return []collective.Put{good}, nil
				})
				if err != nil {
					return err
				}
				run := func() error { return p.Run(r.s) }
				if graph {
					g, err := r.graph(p)
					if err != nil {
						return err
					}
					defer func() { _ = g.Close() }()
					run = func() error { return g.Launch(r.s) }
				}
				x, err := r.m.Device().(device.HostMemory).Bytes(r.x.Ptr(), r.x.Bytes())
				if err != nil {
					return err
				}
				if err := errors.Join(run(), r.s.Synchronize(ctx), r.Barrier(ctx, "one run")); err != nil {
					return err
				}
				clear(x[:200])
				for i := range x[200:] {
					x[200+i] = 7
				}
				if err := errors.Join(r.Barrier(ctx, "cleared"), run()); err != nil {
					return err
				}
				told := r.s.Synchronize(ctx)
				want := c.want
				if r.Rank() == 1 {
					want = os.ErrDeadlineExceeded
					for _, v := range x[:200] {
						done = done || v != 0
					}
				}
				if told == nil || want != nil && !errors.Is(told, want) || p.Err() == nil || want != nil && !errors.Is(p.Err(), want) || done {
					return fmt.Errorf("Synchronize gave %v, the plan's error is %v, %v was expected, written %t", told, p.Err(), want, done)
				}
				if err := p.Run(r.s); err == nil || !errors.Is(err, p.Err()) {
					return fmt.Errorf("the next run gave %v", err)
				}
				err = errors.Join(r.Barrier(ctx, "failed"), p.Close(ctx))
				if _, panicked := errors.AsType[*device.PanicError](err); panicked && c.want == nil && lane {
					return nil // nobody has asked that stream before
				}
				return err
			})
		})
	}
}

// onComputed runs f on two ranks whose waits last no longer than timeout, near and far, with a lane and without, to run plans and to replay them:
// where lanes has true, in all combinations.
func onComputed(t *testing.T, timeout time.Duration, lanes []bool, f func(ctx context.Context, r *rank, lane, graph bool) error) {
	for _, far := range []bool{false, true} {
		for _, lane := range lanes {
			for _, graph := range lanes {
				t.Run(fmt.Sprintf("far=%t/lane=%t/graph=%t", far, lane != far, graph), func(t *testing.T) {
					t.Parallel() // they wait more than they work
					open := onHost
					if far {
						open = farWith(&backendtest.FarOptions{Delay: 100 * time.Microsecond})
					}
					onRanks(t, 2, timeout, open, func(ctx context.Context, r *rank) error { return f(ctx, r, lane != far, graph) })
				})
			}
		}
	}
}
