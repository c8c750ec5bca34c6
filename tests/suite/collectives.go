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

// The collectives beside all-reduce, as cases are called.
const (
	broadcast     = "broadcast"
	reduce        = "reduce"
	allGather     = "all_gather"
	reduceScatter = "reduce_scatter"
	allToAll      = "all_to_all"
)

// constructors makes them.
var constructors = map[string]string{
	broadcast: "NewBroadcast", reduce: "NewReduce", allGather: "NewAllGather", reduceScatter: "NewReduceScatter", allToAll: "NewAllToAll",
}

// collectiveCases: every collective in each form, every dtype and count, at odd places, in place, run in every way.
func collectiveCases(kind device.Kind, backend string) []Case {
	var cases []Case
	for _, what := range []string{broadcast, reduce, allGather, reduceScatter, allToAll} {
		for _, alg := range ownForms(constructors[what], kind, backend) {
			add := func(name string, run func(ctx context.Context, e *Env, c collect) error, needs ...string) {
				c := collect{what: what, algorithm: alg, dtype: tensor.Float32, op: kernels.Sum}
				cases = append(cases, Case{Name: fmt.Sprintf("%s/%s/%s", what, alg, name), Needs: append(needsOn(kind, alg), needs...), Run: func(ctx context.Context, e *Env) error {
					return run(ctx, e, c)
				}})
			}
			add("every_count", everyCountCollective)
			add("large", largeCollective)
			add("large_vectors", largeVectorsCollective)
			add("delayed", delayedCollective)
			add("replay_100", replayCollective, "graphs")
			add("overtaken", overtakenCollective)
			add("two_plans", twoPlansCollective)
			add("other_stream", otherStreamCollective)
			add("epoch_wrap", epochWrapCollective)
			switch {
			case what != reduce && what != reduceScatter:
			case alg.RankOrder():
				add("same_bits", sameBitsCollective)
			default:
				add("lacking", lackingCollective)
			}
		}
		cases = append(cases, Case{Name: what + "/errors", Needs: needsOf(kernels.Auto), Run: func(ctx context.Context, e *Env) error {
			return collectiveErrors(ctx, e, what)
		}})
	}
	return cases
}

// libraryCollectiveCases: the collectives of the library below a backend, which have shares of one length only.
func libraryCollectiveCases(backend string) []Case {
	var cases []Case
	for _, what := range []string{broadcast, reduce, allGather, reduceScatter, allToAll} {
		for _, alg := range kernels.LibraryCollectives(constructors[what], backend) {
			add := func(name string, run func(ctx context.Context, e *Env, c collect) error, needs ...string) {
				c := collect{what: what, algorithm: alg, dtype: tensor.Float32, op: kernels.Sum, even: true}
				cases = append(cases, Case{Name: fmt.Sprintf("%s/%s/%s", what, alg, name), Needs: needs, Run: func(ctx context.Context, e *Env) error {
					return run(ctx, e, c)
				}})
			}
			add("dtypes", everyDTypeOfLibrary)
			add("delayed", delayedCollective)
			add("replay_100", replayCollective, "graphs")
			add("other_stream", otherStreamCollective)
		}
	}
	return cases
}

// everyDTypeOfLibrary runs every dtype that a library has, in place and not, to every root; uneven shares it refuses.
func everyDTypeOfLibrary(ctx context.Context, e *Env, c collect) error {
	w := int64(e.R.WorldSize())
	combines := c.what == reduce || c.what == reduceScatter
	for i, dtype := range tensor.DTypes() {
		if combines && !kernels.Supported(e.R.Device().Kind(), c.algorithm, dtype, c.op, int(w)) {
			continue
		}
		c.dtype, c.n, c.root = dtype, 34*w, i%int(w)
		if c.inPlace = c.canBeInPlace() && i%2 == 1 && c.algorithm != kernels.NVSHMEM; c.what == allToAll {
			c.n = 34
		}
		o, err := newCollected(ctx, e, c)
		if err != nil {
			return err
		}
		if err := errors.Join(o.run(ctx), o.Close(ctx)); err != nil {
			return fmt.Errorf("%s: %w", dtype, err)
		}
	}
	if c.inPlace = false; w == 1 || c.what != allGather && c.what != reduceScatter {
		return nil
	}
	refused := func(what, why string) error {
		o, err := newCollected(ctx, e, c)
		if err != nil {
			return err
		}
		_, err = o.plan(ctx)
		return errors.Join(wantError(what, err, symmem.ErrUnsupported, why), o.Close(ctx))
	}
	c.dtype, c.n = tensor.Float32, 34*w
	if c.algorithm == kernels.NVSHMEM {
		c.inPlace = true
		if err := refused("in place", "overlap"); err != nil {
			return err
		}
	}
	c.inPlace, c.n = false, 34*w+1
	return refused("shares that are not alike", "even")
}

