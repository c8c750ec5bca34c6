package cuda_test

import (
	"errors"
	"maps"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
)

// sharedFake is a fake driver that counts what is given back to it while a stream has work: a real one would wait.
type sharedFake struct {
	*fake
	early atomic.Int32
}

// open opens a device with a table of its own, as each rank does.
func (f *sharedFake) open(t *testing.T, opts *cuda.Options) *cuda.Device {
	t.Helper()
	o := *opts
	o.Driver = f.driver()
	look := func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.progress()
		for _, s := range append(slices.Collect(maps.Values(f.streams)), f.leaving...) {
			if len(s.queue) > 0 {
				f.early.Add(1)
			}
		}
	}
	free, freeHost, unload := o.Driver.MemFree, o.Driver.MemFreeHost, o.Driver.ModuleUnload
	o.Driver.MemFree = func(p device.Ptr) cu.Result { look(); return free(p) }
	o.Driver.MemFreeHost = func(p unsafe.Pointer) cu.Result { look(); return freeHost(p) }
	o.Driver.ModuleUnload = func(m cu.ModuleHandle) cu.Result { look(); return unload(m) }
	d, err := cuda.Open(&o)
	require.NoError(t, err)
	closeInTheEnd(t, d)
	return d
}

// hold keeps a stream at work until what it returns is called.
func (f *sharedFake) hold(s *cuda.Stream) (release func()) {
	var over atomic.Bool
	f.mu.Lock()
	defer f.mu.Unlock()
	f.enqueue(cu.StreamHandle(s.Handle()), over.Load)
	return func() { over.Store(true) }
}

func (f *sharedFake) holds(p device.Ptr) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.find(p, 1) != nil
}

// TestFreeBesideAnotherDevice: devices of two ranks on one GPU have one context, and the driver frees when nothing in that has work. So what one device frees waits for the streams of
// the other.
func TestFreeBesideAnotherDevice(t *testing.T) {
	f := &sharedFake{fake: newFake(1)}
	d, other := f.open(t, &cuda.Options{}), f.open(t, &cuda.Options{})
	newStream(t, d)
	busy := newStream(t, other)
	p := alloc(t, d, 100)
	stop, err := d.NewStopWord()
	require.NoError(t, err)
	release := f.hold(busy)
	require.NoError(t, d.Free(p))
	require.NoError(t, stop.Close())
	time.Sleep(30 * time.Millisecond) // several looks
	assert.True(t, f.holds(p))
	assert.True(t, f.holds(stop.Ptr()))
	assert.Zero(t, f.early.Load(), "the driver was asked to free beside the work of the other device")
	release()
	require.Eventually(t, func() bool { return !f.holds(p) && !f.holds(stop.Ptr()) }, patience, time.Millisecond)

	p = alloc(t, d, 100)
	require.NoError(t, d.Free(p))
	assert.False(t, f.holds(p), "without work it goes back at once")
	require.NoError(t, d.Close())
	require.NoError(t, other.Close())
	assert.Zero(t, f.early.Load())
	f.assertEmpty(t)
}

// TestLoadingBesideAnotherDevice: nor are kernels loaded and unloaded beside work of the CPU of the other device.
func TestLoadingBesideAnotherDevice(t *testing.T) {
	f := &sharedFake{fake: newFake(1)}
	d, other := f.open(t, &cuda.Options{}), f.open(t, &cuda.Options{})
	busy := newStream(t, other)
	m, err := d.LoadModule([]byte(ptx))
	require.NoError(t, err)
	work := &heldCopy{d: other, to: alloc(t, other, 64)}
	require.NoError(t, busy.HostWork(work))
	closed := make(chan error, 1)
	go func() { closed <- m.Close() }()
	time.Sleep(50 * time.Millisecond)
	assert.Zero(t, f.early.Load())
	work.may.Store(true)
	synchronize(t, busy)
	require.NoError(t, <-closed)
	assert.Zero(t, f.early.Load())
}

