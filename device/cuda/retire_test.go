package cuda_test

import (
	"os"
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

// heldCopy is work of the CPU that copies by the driver's calls before it ends, as libraries do; not before it may.
type heldCopy struct {
	d   *cuda.Device
	to  device.Ptr
	may atomic.Bool
}

func (c *heldCopy) Start() (device.HostProgress, error) { return c, nil }
func (c *heldCopy) Poll() (bool, error) {
	if !c.may.Load() {
		return false, nil
	}
	return true, c.d.CopyFromHost(c.to, make([]byte, 64))
}

// TestAllocFails: memory that could not be filled is freed, at the latest by Close, also where the context for that cannot be made current.
func TestAllocFails(t *testing.T) {
	f := newFake(1)
	drv := f.driver()
	push, fill := drv.CtxPushCurrent, drv.MemsetD8Async
	var fails, broken atomic.Bool
	drv.CtxPushCurrent = func(c cu.ContextHandle) cu.Result {
		if broken.Load() {
			return cu.OperatingSystem
		}
		return push(c)
	}
	drv.MemsetD8Async = func(p device.Ptr, v uint8, n uint64, s cu.StreamHandle) cu.Result {
		if fails.Load() {
			broken.Store(true)
			return cu.Unknown
		}
		return fill(p, v, n, s)
	}
	d, err := cuda.Open(&cuda.Options{Driver: drv})
	require.NoError(t, err)
	fails.Store(true)
	_, err = d.Alloc(4096)
	require.ErrorContains(t, err, "cuMemsetD8Async")
	fails.Store(false)
	broken.Store(false)
	_, err = d.Alloc(64)
	require.NoError(t, err)
	require.NoError(t, d.Close())
	f.assertEmpty(t)
}

// Freeing while a stream waits for work of the CPU holds up neither the caller nor that work, eager and in a graph. A driver's cuMemFree
// waits for the stream, and the copy for the cuMemFree.
func TestFreeWhileStreamsHaveWork(t *testing.T) {
	for _, graph := range []bool{false, true} {
		onEach(t, &cuda.Options{WaitTimeout: 20 * time.Second}, func(t *testing.T, d *cuda.Device) {
			s, other := newStream(t, d), newStream(t, d)
			work := &heldCopy{d: d, to: alloc(t, d, 64)}
			p := alloc(t, d, 3<<20)
			stop, err := d.NewStopWord()
			require.NoError(t, err)
			fault := newFault(t, d)
			if graph {
				require.NoError(t, s.BeginCapture())
			}
			require.NoError(t, s.HostWork(work))
			if graph {
				g, err := s.EndCapture()
				require.NoError(t, err)
				require.NoError(t, g.Launch(s))
			}
			freed := make(chan error, 3)
			go func() {
				time.Sleep(20 * time.Millisecond) // the GPU is in the wait
				freed <- d.Free(p)
				freed <- stop.Close()
				freed <- fault.Close()
			}()
			for range 3 {
				select {
				case err := <-freed:
					require.NoError(t, err)
				case <-time.After(10 * time.Second):
					work.may.Store(true)
					require.FailNow(t, "freeing waits for the stream")
				}
			}
			require.ErrorIs(t, d.Free(p), device.ErrInvalid, "a second Free")
			assert.NotEqual(t, p, alloc(t, d, 3<<20), "memory that the stream may use was given out again")
			// Others go on meanwhile.
			require.NoError(t, other.HostFunc(func() {}))
			synchronize(t, other)
			work.may.Store(true)
			synchronize(t, s)
		})
	}
}

// What was freed while streams had work goes to the driver when they have none, and not before.
func TestFreedMemoryGoesBack(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	holds := func(p device.Ptr) bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.find(p, 1) != nil
	}
	gone := func(p device.Ptr) func() bool { return func() bool { return !holds(p) } }

	p := alloc(t, d, 100)
	require.NoError(t, d.Free(p))
	assert.False(t, holds(p), "without work it goes back at once")

	s := newStream(t, d)
	work := &heldCopy{d: d, to: alloc(t, d, 64)}
	p = alloc(t, d, 100)
	stop, err := d.NewStopWord()
	require.NoError(t, err)
	require.NoError(t, s.HostWork(work))
	require.NoError(t, d.Free(p))
	require.NoError(t, stop.Close())
	time.Sleep(30 * time.Millisecond) // several looks
	assert.True(t, holds(p), "memory was freed that a stream may use")
	assert.True(t, holds(stop.Ptr()), "a stop word was freed that a stream may use")
	work.may.Store(true)
	synchronize(t, s)
	require.Eventually(t, gone(p), patience, time.Millisecond)
	require.Eventually(t, gone(stop.Ptr()), patience, time.Millisecond)

	// And again, by another goroutine than the first time.
	work.may.Store(false)
	p = alloc(t, d, 100)
	require.NoError(t, s.HostWork(work))
	require.NoError(t, d.Free(p))
	work.may.Store(true)
	synchronize(t, s)
	require.Eventually(t, gone(p), patience, time.Millisecond)

	// What a capture has recorded does not keep memory; what its stream had before does.
	work.may.Store(false)
	require.NoError(t, s.HostWork(work))
	require.NoError(t, s.BeginCapture())
	p = alloc(t, d, 100)
	require.NoError(t, d.Free(p))
	assert.True(t, holds(p), "memory was freed that work before the capture may use")
	work.may.Store(true)
	require.Eventually(t, gone(p), patience, time.Millisecond)
	g, err := s.EndCapture()
	require.NoError(t, err)
	require.NoError(t, g.Close())
}

