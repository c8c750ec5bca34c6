package memory

import (
	"context"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/futex"
)

// KeepWorkspace sets from which size on workspace is given back when it is not used, until the func that it gives is called.
func KeepWorkspace(bytes int64) (restore func()) {
	before := keptWorkspace
	keptWorkspace = bytes
	return func() { keptWorkspace = before }
}

// Entries counts all allocations, the workspace's too.
func (m *Memory) Entries() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.entries)
}

// Exchange is the exchange of records that every rendezvous begins with.
func Exchange(ctx context.Context, g *group.Group, mine *Record, failure error) ([]Record, error) {
	return exchange(ctx, g, mine, failure)
}

// Patient reports whether waits for peers look for long before they sleep.
func (m *Memory) Patient() bool { return m.bound(new(futex.Patience)).Patience != nil }

// Held says what of the memory is held at this moment, by anybody: the turn of collective calls, and the backend by a local call ("shared"), or by Close,
// which lets none begin ("alone").
func (m *Memory) Held() (collective bool, locals string) {
	collective = m.collective.held()
	m.locals.mu.Lock()
	defer m.locals.mu.Unlock()
	switch {
	case m.locals.shut:
		locals = "alone"
	case m.locals.under > 0:
		locals = "shared"
	}
	return collective, locals
}

// AwaitsLocals reports whether Close waits for local calls, or has given that up.
func (m *Memory) AwaitsLocals() bool {
	m.locals.mu.Lock()
	defer m.locals.mu.Unlock()
	return m.locals.ended != nil
}

// Places counts the collective calls of this rank that have their turn or wait for it.
func (m *Memory) Places() int {
	m.collective.mu.Lock()
	defer m.collective.mu.Unlock()
	return len(m.collective.queue)
}

// Meeting reports whether a rendezvous of a is under way on this rank.
func (m *Memory) Meeting(a backend.Allocation) bool {
	e := m.find(a)
	m.mu.Lock()
	defer m.mu.Unlock()
	return e != nil && e.meeting
}

// SkipRequests makes the next request to the heap that many later.
func (h *Heap) SkipRequests(n uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.log.count += n
}

// Heaps counts the heaps that are compared whenever ranks meet.
func (m *Memory) Heaps() int { return len(m.heaps) }
