package suite

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// planCases are about what plans promise besides their results: that they do not disturb each other at any size, whichever comes first
// on which rank, that they may move between streams, and that the ranks agree on the memory.
func planCases(kind device.Kind, backend string, world int, short bool) []Case {
	var cases []Case
	for _, alg := range ownForms("NewAllReduce", kind, backend) {
		if !kernels.Supported(kind, alg, tensor.Float32, kernels.Sum, world) {
			continue
		}
		needs := needsOn(kind, alg)
		add := func(name string, minWorld int, needs []string, run func(ctx context.Context, e *Env, alg kernels.Algorithm) error) {
			cases = append(cases, Case{Name: fmt.Sprintf("plans/%s/%s", alg, name), MinWorld: minWorld, Needs: needs, Run: func(ctx context.Context, e *Env) error {
				return run(ctx, e, alg)
			}})
		}
		add("other_stream", 1, needs, otherStreamCase)
		add("other_memory", 2, needs, otherMemoryCase)
		if !short || kind == device.CUDA || alg == kernels.TwoShot {
			if overRails(kind, alg) {
				needs = append(needs, Puts) // for barriers between the rounds
			}
			add("full_size", 2, needs, fullSizeCase)
			add("full_size_graph", 2, append(needs[:len(needs):len(needs)], "graphs"), fullSizeGraphCase)
		}
	}
	if kind == device.CUDA {
		cases = append(cases,
			Case{Name: "plans/room", MinWorld: 2, Needs: []string{"peer_pointers"}, Run: roomCase},
			Case{Name: "plans/max_blocks", MinWorld: 2, Needs: []string{"peer_pointers"}, Run: maxBlocksCase},
			Case{Name: "plans/exclusive", MinWorld: 2, Needs: []string{"peer_pointers"}, Run: exclusiveCase},
		)
	}
	return cases
}

// fullSize is a number of float32 elements for which the form takes all of the device that it ever takes.
func fullSize(e *Env, alg kernels.Algorithm) int64 {
	switch {
	case e.R.Device().Kind() != device.CUDA:
		return 1 << 18
	case e.Simulated && (alg == kernels.TwoShotFlow || alg == kernels.TwoShot || alg == kernels.Auto):
		return int64(e.R.WorldSize()) << 16 // a lap of 16 KiB for each of two blocks on each of 8 multiprocessors
	case e.Simulated:
		return 1 << 15
	case alg == kernels.TwoShotFlow, alg == kernels.TwoShot, alg == kernels.Auto:
		return 16 << 20
	}
	return 1 << 20
}

// otherStreamCase: a plan refuses a second stream while it runs on the first, and moves to it when it does not, each time.
func otherStreamCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	r := reduction{alg, tensor.Float32, kernels.Sum, true, 40_000, blocked, false}
	o, err := newOperands(ctx, e, r)
	if err != nil {
		return err
	}
	if err := twoStreamsOnePlan(ctx, e, o.in.SymmetricTensor, alg); err != nil {
		return err
	}
	p, err := o.plan(ctx, r)
	if err != nil {
		return err
	}
	other, err := e.R.NewStream()
	if err != nil {
		return err
	}
	for i := range 6 {
		s := e.S
		if i%2 == 1 {
			s = other
		}
		if err := errors.Join(writeBytes(o.in.Local(), input(r.dtype, r.op, e.R.Rank(), r.n)), p.Run(s), s.Synchronize(ctx)); err != nil {
			return fmt.Errorf("move %d: %w", i, err)
		}
		if err := o.check(ctx, e, r); err != nil {
			return fmt.Errorf("move %d: %w", i, err)
		}
	}
	if err := other.Close(); err != nil {
		return err
	}
	return closeAll(ctx, p, o)
}

