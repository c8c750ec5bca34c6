//go:build !linux

package main

// fill adds what only the system knows; here nobody asks it.
func (m *machine) fill() {}
