package memory

import (
	"context"

	"github.com/symmem/symmem/group"
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
