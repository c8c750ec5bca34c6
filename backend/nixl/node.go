package nixl

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
)

// node is this rank as the others see it: an agent and what is registered with it. The backends of sub-groups use their parent's node.
type node struct {
	engine engine
	name   string
	device device.Device
	memory nixl.Memory // of the device
	pads   bool        // memory is moved once at rendezvous, for which it has pads
	driver *driver     // nil where a thread of the library does its work

	scratch scratch // where there are pads

	mu     sync.Mutex
	last   uint64                 // the number of the latest registration
	open   map[*transfer]struct{} // with requests, which must be released before the agent ends
	strays []request              // given up while the library worked on them
	kept   []words                // given up while the library may have worked on them
	known  map[string]bool        // the agents that are connected to
}

// nonce returns a text that no other has.
func nonce() string { return rand.Text()[:12] }

// newName returns the name of an agent of this rank, which no other has.
func newName(g *group.Group) string { return fmt.Sprintf("%s-%d-%s", g.Name(), g.Rank(), nonce()) }

// newNode makes the node of this rank with that engine.
func newNode(e engine, name string, d device.Device) *node {
	return &node{engine: e, name: name, device: d, memory: memoryOf(d), open: map[*transfer]struct{}{}, known: map[string]bool{}}
}

// progress handles what has arrived, unless a thread of the library does. A failure is not returned: it fails a transfer, which reports it. With
// memory of a GPU, its context is current.
func (n *node) progress() {
	if n.driver != nil && n.driver.due() {
		_ = n.engine.Progress()
	}
}

// connect introduces the agent that the metadata describes.
func (n *node) connect(ctx context.Context, name string, metadata []byte) error {
	n.mu.Lock()
	known := n.known[name]
	n.mu.Unlock()
	if name == n.name || known {
		return nil
	}
	came, err := n.learn(ctx, metadata)
	if err == nil && came != name {
		err = fmt.Errorf("the metadata of agent %s came in place of that of %s: %w", came, name, errs.ErrMismatch)
	}
	if err != nil {
		return fmt.Errorf("connecting to agent %s: %w", name, err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.known[name] = true
	return nil
}

// learn takes metadata of another agent.
func (n *node) learn(ctx context.Context, metadata []byte) (string, error) {
	return nixl.Bound(ctx, "taking metadata", func() (name string, err error) {
		err = within(n.device, func() error {
			name, err = n.engine.Know(metadata)
			return err
		})
		return name, err
	})
}

// register registers memory.
func (n *node) register(m nixl.Memory, p device.Ptr, bytes int64) (nixl.Block, error) {
	n.mu.Lock()
	n.last++
	region := nixl.Block{Addr: uint64(p), Bytes: uint64(bytes), Device: deviceNumber(n.device, n.last)}
	n.mu.Unlock()
	if err := within(n.device, func() error { return n.engine.Register(m, region) }); err != nil {
		return nixl.Block{}, err
	}
	return region, nil
}

// deregister takes back what register did.
func (n *node) deregister(m nixl.Memory, region nixl.Block) error {
	return within(n.device, func() error { return n.engine.Deregister(m, region) })
}

// opened notes a transfer with a request. forget ends that.
func (n *node) opened(t *transfer) {
	n.mu.Lock()
	n.open[t] = struct{}{}
	n.mu.Unlock()
	if n.driver != nil && n.driver.resting.Load() {
		n.driver.look()
	}
}

// hasOpen reports whether there are transfers with requests, or requests that were given up while the library worked on them.
func (n *node) hasOpen() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.open)+len(n.strays) > 0
}

func (n *node) forget(t *transfer) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.open, t)
}

// transfersOf returns the transfers of a backend that may have requests; nil stands for every backend.
func (n *node) transfersOf(b *Backend) []*transfer {
	n.mu.Lock()
	defer n.mu.Unlock()
	var all []*transfer
	for t := range n.open {
		if b == nil || t.backend == b {
			all = append(all, t)
		}
	}
	return all
}

// closeOpen closes the transfers that nobody has closed.
func (n *node) closeOpen() error {
	var err error
	for _, t := range n.transfersOf(nil) {
		err = errors.Join(err, t.Close())
	}
	return err
}

// stray takes over a request that was given up while the library works on it.
func (n *node) stray(r request) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.strays = append(n.strays, r)
}

// sweep releases the strays that have ended, and returns how many are left.
func (n *node) sweep() (left int, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.strays = slices.DeleteFunc(n.strays, func(r request) bool {
		// How it ended no longer matters.
		if ended, failed := r.Status(); !ended && failed == nil {
			return false
		}
		err = errors.Join(err, r.Release())
		return true
	})
	return len(n.strays), err
}

// quiesce waits until no stray is left.
func (n *node) quiesce(ctx context.Context) error {
	for {
		left, err := n.sweep()
		if left == 0 || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d transfers that were given up are still under way: %w", left, ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
}

// strayTimeout is how long a closing node waits for strays: those to a rank that is lost end within milliseconds.
const strayTimeout = 2 * time.Second

// endStrays waits for the strays, no longer than that, and cancels those that do not end. late says that there were such, and failed that some cannot be
// cancelled.
func (n *node) endStrays(ctx context.Context, within time.Duration) (late, failed error) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	late = n.quiesce(ctx)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.strays = slices.DeleteFunc(n.strays, func(r request) bool {
		err := r.Release()
		failed = errors.Join(failed, err)
		return err == nil
	})
	return late, failed
}

// keep takes over flags that were given up while writes to them or from them may be under way.
func (n *node) keep(f words) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.kept = append(n.kept, f)
}

// close ends the agent. Strays that do not end are cancelled.
func (n *node) close(ctx context.Context) error {
	unclosed := n.closeOpen() // those that are under way become strays
	err, released := n.endStrays(ctx, strayTimeout)
	n.mu.Lock()
	kept := n.kept
	n.kept = nil
	n.mu.Unlock()
	n.driver.stop()
	err = errors.Join(unclosed, err, released, n.dropScratch())
	if released == nil { // else the agent deregisters them when it ends, with what it still works on
		for _, f := range kept {
			err = errors.Join(err, f.deregister())
		}
	}
	if failed := n.engine.Close(); failed != nil {
		return errors.Join(err, failed) // an agent that may be there still may write to what was kept: it stays mapped
	}
	// What peers have written may arrive as long as there is an agent, so that only now nothing goes to this memory.
	for _, f := range kept {
		err = errors.Join(err, f.free())
	}
	return err
}