// otherMemoryCase: ranks that come with other windows, or with other places in one, get an error that says so.
func otherMemoryCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	const n = 1000
	a, err := e.mapped(ctx, tensor.Float32, n+4)
	if err != nil {
		return err
	}
	b, err := e.mapped(ctx, tensor.Float32, n+4)
	if err != nil {
		return err
	}
	odd := e.R.Rank() == e.R.WorldSize()-1
	at := func(t *tensor.Tensor, offset int64) tensor.SymmetricTensor {
		part, subErr := t.Sub(offset, n)
		err = errors.Join(err, subErr)
		return part
	}
	pick := func(one, other tensor.SymmetricTensor) tensor.SymmetricTensor {
		if odd {
			return other
		}
		return one
	}
	for _, c := range []struct {
		what    string
		in, out tensor.SymmetricTensor
	}{
		{"another place of the input", pick(at(a, 0), at(a, 4)), nil},
		{"another window of the input", pick(at(a, 0), at(b, 0)), nil},
		{"another place of the output", at(a, 0), pick(at(b, 0), at(b, 4))},
		{"input and output the other way around", pick(at(a, 0), at(b, 0)), pick(at(b, 0), at(a, 0))},
	} {
		if err != nil {
			return err
		}
		p, err := kernels.NewAllReduce(ctx, c.in, kernels.Sum, &kernels.AllReduceOptions{Algorithm: alg, Out: c.out})
		if err == nil {
			err = errors.Join(errors.New("no error"), p.Close(ctx))
		}
		if err := namesAll(e, err, "purpose", "byte 0 of window", "window"); err != nil {
			return fmt.Errorf("%s: %w", c.what, err)
		}
	}
	// What all ranks agree on works.
	r := reduction{algorithm: alg, dtype: tensor.Float32, op: kernels.Sum, n: n, mode: blocked}
	if err := allReduceCase(ctx, e, r); err != nil {
		return err
	}
	return closeAll(ctx, b, a)
}

// twoOfThem are two plans of full size, each with a stream.
type twoOfThem struct {
	r      reduction
	a, b   *operands
	pa, pb *kernels.Plan
	s1, s2 device.Stream
	odd    bool
	late   time.Duration
}

func newTwoOfThem(ctx context.Context, e *Env, alg kernels.Algorithm) (_ *twoOfThem, err error) {
	t := &twoOfThem{r: reduction{alg, tensor.Float32, kernels.Sum, false, fullSize(e, alg), blocked, false}, s1: e.S, odd: e.crosses(alg)}
	if t.late = 30 * time.Millisecond; e.R.Device().Kind() == device.CUDA && !e.Short {
		t.late = 2 * time.Second
	}
	if t.s2, err = e.R.NewStream(); err != nil {
		return nil, err
	}
	if t.a, err = newOperands(ctx, e, t.r); err != nil {
		return nil, err
	}
	if t.b, err = newOperands(ctx, e, t.r); err != nil {
		return nil, err
	}
	if t.pa, err = t.a.plan(ctx, t.r); err != nil {
		return nil, err
	}
	t.pb, err = t.b.plan(ctx, t.r)
	return t, err
}

// fill gives both inputs their values. Those of the second are the next rank's, so that the sum is the same, and another one if a rank takes what is of one plan for the other's.
func (t *twoOfThem) fill(e *Env) error {
	values := func(rank int) []byte { return input(t.r.dtype, t.r.op, rank%e.R.WorldSize(), t.r.n) }
	return errors.Join(writeBytes(t.a.in.Local(), values(e.R.Rank())), writeBytes(t.b.in.Local(), values(e.R.Rank()+1)))
}

// finish waits for both streams and looks at both results.
func (t *twoOfThem) finish(ctx context.Context, e *Env) error {
	if err := errors.Join(t.s1.Synchronize(ctx), t.s2.Synchronize(ctx)); err != nil {
		return err
	}
	return errors.Join(t.a.check(ctx, e, t.r), t.b.check(ctx, e, t.r))
}

func (t *twoOfThem) close(ctx context.Context) error {
	return errors.Join(t.s2.Close(), closeAll(ctx, t.pb, t.pa, t.b, t.a))
}

