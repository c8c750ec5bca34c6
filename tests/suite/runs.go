package suite

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// region is memory of this rank's device, and how its elements are compared.
type region struct {
	name  string
	dtype tensor.DType
	ptr   device.Ptr
	bytes int64
}

// runs is a plan whose inputs and outputs are known: before and after give the bytes of ins and outs for a set of values.
type runs struct {
	e             *Env
	plan          *kernels.Plan
	ins, outs     []region
	before, after func(set int) [][]byte
}

// staged is memory for the regions, so many times.
func (r *runs) staged(regions []region, times int) (at []device.Ptr, free func() error, err error) {
	var frees []func() error
	for _, g := range regions {
		p, free, err := private(r.e, int64(times)*g.bytes)
		if err != nil {
			return nil, nil, err
		}
		at, frees = append(at, p), append(frees, free)
	}
	return at, func() error {
		var err error
		for _, free := range frees {
			err = errors.Join(err, free())
		}
		return err
	}, nil
}

// same compares what was copied from the outputs after a run.
func (r *runs) same(set int, kept []device.Ptr, time int64) error {
	for i, want := range r.after(set) {
		g := r.outs[i]
		got := make([]byte, g.bytes)
		if err := r.e.R.Device().CopyToHost(got, kept[i].Add(time*g.bytes)); err != nil {
			return err
		}
		if err := sameBytes(g.dtype, got, want); err != nil {
			return fmt.Errorf("run %d, %s: %w", set, g.name, err)
		}
	}
	return nil
}

// queued enqueues n runs with other values each, without any wait of the host, while now one rank is late and then another, before a run or
// before it has taken its result; held says that nothing begins before all is enqueued.
func (r *runs) queued(ctx context.Context, n int, held bool) error {
	e := r.e
	src, freeSrc, err := r.staged(r.ins, n)
	if err != nil {
		return err
	}
	kept, freeKept, err := r.staged(r.outs, n)
	if err != nil {
		return err
	}
	release := func() {}
	if held {
		var hold func()
		hold, release = holdUp()
		if err := errors.Join(e.S.HostFunc(hold), e.S.HostFunc(func() { time.Sleep(delay / 5) })); err != nil {
			release()
			return err
		}
	}
	err = r.enqueue(n, src, kept)
	release()
	if err := errors.Join(err, e.S.Synchronize(ctx)); err != nil {
		return err
	}
	for set := range n {
		err = errors.Join(err, r.same(set, kept, int64(set)))
	}
	return errors.Join(err, freeSrc(), freeKept())
}

func (r *runs) enqueue(n int, src, kept []device.Ptr) error {
	e := r.e
	late := func() { time.Sleep(time.Millisecond) }
	for set := range n {
		for i, b := range r.before(set) {
			if err := e.R.Device().CopyFromHost(src[i].Add(int64(set)*r.ins[i].bytes), b); err != nil {
				return err
			}
		}
	}
	for set := range n {
		for i, g := range r.ins {
			if err := e.S.Copy(g.ptr, src[i].Add(int64(set)*g.bytes), g.bytes); err != nil {
				return err
			}
		}
		var err error
		turn := (set + e.R.Rank()) % 3
		if turn == 1 {
			err = e.S.HostFunc(late)
		}
		if err = errors.Join(err, r.plan.Run(e.S)); turn == 2 {
			err = errors.Join(err, e.S.HostFunc(late))
		}
		for i, g := range r.outs {
			err = errors.Join(err, e.S.Copy(kept[i].Add(int64(set)*g.bytes), g.ptr, g.bytes))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// replay captures the copies of the inputs, a run and the copies of the outputs, and replays them 100 times, with other values now and then.
func (r *runs) replay(ctx context.Context) error {
	e := r.e
	src, freeSrc, err := r.staged(r.ins, 1)
	if err != nil {
		return err
	}
	kept, freeKept, err := r.staged(r.outs, 1)
	if err != nil {
		return err
	}
	err = e.S.BeginCapture()
	for i, g := range r.ins {
		err = errors.Join(err, e.S.Copy(g.ptr, src[i], g.bytes))
	}
	err = errors.Join(err, r.plan.Run(e.S))
	for i, g := range r.outs {
		err = errors.Join(err, e.S.Copy(kept[i], g.ptr, g.bytes))
	}
	if err != nil {
		return err
	}
	graph, err := e.S.EndCapture()
	if err != nil {
		return err
	}
	for set := range 4 {
		for i, b := range r.before(set) {
			if err := e.R.Device().CopyFromHost(src[i], b); err != nil {
				return err
			}
		}
		e.Skew()
		for range 25 {
			if err := graph.Launch(e.S); err != nil {
				return err
			}
		}
		if err := errors.Join(e.S.Synchronize(ctx), r.same(set, kept, 0)); err != nil {
			return err
		}
	}
	return errors.Join(graph.Close(), freeSrc(), freeKept())
}

// crosses reports whether this rank enqueues plans of a form the other way round than others do. What NCCL carries out has one order on all ranks.
func (e *Env) crosses(alg kernels.Algorithm) bool {
	return e.odd() && !(overRails(e.R.Device().Kind(), alg) && e.R.Backend() == kernels.NCCL.Backend())
}

// odd reports whether this rank's number is.
func (e *Env) odd() bool { return e.R.Rank()%2 == 1 }

// enqueued enqueues a and b so many times, or, if they are crossed, the other way round.
func enqueued(crossed bool, rounds int, a, b func() error) error {
	if crossed {
		a, b = b, a
	}
	for range rounds {
		if err := errors.Join(a(), b()); err != nil {
			return err
		}
	}
	return nil
}
