package nixl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
)

// lossTimeout is how long the error of a request waits for the group to say that the peer is lost, which is the better error.
// The library often notices first, and cannot tell a dead peer from another failure.
const lossTimeout = 1500 * time.Millisecond

// transfer is one request, which is made again after a failure.
type transfer struct {
	backend       *Backend
	op            nixl.Op
	memory        nixl.Memory
	peer          int
	local, remote []nixl.Block

	mu       sync.Mutex
	request  request // nil after a failure
	running  bool
	closed   bool
	ended    bool // the post has ended at once
	began    time.Time
	failure  error // the library's, which waits for a better one
	failedAt time.Time
}

// PrepareTransfer makes the request.
func (b *Backend) PrepareTransfer(op backend.TransferOp, peer int,
	blocks []backend.Block) (backend.PreparedTransfer, error) {
	t := &transfer{backend: b, op: nixl.Write, memory: b.node.memory, peer: peer}
	if op == backend.Read {
		t.op = nixl.Read
	}
	for _, blk := range blocks {
		m := mappingOf(blk.Remote)
		if m == nil {
			return nil, errs.Invalid("transfer", "window", "of another backend", "a window of backend "+Name)
		}
		a, ok := blk.Alloc.(*allocation)
		if !ok || a.backend != b {
			return nil, errs.Invalid("transfer", "local", fmt.Sprintf("%d bytes at %s", blk.Bytes, blk.Local), "memory that was allocated or registered here")
		}
		there := m.peers[peer]
		// By this registration and no other one of the same memory: a request keeps what the library has allocated for it.
		t.local = append(t.local, nixl.Block{Addr: uint64(blk.Local), Bytes: uint64(blk.Bytes), Device: a.region.Device})
		t.remote = append(t.remote, nixl.Block{Addr: there.Addr + uint64(blk.Offset), Bytes: uint64(blk.Bytes), Device: there.Device})
	}
	if err := t.prepare(); err != nil {
		return nil, err
	}
	return t, nil
}

// prepare makes the request if there is none.
func (t *transfer) prepare() error {
	if t.request != nil {
		return nil
	}
	b := t.backend
	err := within(b.device, func() (err error) {
		t.request, err = b.node.engine.NewRequest(t.op, t.memory, t.local, t.remote, b.peers[t.peer].Agent)
		return err
	})
	if t.request != nil {
		b.node.opened(t)
	}
	return err
}

// Start posts the request.
func (t *transfer) Start() (device.HostProgress, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.ready(); err != nil {
		return nil, err
	}
	t.start()
	return t, nil
}

// ready is the error of a start now; t.mu is held.
func (t *transfer) ready() error {
	if t.closed {
		return fmt.Errorf("starting a transfer: %w", errs.ErrClosed)
	}
	if t.running {
		return fmt.Errorf("starting a transfer: %w", errs.ErrInProgress)
	}
	if lost := t.backend.group.Err(); lost != nil {
		return lost // the library may find that it ends well all the same, if the peer's memory is still there
	}
	return nil
}

// start posts the request of what is ready; t.mu is held.
func (t *transfer) start() {
	t.running, t.ended, t.began, t.failure = true, false, time.Now(), nil
	if err := t.prepare(); err != nil {
		t.fail(err)
		return
	}
	ended, err := t.request.Post()
	if t.ended = ended; err != nil {
		t.fail(err)
	}
}

// fail notes the library's error, and drops the request.
func (t *transfer) fail(err error) {
	t.failure, t.failedAt = err, time.Now()
	if t.request != nil {
		t.failure = errors.Join(err, t.request.Release())
		t.request = nil
	}
}

// Poll makes progress with the request.
func (t *transfer) Poll() (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	ended, err := t.poll()
	if ended || err != nil {
		t.running = false
	}
	return ended, err
}

// poll makes progress with the request; t.mu is held.
func (t *transfer) poll() (bool, error) {
	if t.closed { // while a stream that has cut the run off still asks for it
		return false, fmt.Errorf("moving memory to or from rank %d: %w", t.peer, errs.ErrClosed)
	}
	if t.ended {
		return true, nil
	}
	if t.failure == nil {
		ended, err := t.request.Status()
		switch {
		case err != nil:
			t.fail(err)
		case ended:
			return true, nil
		}
	}
	if lost := t.backend.group.Err(); lost != nil {
		t.giveUp()
		return false, lost
	}
	switch {
	case t.failure != nil && time.Since(t.failedAt) >= lossTimeout:
		return false, fmt.Errorf("moving memory to or from rank %d: %w", t.peer, t.failure)
	case t.failure == nil && time.Since(t.began) >= t.backend.timeout:
		t.giveUp()
		return false, fmt.Errorf("moving memory to or from rank %d has not ended in %v: %w", t.peer, t.backend.timeout,
			os.ErrDeadlineExceeded)
	}
	return false, nil
}

// giveUp leaves a request that is under way to the node.
func (t *transfer) giveUp() {
	if t.request != nil {
		t.backend.node.stray(t.request)
		t.request = nil
	}
}

// endRuns waits until the runs that are under way have ended. Perhaps nobody asks for one: a signal that came too late has given up its wait, and not the write
// of its word.
func (b *Backend) endRuns(ctx context.Context) error {
	for _, t := range b.node.transfersOf(b) {
		for began, under := t.under(); under && !t.over(began); {
			select {
			case <-ctx.Done():
				return fmt.Errorf("a transfer to or from rank %d is still under way: %w", t.peer, ctx.Err())
			case <-time.After(time.Millisecond):
			}
		}
	}
	return nil
}

// under reports whether the library works on a run, and which began when.
func (t *transfer) under() (began time.Time, under bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.began, t.working()
}

// working reports whether the library works on a run; t.mu is held.
func (t *transfer) working() bool { return t.running && !t.ended && t.request != nil }

// over reports whether the library has done with the run that began then, and drives it on if not.
func (t *transfer) over(began time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.working() || t.began != began {
		return true
	}
	ended, err := t.request.Status()
	if t.ended = ended; err != nil {
		t.fail(err)
	}
	return ended || err != nil
}

// Close releases the request. After the first, it does nothing.
func (t *transfer) Close() error {
	t.backend.node.forget(t)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.closed = true
	if t.running {
		t.giveUp()
	}
	if t.request == nil {
		return nil
	}
	r := t.request
	t.request = nil
	return r.Release()
}
