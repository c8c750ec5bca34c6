package collective_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// TestGraphLaunchedWhileClosing: a graph of a plan that is launched while this rank waits for the others to close the plan, a tensor of it or the memory is ErrClosed, and runs nothing of the plan.
func TestGraphLaunchedWhileClosing(t *testing.T) {
	for _, what := range []string{"plan", "tensor", "memory"} {
		for form := range 3 {
			t.Run(fmt.Sprintf("%s/form=%d", what, form), func(t *testing.T) {
				onRanks(t, 2, time.Second, onHost, func(ctx context.Context, r *rank) error {
					return r.launchWhileClosing(ctx, what, form)
				})
			})
		}
	}
}

func (r *rank) launchWhileClosing(ctx context.Context, what string, form int) error {
	x, err := r.tensor(ctx, elements)
	if err != nil {
		return err
	}
	var runs atomic.Int32
	spec := r.forms(func() error { runs.Add(1); return nil })[form].spec
	spec.Tensors = []tensor.SymmetricTensor{x}
	p, err := collective.New(ctx, r.m, spec)
	if err != nil {
		return err
	}
	g, err := r.graph(p)
	if err != nil {
		return err
	}
	if err := errors.Join(g.Launch(r.s), r.s.Synchronize(ctx)); err != nil {
		return err
	}
	end := map[string]func(context.Context) error{"plan": p.Close, "tensor": x.Close, "memory": r.m.Close}[what]
	r.over = what == "memory"
	if r.Rank() == 0 {
		ended := make(chan error, 1)
		go func() { ended <- end(ctx) }()
		var told error
		for begin := time.Now(); !errors.Is(told, errs.ErrClosed) && time.Since(begin) < patience; time.Sleep(time.Millisecond) { // soon, without the other rank
			told = errors.Join(g.Launch(r.s), r.s.Synchronize(ctx))
		}
		had := runs.Load()
		if told = errors.Join(g.Launch(r.s), r.s.Synchronize(ctx)); !errors.Is(told, errs.ErrClosed) || runs.Load() != had {
			err = fmt.Errorf("a graph while rank 1 has not come: %d runs more; %w", runs.Load()-had, told)
		}
		err = errors.Join(err, r.Store().Set(ctx, "launched", nil), <-ended)
	} else {
		_, err = r.Store().Get(ctx, "launched")
		err = errors.Join(err, end(ctx))
	}
	switch what {
	case "plan":
		err = errors.Join(err, g.Close(), x.Close(ctx))
	case "tensor":
		err = errors.Join(err, g.Close(), p.Close(ctx))
	}
	return err
}

// work makes the GPUs be at work, or no longer. All ranks call it.
func (m *machine) work(ctx context.Context, r *rank, is bool) error {
	err := r.Barrier(ctx, "before")
	m.Mu.Lock()
	m.busy, m.late = is, is
	m.Mu.Unlock()
	return errors.Join(err, r.Barrier(ctx, "behind"))
}

// TestStreamThatIsBeingClosed: a plan whose stream is being closed, which waits for its kernel, still has its place on the device, and does not move to another stream before the kernel has ended.
func TestStreamThatIsBeingClosed(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		plans, streams, err := r.large(ctx, collective.Spec{Name: "plan 1"}, collective.Spec{Name: "plan 2"})
		if err != nil {
			return err
		}
		p, err := collective.New(ctx, r.m, collective.Spec{Name: "plan 0", CUDA: &collective.Kernel{
			Image: []byte(image), Function: "still", Blocks: 100, Threads: 32, EarlyEpoch: true, // so that nobody looks at records
		}})
		if err != nil {
			return err
		}
		s, err := r.streams()
		if err != nil {
			return err
		}
		if err := errors.Join(p.Run(s), plans[0].Run(streams[0]), m.work(ctx, r, true)); err != nil {
			return err
		}
		closed := make(chan error, 1)
		go func() { closed <- s.Close() }()
		for ctx.Err() == nil {
			if _, asked := s.Query(); errors.Is(asked, errs.ErrClosed) {
				break
			}
			time.Sleep(100 * time.Microsecond)
		}
		if told := plans[1].Run(streams[1]); !errors.Is(told, errs.ErrNoRoom) {
			err = fmt.Errorf("beside a plan on a stream that is being closed: %w", told)
		}
		if told := p.Run(streams[1]); !errors.Is(told, errs.ErrTwoStreams) {
			err = errors.Join(err, fmt.Errorf("a plan whose stream is being closed, on another one: %w", told))
		}
		if err := errors.Join(err, m.work(ctx, r, false), <-closed); err != nil {
			return err
		}
		if err := errors.Join(p.Run(streams[1]), plans[1].Run(streams[1])); err != nil {
			return fmt.Errorf("when the stream is closed: %w", err)
		}
		return errors.Join(r.m.Device().Synchronize(ctx), p.Close(ctx), plans[0].Close(ctx), plans[1].Close(ctx), streams[0].Close(), streams[1].Close())
	})
	assert.Empty(t, m.left())
}

