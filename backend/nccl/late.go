package nccl

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/nccl"
)

// A call of NCCL's that a rank has given up goes on inside NCCL, until it ends or its communicator was aborted. A window that could not be removed stays
// until its communicator ends. What they were given stays meanwhile:
// memory that is released is kept, and freed by whoever finds that the call has ended, at the latest when the backend is closed. What the call makes
// goes with its communicator, or is ended by package internal/nccl.

// lateTime is how long a rank that closes waits for such calls.
const lateTime = 5 * time.Second

// lateCall is a call of NCCL's that this rank has given up.
type lateCall struct {
	ended <-chan struct{} // closed when NCCL has done with what it was given, for a window that could not be removed with its communicator; nil if nobody will know
	base  device.Ptr      // of the allocation that it was given; 0 if it was given none
	bytes int64           // that free gives back
	free  func() error    // frees memory that was released meanwhile; nil if there is none
}

// over reports whether NCCL has done with what the call was given.
func (l *lateCall) over() bool {
	select {
	case <-l.ended:
		return true
	default:
		return false
	}
}

// givenUp notes a call that err says was given up, with the allocation that it was given, unless it has ended already.
func (b *Backend) givenUp(err error, base device.Ptr) *lateCall {
	stuck, ok := errors.AsType[*nccl.StuckError](err)
	if !ok {
		return nil
	}
	l := &lateCall{ended: stuck.Ended, base: base}
	if l.over() {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.late = append(b.late, l)
	return l
}

// remove removes a window of the allocation at base from a communicator. Where that fails, NCCL has the window until the communicator is no more, and
// the memory stays until then.
func (b *Backend) remove(ctx context.Context, comm *nccl.Comm, w *nccl.Window, base device.Ptr) error {
	err := w.Deregister(ctx)
	if err == nil {
		return nil
	}
	b.staysWith(comm, base)
	return fmt.Errorf("deregistering a window: %w", err)
}

// staysWith notes that a communicator has a window of the allocation at base until its end.
func (b *Backend) staysWith(comm *nccl.Comm, base device.Ptr) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.late = append(b.late, &lateCall{ended: comm.Ended(), base: base})
}

// windowsInUse reports whether somebody may use a window.
func (b *Backend) windowsInUse() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.windows) > 0 || len(b.devComms) > 0
}

// usedBy returns the call that was given up, or has failed, and may still use the allocation, or nil.
func (b *Backend) usedBy(base device.Ptr) *lateCall {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, l := range b.late {
		if l.base == base && !l.over() {
			return l
		}
	}
	return nil
}

// settle returns nil if NCCL has done with the allocation. Otherwise it gives up the communicator, if that has no window that somebody may use, and
// returns the call that may use the allocation all the same.
func (b *Backend) settle(ctx context.Context, base device.Ptr) *lateCall {
	l := b.usedBy(base)
	if l == nil {
		return nil
	}
	if b.near != nil && b.near.Stuck() && !b.windowsInUse() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.timeout)
		defer cancel()
		if err := b.abandon(ctx); err != nil {
			b.log.Warn("aborting an NCCL communicator failed", "error", err)
		}
	}
	return b.usedBy(base)
}

// keepFor keeps memory until the call has ended, and then frees it.
func (b *Backend) keepFor(l *lateCall, bytes int64, free func() error) {
	b.mu.Lock()
	l.bytes, l.free = bytes, free
	if !slices.Contains(b.late, l) { // somebody has just found that it has ended
		b.late = append(b.late, l)
	}
	b.mu.Unlock()
	b.log.Warn("memory is kept, because a call of NCCL's that was given up, or a window that could not be removed, may still use it", "bytes", bytes)
}

// freeLate frees what was kept for calls that have ended.
func (b *Backend) freeLate() error {
	b.mu.Lock()
	var over, rest []*lateCall
	for _, l := range b.late {
		if l.over() {
			over = append(over, l)
		} else {
			rest = append(rest, l)
		}
	}
	b.late = rest
	b.mu.Unlock()
	var err error
	for _, l := range over {
		if l.free == nil {
			continue
		}
		if other := b.usedBy(l.base); other != nil && !l.base.IsNil() { // a window of it on another communicator
			b.keepFor(other, l.bytes, l.free)
			continue
		}
		err = errors.Join(err, l.free())
	}
	return err
}

// closeLate waits until the calls that were given up have ended, but not for ever, and frees what was kept for them. The communicators are no more.
func (b *Backend) closeLate(ctx context.Context) error {
	b.mu.Lock()
	late := b.late
	b.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(b.timeout, lateTime))
	defer cancel()
	for _, l := range late {
		select {
		case <-l.ended:
		case <-ctx.Done():
		}
	}
	err := b.freeLate()
	b.mu.Lock()
	late = b.late
	b.mu.Unlock()
	var bytes int64
	for _, l := range late {
		bytes += l.bytes
	}
	if len(late) > 0 {
		err = errors.Join(err, fmt.Errorf("%d calls of NCCL's that were given up, or windows that it has not removed, are still there, and %d bytes of memory stay, which "+
			"they may use; end the process", len(late), bytes))
	}
	return err
}
