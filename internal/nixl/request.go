package nixl

import (
	"errors"
	"fmt"

	"github.com/symmem/symmem/internal/errs"
)

// Request is a prepared transfer between registered memory of an agent and of another one. It is used by one goroutine at a
// time.
type Request struct {
	agent  *Agent
	handle handle
}

// NewRequest prepares moving blocks between this agent's memory and that of the agent named peer, block by block. All are of
// one kind of memory, at least one, and as many and as large on both sides.
func (a *Agent) NewRequest(op Op, m Memory, local, remote []Block, peer string) (*Request, error) {
	const name = "NewRequest"
	if len(local) == 0 || len(local) != len(remote) {
		return nil, errs.Invalid(name, "blocks", fmt.Sprintf("%d local and %d remote", len(local), len(remote)),
			"as many on both sides, and at least one")
	}
	for i := range local {
		if local[i].Bytes == 0 || local[i].Bytes != remote[i].Bytes {
			return nil, errs.Invalid(name, "blocks", fmt.Sprintf("%d local and %d remote bytes", local[i].Bytes, remote[i].Bytes),
				"as many on both sides, and at least one")
		}
	}
	r := &Request{agent: a}
	err := a.use(func(agent handle) error {
		return a.withBlocks(m, local, func(mine handle) error {
			return a.withBlocks(m, remote, func(theirs handle) error {
				return a.lib.check("create_xfer_req", a.lib.call.createRequest(agent, op, mine, theirs, peer, &r.handle, 0))
			})
		})
	})
	if err != nil {
		if r.handle != 0 { // it is a list of its blocks that was not given back
			err = errors.Join(err, r.Release())
		}
		return nil, fmt.Errorf("preparing a transfer of %d blocks with agent %s: %w", len(local), peer, err)
	}
	return r, nil
}

// withBlocks calls f with a list of blocks for a transfer.
func (a *Agent) withBlocks(m Memory, blocks []Block, f func(list handle) error) error {
	l := a.lib
	var list handle
	if err := l.check("create_xfer_dlist", l.call.createBlocks(m, &list)); err != nil {
		return err
	}
	var err error
	for _, b := range blocks {
		if err = l.check("xfer_dlist_add_desc", l.call.addBlock(list, uintptr(b.Addr), uintptr(b.Bytes), b.Device)); err != nil {
			break
		}
	}
	if err == nil {
		err = f(list)
	}
	return errors.Join(err, l.check("destroy_xfer_dlist", l.call.destroyBlocks(list)))
}

// Post starts the transfer and reports whether it has ended already. It does not block. The previous post must have ended.
func (r *Request) Post() (ended bool, err error) {
	return r.ask("post_xfer_req", func(agent handle) Status { return r.agent.lib.call.post(agent, r.handle, 0) })
}

// Status makes progress with the transfer and reports whether it has ended. It does not block.
func (r *Request) Status() (ended bool, err error) {
	return r.ask("get_xfer_status", func(agent handle) Status { return r.agent.lib.call.status(agent, r.handle) })
}

// ask makes a call whose status says how far the transfer has come.
func (r *Request) ask(name string, call func(agent handle) Status) (ended bool, err error) {
	a := r.agent
	if a.closing.Load() {
		return false, fmt.Errorf("the request is %w", errs.ErrClosed)
	}
	a.mu.RLock()
	defer a.mu.RUnlock()
	if a.handle == 0 || r.handle == 0 {
		return false, fmt.Errorf("the request is %w", errs.ErrClosed)
	}
	s := call(a.handle)
	if s == InProgress {
		return false, nil
	}
	return s == Success, a.lib.check(name, s)
}

// Release releases the request. One that is under way is cancelled, as far as the network can do that. A second Release returns ErrClosed.
func (r *Request) Release() error {
	return r.agent.use(func(agent handle) error {
		if r.handle == 0 {
			return fmt.Errorf("the request is %w", errs.ErrClosed)
		}
		l := r.agent.lib
		if err := l.check("release_xfer_req", l.call.releaseRequest(agent, r.handle)); err != nil {
			return err
		}
		err := l.check("destroy_xfer_req", l.call.destroyRequest(r.handle))
		r.handle = 0
		return err
	})
}
