//go:build !linux

package machine

// fill adds what only the system knows; here nobody asks it.
func (m *Machine) fill() {}