// An allocation that finds no memory waits for what was freed.
func TestAllocWaitsForFreedMemory(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	s := newStream(t, d)
	work := &heldCopy{d: d, to: alloc(t, d, 64)}
	p := alloc(t, d, 100)
	require.NoError(t, s.HostWork(work))
	require.NoError(t, d.Free(p))
	f.failing("cuMemAlloc_v2", cu.OutOfMemory)
	got := make(chan error, 1)
	go func() {
		q, err := d.Alloc(100)
		if err == nil {
			err = d.Free(q)
		}
		got <- err
	}()
	time.Sleep(20 * time.Millisecond)
	select {
	case err := <-got:
		require.FailNow(t, "the allocation did not wait", "%v", err)
	default:
	}
	f.failing("cuMemAlloc_v2", cu.Success)
	work.may.Store(true)
	require.NoError(t, <-got)

	// With nothing to wait for it fails at once.
	synchronize(t, s)
	f.failing("cuMemAlloc_v2", cu.OutOfMemory)
	_, err := d.Alloc(100)
	require.ErrorIs(t, err, device.ErrNoMemory)
	f.failing("cuMemAlloc_v2", cu.Success)
}

// TestAllocWhileMemoryIsFreed: so does one that finds no memory while the driver is freeing some.
func TestAllocWhileMemoryIsFreed(t *testing.T) {
	f := newFake(1)
	drv := f.driver()
	allocate, free := drv.MemAlloc, drv.MemFree
	var full atomic.Bool
	freeing, goOn := make(chan struct{}), make(chan struct{})
	drv.MemAlloc = func(p *device.Ptr, n uint64) cu.Result {
		if full.Load() {
			return cu.OutOfMemory
		}
		return allocate(p, n)
	}
	drv.MemFree = func(p device.Ptr) cu.Result {
		if full.Load() {
			close(freeing)
			<-goOn
			full.Store(false)
		}
		return free(p)
	}
	d, err := cuda.Open(&cuda.Options{Driver: drv})
	require.NoError(t, err)
	s := newStream(t, d)
	work := &heldCopy{d: d, to: alloc(t, d, 64)}
	p := alloc(t, d, 100)
	require.NoError(t, s.HostWork(work))
	require.NoError(t, d.Free(p))
	full.Store(true)
	work.may.Store(true)
	synchronize(t, s)
	<-freeing
	got := make(chan error, 1)
	go func() {
		_, err := d.Alloc(100)
		got <- err
	}()
	time.Sleep(20 * time.Millisecond)
	close(goOn)
	require.NoError(t, <-got)
	require.NoError(t, d.Close())
	f.assertEmpty(t)
}

