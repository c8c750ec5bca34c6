package host

import (
	"errors"
	"fmt"

	"github.com/symmem/symmem/device"
)

// The reasons for which the device itself ends work.
var (
	errUnmapped = errors.New("the memory was freed or unmapped meanwhile")
	errClosing  = fmt.Errorf("the stream was closed and WaitTimeout has passed since: %w", device.ErrClosed)
	errGoexit   = errors.New("it called runtime.Goexit (testing's FailNow does) instead of returning")
)

// closed returns the error of using something that was closed: "stream", "event", "graph" or "device".
func closed(op, what string) error {
	return fmt.Errorf("%s: the host %s is %w", op, what, device.ErrClosed)
}

// capturing returns the error of a call that a capturing stream cannot do.
func capturing(op string) error {
	return &device.CaptureError{Op: op, Reason: "the stream is capturing; call it before BeginCapture or after EndCapture"}
}