// evened is n, or a little less, so that a library can share it out.
func (c collect) evened(n int64, world int) int64 {
	if c.even {
		n -= n % int64(world)
	}
	return n
}

// collect is one collective as a case runs it.
type collect struct {
	what      string
	algorithm kernels.Algorithm
	dtype     tensor.DType
	op        kernels.Op
	n         int64 // elements of what is larger of input and output; of one block of an all-to-all
	root      int
	inPlace   bool
	first     uint32 // epoch
	set       int    // which values go in
	even      bool   // shares are of one length
}

// elements is the size of input and output.
func (c collect) elements(world int) (in, out int64) {
	share := (c.n + int64(world) - 1) / int64(world)
	switch c.what {
	case allGather:
		return share, c.n
	case reduceScatter:
		return c.n, share
	case allToAll:
		return c.n * int64(world), c.n * int64(world)
	}
	return c.n, c.n
}

// share is the part of n elements that rank has in all_gather and reduce_scatter.
func (c collect) share(rank, world int) (lo, hi int64) {
	each := (c.n + int64(world) - 1) / int64(world)
	return min(int64(rank)*each, c.n), min(int64(rank+1)*each, c.n)
}

// values is elements lo to hi-1 of what rank puts in.
func (c collect) values(rank int, lo, hi int64) []byte {
	b := make([]byte, 0, (hi-lo)*c.dtype.Bytes())
	for i := lo; i < hi; i++ {
		b = appendValue(b, c.dtype, value(c.dtype, c.op, 1000*c.set+rank, i))
	}
	return b
}

// before is the bytes of the input and of the output before a run; in place and for a broadcast there is one tensor, which is the first.
func (c collect) before(rank, world int) (first, second []byte) {
	in, out := c.elements(world)
	switch {
	case c.inPlace && c.what == allGather:
		first = poisoned(out * c.dtype.Bytes())
		lo, hi := c.share(rank, world)
		copy(first[lo*c.dtype.Bytes():], c.values(rank, 0, hi-lo))
		return first, nil
	case c.inPlace || c.what == broadcast:
		return c.values(rank, 0, in), nil
	}
	return c.values(rank, 0, in), poisoned(out * c.dtype.Bytes())
}

// after is those bytes after the run.
func (c collect) after(rank, world int) (first, second []byte) {
	first, second = c.before(rank, world)
	out := second
	if second == nil {
		out = first
	}
	width := c.dtype.Bytes()
	combined := func(lo, hi int64) []byte { return expectedOf(c.dtype, c.op, 1000*c.set, world, lo, hi) }
	switch c.what {
	case broadcast:
		copy(out, c.values(c.root, 0, c.n))
	case reduce:
		if rank == c.root {
			copy(out, combined(0, c.n))
		}
	case allGather:
		for r := range world {
			lo, hi := c.share(r, world)
			copy(out[lo*width:], c.values(r, 0, hi-lo))
		}
	case reduceScatter:
		lo, hi := c.share(rank, world)
		if c.inPlace {
			out = out[lo*width:]
		}
		copy(out, combined(lo, hi))
	case allToAll:
		for r := range world {
			copy(out[int64(r)*c.n*width:], c.values(r, int64(rank)*c.n, int64(rank+1)*c.n))
		}
	}
	return first, second
}

// collected is the tensors of a collect: parts of larger ones that are poisoned around them.
type collected struct {
	collect
	e      *Env
	wholes []tensor.SymmetricTensor
	parts  []tensor.SymmetricTensor // in the order of before
	at     int64                    // of the parts in the wholes, in elements
}

// on puts the collective's tensors into larger ones, of which the second may be nil where one will do.
func (c collect) on(e *Env, first, second tensor.SymmetricTensor, at int64) (*collected, error) {
	o := &collected{collect: c, e: e, wholes: []tensor.SymmetricTensor{first}, at: at}
	in, out := c.elements(e.R.WorldSize())
	if c.inPlace {
		in = max(in, out)
	} else if c.what != broadcast {
		o.wholes = append(o.wholes, second)
	}
	for i, w := range o.wholes {
		part, err := w.Sub(at, []int64{in, out}[i])
		if err != nil {
			return nil, err
		}
		o.parts = append(o.parts, part)
	}
	return o, nil
}

// newCollected is on with tensors of its own, at an odd place.
func newCollected(ctx context.Context, e *Env, c collect) (*collected, error) {
	in, out := c.elements(e.R.WorldSize())
	first, err := e.mapped(ctx, c.dtype, max(in, out)+2*guardElements)
	if err != nil {
		return nil, err
	}
	second, err := e.mapped(ctx, c.dtype, max(in, out)+2*guardElements)
	if err != nil {
		return nil, err
	}
	o, err := c.on(e, first, second, guardElements)
	if err != nil {
		return nil, err
	}
	if len(o.wholes) == 1 {
		o.wholes = append(o.wholes, second) // stays as it is
	}
	return o, o.fill()
}

