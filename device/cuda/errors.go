package cuda

import (
	"errors"
	"fmt"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/dl"
)

// Error is a call of the driver that failed. It is in the chain of every error that such a call causes, so errors.As finds it. Library is "CUDA
// driver", Call the function ("cuMemCreate"), Code what it returned (2), Name and Text what the driver says about the code
// ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"), Hint what to do next, if there is something, and Err the condition that the code stands for
// (ErrNoMemory), or nil. Calls of other native libraries fail with the same type.
type Error = dl.Error

// ErrContextLost is in the errors of calls after device work has failed in a way that ends the context, such as an access to
// memory that is not mapped. The GPU is of no use to this process any more; others are not concerned.
var ErrContextLost = cu.ErrContextLost

// The reasons for which the device itself ends work.
var (
	errGoexit    = errors.New("it called runtime.Goexit (testing's FailNow does) instead of returning")
	errClosing   = fmt.Errorf("the stream was closed meanwhile: %w", device.ErrClosed)
	errCallsLeft = errors.New("calls of the device have not returned; its context and memory are not given back")
	errWorkLeft  = errors.New("the GPU has not ended the work; what the work may use is not given back")
)

// closed returns the error of using something that was closed: "stream", "event", "graph" or "device".
func closed(op, what string) error {
	return fmt.Errorf("%s: the CUDA %s is %w", op, what, device.ErrClosed)
}

// capturing returns the error of a call that a capturing stream cannot do.
func capturing(op string) error {
	return &device.CaptureError{Op: op, Reason: "the stream is capturing; call it before BeginCapture or after EndCapture"}
}
