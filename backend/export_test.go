package backend

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