// out is the tensor that is looked at.
func (o *collected) out() tensor.SymmetricTensor { return o.parts[len(o.parts)-1] }

// fill writes what is there before a run, and poison around it.
func (o *collected) fill() error {
	first, second := o.before(o.e.R.Rank(), o.e.R.WorldSize())
	return o.each(first, second, func(w tensor.SymmetricTensor, all []byte) error { return writeBytes(w.Local(), all) })
}

// check compares all that there is with what there should be after a run.
func (o *collected) check() error {
	first, second := o.after(o.e.R.Rank(), o.e.R.WorldSize())
	return o.each(first, second, func(w tensor.SymmetricTensor, all []byte) error {
		got, err := readBytes(w.Local())
		if err != nil {
			return err
		}
		if err := sameBytes(o.dtype, got, all); err != nil {
			return fmt.Errorf("%s of %d elements, root %d, in place %t, from element %d of a larger tensor on: %w", o.what, o.n, o.root, o.inPlace, o.at, err)
		}
		return nil
	})
}

func (o *collected) each(first, second []byte, f func(w tensor.SymmetricTensor, all []byte) error) error {
	for i, part := range [][]byte{first, second}[:len(o.wholes)] {
		all := poisoned(o.wholes[i].Bytes())
		copy(all[o.at*o.dtype.Bytes():], part)
		if err := f(o.wholes[i], all); err != nil {
			return err
		}
	}
	return nil
}

// plan makes the plan.
func (o *collected) plan(ctx context.Context) (*kernels.Plan, error) {
	opts := &kernels.Options{Algorithm: o.algorithm, FirstEpoch: o.first}
	in, out := o.parts[0], o.out()
	lo, hi := o.share(o.e.R.Rank(), o.e.R.WorldSize())
	var err error
	switch {
	case o.inPlace && o.what == allGather:
		in, err = in.Sub(lo, hi-lo)
	case o.inPlace && o.what == reduceScatter:
		out, err = out.Sub(lo, hi-lo)
	}
	if err != nil {
		return nil, err
	}
	p, err := newCollective(ctx, o.what, in, out, o.op, o.root, opts)
	if err == nil && o.algorithm != kernels.Auto && p.Algorithm() != o.algorithm {
		err = fmt.Errorf("%s was asked for and %s came", o.algorithm, p.Algorithm())
	}
	return p, err
}

func newCollective(ctx context.Context, what string, in, out tensor.SymmetricTensor, op kernels.Op, root int, opts *kernels.Options) (*kernels.Plan, error) {
	switch what {
	case broadcast:
		return kernels.NewBroadcast(ctx, in, root, opts)
	case reduce:
		return kernels.NewReduce(ctx, in, out, op, root, opts)
	case allGather:
		return kernels.NewAllGather(ctx, in, out, opts)
	case reduceScatter:
		return kernels.NewReduceScatter(ctx, in, out, op, opts)
	}
	return kernels.NewAllToAll(ctx, in, out, opts)
}

// run makes a plan, runs it, looks at what came of it, and closes it.
func (o *collected) run(ctx context.Context) error {
	p, err := o.plan(ctx)
	if err != nil {
		return err
	}
	o.e.Skew()
	return errors.Join(p.Run(o.e.S), o.e.S.Synchronize(ctx), o.check(), p.Close(ctx))
}

func (o *collected) Close(ctx context.Context) error {
	var err error
	for _, w := range o.wholes {
		err = errors.Join(err, w.Close(ctx))
	}
	return err
}

// canBeInPlace reports whether input and output may be in one tensor.
func (c collect) canBeInPlace() bool { return c.what != broadcast && c.what != allToAll }

// sumsOnly reports whether the form combines, and has sums of f32, f16 and bf16 only.
func (c collect) sumsOnly() bool {
	return (c.what == reduce || c.what == reduceScatter) && c.algorithm.NeedsMulticast()
}

// floatsOnly reports whether the form has f32, f16 and bf16 only.
func (c collect) floatsOnly() bool {
	return c.sumsOnly() || (c.what == reduce || c.what == reduceScatter) && c.algorithm == kernels.OneShotPush
}

