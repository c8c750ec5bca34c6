package errs

import (
	"fmt"
	"strings"
)

// Attempt is one path or name that was tried for a library.
type Attempt struct {
	Path string // what was given to the loader, or a pattern that no file matches
	Text string // what the loader said
}

// Missing reports whether there is no such file, rather than one that cannot be loaded.
func (a Attempt) Missing() bool {
	// If the loader (glibc's or musl's) lacks another library that this one needs, its text names that one.
	reason := a.Reason()
	return strings.HasPrefix(a.Text, a.Path+": ") && strings.HasSuffix(reason, "No such file or directory") ||
		strings.HasPrefix(a.Text, "Error loading shared library "+a.Path+": No such file or directory") || reason == NoFile
}

// Reason returns what the loader said, without the path in front.
func (a Attempt) Reason() string { return strings.TrimPrefix(a.Text, a.Path+": ") }

// String returns the path and what the loader said.
func (a Attempt) String() string {
	if reason := a.Reason(); reason != "" {
		return a.Path + " (" + reason + ")"
	}
	return a.Path
}

// NoFile is the text of an attempt whose pattern matches no file.
const NoFile = "no such file"

// LoadError is a library that could not be loaded. It is ErrUnavailable.
type LoadError struct {
	Library  string    // what the library is called: "the CUDA driver"
	Attempts []Attempt // everything that was tried, in order
	Hint     string    // what to do next
}

// shownMissing is how many places without such a file an error names. There may be dozens, on each rank.
const shownMissing = 4

// Error lists every file that could not be loaded with the loader's text, and the places without such a file if they are few, and says
// what to do next.
func (e *LoadError) Error() string {
	missing := 0
	for _, a := range e.Attempts {
		if a.Missing() {
			missing++
		}
	}
	var parts []string
	for _, a := range e.Attempts {
		if missing <= shownMissing || !a.Missing() {
			parts = append(parts, "tried "+a.String())
		}
	}
	switch {
	case len(e.Attempts) == 0:
		parts = append(parts, "there is nowhere to look for it")
	case missing > shownMissing:
		parts = append(parts, fmt.Sprintf("it is at none of %d places (symmem doctor --verbose lists them)", missing))
	}
	if e.Hint != "" {
		parts = append(parts, e.Hint)
	}
	return fmt.Sprintf("loading %s: %s", e.Library, strings.Join(parts, "; "))
}

// Found returns the first attempt at a file that is there and yet could not be loaded: it is broken, for another kind of processor, or
// needs a library that is not there. ok is false if there was none.
func (e *LoadError) Found() (a Attempt, ok bool) {
	for _, a := range e.Attempts {
		if a.Text != "" && !a.Missing() {
			return a, true
		}
	}
	return Attempt{}, false
}

// Is reports that a library which is not there is ErrUnavailable.
func (e *LoadError) Is(target error) bool { return target == ErrUnavailable }

// SymbolError is a function that a loaded library does not have: a capability that is missing. It is ErrUnsupported.
type SymbolError struct {
	Library string   // what the library is called
	Symbols []string // the names that were looked for
	Hint    string   // what to do next, such as the version that has it; may be empty
}

// Error says which symbols the library lacks.
func (e *SymbolError) Error() string {
	text := fmt.Sprintf("%s does not have %s", e.Library, strings.Join(e.Symbols, ", "))
	if e.Hint != "" {
		text += "; " + e.Hint
	}
	return text
}

// Is reports that a missing symbol is ErrUnsupported.
func (e *SymbolError) Is(target error) bool { return target == ErrUnsupported }

// CallError is a call of a native library that failed.
type CallError struct {
	Library string // what the library is called: "CUDA driver", "NCCL"
	Call    string // the function: "cuMemCreate"
	Code    int    // what it returned
	Name    string // the library's name for the code: "CUDA_ERROR_OUT_OF_MEMORY"; may be empty
	Text    string // the library's text for the code: "out of memory"; may be empty
	Hint    string // what to do next; may be empty
	Err     error  // the condition that the code stands for, for errors.Is (ErrNoMemory); nil if there is none
}

// Error returns all that is known, in one line.
func (e *CallError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s returned %d", e.Library, e.Call, e.Code)
	switch {
	case e.Name != "" && e.Text != "":
		fmt.Fprintf(&b, " (%s: %s)", e.Name, e.Text)
	case e.Name != "" || e.Text != "":
		fmt.Fprintf(&b, " (%s%s)", e.Name, e.Text)
	}
	if e.Hint != "" {
		b.WriteString("; " + e.Hint)
	}
	return b.String()
}

// Unwrap returns the condition that the code stands for, or nil.
func (e *CallError) Unwrap() error { return e.Err }

// StuckError says that a library had not finished something when the caller could wait no longer.
type StuckError struct {
	Library string // what its makers call it
	What    string // what was going on: "making the communicator"
	Err     error  // why the caller waited no longer
	// Abortable is set if the library can be told to end it. Otherwise a thread is still inside the library, with all that it holds, and cannot be
	// stopped: end the process.
	Abortable bool
	// Ended is closed when the library has nothing left to do with what it was given, because the call has ended late or was aborted. It is nil if
	// nobody will know.
	Ended <-chan struct{}
}

// Error says what hangs and what to do.
func (e *StuckError) Error() string {
	text := fmt.Sprintf("%s: %s has not done it (%v); perhaps another rank did not come", e.What, e.Library, e.Err)
	if !e.Abortable {
		text += "; end the process"
	}
	return text
}

// Unwrap returns the context's error.
func (e *StuckError) Unwrap() error { return e.Err }
