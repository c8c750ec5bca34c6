package symmem

import (
	"container/list"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// MaxPlans is how many plans a rank keeps for the collectives that are methods of [Rank], besides those that were recorded in a graph, which stay
// until memory of theirs is given back. Each keeps its workspace, which for a small message is some times that.
const MaxPlans = 128

// AllReduce combines t on all ranks by op, in place, on the rank's own stream. See [kernels.NewAllReduce].
func (r *Rank) AllReduce(ctx context.Context, t tensor.SymmetricTensor, op kernels.Op) error {
	c, found, err := r.plans().findOne(planKey{call: "AllReduce", op: op}, t)
	if found || err != nil {
		return err
	}
	return r.calls.make(ctx, c, func(ctx context.Context) (*kernels.Plan, error) {
		return kernels.NewAllReduce(ctx, c.tensors[0], op, nil)
	})
}

// AllReduceMany combines each of ts on all ranks by op, in place, in one launch on the rank's own stream. See [kernels.NewAllReduceMany].
func (r *Rank) AllReduceMany(ctx context.Context, ts []tensor.SymmetricTensor, op kernels.Op) error {
	c, found, err := r.plans().findMany(planKey{call: "AllReduceMany", op: op}, ts, nil)
	if found || err != nil {
		return err
	}
	pairs := make([]kernels.Pair, len(c.tensors))
	for i, t := range c.tensors {
		pairs[i].In = t
	}
	return r.calls.make(ctx, c, func(ctx context.Context) (*kernels.Plan, error) {
		return kernels.NewAllReduceMany(ctx, pairs, op, nil)
	})
}

// ReduceScatterMany combines the In of each pair on all ranks by op and gives each rank its share, in Out, in one launch on the rank's own stream. See [kernels.NewReduceScatterMany].
func (r *Rank) ReduceScatterMany(ctx context.Context, pairs []kernels.Pair, op kernels.Op) error {
	c, found, err := r.plans().findPairs(planKey{call: "ReduceScatterMany", op: op}, pairs)
	if found || err != nil {
		return err
	}
	return r.calls.make(ctx, c, func(ctx context.Context) (*kernels.Plan, error) {
		return kernels.NewReduceScatterMany(ctx, c.pairs(), op, nil)
	})
}

// AllGatherMany gives every rank all ranks' In of each pair, in Out, in one launch on the rank's own stream. See [kernels.NewAllGatherMany].
func (r *Rank) AllGatherMany(ctx context.Context, pairs []kernels.Pair) error {
	c, found, err := r.plans().findPairs(planKey{call: "AllGatherMany"}, pairs)
	if found || err != nil {
		return err
	}
	return r.calls.make(ctx, c, func(ctx context.Context) (*kernels.Plan, error) {
		return kernels.NewAllGatherMany(ctx, c.pairs(), nil)
	})
}

// BroadcastMany gives every rank root's copy of each of ts, in one launch on the rank's own stream. See [kernels.NewBroadcastMany].
func (r *Rank) BroadcastMany(ctx context.Context, ts []tensor.SymmetricTensor, root int) error {
	c, found, err := r.plans().findMany(planKey{call: "BroadcastMany", root: root}, ts, nil)
	if found || err != nil {
		return err
	}
	return r.calls.make(ctx, c, func(ctx context.Context) (*kernels.Plan, error) {
		return kernels.NewBroadcastMany(ctx, c.tensors, root, nil)
	})
}

// ReduceScatter combines in on all ranks by op and gives each its share, in out, on the rank's own stream. See [kernels.NewReduceScatter].
func (r *Rank) ReduceScatter(ctx context.Context, in, out tensor.SymmetricTensor, op kernels.Op) error {
	c, found, err := r.plans().find(planKey{call: "ReduceScatter", op: op}, in, out)
	if found || err != nil {
		return err
	}
	return r.calls.make(ctx, c, func(ctx context.Context) (*kernels.Plan, error) {
		return kernels.NewReduceScatter(ctx, c.tensors[0], c.tensors[1], op, nil)
	})
}

// Reduce combines in on all ranks by op into root's out, on the rank's own stream. See [kernels.NewReduce].
func (r *Rank) Reduce(ctx context.Context, in, out tensor.SymmetricTensor, op kernels.Op, root int) error {
	c, found, err := r.plans().find(planKey{call: "Reduce", op: op, root: root}, in, out)
	if found || err != nil {
		return err
	}
	return r.calls.make(ctx, c, func(ctx context.Context) (*kernels.Plan, error) {
		return kernels.NewReduce(ctx, c.tensors[0], c.tensors[1], op, root, nil)
	})
}

// AllGather gives every rank all ranks' in, in out, on the rank's own stream. See [kernels.NewAllGather].
func (r *Rank) AllGather(ctx context.Context, in, out tensor.SymmetricTensor) error {
	c, found, err := r.plans().find(planKey{call: "AllGather"}, in, out)
	if found || err != nil {
		return err
	}
	return r.calls.make(ctx, c, func(ctx context.Context) (*kernels.Plan, error) {
		return kernels.NewAllGather(ctx, c.tensors[0], c.tensors[1], nil)
	})
}

// Broadcast gives every rank root's t, on the rank's own stream. See [kernels.NewBroadcast].
func (r *Rank) Broadcast(ctx context.Context, t tensor.SymmetricTensor, root int) error {
	c, found, err := r.plans().findOne(planKey{call: "Broadcast", root: root}, t)
	if found || err != nil {
		return err
	}
	return r.calls.make(ctx, c, func(ctx context.Context) (*kernels.Plan, error) {
		return kernels.NewBroadcast(ctx, c.tensors[0], root, nil)
	})
}

// AllToAll gives every rank its block of each rank's in, in out, on the rank's own stream. See [kernels.NewAllToAll].
func (r *Rank) AllToAll(ctx context.Context, in, out tensor.SymmetricTensor) error {
	c, found, err := r.plans().find(planKey{call: "AllToAll"}, in, out)
	if found || err != nil {
		return err
	}
	return r.calls.make(ctx, c, func(ctx context.Context) (*kernels.Plan, error) {
		return kernels.NewAllToAll(ctx, c.tensors[0], c.tensors[1], nil)
	})
}

// Stream returns the rank's own stream, on which the collectives that are methods of the rank run, and made it if this is the first call. Work that
// has to be in front of a collective, or behind it, goes there too. It is the rank's to close.
func (r *Rank) Stream() (device.Stream, error) {
	return r.plans().own()
}

// Synchronize waits until all work on the rank's own stream has ended, or ctx ends, and returns its first error.
func (r *Rank) Synchronize(ctx context.Context) error {
	if err := errs.Given("Synchronize", "ctx", ctx, "a context"); err != nil {
		return err
	}
	s, err := r.Stream()
	if err != nil {
		return err
	}
	return s.Synchronize(ctx)
}

// plans is the plans of the rank's calls; nil for a rank that Open did not make.
func (r *Rank) plans() *planCache { return r.orZero().calls }

// planCache is the plans of one rank's calls.
type planCache struct {
	memory *memory.Memory
	most   int

	// streamMu is taken after mu, and not while ranks are waited for.
	streamMu sync.Mutex
	stream   device.Stream // nil before it is needed
	closed   bool          // set in a turn, under streamMu
	over     bool          // the plans are closed, or being closed; guarded by the memory's turn

	// mu is not held while ranks are waited for. What is behind making is guarded by it while that is 0, and else belongs to the call that has the memory's turn.
	mu     sync.Mutex
	making int // calls that wait for a turn of the memory, or have it: what comes after them has to wait, too
	plans  map[planKey]*list.Element
	recent list.List // of *cachedPlan, the last used in front

	// What has to be the same on every rank: how many calls had a plan, the next plan's number, and the numbers of all that they had.
	ran, next, history uint64
}

// planKey is what a plan is found by.
type planKey struct {
	call    string
	op      kernels.Op
	root    int
	in, out place
	list    string // of places
}

// place is where a tensor is. A tensor that is closed never has its place taken by another: windows have numbers. Those without elements are all at the same place, so none of them may end
// a plan (see lasting): ranks close them when they like.
type place struct {
	window           *memory.Window // nil for nothing
	offset, elements int64
	dtype            tensor.DType
}

// cachedPlan is one plan.
type cachedPlan struct {
	key     planKey
	number  uint64
	plan    *kernels.Plan
	tensors []tensor.SymmetricTensor
	// recorded says that a graph may have it: it stays until one of its tensors is closed.
	recorded bool
}

// stale reports whether a tensor of the plan was closed.
func (c *cachedPlan) stale() bool {
	return slices.ContainsFunc(c.tensors, func(t tensor.SymmetricTensor) bool { return t.Err() != nil })
}

func newPlanCache(m *memory.Memory) *planCache {
	return &planCache{memory: m, most: MaxPlans, plans: map[planKey]*list.Element{}}
}

// placeOf finds a tensor's place, or says why the rank cannot use it. The place of a slice that was closed is known all the same, while its memory lives.
func (c *planCache) placeOf(call string, arg argument, t tensor.SymmetricTensor) (p place, known bool, err error) {
	if errs.IsNil(t) {
		return place{}, false, errs.Given(call, arg.String(), t, "a tensor")
	}
	closed := t.Err()
	if closed != nil {
		if t, err = tensor.Lasting(t); err != nil {
			return place{}, false, closed
		}
	}
	if t.Memory() != c.memory {
		return place{}, false, errs.Foreign(call, arg.String(), "a tensor of another group", "a tensor of this rank's memory")
	}
	p = place{elements: t.NumElements(), dtype: t.DType()}
	if t.Bytes() > 0 {
		if p.window, p.offset, err = t.Window(); err != nil {
			return place{}, false, err
		}
	}
	return p, true, closed
}

// call is a collective call that has no plan yet.
type call struct {
	key     planKey
	known   bool                     // the key is that of the call, whatever has failed
	tensors []tensor.SymmetricTensor // which last as long as their memory
	failure error                    // why this rank cannot take part
}

// pairs are the tensors of a call on pairs.
func (w *call) pairs() []kernels.Pair {
	pairs := make([]kernels.Pair, len(w.tensors)/2)
	for i := range pairs {
		pairs[i] = kernels.Pair{In: w.tensors[2*i], Out: w.tensors[2*i+1]}
	}
	return pairs
}

// lasting makes the tensors of a call such that neither a slice's Close ends the plan, nor that of a tensor without elements.
func (w *call) lasting() {
	if w.failure != nil {
		return
	}
	given := slices.Clone(w.tensors)
	for i, t := range given {
		if i > 0 && t == given[0] {
			w.tensors[i] = w.tensors[0] // in place, which constructors see by this
		} else if w.tensors[i], w.failure = tensor.Lasting(t); w.failure != nil {
			return
		}
	}
}

// findOne runs the plan of a call on one tensor, if there is a plan. Else it gives the call.
func (c *planCache) findOne(key planKey, t tensor.SymmetricTensor) (*call, bool, error) {
	if c == nil {
		return nil, false, (*Rank)(nil).made(key.call)
	}
	at, known, failure := c.placeOf(key.call, argument{name: "t"}, t)
	key.in, key.out = at, at
	return c.findAt(key, t, t, known, failure)
}

// find is findOne for a call on two tensors, which may be one.
func (c *planCache) find(key planKey, in, out tensor.SymmetricTensor) (*call, bool, error) {
	if c == nil {
		return nil, false, (*Rank)(nil).made(key.call)
	}
	var inKnown, outKnown bool
	var failure, outFailure error
	key.in, inKnown, failure = c.placeOf(key.call, argument{name: "in"}, in)
	key.out, outKnown, outFailure = c.placeOf(key.call, argument{name: "out"}, out)
	if failure == nil {
		failure = outFailure
	}
	return c.findAt(key, in, out, inKnown && outKnown, failure)
}

// findAt is find for tensors at the places that the key has, if they are known.
func (c *planCache) findAt(key planKey, in, out tensor.SymmetricTensor, known bool, failure error) (*call, bool, error) {
	if found, err := c.runKept(key, known, failure); found || err != nil {
		return nil, found, err
	}
	what := &call{key, known, []tensor.SymmetricTensor{in, out}, failure}
	what.lasting()
	return what, false, nil
}

// findPairs is find for a list of pairs.
func (c *planCache) findPairs(key planKey, pairs []kernels.Pair) (*call, bool, error) {
	ts := make([]tensor.SymmetricTensor, 0, 2*len(pairs))
	for _, p := range pairs {
		ts = append(ts, p.In, p.Out)
	}
	return c.findMany(key, ts, []string{"In", "Out"})
}

// findMany is find for a list. Of pairs, sides are the names of their tensors, which follow each other.
func (c *planCache) findMany(key planKey, ts []tensor.SymmetricTensor, sides []string) (*call, bool, error) {
	if c == nil {
		return nil, false, (*Rank)(nil).made(key.call)
	}
	var failure error
	known := true
	places := make([]byte, 0, 32*len(ts))
	for i, t := range ts {
		p, ok, err := c.placeOf(key.call, argument{name: listOf(sides), sides: sides, at: i}, t)
		if known = ok; failure == nil {
			failure = err
		}
		if !known {
			break
		}
		number := ^uint64(0)
		if p.window != nil {
			number = p.window.Number()
		}
		for _, word := range []uint64{number, uint64(p.offset), uint64(p.elements), uint64(p.dtype)} {
			places = binary.LittleEndian.AppendUint64(places, word)
		}
	}
	if len(ts) == 0 {
		failure = errs.Invalid(key.call, listOf(sides), "an empty list", fmt.Sprintf("1 to %d of them", kernels.MaxPairs))
	}
	key.list = string(places)
	if found, err := c.runKept(key, known, failure); found || err != nil {
		return nil, found, err
	}
	what := &call{key, known, slices.Clone(ts), failure}
	what.lasting()
	return what, false, nil
}

// listOf is the name of a list.
func listOf(sides []string) string {
	if sides == nil {
		return "ts"
	}
	return "pairs"
}

// argument is a tensor among the arguments of a call, as errors name it: only they format its name, since a list may have thousands.
type argument struct {
	name  string   // of the tensor, or of the list that it is in
	sides []string // of a list of pairs
	at    int      // in a list
}

func (a argument) String() string {
	switch {
	case a.name == "ts":
		return fmt.Sprintf("ts[%d]", a.at)
	case a.sides != nil:
		return fmt.Sprintf("%s[%d].%s", a.name, a.at/len(a.sides), a.sides[a.at%len(a.sides)])
	}
	return a.name
}

// runKept runs the plan of a key, if there is one, and no earlier call is still to come.
func (c *planCache) runKept(key planKey, known bool, failure error) (bool, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.making > 0 {
		return false, nil
	}
	return c.run(key, known, &failure)
}

// run is runKept in the call's place among the others. A call that has failed already, and is known to have a plan, ends here: the others run theirs, and nobody
// comes to make one. Where there is none, it may find a failure that the others are told.
func (c *planCache) run(key planKey, known bool, failure *error) (bool, error) {
	s, err := c.own()
	if errors.Is(err, ErrClosed) {
		return false, err
	}
	if *failure == nil {
		*failure = err
	}
	if *failure != nil {
		if e, ok := c.plans[key]; known && ok && !e.Value.(*cachedPlan).stale() {
			return false, fmt.Errorf("%s: %w", key.call, *failure)
		}
		return false, nil
	}
	if p := c.kept(key); p != nil {
		return true, c.enqueue(p, s)
	}
	if s.Capturing() {
		*failure = errs.Invalid(key.call, "the rank's own stream", "one that is recorded", "a call that was made before the recording, and so has its plan")
	}
	return false, nil
}

// kept is the plan of a key, as the last used; nil if there is none that can run.
func (c *planCache) kept(key planKey) *cachedPlan {
	e, ok := c.plans[key]
	if !ok || e.Value.(*cachedPlan).stale() {
		return nil
	}
	c.recent.MoveToFront(e)
	return e.Value.(*cachedPlan)
}

// make makes the plan of a call, unless an earlier one has made it meanwhile, and runs it. Collective, in one turn of the memory. Where ctx ends before that comes, the others are
// told in it, or run the plan that there is then.
func (c *planCache) make(ctx context.Context, what *call, create func(ctx context.Context) (*kernels.Plan, error)) error {
	ctx, what.failure = errs.WithContext(what.key.call, ctx, what.failure)
	c.mu.Lock()
	c.making++
	c.mu.Unlock()
	return c.memory.InTurn(ctx, what.key.call, func(ctx context.Context, gaveUp error) error {
		defer func() {
			c.mu.Lock()
			c.making--
			c.mu.Unlock()
		}()
		if gaveUp != nil {
			what.failure = gaveUp
		}
		if ran, err := c.run(what.key, what.known, &what.failure); ran || err != nil {
			return err
		}
		p, err := c.add(ctx, what, create)
		if err != nil {
			return fmt.Errorf("%s: %w", what.key.call, err)
		}
		s, err := c.own()
		if err != nil {
			return err
		}
		return c.enqueue(p, s)
	})
}

// enqueue runs a plan. It counts also if it does not run: the ranks have called alike, and it may have failed on some of them only.
func (c *planCache) enqueue(p *cachedPlan, s device.Stream) error {
	what := (p.number + 1) << 1
	if s.Capturing() {
		p.recorded = true
		what |= 1 // every rank knows which plans are recorded; not the highest bit, of which two would undo each other
	}
	c.ran++
	c.history = (c.history ^ what) * 1099511628211 // FNV-1a, by words
	return p.plan.Run(s)
}

// own is the rank's own stream.
func (c *planCache) own() (device.Stream, error) {
	if c == nil {
		return nil, (*Rank)(nil).made("Stream")
	}
	c.streamMu.Lock()
	defer c.streamMu.Unlock()
	if c.closed {
		return nil, fmt.Errorf("using rank %d: %w", c.memory.Group().Rank(), ErrClosed)
	}
	if c.stream == nil {
		s, err := c.memory.Device().NewStream()
		if err != nil {
			return nil, err
		}
		c.stream = s
	}
	return c.stream, nil
}

// callRecord is what ranks compare before they make a plan.
type callRecord struct {
	What    string `json:"what"`
	Ran     uint64 `json:"ran"`
	Next    uint64 `json:"next"`
	History uint64 `json:"history"`
	// Replaces is the number, plus 1, of the plan that there was for the call until one of its tensors was closed; 0 for none.
	Replaces uint64   `json:"replaces,omitempty"`
	Stale    []uint64 `json:"stale,omitempty"` // the numbers of all such plans; not compared
}

// add makes a plan and keeps it, after others that have to go. Collective.
func (c *planCache) add(ctx context.Context, what *call, create func(ctx context.Context) (*kernels.Plan, error)) (*cachedPlan, error) {
	g := c.memory.Group()
	if err := g.Vote(ctx, "a collective that makes its plan", what.failure); err != nil {
		return nil, err
	}
	stale, err := c.agree(ctx, what.key)
	if err != nil {
		return nil, err
	}
	if going := c.going(stale); len(going) > 0 {
		for _, e := range going {
			p := e.Value.(*cachedPlan)
			c.recent.Remove(e)
			delete(c.plans, p.key)
			err = errors.Join(err, p.plan.Close(ctx))
		}
		// What only one rank failed to give back is that rank's error alone, and the others would wait for it in the next step.
		if err := g.Vote(ctx, "closing plans that make room", err); err != nil {
			return nil, err
		}
	}
	plan, err := create(ctx)
	if err != nil {
		return nil, err
	}
	p := &cachedPlan{key: what.key, number: c.next, plan: plan, tensors: what.tensors}
	c.next++
	c.plans[what.key] = c.recent.PushFront(p)
	return p, nil
}

// agree compares what the ranks call, and have called, and gives the plans that are stale on all of them. Collective.
func (c *planCache) agree(ctx context.Context, key planKey) ([]uint64, error) {
	mine := callRecord{What: key.call, Ran: c.ran, Next: c.next, History: c.history}
	if key.op != 0 {
		mine.What += " " + key.op.String()
	}
	mine.What = fmt.Sprintf("%s, root %d", mine.What, key.root)
	if e, ok := c.plans[key]; ok {
		mine.Replaces = e.Value.(*cachedPlan).number + 1
	}
	for e := c.recent.Front(); e != nil; e = e.Next() {
		if p := e.Value.(*cachedPlan); p.stale() {
			mine.Stale = append(mine.Stale, p.number)
		}
	}
	blob, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	blobs, err := c.memory.Group().AllGather(ctx, "calls of the ranks", blob)
	if err != nil {
		return nil, err
	}
	all := make([]callRecord, len(blobs))
	for r, b := range blobs {
		if err := json.Unmarshal(b, &all[r]); err != nil {
			return nil, fmt.Errorf("reading the calls of rank %d: %w", r, err)
		}
	}
	for _, compared := range []struct {
		what string
		of   func(r callRecord) string
	}{
		{"collective call", func(r callRecord) string { return r.What }},
		{"collective calls before this one", func(r callRecord) string { return fmt.Sprintf("%d runs of %d plans", r.Ran, r.Next) }},
		{"order of the collective calls before this one", func(r callRecord) string { return fmt.Sprintf("%x", r.History) }},
		{"number of the call's earlier plan, of which a tensor was closed", func(r callRecord) string { return fmt.Sprint(r.Replaces) }},
	} {
		var values []string
		for _, r := range all {
			values = append(values, compared.of(r))
		}
		if slices.ContainsFunc(values, func(v string) bool { return v != values[0] }) {
			return nil, &group.MismatchError{What: compared.what, Values: values}
		}
	}
	return slices.DeleteFunc(mine.Stale, func(n uint64) bool {
		return n+1 != mine.Replaces && slices.ContainsFunc(all, func(r callRecord) bool { return !slices.Contains(r.Stale, n) })
	}), nil
}

// going lists the plans that have to go, in the same order on every rank, before one more is made.
func (c *planCache) going(stale []uint64) (all []*list.Element) {
	left := 0 // of those that count: what is recorded is kept besides
	for e := c.recent.Back(); e != nil; e = e.Prev() {
		if p := e.Value.(*cachedPlan); slices.Contains(stale, p.number) {
			all = append(all, e)
		} else if !p.recorded {
			left++
		}
	}
	for e := c.recent.Back(); e != nil && left >= c.most; e = e.Prev() {
		if !e.Value.(*cachedPlan).recorded && !slices.Contains(all, e) {
			all = append(all, e)
			left--
		}
	}
	return all
}

// shut refuses calls from now on, and waits until those that run their plans have, or ctx ends: a stream that is full keeps one for as long as its device does.
func (c *planCache) shut(ctx context.Context) error {
	c.streamMu.Lock()
	c.closed = true
	c.streamMu.Unlock()
	if c.mu.TryLock() { // whatever has become of ctx
		c.mu.Unlock()
		return nil
	}
	ran := make(chan struct{})
	go func() {
		c.mu.Lock() // in turn, as calls that go on may always have it
		defer c.mu.Unlock()
		close(ran)
	}()
	select {
	case <-ran:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("a collective is still being enqueued: %w", ctx.Err())
	}
}

// close gives all plans back, and the stream if its work has ended before ctx has; else that is an error, and close is called again. Collective the first time; the caller
// has the memory's turn, so nobody makes a plan, and who would run one finds the cache shut.
func (c *planCache) close(ctx context.Context) (err error) {
	if !c.over {
		c.over = true
		err = c.discard()
		for e := c.recent.Front(); e != nil; e = e.Next() {
			if closeErr := e.Value.(*cachedPlan).plan.Close(ctx); err == nil {
				err = closeErr // those of the others are the same
			}
		}
		c.recent.Init()
		clear(c.plans)
	}
	if c.stream == nil {
		return err
	}
	waited := c.stream.Synchronize(ctx)
	if ended, asked := c.stream.Query(); asked == nil && !ended {
		return errors.Join(err, waited)
	}
	return errors.Join(err, c.end())
}

// discard gives up what is being recorded on the stream: a stream cannot be closed in a capture, nor can those that plans have beside it.
func (c *planCache) discard() error {
	if c.stream == nil || !c.stream.Capturing() {
		return nil
	}
	g, err := c.stream.EndCapture()
	if err != nil {
		return fmt.Errorf("giving up what is recorded on the rank's own stream: %w", err)
	}
	return g.Close()
}

// end closes the stream, whose work has ended, unless it is closed.
func (c *planCache) end() error {
	s := c.stream
	if c.stream = nil; s == nil {
		return nil
	}
	if err := s.Close(); !errors.Is(err, ErrClosed) {
		return err
	}
	return nil
}
