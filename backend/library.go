package backend

import "context"

// Libraries is a Factory that needs native libraries and can say which of them are on this machine.
type Libraries interface {
	// Libraries looks for each of them, loads it where that is harmless, and says what it found. It is slow, and what it loads stays loaded, so it is
	// meant for a process of its own. It never fails; what went wrong is in the answers.
	Libraries(ctx context.Context, env *Env) []Library
}

// Library is what is known about one native library on this machine.
type Library struct {
	// Name is what its makers call it: "NCCL".
	Name string `json:"name"`
	// State is how far it can be used: "usable" if it was found and is the right one; "unusable" if it was found, but is too old, for
	// another CUDA, or broken, which Reason says; "missing" if it was not found where it was looked for, which Tried lists.
	State string `json:"state"`
	// Path is the file that was found, and Version what the library says of itself.
	Path    string `json:"path,omitempty"`
	Version string `json:"version,omitempty"`
	// Reason says why it cannot be used, and Fix what to do about it.
	Reason string `json:"reason,omitempty"`
	Fix    string `json:"fix,omitempty"`
	// Tried lists the places where a missing library was looked for.
	Tried []string `json:"tried,omitempty"`
	// Devices are the names of the devices that a driver has.
	Devices []string `json:"devices,omitempty"`
	// Details are more facts, in the order in which they are worth reading: what it supports here, and why not.
	Details []Detail `json:"details,omitempty"`
}

// Detail is one fact of a library.
type Detail struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}
