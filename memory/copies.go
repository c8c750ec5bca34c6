package memory

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
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
	op     backend.TransferOp
	peer   int
	window *Window
	offset int64
	local  device.Ptr
	bytes  int64
}

// String is what errors call the copy.
func (k copyKey) String() string {
	return fmt.Sprintf("%s of %d bytes, rank %d", k.op, k.bytes, k.peer)
}

// preparedCopy is a transfer that is prepared for a copy.
type preparedCopy struct {
	owner    *copies
	key      copyKey
	local    *entry // of the local side
	recorded bool
	behind   device.HostWork // what follows when the data is there, such as a signal; nil for nothing

	mu        sync.Mutex
	closed    bool // a graph may start it all the same
	work      backend.PreparedTransfer
	run       device.HostProgress // of the copy, or of what follows
	following bool                // what follows is under way
}

// enqueue enqueues the copy that the key says, whose arguments were checked, and what follows unless the copy fails.
func (c *copies) enqueue(s device.Stream, b backend.Transferrer, local *entry, key copyKey, behind device.HostWork) error {
	p := c.take(local, key)
	if p == nil {
		block := backend.Block{Alloc: local.alloc, Local: key.local, Remote: key.window.mapping, Offset: key.offset, Bytes: key.bytes}
		work, err := b.PrepareTransfer(key.op, key.peer, []backend.Block{block})
		if err != nil {
			return fmt.Errorf("%s of rank %d: %w", key.op, key.peer, err)
		}
		p = &preparedCopy{owner: c, key: key, local: local, work: work}
	}
	p.behind = behind
	if p.recorded = s.Capturing(); p.recorded {
		c.mu.Lock()
		c.recorded = append(c.recorded, p)
		c.mu.Unlock()
	}
	if err := device.EnqueueHostWork(s, p); err != nil {
		return errors.Join(err, c.give(p))
	}
	return nil
}

// take gives an idle copy, or nil.
func (c *copies) take(local *entry, key copyKey) *preparedCopy {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i, p := range slices.Backward(c.idle) {
		if p.key == key && p.local == local {
			c.idle = slices.Delete(c.idle, i, i+1)
			return p
		}
	}
	return nil
}

// keptCopy is a copy between addresses that a graph of the host device keeps: other memory may lie there when it is launched.
type keptCopy struct {
	nearMove
	behind device.HostWork // what follows when the data is there, such as a signal; nil for nothing
	name   string
}

// Start copies, and begins what follows.
func (k *keptCopy) Start() (device.HostProgress, error) {
	run, err := k.nearMove.Start()
	if err != nil || k.behind == nil {
		return run, err
	}
	return k.behind.Start()
}

func (k *keptCopy) String() string { return k.name }

// keeps reports whether what is enqueued on s is kept by a graph whose copies the CPU makes.
func (m *Memory) keeps(s device.Stream) bool {
	_, host := m.device.(device.HostMemory)
	return host && s.Capturing()
}

// give takes a copy back whose run has ended. The one that was unused for longest gives way, and one whose memory was freed meanwhile,
// since its run was cut off.
func (c *copies) give(p *preparedCopy) error {
	if p.recorded {
		return nil
	}
	c.mu.Lock()
	last := p
	if !p.freed() {
		last = nil
		c.idle = append(c.idle, p)
		if len(c.idle) > idleCopies {
			last = c.idle[0]
			c.idle = slices.Delete(c.idle, 0, 1)
		}
	}
	c.mu.Unlock()
	if last == nil {
		return nil
	}
	return last.close()
}

// freed reports whether memory of the copy was freed.
func (p *preparedCopy) freed() bool { return p.local.released() || p.key.window.entry.released() }

// forget closes the copies that have to do with memory that was freed. The device does not work on it any more.
func (c *copies) forget(e *entry) error {
	var gone []*preparedCopy
	concerned := func(p *preparedCopy) bool {
		if p.local != e && p.key.window.entry != e {
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
		err = errors.Join(err, p.close())
	}
	return err
}

// close gives what was prepared back. A graph that holds the copy has nothing to run any more.
func (p *preparedCopy) close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.closed = true
	return p.work.Close()
}

// Start begins the run of the copy.
func (p *preparedCopy) Start() (device.HostProgress, error) {
	if err := p.start(); err != nil {
		return nil, errors.Join(err, p.owner.give(p))
	}
	return p, nil
}

func (p *preparedCopy) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.freed() {
		return fmt.Errorf("memory of a copy that was recorded was freed: %w", errs.ErrClosed)
	}
	if p.following {
		return fmt.Errorf("starting a copy: %w", errs.ErrInProgress)
	}
	run, err := p.work.Start()
	if err != nil {
		return err // one that was cut off may still be asked for
	}
	p.run = run
	return nil
}

// follow begins what follows the copy, which has ended, and reports whether there is something.
func (p *preparedCopy) follow() (follows bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.behind == nil || p.following {
		return false, nil
	}
	run, err := p.behind.Start()
	if err != nil {
		return false, err
	}
	p.run, p.following = run, true
	return true, nil
}

// Poll drives the run on; when it has ended, the copy is there for the next.
func (p *preparedCopy) Poll() (bool, error) {
	ended, follows := false, true
	var err error
	for follows {
		p.mu.Lock()
		run := p.run
		p.mu.Unlock()
		ended, err = run.Poll()
		if follows = ended && err == nil; follows {
			follows, err = p.follow()
		}
	}
	if ended || err != nil {
		p.mu.Lock()
		p.following = false
		p.mu.Unlock()
		err = errors.Join(err, p.owner.give(p))
	}
	return ended, err
}

func (p *preparedCopy) String() string { return p.key.String() }
