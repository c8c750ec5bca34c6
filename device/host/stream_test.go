package host_test

import (
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/host"
)

// ptrOf returns the address of b, for memory that a device knows by Map.
func ptrOf(b []byte) device.Ptr { return device.Ptr(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// A peer's kernel writes words of memory without any call of the device.
func TestWaitValueSeesWhatOthersStore(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	p := alloc(t, d, 4)
	mem, err := d.Bytes(p, 4)
	require.NoError(t, err)
	word := (*atomic.Uint32)(unsafe.Pointer(&mem[0]))
	var after counter
	require.NoError(t, s.WaitValue32(p, 5))
	require.NoError(t, s.Launch(&after))
	word.Store(4)
	time.Sleep(10 * time.Millisecond)
	assert.Zero(t, after.runs.Load())
	word.Store(6)
	synchronize(t, s)
	assert.EqualValues(t, 1, after.runs.Load())
}

// Each of the ten could wait for half a second; Close gives them half a second together, and counts them all.
func TestCloseGivesAllWaitsOneTimeout(t *testing.T) {
	d := open(t, &host.Options{WaitTimeout: 500 * time.Millisecond})
	s := newStream(t, d)
	p := alloc(t, d, 4)
	for range 10 {
		require.NoError(t, s.WaitValue32(p, 1))
	}
	err := s.Close()
	var work *device.WorkError
	require.ErrorAs(t, err, &work)
	assert.Equal(t, 9, work.More)
	assert.Zero(t, d.Stats().Streams)
}

func TestDeviceCloseForgetsMappings(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	mem := make([]byte, 128)
	p, err := d.Map(mem)
	require.NoError(t, err)
	require.NoError(t, d.CopyFromHost(p, []byte{7}))
	require.NoError(t, d.Close())
	assert.Equal(t, host.Stats{}, d.Stats())
	_, mapErr := d.Map(make([]byte, 1))
	_, bytesErr := d.Bytes(p, 1)
	for i, err := range []error{mapErr, bytesErr, d.Unmap(p), s.Copy(p, p, 1)} {
		assert.ErrorIs(t, err, device.ErrClosed, "call %d", i)
	}
	assert.Equal(t, byte(7), mem[0], "the memory stays the caller's")
}