// fullSizeCase: whatever one rank has on its device first, another may have second. Each round would never end if a plan left no
// room on the device for what another rank's plan waits for.
func fullSizeCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	t, err := newTwoOfThem(ctx, e, alg)
	if err != nil {
		return err
	}
	next, before := (e.R.Rank()+1)%e.R.WorldSize(), (e.R.Rank()+e.R.WorldSize()-1)%e.R.WorldSize()
	run := func(p *kernels.Plan, s device.Stream) func() error { return func() error { return p.Run(s) } }
	// What comes first is on the device, and waits there, before the second is enqueued.
	const between = 20 * time.Millisecond
	for _, round := range []struct {
		what      string
		even, odd []func() error
	}{
		{"two plans in opposite orders",
			[]func() error{run(t.pa, t.s1), run(t.pb, t.s2)},
			[]func() error{run(t.pb, t.s2), run(t.pa, t.s1)}},
		{"two plans again and again in opposite orders",
			[]func() error{run(t.pa, t.s1), run(t.pa, t.s1), run(t.pb, t.s2), run(t.pb, t.s2)},
			[]func() error{run(t.pb, t.s2), run(t.pb, t.s2), run(t.pa, t.s1), run(t.pa, t.s1)}},
		{"one rank late",
			[]func() error{run(t.pa, t.s1), run(t.pb, t.s2)},
			[]func() error{func() error { time.Sleep(t.late); return t.pb.Run(t.s2) }, run(t.pa, t.s1)}},
		{"a plan in front of a signal that a peer waits for in front of the plan",
			[]func() error{
				run(t.pa, t.s1), func() error { return t.b.in.Signal(t.s2, next, 0) }, func() error { return t.b.in.Wait(t.s2, before, 0) }},
			[]func() error{
				func() error { return t.b.in.Wait(t.s1, before, 0) }, run(t.pa, t.s1), func() error { return t.b.in.Signal(t.s2, next, 0) }}},
		{"two plans around a barrier on a third stream", nil, nil},
	} {
		if err := t.fill(e); err != nil {
			return err
		}
		// In place: a plan that ran ahead must not find a peer's input of the round before.
		if err := errors.Join(t.a.in.Barrier(t.s1, 1), t.s1.Synchronize(ctx)); err != nil {
			return err
		}
		steps := round.even
		if t.odd {
			steps = round.odd
		}
		twice := len(steps) == 4
		if round.even == nil {
			if err := t.aroundBarrier(ctx, e, between); err != nil {
				return fmt.Errorf("%s: %w", round.what, err)
			}
		}
		for _, step := range steps {
			if err := step(); err != nil {
				return fmt.Errorf("%s: %w", round.what, err)
			}
			time.Sleep(between)
		}
		if err := errors.Join(t.s1.Synchronize(ctx), t.s2.Synchronize(ctx)); err != nil {
			return fmt.Errorf("%s: %w", round.what, err)
		}
		if twice {
			continue // sums of sums: of the order alone
		}
		if err := t.a.check(ctx, e, t.r); err != nil {
			return fmt.Errorf("%s: %w", round.what, err)
		}
		if len(steps) == 3 {
			continue // the other plan did not run
		}
		if err := t.b.check(ctx, e, t.r); err != nil {
			return fmt.Errorf("%s, the second: %w", round.what, err)
		}
	}
	return t.close(ctx)
}

// aroundBarrier has both plans wait on all even ranks, while the odd ones come to a barrier first.
func (t *twoOfThem) aroundBarrier(ctx context.Context, e *Env, between time.Duration) error {
	s3, err := e.R.NewStream()
	if err != nil {
		return err
	}
	user, done, err := usersKernel(e)
	if err != nil {
		return err
	}
	plans := func() error {
		if err := errors.Join(t.pa.Run(t.s1), t.pb.Run(t.s2)); err != nil || user == nil {
			return err
		}
		time.Sleep(between)
		if err := errors.Join(user.Launch(s3), s3.Synchronize(ctx)); err != nil {
			return fmt.Errorf("a kernel with shared memory beside two plans that wait: %w", err)
		}
		return nil
	}
	barrier := func() error { return t.a.in.Barrier(s3, 2) }
	first, second := plans, barrier
	if t.odd {
		first, second = func() error { return errors.Join(barrier(), s3.Synchronize(ctx)) }, plans
	}
	if err := first(); err != nil {
		return err
	}
	time.Sleep(between)
	return errors.Join(second(), s3.Synchronize(ctx), t.s1.Synchronize(ctx), t.s2.Synchronize(ctx), done(), s3.Close())
}

