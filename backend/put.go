package backend

import (
	"fmt"

	"github.com/symmem/symmem/device"
)

// PreparedPut is a write into a peer's memory that was prepared once for a plan. Unlike a [Transfer] it keeps no state that the
// host asks for: it may be enqueued again while earlier runs of it are still queued, as long as streams and events order them.
type PreparedPut struct {
	transfer *Transfer
	copies   []copyBlock // where the backend has peer pointers
	work     *putWork    // where it has not; nil for an empty put
}

// PreparePut prepares writing bytes at local, inside symmetric memory of this rank, to the place at offset of peer's copy of w.
// Local. What is refused is what [Memory.PrepareTransfer] refuses. A put that fails when it runs makes the plan fail: the next
// wait of these signals tells, and the peers are told of nothing any more.
func (p *Signals) PreparePut(peer int, w *Window, offset int64, local device.Ptr, bytes int64) (*PreparedPut, error) {
	t, err := p.memory.PrepareTransfer(Write, peer, []TransferBlock{{Local: local, Window: w, Offset: offset, Bytes: bytes}})
	if err != nil {
		return nil, err
	}
	put := &PreparedPut{transfer: t}
	switch moves := t.prepared.(type) {
	case *copyTransfer:
		put.copies = moves.copies
	case *workTransfer:
		put.work = &putWork{work: moves.work, user: p.user}
	}
	return put, nil
}

// PrepareChannelPut is PreparePut to the place at offset of peer's part of the channel that the signals are in.
func (p *Signals) PrepareChannelPut(peer int, offset int64, local device.Ptr, bytes int64) (*PreparedPut, error) {
	c := p.channel
	if c.closed.Load() {
		return nil, fmt.Errorf("channel: %w", ErrClosed)
	}
	return p.PreparePut(peer, c.block.window, c.span.start+offset, local, bytes)
}

// Enqueue enqueues the write on s, or records it: it begins when all earlier work of s has ended, and later work of s runs when
// it has ended. It returns at once and allocates nothing.
func (p *PreparedPut) Enqueue(s device.Stream) error {
	if p.work != nil {
		return hostWork(s, p.work)
	}
	for _, c := range p.copies {
		if err := s.Copy(c.dst, c.src, c.bytes); err != nil {
			return err
		}
	}
	return nil
}

// Close gives it back; nothing of it is queued any more.
func (p *PreparedPut) Close() error { return p.transfer.Close() }

// putWork is a put that the backend carries out. Its failure is the plan's, not that of the stream that it happens to be on.
type putWork struct {
	work PreparedTransfer
	user *signalUser
	run  device.HostProgress // the one under way
}

// Start begins a run. Runs of a plan never overlap.
func (w *putWork) Start() (device.HostProgress, error) {
	if w.user.dead.Load() {
		return nothing{}, nil
	}
	run, err := w.work.Start()
	if err != nil {
		w.user.failLater(err)
		return nothing{}, nil
	}
	w.run = run
	return w, nil
}

// Poll drives the run on.
func (w *putWork) Poll() (bool, error) {
	ended, err := w.run.Poll()
	if err != nil {
		w.user.failLater(err)
		return true, nil
	}
	return ended, nil
}

func (w *putWork) String() string { return "put" }
