package cuda_test

import (
	"testing"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/device/devicetest"
)

// TestZeroDevice: methods of a Device that Open did not give do not panic: what can fail is ErrInvalid.
func TestZeroDevice(t *testing.T) {
	devicetest.Zero(t, func() device.Device { return &cuda.Device{} })
}
