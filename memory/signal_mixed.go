package memory

import (
	"context"
	"errors"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
)

// mixedSignals are the memory's own signals where ranks that have addresses of each other's memory signal there, and others by words of the backend's. A
// barrier takes all ranks, and so the words.
type mixedSignals struct {
	near *deviceSignals
	far  *flagSignals
}

// newMixedSignals makes both. Collective; the caller holds m.collective and tells the others of a failure.
func newMixedSignals(ctx context.Context, m *Memory, f backend.Flagger, pad *Workspace, channels int) (*mixedSignals, error) {
	far, err := newFlagSignals(ctx, m, f, channels, nil) // first, because all ranks come to it
	if err != nil {
		return nil, err
	}
	near, err := newDeviceSignals(m, pad, 0, channels, nil)
	if err != nil {
		return nil, errors.Join(err, far.close())
	}
	return &mixedSignals{near, far}, nil
}

// of gives the signals that are exchanged with a peer.
func (x *mixedSignals) of(peer int) signals {
	if x.near.reaches(peer) == nil {
		return x.near
	}
	return x.far
}

func (x *mixedSignals) signal(s device.Stream, peer, channel int) error {
	return x.of(peer).signal(s, peer, channel)
}
func (x *mixedSignals) wait(s device.Stream, peer, channel int) error {
	return x.of(peer).wait(s, peer, channel)
}
func (x *mixedSignals) barrier(s device.Stream, channel int) error { return x.far.barrier(s, channel) }

// signalAll and waitAll are for plans, which have signals of one kind.
func (x *mixedSignals) signalAll(s device.Stream, channel int) error {
	return x.far.signalAll(s, channel)
}

func (x *mixedSignals) waitAll(s device.Stream, channel int, beside bool) error {
	return x.far.waitAll(s, channel, beside)
}

func (x *mixedSignals) close() error { return errors.Join(x.near.close(), x.far.close()) }
