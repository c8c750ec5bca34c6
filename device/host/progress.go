package host

import (
	"context"
	"runtime"
	"sync"
	"sync/atomic"
)

const (
	// A waiter for progress looks, with yields to other goroutines, for 2 us or so before it parks.
	waitLoads  = 200
	waitRounds = 16
)

// progress is a number that only grows, and those who wait for it to reach something: how many works of a stream have ended,
// how many launches of a graph.
type progress struct {
	value atomic.Uint64
	// soonest is the lowest target in the list, or 0 if that is empty; written under mu, and looked at without it by whoever advances.
	soonest atomic.Uint64

	mu      sync.Mutex
	waiters []*waiter
	spare   []*waiter // for the next to wait, so that waiting allocates nothing in the long run
}

// waiter is a goroutine that waits.
type waiter struct {
	target uint64
	ready  chan struct{} // holds one
}

// reached reports whether the number is target or more.
func (p *progress) reached(target uint64) bool { return p.value.Load() >= target }

// advance makes the number v. Calls come one after the other, in order.
func (p *progress) advance(v uint64) {
	p.value.Store(v)
	// A waiter notes its target first and looks at the number then, so one of the two sides notices the other.
	if soonest := p.soonest.Load(); soonest != 0 && soonest <= v {
		p.release(v)
	}
}

// release lets those go whose target is reached.
func (p *progress) release(v uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := 0; i < len(p.waiters); {
		w := p.waiters[i]
		if w.target > v {
			i++
			continue
		}
		w.ready <- struct{}{}
		p.remove(i)
	}
	p.note()
}

// remove takes waiter i off the list; the lock is held.
func (p *progress) remove(i int) {
	last := len(p.waiters) - 1
	p.waiters[i] = p.waiters[last]
	p.waiters[last] = nil
	p.waiters = p.waiters[:last]
}

// note sets soonest; the lock is held.
func (p *progress) note() {
	var soonest uint64
	for _, w := range p.waiters {
		if soonest == 0 || w.target < soonest {
			soonest = w.target
		}
	}
	p.soonest.Store(soonest)
}

// wait waits until the number is target or more. It returns ctx's error when ctx ends first.
func (p *progress) wait(ctx context.Context, target uint64) error {
	if p.reached(target) || p.spin(target) {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	p.mu.Lock()
	var w *waiter
	if n := len(p.spare); n > 0 {
		w, p.spare = p.spare[n-1], p.spare[:n-1]
	} else {
		w = &waiter{ready: make(chan struct{}, 1)}
	}
	w.target = target
	p.waiters = append(p.waiters, w)
	p.note()
	if p.reached(target) {
		p.withdraw(w)
		p.spare = append(p.spare, w)
		p.mu.Unlock()
		return nil
	}
	p.mu.Unlock()

	var err error
	select {
	case <-w.ready:
	case <-ctx.Done():
		err = ctx.Err()
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil && !p.withdraw(w) {
		<-w.ready // it was let go at the same moment
		err = nil
	}
	p.spare = append(p.spare, w)
	return err
}

// withdraw takes w off the list and reports whether it was there; the lock is held.
func (p *progress) withdraw(w *waiter) bool {
	for i, x := range p.waiters {
		if x == w {
			p.remove(i)
			p.note()
			return true
		}
	}
	return false
}

// spin looks at the number for a while and reports whether it reached target.
func (p *progress) spin(target uint64) bool {
	loads := 1
	if severalProcessors() {
		loads = waitLoads
	}
	for range waitRounds {
		// The yield comes first: a goroutine that was just made ready on this very processor then runs at once.
		runtime.Gosched()
		for range loads {
			if p.reached(target) {
				return true
			}
		}
	}
	return false
}

// severalProcessors reports whether another goroutine can run while this one looks at a word. It goes by this process alone, whose goroutines are all
// that write such words; ranks that wait for each other are oversubscribed or not together (group.Group.Oversubscribed).
func severalProcessors() bool { return runtime.NumCPU() > 1 && runtime.GOMAXPROCS(0) > 1 }
