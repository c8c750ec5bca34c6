package cuda_test

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
)

func TestChoosingTheGPU(t *testing.T) {
	const first, third = "GPU-abcd0000-0000-0000-0000-000000000001", "GPU-abcd0200-0000-0000-0000-000000000001"
	for name, c := range map[string]struct {
		gpus  int
		opts  cuda.Options
		index int
		err   string
	}{
		"local rank":                 {4, cuda.Options{LocalRank: 2}, 2, ""},
		"local rank, one visible":    {1, cuda.Options{LocalRank: 3}, 0, ""},
		"local rank, too few":        {2, cuda.Options{LocalRank: 3}, 0, "LocalRank is 3; allowed: 0 to 1, since 2 GPUs are visible"},
		"index":                      {4, cuda.Options{Device: "3", LocalRank: 1}, 3, ""},
		"index out of range":         {2, cuda.Options{Device: "2"}, 0, "Device is 2; allowed: an index from 0 to 1, or one of " + first},
		"negative index":             {2, cuda.Options{Device: "-1"}, 0, "an index from 0 to 1"},
		"UUID":                       {4, cuda.Options{Device: third}, 2, ""},
		"UUID in capitals":           {4, cuda.Options{Device: "gpu-ABCD02"}, 2, ""},
		"UUID of a slice":            {4, cuda.Options{Device: "MIG-abcd0200"}, 2, ""},
		"UUID of none":               {2, cuda.Options{Device: third}, 0, `"` + third + `"; allowed: an index from 0 to 1, or one of`},
		"UUID of several":            {4, cuda.Options{Device: "GPU-abcd"}, 0, "a UUID that fits only one of"},
		"UUID of none in particular": {1, cuda.Options{Device: "GPU-"}, 0, "allowed"},
		"nonsense":                   {1, cuda.Options{Device: "fast one"}, 0, `"fast one"`},
		"negative local rank":        {1, cuda.Options{LocalRank: -1}, 0, "LocalRank is -1"},
		"negative timeout":           {1, cuda.Options{WaitTimeout: -time.Second}, 0, "WaitTimeout is -1s"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(c.gpus)
			c.opts.Driver = f.driver()
			d, err := cuda.Open(&c.opts)
			if c.err != "" {
				require.ErrorIs(t, err, device.ErrInvalid)
				require.ErrorContains(t, err, c.err)
				f.assertEmpty(t)
				return
			}
			require.NoError(t, err)
			assert.Equal(t, c.index, d.Index())
			assert.EqualValues(t, c.index, d.Ordinal())
			require.NoError(t, d.Close())
			f.assertEmpty(t)
		})
	}
}

func TestHiddenGPUsAreNamed(t *testing.T) {
	t.Setenv("CUDA_VISIBLE_DEVICES", "5")
	f := newFake(1)
	_, err := cuda.Open(&cuda.Options{Driver: f.driver(), Device: "1"})
	require.ErrorContains(t, err, `CUDA_VISIBLE_DEVICES is "5"`)
	f = newFake(0)
	_, err = cuda.Open(&cuda.Options{Driver: f.driver()})
	require.ErrorIs(t, err, device.ErrUnavailable)
	require.ErrorContains(t, err, `CUDA_VISIBLE_DEVICES is "5"`)
	f.failing("cuInit", cu.NoDevice)
	_, err = cuda.Open(&cuda.Options{Driver: f.driver()})
	require.ErrorIs(t, err, device.ErrUnavailable)
	require.ErrorContains(t, err, `CUDA_VISIBLE_DEVICES is "5", which shows this process no GPU`)
}

