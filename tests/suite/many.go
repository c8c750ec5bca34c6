package suite

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// The collectives of lists, by the names of their cases.
const (
	reduceList    = "all_reduce_many"
	gatherList    = "all_gather_many"
	scatterList   = "reduce_scatter_many"
	broadcastList = "broadcast_many"
)

// manyCases: collectives of lists of tensors, in each form: every dtype, run in every way.
func manyCases(kind device.Kind) []Case {
	var cases []Case
	for _, what := range []string{reduceList, gatherList, scatterList, broadcastList} {
		for _, alg := range listForms(what, kind) {
			whole := false
			add := func(name string, run func(ctx context.Context, e *Env, l list) error, needs ...string) {
				l := list{what: what, algorithm: alg, dtype: tensor.Float32, op: kernels.Sum, counts: []int64{256, 0, 1, 67, 256, 1500}, whole: whole}
				if alg == kernels.OneShotLL { // which is for dtypes that have no line of data alone, and for what only moves
					l.dtype = tensor.Int32
				}
				cases = append(cases, Case{Name: fmt.Sprintf("%s/%s/%s", what, alg, name), Needs: append(needsOf(alg), needs...), Run: func(ctx context.Context, e *Env) error {
					return run(ctx, e, l)
				}})
			}
			add("lists", everyListCase)
			add("delayed", delayedListCase)
			add("replay_100", replayListCase, "graphs")
			add("overtaken", overtakenListCase)
			add("two_plans", twoListsCase)
			add("epoch_wrap", epochWrapListCase)
			if alg == kernels.OneShotPush && what == reduceList { // which has a kernel for lists of whole vectors
				whole = true
				add("whole/lists", everyListCase)
				add("whole/delayed", delayedListCase)
				add("whole/replay_100", replayListCase, "graphs")
				add("whole/overtaken", overtakenListCase)
				add("whole/two_plans", twoListsCase)
				add("whole/epoch_wrap", epochWrapListCase)
			}
		}
	}
	return append(cases, Case{Name: reduceList + "/errors", Needs: needsOf(kernels.Auto), Run: listErrorsCase},
		Case{Name: gatherList + "/errors", Needs: needsOf(kernels.Auto), Run: gatherErrorsCase})
}

// listForms is the forms of a list on a kind of device.
func listForms(what string, kind device.Kind) []kernels.Algorithm {
	cuda := kind == device.CUDA
	switch {
	case what == reduceList && cuda:
		return []kernels.Algorithm{kernels.OneShotPush, kernels.OneShotLL, kernels.TwoShotPull, kernels.Transfers}
	case what == reduceList:
		return []kernels.Algorithm{kernels.OneShot, kernels.TwoShot, kernels.Transfers}
	case what == scatterList && cuda:
		return []kernels.Algorithm{kernels.OneShotPush, kernels.OneShotLL, kernels.OneShotPull, kernels.Transfers}
	case cuda:
		return []kernels.Algorithm{kernels.OneShotLL, kernels.OneShotPull, kernels.Transfers}
	}
	return []kernels.Algorithm{kernels.OneShot, kernels.Transfers}
}

// list is a collective of many tensors as a case runs it.
type list struct {
	what      string
	algorithm kernels.Algorithm
	dtype     tensor.DType
	op        kernels.Op
	counts    []int64 // elements of each: of the larger tensor of a pair
	first     uint32  // epoch
	set       int     // which values go in
	whole     bool    // all are whole vectors of 16 bytes, at multiples of them: counts are filled up to such
}

// unit is how many elements are between tensors.
func (l list) unit() int64 {
	if l.whole {
		return 16 / l.dtype.Bytes()
	}
	return 1
}

// listed is the tensors of a list: parts of two larger ones, one element apart, at odd places, with poison between them; or a vector apart, at whole
// ones. Every other one is in place; of the rest some are aligned as their inputs are. A broadcast is in place, from the last rank.
type listed struct {
	list
	e         *Env
	ins, outs *tensor.Tensor
	pairs     []kernels.Pair
	at, to    []int64 // in elements, of each in its whole
}

