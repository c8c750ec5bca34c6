package memory

import (
	"errors"
	"fmt"
	"sync"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
)

// WorkCopy is a copy of Bytes from Src to Dst, which do not overlap.
type WorkCopy struct {
	Dst, Src device.Ptr
	Bytes    int64 // 0 copies nothing
}

// WorkCopies makes copies that work of the CPU finds out while a stream waits for it, on a stream of its own. On the host device the CPU copies.
// Start is for one goroutine at a time; what it returns may be polled by others.
type WorkCopies struct {
	memory *Memory
	host   device.HostMemory // nil on other devices
	stream device.Stream     // nil on the host device

	mu   sync.Mutex
	free []*copying // not in use; there are enough for a batch to each peer, so that a run makes none
}

// NewWorkCopies prepares copies. Local. ErrUnsupported on a device whose work of the CPU cannot copy. Close it.
func (m *Memory) NewWorkCopies() (_ *WorkCopies, err error) {
	if err := m.made("NewWorkCopies"); err != nil {
		return nil, err
	}
	c := &WorkCopies{memory: m}
	if hm, ok := m.device.(device.HostMemory); ok {
		c.host = hm
		return c, nil
	}
	streams, ok := m.device.(device.WorkStreamer)
	if !ok {
		return nil, fmt.Errorf("copies by the CPU on %s: %w", m.device.Name(), errs.ErrUnsupported)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if c.stream, err = streams.NewWorkStream(); err != nil {
		return nil, err
	}
	for range m.group.Size() + 1 {
		e, err := m.device.NewEvent()
		if err != nil {
			return nil, err
		}
		c.free = append(c.free, &copying{copies: c, ended: e})
	}
	return c, nil
}

// made refuses copies that NewWorkCopies did not prepare.
func (c *WorkCopies) made(call string) error {
	if c == nil || c.memory == nil {
		return errs.Invalid(call, "copies", "the zero WorkCopies", "those that NewWorkCopies gave")
	}
	return nil
}

// Start begins copies, one after the other. They have ended when what it returns has. After an error some of them may have been made.
func (c *WorkCopies) Start(copies ...WorkCopy) (device.HostProgress, error) {
	if err := c.made("Start"); err != nil {
		return nil, err
	}
	if c.host != nil {
		if err := copyOnHost(c.host, copies); err != nil {
			return nil, err
		}
		return nothing{}, nil
	}
	for _, x := range copies {
		if err := c.stream.Copy(x.Dst, x.Src, x.Bytes); err != nil {
			return nil, err
		}
	}
	return c.mark()
}

// mark gives a progress that has ended when all that was enqueued has.
func (c *WorkCopies) mark() (device.HostProgress, error) {
	run, err := c.take()
	if err != nil {
		return nil, err
	}
	if err := c.stream.Record(run.ended); err != nil {
		c.give(run)
		return nil, err
	}
	return run, nil
}

func (c *WorkCopies) take() (*copying, error) {
	c.mu.Lock()
	if n := len(c.free); n > 0 {
		run := c.free[n-1]
		c.free = c.free[:n-1]
		c.mu.Unlock()
		return run, nil
	}
	c.mu.Unlock()
	e, err := c.memory.device.NewEvent() // runs that were cut off have the others
	if err != nil {
		return nil, err
	}
	return &copying{copies: c, ended: e}, nil
}

func (c *WorkCopies) give(run *copying) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.free = append(c.free, run)
}

// Close releases the stream. The device has nothing left to do for it.
func (c *WorkCopies) Close() error {
	if err := c.made("Close"); err != nil {
		return err
	}
	var err error
	if c.stream != nil {
		err = c.stream.Close()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, run := range c.free {
		err = errors.Join(err, run.ended.Close())
	}
	c.free = nil
	return err
}

// copying is copies under way.
type copying struct {
	copies *WorkCopies
	ended  device.Event
}

// Poll reports whether the copies have ended. They wait for nothing, so that they need no bound. Nobody polls them afterwards.
func (c *copying) Poll() (bool, error) {
	ended, err := c.ended.Query()
	if ended || err != nil {
		c.copies.give(c)
	}
	return ended, err
}

// besideMove is a put to a peer whose memory has an address, as a part of a send by work, on a device that the CPU does not copy for.
type besideMove struct {
	by     *WorkCopies
	sides  []side
	copies []WorkCopy
}

// Start begins the copies.
func (b *besideMove) Start() (device.HostProgress, error) {
	if err := freedSides(b.sides); err != nil {
		return nil, err
	}
	return b.by.Start(b.copies...)
}

// Close does nothing: the send closes its transfers.
func (b *besideMove) Close() error { return nil }

// FailByWork is Fail for work of the CPU: when what it returns has ended, what is enqueued behind the work does not signal either. By is copies of the
// same memory.
func (p *Signals) FailByWork(by *WorkCopies, err error) device.HostProgress {
	p.Fail(err)
	return p.killBy(by)
}

// killedByHost is what a plan's dead word says when the host wrote it: it gives no reason.
const killedByHost = ptx.FaultWait << 16

// killBy makes signals and waits that kernels carry out give up, as the first that fails does.
func (p *Signals) killBy(by *WorkCopies) device.HostProgress {
	if p.made("FailByWork") != nil {
		return nothing{}
	}
	d, ok := p.signals.(*deviceSignals)
	if !ok || by == nil || by.stream == nil {
		return nothing{}
	}
	if by.stream.WriteValue32(d.dead, killedByHost) != nil {
		return nothing{} // the device takes nothing any more
	}
	run, err := by.mark()
	if err != nil {
		return nothing{}
	}
	return run
}