func TestDriversThatCannotBeUsed(t *testing.T) {
	for name, c := range map[string]struct {
		result cu.Result
		text   string
	}{
		"stub":           {cu.StubLibrary, "the toolkit's stub"},
		"no device":      {cu.NoDevice, "no GPU is visible"},
		"fabric manager": {cu.SystemNotReady, "nvidia-fabricmanager"},
		"mismatch":       {cu.SystemDriverMismatch, "different versions"},
		"compatibility":  {cu.CompatNotSupported, "forward compatibility"},
		"exclusive":      {cu.DeviceUnavailable, "exclusively"},
		"unknown":        {cu.Unknown, "dmesg"},
	} {
		t.Run(name, func(t *testing.T) {
			if value, set := os.LookupEnv("CUDA_VISIBLE_DEVICES"); set {
				t.Setenv("CUDA_VISIBLE_DEVICES", value) // so that it is there again
				require.NoError(t, os.Unsetenv("CUDA_VISIBLE_DEVICES"))
			}
			f := newFake(1)
			f.failing("cuInit", c.result)
			_, err := cuda.Open(&cuda.Options{Driver: f.driver()})
			require.ErrorIs(t, err, device.ErrUnavailable)
			require.ErrorContains(t, err, c.text)
			var failed *cuda.Error
			require.ErrorAs(t, err, &failed)
			assert.Equal(t, "cuInit", failed.Call)
			assert.EqualValues(t, c.result, failed.Code)
			assert.Equal(t, "CUDA_ERROR_FAKE", failed.Name)
		})
	}
	t.Run("too old", func(t *testing.T) {
		f := newFake(1)
		f.version = 12020
		_, err := cuda.Open(&cuda.Options{Driver: f.driver()})
		require.ErrorIs(t, err, device.ErrUnavailable)
		require.ErrorContains(t, err, "speaks CUDA 12.2; CUDA 12.4 or newer is needed, which comes with the driver series 550")
	})
	t.Run("functions missing", func(t *testing.T) {
		drv := newFake(1).driver()
		drv.LaunchKernelEx = nil
		_, err := cuda.Open(&cuda.Options{Driver: drv})
		require.ErrorIs(t, err, device.ErrUnavailable)
		require.ErrorContains(t, err, "cuLaunchKernelEx")
		_, err = cuda.Open(&cuda.Options{Driver: &cu.Driver{}})
		require.ErrorIs(t, err, device.ErrUnavailable)
	})
}

// Each call of Open fails once: the error names it, and nothing is left.
func TestOpenFailsCleanly(t *testing.T) {
	for _, call := range []string{"cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetUuid_v2",
		"cuDeviceGetName", "cuDeviceGetPCIBusId", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"} {
		f := newFake(2)
		f.failing(call, cu.OutOfMemory)
		_, err := cuda.Open(&cuda.Options{Driver: f.driver()})
		require.ErrorIs(t, err, device.ErrNoMemory, call)
		f.assertEmpty(t)
	}
}

// Find returns what Open would open, and leaves nothing behind.
func TestFind(t *testing.T) {
	f := newFake(3)
	found, err := cuda.Find(&cuda.Options{Driver: f.driver(), LocalRank: 2})
	require.NoError(t, err)
	d := openFake(t, f, &cuda.Options{LocalRank: 2})
	assert.Equal(t, []any{2, d.Ordinal(), d.UUID()}, []any{found.Index, found.Ordinal, found.UUID})
	require.NoError(t, d.Close())
	for _, o := range []cuda.Options{{LocalRank: -1}, {LocalRank: 3}, {Device: "3"}, {Device: "GPU-ffff"}} {
		o.Driver = f.driver()
		_, err := cuda.Find(&o)
		require.ErrorIs(t, err, device.ErrInvalid, "%+v", o)
	}
	f.assertEmpty(t)
}

