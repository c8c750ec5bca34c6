package memory_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// nearAndFar runs f on so many ranks with memory that has addresses on the others, and then with memory that has none there.
func nearAndFar(t *testing.T, ranks int, f func(ctx context.Context, g *group.Group, b backend.Backend) error) {
	t.Helper()
	for _, far := range []bool{false, true} {
		t.Run(fmt.Sprintf("far=%t", far), func(t *testing.T) {
			backendtest.RequireAll(t, backendtest.OnRanks(t, ranks, nil, func(ctx context.Context, g *group.Group) error {
				near, err := host.New(g, nil)
				if err != nil {
					return err
				}
				if far {
					return f(ctx, g, backendtest.Far(near, g, nil))
				}
				return f(ctx, g, near)
			}))
		})
	}
}

// TestSignalsForSome: signals of a channel that is for some of the peers go to them, and are waited for from them, only; a put to another is refused, and so
// are ranks that there are not. A plan that has failed is told of it also by a wait for nobody.
func TestSignalsForSome(t *testing.T) {
	nearAndFar(t, 3, func(ctx context.Context, g *group.Group, b backend.Backend) error {
		m := memory.New(b, g, nil)
		s, err := m.Device().NewStream()
		if err != nil {
			return err
		}
		err = signalsForSome(ctx, m, s)
		if err != nil {
			g.Abort("the test has failed")
		}
		return errors.Join(err, s.Close(), m.Close(ctx))
	})
}

func signalsForSome(ctx context.Context, m *memory.Memory, s device.Stream) error {
	me := m.Group().Rank()
	// Ranks 0 and 1 exchange the first signal, all the second, and nobody the third.
	pair := [][]int{{1}, {0}, {}}[me]
	made := func(peers [][]int) (*memory.Workspace, *memory.Signals, error) {
		w, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: m.SignalsBytes(3) + 128})
		if err != nil {
			return nil, nil, err
		}
		signals, err := w.Signals(ctx, 0, &memory.SignalsOptions{Channels: 3, Op: "the plan", Peers: peers, Failed: func(err error) error { return err }})
		return w, signals, err
	}
	for _, wrong := range []int{me, 3, -1} {
		w, _, err := made([][]int{{wrong}})
		if !errors.Is(err, errs.ErrInvalid) {
			return fmt.Errorf("signals for rank %d: %w", wrong, err)
		}
		if err := w.Close(ctx); err != nil {
			return err
		}
	}
	w, signals, err := made([][]int{pair, nil, {}})
	if err != nil {
		return err
	}
	for range 3 {
		for channel := range 3 {
			if err := errors.Join(signals.SignalAll(s, channel), signals.WaitAllBeside(s, channel), s.Synchronize(ctx)); err != nil {
				return fmt.Errorf("channel %d: %w", channel, err)
			}
		}
	}
	own, err := w.Peer(me)
	if err != nil {
		return err
	}
	if _, err := signals.PrepareSend(0, memory.SendPut{Peer: 2 - 2*(me/2), Local: own, Bytes: 8}); !errors.Is(err, errs.ErrInvalid) {
		return fmt.Errorf("a put to a rank that the channel does not reach: %w", err)
	}
	failure := errors.New("the plan has failed")
	signals.Fail(failure)
	if err := errors.Join(signals.WaitAll(s, 2)); err != nil {
		return err
	}
	if err := s.Synchronize(ctx); !errors.Is(err, failure) {
		return fmt.Errorf("a wait for nobody gives %v", err)
	}
	return errors.Join(m.Group().Barrier(ctx, "told"), w.Close(ctx), signals.Close())
}

// TestPatienceOfWaits: waits for peers look for long as long as there are processors for all ranks.
func TestPatienceOfWaits(t *testing.T) {
	for _, size := range []int{1, runtime.GOMAXPROCS(0) + 1} {
		backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
			b, err := host.New(g, nil)
			if err != nil {
				return err
			}
			return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error {
				if few := m.Oversubscribed(); m.Patient() == few || few != g.Oversubscribed() || !few && size > 1 {
					return fmt.Errorf("oversubscribed: memory %v, group %v; waits are patient: %v", few, g.Oversubscribed(), m.Patient())
				}
				return nil
			})
		}))
	}
}

// TestSignalsEndFirst: when a plan is told that it has failed, it signals nobody any more: it leaves out its steps from then on, on whichever stream, and a peer must not take them for done.
func TestSignalsEndFirst(t *testing.T) {
	for _, far := range []bool{false, true} {
		for _, put := range []bool{false, true} {
			t.Run(fmt.Sprintf("far=%t/put=%t", far, put), func(t *testing.T) {
				broken := errors.New("the link is broken")
				backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
					near, err := host.New(g, nil)
					if err != nil {
						return err
					}
					var b backend.Backend = near
					if far {
						b = backendtest.Far(near, g, &backendtest.FarOptions{Fail: func() error { return broken }})
					} else if put {
						return nil // copies do not fail
					}
					m := memory.New(b, g, &memory.Options{KernelTimeout: 200 * time.Millisecond})
					if err = endFirst(ctx, m, put); err != nil {
						g.Abort("the test has failed")
					}
					return errors.Join(err, m.Close(ctx))
				}))
			})
		}
	}
}

func endFirst(ctx context.Context, m *memory.Memory, put bool) error {
	g := m.Group()
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	other, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	w, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: m.SignalsBytes(2) + 128})
	if err != nil {
		return err
	}
	var signals *memory.Signals
	var beside error
	told := 0
	signals, err = w.Signals(ctx, 0, &memory.SignalsOptions{Channels: 2, Op: "the plan", Failed: func(err error) error {
		if told++; told == 1 && g.Rank() == 0 {
			beside = errors.Join(signals.SignalAll(other, 1), other.Synchronize(ctx))
		}
		return err
	}})
	if err != nil {
		return err
	}
	if g.Rank() == 0 {
		if put {
			own, err := w.Peer(0)
			if err != nil {
				return err
			}
			send, err := signals.PrepareSend(0, memory.SendPut{Peer: 1, Offset: m.SignalsBytes(2), Local: own, Bytes: 8})
			if err != nil {
				return err
			}
			if err := errors.Join(send.Enqueue(s), s.Synchronize(ctx), send.Close()); err != nil {
				return err
			}
		}
		if err = errors.Join(signals.WaitAll(s, 0)); err == nil {
			if s.Synchronize(ctx) == nil {
				err = errors.New("a wait in vain is no error")
			}
		}
		err = errors.Join(err, beside)
	}
	if err := errors.Join(err, g.Barrier(ctx, "failed")); err != nil {
		return err
	}
	if g.Rank() == 1 {
		if err := signals.WaitAll(s, 1); err != nil {
			return err
		}
		if s.Synchronize(ctx) == nil {
			return errors.New("a plan that was told that it has failed has signalled")
		}
	}
	return errors.Join(g.Barrier(ctx, "looked"), w.Close(ctx), signals.Close(), s.Close(), other.Close())
}
