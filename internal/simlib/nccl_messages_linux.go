package simlib

import (
	"fmt"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/internal/simcuda"
)

// group is what a thread has called since it has begun a group.
type group struct {
	depth  int
	all    []*messages
	failed nccl.Result // a call of it
}

// messages are what a rank sends and receives together: a stream goes on behind them when all have come, here and there. "If multiple ncclSend and ncclRecv
// operations need to progress concurrently to complete, they must be fused within a ncclGroupStart/ncclGroupEnd section" (nccl.h).
type messages struct {
	comm   *comm
	stream uintptr
	all    []message
}

// message is one side of one.
type message struct {
	sends bool
	peer  int
	at    device.Ptr
	bytes int64
}

// letter names a message: the n-th that a rank sends to another is the n-th that that one receives from it, and the k-th run of those that are recorded likewise.
type letter struct {
	from, to int
	recorded bool
	number   int
	run      int
}

// side counts the messages of two ranks, as one of them has called them.
type side struct {
	from, to        int
	recorded, sends bool
}

// envelope is a message on its way.
type envelope struct {
	bytes []byte
	taken bool
}

func (n *NCCL) groupStart() nccl.Result {
	n.mu.Lock()
	defer n.mu.Unlock()
	thread := unix.Gettid()
	if n.groups[thread] == nil {
		n.groups[thread] = &group{}
	}
	n.groups[thread].depth++
	return nccl.Success
}

// groupEnd puts the messages of a group on their streams, behind its collectives, which were put there when they were called. Of a group with a call that was refused none
// is.
func (n *NCCL) groupEnd() nccl.Result {
	n.mu.Lock()
	thread := unix.Gettid()
	g := n.groups[thread]
	if g == nil {
		n.mu.Unlock()
		n.machine.Violation("ncclGroupEnd without ncclGroupStart on its thread")
		return nccl.InvalidUsage
	}
	if g.depth--; g.depth > 0 {
		n.mu.Unlock()
		return nccl.Success
	}
	delete(n.groups, thread)
	n.mu.Unlock()
	if g.failed != nccl.Success {
		return g.failed
	}
	for _, m := range g.all {
		if r := m.enqueue(); r != nccl.Success {
			return r
		}
	}
	return nccl.Success
}

// message is ncclSend, or ncclRecv.
func (n *NCCL) message(sends bool) func(p uint64, count uintptr, t nccl.DataType, peer int32, h nccl.CommHandle, stream uintptr) nccl.Result {
	return func(p uint64, count uintptr, t nccl.DataType, peer int32, h nccl.CommHandle, stream uintptr) nccl.Result {
		var alone *messages
		r := n.on(h, func(c *comm) nccl.Result {
			if c.busy() {
				n.machine.Violation("a message of rank %d, whose last call was not waited for", c.rank)
			}
			g := n.groups[unix.Gettid()]
			if peer < 0 || int(peer) >= len(c.world.joined) {
				if g != nil {
					g.failed = nccl.InvalidArgument
				}
				return nccl.InvalidArgument
			}
			if count == 0 {
				return nccl.Success
			}
			one := message{sends: sends, peer: int(peer), at: device.Ptr(p), bytes: int64(count) * t.Bytes()}
			if g == nil {
				alone = &messages{comm: c, stream: stream, all: []message{one}}
				return nccl.Success
			}
			i := slices.IndexFunc(g.all, func(m *messages) bool { return m.comm == c && m.stream == stream })
			if i < 0 {
				i = len(g.all)
				g.all = append(g.all, &messages{comm: c, stream: stream})
			}
			g.all[i].all = append(g.all[i].all, one)
			return nccl.Success
		})
		if alone != nil {
			return alone.enqueue()
		}
		return r
	}
}

// enqueue puts them on their stream.
func (m *messages) enqueue() nccl.Result {
	w, rank := m.comm.world.work, m.comm.rank
	r := w.machine.EnqueueLibrary(cu.StreamHandle(m.stream), func(recorded bool) func() simcuda.Step {
		names := w.letters(rank, m.all, recorded)
		runs := 0 // guarded by w.mu
		return func() simcuda.Step {
			w.mu.Lock()
			run := runs
			runs++
			w.mu.Unlock()
			x := exchange{work: w, rank: rank, all: m.all, names: slices.Clone(names), done: make([]bool, len(m.all))}
			for i := range x.names {
				x.names[i].run = run
			}
			return x.step
		}
	})
	if r != cu.Success {
		return nccl.UnhandledCudaError
	}
	return nccl.Success
}

// letters names the messages of a rank.
func (w *work) letters(rank int, all []message, recorded bool) (names []letter) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range all {
		name := letter{from: m.peer, to: rank, recorded: recorded}
		if m.sends {
			name.from, name.to = rank, m.peer
		}
		of := side{name.from, name.to, recorded, m.sends}
		name.number = w.called[of]
		w.called[of]++
		names = append(names, name)
	}
	return names
}

// exchange is a run of messages on a rank's stream.
type exchange struct {
	work  *work
	rank  int
	all   []message
	names []letter
	sent  bool
	done  []bool
}

// step does what can be done of it. What the other rank has not taken is still on its way.
func (x *exchange) step(a *simcuda.Access) (done, moved bool, err error) {
	w := x.work
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.aborted[x.rank] {
		return true, true, nil
	}
	if !x.sent {
		x.sent, moved = true, true
		for i, m := range x.all {
			if m.sends {
				pieces, err := a.Bytes(m.at, m.bytes)
				if err != nil {
					return true, true, err
				}
				w.mail[x.names[i]] = &envelope{bytes: slices.Concat(pieces...)}
			}
		}
	}
	done = true
	for i, m := range x.all {
		e := w.mail[x.names[i]]
		switch {
		case x.done[i]:
			continue
		case m.sends && e != nil && e.taken:
			delete(w.mail, x.names[i])
		case !m.sends && e != nil && !e.taken:
			if int64(len(e.bytes)) != m.bytes {
				w.machine.Violation("rank %d receives %d bytes of rank %d, which sends %d", x.rank, m.bytes, m.peer, len(e.bytes))
				return true, true, fmt.Errorf("%d bytes in place of %d", len(e.bytes), m.bytes)
			}
			to, err := a.Bytes(m.at, m.bytes)
			if err != nil {
				return true, true, err
			}
			data := e.bytes
			for _, b := range to {
				data = data[copy(b, data):]
			}
			e.taken = true
		default:
			done = false
			continue
		}
		x.done[i], moved = true, true
	}
	return done, moved, nil
}