// TestStreamAtRestThatIsBeingClosed: a plan whose work has ended is where it was no more as soon as somebody closes its stream, however long that takes: it moves to another one, and leaves its place to others.
func TestStreamAtRestThatIsBeingClosed(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	late := func(is bool) { // events, for which Close waits; streams say all the same that their work has ended
		m.Mu.Lock()
		m.late = is
		m.Mu.Unlock()
	}
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		plans, streams, err := r.large(ctx, collective.Spec{Name: "plan 1"}, collective.Spec{Name: "plan 2"})
		if err != nil {
			return err
		}
		p, err := collective.New(ctx, r.m, collective.Spec{Name: "plan 0", CUDA: &collective.Kernel{
			Image: []byte(image), Function: "still", Blocks: 100, Threads: 32, EarlyEpoch: true, // so that nobody looks at records
		}})
		if err != nil {
			return err
		}
		s, err := r.streams()
		if err != nil {
			return err
		}
		if err := errors.Join(p.Run(s), s.Synchronize(ctx), plans[0].Run(streams[0]), r.Barrier(ctx, "ran")); err != nil {
			return err
		}
		late(true)
		closed := make(chan error, 1)
		go func() { closed <- s.Close() }()
		for ctx.Err() == nil {
			if _, asked := s.Query(); errors.Is(asked, errs.ErrClosed) {
				break
			}
			time.Sleep(100 * time.Microsecond)
		}
		err = errors.Join(plans[1].Run(streams[1]), p.Run(streams[1]))
		select {
		case <-closed:
			err = errors.Join(err, errors.New("the stream was closed before"))
			closed <- nil
		default:
		}
		err = errors.Join(err, r.Barrier(ctx, "let on"))
		late(false)
		if err := errors.Join(err, <-closed); err != nil {
			return err
		}
		return errors.Join(r.m.Device().Synchronize(ctx), p.Close(ctx), plans[0].Close(ctx), plans[1].Close(ctx), streams[0].Close(), streams[1].Close())
	})
	assert.Empty(t, m.left())
}

// sub makes memory of a sub-group of both ranks, on the rank's device.
func (r *rank) sub(ctx context.Context) (*group.Group, *memory.Memory, error) {
	g, err := r.Sub(ctx, []int{0, 1})
	if err != nil {
		return nil, nil, err
	}
	near, err := host.New(g, nil)
	if err != nil {
		return nil, nil, err
	}
	return g, memory.New(nearGPU{near, r.m.Device()}, g, &memory.Options{KernelTimeout: patience}), nil
}

// onSubGroup makes a large plan on such memory.
func (r *rank) onSubGroup(ctx context.Context) (*group.Group, *memory.Memory, *collective.Plan, error) {
	g, m, err := r.sub(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	p, err := collective.New(ctx, m, collective.Spec{Name: "of a sub-group", CUDA: &collective.Kernel{Image: []byte(image), Function: "still", Blocks: 100, Threads: 32}})
	return g, m, p, err
}

// TestMemoryThatIsBeingClosed: a plan of a sub-group's memory that is being closed, which waits for its kernel, still has its place on the device.
func TestMemoryThatIsBeingClosed(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		plans, streams, err := r.large(ctx, collective.Spec{Name: "plan 1"}, collective.Spec{Name: "plan 2"})
		if err != nil {
			return err
		}
		g, sub, p, err := r.onSubGroup(ctx)
		if err != nil {
			return err
		}
		if err := errors.Join(p.Run(r.s), plans[0].Run(streams[0]), m.work(ctx, r, true)); err != nil {
			return err
		}
		closed := make(chan error, 1)
		go func() { closed <- sub.Close(ctx) }()
		for ctx.Err() == nil && sub.Closed() == nil {
			time.Sleep(100 * time.Microsecond)
		}
		if told := plans[1].Run(streams[1]); !errors.Is(told, errs.ErrNoRoom) {
			err = fmt.Errorf("beside a plan whose memory is being closed: %w", told)
		}
		if err := errors.Join(err, m.work(ctx, r, false), <-closed); err != nil {
			return err
		}
		if err := plans[1].Run(streams[1]); err != nil {
			return fmt.Errorf("when the memory is closed: %w", err)
		}
		return errors.Join(r.m.Device().Synchronize(ctx), plans[0].Close(ctx), plans[1].Close(ctx), streams[0].Close(), streams[1].Close(), p.Close(ctx), g.Close(ctx))
	})
	assert.Empty(t, m.left())
}

