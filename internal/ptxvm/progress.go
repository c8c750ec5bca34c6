package ptxvm

// Stores is how many stores were executed, and atomics that have changed something, of all threads together. Threads that only look whether
// something has come execute none.
func (m *Machine) Stores() uint64 { return m.written }

// Ready is how many threads can go on.
func (m *Machine) Ready() int { return len(m.ready) }
