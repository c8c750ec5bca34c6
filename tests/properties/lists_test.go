package properties

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"pgregory.net/rapid"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// The collectives that there are of one tensor and of lists.
const (
	reduced   = "all-reduce"
	gathered  = "all-gather"
	scattered = "reduce-scatter"
	spread    = "broadcast"
)

// pair is what goes in and where the result goes. In place it is one span: of what is shared out, the larger one.
type pair struct {
	in, out span
	inPlace bool
}

func (p pair) String() string {
	if p.inPlace {
		return p.in.String() + " in place"
	}
	return fmt.Sprintf("%v to %v", p.in, p.out)
}

// shareOf is the range of n elements that rank has between so many.
func shareOf(n, world, rank int) (lo, hi int) {
	c := (n + world - 1) / world
	return min(rank*c, n), min((rank+1)*c, n)
}

// pair draws one, of a dtype if that is not 0, that has nothing in common with what the others write; false if there is none.
func (d *draft) pair(group int, kind string, dtype tensor.DType, inPlace bool, others []pair) (pair, bool) {
	world := len(d.groups[group].ranks)
	large, ok := d.part(group, -1, dtype)
	if !ok {
		return pair{}, false
	}
	p := pair{in: large, out: large, inPlace: inPlace || kind == spread || rapid.Bool().Draw(d.T, "in place")}
	if !p.inPlace {
		length := large.len()
		if kind != reduced {
			length = (length + world - 1) / world
		}
		small, ok := d.part(group, length, d.tensors[large.t].dtype)
		if !ok || d.overlap(large, small) {
			return pair{}, false
		}
		if p.out = small; kind == gathered {
			p.in, p.out = small, large
		}
	}
	for _, o := range others {
		if d.overlap(p.out, o.out) || d.overlap(p.out, o.in) || d.overlap(p.in, o.out) {
			return pair{}, false
		}
	}
	return p, true
}

// applyPairs is what a run makes of the model: all of it at once.
func (d *draft) applyPairs(kind string, pairs []pair, op kernels.Op, root int) {
	var later []func()
	for _, p := range pairs {
		src, dst := d.tensors[p.in.t].data, d.tensors[p.out.t].data
		world := len(src)
		var result []int64
		switch n := p.out.len(); kind {
		case spread:
			result = append(result, src[root][p.in.from:p.in.to]...)
		case gathered:
			for r := range world {
				lo, hi := shareOf(n, world, r)
				from := p.in.from
				if p.inPlace {
					from += lo
				}
				result = append(result, src[r][from:from+hi-lo]...)
			}
		default:
			result = d.reduce(p.in, op)
		}
		for r := range world {
			lo, hi, to := 0, len(result), p.out.from
			if kind == scattered {
				if lo, hi = shareOf(len(result), world, r); p.inPlace {
					to += lo
				}
			}
			later = append(later, func() { copy(dst[r][to:], result[lo:hi]) })
		}
	}
	for _, f := range later {
		f()
	}
}

// tensors are those of a pair on a rank.
func (g *member) tensorsOf(kind string, p pair) (in, out tensor.SymmetricTensor) {
	if !p.inPlace {
		return g.view(p.in), g.view(p.out)
	}
	all := g.view(p.in)
	share := func() tensor.SymmetricTensor {
		lo, hi := shareOf(p.in.len(), g.WorldSize(), g.rank())
		return g.view(span{p.in.t, p.in.from + lo, p.in.from + hi})
	}
	switch kind {
	case gathered:
		return share(), all
	case scattered:
		return all, share()
	}
	return all, all
}

func (g *member) pairsOf(kind string, pairs []pair) (all []kernels.Pair, ins []tensor.SymmetricTensor) {
	for _, p := range pairs {
		in, out := g.tensorsOf(kind, p)
		all, ins = append(all, kernels.Pair{In: in, Out: out}), append(ins, in)
	}
	return all, ins
}

// newPlan makes the plan of one pair, or of a list.
func (g *member) newPlan(ctx context.Context, kind string, pairs []pair, list bool, op kernels.Op, root int, alg kernels.Algorithm) (*kernels.Plan, error) {
	all, ins := g.pairsOf(kind, pairs)
	opts := &kernels.Options{Algorithm: alg}
	switch {
	case kind == reduced && list:
		return kernels.NewAllReduceMany(ctx, all, op, opts)
	case kind == reduced:
		return kernels.NewAllReduce(ctx, all[0].In, op, &kernels.AllReduceOptions{Algorithm: alg, Out: all[0].Out})
	case kind == gathered && list:
		return kernels.NewAllGatherMany(ctx, all, opts)
	case kind == gathered:
		return kernels.NewAllGather(ctx, all[0].In, all[0].Out, opts)
	case kind == scattered && list:
		return kernels.NewReduceScatterMany(ctx, all, op, opts)
	case kind == scattered:
		return kernels.NewReduceScatter(ctx, all[0].In, all[0].Out, op, opts)
	case list:
		return kernels.NewBroadcastMany(ctx, ins, root, opts)
	}
	return kernels.NewBroadcast(ctx, ins[0], root, opts)
}

