package native

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
)

// TestLibraries: the driver is usable, not usable for a reason, or missing.
func TestLibraries(t *testing.T) {
	named := func(l backend.Library, name string) string {
		for _, d := range l.Details {
			if d.Name == name {
				return d.Value
			}
		}
		return ""
	}
	m := newMachine(2)
	drv := m.driver()
	drv.Path = "/usr/lib/libcuda.so.1"
	drv.DriverGetVersion = func(v *int32) cu.Result { *v = 13000; return cu.Success }
	l := driverLibrary(drv)
	assert.Equal(t, "usable", l.State, l.Reason)
	assert.Equal(t, "CUDA driver", l.Name)
	assert.Equal(t, "CUDA 13.0", l.Version)
	assert.Equal(t, "/usr/lib/libcuda.so.1", l.Path)
	assert.Contains(t, named(l, "GPU 1"), "compute capability 1.1, 1024 MiB, GPU-")
	assert.NotEmpty(t, named(l, "functions that it lacks"), "the fake lacks some")
	assert.Empty(t, m.left(), "a context was made")

	drv.DriverGetVersion = func(v *int32) cu.Result { *v = 12020; return cu.Success }
	l = driverLibrary(drv)
	assert.Equal(t, "unusable", l.State)
	assert.Equal(t, "CUDA 12.2", l.Version)
	assert.Contains(t, l.Reason, "speaks CUDA 12.2; CUDA 12.4 or newer is needed")
	assert.NotEmpty(t, l.Fix)

	drv = newMachine(0).driver()
	l = driverLibrary(drv)
	assert.Equal(t, "unusable", l.State)
	assert.Contains(t, l.Reason, "the driver sees no GPU")

	m = newMachine(1)
	m.failing("cuInit", -1, 0, cu.StubLibrary)
	l = driverLibrary(m.driver())
	assert.Equal(t, "unusable", l.State)
	assert.Contains(t, l.Reason, "cuInit returned 34")
	assert.NotContains(t, l.Reason, "LD_LIBRARY_PATH")
	assert.Contains(t, l.Fix, "the toolkit's stub")
}

func TestLibrariesOfNoDriver(t *testing.T) {
	t.Setenv(cuda.LibraryEnv, t.TempDir()+"/libcuda.so.1")
	found := factory{}.Libraries(t.Context(), &backend.Env{})
	require.Len(t, found, 1)
	assert.Equal(t, "missing", found[0].State)
	require.Len(t, found[0].Tried, 1)
	assert.Contains(t, found[0].Tried[0], "libcuda.so.1")
	assert.Contains(t, found[0].Fix, "install the NVIDIA driver")
}
