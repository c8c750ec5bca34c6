package kernels

import (
	"context"
	"fmt"

	"github.com/symmem/symmem/collective"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/tensor"
)

// Transfers is an all-reduce that never follows a pointer to a peer: data and results travel by prepared puts, which every
// backend with transfers has, and each rank reduces what has come to its own part of the workspace.
//
// A small message is put whole to every peer, and every rank reduces everything. A large one is cut into shards, one a rank, and
// shards into laps: laps of every input are put to the shard's owner, who reduces them and puts the result to every output, while
// the next lap is under way. All ranks send the same thing at the same time, and go on when everybody's has come: so each link carries one
// copy at a time. (Ranks that run ahead of others send to one peer with them, and all links of a GPU then go as slowly as the one that is
// shared.) It also says that a lap's place is free again, and, for the next run, that all are: neither form has a state that the host
// changes from run to run.

// transferSlots is how many laps of one writer an owner has room for: one that comes, and one that is being reduced.
const transferSlots = 2

// nearRanks is between how many GPUs copies go one right after the other, and not in step with the peers': among more, two ranks would send to one peer, which costs
// more than the steps do.
const nearRanks = 2

// copyEngines reports whether transfers of a tensor are copies between as many GPUs, with kernels that signal. All ranks have the same answer.
func copyEngines(in tensor.SymmetricTensor) bool {
	m := in.Memory()
	return in.WorldSize() == nearRanks && in.Device().Kind() == device.CUDA && m.Backend().Capabilities().PeerPointers && !m.SignalsSome()
}

// nearTwoLapsBytes is the length of a shard from which on two laps are faster than one, near between CUDA devices: the first is reduced while the second
// comes, and its results go while the second is reduced. What one stream waits for of another costs some 10 us there (docs/hardware.md).
var nearTwoLapsBytes = int64(64 << 20)

// shardAlign is what shards and laps are cut at, in bytes: whole cache lines, and vectors of every kernel.
const shardAlign = 128

// The signals of a plan.
const (
	signalData    = iota // a lap, or the whole message, has come
	signalResults        // large: an owner's lap of results has come; small: the peer has room again
	transferSignals
)

// transferForm is how the message is cut, alike on every rank. The workspace is
//
//	slots  [transferSlots, or 1 if there is one lap][world-1] of span bytes each. Of the writers, the next rank's comes first
//
// What is in a slot begins lead bytes behind its beginning, on a GPU as the input does behind a multiple of 16.
type transferForm struct {
	*allReduce
	rank  int
	size  int
	far   bool  // peers have no pointers
	near  bool  // between two GPUs, puts are copies, with kernels that signal: the first two laps go one right after the other
	bytes int64 // of the message
	small bool
	shard int64 // bytes of a shard; the last ones may be shorter, or empty
	lap   int64 // bytes of a lap
	laps  int   // of a shard
	lead  int64

	inWorkspace bool  // the message is not in the tensors but in the workspace, in place
	at          int64 // and there it begins
}

func (a *allReduce) newTransferForm() transferForm {
	f := transferForm{allReduce: a, rank: a.in.Rank(), size: a.in.WorldSize(), bytes: a.in.Bytes(), lead: leadOf(a.in)}
	f.cut()
	return f
}

// leadOf is where a tensor begins behind a multiple of 16, the same on every rank: kernels of a GPU load vectors from all inputs at once. The CPU takes each input as it lies, and so do ranks that have
// adopted theirs at places that are not alike.
func leadOf(t tensor.SymmetricTensor) int64 {
	if t.Device().Kind() != device.CUDA {
		return 0
	}
	return int64(t.Ptr() % 16)
}

