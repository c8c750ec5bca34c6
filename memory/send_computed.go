package memory

import (
	"errors"
	"fmt"
	"runtime/debug"
	"sync"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// PrepareComputedSend is PrepareSend for puts that are known only when the send runs: puts gives them at each run, after all earlier work of
// the stream has ended. It is called by one goroutine at a time, must be quick, and must not block. Its error, and puts that PrepareSend would
// refuse, make the plan fail as a put that fails does. By makes the copies to peers that have addresses, and outlives the send; on the host device it
// may be nil. ErrUnsupported on a device whose work of the CPU cannot copy.
func (p *Signals) PrepareComputedSend(channel int, by *WorkCopies, puts func() ([]SendPut, error)) (*PreparedSend, error) {
	const call = "PrepareComputedSend"
	if err := p.usable(call, channel); err != nil {
		return nil, err
	}
	if puts == nil {
		return nil, errs.Invalid(call, "puts", nil, "a function")
	}
	_, onHost := p.memory.device.(device.HostMemory)
	if !onHost && (by == nil || by.stream == nil) {
		return nil, fmt.Errorf("a send on %s whose puts are known only when it runs: %w", p.memory.device.Name(), errs.ErrUnsupported)
	}
	if onHost {
		by = nil // the CPU copies
	}
	c := newComputed(p, channel, by, puts)
	send := &PreparedSend{signals: p, channel: channel, computed: c}
	flags, byFlags := p.signals.(*flagSignals)
	if _, own := p.memory.backend.(backend.Transferrer); own || byFlags || !onHost { // some memory may have no addresses
		work, err := newSendWork(p, flags, channel, make([]backend.PreparedTransfer, p.memory.group.Size()))
		if err != nil {
			return nil, err
		}
		work.computed, send.work = c, work
		if !onHost {
			work.kill = func() device.HostProgress { return p.killBy(by) }
		}
	}
	return send, nil
}

// computed is the puts of a send that are known only when it runs.
type computed struct {
	signals *Signals
	channel int
	puts    func() ([]SendPut, error)
	by      *WorkCopies // nil on the host device

	mu     sync.Mutex
	closed bool
	taken  []bool        // by peer: the run has a put to it
	peers  []computedPut // by peer
}

// computedPut is what a run puts to one peer, made in the same place in each run. A peer's memory that has an address takes a copy, and any other a
// transfer of the backend, which is kept for the next run: what is put again need not be prepared again.
type computedPut struct {
	sides  [2]side
	copies [1]WorkCopy
	near   backend.PreparedTransfer // makes the copy: a nearMove or a besideMove over sides and copies

	put SendPut   // that far was prepared for
	far *Transfer // or nil
}

// newComputed makes the places for puts to each peer.
func newComputed(p *Signals, channel int, by *WorkCopies, puts func() ([]SendPut, error)) *computed {
	size := p.memory.group.Size()
	c := &computed{signals: p, channel: channel, by: by, puts: puts, taken: make([]bool, size), peers: make([]computedPut, size)}
	for i := range c.peers {
		x := &c.peers[i]
		if by != nil {
			x.near = &besideMove{by: by, sides: x.sides[:], copies: x.copies[:]}
		} else {
			x.near = &nearMove{memory: p.memory, sides: x.sides[:], copies: x.copies[:]}
		}
	}
	return c
}

// now finds out the puts of a run that begins, and prepares them. The run before has ended; c.mu is held. Where peers have addresses it allocates nothing.
func (c *computed) now() error {
	if c.closed {
		return fmt.Errorf("send: %w", errs.ErrClosed)
	}
	returned := false
	defer func() {
		if !returned { // the stream has the panic; nobody may get a signal
			c.signals.user.failLater(errors.New("what computes its puts has panicked"))
		}
	}()
	puts, err := c.puts()
	returned = true
	if err != nil {
		return err
	}
	clear(c.taken)
	for _, put := range puts {
		if put.Bytes == 0 {
			continue
		}
		if err := c.take(put); err != nil {
			return err
		}
	}
	for peer := range c.peers {
		if !c.taken[peer] {
			err = errors.Join(err, c.peers[peer].drop())
		}
	}
	return err
}

// take prepares a put of the run.
func (c *computed) take(put SendPut) error {
	b, err := c.signals.place(c.channel, put)
	if err != nil {
		return err
	}
	m := c.signals.memory
	if err := m.Err(); err != nil {
		return fmt.Errorf("preparing a send: %w", err)
	}
	if err := m.checkRank("PrepareSend", put.Peer); err != nil {
		return err
	}
	if c.taken[put.Peer] {
		return twoPuts(put.Peer)
	}
	c.taken[put.Peer] = true
	x := &c.peers[put.Peer]
	if x.far != nil && x.put == put && freedSides(x.far.sides) == nil { // else other memory lies there now
		return nil
	}
	if err := x.drop(); err != nil {
		return err
	}
	e, err := m.block(0, b)
	if err != nil {
		return err
	}
	if _, ok := m.transferrer(b.Window.near[put.Peer]); ok {
		x.far, err = m.prepareTransfer(backend.Write, put.Peer, false, []TransferBlock{b})
		x.put = put
		return err
	}
	to, err := b.Window.Peer(put.Peer, b.Offset)
	if err != nil {
		return err
	}
	x.sides = [2]side{{e, blockName(0), "local"}, {b.Window.entry, blockName(0), "remote"}}
	if x.copies[0] = (WorkCopy{Dst: to, Src: b.Local, Bytes: b.Bytes}); to == b.Local {
		x.copies[0] = WorkCopy{} // already there
	}
	return nil
}

// drop closes what is kept.
func (x *computedPut) drop() error {
	if x.far == nil {
		return nil
	}
	err := x.far.Close()
	x.far = nil
	return err
}

// move is the put of the run to a peer, or nil.
func (c *computed) move(peer int) backend.PreparedTransfer {
	x := &c.peers[peer]
	switch {
	case !c.taken[peer]:
		return nil
	case x.far == nil:
		return x.near
	}
	return x.far.prepared.(*workTransfer) // as a put that is not empty is to memory without an address
}

// copy makes the puts of a run on the host device, where all memory has addresses.
func (c *computed) copy(hm device.HostMemory) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.now()
	for peer := range c.peers {
		if err == nil && c.taken[peer] {
			err = freedSides(c.peers[peer].sides[:])
		}
	}
	if err != nil {
		return err
	}
	for peer := range c.peers {
		if c.taken[peer] {
			if err := copyOnHost(hm, c.peers[peer].copies[:]); err != nil {
				return err
			}
		}
	}
	return nil
}

// close closes what is prepared. A graph that still has the send puts nothing any more.
func (c *computed) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	var err error
	for peer := range c.peers {
		err = errors.Join(err, c.peers[peer].drop())
	}
	return err
}

// compute gives the parts the puts of the run that begins; w.mu is held. Where kernels signal, a panic is an error, as they have to be told before the
// stream goes on.
func (w *sendWork) compute() (err error) {
	if w.kill != nil {
		defer func() {
			if v := recover(); v != nil {
				err = &device.PanicError{Value: v, Stack: string(debug.Stack())}
			}
		}()
	}
	c := w.computed
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.now(); err != nil {
		return err
	}
	for i := range w.parts {
		w.parts[i].put = c.move(w.parts[i].peer)
	}
	return nil
}
