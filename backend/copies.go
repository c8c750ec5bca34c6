package backend

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/symmem/symmem/device"
)

// idleCopies is how many prepared copies are kept for the next one like them. Preparing takes some microseconds, and a program
// copies the same few pieces again and again.
const idleCopies = 256

// copies are the transfers that Copy has prepared over a backend that moves blocks in its own way. One is used by one run at a
// time; one that was recorded in a graph is used by that graph alone, for as long as its memory lives.
type copies struct {
	mu       sync.Mutex
	idle     []*preparedCopy // the longest unused first
	recorded []*preparedCopy
}

// copyKey is what a copy moves.
type copyKey struct {
	op     TransferOp
	peer   int
	window *Window
	offset int64
	local  device.Ptr
	bytes  int64
}

// preparedCopy is a transfer that is prepared for a copy.
type preparedCopy struct {
	owner    *copies
	key      copyKey
	work     PreparedTransfer
	run      device.HostProgress
	recorded bool
}

// enqueue enqueues the copy that the key says, whose arguments were checked.
func (c *copies) enqueue(s device.Stream, b Transferrer, key copyKey) error {
	p := c.take(key)
	if p == nil {
		block := TransferBlock{Local: key.local, Window: key.window, Offset: key.offset, Bytes: key.bytes}
		work, err := b.PrepareTransfer(key.op, key.peer, []TransferBlock{block})
		if err != nil {
			return fmt.Errorf("%s of rank %d: %w", key.op, key.peer, err)
		}
		p = &preparedCopy{owner: c, key: key, work: work}
	}
	if p.recorded = s.Capturing(); p.recorded {
		c.mu.Lock()
		c.recorded = append(c.recorded, p)
		c.mu.Unlock()
	}
	if err := hostWork(s, p); err != nil {
		return errors.Join(err, c.give(p))
	}
	return nil
}

// take gives an idle copy, or nil.
func (c *copies) take(key copyKey) *preparedCopy {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, p := range slices.Backward(c.idle) {
		if p.key == key {
			c.idle = slices.Delete(c.idle, i, i+1)
			return p
		}
	}
	return nil
}

// give takes a copy back whose run has ended. The one that was unused for longest gives way.
func (c *copies) give(p *preparedCopy) error {
	if p.recorded {
		return nil
	}
	c.mu.Lock()
	c.idle = append(c.idle, p)
	var last *preparedCopy
	if len(c.idle) > idleCopies {
		last = c.idle[0]
		c.idle = slices.Delete(c.idle, 0, 1)
	}
	c.mu.Unlock()
	if last == nil {
		return nil
	}
	return last.work.Close()
}

// forget closes the copies that have to do with a piece of memory, or with any if all. The device does not work on it any more.
func (c *copies) forget(w *Window, from, to device.Ptr, all bool) error {
	var gone []*preparedCopy
	concerned := func(p *preparedCopy) bool {
		if !all && p.key.window != w && (p.key.local < from || p.key.local >= to) {
			return false
		}
		gone = append(gone, p)
		return true
	}
	c.mu.Lock()
	c.idle = slices.DeleteFunc(c.idle, concerned)
	c.recorded = slices.DeleteFunc(c.recorded, concerned)
	c.mu.Unlock()
	var err error
	for _, p := range gone {
		err = errors.Join(err, p.work.Close())
	}
	return err
}

// Start begins the run of the copy.
func (p *preparedCopy) Start() (device.HostProgress, error) {
	run, err := p.work.Start()
	if err != nil {
		return nil, errors.Join(err, p.owner.give(p))
	}
	p.run = run
	return p, nil
}

// Poll drives the run on; when it has ended, the copy is there for the next.
func (p *preparedCopy) Poll() (bool, error) {
	ended, err := p.run.Poll()
	if ended || err != nil {
		err = errors.Join(err, p.owner.give(p))
	}
	return ended, err
}

func (p *preparedCopy) String() string {
	return fmt.Sprintf("%s of %d bytes, rank %d", p.key.op, p.key.bytes, p.key.peer)
}
