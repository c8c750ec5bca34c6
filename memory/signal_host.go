package memory

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/futex"
)

// padStride is the distance in bytes between two counters of a signal pad: each has one writer, and two cache lines keep the
// writers apart on processors that fetch lines in pairs.
const padStride = 128

// hostSignals is signal, wait and barrier for devices whose memory this process can address. Its pad is a
// workspace that holds, for each channel and each rank that may write, one counter of signals and one of barriers:
//
//	pad[(channel*2 + kind)*worldSize + writer]
//
// Counters only grow, and wrap. What a waiter has consumed is its own; a kernel advances it when it runs, so that work may
// be captured once and replayed any number of times.
type hostSignals struct {
	user     *signalUser // of a plan; nil for the memory's own
	size     int
	signals  []signalKernel  // by channel*size + peer
	waits    []waitKernel    // by channel*size + peer
	barriers []barrierKernel // by channel

	signalAlls []signalAllKernel // by channel
	waitAlls   []waitAllKernel   // by channel
	beside     []waitAllKernel   // by channel: on streams whose errors nobody looks for
}

// The two kinds of counter in a pad.
const (
	padSignal = iota
	padBarrier
	padKinds
)

// hostPadBytes is the size of a pad.
func hostPadBytes(size, channels int) int64 { return int64(channels * padKinds * size * padStride) }

// newHostSignals makes signals on the pad at offset of a workspace. Local.
func newHostSignals(m *Memory, hm device.HostMemory, pad *Workspace, offset int64, channels int, user *signalUser) (*hostSignals, error) {
	size := m.group.Size()
	s := &hostSignals{
		user:     user,
		size:     size,
		signals:  make([]signalKernel, channels*size),
		waits:    make([]waitKernel, channels*size),
		barriers: make([]barrierKernel, channels),

		signalAlls: make([]signalAllKernel, channels),
		waitAlls:   make([]waitAllKernel, channels),
		beside:     make([]waitAllKernel, channels),
	}
	me := m.group.Rank()
	word := func(owner, channel, kind, writer int) (*futex.Word, error) {
		base, err := pad.Peer(owner)
		if err != nil {
			return nil, err
		}
		b, err := hm.Bytes(base.Add(offset+int64(((channel*padKinds+kind)*size+writer)*padStride)), padStride)
		if err != nil {
			return nil, err
		}
		return futex.At(b)
	}
	for c := range channels {
		b := &s.barriers[c]
		*b = barrierKernel{memory: m, channel: c, mine: make([]*futex.Word, size), theirs: make([]*futex.Word, size)}
		for peer := range size {
			out, err1 := word(peer, c, padSignal, me)
			in, err2 := word(me, c, padSignal, peer)
			theirs, err3 := word(peer, c, padBarrier, me)
			mine, err4 := word(me, c, padBarrier, peer)
			for _, err := range []error{err1, err2, err3, err4} {
				if err != nil {
					return nil, err
				}
			}
			s.signals[c*size+peer] = signalKernel{memory: m, user: user, word: out}
			w := &s.waits[c*size+peer]
			*w = waitKernel{memory: m, user: user, channel: c, peer: peer, word: in}
			b.mine[peer], b.theirs[peer] = mine, theirs
			if user != nil {
				in.Store(user.begin(c))
				w.consumed.Store(user.First)
			}
			if peer != me && user.has(c, peer) {
				s.signalAlls[c].signals = append(s.signalAlls[c].signals, &s.signals[c*size+peer])
				s.waitAlls[c].waits = append(s.waitAlls[c].waits, w)
			}
		}
		s.waitAlls[c].memory, s.waitAlls[c].user = m, user
		s.beside[c] = waitAllKernel{memory: m, user: user, waits: s.waitAlls[c].waits, beside: true}
	}
	return s, nil
}

func (h *hostSignals) signal(s device.Stream, peer, channel int) error {
	return launch(s, &h.signals[channel*h.size+peer])
}

func (h *hostSignals) wait(s device.Stream, peer, channel int) error {
	return launch(s, &h.waits[channel*h.size+peer])
}

func (h *hostSignals) barrier(s device.Stream, channel int) error {
	return launch(s, &h.barriers[channel])
}

