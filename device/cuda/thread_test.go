package cuda_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	cu "github.com/symmem/symmem/internal/cuda"
)

// TestThread: a thread has the context for all calls until it is closed, whatever becomes of a call.
func TestThread(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	pushes := func() int {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.calls["cuCtxPushCurrent_v2"]
	}
	before := pushes()
	th, err := d.NewThread()
	require.NoError(t, err)
	ours := errors.New("ours")
	for range 3 {
		require.Equal(t, ours, th.Do(func() error {
			f.mu.Lock()
			defer f.mu.Unlock()
			assert.Equal(t, 1, f.pushed)
			return ours
		}))
	}
	assert.Equal(t, before+1, pushes())
	th.Close()
	f.mu.Lock()
	assert.Zero(t, f.pushed, "Close waits for a thread without a call")
	f.mu.Unlock()
	require.ErrorIs(t, th.Do(func() error { t.Error("a closed thread has called it"); return nil }), device.ErrClosed)

	// One with a call that has not returned is not waited for. A second call has not begun.
	th, err = d.NewThread()
	require.NoError(t, err)
	begun, end, ended := make(chan struct{}), make(chan struct{}), make(chan error)
	go func() { ended <- th.Do(func() error { close(begun); <-end; return ours }) }()
	<-begun
	second := make(chan error)
	go func() { second <- th.Do(func() error { t.Error("it has begun"); return nil }) }()
	th.Close()
	require.ErrorIs(t, <-second, device.ErrClosed)
	close(end)
	require.Equal(t, ours, <-ended)
	require.NoError(t, d.Close(), "which waits for the thread")
	_, err = d.NewThread()
	require.ErrorIs(t, err, device.ErrClosed)
}

// TestThreadFails: whose context cannot be made current has no thread.
func TestThreadFails(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	f.failing("cuCtxPushCurrent_v2", cu.OperatingSystem)
	_, err := d.NewThread()
	f.failing("cuCtxPushCurrent_v2", cu.Success)
	require.ErrorContains(t, err, "cuCtxPushCurrent returned 304")
}
