package kernels

import (
	"slices"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
)

// Where the backend moves data between islands itself, as nixl does, puts take NCCL's place on a rail, with signals behind them: each rank of a rail has what it brings put to all others that
// want it, and goes on when theirs has come. What is combined goes to the workspace, in which each lap has rooms: a few for what this rank's island has combined, and one for each other island.
// A kernel combines these, in the order of the islands, so that all ranks of a rail get the same bits. It says then that the rooms are free for the lap after the next. What only moves goes
// straight to the outputs, when the rank there has said, once in each run, that its output may be written.
//
// A rank that gives up signals nobody any more: the CPU looks before each put whether a kernel has given up here, and kernels look after each wait whether the CPU has. So
// whoever waits for such a rank waits in vain, by signals or in a kernel, and gives up in turn.

// The signals of a rail.
const (
	railData  = iota // a lap, or a turn of one, has come
	railReady        // what only moves: the output may be written; what is combined: rooms are free again, a signal for each of railSlots
)

// railPuts is what a collective puts on its rails. Either what it combines is set, or what it passes on, or neither, where blocks are exchanged.
type railPuts struct {
	// brings is which of the own rooms is put to the rank of the rail on an island, and how many bytes there are; 0 for one that gets none.
	brings func(lap, island int) (room int, bytes int64)
	// takes is what this rank combines of its own room and those of the other islands: where that goes, and how many bytes; 0 for nothing.
	takes func(lap int, own device.Ptr) (dst device.Ptr, room int, bytes int64)

	// passes is the ranges of the output which the rank of the rail on an island puts to the others.
	passes func(lap, island int) []stretch
}

// toRooms reports whether what is put goes to rooms in the workspace.
func (f *railForm) toRooms() bool { return f.puts.passes == nil && !f.goesStraight() }

// partners is the ranks that this one exchanges signals with; not nil.
func (f *railForm) partners() []int {
	if f.goesStraight() {
		return f.far()
	}
	return f.links()
}

// roomOf is the room of owner's island for what comes of writer's.
func (f *railForm) roomOf(owner, writer int) int {
	return f.own + (writer-owner+len(f.islands))%len(f.islands) - 1
}

// signals makes the program have the signals of the rails.
func (f *railForm) signals(g *collective.Program) {
	g.Signals = railReady + 1
	if f.toRooms() {
		g.Granted = min(f.laps, railSlots) // there is room for the first laps
		g.Signals = railReady + g.Granted
	}
	for range g.Signals {
		g.Peers = append(g.Peers, f.partners())
	}
}

// turns is how often each rank of the rail puts in a lap: a range a time.
func (f *railForm) turns(lap int) int {
	n := 1
	for i := range f.islands {
		if f.puts.passes != nil {
			n = max(n, len(f.puts.passes(lap, i)))
		}
	}
	return n
}

// turn is the puts of one turn.
func (f *railForm) turn(b *collective.Builder, lap, turn int) (all []collective.Put) {
	if x := f.exchange; x != nil {
		return f.sent(x, b.Workspace(b.Rank()), lap)
	}
	for _, i := range f.otherIslands() {
		put := collective.Put{Peer: f.carrier(i), Tensor: collective.ToWorkspace}
		if f.puts.passes == nil {
			var room int
			room, put.Bytes = f.puts.brings(lap, i)
			put.Offset, put.Local = f.roomAt(lap, f.roomOf(i, f.island)), b.Workspace(b.Rank()).Add(f.roomAt(lap, room))
		} else if ranges := f.puts.passes(lap, f.island); turn < len(ranges) {
			x := ranges[turn]
			put.Tensor, put.Offset, put.Local, put.Bytes = f.specOut, x.lo, f.out.Ptr().Add(x.lo), x.bytes()
		}
		if put.Bytes > 0 {
			all = append(all, put)
		}
	}
	return all
}

// combine adds the kernel that combines what has come of a lap.
func (f *railForm) combine(b *collective.Builder, reduce localReduce, lap int) {
	own := b.Workspace(b.Rank())
	dst, room, n := f.puts.takes(lap, own)
	reduce(f.sources(func(island int) device.Ptr {
		if island == f.island {
			return own.Add(f.roomAt(lap, room))
		}
		return own.Add(f.roomAt(lap, f.roomOf(f.island, island)))
	}), dst, n)
}

// sources is what is combined of the islands, in their order, of where each has it: of an average as often as it has ranks, or in that proportion.
func (f *railForm) sources(at func(island int) device.Ptr) (all []device.Ptr) {
	for i, n := range f.counts() {
		all = append(all, slices.Repeat([]device.Ptr{at(i)}, n)...)
	}
	return all
}

