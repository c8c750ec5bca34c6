package nccl

import (
	"context"
	"slices"
	"sync"

	"github.com/symmem/symmem/backend"
)

// NCCL tells the calls of a communicator that take all ranks apart by their order alone. A group makes its own in one order on every rank. But the groups
// that split its communicator are opened whenever their ranks like, several at a time, and each rank may come to them in another order. So a communicator
// is split only when no rank is in another call of it.

// lending counts the calls of a communicator, and lends it for a split.
type lending struct {
	mu    sync.Mutex
	calls int           // under way that take all ranks
	lent  chan struct{} // closed when it comes back; nil while it is not lent
}

// begin notes a call, which end ends. It waits while the communicator is lent, which does not wait for anything that this rank's program has yet to do.
func (l *lending) begin(ctx context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.lent != nil && ctx.Err() == nil {
		lent := l.lent
		l.mu.Unlock()
		select {
		case <-lent:
		case <-ctx.Done():
		}
		l.mu.Lock()
	}
	l.calls++
}

func (l *lending) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls--
}

// lend lends the communicator if nobody uses it. back must follow then.
func (l *lending) lend() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.calls > 0 || l.lent != nil {
		return false
	}
	l.lent = make(chan struct{})
	return true
}

func (l *lending) back() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.lent)
	l.lent = nil
}

// borrow takes the parent's communicator for a split, on all ranks or on none: back must be called in any case. The ranks are all in the opening already, so
// that calls of the parent's wait only for its end. Collective.
func (b *Backend) borrow(ctx context.Context, parent *Backend) (borrowed bool, back func(), err error) {
	mine := parent.lending.lend()
	back = func() {
		if mine {
			parent.lending.back()
		}
	}
	all, err := backend.Tell(ctx, b.group, opening+": the parent's communicator", mine, nil)
	if err == nil && slices.Contains(all, false) {
		back()
		return false, func() {}, nil
	}
	return err == nil, back, err
}
