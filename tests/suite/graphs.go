package suite

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// graphCases are about what a replayed graph orders. Each records an exchange of data once and replays it with new data, while one
// rank after the other is late: in front of what it sends, or in front of what it reads. A recorded barrier, wait or signal that does
// nothing in a replay, or takes effect once only, gives stale or overwritten data.
func graphCases(kind device.Kind, backend string, world int) []Case {
	record := func(name, moves string, steps func(x *exchange) error) Case {
		return Case{Name: "graph/" + name, Needs: []string{"graphs", moves}, Run: func(ctx context.Context, e *Env) error {
			return exchangeCase(ctx, e, steps)
		}}
	}
	cases := []Case{
		record("barrier", Puts, (*exchange).byBarrier),
		record("signal", Puts, (*exchange).bySignal),
		record("put_signal", Puts, (*exchange).byPutSignal),
		record("put_signal_wait", Puts, (*exchange).byPutSignalWait),
		record("get", "transfers", (*exchange).byGet),
		record("prepared", Puts, (*exchange).byPrepared),
		record("two_streams", Puts, (*exchange).onTwoStreams),
		{Name: "graph/chain", Needs: []string{"graphs", Puts}, Run: chainCase},
	}
	for _, alg := range ownForms("NewAllReduce", kind, backend) {
		if !kernels.Supported(kind, alg, tensor.Int32, kernels.Sum, world) {
			continue
		}
		cases = append(cases, Case{Name: fmt.Sprintf("graph/all_reduce/%s", alg), Needs: append(needsOn(kind, alg), "graphs"),
			Run: func(ctx context.Context, e *Env) error { return reductionReplayCase(ctx, e, alg) }})
	}
	return cases
}

// lateness is how much later than the others a late rank is: far more than what an exchange takes.
const lateness = 8 * time.Millisecond

// latePlaces is the number of places at which a rank may be late.
const latePlaces = 2

// pace makes one rank late in each round, at one of the places.
type pace struct {
	rank, size int
	round      atomic.Int64
}

// rounds is how many it takes until every rank was late at every place, and one in which none is.
func (p *pace) rounds() int { return latePlaces*p.size + 1 }

// at enqueues on s, or records, the place at which this rank may be late.
func (p *pace) at(s device.Stream, place int) error {
	return s.HostFunc(func() {
		if int(p.round.Load()) == latePlaces*p.rank+place {
			time.Sleep(lateness)
		}
	})
}

// The places of an exchange at which a rank may be late.
const (
	beforeSending = iota
	beforeReading
)

// exchangeElements is the size of what a rank sends to another: more than what arrives as one.
const exchangeElements = 1029

// exchange is data that every rank sends to every one that it sends to, and how it is seen. Behind each exchange what was sent is
// overwritten with spoiled, so that a rank that reads too late, or a peer that does not wait until it has, shows.
type exchange struct {
	e    *Env
	pace *pace

	dst     *tensor.Tensor // [world][n]: the row of each rank is written by that rank
	sent    *tensor.Tensor // [n]: what this rank sends
	spoiled *tensor.Tensor // [n]
	kept    *tensor.Tensor // [world][n]: what this rank has read
	from    []int          // the ranks whose rows it reads

	other    device.Stream  // of onTwoStreams
	events   []device.Event // of onTwoStreams
	prepared []*memory.Transfer
}

func newExchange(ctx context.Context, e *Env) (*exchange, error) {
	const n = exchangeElements
	world := int64(e.R.WorldSize())
	x := &exchange{e: e, pace: &pace{rank: e.R.Rank(), size: e.R.WorldSize()}}
	var err error
	if x.dst, err = e.mapped(ctx, tensor.Int64, world, n); err != nil {
		return nil, err
	}
	for _, own := range []struct {
		t     **tensor.Tensor
		shape []int64
	}{{&x.sent, []int64{n}}, {&x.spoiled, []int64{n}}, {&x.kept, []int64{world, n}}} {
		if *own.t, err = e.R.Zeros(ctx, tensor.Int64, own.shape...); err != nil {
			return nil, err
		}
	}
	spoiled := make([]int64, n)
	for i := range spoiled {
		spoiled[i] = -1 - int64(i)
	}
	return x, tensor.Write(x.spoiled.Local(), spoiled, 0)
}

func (x *exchange) close(ctx context.Context) error {
	var err error
	for _, t := range x.prepared {
		err = errors.Join(err, t.Close())
	}
	for _, v := range x.events {
		err = errors.Join(err, v.Close())
	}
	if x.other != nil {
		err = errors.Join(err, x.other.Close())
	}
	return errors.Join(err, closeAll(ctx, x.kept, x.spoiled, x.sent, x.dst))
}