// sharedPTX is a kernel as users have them: it needs more shared memory than a multiprocessor gives kernels that need none.
const sharedPTX = `.version 7.0
.target sm_70
.address_size 64
.visible .entry shared(.param .align 8 .b8 param[8]) {
	.shared .align 16 .b8 memory[40960];
	.reg .b32 %r;
	.reg .b64 %a;
	mov.u32 %r, 1;
	st.shared.u32 [memory], %r;
	ld.shared.u32 %r, [memory];
	ld.param.u64 %a, [param];
	st.global.u32 [%a], %r;
	ret;
}
`

// usersKernel prepares that kernel, or gives nil on a device that runs no compiled kernels.
func usersKernel(e *Env) (device.PreparedLaunch, func() error, error) {
	loader, ok := e.R.Device().(device.KernelLoader)
	if !ok {
		return nil, func() error { return nil }, nil
	}
	word, free, err := private(e, 4)
	if err != nil {
		return nil, nil, err
	}
	module, err := loader.LoadModule([]byte(sharedPTX))
	if err != nil {
		return nil, nil, err
	}
	f, err := module.Function("shared")
	if err != nil {
		return nil, nil, err
	}
	l, err := f.Prepare(device.Launch{Grid: [3]uint32{1}, Block: [3]uint32{32}, Params: [][]byte{binary.LittleEndian.AppendUint64(nil, uint64(word))}})
	if err != nil {
		return nil, nil, err
	}
	return l, func() error { return errors.Join(l.Close(), module.Close(), free()) }, nil
}

// fullSizeGraphCase does so in branches of a graph.
func fullSizeGraphCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	t, err := newTwoOfThem(ctx, e, alg)
	if err != nil {
		return err
	}
	fork, err := e.R.Device().NewEvent()
	if err != nil {
		return err
	}
	join, err := e.R.Device().NewEvent()
	if err != nil {
		return err
	}
	first, second := t.pa, t.pb
	if t.odd {
		first, second = second, first
	}
	if err := errors.Join(t.s1.BeginCapture(), t.s1.Record(fork), t.s2.WaitEvent(fork), first.Run(t.s1), second.Run(t.s2), t.s2.Record(join), t.s1.WaitEvent(join)); err != nil {
		return err
	}
	g, err := t.s1.EndCapture()
	if err != nil {
		return err
	}
	for i := range 3 {
		if err := t.fill(e); err != nil {
			return err
		}
		if err := errors.Join(t.a.in.Barrier(t.s1, 1), t.s1.Synchronize(ctx)); err != nil {
			return err
		}
		if t.odd && i == 1 {
			time.Sleep(t.late)
		}
		if err := g.Launch(t.s1); err != nil {
			return err
		}
		if err := t.finish(ctx, e); err != nil {
			return fmt.Errorf("launch %d: %w", i, err)
		}
	}
	if err := errors.Join(g.Close(), fork.Close(), join.Close()); err != nil {
		return err
	}
	return t.close(ctx)
}

