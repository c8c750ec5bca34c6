package memory

import (
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
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
	if err := p.checkChannel(call, channel); err != nil {
		return nil, err
	}
	if puts == nil {
		return nil, errs.Invalid(call, "puts", nil, "a function")
	}
	_, onHost := p.memory.device.(device.HostMemory)
	if !onHost && (by == nil || by.stream == nil) {
		return nil, fmt.Errorf("a send on %s whose puts are known only when it runs: %w", p.memory.device.Name(), errs.ErrUnsupported)
	}
	c := &computed{signals: p, channel: channel, puts: puts}
	send := &PreparedSend{signals: p, channel: channel, computed: c}
	flags, byFlags := p.signals.(*flagSignals)
	if _, own := p.memory.backend.(backend.Transferrer); own || byFlags || !onHost { // some memory may have no addresses
		work, err := newSendWork(p, flags, channel, make([]backend.PreparedTransfer, p.memory.group.Size()))
		if err != nil {
			return nil, err
		}
		work.computed, send.work = c, work
		if !onHost {
			c.by = by
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
	kept   []computedPut // of the latest run: what is sent again need not be prepared again
}

// computedPut is one that was prepared.
type computedPut struct {
	SendPut
	transfer *Transfer
}

// now gives the transfers of a run that begins, and what they copy where all memory has addresses; where it has not, moves, by peer,
// takes them. The run before has ended.
func (c *computed) now(moves []backend.PreparedTransfer) ([]*Transfer, []WorkCopy, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, nil, fmt.Errorf("send: %w", errs.ErrClosed)
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
		return nil, nil, err
	}
	before := c.kept
	c.kept = nil
	taken := make([]bool, c.signals.memory.group.Size())
	for _, put := range puts {
		if put.Bytes == 0 {
			continue
		}
		i := slices.IndexFunc(before, func(k computedPut) bool { return k.SendPut == put })
		if i >= 0 && !taken[put.Peer] {
			taken[put.Peer] = true
			c.kept = append(c.kept, before[i])
			before = slices.Delete(before, i, i+1)
			continue
		}
		t, prepared := c.signals.prepare(c.channel, put, taken)
		if err = prepared; err != nil {
			break
		}
		c.kept = append(c.kept, computedPut{put, t})
	}
	for _, k := range before {
		err = errors.Join(err, k.transfer.Close())
	}
	if err != nil {
		return nil, nil, err
	}
	var transfers []*Transfer
	var copies []WorkCopy
	for _, k := range c.kept {
		transfers = append(transfers, k.transfer)
		switch m := k.transfer.prepared.(type) {
		case *copyTransfer:
			switch {
			case c.by != nil:
				moves[k.Peer] = &besideMove{by: c.by, transfer: k.transfer, copies: m.copies}
			case moves != nil:
				moves[k.Peer] = &nearMove{memory: c.signals.memory, transfer: k.transfer, copies: m.copies}
			default:
				copies = append(copies, m.copies...)
			}
		case *workTransfer:
			if moves == nil {
				return nil, nil, fmt.Errorf("rank %d's memory has no address, and the backend does not move blocks: %w", k.Peer, errs.ErrNotReachable)
			}
			moves[k.Peer] = m
		}
	}
	return transfers, copies, nil
}

// close closes what is prepared. A graph that still has the send puts nothing any more.
func (c *computed) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	var err error
	for _, k := range c.kept {
		err = errors.Join(err, k.transfer.Close())
	}
	c.kept = nil
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
	moves := make([]backend.PreparedTransfer, w.computed.signals.memory.group.Size())
	if _, _, err := w.computed.now(moves); err != nil {
		return err
	}
	for i := range w.parts {
		w.parts[i].put = moves[w.parts[i].peer]
	}
	return nil
}
