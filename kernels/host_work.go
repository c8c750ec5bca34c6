package kernels

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/symmem/symmem/device"
)

// hostWork is a plan's work on the host device.
type hostWork struct {
	plan      *Plan
	allReduce *hostAllReduce

	pending  atomic.Int64 // runs enqueued and not ended, those of graphs not counted
	captured atomic.Bool  // a run was recorded: graphs may launch it on any stream
	running  atomic.Bool  // a run is under way; kept only once captured
}

func (l hostLayout) purpose() string     { return "" }
func (l hostLayout) channelBytes() int64 { return l.total() }

func (l hostLayout) prepare(_ context.Context, p *Plan, op Op, firstEpoch uint32) (work, error) {
	k, err := newHostAllReduce(p, op, l, firstEpoch)
	if err != nil {
		return nil, err
	}
	return &hostWork{plan: p, allReduce: k}, nil
}

func (w *hostWork) enqueue(s device.Stream, recorded bool) error {
	l, ok := s.(device.HostLauncher)
	if !ok {
		return fmt.Errorf("a stream of %s cannot run kernels of the host: %w", s.Device().Name(), ErrUnsupported)
	}
	if recorded {
		w.captured.Store(true)
		return l.Launch((*recordedRun)(w))
	}
	w.pending.Add(1)
	err := l.Launch((*run)(w))
	if err != nil {
		w.pending.Add(-1)
	}
	return err
}

func (w *hostWork) settled() (bool, error) { return w.pending.Load() == 0, nil }

func (w *hostWork) close() error { return nil }

// run is the work as a stream runs it, and recordedRun as a graph does.
type (
	run         hostWork
	recordedRun hostWork
)

// String describes the plan in errors of the stream.
func (k *run) String() string         { return k.plan.name }
func (k *recordedRun) String() string { return k.plan.name }

// RunKernel runs the plan once.
func (k *run) RunKernel() error {
	w := (*hostWork)(k)
	err := w.once()
	w.pending.Add(-1)
	return err
}

// RunKernel runs the plan once.
func (k *recordedRun) RunKernel() error { return (*hostWork)(k).once() }

func (w *hostWork) once() error {
	if err := w.plan.released(); err != nil {
		return err
	}
	if err := w.plan.Err(); err != nil {
		return err // whichever stream this run is on has not got its result
	}
	if w.captured.Load() {
		// A graph may be launched on a stream that no Run was told of.
		if w.running.Swap(true) {
			return w.plan.fail(fmt.Errorf("running %s: %w", w.plan.name, ErrTwoStreams))
		}
		defer w.running.Store(false)
	}
	if err := w.allReduce.run(); err != nil {
		return w.plan.fail(err)
	}
	return nil
}