// TestMemoryThatWasKept: a plan of memory whose Close has found the device at work, and kept it, can never run again: it leaves its place when the kernel has ended, though nobody closes the memory again.
func TestMemoryThatWasKept(t *testing.T) {
	m := newMachine(2, map[string]fake{"still": still})
	onRanks(t, 2, patience, m.open, func(ctx context.Context, r *rank) error {
		plans, streams, err := r.large(ctx, collective.Spec{Name: "plan 1"}, collective.Spec{Name: "plan 2"})
		if err != nil {
			return err
		}
		g, sub, p, err := r.onSubGroup(ctx)
		if err != nil {
			return err
		}
		if err := errors.Join(p.Run(r.s), plans[0].Run(streams[0]), m.work(ctx, r, true)); err != nil {
			return err
		}
		short, cancel := context.WithTimeout(ctx, aWhile)
		defer cancel()
		kept := sub.Close(short)
		if !errors.Is(kept, context.DeadlineExceeded) || !sub.Busy() {
			err = fmt.Errorf("it was not kept: %w", kept)
		}
		if told := plans[1].Run(streams[1]); !errors.Is(told, errs.ErrNoRoom) {
			err = errors.Join(err, fmt.Errorf("beside a plan at work of memory that was kept: %w", told))
		}
		if err := errors.Join(err, m.work(ctx, r, false)); err != nil {
			return err
		}
		if err := plans[1].Run(streams[1]); err != nil {
			return fmt.Errorf("when the work has ended: %w", err)
		}
		return errors.Join(r.m.Device().Synchronize(ctx), plans[0].Close(ctx), plans[1].Close(ctx), streams[0].Close(), streams[1].Close(), sub.Close(ctx), p.Close(ctx), g.Close(ctx))
	})
	assert.Empty(t, m.left())
}

// TestPlanClosedWhileRecorded: a plan with a lane that is closed while a run of it is being recorded is closed, also on a device that outlives its memory: what the capture still has of it goes with
// the memory.
func TestPlanClosedWhileRecorded(t *testing.T) {
	onRanks(t, 2, patience, onHost, func(ctx context.Context, r *rank) error {
		d := r.m.Device().(*devhost.Device)
		g, err := r.Sub(ctx, []int{0, 1})
		if err != nil {
			return err
		}
		near, err := host.New(g, &host.Options{Device: d})
		if err != nil {
			return err
		}
		sub := memory.New(near, g, &memory.Options{KernelTimeout: patience})
		had := d.Stats().Streams
		p, err := collective.New(ctx, sub, collective.Spec{Name: "recorded", Program: &collective.Program{
			Signals: 1, Lane: true, Build: func(_ context.Context, b *collective.Builder) error {
				b.Signal(0)
				b.Wait(0)
				return nil
			},
		}})
		if err != nil {
			return err
		}
		err = errors.Join(r.s.BeginCapture(), p.Run(r.s), p.Close(ctx))
		graph, ended := r.s.EndCapture()
		if err := errors.Join(err, ended); err != nil {
			return err
		}
		if told := errors.Join(graph.Launch(r.s), r.s.Synchronize(ctx)); told != nil && !errors.Is(told, errs.ErrClosed) {
			return fmt.Errorf("the graph: %w", told)
		}
		if err := errors.Join(graph.Close(), sub.Close(ctx), g.Close(ctx)); err != nil {
			return err
		}
		if n := d.Stats().Streams; n != had {
			return fmt.Errorf("the device has %d streams, and had %d", n, had)
		}
		return nil
	})
}

// TestPlanBesideGraphsOfTheLast: a plan has its workspace for itself, and all zeros at first, though another goroutine goes on launching a graph of the plan that had the workspace before.
func TestPlanBesideGraphsOfTheLast(t *testing.T) {
	for form := range 3 {
		t.Run(fmt.Sprintf("form=%d", form), func(t *testing.T) {
			onRanks(t, 2, 300*time.Millisecond, onHost, func(ctx context.Context, r *rank) error {
				other, err := r.streams()
				if err != nil {
					return err
				}
				for round := range 6 {
					if err := r.planBesideGraph(ctx, form, round, other); err != nil {
						return fmt.Errorf("round %d: %w", round, err)
					}
				}
				return other.Close()
			})
		})
	}
}

func (r *rank) planBesideGraph(ctx context.Context, form, round int, other device.Stream) error {
	spec := broadcast(r.x, 0)
	if form > 0 {
		spec = r.program(form == 2, func(b *collective.Builder) {
			b.Send(0, collective.Put{Peer: 1 - b.Rank(), Tensor: collective.ToWorkspace, Local: r.x.Ptr(), Bytes: 64})
			b.Wait(0)
			b.Signal(1)
			b.Join()
			b.Finish(1)
		})
	}
	last, err := collective.New(ctx, r.m, spec)
	if err != nil {
		return err
	}
	g, err := r.graph(last)
	if err := errors.Join(err, r.fill(r.x, round)); err != nil {
		return err
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Microsecond):
				_, _ = g.Launch(other), other.Synchronize(ctx) // in vain, most often
			}
		}
	}()
	if r.Rank() == round%2 {
		time.Sleep(time.Duration(round%5) * time.Millisecond)
	}
	err = last.Close(ctx)
	next, newErr := collective.New(ctx, r.m, broadcast(r.x, 1)) // which looks for zeros
	if err := errors.Join(err, newErr); err != nil {
		return err
	}
	for run := range 3 {
		err = errors.Join(err, r.fill(r.x, run), next.Run(r.s), r.s.Synchronize(ctx), r.check(r.x, run, 1))
	}
	close(stop)
	<-stopped
	return errors.Join(err, next.Close(ctx), g.Close())
}
