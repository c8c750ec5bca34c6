package device

import (
	"fmt"
	"strings"
)

// WorkError says that work of a stream failed when it ran. [Stream.Synchronize] returns it.
type WorkError struct {
	Op   string // the call that enqueued it: "Copy"; for Launch with the kernel
	Addr Ptr    // the address it was about, the destination of a copy; zero where there is none
	Err  error  // why it failed
	More int    // how many later works failed too before this error was returned; their errors are only in the log
}

// Error says which work failed, where and why.
func (e *WorkError) Error() string {
	var b strings.Builder
	b.WriteString(e.Op)
	if !e.Addr.IsNil() {
		fmt.Fprintf(&b, " at %v", e.Addr)
	}
	fmt.Fprintf(&b, ": %v", e.Err)
	if e.More > 0 {
		fmt.Fprintf(&b, " (and %d later failures)", e.More)
	}
	return b.String()
}

// Unwrap returns the reason.
func (e *WorkError) Unwrap() error { return e.Err }

// PanicError is the reason of a WorkError if work in Go panicked. On the host device touching memory that is not mapped is a panic.
type PanicError struct {
	Value any    // what it panicked with
	Stack string // the stack of the goroutine at the panic
}

// Error returns the panic's value; the stack is in the field.
func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Unwrap returns the panic's value if that is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// CaptureError says that a call is not allowed while its stream or event is, or is not, part of a capture. It is ErrInvalid. A capture in progress
// goes on, unless EndCapture is the call that failed.
type CaptureError struct {
	Op     string // the call: "Synchronize"
	Reason string // what is wrong and what to do next
	Err    error  // the driver's error, if it was the driver that refused
}

// Error says which call was refused and why.
func (e *CaptureError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%s: %s: %v", e.Op, e.Reason, e.Err)
	}
	return e.Op + ": " + e.Reason
}

// Is reports that a CaptureError is an ErrInvalid.
func (e *CaptureError) Is(target error) bool { return target == ErrInvalid }

// Unwrap returns the driver's error, or nil.
func (e *CaptureError) Unwrap() error { return e.Err }