// roomCase: a third plan of full size on a third stream is refused by name, on every rank, and runs when another one is closed.
func roomCase(ctx context.Context, e *Env) error {
	t, err := newTwoOfThem(ctx, e, kernels.TwoShotFlow)
	if err != nil {
		return err
	}
	c, err := newOperands(ctx, e, t.r)
	if err != nil {
		return err
	}
	pc, err := c.plan(ctx, t.r)
	if err != nil {
		return err
	}
	s3, err := e.R.NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(t.pa.Run(t.s1), t.pb.Run(t.s2)); err != nil {
		return err
	}
	refused := pc.Run(s3)
	room, ok := errors.AsType[*collective.RoomError](refused)
	if !ok || !errors.Is(refused, symmem.ErrNoRoom) || room.Streams != 2 {
		return fmt.Errorf("a third plan on a third stream: %v", refused)
	}
	// On a stream that has another plan there is room.
	if err := errors.Join(pc.Run(t.s2), t.s1.Synchronize(ctx), t.s2.Synchronize(ctx)); err != nil {
		return err
	}
	if err := errors.Join(t.a.check(ctx, e, t.r), t.b.check(ctx, e, t.r), c.check(ctx, e, t.r)); err != nil {
		return err
	}
	if err := t.pa.Close(ctx); err != nil {
		return err
	}
	if err := errors.Join(writeBytes(c.in.Local(), input(t.r.dtype, t.r.op, e.R.Rank(), t.r.n)), t.b.in.Barrier(s3, 1), pc.Run(s3), s3.Synchronize(ctx)); err != nil {
		return fmt.Errorf("a plan on a third stream when one of the others is closed: %w", err)
	}
	if err := errors.Join(c.check(ctx, e, t.r), s3.Close(), t.s2.Close()); err != nil {
		return err
	}
	return closeAll(ctx, pc, t.pb, c, t.b, t.a)
}

// maxBlocksCase: with fewer blocks there is room for more plans, in whatever order; the bound must be alike on all ranks.
func maxBlocksCase(ctx context.Context, e *Env) error {
	const plans = 5
	r := reduction{kernels.TwoShotFlow, tensor.Float32, kernels.Sum, false, min(fullSize(e, kernels.TwoShotFlow), 1<<20), blocked, false}
	var os []*operands
	var ps []*kernels.Plan
	var ss []device.Stream
	for range plans {
		o, err := newOperands(ctx, e, r)
		if err != nil {
			return err
		}
		p, err := kernels.NewAllReduce(ctx, o.in.SymmetricTensor, r.op, &kernels.AllReduceOptions{Algorithm: r.algorithm, MaxBlocks: 4})
		if err != nil {
			return err
		}
		s, err := e.R.NewStream()
		if err != nil {
			return err
		}
		os, ps, ss = append(os, o), append(ps, p), append(ss, s)
	}
	for i := range plans {
		if e.odd() {
			i = plans - 1 - i
		}
		if err := ps[i].Run(ss[i]); err != nil {
			return fmt.Errorf("plan %d: %w", i, err)
		}
	}
	for i := range plans {
		if err := errors.Join(ss[i].Synchronize(ctx), os[i].check(ctx, e, r), ss[i].Close()); err != nil {
			return fmt.Errorf("plan %d: %w", i, err)
		}
		if err := closeAll(ctx, ps[i], os[i]); err != nil {
			return err
		}
	}
	o, err := newOperands(ctx, e, r)
	if err != nil {
		return err
	}
	refused := func(most int) error {
		p, err := kernels.NewAllReduce(ctx, o.in.SymmetricTensor, r.op, &kernels.AllReduceOptions{MaxBlocks: most})
		if err == nil {
			err = errors.Join(errors.New("no error"), p.Close(ctx))
		}
		return err
	}
	if err := wantArgument("a negative bound", refused(-1), "-1"); err != nil {
		return err
	}
	if err := wantError("bounds that differ", refused(1+min(e.R.Rank(), 1)), symmem.ErrMismatch, "at most 1 blocks", "at most 2 blocks"); err != nil {
		return err
	}
	return o.Close(ctx)
}

