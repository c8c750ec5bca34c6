package tensor

import (
	"reflect"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// far is a device whose memory the CPU cannot address.
type far struct{ device.Device }

func (far) Name() string { return "a GPU" }

// near is a device whose memory is a piece of this process's.
type near struct {
	device.Device
	memory []uint64
}

func (d near) base() device.Ptr {
	return device.Ptr(uintptr(unsafe.Pointer(unsafe.SliceData(d.memory))))
}

func (d near) Bytes(p device.Ptr, n int64) ([]byte, error) {
	all := bytesOf(d.memory)
	at := int64(p - d.base())
	if at < 0 || n > int64(len(all))-at {
		return nil, errs.Invalid("Bytes", "p", p, "an address of the device")
	}
	return all[at:][:n:n], nil
}

func viewOn(d device.Device, p device.Ptr, dtype DType, shape ...int64) *View {
	return newView(d, p, "ledger", dtype, shape, func() error { return nil })
}

func TestHostSliceNeedsAddresses(t *testing.T) {
	for _, shape := range []Shape{{4}, {0}} { // what has no elements is refused alike
		_, err := HostSlice[float32](viewOn(far{}, 4096, Float32, shape...))
		require.ErrorIs(t, err, errs.ErrUnsupported)
		require.ErrorContains(t, err, `tensor "ledger": HostSlice: the CPU cannot address memory of a GPU; copy with Read and Write`)
	}
}

func TestHostSliceIsTheMemory(t *testing.T) {
	d := near{memory: make([]uint64, 8)}
	s, err := HostSlice[int32](viewOn(d, d.base().Add(4), Int32, 3, 2))
	require.NoError(t, err)
	require.Len(t, s, 6)
	require.Equal(t, 6, cap(s), "there is no room to append in place")
	s[0], s[5] = 0x11223344, 0x55667788
	require.Equal(t, []int32{0, 0x11223344, 0, 0, 0, 0, 0x55667788, 0}, unsafe.Slice((*int32)(unsafe.Pointer(&d.memory[0])), 8))

	scalar, err := HostSlice[int32](viewOn(d, d.base().Add(24), Int32))
	require.NoError(t, err)
	require.Equal(t, []int32{0x55667788}, scalar)

	_, err = HostSlice[int32](viewOn(d, d.base().Add(60), Int32, 2))
	require.ErrorIs(t, err, errs.ErrInvalid, "what the device does not know")
}

// TestHostSliceAlignment: Go's loads and stores need aligned addresses.
func TestHostSliceAlignment(t *testing.T) {
	d := near{memory: make([]uint64, 8)}
	for at := range int64(8) {
		_, err := HostSlice[uint64](viewOn(d, d.base().Add(at), Uint64, 2))
		require.Equal(t, at == 0, err == nil, "8 bytes each from byte %d", at)
		if err != nil {
			require.ErrorIs(t, err, errs.ErrInvalid)
			require.ErrorContains(t, err, "a multiple of 8 bytes")
		}
		_, err = HostSlice[BF16](viewOn(d, d.base().Add(at), BFloat16, 2))
		require.Equal(t, at%2 == 0, err == nil, "2 bytes each from byte %d", at)
		_, err = HostSlice[uint8](viewOn(d, d.base().Add(at), Uint8, 2))
		require.NoError(t, err)
	}
}

// TestHostSliceGaps: the copies of several ranks, each 2 elements of 3 apart.
func TestHostSliceGaps(t *testing.T) {
	d := near{memory: make([]uint64, 12)}
	for _, c := range []struct {
		shape Shape
		gaps  bool
	}{{Shape{3, 2}, true}, {Shape{2, 2, 1}, true}, {Shape{1, 2}, false}, {Shape{0, 2}, false}, {Shape{3, 0}, false}} {
		v := viewOn(d, d.base(), Uint64, c.shape...)
		v.strides[0] = 3
		_, err := HostSlice[uint64](v)
		require.Equal(t, c.gaps, err != nil, "%v", c.shape)
		if c.gaps {
			require.ErrorIs(t, err, errs.ErrInvalid)
			require.ErrorContains(t, err, "3 elements from row to row")
			part, err := v.Index(1)
			require.NoError(t, err)
			s, err := HostSlice[uint64](part)
			require.NoError(t, err)
			s[0] = 7
			require.Equal(t, uint64(7), d.memory[3])
			d.memory[3] = 0
		}
	}
}

// TestZeroValues: what was never made is refused, and does not crash.
func TestZeroValues(t *testing.T) {
	require.ErrorIs(t, new(Tensor).Err(), errs.ErrInvalid)
	_, _, err := new(Tensor).Window()
	require.ErrorIs(t, err, errs.ErrInvalid)
	require.ErrorIs(t, Read(new(View), make([]float32, 1), 0), errs.ErrInvalid)
	require.ErrorIs(t, Write(new(View), make([]float32, 1), 0), errs.ErrInvalid)
	_, err = ReadAll[float32](new(View))
	require.ErrorIs(t, err, errs.ErrInvalid)
	_, err = PrepareTransfer(1, 0, Pair{new(Tensor), new(Tensor)})
	require.ErrorIs(t, err, errs.ErrInvalid)
	require.ErrorIs(t, new(Tensor).Rendezvous(t.Context()), errs.ErrInvalid)
	require.ErrorIs(t, new(Tensor).EnableMulticast(t.Context()), errs.ErrInvalid)
	require.ErrorIs(t, new(Tensor).Close(t.Context()), errs.ErrInvalid)
	require.ErrorIs(t, new(Tensor).Err(), errs.ErrInvalid, "after Close, too")
	require.Equal(t, "no tensor", new(Tensor).String())
}

// TestReadAllRefusesFirst: what cannot be read is refused before there is room made for it, of which there may not be so much.
func TestReadAllRefusesFirst(t *testing.T) {
	_, err := ReadAll[float64](viewOn(far{}, 4096, Uint8, 1<<60))
	require.ErrorIs(t, err, errs.ErrInvalid)
	closed := viewOn(far{}, 4096, Float64, 1<<57)
	closed.alive = func() error { return errs.ErrClosed }
	_, err = ReadAll[float64](closed)
	require.ErrorIs(t, err, errs.ErrClosed)
}

// TestInterfaceHasEveryMethod: a slice is a SymmetricTensor, and has all that a Tensor has; other packages make none.
func TestInterfaceHasEveryMethod(t *testing.T) {
	symmetric, whole := reflect.TypeFor[SymmetricTensor](), reflect.TypeFor[*Tensor]()
	for i := range whole.NumMethod() {
		_, has := symmetric.MethodByName(whole.Method(i).Name)
		require.True(t, has, "SymmetricTensor has no %s", whole.Method(i).Name)
	}
	sealed := 0
	for i := range symmetric.NumMethod() {
		if !symmetric.Method(i).IsExported() {
			sealed++
		}
	}
	require.Equal(t, 1, sealed, "other packages may implement SymmetricTensor, so it cannot grow")
}
