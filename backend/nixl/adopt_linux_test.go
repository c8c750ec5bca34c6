package nixl

import (
	"errors"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/simcuda"
)

// TestAdoptionWithoutContext: that the context is lost says nothing about memory that is to be adopted, and the error says so. What the driver does not know is
// refused with the driver's code.
func TestAdoptionWithoutContext(t *testing.T) {
	m, err := simcuda.New(simcuda.Config{GPUs: 1, Seed: 1})
	require.NoError(t, err)
	drv := m.Driver()
	result := cu.Success
	ask := drv.PointerGetAttribute
	drv.PointerGetAttribute = func(into unsafe.Pointer, what cu.PointerAttribute, p device.Ptr) cu.Result {
		if result != cu.Success {
			return result
		}
		return ask(into, what, p)
	}
	d, err := cuda.Open(&cuda.Options{Driver: drv})
	require.NoError(t, err)
	p, err := d.Alloc(gpuBlock)
	require.NoError(t, err)
	b := &Backend{device: d}
	require.NoError(t, b.adoptable(p, 100))
	result = cu.IllegalAddress
	err = b.adoptable(p, 100)
	require.ErrorIs(t, err, errs.ErrContextLost)
	require.NotErrorIs(t, err, errs.ErrInvalid)
	result = cu.InvalidValue
	err = b.adoptable(p, 100)
	require.ErrorIs(t, err, errs.ErrInvalid)
	require.ErrorContains(t, err, "cuPointerGetAttribute returned 1")
	result = cu.Success
	require.NoError(t, errors.Join(d.Free(p), d.Close()))
	require.NoError(t, m.Err())
}
