package host_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// onPlans runs f on ranks that have a workspace with signals of a plan at its beginning, over a backend with peer pointers and over
// one without.
func onPlans(t *testing.T, size int, timeout time.Duration, o memory.SignalsOptions, f func(ctx context.Context, p *plan) error) {
	for _, far := range []bool{false, true} {
		t.Run(fmt.Sprintf("far=%t", far), func(t *testing.T) {
			backendtest.RequireAll(t, backendtest.OnRanks(t, size, nil, func(ctx context.Context, g *group.Group) error {
				return onPlan(ctx, g, far, timeout, o, f)
			}))
		})
	}
}

// plan is what a plan has.
type plan struct {
	memory    *memory.Memory
	workspace *memory.Workspace
	data      int64 // where its buffers begin
	signals   *memory.Signals
	stream    device.Stream
	failed    atomic.Int32
}

func onPlan(ctx context.Context, g *group.Group, far bool, timeout time.Duration, o memory.SignalsOptions, f func(ctx context.Context, p *plan) error) error {
	b, err := host.New(g, nil)
	if err != nil {
		return err
	}
	var opened backend.Backend = b
	if far {
		opened = backendtest.Far(b, g, &backendtest.FarOptions{Delay: 50 * time.Microsecond})
	}
	p := &plan{memory: memory.New(opened, g, &memory.Options{KernelTimeout: timeout})}
	o.Failed = func(err error) error {
		p.failed.Add(1)
		return err
	}
	p.data = p.memory.SignalsBytes(o.Channels)
	if p.workspace, err = p.memory.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: p.data + 4096}); err != nil {
		return err
	}
	if p.signals, err = p.workspace.Signals(ctx, 0, &o); err != nil {
		return err
	}
	if p.stream, err = p.memory.Device().NewStream(); err != nil {
		return err
	}
	return errors.Join(f(ctx, p), p.stream.Close(), p.workspace.Close(ctx), p.signals.Close(), p.memory.Close(ctx))
}

// TestPlanSignals: signals to all and from all are counted across the end of the numbers, and those that were granted are there.
func TestPlanSignals(t *testing.T) {
	o := memory.SignalsOptions{Channels: 2, Granted: 1, First: math.MaxUint32 - 3, Op: "test"}
	onPlans(t, 3, time.Minute, o, func(ctx context.Context, p *plan) error {
		if err := p.signals.WaitAll(p.stream, 1); err != nil { // granted
			return err
		}
		for range 10 {
			if err := errors.Join(p.signals.SignalAll(p.stream, 0), p.signals.SignalAll(p.stream, 1)); err != nil {
				return err
			}
		}
		for range 10 {
			if err := errors.Join(p.signals.WaitAll(p.stream, 1), p.signals.WaitAll(p.stream, 0)); err != nil {
				return err
			}
		}
		if n := p.failed.Load(); n != 0 {
			return fmt.Errorf("%d failures", n)
		}
		return p.stream.Synchronize(ctx)
	})
}

// TestPlanPuts: what was put before a signal is there after it, again and again without a wait of the host.
func TestPlanPuts(t *testing.T) {
	o := memory.SignalsOptions{Channels: 2, Granted: 1, Op: "test"}
	onPlans(t, 3, time.Minute, o, func(ctx context.Context, p *plan) error {
		const rounds = 200
		g := p.memory.Group()
		own, err := p.workspace.Peer(g.Rank())
		if err != nil {
			return err
		}
		// Word 0 is what this rank sends; word 1+r is where rank r's comes.
		at := func(word int) device.Ptr { return own.Add(p.data + int64(64*word)) }
		var puts []memory.SendPut
		for k := 1; k < g.Size(); k++ {
			puts = append(puts, memory.SendPut{Peer: (g.Rank() + k) % g.Size(), Offset: p.data + int64(64*(1+g.Rank())), Local: at(0), Bytes: 8})
		}
		send, err := p.signals.PrepareSend(0, puts...)
		if err != nil {
			return err
		}
		var seen []uint32
		word := make([]byte, 8)
		bytes, err := p.memory.Device().(device.HostMemory).Bytes(at(0), int64(64*(1+g.Size())))
		if err != nil {
			return err
		}
		for n := range rounds {
			if err := errors.Join(
				p.signals.WaitAll(p.stream, 1), // the peers have looked
				p.stream.HostFunc(func() { bytes[0], bytes[1] = byte(n), byte(n>>8) }),
			); err != nil {
				return err
			}
			err := errors.Join(send.Enqueue(p.stream), p.signals.WaitAll(p.stream, 0), p.stream.HostFunc(func() {
				for r := range g.Size() {
					if r != g.Rank() {
						copy(word, bytes[64*(1+r):])
						seen = append(seen, uint32(word[0])|uint32(word[1])<<8)
					}
				}
			}), p.signals.SignalAll(p.stream, 1))
			if err != nil {
				return err
			}
		}
		if err := p.stream.Synchronize(ctx); err != nil {
			return err
		}
		if len(seen) != rounds*(g.Size()-1) {
			return fmt.Errorf("%d words came", len(seen))
		}
		for i, v := range seen {
			if want := uint32(i / (g.Size() - 1)); v != want {
				return fmt.Errorf("word %d is %d, expected %d", i, v, want)
			}
		}
		return send.Close()
	})
}