func newListed(ctx context.Context, e *Env, l list) (*listed, error) {
	unit := l.unit()
	l.counts = slices.Clone(l.counts)
	total := 3 * unit
	for i, n := range l.counts {
		l.counts[i] = (n + unit - 1) / unit * unit
		total += l.counts[i] + unit
	}
	o := &listed{list: l, e: e}
	var err error
	if o.ins, err = e.mapped(ctx, l.dtype, total); err != nil {
		return nil, err
	}
	if o.outs, err = e.mapped(ctx, l.dtype, total); err != nil {
		return nil, err
	}
	at := unit
	for i, n := range l.counts {
		to := at
		if !o.inPlace(i) {
			to += int64(i%3) * unit
		}
		o.at, o.to = append(o.at, at), append(o.to, to)
		p, err := o.pair(i, n)
		if err != nil {
			return nil, err
		}
		o.pairs = append(o.pairs, p)
		at += n + unit
	}
	return o, o.fill(ctx)
}

func (o *listed) inPlace(i int) bool { return o.what == broadcastList || i%2 == 0 }

// pair is the tensors of number i, with n elements.
func (o *listed) pair(i int, n int64) (p kernels.Pair, err error) {
	at, to := o.at[i], o.to[i]
	lo, hi := o.share(n, o.e.R.Rank())
	most := (n + int64(o.e.R.WorldSize()) - 1) / int64(o.e.R.WorldSize())
	sub := func(of *tensor.Tensor, at, n int64) tensor.SymmetricTensor {
		t, subErr := of.Sub(at, n)
		err = errors.Join(err, subErr)
		return t
	}
	switch {
	case o.what == gatherList && o.inPlace(i):
		p = kernels.Pair{In: sub(o.ins, at+lo, hi-lo), Out: sub(o.ins, at, n)}
	case o.what == gatherList:
		p = kernels.Pair{In: sub(o.ins, at, most), Out: sub(o.outs, to, n)}
	case o.what == scatterList && o.inPlace(i):
		p = kernels.Pair{In: sub(o.ins, at, n), Out: sub(o.ins, at+lo, hi-lo)}
	case o.what == scatterList:
		p = kernels.Pair{In: sub(o.ins, at, n), Out: sub(o.outs, to, most)}
	case o.inPlace(i):
		p = kernels.Pair{In: sub(o.ins, at, n)}
	default:
		p = kernels.Pair{In: sub(o.ins, at, n), Out: sub(o.outs, to, n)}
	}
	return p, err
}

// share is the range of elements that rank has of n.
func (o *listed) share(n int64, rank int) (lo, hi int64) {
	most := (n + int64(o.e.R.WorldSize()) - 1) / int64(o.e.R.WorldSize())
	return min(int64(rank)*most, n), min(int64(rank+1)*most, n)
}

// root is that of a broadcast.
func (o *listed) root() int { return o.e.R.WorldSize() - 1 }

func (o *listed) Close(ctx context.Context) error { return closeAll(ctx, o.outs, o.ins) }

func (o *listed) plan(ctx context.Context) (*kernels.Plan, error) {
	p, err := o.make(ctx, o.pairs, &kernels.Options{Algorithm: o.algorithm, FirstEpoch: o.first})
	if err == nil && o.algorithm != kernels.Auto && p.Algorithm() != o.algorithm {
		err = errors.Join(fmt.Errorf("%s was asked for and %s came", o.algorithm, p.Algorithm()), p.Close(ctx))
	}
	return p, err
}

// make makes a plan of pairs.
func (o *listed) make(ctx context.Context, pairs []kernels.Pair, opts *kernels.Options) (*kernels.Plan, error) {
	switch o.what {
	case gatherList:
		return kernels.NewAllGatherMany(ctx, pairs, opts)
	case scatterList:
		return kernels.NewReduceScatterMany(ctx, pairs, o.op, opts)
	case broadcastList:
		var ts []tensor.SymmetricTensor
		for _, p := range pairs {
			ts = append(ts, p.In)
		}
		return kernels.NewBroadcastMany(ctx, ts, o.root(), opts)
	}
	return kernels.NewAllReduceMany(ctx, pairs, o.op, opts)
}

