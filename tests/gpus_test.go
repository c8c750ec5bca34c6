package tests

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/testneed"
)

// gpus counts the GPUs that this process sees; 0 without a driver.
func gpus(t *testing.T) int {
	drv, err := cu.Load(nil)
	if err != nil {
		return 0
	}
	require.NoError(t, drv.Check("cuInit", drv.Init(0)))
	var n int32
	require.NoError(t, drv.Check("cuDeviceGetCount", drv.DeviceGetCount(&n)))
	return int(n)
}

// requireGPUs skips the test if the backend works on GPUs and there is not one for each rank. Under SYMMEM_TEST_REQUIRE with
// gpus=N among its names, that is a failure for up to N ranks.
func requireGPUs(t *testing.T, name string, ranks int) {
	t.Helper()
	if have := gpus(t); have < ranks && deviceKind(t, name) == device.CUDA {
		testneed.MissingGPUs(t, ranks, fmt.Sprintf("backend %s: %d ranks need as many, and there are %d", name, ranks, have))
	}
}

// required is what must not be skipped: names of backends, and gpus=N.
func required() []string { return strings.Split(os.Getenv("SYMMEM_TEST_REQUIRE"), ",") }