// A device that is closed while it keeps such memory gives it back.
func TestCloseGivesFreedMemoryBack(t *testing.T) {
	onEach(t, &cuda.Options{WaitTimeout: 20 * time.Second}, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		work := &heldCopy{d: d, to: alloc(t, d, 64)}
		p := alloc(t, d, 100)
		require.NoError(t, s.HostWork(work))
		require.NoError(t, d.Free(p))
		go func() {
			time.Sleep(20 * time.Millisecond)
			work.may.Store(true)
		}()
		_ = d.Close() // the copy may find the device closed
	})
}

// What must not happen while a stream waits for the CPU is done when none does, or when the time for that is over; and meanwhile no stream gets
// work.
func TestBetweenWork(t *testing.T) {
	for _, graph := range []bool{false, true} {
		onEach(t, &cuda.Options{WaitTimeout: 20 * time.Second}, func(t *testing.T, d *cuda.Device) {
			s, other := newStream(t, d), newStream(t, d)
			require.NoError(t, d.BetweenWork(0, func() error { return nil }), "without any work")
			require.ErrorIs(t, d.BetweenWork(time.Minute, func() error { return errGaveUp }), errGaveUp)

			work := &heldCopy{d: d, to: alloc(t, d, 64)}
			if graph {
				require.NoError(t, s.BeginCapture())
			}
			require.NoError(t, s.HostWork(work))
			if graph {
				g, err := s.EndCapture()
				require.NoError(t, err)
				require.NoError(t, g.Launch(s))
			}
			called := false
			require.NoError(t, d.BetweenWork(20*time.Millisecond, func() error { called = true; return nil }))
			require.True(t, called, "after its time")

			var ended atomic.Bool
			inside, returned := make(chan struct{}), make(chan error, 1)
			go func() {
				returned <- d.BetweenWork(patience, func() error {
					if !ended.Load() {
						return errGaveUp
					}
					close(inside)
					time.Sleep(30 * time.Millisecond)
					ended.Store(false)
					return nil
				})
			}()
			time.Sleep(20 * time.Millisecond)
			ended.Store(true)
			work.may.Store(true)
			synchronized := make(chan error, 1)
			go func() { synchronized <- s.Synchronize(bounded(t)) }() // the simulated driver goes on when it is asked
			<-inside
			// It waits until the call has returned.
			require.NoError(t, other.HostFunc(func() {}))
			require.False(t, ended.Load(), "a stream got work meanwhile")
			require.NoError(t, <-returned)
			require.NoError(t, <-synchronized)
			synchronize(t, other)
		})
	}
	d := openFake(t, newFake(1), nil)
	require.NoError(t, d.Close())
	require.ErrorIs(t, d.BetweenWork(0, func() error { return nil }), device.ErrClosed)
}

// TestLoadingBetweenWork: what loads and unloads kernels calls the driver when no stream has work of the CPU, since the driver may wait for what the GPU has under way, and the work
// of the CPU that the GPU waits for would wait for the driver. Where there is no such moment, it calls after its time.
func TestLoadingBetweenWork(t *testing.T) {
	f := newFake(1)
	drv := f.driver()
	load, get, unload := drv.ModuleLoadDataEx, drv.ModuleGetFunction, drv.ModuleUnload
	var work *heldCopy
	var early atomic.Int32 // calls beside work
	look := func() {
		if !work.may.Load() {
			early.Add(1)
		}
	}
	drv.ModuleLoadDataEx = func(m *cu.ModuleHandle, image unsafe.Pointer, n uint32, options *cu.JITOption, values *uintptr) cu.Result {
		look()
		return load(m, image, n, options, values)
	}
	drv.ModuleGetFunction = func(h *cu.FunctionHandle, m cu.ModuleHandle, name string) cu.Result {
		look()
		return get(h, m, name)
	}
	drv.ModuleUnload = func(m cu.ModuleHandle) cu.Result {
		look()
		return unload(m)
	}
	d, err := cuda.Open(&cuda.Options{Driver: drv, WaitTimeout: 20 * time.Second})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	s, to := newStream(t, d), alloc(t, d, 64)
	var m device.Module
	for _, step := range []struct {
		name string
		call func() error
	}{
		{"loading", func() (err error) { m, err = d.LoadModule([]byte(ptx)); return err }},
		{"asking for a kernel", func() error { _, err := m.Function("kernel"); return err }},
		{"unloading", func() error { return m.Close() }},
	} {
		work = &heldCopy{d: d, to: to}
		require.NoError(t, s.HostWork(work))
		returned := make(chan error, 1)
		go func() { returned <- step.call() }()
		time.Sleep(50 * time.Millisecond)
		require.Zero(t, early.Load(), step.name)
		work.may.Store(true)
		synchronize(t, s)
		require.NoError(t, <-returned, step.name)
		require.Zero(t, early.Load(), step.name)
	}
	work = &heldCopy{d: d, to: to}
	require.NoError(t, s.HostWork(work))
	m, err = d.LoadModule([]byte(ptx))
	require.NoError(t, err, "work that does not end")
	require.Equal(t, int32(1), early.Load())
	work.may.Store(true)
	synchronize(t, s)
	require.NoError(t, m.Close())
}