// values is elements lo to hi of tensor i as a rank brings them.
func (o *listed) values(i, rank int, lo, hi int64) (b []byte) {
	for k := lo; k < hi; k++ {
		b = appendValue(b, o.dtype, value(o.dtype, o.op, 1000*o.set+rank, o.at[i]+k))
	}
	return b
}

// before is the bytes of both wholes before a run, and after behind it.
func (o *listed) before() (ins, outs []byte) {
	width := o.dtype.Bytes()
	ins, outs = poisoned(o.ins.Bytes()), poisoned(o.outs.Bytes())
	for i, n := range o.counts {
		lo, hi, at := int64(0), n, o.at[i]
		if o.what == gatherList {
			lo, hi = o.share(n, o.e.R.Rank())
			if o.inPlace(i) {
				at += lo
			}
		}
		copy(ins[at*width:], o.values(i, o.e.R.Rank(), lo, hi))
	}
	return ins, outs
}

func (o *listed) after() (ins, outs []byte) {
	width, size := o.dtype.Bytes(), o.e.R.WorldSize()
	ins, outs = o.before()
	for i, n := range o.counts {
		var result []byte
		lo := int64(0) // where it begins in the larger tensor
		switch o.what {
		case gatherList:
			for r := range size {
				from, to := o.share(n, r)
				result = append(result, o.values(i, r, from, to)...)
			}
		case scatterList:
			var hi int64
			lo, hi = o.share(n, o.e.R.Rank())
			result = expectedOf(o.dtype, o.op, 1000*o.set, size, o.at[i]+lo, o.at[i]+hi)
		case broadcastList:
			result = o.values(i, o.root(), 0, n)
		default:
			result = expectedOf(o.dtype, o.op, 1000*o.set, size, o.at[i], o.at[i]+n)
		}
		if o.inPlace(i) {
			copy(ins[(o.at[i]+lo)*width:], result)
		} else {
			copy(outs[o.to[i]*width:], result)
		}
	}
	return ins, outs
}

// fill writes inputs and poison, when nobody works on the tensors any more and before anybody does again.
func (o *listed) fill(ctx context.Context) error {
	ins, outs := o.before()
	return errors.Join(o.e.R.Barrier(ctx), writeBytes(o.ins.Local(), ins), writeBytes(o.outs.Local(), outs), o.e.R.Barrier(ctx))
}

// check compares everything with what is expected after a run.
func (o *listed) check() error {
	ins, err := readBytes(o.ins.Local())
	if err != nil {
		return err
	}
	outs, err := readBytes(o.outs.Local())
	if err != nil {
		return err
	}
	wantIns, wantOuts := o.after()
	return errors.Join(sameBytes(o.dtype, ins, wantIns), sameBytes(o.dtype, outs, wantOuts))
}

// once makes a plan of a list, and runs it twice.
func (l list) once(ctx context.Context, e *Env) error {
	o, err := newListed(ctx, e, l)
	if err != nil {
		return err
	}
	p, err := o.plan(ctx)
	if err != nil {
		return err
	}
	for o.set = range 2 {
		e.Skew()
		if err := errors.Join(o.fill(ctx), p.Run(e.S), e.S.Synchronize(ctx), o.check()); err != nil {
			return fmt.Errorf("%s of %v %s, %s, run %d: %w", l.what, l.counts, l.dtype, l.op, o.set, err)
		}
	}
	return closeAll(ctx, p, o)
}

