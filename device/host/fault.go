package host

import (
	"fmt"
	"runtime/debug"

	"github.com/symmem/symmem/device"
)

// faultsAsErrors lets accesses of this goroutine to memory that is not there panic instead of ending the process, and returns
// what must be deferred: it turns such a panic into an error in err and restores the state from before.
func faultsAsErrors(op string, err *error) func() {
	before := debug.SetPanicOnFault(true)
	return func() {
		debug.SetPanicOnFault(before)
		if v := recover(); v != nil {
			*err = fmt.Errorf("%s: %w", op, &device.PanicError{Value: v, Stack: string(debug.Stack())})
		}
	}
}
