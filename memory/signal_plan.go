package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// Signals are the signals of one plan, with counters of their own, so that they disturb neither users' signals nor other plans. After a wait
// that timed out, or a put that failed, nothing waits or signals any more: the plan has failed, and its peers must not use what it
// may not have sent.
type Signals struct {
	memory    *Memory
	workspace *Workspace
	user      *signalUser
	signals   signals
}

// SignalsOptions says what a plan's signals are like, alike on all ranks.
type SignalsOptions struct {
	// Channels is their number, 1 to 1024.
	Channels int
	// Granted is how many of the channels, the last ones, begin with one signal of every peer that was not waited for.
	Granted int
	// Peers are, by channel, the ranks that this rank exchanges its signals with; nil, or nil for a channel, is every peer. Where one rank has
	// another, the other has it. ErrUnsupported where [Memory.SignalsSome] is not so.
	Peers [][]int
	// First is the count that counters begin at: to test that counting wraps around.
	First uint32
	// Op is what errors call the plan.
	Op string
	// Failed, unless nil, is told of the first failure, and gives the error to report. It may be called on any goroutine.
	Failed func(error) error
	// GaveUp, unless nil, is asked before anything is sent or waited for where the CPU does that. An error is that of a plan which has failed on the device
	// without Failed, and ends the signals as Fail does. It may be called on any goroutine, and must not block.
	GaveUp func() error
}

// signalUser is the plan that has signals; the memory's own signals have none.
type signalUser struct {
	SignalsOptions
	workspace *Workspace // that the signals are in; nil for none
	dead      atomic.Bool
	why       atomic.Pointer[error] // it is dead
	closed    atomic.Bool           // and so dead: only a graph can still ask, and is told each time
}

// begin is how many signals have come on a channel when the plan begins.
func (u *signalUser) begin(channel int) uint32 {
	if channel >= u.Channels-u.Granted {
		return u.First + 1
	}
	return u.First
}

// has reports whether a channel's signals go to peer, and come from it.
func (u *signalUser) has(channel, peer int) bool {
	return u == nil || channel >= len(u.Peers) || u.Peers[channel] == nil || slices.Contains(u.Peers[channel], peer)
}

// failedBefore reports whether the plan has failed before.
func (u *signalUser) failedBefore() bool {
	switch {
	case u == nil:
		return false
	case u.dead.Load():
		return true
	}
	var err error
	if u.workspace != nil { // it may be another plan's soon: a graph that still has this one must not write to it
		err = u.workspace.Err()
	}
	switch {
	case err != nil:
		err = fmt.Errorf("%s: %w", u.Op, err)
	case u.GaveUp != nil:
		err = u.GaveUp()
	}
	if err != nil {
		u.keep(err)
		u.dead.Store(true)
	}
	return err != nil
}

// tell gives the error of a plan that has failed, to every wait that comes to it: what the plan was to do there is not done.
func (u *signalUser) tell() error {
	if u.closed.Load() {
		return fmt.Errorf("%s: %w", u.Op, errs.ErrClosed)
	}
	return u.toldWhy()
}

// toldWhy is the error of a plan that has failed, or nil.
func (u *signalUser) toldWhy() error {
	if u == nil {
		return nil
	}
	if why := u.why.Load(); why != nil {
		return *why
	}
	return nil
}

// failure makes the error of a wait in vain the user's.
func (u *signalUser) failure(e *device.WaitError) error {
	if u == nil {
		return e
	}
	e.Op, e.Channel = u.Op, -1
	return u.fail(e)
}

// failLater keeps the error of what is not a wait for the next wait: a plan may put and signal on streams that are not its
// user's.
func (u *signalUser) failLater(err error) { _ = u.fail(fmt.Errorf("%s: %w", u.Op, err)) }

// fail ends the signals, and then tells the plan. That leaves out the steps that come to it from then on, and nobody may be told that they are done. What waits later gets what the plan has made
// of the first error.
func (u *signalUser) fail(err error) error {
	first := u.why.CompareAndSwap(nil, &err)
	u.dead.Store(true)
	told := u.Failed(err)
	if first {
		u.why.Store(&told)
	}
	return told
}