// everyListCase: lists of every dtype that the form has, and every operation; one tensor, nothing, many, some that are larger than the rest.
func everyListCase(ctx context.Context, e *Env, l list) error {
	lists := [][]int64{{0, 0, 0}, {3, 0, 17, 1, 64, 33}, {1}, {5, 4_001, 2}, slices.Repeat([]int64{256}, 50)}
	if !e.Short {
		lists = append(lists, []int64{77, 300_001, 1, 65_536})
	}
	i := 0
	for _, l.dtype = range tensor.DTypes() {
		float := l.dtype == tensor.Float16 || l.dtype == tensor.BFloat16 || l.dtype == tensor.Float32
		if combines := l.what == reduceList || l.what == scatterList; combines && (l.algorithm == kernels.OneShotPush && !float || l.algorithm == kernels.OneShotLL && float) {
			continue
		}
		for k, counts := range lists {
			i++
			// Of all lists of all dtypes one in seven has each list, and most dtypes and operations; of whole ones one in four.
			every := 7
			l.op, l.counts = kernels.Ops()[(i+k)%len(kernels.Ops())], counts
			if l.whole { // with the operations that the kernel for such has
				every, l.op = 4, []kernels.Op{kernels.Sum, kernels.Avg}[i%3%2]
			}
			if e.Short && i%every != 0 {
				continue
			}
			if err := l.once(ctx, e); err != nil {
				return err
			}
		}
	}
	return nil
}

// delayedListCase enqueues a run and a copy of what it gives, and closes everything before the device has begun.
func delayedListCase(ctx context.Context, e *Env, l list) error {
	o, err := newListed(ctx, e, l)
	if err != nil {
		return err
	}
	p, err := o.plan(ctx)
	if err != nil {
		return err
	}
	kept, free, err := private(e, o.ins.Bytes())
	if err != nil {
		return err
	}
	hold, release := holdUp()
	err = errors.Join(e.S.HostFunc(hold), e.S.HostFunc(func() { time.Sleep(delay / 5) }), p.Run(e.S), e.S.Copy(kept, o.ins.Ptr(), o.ins.Bytes()))
	release()
	if err := errors.Join(err, closeAll(ctx, p, o), e.S.Synchronize(ctx)); err != nil {
		return err
	}
	got := make([]byte, o.ins.Bytes())
	want, _ := o.after()
	return errors.Join(e.R.Device().CopyToHost(got, kept), sameBytes(o.dtype, got, want), free())
}

// replayListCase captures the copies of the inputs and outputs and a run, and replays them 100 times, with other values now and then.
func replayListCase(ctx context.Context, e *Env, l list) error {
	o, err := newListed(ctx, e, l)
	if err != nil {
		return err
	}
	p, err := o.plan(ctx)
	if err != nil {
		return err
	}
	n := o.ins.Bytes()
	src, free, err := private(e, n)
	if err != nil {
		return err
	}
	if err := errors.Join(e.S.BeginCapture(), e.S.Copy(o.ins.Ptr(), src, n), p.Run(e.S)); err != nil {
		return err
	}
	g, err := e.S.EndCapture()
	if err != nil {
		return err
	}
	var wrong error
	for o.set = range 4 {
		ins, _ := o.before()
		if err := e.R.Device().CopyFromHost(src, ins); err != nil {
			return err
		}
		e.Skew()
		for range 25 {
			if err := g.Launch(e.S); err != nil {
				return err
			}
		}
		if err := e.S.Synchronize(ctx); err != nil {
			return err
		}
		wrong = errors.Join(wrong, o.check(), e.R.Barrier(ctx)) // before anybody begins the next run
	}
	return errors.Join(wrong, g.Close(), free(), closeAll(ctx, p, o))
}