// call makes the same as a method of the rank.
func (g *member) call(ctx context.Context, kind string, pairs []pair, list bool, op kernels.Op, root int) error {
	all, ins := g.pairsOf(kind, pairs)
	switch {
	case kind == reduced && list:
		return g.AllReduceMany(ctx, ins, op)
	case kind == reduced:
		return g.AllReduce(ctx, ins[0], op)
	case kind == gathered && list:
		return g.AllGatherMany(ctx, all)
	case kind == gathered:
		return g.AllGather(ctx, all[0].In, all[0].Out)
	case kind == scattered && list:
		return g.ReduceScatterMany(ctx, all, op)
	case kind == scattered:
		return g.ReduceScatter(ctx, all[0].In, all[0].Out, op)
	case list:
		return g.BroadcastMany(ctx, ins, root)
	}
	return g.Broadcast(ctx, ins[0], root)
}

// graphed runs once on a stream, and then so often from a graph.
func graphed(ctx context.Context, s device.Stream, replays int, run func() error) error {
	if err := run(); err != nil || replays == 0 {
		return err
	}
	if err := errors.Join(s.BeginCapture(), run()); err != nil {
		return err
	}
	graph, err := s.EndCapture()
	if err != nil {
		return err
	}
	for range replays {
		err = errors.Join(err, graph.Launch(s))
	}
	return errors.Join(err, s.Synchronize(ctx), graph.Close())
}

// shared draws a collective in place or not, of one tensor or of a list, by a plan or by a method of the rank.
func (d *draft) shared(group int) {
	kind := rapid.SampledFrom([]string{reduced, gathered, scattered, spread}).Draw(d.T, "collective")
	list, method := rapid.Bool().Draw(d.T, "list"), rapid.Bool().Draw(d.T, "method")
	most := 1
	if list {
		most = 4
	}
	combines := kind == reduced || kind == scattered
	var pairs []pair
	var dtype tensor.DType
	for range 2 * rapid.IntRange(1, most).Draw(d.T, "pairs") { // of which some will not do
		if len(pairs) == most {
			break
		}
		if p, ok := d.pair(group, kind, dtype, kind == reduced && method, pairs); ok {
			if pairs = append(pairs, p); combines {
				dtype = d.tensors[p.in.t].dtype
			}
		}
	}
	if len(pairs) == 0 {
		return
	}
	op, root, f, replays := d.op(), d.rankOf(group), d.fence(), rapid.IntRange(0, 2).Draw(d.T, "replays")
	forms := []kernels.Algorithm{kernels.Auto, kernels.OneShot, kernels.Transfers}
	switch {
	case kind == reduced:
		forms = append(forms, kernels.TwoShot)
	case !list:
		forms = append(forms, kernels.Hierarchical)
	}
	alg := rapid.SampledFrom(forms).Draw(d.T, "form")
	runs := 1 + replays
	for range runs {
		d.applyPairs(kind, pairs, op, root)
	}
	var texts []string
	for _, p := range pairs {
		texts = append(texts, p.String())
	}
	how := alg.String()
	if method {
		how = "as a method"
	}
	d.add(group, func(r *rank, g *member) error {
		var err error
		if method {
			err = r.byMethod(g, replays, func() error { return g.call(r.ctx, kind, pairs, list, op, root) })
		} else {
			err = r.byPlan(g, replays, func() (*kernels.Plan, error) { return g.newPlan(r.ctx, kind, pairs, list, op, root, r.form(alg)) })
		}
		return r.fenced(g, pairs[0].out.t, f, err)
	}, "%s of %s, list %t, %v, root %d, %s, %d replays; %v", kind, strings.Join(texts, ", "), list, op, root, how, replays, f)
}

// byMethod runs a call on the rank's own stream, behind what is on the program's and before what comes there.
func (r *rank) byMethod(g *member, replays int, call func() error) error {
	s, err := g.Stream()
	if err != nil {
		return err
	}
	return errors.Join(r.stream.Synchronize(r.ctx), graphed(r.ctx, s, replays, call), g.Synchronize(r.ctx))
}

func (r *rank) byPlan(g *member, replays int, make func() (*kernels.Plan, error)) error {
	p, err := make()
	if err != nil {
		return err
	}
	return errors.Join(graphed(r.ctx, r.stream, replays, func() error { return p.Run(r.stream) }), p.Close(r.ctx))
}