// mark is element i of what rank sends in a round.
func mark(rank, round int, i int64) int64 { return int64(round+1)<<40 | int64(rank+1)<<20 | i }

// fill writes what this rank sends in a round.
func (x *exchange) fill(round int) error {
	all := make([]int64, exchangeElements)
	for i := range all {
		all[i] = mark(x.e.R.Rank(), round, int64(i))
	}
	return tensor.Write(x.sent.Local(), all, 0)
}

// check looks whether what was read in a round is what was sent in it.
func (x *exchange) check(round int) error {
	for _, from := range x.from {
		got := make([]int64, exchangeElements)
		if err := tensor.Read(x.kept.Local(), got, int64(from)*exchangeElements); err != nil {
			return err
		}
		for i, v := range got {
			if want := mark(from, round, int64(i)); v != want {
				return fmt.Errorf("replay %d: element %d from rank %d is %#x, expected %#x", round, i, from, v, want)
			}
		}
	}
	return nil
}

// row is the row of rank in a tensor of one row a rank.
func row(t *tensor.Tensor, rank int) (tensor.SymmetricTensor, error) {
	return t.Sub(int64(rank)*exchangeElements, exchangeElements)
}

// put enqueues putting src to this rank's row on each of the peers.
func (x *exchange) put(s device.Stream, src *tensor.Tensor, peers ...int) error {
	mine, err := row(x.dst, x.e.R.Rank())
	if err != nil {
		return err
	}
	for _, peer := range peers {
		if err := mine.Put(s, peer, src); err != nil {
			return err
		}
	}
	return nil
}

// read enqueues reading what has come.
func (x *exchange) read(s device.Stream) error {
	return errors.Join(x.pace.at(s, beforeReading), s.Copy(x.kept.Ptr(), x.dst.Ptr(), x.dst.Bytes()))
}

// everybody is every rank, the next one first.
func (x *exchange) everybody() []int {
	all := make([]int, x.pace.size)
	for i := range all {
		all[i] = (x.pace.rank + 1 + i) % x.pace.size
	}
	return all
}

// byBarrier orders writes of all to all by two barriers on one channel.
func (x *exchange) byBarrier() error {
	s := x.e.S
	x.from = x.everybody()
	return errors.Join(
		x.pace.at(s, beforeSending), x.put(s, x.sent, x.from...), x.dst.Barrier(s, 4),
		x.read(s), x.dst.Barrier(s, 4), x.put(s, x.spoiled, x.from...),
	)
}

// bySignal orders writes to the next rank by a signal there and a signal back.
func (x *exchange) bySignal() error {
	s := x.e.S
	next, prev := ring(x.e)
	x.from = []int{prev}
	return errors.Join(
		x.pace.at(s, beforeSending), x.put(s, x.sent, next), x.dst.Signal(s, next, 0), x.dst.Wait(s, prev, 0),
		x.read(s), x.dst.Signal(s, prev, 1), x.dst.Wait(s, next, 1), x.put(s, x.spoiled, next),
	)
}

// byPutSignalWait is bySignal with a step of the ring in one call.
func (x *exchange) byPutSignalWait() error {
	s, last := x.e.S, x.e.R.Memory().Channels()-1
	next, prev := ring(x.e)
	x.from = []int{prev}
	mine, err := x.dst.Sub(int64(x.pace.rank)*exchangeElements, exchangeElements)
	if err != nil {
		return err
	}
	return errors.Join(
		x.pace.at(s, beforeSending), mine.PutSignalWait(s, next, x.sent, prev, last),
		x.read(s), x.dst.Signal(s, prev, 1), x.dst.Wait(s, next, 1), x.put(s, x.spoiled, next),
	)
}

// byPutSignal orders writes of all to all by a signal for each, on the last channel.
func (x *exchange) byPutSignal() error {
	s, last := x.e.S, x.e.R.Memory().Channels()-1
	x.from = x.everybody()
	mine, err := x.dst.Sub(int64(x.pace.rank)*exchangeElements, exchangeElements)
	if err != nil {
		return err
	}
	toRow, ok := mine.(*tensor.Tensor)
	if !ok {
		return fmt.Errorf("a part of a tensor is a %T", mine)
	}
	err = x.pace.at(s, beforeSending)
	for _, peer := range x.from {
		err = errors.Join(err, toRow.PutSignal(s, peer, x.sent, last))
	}
	for _, peer := range x.from {
		err = errors.Join(err, x.dst.Wait(s, peer, last))
	}
	err = errors.Join(err, x.read(s))
	for _, peer := range x.from {
		err = errors.Join(err, x.dst.Signal(s, peer, 0))
	}
	for _, peer := range x.from {
		err = errors.Join(err, x.dst.Wait(s, peer, 0))
	}
	return errors.Join(err, x.put(s, x.spoiled, x.from...))
}