// TestPlanWaitsInVain: the first wait in vain is told, once and with the plan's name, and then nobody waits any more.
func TestPlanWaitsInVain(t *testing.T) {
	const timeout = 150 * time.Millisecond
	onPlans(t, 2, timeout, memory.SignalsOptions{Channels: 1, Op: "the plan"}, func(ctx context.Context, p *plan) error {
		if p.memory.Group().Rank() == 1 {
			return nil // it never signals
		}
		began := time.Now()
		for range 100 {
			if err := p.signals.WaitAll(p.stream, 0); err != nil {
				return err
			}
		}
		err := p.stream.Synchronize(ctx)
		var wait *device.WaitError
		switch {
		case !errors.As(err, &wait) || !errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("a wait in vain: %w", err)
		case wait.Op != "the plan" || wait.Channel != -1 || wait.Peer != 1:
			return fmt.Errorf("a wait in vain of %q on channel %d for rank %d", wait.Op, wait.Channel, wait.Peer)
		case time.Since(began) > 40*timeout:
			return fmt.Errorf("100 waits took %v", time.Since(began))
		case p.failed.Load() != 1:
			return fmt.Errorf("it was told %d times", p.failed.Load())
		}
		if err := errors.Join(p.signals.SignalAll(p.stream, 0), p.stream.Synchronize(ctx)); err != nil {
			return fmt.Errorf("after the failure: %w", err)
		}
		return nil
	})
}

// TestPlanSignalsToldToNobody: a plan's signals whose failures nobody wants to be told of give their own errors, where something waits in vain and where sending fails.
func TestPlanSignalsToldToNobody(t *testing.T) {
	onPlans(t, 2, 150*time.Millisecond, memory.SignalsOptions{Channels: 1, Op: "the plan"}, func(ctx context.Context, p *plan) error {
		w, err := p.memory.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "signals", Bytes: p.memory.SignalsBytes(1) + 4096})
		if err != nil {
			return err
		}
		s, err := w.Signals(ctx, 0, &memory.SignalsOptions{Channels: 1, Op: "the quiet plan"})
		if err != nil {
			return err
		}
		if p.memory.Group().Rank() == 0 {
			err = errors.Join(s.WaitAll(p.stream, 0), s.WaitAll(p.stream, 0))
			failed := p.stream.Synchronize(ctx)
			if wait, ok := errors.AsType[*device.WaitError](failed); !ok || wait.Op != "the quiet plan" {
				err = errors.Join(err, fmt.Errorf("a wait in vain: %w", failed))
			}
		}
		return errors.Join(err, w.Close(ctx), s.Close())
	})
}