// TestBetweenWorkOfAnotherDevice: what must not happen while a stream waits for the CPU is not done beside such work of the other device either. That is not kept from work meanwhile: it
// may be what the call waits for.
func TestBetweenWorkOfAnotherDevice(t *testing.T) {
	f := &sharedFake{fake: newFake(1)}
	d, other := f.open(t, &cuda.Options{}), f.open(t, &cuda.Options{})
	busy := newStream(t, other)
	work := &heldCopy{d: other, to: alloc(t, other, 64)}
	require.NoError(t, busy.HostWork(work))
	returned := make(chan error, 1)
	go func() {
		returned <- d.BetweenWork(patience, func() error {
			if !work.may.Load() {
				return errGaveUp
			}
			enqueued := make(chan error, 1)
			go func() { enqueued <- busy.Fill(work.to, 1, 64) }()
			select {
			case err := <-enqueued:
				return err
			case <-time.After(10 * time.Second):
				return os.ErrDeadlineExceeded
			}
		})
	}()
	time.Sleep(50 * time.Millisecond)
	work.may.Store(true)
	synchronize(t, busy)
	require.NoError(t, <-returned)
	synchronize(t, busy)
}

// TestCloseBesideAnotherDevice: a device that is closed leaves what it held to the other one, whose work it would wait for.
func TestCloseBesideAnotherDevice(t *testing.T) {
	f := &sharedFake{fake: newFake(1)}
	d, other := f.open(t, &cuda.Options{}), f.open(t, &cuda.Options{})
	newStream(t, d)
	busy := newStream(t, other)
	p := alloc(t, d, 100)
	require.NoError(t, d.CopyFromHost(p, make([]byte, 100)))
	_, err := d.LoadModule([]byte(ptx))
	require.NoError(t, err)
	release := f.hold(busy)
	require.NoError(t, d.Close())
	assert.True(t, f.holds(p))
	assert.Zero(t, f.early.Load(), "the driver was asked to free beside the work of the other device")
	release()
	require.Eventually(t, func() bool { return !f.holds(p) }, patience, time.Millisecond)

	// Where the other one is closed before it has come to that, it gives it back then.
	third := f.open(t, &cuda.Options{})
	p = alloc(t, third, 100)
	release = f.hold(busy)
	require.NoError(t, third.Close())
	assert.True(t, f.holds(p))
	release()
	require.NoError(t, other.Close())
	assert.Zero(t, f.early.Load())
	f.assertEmpty(t)
}

// TestBesideADeviceWithWorkLeft: a device that was closed with work in it keeps what others on the context free for as long as that lasts, and no longer.
func TestBesideADeviceWithWorkLeft(t *testing.T) {
	f := &sharedFake{fake: newFake(1)}
	d, other := f.open(t, &cuda.Options{}), f.open(t, &cuda.Options{WaitTimeout: 50 * time.Millisecond})
	release := f.hold(newStream(t, other))
	require.ErrorIs(t, other.Close(), os.ErrDeadlineExceeded)
	p := alloc(t, d, 100)
	require.NoError(t, d.Free(p))
	time.Sleep(30 * time.Millisecond)
	assert.True(t, f.holds(p))
	assert.Zero(t, f.early.Load(), "the driver was asked to free beside the work that was left")
	release()
	require.Eventually(t, func() bool { return !f.holds(p) }, patience, time.Millisecond)
	p = alloc(t, d, 100)
	require.NoError(t, d.Free(p))
	assert.False(t, f.holds(p))

	// Where it lasts until the last device is closed, that says what is not given back.
	third := f.open(t, &cuda.Options{WaitTimeout: 50 * time.Millisecond})
	release = f.hold(newStream(t, third))
	require.ErrorIs(t, third.Close(), os.ErrDeadlineExceeded)
	alloc(t, d, 100)
	require.ErrorContains(t, d.Close(), "another device on the GPU was closed with work in it")
	assert.Zero(t, f.early.Load())
	release()
}

// TestPinnedMemoryThatTheDeviceDoesNotReach: pinned memory that came to nothing is freed when no stream has work, as all other.
func TestPinnedMemoryThatTheDeviceDoesNotReach(t *testing.T) {
	f := &sharedFake{fake: newFake(1)}
	d := f.open(t, &cuda.Options{})
	release := f.hold(newStream(t, d))
	f.failing("cuMemHostGetDevicePointer_v2", cu.NotSupported)
	_, err := d.NewHostBuffer(100)
	var failed *cuda.Error
	require.True(t, errors.As(err, &failed))
	require.Equal(t, int(cu.NotSupported), failed.Code)
	assert.Zero(t, f.early.Load(), "the driver was asked to free beside work")
	f.failing("cuMemHostGetDevicePointer_v2", cu.Success)
	release()
	require.NoError(t, d.Close())
	f.assertEmpty(t)
}