// lackingCollective: what a form that adds in any order has not, every rank is told alike.
func lackingCollective(ctx context.Context, e *Env, c collect) error {
	c.n = 50
	for _, has := range []struct {
		dtype tensor.DType
		op    kernels.Op
	}{{tensor.Float64, kernels.Sum}, {tensor.Int32, kernels.Sum}, {tensor.Uint16, kernels.Sum}, {tensor.Float32, kernels.Avg}, {tensor.BFloat16, kernels.Max}, {tensor.Float16, kernels.Sum}} {
		c.dtype, c.op = has.dtype, has.op
		if overRails(e.R.Device().Kind(), c.algorithm) && !e.exactOverRails(c.op) {
			continue
		}
		o, err := newCollected(ctx, e, c)
		if err != nil {
			return err
		}
		if err = o.run(ctx); !e.supported(c.algorithm, c.dtype, c.op) {
			err = wantError(fmt.Sprintf("%s of %s", c.op, c.dtype), err, symmem.ErrUnsupported, c.algorithm.String())
		}
		if err := errors.Join(err, o.Close(ctx)); err != nil {
			return err
		}
	}
	return nil
}

// onPair runs f with two tensors of a dtype.
func onPair(ctx context.Context, e *Env, dtype tensor.DType, n int64, f func(first, second tensor.SymmetricTensor) error) error {
	first, err := e.mapped(ctx, dtype, n)
	if err != nil {
		return err
	}
	second, err := e.mapped(ctx, dtype, n)
	if err != nil {
		return err
	}
	if err := f(first, second); err != nil {
		return err
	}
	return closeAll(ctx, second, first)
}