// TestPlanWaitsInVainBeside: a wait in vain on a stream beside the user's is no error there, and the user's next wait tells it, once.
func TestPlanWaitsInVainBeside(t *testing.T) {
	onPlans(t, 2, 150*time.Millisecond, memory.SignalsOptions{Channels: 1, Op: "the plan"}, func(ctx context.Context, p *plan) error {
		if p.memory.Group().Rank() == 1 {
			return nil // it never signals
		}
		lane, err := p.memory.Device().NewStream()
		if err != nil {
			return err
		}
		for range 3 {
			if err := p.signals.WaitAllBeside(lane, 0); err != nil {
				return err
			}
		}
		if err := lane.Synchronize(ctx); err != nil {
			return fmt.Errorf("the stream beside was told: %w", err)
		}
		var wait *device.WaitError
		err = errors.Join(p.signals.WaitAll(p.stream, 0), p.stream.Synchronize(ctx))
		if !errors.As(err, &wait) || !errors.Is(err, os.ErrDeadlineExceeded) || wait.Op != "the plan" || wait.Peer != 1 {
			return fmt.Errorf("the user's wait: %w", err)
		}
		// Whoever waits later has not got what it waits for either.
		if err := errors.Join(p.signals.WaitAll(p.stream, 0), p.stream.Synchronize(ctx)); !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("the next wait: %w", err)
		}
		if n := p.failed.Load(); n != 1 {
			return fmt.Errorf("%d failures", n)
		}
		return lane.Close()
	})
}

// TestPlanSignalsRefused: wrong arguments are refused on every rank, even if only one has them.
func TestPlanSignalsRefused(t *testing.T) {
	onPlans(t, 2, time.Minute, memory.SignalsOptions{Channels: 1, Op: "test"}, func(ctx context.Context, p *plan) error {
		refuse := func(offset int64, o memory.SignalsOptions) error {
			o.Op, o.Failed = "test", func(err error) error { return err }
			if p.memory.Group().Rank() == 1 {
				offset, o.Channels, o.Granted = 0, 1, 0
			}
			s, err := p.workspace.Signals(ctx, offset, &o)
			if err == nil {
				return errors.Join(errors.New("it was not refused"), s.Close())
			}
			return nil
		}
		err := errors.Join(
			refuse(0, memory.SignalsOptions{}),
			refuse(0, memory.SignalsOptions{Channels: 1, Granted: 2}),
			refuse(0, memory.SignalsOptions{Channels: 1025}),
			refuse(0, memory.SignalsOptions{Channels: 1 << 56}), // the size of whose pads is 0, modulo 2^64
			refuse(64, memory.SignalsOptions{Channels: 1}),
			refuse(-128, memory.SignalsOptions{Channels: 1}),
			refuse(1<<30, memory.SignalsOptions{Channels: 1}),
		)
		if err != nil {
			return err
		}
		own, err := p.workspace.Peer(p.memory.Group().Rank())
		if err != nil {
			return err
		}
		peer := 1 - p.memory.Group().Rank()
		right := memory.SendPut{Peer: peer, Offset: p.data, Local: own, Bytes: 8}
		for name, puts := range map[string][]memory.SendPut{
			"to a rank that does not exist": {{Peer: 2, Offset: p.data, Local: own, Bytes: 8}},
			"to itself":                     {{Peer: 1 - peer, Offset: p.data, Local: own, Bytes: 8}},
			"twice to a peer":               {right, right},
			"beyond the window":             {{Peer: peer, Offset: 1 << 40, Local: own, Bytes: 8}},
			"of less than nothing":          {{Peer: peer, Offset: p.data, Local: own, Bytes: -8}},
			"from elsewhere":                {{Peer: peer, Offset: p.data, Local: 64, Bytes: 8}},
		} {
			if _, err := p.signals.PrepareSend(0, puts...); !errors.Is(err, errs.ErrInvalid) && !errors.Is(err, errs.ErrNotSymmetric) {
				return fmt.Errorf("a put %s: %w", name, err)
			}
		}
		if _, err := p.signals.PrepareSend(1, right); !errors.Is(err, errs.ErrInvalid) {
			return fmt.Errorf("a signal channel that does not exist: %w", err)
		}
		// What lies before a workspace, and behind it, is that of others.
		c, err := p.memory.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "second", Bytes: p.data + 4096})
		if err != nil {
			return err
		}
		s, err := c.Signals(ctx, 0, &memory.SignalsOptions{Channels: 1, Op: "second", Failed: func(err error) error { return err }})
		if err != nil {
			return err
		}
		for _, offset := range []int64{-8, c.Bytes() - 4} {
			if _, err := s.PrepareSend(0, memory.SendPut{Peer: peer, Offset: offset, Local: own, Bytes: 8}); !errors.Is(err, errs.ErrInvalid) {
				return fmt.Errorf("a put at %d of a workspace of %d bytes: %w", offset, c.Bytes(), err)
			}
		}
		if err := c.Close(ctx); err != nil {
			return err
		}
		if _, err := s.PrepareSend(0, memory.SendPut{Peer: peer, Local: own, Bytes: 8}); !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("a put to a closed workspace: %w", err)
		}
		return s.Close()
	})
}