// exclusiveCase: an exclusive plan has more of the device than half, beside which barriers of another stream run in whatever order; a plan on another stream is refused by
// name, as it is behind one, on every rank alike, until the other is closed; and ranks agree on it.
func exclusiveCase(ctx context.Context, e *Env) error {
	r := reduction{kernels.TwoShotPush, tensor.Float32, kernels.Sum, false, 2 * fullSize(e, kernels.TwoShotPush), blocked, true}
	var os [2]*operands
	var ps [2]*kernels.Plan
	var ss [2]device.Stream
	var err error
	for i := range os {
		if os[i], err = newOperands(ctx, e, r); err != nil {
			return err
		}
		opts := &kernels.AllReduceOptions{Algorithm: r.algorithm, Exclusive: i == 0}
		if ps[i], err = kernels.NewAllReduce(ctx, os[i].in.SymmetricTensor, r.op, opts); err != nil {
			return err
		}
		if ss[i], err = e.R.NewStream(); err != nil {
			return err
		}
	}
	run := func() error { return ps[0].Run(ss[0]) }
	barrier := func() error { return os[1].in.Barrier(ss[1], 2) }
	steps := []func() error{run, barrier}
	if e.odd() {
		steps = []func() error{barrier, run}
	}
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond) // it is on the device, and waits there
	}
	if err := errors.Join(ss[0].Synchronize(ctx), ss[1].Synchronize(ctx), os[0].check(ctx, e, r)); err != nil {
		return fmt.Errorf("an exclusive plan and a barrier in opposite orders: %w", err)
	}
	refused := func(what string, err error) (*collective.RoomError, error) {
		room, ok := errors.AsType[*collective.RoomError](err)
		if !ok || !errors.Is(err, symmem.ErrNoRoom) || room.Streams != 1 {
			return nil, fmt.Errorf("%s: %v", what, err)
		}
		return room, nil
	}
	room, err := refused("a plan on another stream than an exclusive one", ps[1].Run(ss[1]))
	if err != nil {
		return err
	}
	if room.Taken <= 0.5 || room.Takes > 0.5 {
		return fmt.Errorf("an exclusive plan takes %v of the device and one that is not %v", room.Taken, room.Takes)
	}
	if err := errors.Join(ps[1].Run(ss[0]), ss[0].Synchronize(ctx), os[1].check(ctx, e, r)); err != nil {
		return fmt.Errorf("a plan behind an exclusive one: %w", err)
	}
	if _, err := refused("an exclusive plan on another stream than one that is not", ps[0].Run(ss[1])); err != nil {
		return err
	}
	if err := ps[1].Close(ctx); err != nil {
		return err
	}
	if err := errors.Join(writeBytes(os[0].in.Local(), input(r.dtype, r.op, e.R.Rank(), r.n)), barrier(), ps[0].Run(ss[1]), ss[1].Synchronize(ctx), os[0].check(ctx, e, r)); err != nil {
		return fmt.Errorf("an exclusive plan when the other one is closed: %w", err)
	}
	differ := func(what string, make func(exclusive bool) (*kernels.Plan, error)) error {
		p, err := make(e.R.Rank() == 1)
		if err == nil {
			err = errors.Join(errors.New("no error"), p.Close(ctx))
		}
		return wantError(what, err, symmem.ErrMismatch, ", exclusive")
	}
	in := os[0].in.SymmetricTensor
	for _, err := range []error{
		differ("an exclusive all-reduce", func(exclusive bool) (*kernels.Plan, error) {
			return kernels.NewAllReduce(ctx, in, r.op, &kernels.AllReduceOptions{Exclusive: exclusive})
		}),
		differ("an exclusive broadcast", func(exclusive bool) (*kernels.Plan, error) {
			return kernels.NewBroadcast(ctx, in, 0, &kernels.Options{Exclusive: exclusive})
		}),
		differ("an exclusive list", func(exclusive bool) (*kernels.Plan, error) {
			return kernels.NewAllReduceMany(ctx, []kernels.Pair{{In: in}}, r.op, &kernels.Options{Exclusive: exclusive})
		}),
		differ("an exclusive barrier", func(exclusive bool) (*kernels.Plan, error) {
			return kernels.NewBarrier(ctx, e.R.Memory(), &kernels.Options{Exclusive: exclusive})
		}),
	} {
		if err != nil {
			return err
		}
	}
	if err := errors.Join(ps[0].Close(ctx), ss[0].Close(), ss[1].Close()); err != nil {
		return err
	}
	return closeAll(ctx, os[0], os[1])
}