// TestLoadingOneKernelBetweenWork: the driver loads a kernel in a call of its own, and a stream gets no work of the CPU before that either.
func TestLoadingOneKernelBetweenWork(t *testing.T) {
	f := newFake(1)
	drv := f.driver()
	var s *cuda.Stream
	work := &heldCopy{}
	enqueued := make(chan error, 1)
	get := drv.ModuleGetFunction
	drv.ModuleGetFunction = func(h *cu.FunctionHandle, m cu.ModuleHandle, name string) cu.Result {
		go func() { enqueued <- s.HostWork(work) }()
		return get(h, m, name)
	}
	early := false
	drv.FuncLoad = func(cu.FunctionHandle) cu.Result {
		select {
		case err := <-enqueued:
			early = true
			enqueued <- err
		case <-time.After(50 * time.Millisecond):
		}
		return cu.Success
	}
	d, err := cuda.Open(&cuda.Options{Driver: drv, WaitTimeout: 20 * time.Second})
	require.NoError(t, err)
	closeInTheEnd(t, d)
	s, work.d, work.to = newStream(t, d), d, alloc(t, d, 64)
	m, err := d.LoadModule([]byte(ptx))
	require.NoError(t, err)
	_, err = m.Function("kernel")
	require.NoError(t, err)
	require.False(t, early, "the driver loads beside work of the CPU")
	require.NoError(t, <-enqueued)
	work.may.Store(true)
	synchronize(t, s)
}

// TestFreedBehindAClosedStream: a stream that was closed while the GPU worked for it keeps freed memory, and what the device holds, for as long as the GPU does, and no longer.
func TestFreedBehindAClosedStream(t *testing.T) {
	for _, test := range []struct {
		name        string
		free, ended bool
	}{{"freed", true, true}, {"not freed", false, true}, {"still at work", true, false}} {
		t.Run(test.name, func(t *testing.T) {
			f := newFake(1)
			d := openFake(t, f, &cuda.Options{WaitTimeout: 50 * time.Millisecond})
			s := newStream(t, d)
			p := alloc(t, d, 100)
			holds := func() bool {
				f.mu.Lock()
				defer f.mu.Unlock()
				return f.find(p, 1) != nil
			}
			var ended atomic.Bool
			f.mu.Lock()
			f.enqueue(cu.StreamHandle(s.Handle()), ended.Load)
			f.mu.Unlock()
			require.ErrorIs(t, s.Close(), os.ErrDeadlineExceeded)
			if test.free {
				require.NoError(t, d.Free(p))
				time.Sleep(30 * time.Millisecond) // several looks
				require.True(t, holds(), "memory was freed that the GPU may use")
			}
			if !test.ended {
				require.ErrorContains(t, d.Close(), "not given back")
				require.True(t, holds())
				return
			}
			ended.Store(true)
			if test.free {
				require.Eventually(t, func() bool { return !holds() }, 10*time.Second, time.Millisecond)
				require.Zero(t, d.Stats().Streams)
			}
			require.NoError(t, d.Close())
			f.assertEmpty(t)
		})
	}
}