// overtakenListCase queues runs with other values each, while now one rank is late and then another: nobody may read or write what another one
// still needs.
func overtakenListCase(ctx context.Context, e *Env, l list) error {
	const runs = 6
	o, err := newListed(ctx, e, l)
	if err != nil {
		return err
	}
	p, err := o.plan(ctx)
	if err != nil {
		return err
	}
	n := o.ins.Bytes()
	kept, free, err := private(e, 3*runs*n)
	if err != nil {
		return err
	}
	src, ins, outs := kept, kept.Add(runs*n), kept.Add(2*runs*n)
	late := func() { time.Sleep(time.Millisecond) }
	for i := range runs {
		o.set = i
		at := int64(i) * n
		values, _ := o.before()
		if err := errors.Join(e.R.Device().CopyFromHost(src.Add(at), values), e.S.Copy(o.ins.Ptr(), src.Add(at), n)); err != nil {
			return err
		}
		turn := (i + e.R.Rank()) % 3
		if turn == 1 {
			err = e.S.HostFunc(late)
		}
		if err = errors.Join(err, p.Run(e.S)); turn == 2 {
			err = errors.Join(err, e.S.HostFunc(late))
		}
		if err := errors.Join(err, e.S.Copy(ins.Add(at), o.ins.Ptr(), n), e.S.Copy(outs.Add(at), o.outs.Ptr(), n)); err != nil {
			return err
		}
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return err
	}
	var wrong error
	gotIns, gotOuts := make([]byte, n), make([]byte, n)
	for o.set = range runs {
		at := int64(o.set) * n
		wantIns, wantOuts := o.after()
		err := errors.Join(e.R.Device().CopyToHost(gotIns, ins.Add(at)), e.R.Device().CopyToHost(gotOuts, outs.Add(at)),
			sameBytes(o.dtype, gotIns, wantIns), sameBytes(o.dtype, gotOuts, wantOuts))
		if err != nil {
			wrong = errors.Join(wrong, fmt.Errorf("run %d: %w", o.set, err))
		}
	}
	return errors.Join(wrong, free(), closeAll(ctx, p, o))
}

// twoListsCase runs two plans on two streams, in an order that differs from rank to rank.
func twoListsCase(ctx context.Context, e *Env, l list) error {
	other, err := e.R.NewStream()
	if err != nil {
		return err
	}
	l.op = kernels.Max // of which there may be any number
	a, err := newListed(ctx, e, l)
	if err != nil {
		return err
	}
	l.set = 1
	b, err := newListed(ctx, e, l)
	if err != nil {
		return err
	}
	pa, err := a.plan(ctx)
	if err != nil {
		return err
	}
	pb, err := b.plan(ctx)
	if err != nil {
		return err
	}
	if err := enqueued(e.odd(), 10, func() error { return pa.Run(e.S) }, func() error { return pb.Run(other) }); err != nil {
		return err
	}
	return errors.Join(e.S.Synchronize(ctx), other.Synchronize(ctx), other.Close(), a.check(), b.check(), closeAll(ctx, pb, pa, b, a))
}

// epochWrapListCase runs a plan while its counts go beyond the last number.
func epochWrapListCase(ctx context.Context, e *Env, l list) error {
	l.first = 1<<32 - 3
	o, err := newListed(ctx, e, l)
	if err != nil {
		return err
	}
	p, err := o.plan(ctx)
	if err != nil {
		return err
	}
	for o.set = range 6 {
		if err := errors.Join(o.fill(ctx), p.Run(e.S), e.S.Synchronize(ctx), o.check()); err != nil {
			return fmt.Errorf("run %d: %w", o.set, err)
		}
	}
	return closeAll(ctx, p, o)
}

