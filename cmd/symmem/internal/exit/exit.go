// Package exit has the exit statuses of the command, and errors that carry one.
package exit

import "fmt"

// The exit statuses that do not come from a rank.
const (
	OK      = 0
	Failure = 1
	Usage   = 2 // a mistake in the command line or the configuration
)

// Error is an error with the status that it ends the command with. Err may be nil: then everything was said before.
type Error struct {
	Status int
	Err    error
}

// Error is the text of Err, or the status if there is none.
func (e *Error) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit status %d", e.Status)
	}
	return e.Err.Error()
}

// Unwrap gives Err.
func (e *Error) Unwrap() error { return e.Err }

// UsageError marks err as a mistake in the command line or the configuration. It is nil if err is.
func UsageError(err error) error {
	if err == nil {
		return nil
	}
	return &Error{Status: Usage, Err: err}
}

// Usagef is UsageError of a text, which fmt.Errorf formats.
func Usagef(format string, args ...any) error { return UsageError(fmt.Errorf(format, args...)) }
