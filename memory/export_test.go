package memory

import (
	"context"

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

// Held says which of the memory's locks are held at this moment, by anybody: that of collective calls, that of local calls for one of several
// ("shared"), or for Close alone ("alone").
func (m *Memory) Held() (collective bool, locals string) {
	collective = m.collective.held()
	switch {
	case m.locals.TryLock():
		m.locals.Unlock()
	case m.locals.TryRLock():
		m.locals.RUnlock()
		locals = "shared"
	default:
		locals = "alone"
	}
	return collective, locals
}