// everyCountCollective runs counts around all boundaries, every dtype, of reductions every operation, from and to every rank, at every place
// in 16 bytes and in place: in turn where few rounds are wanted, and else every count in dtypes of each width.
func everyCountCollective(ctx context.Context, e *Env, c collect) error {
	w := e.R.WorldSize()
	counts := []int64{0, 1, 2, 3, 7, 8, 9, 15, 17, 33, 65, 129, 513}
	if !e.Short {
		counts = append(counts, 4, 5, 6, 16, 31, 127, 257, 10, 11, 12, 13, 14, 18, 32, 47, 48, 49, 63, 64, 128, 255, 256, 511, 512)
	}
	widths := []tensor.DType{tensor.Int8, tensor.BFloat16, tensor.Float32, tensor.Float64}
	dtypes := tensor.DTypes()
	if e.Short && c.what != reduce && c.what != reduceScatter {
		dtypes = widths // where elements are only moved, the others are no different
	}
	ops := kernels.Ops()
	if c.floatsOnly() {
		widths = []tensor.DType{tensor.BFloat16, tensor.Float32}
		dtypes = []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32}
	}
	if c.sumsOnly() {
		ops = []kernels.Op{kernels.Sum}
	}
	rails := overRails(e.R.Device().Kind(), c.algorithm) && (c.what == reduce || c.what == reduceScatter)
	if rails {
		dtypes = slices.DeleteFunc(slices.Clone(dtypes), func(d tensor.DType) bool { return !e.supported(c.algorithm, d, kernels.Sum) })
	}
	for j, dtype := range dtypes {
		c.dtype = dtype
		err := onPair(ctx, e, dtype, 540*int64(w), func(first, second tensor.SymmetricTensor) error {
			for i, n := range counts {
				if turn := i%len(dtypes) == j; !turn && (e.Short || !slices.Contains(widths, dtype)) {
					continue
				}
				c.n, c.root, c.op = n, (i+j)%w, ops[(i+j)%len(ops)]
				c.inPlace = c.canBeInPlace() && (i/2+j)%2 == 1
				if rails && (!e.supported(c.algorithm, dtype, c.op) || !e.exactOverRails(c.op)) {
					c.op = kernels.Sum
				}
				o, err := c.on(e, first, second, int64(5*i+j)%17)
				if err != nil {
					return err
				}
				if err := errors.Join(o.fill(), o.run(ctx)); err != nil {
					return fmt.Errorf("%s: %w", c.op, err)
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// largeCollective runs a message that is cut into laps, or goes by way of all ranks, where the form does so.
func largeCollective(ctx context.Context, e *Env, c collect) error {
	c.dtype, c.n = tensor.Float64, 5_001
	if c.floatsOnly() {
		c.dtype = tensor.Float32
	}
	switch {
	case e.R.Device().Kind() == device.CUDA && !e.Short:
		c.n = 3<<20 + 1
	case c.algorithm == kernels.Transfers && c.what != allGather && c.what != allToAll:
		c.n = 140_001
	}
	if c.what == allToAll {
		c.n /= int64(e.R.WorldSize())
	}
	for _, c.inPlace = range []bool{false, true} {
		if c.inPlace && !c.canBeInPlace() || e.Short && c.canBeInPlace() && c.inPlace == (c.what == reduceScatter) {
			continue
		}
		if c.root = 0; !c.inPlace {
			c.root = e.R.WorldSize() - 1
		}
		o, err := newCollected(ctx, e, c)
		if err != nil {
			return err
		}
		if err := errors.Join(o.run(ctx), o.Close(ctx)); err != nil {
			return err
		}
	}
	return nil
}

// largeVectorsCollective runs a message of whole vectors of 16 bytes, for which GPUs have kernels of their own: on real ones as many that every block has several chunks, and a
// rank several of what it passes on or combines for another. Lines, which have room for all of it twice, stay short.
func largeVectorsCollective(ctx context.Context, e *Env, c collect) error {
	w := int64(e.R.WorldSize())
	c.dtype, c.n = tensor.Float32, 1<<13*w
	if e.R.Device().Kind() == device.CUDA && !e.Simulated && c.algorithm != kernels.OneShotLL {
		c.n = 6 << 20
	}
	vectors := 4 * w // elements
	c.n = c.n / vectors * vectors
	if c.what == allGather || c.what == allToAll { // of which n is a piece
		c.n = c.n / w / 4 * 4
	}
	for _, c.root = range []int{0, int(w) - 1}[:min(w, 2)] {
		if c.inPlace = c.root > 0 && c.canBeInPlace(); c.root > 0 && e.Short && c.what != broadcast && c.what != reduce {
			continue
		}
		in, out := c.elements(int(w))
		err := onPair(ctx, e, c.dtype, max(in, out)+guardElements, func(first, second tensor.SymmetricTensor) error {
			o, err := c.on(e, first, second, 0)
			if err != nil {
				return err
			}
			return errors.Join(o.fill(), o.run(ctx))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// delayedCollective enqueues everything and closes everything before the device has begun.
func delayedCollective(ctx context.Context, e *Env, c collect) error {
	c.n, c.root = c.evened(2050, e.R.WorldSize()), e.R.WorldSize()-1
	o, err := newCollected(ctx, e, c)
	if err != nil {
		return err
	}
	p, err := o.plan(ctx)
	if err != nil {
		return err
	}
	out := o.out()
	kept, free, err := private(e, out.Bytes())
	if err != nil {
		return err
	}
	hold, release := holdUp()
	err = errors.Join(e.S.HostFunc(hold), e.S.HostFunc(func() { time.Sleep(delay / 5) }), p.Run(e.S), e.S.Copy(kept, out.Ptr(), out.Bytes()))
	release()
	if err != nil {
		return err
	}
	if err := errors.Join(p.Close(ctx), o.Close(ctx), e.S.Synchronize(ctx)); err != nil {
		return err
	}
	return errors.Join(o.same(kept), free()) // everything collective has come to its end
}

// same compares what was copied from the output after a run.
func (o *collected) same(kept device.Ptr) error {
	got := make([]byte, o.out().Bytes())
	if err := o.e.R.Device().CopyToHost(got, kept); err != nil {
		return err
	}
	first, second := o.after(o.e.R.Rank(), o.e.R.WorldSize())
	if second == nil {
		second = first
	}
	return sameBytes(o.dtype, got, second)
}

// replayCollective captures the copy of the input, a run, and the copy of the output, and replays them with other values now and then.
func replayCollective(ctx context.Context, e *Env, c collect) error {
	c.n, c.root = c.evened(1003, e.R.WorldSize()), e.R.WorldSize()/2
	o, err := newCollected(ctx, e, c)
	if err != nil {
		return err
	}
	p, err := o.plan(ctx)
	if err != nil {
		return err
	}
	in, out := o.parts[0], o.out()
	src, freeSrc, err := private(e, in.Bytes())
	if err != nil {
		return err
	}
	kept, freeKept, err := private(e, out.Bytes())
	if err != nil {
		return err
	}
	if err := errors.Join(e.S.BeginCapture(), e.S.Copy(in.Ptr(), src, in.Bytes()), p.Run(e.S), e.S.Copy(kept, out.Ptr(), out.Bytes())); err != nil {
		return err
	}
	g, err := e.S.EndCapture()
	if err != nil {
		return err
	}
	var wrong error
	for o.set = range 4 {
		first, _ := o.before(e.R.Rank(), e.R.WorldSize())
		if err := e.R.Device().CopyFromHost(src, first); err != nil {
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
		if err := o.same(kept); err != nil {
			wrong = errors.Join(wrong, fmt.Errorf("values %d: %w", o.set, err))
		}
	}
	return errors.Join(wrong, g.Close(), freeSrc(), freeKept(), p.Close(ctx), o.Close(ctx))
}

// overtakenCollective queues runs with other values each, without any wait of the host, while now one rank is late and then another, before
// a run or before it has taken its result: nobody may read or write what another one still needs.
func overtakenCollective(ctx context.Context, e *Env, c collect) error {
	c.n = 5000
	const runs = 6
	for _, c.root = range []int{0, e.R.WorldSize() - 1} {
		if c.root == 0 && c.what != broadcast && c.what != reduce {
			continue
		}
		o, err := newCollected(ctx, e, c)
		if err != nil {
			return err
		}
		p, err := o.plan(ctx)
		if err != nil {
			return err
		}
		in, out := o.parts[0], o.out()
		src, freeSrc, err := private(e, runs*in.Bytes())
		if err != nil {
			return err
		}
		kept, freeKept, err := private(e, runs*out.Bytes())
		if err != nil {
			return err
		}
		late := func() { time.Sleep(time.Millisecond) }
		for i := range runs {
			o.set = i
			first, _ := o.before(e.R.Rank(), e.R.WorldSize())
			at := src.Add(int64(i) * in.Bytes())
			if err := errors.Join(e.R.Device().CopyFromHost(at, first), e.S.Copy(in.Ptr(), at, in.Bytes())); err != nil {
				return err
			}
			turn := (i + e.R.Rank()) % 3
			if turn == 1 {
				err = e.S.HostFunc(late)
			}
			if err = errors.Join(err, p.Run(e.S)); turn == 2 {
				err = errors.Join(err, e.S.HostFunc(late))
			}
			if err := errors.Join(err, e.S.Copy(kept.Add(int64(i)*out.Bytes()), out.Ptr(), out.Bytes())); err != nil {
				return err
			}
		}
		if err := e.S.Synchronize(ctx); err != nil {
			return err
		}
		var wrong error
		for o.set = range runs {
			if err := o.same(kept.Add(int64(o.set) * out.Bytes())); err != nil {
				wrong = errors.Join(wrong, fmt.Errorf("run %d, root %d: %w", o.set, c.root, err))
			}
		}
		if err := errors.Join(wrong, freeSrc(), freeKept(), p.Close(ctx), o.Close(ctx)); err != nil {
			return err
		}
	}
	return nil
}

// twoPlansCollective runs two plans on two streams, in an order that differs from rank to rank.
func twoPlansCollective(ctx context.Context, e *Env, c collect) error {
	c.n = 4001
	other, err := e.R.NewStream()
	if err != nil {
		return err
	}
	a, err := newCollected(ctx, e, c)
	if err != nil {
		return err
	}
	c.set, c.root = 1, e.R.WorldSize()-1
	b, err := newCollected(ctx, e, c)
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
	if err := enqueued(e.crosses(c.algorithm), 10, func() error { return pa.Run(e.S) }, func() error { return pb.Run(other) }); err != nil {
		return err
	}
	return errors.Join(e.S.Synchronize(ctx), other.Synchronize(ctx), other.Close(), a.check(), b.check(),
		pb.Close(ctx), pa.Close(ctx), b.Close(ctx), a.Close(ctx))
}

// otherStreamCollective: a plan refuses a second stream while it runs on the first, and moves to it when it does not.
func otherStreamCollective(ctx context.Context, e *Env, c collect) error {
	c.n = c.evened(3000, e.R.WorldSize())
	o, err := newCollected(ctx, e, c)
	if err != nil {
		return err
	}
	p, err := o.plan(ctx)
	if err != nil {
		return err
	}
	other, err := e.R.NewStream()
	if err != nil {
		return err
	}
	hold, release := holdUp()
	if err := errors.Join(e.S.HostFunc(hold), p.Run(e.S)); err != nil {
		release()
		return err
	}
	twice := p.Run(other)
	release()
	if nothing := c.what == broadcast && e.R.WorldSize() == 1; nothing && twice == nil {
		twice = symmem.ErrTwoStreams // there may be no work that could be on two streams
	}
	if err := wantError("a plan on two streams at once", twice, symmem.ErrTwoStreams); err != nil {
		return err
	}
	if err := errors.Join(e.S.Synchronize(ctx), o.check()); err != nil {
		return err
	}
	for o.set = 1; o.set < 5; o.set++ {
		s := e.S
		if o.set%2 == 1 {
			s = other
		}
		// Nobody fills an output that a peer has begun to write.
		if err := errors.Join(o.fill(), e.R.Barrier(ctx), p.Run(s), s.Synchronize(ctx), o.check(), e.R.Barrier(ctx)); err != nil {
			return fmt.Errorf("move %d: %w", o.set, err)
		}
	}
	return errors.Join(other.Close(), p.Close(ctx), o.Close(ctx))
}

// epochWrapCollective runs a plan while its counts go beyond the last number.
func epochWrapCollective(ctx context.Context, e *Env, c collect) error {
	c.n, c.first = 1001, 1<<32-3
	o, err := newCollected(ctx, e, c)
	if err != nil {
		return err
	}
	p, err := o.plan(ctx)
	if err != nil {
		return err
	}
	for o.set = range 6 {
		if err := errors.Join(o.fill(), e.R.Barrier(ctx), p.Run(e.S), e.S.Synchronize(ctx), o.check(), e.R.Barrier(ctx)); err != nil {
			return fmt.Errorf("run %d: %w", o.set, err)
		}
	}
	return errors.Join(p.Close(ctx), o.Close(ctx))
}

// sameBitsCollective: a reduction of floats that have to be rounded gives the bits that an all-reduce gives.
func sameBitsCollective(ctx context.Context, e *Env, c collect) error {
	const n = 1000
	w, rank := e.R.WorldSize(), e.R.Rank()
	for i, dtype := range []tensor.DType{tensor.Float16, tensor.BFloat16, tensor.Float32} {
		in, err := e.mapped(ctx, dtype, n)
		if err != nil {
			return err
		}
		all, err := e.mapped(ctx, dtype, n)
		if err != nil {
			return err
		}
		var b []byte
		for range n {
			b = appendFloat(b, dtype, e.Rand.Float64()*8-4)
		}
		if err := writeBytes(in.Local(), b); err != nil {
			return err
		}
		for _, op := range []kernels.Op{kernels.Sum, kernels.Avg} {
			whole, err := kernels.NewAllReduce(ctx, in, op, &kernels.AllReduceOptions{Out: all, Algorithm: kernels.Transfers})
			if err != nil {
				return err
			}
			c.dtype, c.op, c.n, c.root = dtype, op, n, i%w
			lo, hi := int64(0), int64(n)
			if c.what == reduceScatter {
				lo, hi = c.share(rank, w)
			}
			_, elements := c.elements(w)
			out, err := e.mapped(ctx, dtype, elements)
			if err != nil {
				return err
			}
			p, err := newCollective(ctx, c.what, in, out, op, c.root, &kernels.Options{Algorithm: c.algorithm})
			if err != nil {
				return err
			}
			if err := errors.Join(whole.Run(e.S), p.Run(e.S), e.S.Synchronize(ctx)); err != nil {
				return err
			}
			if c.what == reduceScatter || rank == c.root {
				want, err := readBytes(all.Local())
				if err != nil {
					return err
				}
				got, err := readBytes(out.Local())
				if err != nil {
					return err
				}
				if err := sameBytes(dtype, got[:(hi-lo)*dtype.Bytes()], want[lo*dtype.Bytes():hi*dtype.Bytes()]); err != nil {
					return fmt.Errorf("%s %s: %w", op, dtype, err)
				}
			}
			if err := closeAll(ctx, p, whole, out); err != nil {
				return err
			}
		}
		if err := closeAll(ctx, all, in); err != nil {
			return err
		}
	}
	return nil
}

// collectiveErrors: what a collective refuses, on every rank alike, with the value and what is allowed; and it works afterwards.
func collectiveErrors(ctx context.Context, e *Env, what string) error {
	w, rank := e.R.WorldSize(), e.R.Rank()
	c := collect{what: what, dtype: tensor.Float32, op: kernels.Sum, n: 12 * int64(w)}
	if what == allToAll {
		c.n = 12
	}
	fresh, err := e.R.Zeros(ctx, tensor.Float32, 12*int64(w))
	if err != nil {
		return err
	}
	o, err := newCollected(ctx, e, c)
	if err != nil {
		return err
	}
	in, out := o.parts[0], o.out()
	if what == broadcast {
		out = in
	}
	refused := func(in, out tensor.SymmetricTensor, op kernels.Op, root int, opts *kernels.Options) error {
		p, err := newCollective(ctx, what, in, out, op, root, opts)
		if err == nil {
			err = errors.Join(errors.New("no error"), p.Close(ctx))
		}
		return err
	}
	// one is arguments that fit each other but for t.
	one := func(t tensor.SymmetricTensor) (tensor.SymmetricTensor, tensor.SymmetricTensor) {
		if what == broadcast || what == reduce {
			return t, t
		}
		return in, t
	}
	with := func(in, out tensor.SymmetricTensor) error { return refused(in, out, kernels.Sum, 0, nil) }
	foreign := kernels.TwoShotFlow
	err = errors.Join(
		wantArgument("no tensors", with(nil, nil)),
		wantArgument("no input", with(nil, out), "nil"),
		wantArgument("the zero Tensor", with(&tensor.Tensor{}, out)),
		wantError("no rendezvous", with(one(fresh)), symmem.ErrNoRendezvous),
		wantArgument("an unknown form", refused(in, out, kernels.Sum, 0, &kernels.Options{Algorithm: 99}), "99", "auto", "transfers"),
		wantError("a form that it has not", refused(in, out, kernels.Sum, 0, &kernels.Options{Algorithm: foreign}), symmem.ErrUnsupported, foreign.String(), "one_shot", "transfers"),
		wantArgument("a negative bound", refused(in, out, kernels.Sum, 0, &kernels.Options{MaxBlocks: -1}), "-1", "MaxBlocks"),
	)
	if err != nil {
		return err
	}
	if what == broadcast || what == reduce {
		for _, root := range []int{-1, w} {
			if err := wantArgument("a root that is no rank", refused(in, out, kernels.Sum, root, nil), fmt.Sprint(root), fmt.Sprintf("0 to %d", w-1)); err != nil {
				return err
			}
		}
	}
	if what == reduce || what == reduceScatter {
		if err := wantArgument("an unknown operation", refused(in, out, 0, 0, nil), "Op(0)", "sum"); err != nil {
			return err
		}
	}
	if what != broadcast {
		if err := refusedPairs(ctx, e, o, with); err != nil {
			return err
		}
	}
	if w > 1 {
		last := min(rank/(w-1), 1) // 1 on the last rank
		root := 0
		if what == broadcast || what == reduce {
			root = last
		}
		bound := 1 + last
		if err := namesAll(e, refused(in, out, kernels.Sum, root, &kernels.Options{MaxBlocks: bound}), "at most 1 blocks", "at most 2 blocks"); err != nil {
			return err
		}
		if what == broadcast || what == reduce {
			if err := namesAll(e, refused(in, out, kernels.Sum, last, nil), " rank 0 of ", " rank 1 of "); err != nil {
				return fmt.Errorf("roots that differ: %w", err)
			}
		}
		counted := c
		if last == 1 {
			counted.n /= 2
		}
		other, err := counted.on(e, o.wholes[0], o.wholes[1], o.at)
		if err != nil {
			return err
		}
		large := func(c collect) int64 {
			in, out := c.elements(w)
			return max(in, out)
		}
		half := c
		half.n /= 2
		if err := namesAll(e, with(other.parts[0], other.out()), fmt.Sprintf(" of %d f32", large(c)), fmt.Sprintf(" of %d f32", large(half))); err != nil {
			return fmt.Errorf("numbers of elements that differ: %w", err)
		}
		if what == reduce || what == reduceScatter {
			op := []kernels.Op{kernels.Sum, kernels.Max}[last]
			if err := namesAll(e, refused(in, out, op, 0, nil), fmt.Sprintf(" %s ", kernels.Sum), fmt.Sprintf(" %s ", kernels.Max)); err != nil {
				return fmt.Errorf("operations that differ: %w", err)
			}
		}
		mine := []tensor.SymmetricTensor{in, nil}[last]
		if what == broadcast {
			mine, root = in, last*w
		} else {
			root = 0
		}
		if err := wantError("one rank's bad argument", refused(mine, out, kernels.Sum, root, nil), symmem.ErrInvalid); err != nil {
			return err
		}
	}
	if err := errors.Join(o.fill(), o.run(ctx)); err != nil {
		return fmt.Errorf("after what was refused: %w", err)
	}
	p, err := o.plan(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(p.Close(ctx), wantError("Run of a closed plan", p.Run(e.S), symmem.ErrClosed), o.Close(ctx)); err != nil {
		return err
	}
	return errors.Join(wantError("closed tensors", with(in, out), symmem.ErrClosed), fresh.Close(ctx))
}

// refusedPairs: inputs and outputs that do not go together.
func refusedPairs(ctx context.Context, e *Env, o *collected, with func(in, out tensor.SymmetricTensor) error) error {
	in, out := o.parts[0], o.out()
	ints, err := e.mapped(ctx, tensor.Int32, out.NumElements())
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
	elsewhere, err := sub.Zeros(ctx, tensor.Float32, out.NumElements())
	if err != nil {
		return err
	}
	if err := elsewhere.Rendezvous(ctx); err != nil {
		return err
	}
	longer, err := o.wholes[1].Sub(0, out.NumElements()+1)
	if err != nil {
		return err
	}
	// The output begins two elements behind the input's first: nobody's share of anything.
	within, err := o.wholes[0].Sub(o.at+2, out.NumElements())
	if err != nil {
		return err
	}
	err = errors.Join(
		wantArgument("no output", with(in, nil), "out"),
		wantArgument("another dtype", with(in, ints), "i32", "f32"),
		wantArgument("another memory", with(in, elsewhere), "out"),
		wantArgument("another number of elements", with(in, longer), fmt.Sprint(longer.NumElements())),
		wantArgument("tensors that overlap", with(in, within)),
	)
	if o.what == allToAll {
		err = errors.Join(err, wantArgument("one tensor", with(in, in), "apart"))
		if odd, subErr := o.wholes[0].Sub(0, in.NumElements()+1); e.R.WorldSize() > 1 {
			err = errors.Join(err, subErr, wantArgument("blocks that are not equal", with(odd, longer), "multiple"))
		}
	}
	return errors.Join(err, elsewhere.Close(ctx), sub.Close(ctx), ints.Close(ctx))
}