// cut decides how the message is cut.
func (f *transferForm) cut() {
	a := f.allReduce
	f.far = !a.in.Memory().Backend().Capabilities().PeerPointers
	f.near = copyEngines(a.in)
	f.small, f.lap = transferGeometry(a.in.Device().Kind(), f.far, f.bytes, f.size)
	f.shard, f.laps = f.bytes, 1
	if f.small {
		f.lap = f.bytes
	} else {
		f.shard = alignUp((f.bytes+int64(f.size)-1)/int64(f.size), shardAlign)
		if f.near && f.lap >= f.shard && f.shard >= nearTwoLapsBytes {
			f.lap = alignUp((f.shard+1)/2, shardAlign)
		}
		f.laps = int(max((f.shard+f.lap-1)/f.lap, 1))
	}
}

// input and output are where this rank's message begins.
func (f transferForm) input(b *collective.Builder) device.Ptr {
	if f.inWorkspace {
		return b.Workspace(f.rank).Add(f.at)
	}
	return f.in.Ptr()
}

func (f transferForm) output(b *collective.Builder) device.Ptr {
	if f.inWorkspace {
		return f.input(b)
	}
	return f.out.Ptr()
}

// byTransfers makes the spec that of the form Transfers.
func (a *allReduce) byTransfers(s *collective.Spec) {
	f := a.newTransferForm()
	s.Workspace = f.workspaceBytes()
	f.program(s)
	s.Program.Build = func(_ context.Context, b *collective.Builder) error { return f.addTo(b) }
}

// program makes the spec that of a program with the form's steps, which Build adds.
func (f transferForm) program(s *collective.Spec) {
	s.Parameters += fmt.Sprintf(", small %t, near %t, shards of %d bytes in laps of %d, first byte at %d of 16", f.small, f.near, f.shard, f.lap, f.lead)
	s.Program = &collective.Program{
		Signals: transferSignals,
		// A goroutine that copies and reduces gains nothing by another.
		Lane: !f.small && f.size > 1 && (f.in.Device().Kind() == device.CUDA || f.far),
	}
	if f.small {
		s.Program.Granted = 1 // the peers have room for the first run
	}
}

// addTo adds the steps of a run to a program.
func (f transferForm) addTo(b *collective.Builder) error {
	reduce, err := f.newReduce(b)
	if err != nil {
		return err
	}
	f.build(transferBuilder{f, b, reduce})
	return nil
}

func alignUp(n, to int64) int64 { return (n + to - 1) / to * to }

func (f transferForm) slots() int {
	return min(f.laps, transferSlots)
}

// workspaceBytes is the size of all slots.
func (f transferForm) workspaceBytes() int64 { return int64(f.slots()*(f.size-1)) * f.span() }

// span is the size of a slot.
func (f transferForm) span() int64 { return alignUp(f.lap+f.lead, shardAlign) }

// slot is where in owner's workspace writer's lap goes.
func (f transferForm) slot(owner, writer, lap int) int64 {
	writers := f.size - 1
	index := lap%f.slots()*writers + (writer-owner+f.size)%f.size - 1
	return int64(index)*f.span() + f.lead
}

// piece is the range of bytes of owner's lap in the message.
func (f transferForm) piece(owner, lap int) (lo, hi int64) {
	if f.small {
		return 0, f.bytes
	}
	end := min(int64(owner+1)*f.shard, f.bytes)
	lo = min(int64(owner)*f.shard+int64(lap)*f.lap, end)
	return lo, min(lo+f.lap, end)
}

// transferSteps takes the steps of a run.
type transferSteps interface {
	send(signal, lap int) // the lane puts a lap to every peer, with the signal behind it
	put(lap int)          // the lane puts a lap to every owner, without a signal
	announce(signal int)  // the plan's stream signals every peer
	wait(signal int)      // the lane waits for a signal of every peer
	finish(signal int)    // the plan's stream does, and is told what has failed
	grant(signal int)     // the lane signals every peer
	reduce(lap int)       // the plan's stream reduces a lap of this rank's shard
	fork()                // the lane goes on only when the plan's stream has come here
	join()                // the plan's stream goes on only when the lane has come here
}