// link is one that may be broken, for [backendtest.FarOptions].
type link struct{ broken atomic.Bool }

var errLink = errors.New("the link is broken")

func (l *link) fail() error {
	if l.broken.Load() {
		return errLink
	}
	return nil
}

// TestPlanPutFails: a put that fails is told by the next wait, on whichever stream it was; the peer is not told that it has come.
func TestPlanPutFails(t *testing.T) {
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		near, err := host.New(g, nil)
		if err != nil {
			return err
		}
		var l link
		far := backendtest.Far(near, g, &backendtest.FarOptions{Fail: l.fail})
		m := memory.New(far, g, &memory.Options{KernelTimeout: 300 * time.Millisecond})
		c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: 4096})
		if err != nil {
			return err
		}
		s, err := c.Signals(ctx, 0, &memory.SignalsOptions{Channels: 1, Op: "the plan", Failed: func(err error) error { return err }})
		if err != nil {
			return err
		}
		own, err := c.Peer(g.Rank())
		assert.NoError(t, err)
		send, err := s.PrepareSend(0, memory.SendPut{Peer: 1 - g.Rank(), Offset: 64, Local: own, Bytes: 8})
		assert.NoError(t, err)
		lane, err := m.Device().NewStream()
		assert.NoError(t, err)
		stream, err := m.Device().NewStream()
		assert.NoError(t, err)
		l.broken.Store(g.Rank() == 0)
		assert.NoError(t, errors.Join(send.Enqueue(lane), lane.Synchronize(ctx)))
		// Each wait is told: none has got what it waits for.
		for range 2 {
			err = errors.Join(s.WaitAll(stream, 0), stream.Synchronize(ctx))
			if g.Rank() == 0 {
				assert.ErrorIs(t, err, errLink)
				assert.ErrorContains(t, err, "the plan")
			} else {
				assert.ErrorIs(t, err, os.ErrDeadlineExceeded)
			}
		}
		return errors.Join(lane.Close(), stream.Close(), send.Close(), c.Close(ctx), s.Close(), m.Close(ctx))
	}))
}

// TestFailedPlanSendsNothing: once a plan has failed its sends write nothing any more, over a link that was mended too: a peer that goes
// on may be reading what came before. So it is with sends of a graph, by peer pointers too.
func TestFailedPlanSendsNothing(t *testing.T) {
	for _, x := range []struct{ far, put, recorded bool }{
		{far: true, put: true}, {far: true, put: true, recorded: true}, {far: true}, {far: true, recorded: true}, {recorded: true},
	} {
		how := "a wait in vain"
		if x.put {
			how = "a put that failed"
		}
		t.Run(fmt.Sprintf("far=%t/%s/recorded=%t", x.far, how, x.recorded), func(t *testing.T) {
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				near, err := host.New(g, nil)
				if err != nil {
					return err
				}
				var l link
				var b backend.Backend = near
				if x.far {
					b = backendtest.Far(near, g, &backendtest.FarOptions{Fail: l.fail})
				}
				m := memory.New(b, g, &memory.Options{KernelTimeout: 100 * time.Millisecond})
				if err = sendAfterFailure(ctx, m, &l, x.put, x.recorded); err != nil {
					g.Abort("the test has failed") // the other rank may be waiting
				}
				return errors.Join(err, m.Close(ctx))
			}))
		})
	}
}

