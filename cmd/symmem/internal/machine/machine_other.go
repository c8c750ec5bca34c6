//go:build !linux

package machine

// fill adds nothing on this system.
func (m *Machine) fill() {}