// listErrorsCase: what a list must not be is refused on every rank alike, with the place in the list; and it works afterwards.
func listErrorsCase(ctx context.Context, e *Env) error {
	o, err := newListed(ctx, e, list{what: reduceList, dtype: tensor.Float32, op: kernels.Sum, counts: []int64{5, 6, 7}})
	if err != nil {
		return err
	}
	fresh, err := e.R.Zeros(ctx, tensor.Float32, 5)
	if err != nil {
		return err
	}
	ints, err := e.mapped(ctx, tensor.Int32, 5)
	if err != nil {
		return err
	}
	var all []int
	for r := range e.R.WorldSize() {
		all = append(all, r)
	}
	sub, err := e.R.Sub(ctx, all)
	if err != nil {
		return err
	}
	elsewhere, err := sub.Zeros(ctx, tensor.Float32, 5)
	if err != nil {
		return err
	}
	if err := elsewhere.Rendezvous(ctx); err != nil {
		return err
	}
	a, b, c := o.pairs[0], o.pairs[1], o.pairs[2]
	overlapping, err := o.ins.Sub(o.at[0]+2, 5)
	if err != nil {
		return err
	}
	refused := func(opts *kernels.Options, op kernels.Op, pairs ...kernels.Pair) error {
		p, err := kernels.NewAllReduceMany(ctx, pairs, op, opts)
		if err == nil {
			err = errors.Join(errors.New("no error"), p.Close(ctx))
		}
		return err
	}
	with := func(pairs ...kernels.Pair) error { return refused(nil, kernels.Sum, pairs...) }
	err = errors.Join(
		wantArgument("an empty list", with(), "a list of 0", "1 to 4096"),
		wantArgument("a list of nothing", with(kernels.Pair{}), "pairs[0].In"),
		wantArgument("a nil among others", with(a, kernels.Pair{}), "pairs[1].In"),
		wantArgument("the zero Tensor", with(a, kernels.Pair{In: b.In, Out: &tensor.Tensor{}}), "pairs[1].Out"),
		wantArgument("a list that is too long", refused(nil, kernels.Sum, slices.Repeat([]kernels.Pair{a}, kernels.MaxPairs+1)...), "a list of 4097"),
		wantError("no rendezvous", with(a, kernels.Pair{In: fresh}), symmem.ErrNoRendezvous, "pairs[1]"),
		wantArgument("another dtype", with(a, kernels.Pair{In: ints}), "pairs[1]", "i32", "f32"),
		wantArgument("another memory", with(a, kernels.Pair{In: elsewhere}), "pairs[1]", "another group"),
		wantArgument("another number of elements", with(a, kernels.Pair{In: b.In, Out: c.In}), "pairs[1]", "7", "6"),
		wantArgument("an output that overlaps its input", with(kernels.Pair{In: a.In, Out: overlapping}), "pairs[0].Out", "pairs[0]"),
		wantArgument("an output that is another's input", with(b, c, kernels.Pair{In: b.Out}), "pairs["),
		wantArgument("one tensor twice, in place", with(a, b, a), "pairs[2].Out", "pairs[0]"),
		wantArgument("an unknown operation", refused(nil, 0, a), "Op(0)", "sum"),
		wantArgument("an unknown form", refused(&kernels.Options{Algorithm: 99}, kernels.Sum, a), "99", "transfers"),
		wantError("a form that it has not", refused(&kernels.Options{Algorithm: kernels.TwoShotFlow}, kernels.Sum, a), symmem.ErrUnsupported, "two_shot_flow", "transfers"),
		wantArgument("a negative bound", refused(&kernels.Options{MaxBlocks: -1}, kernels.Sum, a), "-1", "MaxBlocks"),
	)
	if err != nil {
		return err
	}
	if w := e.R.WorldSize(); w > 1 {
		last := e.R.Rank() == w-1
		mine := func(pair, of kernels.Pair) kernels.Pair {
			if last {
				return of
			}
			return pair
		}
		longer := []kernels.Pair{a, b}
		if last {
			longer = append(longer, c)
		}
		half, err := b.In.Sub(0, 3)
		if err != nil {
			return err
		}
		err = errors.Join(
			namesAll(e, with(a, mine(b, c)), "pairs[1]", "6 elements", "7 elements"),
			namesAll(e, with(a, mine(kernels.Pair{In: half}, kernels.Pair{In: b.In})), "pairs[1]", "3 elements", "6 elements"),
			namesAll(e, with(longer...), "2 tensors", "3 tensors"),
			wantError("one rank's nil", with(a, mine(b, kernels.Pair{})), symmem.ErrInvalid, "pairs[1].In"),
		)
		if err != nil {
			return err
		}
	}
	p, err := o.plan(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(p.Run(e.S), e.S.Synchronize(ctx), o.check(), p.Close(ctx), wantError("Run of a closed plan", p.Run(e.S), symmem.ErrClosed)); err != nil {
		return err
	}
	err = closeAll(ctx, elsewhere, sub, ints, fresh, o)
	return errors.Join(err, wantError("closed tensors", with(a, b), symmem.ErrClosed))
}

// gatherErrorsCase: so are lists whose tensors are shared out or have a root.
func gatherErrorsCase(ctx context.Context, e *Env) error {
	w := int64(e.R.WorldSize())
	x, err := e.mapped(ctx, tensor.Float32, 12*w)
	if err != nil {
		return err
	}
	ints, err := e.mapped(ctx, tensor.Int32, 2*w)
	if err != nil {
		return err
	}
	sub := func(at, n int64) tensor.SymmetricTensor {
		t, subErr := x.Sub(at, n)
		err = errors.Join(err, subErr)
		return t
	}
	part, whole, other, third, long := sub(0, 2), sub(2*w, 2*w), sub(2, 2), sub(4*w, 2*w), sub(6*w, 4*w+1)
	if err != nil {
		return err
	}
	gather := func(pairs ...kernels.Pair) error {
		return notMade(ctx)(kernels.NewAllGatherMany(ctx, pairs, nil))
	}
	scatter := func(op kernels.Op, pairs ...kernels.Pair) error {
		return notMade(ctx)(kernels.NewReduceScatterMany(ctx, pairs, op, nil))
	}
	broadcast := func(root int, ts ...tensor.SymmetricTensor) error {
		return notMade(ctx)(kernels.NewBroadcastMany(ctx, ts, root, nil))
	}
	good := kernels.Pair{In: part, Out: whole}
	err = errors.Join(
		wantArgument("an empty list to gather", gather(), "a list of 0", "1 to 4096"),
		wantArgument("no output to gather to", gather(kernels.Pair{In: part}), "pairs[0].Out"),
		wantArgument("shares that do not fit", gather(good, kernels.Pair{In: other, Out: long}), "pairs[1]", fmt.Sprint(4*w+1)),
		wantArgument("one output twice", gather(good, kernels.Pair{In: other, Out: whole}), "pairs["),
		wantArgument("two dtypes in a pair", gather(kernels.Pair{In: part, Out: ints}), "pairs[0]", "i32", "f32"),
		wantArgument("no output of shares", scatter(kernels.Sum, kernels.Pair{In: whole}), "pairs[0].Out"),
		wantArgument("no operation", scatter(0, kernels.Pair{In: whole, Out: part}), "Op(0)"),
		wantArgument("two dtypes in a list that is reduced", scatter(kernels.Sum, kernels.Pair{In: whole, Out: part}, kernels.Pair{In: ints, Out: ints}), "pairs[1]", "i32", "f32"),
		wantArgument("a root that is no rank", broadcast(int(w), part), "root"),
		wantArgument("a nil to broadcast", broadcast(0, part, nil), "tensors[1]"),
		wantArgument("tensors that overlap", broadcast(0, part, part), "tensors[", "apart"),
	)
	if err != nil {
		return err
	}
	if last := e.R.Rank() == e.R.WorldSize()-1; w > 1 {
		mine, root := kernels.Pair{In: other, Out: third}, 0
		if last {
			mine, root = kernels.Pair{In: part, Out: third}, 1
		}
		err = errors.Join(
			namesAll(e, gather(good, mine), "pairs[1]"),
			namesAll(e, scatter(kernels.Sum, kernels.Pair{In: whole, Out: mine.In}), "pairs[0]"),
			namesAll(e, broadcast(0, whole, mine.In), "tensors[1]"),
			namesAll(e, broadcast(root, whole), "from rank 0", "from rank 1"),
		)
	}
	p, planErr := kernels.NewBroadcastMany(ctx, []tensor.SymmetricTensor{ints, x}, 0, nil)
	if err := errors.Join(err, planErr); err != nil {
		return err
	}
	return errors.Join(p.Run(e.S), e.S.Synchronize(ctx), closeAll(ctx, p, ints, x))
}

// notMade is the error of a constructor, or one that there is none.
func notMade(ctx context.Context) func(p *kernels.Plan, err error) error {
	return func(p *kernels.Plan, err error) error {
		if err == nil {
			err = errors.Join(errors.New("no error"), p.Close(ctx))
		}
		return err
	}
}
