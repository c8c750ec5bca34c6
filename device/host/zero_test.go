package host_test

import (
	"testing"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/devicetest"
	"github.com/symmem/symmem/device/host"
)

// TestZeroDevice: methods of a Device that New did not give do not panic: what can fail is ErrInvalid.
func TestZeroDevice(t *testing.T) {
	devicetest.Zero(t, func() device.Device { return &host.Device{} })
}