// keep keeps the first error of a plan that has failed.
func (u *signalUser) keep(err error) { u.why.CompareAndSwap(nil, &err) }

// SignalsBytes is how much of a workspace [Workspace.Signals] takes, alike on all ranks; 0 for a number of channels that it refuses.
func (m *Memory) SignalsBytes(channels int) int64 {
	if m.made("SignalsBytes") != nil || channels < 1 || channels > mostChannels {
		return 0
	}
	return m.padBytes(channels)
}

// Signals makes a plan's signals on the SignalsBytes from offset, a multiple of 128, of the workspace. Collective; it fails on all
// ranks or on none. Close them after the workspace, whose Close finds out whether a peer may still signal here.
func (w *Workspace) Signals(ctx context.Context, offset int64, o *SignalsOptions) (*Signals, error) {
	const name = "Signals"
	if err := errors.Join(w.made(name), errs.Given(name, "ctx", ctx, "a context"), errs.Given(name, "o", o, "what the signals are like")); err != nil {
		return nil, err
	}
	return inTurn(ctx, &w.memory.collective, "making the signals of "+o.Op, func(ctx context.Context, gaveUp error) (*Signals, error) {
		return w.makeSignals(ctx, offset, o, gaveUp)
	})
}

func (w *Workspace) makeSignals(ctx context.Context, offset int64, o *SignalsOptions, gaveUp error) (*Signals, error) {
	const name = "Signals"
	m := w.memory
	err := gaveUp
	switch {
	case err != nil:
	case w.closed.Load():
		err = fmt.Errorf("workspace: %w", errs.ErrClosed)
	case o.Channels > mostChannels || o.Channels < 1 || o.Granted < 0 || o.Granted > o.Channels:
		err = errs.Invalid(name, "Channels", fmt.Sprintf("%d, of which %d granted", o.Channels, o.Granted),
			fmt.Sprintf("1 to %d, and no more granted than there are", mostChannels))
	case offset < 0 || offset%padStride != 0 || offset > w.Bytes()-m.padBytes(o.Channels):
		err = errs.Invalid(name, "offset", offset, fmt.Sprintf("a multiple of %d with room behind it for the pads", padStride))
	}
	if err == nil {
		err = m.checkSignalPeers(o.Peers)
	}
	if _, ok := m.flagger(); ok { // making flags is collective
		if err := m.agreeOnFlags(ctx, "number of channels for signals", o.Channels, err); err != nil {
			return nil, fmt.Errorf("making the signals of %s: %w", o.Op, err)
		}
	}
	user := &signalUser{SignalsOptions: *o, workspace: w}
	if user.Failed == nil {
		user.Failed = func(err error) error { return err }
	}
	var made signals
	if err == nil {
		made, err = m.signalsOn(ctx, w, offset, o.Channels, user)
	}
	if vote := m.group.Vote(ctx, "signals", err); vote != nil {
		if err == nil {
			vote = m.giveUpSignals(made, vote)
		}
		return nil, fmt.Errorf("making the signals of %s: %w", o.Op, vote)
	}
	return &Signals{memory: m, workspace: w, user: user, signals: made}, nil
}

// SignalsSome reports whether a plan's signals can be for some of the peers ([SignalsOptions.Peers]): where the CPU signals, which it does on the host device, and for
// memory without addresses. All ranks have the same answer.
func (m *Memory) SignalsSome() bool {
	if m.made("SignalsSome") != nil {
		return false
	}
	_, host := m.device.(device.HostMemory)
	_, flags := m.flagger()
	return host || flags
}

// MovesBetweenIslands reports whether the backend itself puts and signals to ranks that have no addresses of each other's memory, as nixl does: also where there are none such. All ranks have
// the same answer.
func (m *Memory) MovesBetweenIslands() bool {
	if m.made("MovesBetweenIslands") != nil {
		return false
	}
	_, moves := backend.TransferrerOf(m.backend)
	_, flags := backend.FlaggerOf(m.backend)
	return moves && flags
}

