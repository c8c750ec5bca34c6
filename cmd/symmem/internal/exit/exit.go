// Package exit has the exit statuses of the command, and an error that carries one.
package exit

import "fmt"

// The exit statuses that do not come from a rank.
const (
	OK      = 0
	Failure = 1
	Usage   = 2 // a mistake in the command line or the configuration
)

// Error is an error with the status that it ends the command with. If Err is nil, everything has been said before.
type Error struct {
	Status int
	Err    error
}

// Error returns the text of Err, or names the status if Err is nil.
func (e *Error) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit status %d", e.Status)
	}
	return e.Err.Error()
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// UsageError marks err as a mistake in the command line or the configuration. It returns nil if err is nil.
func UsageError(err error) error {
	if err == nil {
		return nil
	}
	return &Error{Status: Usage, Err: err}
}

// Usagef is like UsageError with an error from fmt.Errorf.
func Usagef(format string, args ...any) error { return UsageError(fmt.Errorf(format, args...)) }