// Memory goes back when a copy has ended that outlasted its call, and not before: neither by Free nor by Close.
func TestFreeUnderACopyThatHasFailed(t *testing.T) {
	f := newFake(1)
	drv := f.driver()
	var held atomic.Bool
	in := drv.MemcpyHtoDAsync
	drv.MemcpyHtoDAsync = func(dst device.Ptr, src unsafe.Pointer, n uint64, s cu.StreamHandle) cu.Result {
		f.mu.Lock()
		f.enqueue(s, func() bool { return !held.Load() })
		f.mu.Unlock()
		return in(dst, src, n, s)
	}
	var looks atomic.Int32 // after so many the copy ends
	query := drv.StreamQuery
	drv.StreamQuery = func(s cu.StreamHandle) cu.Result {
		if looks.Add(-1) == 0 {
			held.Store(false)
		}
		return query(s)
	}
	open := func() *cuda.Device {
		t.Helper()
		d, err := cuda.Open(&cuda.Options{Driver: drv, WaitTimeout: 50 * time.Millisecond})
		require.NoError(t, err)
		closeInTheEnd(t, d)
		return d
	}
	holds := func(p device.Ptr) bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.find(p, 1) != nil
	}
	data := make([]byte, 100)

	d := open()
	p := alloc(t, d, 100)
	stop, err := d.NewStopWord()
	require.NoError(t, err)
	held.Store(true)
	require.ErrorIs(t, d.CopyFromHost(p, data), os.ErrDeadlineExceeded)
	require.NoError(t, d.Free(p))
	require.NoError(t, stop.Close())
	time.Sleep(20 * time.Millisecond) // several looks
	assert.True(t, holds(p), "memory was freed that a copy writes")
	assert.True(t, holds(stop.Ptr()))
	held.Store(false)
	require.Eventually(t, func() bool { return !holds(p) && !holds(stop.Ptr()) }, patience, time.Millisecond)
	p = alloc(t, d, 100)
	require.NoError(t, d.CopyFromHost(p, data))
	require.NoError(t, d.Free(p))
	assert.False(t, holds(p), "it goes back at once again")

	// Where the driver does not say whether the copy has ended, it may be under way; where the context is lost, it is not.
	p = alloc(t, d, 100)
	held.Store(true)
	require.ErrorIs(t, d.CopyFromHost(p, data), os.ErrDeadlineExceeded)
	f.failing("cuStreamQuery", cu.Unknown)
	require.NoError(t, d.Free(p))
	assert.True(t, holds(p))
	f.failing("cuStreamQuery", cu.IllegalAddress)
	require.Eventually(t, func() bool { return !holds(p) }, patience, time.Millisecond)
	f.failing("cuStreamQuery", cu.Success)
	held.Store(false)
	require.NoError(t, d.Close())
	f.assertEmpty(t)

	d = open()
	p = alloc(t, d, 100)
	held.Store(true)
	require.ErrorIs(t, d.CopyFromHost(p, data), os.ErrDeadlineExceeded)
	require.ErrorContains(t, d.Close(), "not given back")
	assert.True(t, holds(p), "memory was freed that a copy writes")

	held.Store(false)
	d = open()
	p = alloc(t, d, 100)
	held.Store(true)
	require.ErrorIs(t, d.CopyFromHost(p, data), os.ErrDeadlineExceeded)
	looks.Store(3)
	require.NoError(t, d.Close(), "it waits for the copy")
	assert.False(t, holds(p))
}