// build adds the steps of one run. They may run one after the other in this order, on one stream, or in any other that keeps what forks,
// joins and streams demand. What every rank has sent is waited for next, one after the other: so nobody waits in a circle. The last wait is
// the plan's stream's, whose user looks for errors.
func (f transferForm) build(s transferSteps) {
	switch {
	case f.size == 1:
		s.reduce(0)
		return
	case f.small:
		s.wait(signalResults)
		s.send(signalData, 0)
		s.finish(signalData)
		s.reduce(0)
		s.grant(signalResults)
		return
	}
	s.fork()
	if f.near {
		f.buildNear(s)
		return
	}
	s.send(signalData, 0)
	s.wait(signalData)
	s.join()
	for l := range f.laps {
		more := l+1 < f.laps
		if more {
			s.send(signalData, l+1)
		}
		s.reduce(l)
		s.fork() // before the wait: what follows it need not wait for the GPU then
		if more {
			s.wait(signalData)
			s.join()
		}
		s.send(signalResults, l)
		if more {
			s.wait(signalResults)
		}
	}
	s.join()
	s.finish(signalResults)
}

// buildNear adds the steps of a large run behind its fork, where puts are copies by the GPU: its lane copies without a pause, two laps of inputs and then
// results and further laps in turn, while the plan's stream waits for what has come and reduces it. That stream waits for others' laps only behind its own
// copy of the same lap: both streams may go by one queue.
func (f transferForm) buildNear(s transferSteps) {
	s.put(0)
	s.join()
	s.announce(signalData)
	if f.laps > 1 {
		s.put(1)
	}
	for l := range f.laps {
		s.finish(signalData)
		s.reduce(l)
		if l+1 < f.laps { // before the results go, behind which the others wait for theirs
			s.join()
			s.announce(signalData)
		}
		s.fork()
		s.send(signalResults, l)
		if l+transferSlots < f.laps {
			s.wait(signalResults) // of this lap, whose place the next one takes
			s.put(l + transferSlots)
		}
	}
	if f.laps > 1 {
		s.wait(signalResults)
	}
	s.join()
	s.finish(signalResults)
}

// transferBuilder makes the steps those of a plan.
type transferBuilder struct {
	transferForm
	*collective.Builder
	reduceLap func(lap int)
}

func (b transferBuilder) wait(signal int)     { b.Wait(signal) }
func (b transferBuilder) finish(signal int)   { b.Finish(signal) }
func (b transferBuilder) grant(signal int)    { b.Signal(signal) }
func (b transferBuilder) announce(signal int) { b.Announce(signal) }
func (b transferBuilder) put(lap int)         { b.Put(signalData, b.toOwners(lap)...) }
func (b transferBuilder) reduce(lap int)      { b.reduceLap(lap) }
func (b transferBuilder) fork()               { b.Fork() }
func (b transferBuilder) join()               { b.Join() }

func (b transferBuilder) send(signal, lap int) {
	if signal == signalResults {
		b.Send(signal, b.toAll(lap)...)
	} else {
		b.Send(signal, b.toOwners(lap)...)
	}
}

// toOwners is the puts of a lap of every peer's shard to its owner.
func (b transferBuilder) toOwners(lap int) []collective.Put {
	f := b.transferForm
	var puts []collective.Put
	for k := 1; k < f.size; k++ {
		peer := (f.rank + k) % f.size
		lo, hi := f.piece(peer, lap)
		puts = append(puts, collective.Put{Peer: peer, Tensor: collective.ToWorkspace, Offset: f.slot(peer, f.rank, lap), Local: f.input(b.Builder).Add(lo), Bytes: hi - lo})
	}
	return puts
}

// toAll is the puts of this rank's lap of results to every output.
func (b transferBuilder) toAll(lap int) []collective.Put {
	f := b.transferForm
	var puts []collective.Put
	lo, hi := f.piece(f.rank, lap)
	tensor, at := specOut, lo
	if f.inWorkspace {
		tensor, at = collective.ToWorkspace, f.at+lo
	}
	for k := 1; k < f.size; k++ {
		puts = append(puts, collective.Put{Peer: (f.rank + k) % f.size, Tensor: tensor, Offset: at, Local: f.output(b.Builder).Add(lo), Bytes: hi - lo})
	}
	return puts
}