func TestRequireAndMissing(t *testing.T) {
	drv := newFake(1).driver()
	require.NoError(t, drv.Require("cuInit", "cuMemAlloc_v2"))
	err := drv.Require("cuInit", "cuMemCreate", "cuNone")
	require.ErrorIs(t, err, device.ErrUnsupported)
	require.ErrorContains(t, err, "cuMemCreate, cuNone")
	assert.Contains(t, drv.Missing(), "cuMemCreate")
	assert.NotContains(t, drv.Missing(), "cuInit")
	for _, name := range drv.Missing() {
		assert.NotContains(t, name, "Multicast")
	}
	drv.MemCreate = func(*cu.MemHandle, uint64, *cu.MemAllocationProp, uint64) cu.Result { return cu.Success }
	require.NoError(t, drv.Require("cuMemCreate"))
}

func TestMulticastIsOnlyResolvedOnDemand(t *testing.T) {
	drv := newFake(1).driver()
	_, err := drv.ResolveMulticast()
	require.ErrorIs(t, err, device.ErrUnsupported)
	asked := 0
	drv.MulticastSource = func() (*cu.Multicast, error) {
		asked++
		return &cu.Multicast{}, nil
	}
	d, err := cuda.Open(&cuda.Options{Driver: drv})
	require.NoError(t, err)
	require.NoError(t, d.Close())
	assert.Zero(t, asked)
	_, err = drv.ResolveMulticast()
	require.ErrorIs(t, err, device.ErrUnsupported)
	require.ErrorContains(t, err, "cuMulticastCreate")
	assert.Equal(t, 1, asked)
	boom := errors.New("boom")
	drv.MulticastSource = func() (*cu.Multicast, error) { return nil, boom }
	_, err = drv.ResolveMulticast()
	require.ErrorIs(t, err, boom)
}

func TestNoDriver(t *testing.T) {
	t.Setenv(cuda.LibraryEnv, filepath.Join(t.TempDir(), "libcuda.so.1"))
	_, err := cuda.Open(nil)
	require.ErrorIs(t, err, device.ErrUnavailable)
	if runtime.GOOS == "linux" {
		require.ErrorContains(t, err, os.Getenv(cuda.LibraryEnv))
		require.ErrorContains(t, err, "install the NVIDIA driver, series 550 or newer")
	}
}

func TestLibraryThatIsNoDriver(t *testing.T) {
	_, err := cu.Load(&cu.LoadOptions{Path: "libc.so.6"})
	require.ErrorIs(t, err, device.ErrUnavailable)
	if runtime.GOOS == "linux" {
		require.ErrorContains(t, err, "cuInit")
	}
}

// TestPeerAtomics: what the driver says of the link, and no where it cannot be asked.
func TestPeerAtomics(t *testing.T) {
	f := newFake(3)
	drv := f.driver()
	asked := 0
	drv.DeviceGetP2PAttribute = func(v *int32, a cu.P2PAttribute, src, dst cu.DeviceOrdinal) cu.Result {
		asked++
		assert.Equal(t, cu.P2PNativeAtomics, a)
		assert.EqualValues(t, 1, src)
		if *v = 0; dst == 0 {
			*v = 1
		}
		return cu.Success
	}
	uuid := func(i int) string {
		var u cu.UUID
		require.Equal(t, cu.Success, drv.DeviceGetUUID(&u, cu.DeviceOrdinal(i)))
		return u.String()
	}
	d, err := cuda.Open(&cuda.Options{Driver: drv, Device: "1"})
	require.NoError(t, err)
	assert.True(t, d.PeerAtomics(uuid(1)), "itself")
	assert.Zero(t, asked)
	assert.True(t, d.PeerAtomics(uuid(0)))
	assert.False(t, d.PeerAtomics(uuid(2)))
	assert.False(t, d.PeerAtomics("GPU-of another container"))
	assert.Equal(t, 2, asked)
	assert.Equal(t, map[string]bool{uuid(0): true, uuid(2): false}, d.PeerLinks())
	drv.DeviceGetP2PAttribute = nil
	assert.Empty(t, d.PeerLinks())
	assert.False(t, d.PeerAtomics(uuid(0)), "the driver cannot be asked")
	require.NoError(t, d.Close())
	assert.False(t, d.PeerAtomics(uuid(0)))
}