// checkSignalPeers says what is wrong with the ranks that signals are exchanged with.
func (m *Memory) checkSignalPeers(peers [][]int) error {
	if peers == nil {
		return nil
	}
	if !m.SignalsSome() {
		return fmt.Errorf("signals for some of the peers on %s, whose kernels signal: %w", m.device.Name(), errs.ErrUnsupported)
	}
	for _, ranks := range peers {
		for _, r := range ranks {
			if r < 0 || r >= m.group.Size() || r == m.group.Rank() {
				return errs.Invalid("Signals", "Peers", r, fmt.Sprintf("another rank than this one, %d, of 0 to %d", m.group.Rank(), m.group.Size()-1))
			}
		}
	}
	return nil
}

// made refuses signals that no workspace has made.
func (p *Signals) made(call string) error {
	if p == nil || p.memory == nil {
		return errs.Invalid(call, "signals", "the zero Signals", "those that Workspace.Signals gave")
	}
	return nil
}

// Fail makes nothing wait or signal any more, as after a wait in vain, because of err: the plan has failed elsewhere. It does not wait for
// what is under way. Whoever calls it tells the plan.
func (p *Signals) Fail(err error) {
	if p.made("Fail") != nil {
		return
	}
	p.user.keep(err)
	p.user.dead.Store(true)
}

// usable refuses a channel that there is not, and everything after Close.
func (p *Signals) usable(call string, channel int) error {
	if err := p.made(call); err != nil {
		return err
	}
	if channel < 0 || channel >= p.user.Channels {
		return errs.Invalid(call, "channel", channel, fmt.Sprintf("0 to %d", p.user.Channels-1))
	}
	if p.user.closed.Load() {
		return fmt.Errorf("%s: the signals of %s: %w", call, p.user.Op, errs.ErrClosed)
	}
	return nil
}

// enqueues refuses what the signals cannot be enqueued on.
func (p *Signals) enqueues(call string, s device.Stream, channel int) error {
	if err := p.made(call); err != nil {
		return err
	}
	if err := p.memory.checkStream(call, s); err != nil {
		return err
	}
	return p.usable(call, channel)
}

// SignalAll enqueues a signal to every peer of the channel, as [Memory.Signal] does. ErrInvalid for a channel that does not exist, or a stream of another
// device; ErrClosed after Close.
func (p *Signals) SignalAll(s device.Stream, channel int) error {
	if err := p.enqueues("SignalAll", s, channel); err != nil {
		return err
	}
	return p.signals.signalAll(s, channel)
}

// WaitAll enqueues waiting for one signal of every peer of the channel that was not waited for before. It is bounded as
// [Memory.Wait] is. A wait in vain, or what has failed before, is an error of s. Its own errors are those of SignalAll.
func (p *Signals) WaitAll(s device.Stream, channel int) error {
	if err := p.enqueues("WaitAll", s, channel); err != nil {
		return err
	}
	return p.signals.waitAll(s, channel, false)
}

// WaitAllBeside is WaitAll on a stream of the plan's own, whose errors nobody looks for: what fails is told by the next WaitAll.
func (p *Signals) WaitAllBeside(s device.Stream, channel int) error {
	if err := p.enqueues("WaitAllBeside", s, channel); err != nil {
		return err
	}
	return p.signals.waitAll(s, channel, true)
}

// Close releases the signals, after the workspace. The device must have nothing left to do for them. The stream of a graph that holds their waits has ErrClosed,
// and the graph signals nobody. Where the workspace was not closed, or could not be on some rank, what peers may still write stays until the memory is closed. Closing twice is ErrClosed.
func (p *Signals) Close() error {
	if err := p.made("Close"); err != nil {
		return err
	}
	if p.user.closed.Swap(true) {
		return fmt.Errorf("closing the signals of %s: %w", p.user.Op, errs.ErrClosed)
	}
	p.user.dead.Store(true)
	if p.workspace.Err() == nil {
		return p.memory.AtRelease(p.signals.close)
	}
	return p.signals.close()
}
