package tests

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device/cuda"
)

// gpus counts the GPUs that this process sees; 0 without a driver.
func gpus(t *testing.T) int {
	drv, err := cuda.Load(nil)
	if err != nil {
		return 0
	}
	require.NoError(t, drv.Check("cuInit", drv.Init(0)))
	var n int32
	require.NoError(t, drv.Check("cuDeviceGetCount", drv.DeviceGetCount(&n)))
	return int(n)
}

// requireGPUs skips the test if the backend works on GPUs and there is not one for each rank.
func requireGPUs(t *testing.T, name string, ranks int) {
	t.Helper()
	if have := gpus(t); name != "host" && have < ranks {
		t.Skipf("backend %s: %d ranks need as many GPUs, and there are %d", name, ranks, have)
	}
}
