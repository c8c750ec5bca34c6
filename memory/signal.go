package memory

import (
	"context"
	"errors"
	"fmt"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
)

// signals is signal, wait and barrier on one kind of device. Peer and channel were checked.
type signals interface {
	signal(s device.Stream, peer, channel int) error
	wait(s device.Stream, peer, channel int) error
	barrier(s device.Stream, channel int) error
	// signalAll is signal to every peer, and waitAll wait for every peer, as one work of the stream. Beside the user's stream, what fails is
	// kept for the next wait; only a plan's signals are asked for that.
	signalAll(s device.Stream, channel int) error
	waitAll(s device.Stream, channel int, beside bool) error
	close() error
}

// mostChannels is how many channels signals may have, those of a memory and those of a plan.
const mostChannels = 1024

// makeSignals makes the signal pads, and a workspace for them, if they do not exist yet. Collective; the caller holds m.collective.
func (m *Memory) makeSignals(ctx context.Context) error {
	if m.signals.Load() != nil {
		return nil
	}
	ctx = group.Heard(ctx) // a rank that has none where others have would make them in its next rendezvous, to which those come in another step
	var pad *Workspace
	var err error
	bytes := m.padBytes(m.opts.Channels)
	if m.mixed() {
		bytes = ptx.PadBytes(m.group.Size(), m.opts.Channels)
	}
	if bytes > 0 {
		if pad, err = m.newWorkspace(ctx, WorkspaceRequest{Purpose: fmt.Sprintf("signal pads of %d channels, as the setting channels says", m.opts.Channels), Bytes: bytes, Failure: m.padFailure()}); err != nil {
			return fmt.Errorf("making signal pads: %w", err)
		}
	}
	if _, ok := m.flagger(); ok && bytes == 0 { // else the pads are of one size
		if err := m.agreeOnFlags(ctx, "number of channels for signals (setting channels)", m.opts.Channels, m.Err()); err != nil {
			return fmt.Errorf("making signal pads: %w", err)
		}
	}
	s, err := m.signalsOn(ctx, pad, 0, m.opts.Channels, nil)
	// Whoever fails tells the others, who would wait for its signals in vain.
	if vote := m.group.Vote(ctx, "signal pads", err); vote != nil {
		if _, agreed := errors.AsType[*group.VoteError](vote); agreed && pad != nil {
			pad.block.give(pad.span) // nothing has been written to it, on any rank
		}
		if err == nil {
			vote = m.giveUpSignals(s, vote)
		}
		return fmt.Errorf("making signal pads: %w", vote)
	}
	m.signals.Store(&s)
	return nil
}

// giveUpSignals closes signals after a vote that has failed, to which this rank brought no failure. It returns the vote's error. The caller holds m.collective.
func (m *Memory) giveUpSignals(s signals, vote error) error {
	if _, agreed := errors.AsType[*group.VoteError](vote); !agreed {
		m.untold = append(m.untold, s) // the others may have been told that all have theirs, and signal here
		return vote
	}
	return errors.Join(vote, s.close())
}

// padFailure says why this rank can have no signals; nil if it can.
func (m *Memory) padFailure() error {
	_, host := m.device.(device.HostMemory)
	if _, ok := m.device.(device.FaultReporter); !host && !ok {
		return fmt.Errorf("compiled kernels on %s: %w", m.device.Name(), errs.ErrUnsupported)
	}
	return nil
}

// flagger gives the backend's own words for signals. There are none where every peer's memory has an address: they lie in symmetric memory there.
// All ranks decide alike.
func (m *Memory) flagger() (backend.Flagger, bool) {
	f, ok := backend.FlaggerOf(m.backend)
	return f, ok && !m.backend.Capabilities().PeerPointers
}

// mixed reports whether the memory's own signals are words of the backend's only between ranks that have no addresses of each other's memory. All ranks
// decide alike.
func (m *Memory) mixed() bool {
	_, flags := m.flagger()
	_, some := m.backend.(backend.Mover)
	_, host := m.device.(device.HostMemory)
	return flags && some && !host
}

// padBytes is the size of a signal pad in symmetric memory; 0 where signals go another way.
func (m *Memory) padBytes(channels int) int64 {
	if _, ok := m.flagger(); ok {
		return 0
	}
	if _, ok := m.device.(device.HostMemory); ok {
		return hostPadBytes(m.group.Size(), channels)
	}
	return ptx.PadBytes(m.group.Size(), channels)
}