// byGet orders reads of the next rank's memory by two barriers.
func (x *exchange) byGet() error {
	s := x.e.S
	next, _ := ring(x.e)
	x.from = []int{next}
	mine, err := row(x.dst, x.pace.rank)
	if err != nil {
		return err
	}
	theirs, err := row(x.dst, next)
	if err != nil {
		return err
	}
	into, err := row(x.kept, next)
	if err != nil {
		return err
	}
	bytes := x.sent.Bytes()
	return errors.Join(
		x.pace.at(s, beforeSending), s.Copy(mine.Local().Ptr(), x.sent.Ptr(), bytes), x.dst.Barrier(s, 5),
		x.pace.at(s, beforeReading), theirs.Get(s, next, into), x.dst.Barrier(s, 5), s.Copy(mine.Local().Ptr(), x.spoiled.Ptr(), bytes),
	)
}

// byPrepared orders a prepared write in two blocks by a signal behind it.
func (x *exchange) byPrepared() error {
	s := x.e.S
	next, prev := ring(x.e)
	x.from = []int{prev}
	mine, err := row(x.dst, x.pace.rank)
	if err != nil {
		return err
	}
	const cut = exchangeElements / 3
	var pairs []tensor.Pair
	for _, part := range [][2]int64{{cut, exchangeElements}, {0, cut}} {
		local, err := x.sent.Slice(part[0], part[1])
		if err != nil {
			return err
		}
		remote, err := mine.Slice(part[0], part[1])
		if err != nil {
			return err
		}
		pairs = append(pairs, tensor.Pair{Local: local, Remote: remote})
	}
	t, err := tensor.PrepareTransfer(backend.Write, next, pairs...)
	if err != nil {
		return err
	}
	x.prepared = append(x.prepared, t)
	return errors.Join(
		x.pace.at(s, beforeSending), t.Post(s), t.WaitOn(s), x.dst.Signal(s, next, 2), x.dst.Wait(s, prev, 2),
		x.read(s), x.dst.Signal(s, prev, 3), x.dst.Wait(s, next, 3), x.put(s, x.spoiled, next),
	)
}

// onTwoStreams records a graph with two branches: one sends and signals, the other waits and reads, and a barrier of the origin's,
// behind both, lets the memory be overwritten.
func (x *exchange) onTwoStreams() error {
	s := x.e.S
	next, prev := ring(x.e)
	x.from = []int{prev}
	if x.other == nil {
		var err error
		if x.other, err = x.e.R.NewStream(); err != nil {
			return err
		}
		for range 2 {
			v, err := x.e.R.Device().NewEvent()
			if err != nil {
				return err
			}
			x.events = append(x.events, v)
		}
	}
	fork, join := x.events[0], x.events[1]
	return errors.Join(
		s.Record(fork), x.other.WaitEvent(fork),
		x.pace.at(s, beforeSending), x.put(s, x.sent, next), x.dst.Signal(s, next, 0),
		x.dst.Wait(x.other, prev, 0), x.read(x.other), x.other.Record(join),
		s.WaitEvent(join), x.dst.Barrier(s, 1), x.put(s, x.spoiled, next),
	)
}

// capture records what steps enqueue on the case's stream.
func (e *Env) capture(steps func() error) (device.Graph, error) {
	if err := e.S.BeginCapture(); err != nil {
		return nil, err
	}
	if err := steps(); err != nil {
		return nil, err
	}
	return e.S.EndCapture()
}

// exchangeCase records an exchange and replays it.
func exchangeCase(ctx context.Context, e *Env, steps func(x *exchange) error) error {
	x, err := newExchange(ctx, e)
	if err != nil {
		return err
	}
	g, err := e.capture(func() error { return steps(x) })
	if err != nil {
		return err
	}
	for round := range x.pace.rounds() {
		x.pace.round.Store(int64(round))
		if err := x.fill(round); err != nil {
			return err
		}
		// All begin together, so that a late rank is later than the others.
		if err := e.R.Barrier(ctx); err != nil {
			return err
		}
		if err := errors.Join(g.Launch(e.S), e.S.Synchronize(ctx)); err != nil {
			return fmt.Errorf("replay %d: %w", round, err)
		}
		if err := x.check(round); err != nil {
			return err
		}
	}
	if err := g.Close(); err != nil {
		return err
	}
	return x.close(ctx)
}