// TestContextLostBehindAFailedCopy: a context that is lost after a copy has outlasted its call is told by the calls that come then, and by Close, which gives the copy's buffers back.
func TestContextLostBehindAFailedCopy(t *testing.T) {
	f := newFake(1)
	drv := f.driver()
	in := drv.MemcpyHtoDAsync
	drv.MemcpyHtoDAsync = func(dst device.Ptr, src unsafe.Pointer, n uint64, s cu.StreamHandle) cu.Result {
		f.mu.Lock()
		f.enqueue(s, func() bool { return false })
		f.mu.Unlock()
		return in(dst, src, n, s)
	}
	d, err := cuda.Open(&cuda.Options{Driver: drv, WaitTimeout: 50 * time.Millisecond})
	require.NoError(t, err)
	p := alloc(t, d, 100)
	err = d.CopyFromHost(p, make([]byte, 100))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NotErrorIs(t, err, cuda.ErrContextLost)
	f.failing("cuStreamQuery", cu.IllegalAddress)
	for range 2 {
		_, err = d.Alloc(100)
		require.ErrorIs(t, err, cuda.ErrContextLost)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded, "what was first")
	}
	require.NoError(t, d.Close())
	f.mu.Lock()
	defer f.mu.Unlock()
	assert.Empty(t, f.mem)
}

// TestBetweenWorkOfCopies: a graph may have several copies of another one, and the work of the CPU in each is still to come until the last has run.
func TestBetweenWorkOfCopies(t *testing.T) {
	onEach(t, &cuda.Options{WaitTimeout: 20 * time.Second}, func(t *testing.T, d *cuda.Device) {
		s, gate := newStream(t, d), alloc(t, d, 4)
		var runs atomic.Int32
		inner := capture(t, s, func() { require.NoError(t, s.HostWork(&jobOf{start: func() error { runs.Add(1); return nil }})) })
		twice := capture(t, s, func() {
			require.NoError(t, inner.Launch(s))
			require.NoError(t, inner.Launch(s))
		})
		outer := capture(t, s, func() {
			require.NoError(t, twice.Launch(s))
			require.NoError(t, s.WaitValue32(gate, 1))
			require.NoError(t, twice.Launch(s))
		})
		require.NoError(t, outer.Launch(s))
		synchronized := make(chan error, 1)
		go func() { synchronized <- s.Synchronize(bounded(t)) }()
		require.Eventually(t, func() bool { return runs.Load() == 2 }, patience, time.Millisecond)
		time.Sleep(20 * time.Millisecond)
		returned := make(chan error, 1)
		go func() {
			returned <- d.BetweenWork(patience, func() error {
				if runs.Load() < 4 {
					return errGaveUp
				}
				return nil
			})
		}()
		time.Sleep(20 * time.Millisecond)
		require.NoError(t, d.CopyFromHost(gate, []byte{1, 0, 0, 0}))
		require.NoError(t, <-synchronized)
		require.NoError(t, <-returned, "work of the CPU was still to come")
		require.NoError(t, outer.Close())
		require.NoError(t, twice.Close())
		require.NoError(t, inner.Close())
	})
}

// TestAllocBesideALostStream: an allocation that finds no memory does not wait longer than its time for memory that was freed, though a stream that was closed may use that
// and nothing tells when its work has ended.
func TestAllocBesideALostStream(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, &cuda.Options{WaitTimeout: 50 * time.Millisecond})
	s, err := d.NewStream()
	require.NoError(t, err)
	p := alloc(t, d, 100)
	var held atomic.Bool
	held.Store(true)
	f.mu.Lock()
	f.enqueue(cu.StreamHandle(s.(*cuda.Stream).Handle()), func() bool { return !held.Load() })
	f.mu.Unlock()
	f.failing("cuEventRecord", cu.InvalidValue)
	require.Error(t, s.Close())
	f.failing("cuEventRecord", cu.Success)
	require.NoError(t, d.Free(p))
	f.failing("cuMemAlloc_v2", cu.OutOfMemory)
	returned := make(chan error, 1)
	f.mu.Lock()
	clear(f.calls)
	f.mu.Unlock()
	go func() {
		_, err := d.Alloc(100)
		returned <- err
	}()
	select {
	case err := <-returned:
		require.ErrorIs(t, err, device.ErrNoMemory)
		f.mu.Lock()
		calls := f.calls["cuCtxPushCurrent_v2"]
		f.mu.Unlock()
		require.Less(t, calls, 2000, "it looks without pause")
	case <-time.After(20 * time.Second):
		require.FailNow(t, "it waits without end")
	}
	held.Store(false)
	require.NotErrorIs(t, d.Close(), device.ErrClosed) // which says that the stream may still work
}