// signalsOn makes signals on the pad at offset of a workspace, for user or, if that is nil, for the memory itself. Collective; the
// caller holds m.collective and tells the others of a failure.
func (m *Memory) signalsOn(ctx context.Context, pad *Workspace, offset int64, channels int, user *signalUser) (signals, error) {
	if f, ok := m.flagger(); ok {
		if user == nil && m.mixed() {
			return newMixedSignals(ctx, m, f, pad, channels)
		}
		return newFlagSignals(ctx, m, f, channels, user)
	}
	if hm, ok := m.device.(device.HostMemory); ok {
		return newHostSignals(m, hm, pad, offset, channels, user)
	}
	return newDeviceSignals(m, pad, offset, channels, user)
}

// Signal enqueues a signal to peer on channel: it lets one Wait of peer for this rank on that channel pass, the next in the order of
// its waits. Everything that the stream wrote before, to peer's memory too, is visible after that Wait. Signals are counted, so several may
// be under way. It never blocks. ErrNoRendezvous before the first rendezvous of the memory; ErrInvalid for a channel or a peer that does not
// exist, or a stream of another device; ErrNotReachable for a peer on another host, over a backend that has signals on one host only ([Memory.CanSignal]).
func (m *Memory) Signal(s device.Stream, peer, channel int) error {
	if err := m.made("Signal"); err != nil {
		return err
	}
	sig, err := m.signalsFor("Signal", s, peer, channel)
	if err != nil {
		return err
	}
	defer m.enqueuing.unuse()
	return sig.signal(s, peer, channel)
}

// Wait enqueues waiting for one signal of peer on channel that was not waited for before. It holds the stream up, for at most the kernel
// timeout. After that, or when peer is lost, the next Synchronize of the stream returns a [*device.WaitError]. Its own errors are those of
// [Memory.Signal].
func (m *Memory) Wait(s device.Stream, peer, channel int) error {
	if err := m.made("Wait"); err != nil {
		return err
	}
	sig, err := m.signalsFor("Wait", s, peer, channel)
	if err != nil {
		return err
	}
	defer m.enqueuing.unuse()
	return sig.wait(s, peer, channel)
}

// Barrier enqueues a barrier of all ranks on channel: it holds the stream up until every rank's stream has come to its barrier of the same
// count on that channel. What any rank's stream wrote before it is visible to all after it. It is bounded as Wait is and has the same
// errors; if any peer is not reachable, it is. Its counters are not those of Signal. Streams that may come to barriers at the same time take a channel each: on a GPU
// two at once on one channel may count as one.
func (m *Memory) Barrier(s device.Stream, channel int) error {
	if err := m.made("Barrier"); err != nil {
		return err
	}
	sig, err := m.signalsFor("Barrier", s, m.group.Rank(), channel)
	if err != nil {
		return err
	}
	defer m.enqueuing.unuse()
	return sig.barrier(s, channel)
}

// CanSignal reports whether every rank can signal every other one. Where peers have no addresses and the backend no other way, which is so over nccl between
// hosts where NCCL cannot put, only those that reach each other can, and there are neither barriers nor programs with signals. All ranks have the same answer.
func (m *Memory) CanSignal() bool {
	if m.made("CanSignal") != nil {
		return false
	}
	if m.backend.Capabilities().PeerPointers || m.group.Size() == 1 {
		return true
	}
	_, ok := m.flagger()
	return ok
}

// signalsFor gives the memory's own signals to a call that enqueues them, which ends the use of m.enqueuing unless there is an error.
func (m *Memory) signalsFor(op string, s device.Stream, peer, channel int) (signals, error) {
	if err := m.checkStream(op, s); err != nil {
		return nil, err
	}
	if err := m.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	if err := m.checkRank(op, peer); err != nil {
		return nil, err
	}
	if channel < 0 || channel >= m.opts.Channels {
		return nil, errs.Advised(op, "channel", channel, fmt.Sprintf("0 to %d", m.opts.Channels-1), "the setting channels gives more")
	}
	sig := m.signals.Load()
	if sig == nil {
		return nil, fmt.Errorf("%s: signal pads are made by the first rendezvous of the group: %w", op, errs.ErrNoRendezvous)
	}
	if m.enqueuing.use() != nil {
		return nil, fmt.Errorf("%s: %w", op, m.Closed())
	}
	return *sig, nil
}