// sendAfterFailure lets rank 0's plan fail, by a put or by a wait in vain, and sends then.
func sendAfterFailure(ctx context.Context, m *memory.Memory, l *link, put, recorded bool) error {
	g := m.Group()
	c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: m.SignalsBytes(1) + 4096})
	if err != nil {
		return err
	}
	s, err := c.Signals(ctx, 0, &memory.SignalsOptions{Channels: 1, Op: "the plan", Failed: func(err error) error { return err }})
	if err != nil {
		return err
	}
	own, err := c.Peer(g.Rank())
	if err != nil {
		return err
	}
	const bytes = 8
	from, to := m.SignalsBytes(1), m.SignalsBytes(1)+64
	send, err := s.PrepareSend(0, memory.SendPut{Peer: 1 - g.Rank(), Offset: to, Local: own.Add(from), Bytes: bytes})
	if err != nil {
		return err
	}
	stream, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	run := func() error { return send.Enqueue(stream) }
	var graph device.Graph
	if recorded {
		err := errors.Join(stream.BeginCapture(), send.Enqueue(stream))
		if err != nil {
			return err
		}
		if graph, err = stream.EndCapture(); err != nil {
			return err
		}
		run = func() error { return graph.Launch(stream) }
	}
	if err := m.Device().CopyFromHost(own.Add(from), []byte("new data")); err != nil {
		return err
	}
	if g.Rank() == 0 {
		if l.broken.Store(put); put {
			if err := errors.Join(run(), stream.Synchronize(ctx)); err != nil {
				return fmt.Errorf("the send's stream was told: %w", err)
			}
		}
		want := os.ErrDeadlineExceeded
		if put {
			want = errLink
		}
		if err := errors.Join(s.WaitAll(stream, 0), stream.Synchronize(ctx)); !errors.Is(err, want) {
			return fmt.Errorf("the plan has failed: %w, expected %w", err, want)
		}
		l.broken.Store(false)
		if err := errors.Join(run(), run(), stream.Synchronize(ctx)); err != nil {
			return fmt.Errorf("sends of a plan that has failed: %w", err)
		}
	}
	if err := g.Barrier(ctx, "sent"); err != nil {
		return err
	}
	if g.Rank() == 1 {
		got := make([]byte, bytes)
		if err := m.Device().CopyToHost(got, own.Add(to)); err != nil {
			return err
		}
		if string(got) != string(make([]byte, bytes)) {
			return fmt.Errorf("%q was sent after the failure", got)
		}
	}
	if graph != nil {
		err = graph.Close()
	}
	return errors.Join(err, stream.Close(), send.Close(), c.Close(ctx), s.Close())
}

// TestGraphOfClosedPlan: a wait that a graph has kept until its plan was closed is ErrClosed in the graph's stream, each time, and its
// signals are nothing.
func TestGraphOfClosedPlan(t *testing.T) {
	for _, far := range []bool{false, true} {
		t.Run(fmt.Sprintf("far=%t", far), func(t *testing.T) {
			backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
				near, err := host.New(g, nil)
				if err != nil {
					return err
				}
				var b backend.Backend = near
				if far {
					b = backendtest.Far(near, g, nil)
				}
				m := memory.New(b, g, &memory.Options{KernelTimeout: time.Minute})
				c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: m.SignalsBytes(1) + 4096})
				if err != nil {
					return err
				}
				s, err := c.Signals(ctx, 0, &memory.SignalsOptions{Channels: 1, Op: "the plan", Failed: func(err error) error { return err }})
				if err != nil {
					return err
				}
				stream, err := m.Device().NewStream()
				if err != nil {
					return err
				}
				if err := errors.Join(stream.BeginCapture(), s.SignalAll(stream, 0), s.WaitAll(stream, 0)); err != nil {
					return err
				}
				graph, err := stream.EndCapture()
				if err != nil {
					return err
				}
				if err := errors.Join(graph.Launch(stream), stream.Synchronize(ctx), c.Close(ctx), s.Close()); err != nil {
					return err
				}
				for range 2 {
					if err = errors.Join(graph.Launch(stream), stream.Synchronize(ctx)); !errors.Is(err, errs.ErrClosed) {
						err = fmt.Errorf("a graph of a closed plan: %w", err)
						break
					}
					err = nil
				}
				return errors.Join(err, graph.Close(), stream.Close(), m.Close(ctx))
			}))
		})
	}
}