func (h *hostSignals) signalAll(s device.Stream, channel int) error {
	return launch(s, &h.signalAlls[channel])
}

func (h *hostSignals) waitAll(s device.Stream, channel int, beside bool) error {
	if beside {
		return launch(s, &h.beside[channel])
	}
	return launch(s, &h.waitAlls[channel])
}

func (h *hostSignals) close() error { return nil }

// launch runs a host kernel on s.
func launch(s device.Stream, k device.HostKernel) error {
	l, ok := s.(device.HostLauncher)
	if !ok {
		return fmt.Errorf("stream of %s cannot run kernels of the host: %w", s.Device().Name(), errs.ErrUnsupported)
	}
	return l.Launch(k)
}

// bound is how long a kernel that begins to wait now may wait, and what ends it sooner.
func (m *Memory) bound(p *futex.Patience) futex.Bound {
	b := futex.Bound{Deadline: time.Now().Add(m.opts.KernelTimeout), Err: m.peerErr}
	if !m.oversubscribed {
		b.Patience = p
	}
	return b
}

type signalKernel struct {
	memory *Memory
	user   *signalUser
	word   *futex.Word
}

func (k *signalKernel) RunKernel() error {
	if err := k.memory.kept(); err != nil {
		return err
	}
	if k.user.failedBefore() {
		return nil // what the peer waits for may not be there
	}
	k.word.Add(1)
	return nil
}

// Start signals, as a part of other work. The run has ended then.
func (k *signalKernel) Start() (device.HostProgress, error) { return nothing{}, k.RunKernel() }

func (k *signalKernel) String() string { return "signal" }

// signalAllKernel signals every peer.
type signalAllKernel struct{ signals []*signalKernel }

func (k *signalAllKernel) RunKernel() error {
	for _, s := range k.signals {
		if err := s.RunKernel(); err != nil {
			return err
		}
	}
	return nil
}

func (k *signalAllKernel) String() string { return "signal" }

type waitKernel struct {
	memory        *Memory
	user          *signalUser
	channel, peer int
	word          *futex.Word
	consumed      atomic.Uint32
	patience      futex.Patience
}

func (k *waitKernel) RunKernel() error {
	if err := k.memory.kept(); err != nil {
		return err
	}
	if k.user.failedBefore() {
		return k.user.tell()
	}
	want := k.consumed.Add(1)
	if int32(k.word.Load()-want) >= 0 {
		return nil
	}
	if err := k.word.WaitAtLeast(want, k.memory.bound(&k.patience)); err != nil {
		return k.user.failure(&device.WaitError{Op: "wait", Channel: k.channel, Peer: k.peer, Err: err})
	}
	return nil
}

func (k *waitKernel) String() string { return "wait" }

// waitAllKernel waits for one signal of every peer.
type waitAllKernel struct {
	memory *Memory
	user   *signalUser
	waits  []*waitKernel
	beside bool // what fails, which the plan has kept then, is no error of the stream
}

func (k *waitAllKernel) RunKernel() error {
	if len(k.waits) == 0 && !k.beside { // what has failed before is told all the same
		if err := k.memory.kept(); err != nil {
			return err
		}
		if k.user.failedBefore() {
			return k.user.tell()
		}
	}
	for _, w := range k.waits {
		if err := w.RunKernel(); err != nil {
			if k.beside {
				return nil
			}
			return err
		}
	}
	return nil
}

func (k *waitAllKernel) String() string { return "wait" }

type barrierKernel struct {
	memory       *Memory
	channel      int
	mine, theirs []*futex.Word // by rank: the counter that rank writes here, the one that this rank writes there
	epoch        atomic.Uint32
	patience     futex.Patience
}

func (k *barrierKernel) RunKernel() error {
	if err := k.memory.kept(); err != nil {
		return err
	}
	epoch := k.epoch.Add(1)
	for _, w := range k.theirs {
		w.Add(1)
	}
	for peer, w := range k.mine {
		if err := w.WaitAtLeast(epoch, k.memory.bound(&k.patience)); err != nil {
			return &device.WaitError{Op: "barrier", Channel: k.channel, Peer: peer, Err: err}
		}
	}
	return nil
}

func (k *barrierKernel) String() string { return "barrier" }
