package probe

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
)

// TestFixes: the fix is for what is wrong, and the reason does not say it again.
func TestFixes(t *testing.T) {
	for name, tt := range map[string]struct {
		err         error
		reason, fix string
	}{
		"a library of another backend": {fmt.Errorf("opening the CUDA device: %w", &dl.LoadError{Library: "the CUDA driver", Hint: "install the driver"}),
			"opening the CUDA device: loading the CUDA driver: there is nowhere to look for it", "install the driver"},
		"a setting": {errs.Invalid("New", "device", "7", "0 to 3"), "New: device is 7; allowed: 0 to 3", "correct device; allowed: 0 to 3"},
		"says it itself": {fmt.Errorf("the fabric is off; switch it on: %w", errs.ErrUnsupported),
			"the fabric is off; switch it on: unsupported", ""},
		"nobody knows": {errors.New("strange"), "strange", fixProbe},
	} {
		t.Run(name, func(t *testing.T) {
			b := find("nvshmem", func() (backend.Capabilities, error) { return backend.Capabilities{}, tt.err })
			assert.Equal(t, Finding{Name: "nvshmem", Reason: tt.reason, Fix: tt.fix}, b)
		})
	}
}