// dispatch draws an all-to-all whose counts are in memory. What does not fit changes nothing.
func (d *draft) dispatch(group int) {
	world := len(d.groups[group].ranks)
	in, ok := d.part(group, -1, 0)
	if !ok {
		return
	}
	out, ok := d.part(group, -1, d.tensors[in.t].dtype)
	if !ok || d.overlap(in, out) {
		return
	}
	width := rapid.IntRange(1, 3).Draw(d.T, "width")
	rows, room := in.len()/width, out.len()/width
	displaced := rapid.Bool().Draw(d.T, "displaced")
	counts, places := make([][]int64, world), make([][]int64, world)
	fits := true
	got := make([]int, world)
	for r := range world {
		at := 0
		for q := range world {
			n := rapid.IntRange(0, max(min(rows, room)/world, 1)).Draw(d.T, "rows")
			if displaced {
				at = rapid.IntRange(-1, rows+1).Draw(d.T, "place")
			}
			fits = fits && (n == 0 || at >= 0 && at+n <= rows)
			counts[r], places[r] = append(counts[r], int64(n)), append(places[r], int64(at))
			at += n
			got[q] += n
		}
	}
	for _, n := range got {
		fits = fits && n <= room
	}
	f := d.fence()
	alg := rapid.SampledFrom([]kernels.Algorithm{kernels.Auto, kernels.OneShot, kernels.Transfers}).Draw(d.T, "form")
	told := make([][]int64, world) // received
	for q := range world {
		told[q] = make([]int64, 2*world)
	}
	if fits {
		src, dst := d.tensors[in.t].data, d.tensors[out.t].data
		for q := range world {
			at := 0
			for r := range world {
				n, from := int(counts[r][q]), int(places[r][q])
				told[q][r], told[q][world+r] = int64(n), int64(at)
				if n > 0 {
					copy(dst[q][out.from+at*width:], src[r][in.from+from*width:in.from+(from+n)*width])
				}
				at += n
			}
		}
	}
	d.add(group, func(r *rank, g *member) error {
		mine := counts[g.rank()]
		shape := []int64{int64(world)}
		if displaced {
			mine, shape = append(mine[:world:world], places[g.rank()]...), []int64{2, int64(world)}
		}
		err := r.stream.Synchronize(r.ctx)
		if err == nil {
			err = r.dispatch(g, in, out, int64(width), mine, shape, told[g.rank()], fits, r.form(alg))
		}
		return r.fenced(g, out.t, f, err)
	}, "all-to-all of %v to %v by rows of %d, counts %v from %v (displaced %t), %v, fits %t; %v", in, out, width, counts, places, displaced, alg, fits, f)
}

func (r *rank) dispatch(g *member, in, out span, width int64, counts, shape, told []int64, fits bool, alg kernels.Algorithm) (err error) {
	world := int64(g.WorldSize())
	zeros := func(shape ...int64) *tensor.Tensor {
		t, zerosErr := g.Zeros(r.ctx, tensor.Int64, shape...)
		if zerosErr == nil {
			zerosErr = t.Rendezvous(r.ctx)
		}
		err = errors.Join(err, zerosErr)
		return t
	}
	rows := func(s span) tensor.SymmetricTensor {
		v, subErr := g.tensors[s.t].Sub(int64(s.from), int64(s.len())/width, width)
		err = errors.Join(err, subErr)
		return v
	}
	c, received, from, to := zeros(shape...), zeros(2, world), rows(in), rows(out)
	if err != nil {
		return err
	}
	s, err := g.NewStream()
	if err != nil {
		return err
	}
	if err := tensor.Write(c.Local(), counts, 0); err != nil {
		return err
	}
	p, err := kernels.NewAllToAllV(r.ctx, from, to, c, received, &kernels.Options{Algorithm: alg})
	if err != nil {
		return err
	}
	err = errors.Join(p.Run(s), s.Synchronize(r.ctx))
	if !fits {
		if _, ok := errors.AsType[*kernels.CountsError](err); !ok || !errors.Is(err, errs.ErrInvalid) {
			return fmt.Errorf("counts that do not fit: %w", errors.Join(err, errors.New("not the error that there should be")))
		}
		err = nil
	}
	have, readErr := tensor.ReadAll[int64](received.Local())
	if err = errors.Join(err, readErr); err == nil && fmt.Sprint(have) != fmt.Sprint(told) {
		err = fmt.Errorf("received %v, and not %v", have, told)
	}
	closed := s.Close()
	if !fits {
		closed = nil // it may tell what it has told
	}
	return errors.Join(err, closed, p.Close(r.ctx), received.Close(r.ctx), c.Close(r.ctx))
}
