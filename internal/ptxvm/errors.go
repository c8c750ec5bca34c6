package ptxvm

import (
	"errors"
	"fmt"
)

// The conditions that an [Error] can have, besides a [*Race], for errors.Is.
var (
	ErrSyntax      = errors.New("not as PTX has it")
	ErrUnsupported = errors.New("the machine has no such instruction")
	ErrAddress     = errors.New("no memory at this address")
	ErrAlignment   = errors.New("misaligned address")
	ErrTrap        = errors.New("trap")
	ErrDeadlock    = errors.New("no thread can go on")
	ErrSteps       = errors.New("more steps than allowed")
	ErrBarrier     = errors.New("a cluster barrier that is not used in turn")
	ErrCalls       = errors.New("too many calls within each other")
)

// Thread names a thread of a launch.
type Thread struct {
	Device   int    // of the stream
	Stream   int    // counted from 0, as they were made; below 0 for an agent
	Launch   int    // counted from 0 on its stream
	Function string // the kernel
	Block    [3]uint32
	Thread   [3]uint32
}

// String gives "device 1, stream 1, launch 0 of symmem_barrier, block 0, thread 3".
func (t Thread) String() string {
	if t.Stream < 0 {
		return fmt.Sprintf("device %d", t.Device)
	}
	return fmt.Sprintf("device %d, stream %d, launch %d of %s, block %s, thread %s", t.Device, t.Stream, t.Launch, t.Function, index(t.Block), index(t.Thread))
}

func index(i [3]uint32) string {
	if i[1] == 0 && i[2] == 0 {
		return fmt.Sprint(i[0])
	}
	return fmt.Sprintf("(%d, %d, %d)", i[0], i[1], i[2])
}

// Place is an instruction in its file.
type Place struct {
	File        string
	Line        int    // from 1; 0 for an agent, and File is its name
	Instruction string // the line's text
}

// String gives "signals.ptx:17: bar.sync 0;".
func (p Place) String() string {
	if p.Line == 0 {
		return p.File
	}
	return fmt.Sprintf("%s:%d: %s", p.File, p.Line, p.Instruction)
}

// Error is what is wrong at an instruction: of a file, for [Parse], or when a thread executed it.
type Error struct {
	Place
	Thread *Thread // nil if no thread was running
	Err    error
}

// Error gives place, reason and thread.
func (e *Error) Error() string {
	if e.Thread == nil {
		return fmt.Sprintf("%s: %v", e.Place, e.Err)
	}
	return fmt.Sprintf("%s: %v (%s)", e.Place, e.Err, e.Thread)
}

// Unwrap gives the reason.
func (e *Error) Unwrap() error { return e.Err }

// Access is one side of a [Race].
type Access struct {
	Place
	Thread Thread
}

// Race is two accesses to the same memory, one of them a store, that are neither ordered nor both strong with scopes that include each
// other's thread and with the same bytes. It is an error of the thread that came second.
type Race struct {
	Address       uint64    // in its state space: of shared memory, that of its block
	Shared        bool      // it is of .shared, not .global
	Block         [3]uint32 // whose shared memory it is
	First, Second Access
}

// Error names both places.
func (r *Race) Error() string {
	space, of := "global", ""
	if r.Shared {
		space = "shared"
		if r.Block != r.First.Thread.Block || r.Block != r.Second.Thread.Block {
			of = " of block " + index(r.Block)
		}
	}
	return fmt.Sprintf("race at %s address %#x%s: after %s (%s)", space, r.Address, of, r.First.Place, r.First.Thread)
}