// counts is how often each island counts in what is combined of all.
func (f *railForm) counts() []int {
	counts := make([]int, len(f.islands))
	common := 0
	for i, ranks := range f.islands {
		counts[i] = 1
		if f.op == Avg {
			counts[i] = len(ranks)
		}
		common = gcd(common, counts[i])
	}
	for i := range counts {
		counts[i] /= common
	}
	return counts
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// newReduce makes what combines what islands have combined.
func (f *railForm) newReduce(b *collective.Builder) (localReduce, error) {
	c := cudaReduce{dtype: f.in.DType(), op: f.op, dead: b.Dead(), maxBlocks: f.maxBlocks}
	for i, n := range f.counts() {
		if i < f.island {
			c.rank += n
		}
		c.size += n
	}
	return c.prepare(b, f.in.Device())
}

// railSteps takes the steps of a run by puts. Those of a rail are nothing for a rank that is on none.
type railSteps interface {
	enter(lap int)     // the plan's stream makes what this rank brings
	combine(lap int)   // the plan's stream combines what has come, if anything is combined; it gives up first if what was to come has not
	leave(lap int)     // the plan's stream loads what this rank gets
	send(lap int)      // the lane puts a lap to the rail, with the signal behind it
	come(lap int)      // the lane waits for what the others of the rail put of a lap
	finish(lap int)    // the plan's stream does, and is told what has failed
	signal(signal int) // the lane signals the rail
	wait(signal int)   // the lane waits for a signal of each of the rail
	fork()             // the lane goes on only when the plan's stream has come here
	join()             // the plan's stream goes on only when the lane has come here
}

// buildByPuts adds the steps of a run. While a lap is on its rail, the next one enters, and the one before leaves. What a lap has in the workspace is overwritten by that of two laps later: here
// when it was sent, combined, and loaded by the island, and there when it was combined there, or, of an exchange, loaded. The last wait is the plan's stream's, whose user looks for errors.
func (f *railForm) buildByPuts(s railSteps) {
	if f.goesStraight() {
		f.buildStraight(s)
		return
	}
	rooms := f.toRooms()
	send := func(lap int) {
		s.fork()
		if rooms {
			s.wait(railReady + lap%railSlots)
		} else if lap == 0 {
			s.wait(railReady)
		}
		s.send(lap)
	}
	if !rooms {
		s.fork()
		s.signal(railReady)
	}
	s.enter(0)
	send(0)
	if f.laps > 1 {
		s.enter(1)
	}
	for lap := range f.laps {
		if last := lap+1 == f.laps; last {
			s.join()
			s.finish(lap)
		} else {
			s.come(lap)
			s.join()
			send(lap + 1)
		}
		s.combine(lap)
		if f.exchange != nil {
			s.leave(lap) // which empties the rooms
		}
		if rooms {
			s.fork()
			s.signal(railReady + lap%railSlots)
		}
		if f.exchange == nil {
			s.leave(lap)
		}
		if lap+2 < f.laps {
			s.enter(lap + 2)
		}
	}
}

// railBuilder makes the steps those of a plan.
type railBuilder struct {
	*railForm
	*collective.Builder
	sum    *railKernel
	reduce localReduce // nil if nothing is combined
}

// addPuts adds the steps of a run by puts to a program.
func (f *railForm) addPuts(b *collective.Builder, sum *railKernel) error {
	s := railBuilder{railForm: f, Builder: b, sum: sum}
	if f.op != 0 {
		var err error
		if s.reduce, err = f.newReduce(b); err != nil {
			return err
		}
	}
	f.buildByPuts(s)
	return nil
}

func (b railBuilder) enter(lap int) { b.entering(b.Builder, lap, b.sum) }
func (b railBuilder) leave(lap int) { b.Waiting(leavesLap(lap)) }

func (b railBuilder) combine(lap int) {
	if !b.owns() {
		return
	}
	b.StopIfFailed()
	if b.reduce != nil {
		b.railForm.combine(b.Builder, b.reduce, lap)
	}
}

func (b railBuilder) send(lap int) {
	for turn := range b.turns(lap) {
		if b.owns() {
			b.Send(railData, b.turn(b.Builder, lap, turn)...)
		}
	}
}

func (b railBuilder) come(lap int) {
	for range b.turns(lap) {
		b.wait(railData)
	}
}

func (b railBuilder) finish(lap int) {
	for range b.turns(lap) {
		if b.owns() {
			b.Finish(railData)
		}
	}
}

func (b railBuilder) signal(signal int) {
	if b.owns() {
		b.Signal(signal)
	}
}

func (b railBuilder) wait(signal int) {
	if b.owns() {
		b.Wait(signal)
	}
}

func (b railBuilder) fork() { b.Fork() }
func (b railBuilder) join() { b.Join() }