// chainCase launches several graphs, each twice, and the same work without a graph, one behind the other without waiting on the host.
// They count on the same channels, and each keeps what it has read.
func chainCase(ctx context.Context, e *Env) error {
	const links = 4 // the last is no graph
	var chain []*exchange
	var graphs []device.Graph
	for i := range links {
		x, err := newExchange(ctx, e)
		if err != nil {
			return err
		}
		if err := x.fill(i); err != nil {
			return err
		}
		x.pace.round.Store(int64((i + 1) % x.pace.rounds()))
		chain = append(chain, x)
		if i == links-1 {
			continue
		}
		steps := []func(*exchange) error{(*exchange).byBarrier, (*exchange).bySignal, (*exchange).byPutSignal}[i]
		g, err := e.capture(func() error { return steps(x) })
		if err != nil {
			return err
		}
		graphs = append(graphs, g)
	}
	eager := chain[links-1]
	for _, i := range []int{0, 1, 2, 2, 1, 0} {
		if err := graphs[i].Launch(e.S); err != nil {
			return err
		}
		if err := errors.Join(eager.byBarrier(), eager.bySignal(), eager.byPutSignal()); err != nil {
			return err
		}
	}
	if err := e.S.Synchronize(ctx); err != nil {
		return err
	}
	for i, x := range chain {
		if err := x.check(i); err != nil {
			return fmt.Errorf("link %d: %w", i, err)
		}
	}
	for _, g := range graphs {
		if err := g.Close(); err != nil {
			return err
		}
	}
	for _, x := range slices.Backward(chain) {
		if err := x.close(ctx); err != nil {
			return err
		}
	}
	return nil
}

// reductionReplayCase replays an all-reduce whose input is new each time, with ranks that are late in front of it, or in front of reading
// its result.
func reductionReplayCase(ctx context.Context, e *Env, alg kernels.Algorithm) error {
	const n = 2053
	p := &pace{rank: e.R.Rank(), size: e.R.WorldSize()}
	in, err := newGuarded(ctx, e, tensor.Int32, n)
	if err != nil {
		return err
	}
	out, err := newGuarded(ctx, e, tensor.Int32, n)
	if err != nil {
		return err
	}
	plan, err := kernels.NewAllReduce(ctx, in.SymmetricTensor, kernels.Sum, &kernels.AllReduceOptions{Algorithm: alg, Out: out.SymmetricTensor})
	if err != nil {
		return err
	}
	src, freeSrc, err := private(e, in.Bytes())
	if err != nil {
		return err
	}
	kept, freeKept, err := private(e, out.Bytes())
	if err != nil {
		return err
	}
	s := e.S
	g, err := e.capture(func() error {
		return errors.Join(
			p.at(s, beforeSending), s.Copy(in.Local().Ptr(), src, in.Bytes()), plan.Run(s),
			p.at(s, beforeReading), s.Copy(kept, out.Local().Ptr(), out.Bytes()), s.Fill(out.Local().Ptr(), poison, out.Bytes()),
		)
	})
	if err != nil {
		return err
	}
	element := func(rank, round int, i int64) int64 { return int64(rank+1)*1000 + int64(round)*7 + i%13 }
	got := make([]byte, out.Bytes())
	for round := range p.rounds() {
		p.round.Store(int64(round))
		var mine, want []byte
		for i := range int64(n) {
			sum := int64(0)
			for r := range p.size {
				sum += element(r, round, i)
			}
			mine, want = appendValue(mine, tensor.Int32, element(p.rank, round, i)), appendValue(want, tensor.Int32, sum)
		}
		if err := e.R.Device().CopyFromHost(src, mine); err != nil {
			return err
		}
		if err := e.R.Barrier(ctx); err != nil {
			return err
		}
		// Nothing but the plan orders the second launch behind the peers' first.
		if err := errors.Join(g.Launch(s), g.Launch(s), s.Synchronize(ctx)); err != nil {
			return fmt.Errorf("replay %d: %w", round, err)
		}
		if err := e.R.Device().CopyToHost(got, kept); err != nil {
			return err
		}
		if err := sameBytes(tensor.Int32, got, want); err != nil {
			return fmt.Errorf("replay %d: %w", round, err)
		}
	}
	if err := errors.Join(in.bands(), out.bands(), g.Close(), freeSrc(), freeKept()); err != nil {
		return err
	}
	return closeAll(ctx, plan, out, in)
}
