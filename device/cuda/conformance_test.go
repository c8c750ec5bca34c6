package cuda_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/device/devicetest"
	cu "github.com/symmem/symmem/internal/cuda"
	"github.com/symmem/symmem/internal/errs"
)

func TestConformance(t *testing.T) {
	h := devicetest.Harness{
		Other: func(t testing.TB) device.Device { return openFake(t, newFake(1), nil) },
		Held: func(d device.Device) devicetest.Held {
			s := d.(*cuda.Device).Stats()
			return devicetest.Held{
				Streams: s.Streams, Events: s.Events, Graphs: s.Graphs, Allocations: s.Allocations, Bytes: s.Bytes,
				Other: s.Modules + s.FaultWords + s.StopWords + s.HostFuncs,
			}
		},
		NilStream:  (*cuda.Stream)(nil),
		NilEvent:   (*cuda.Event)(nil),
		Slack:      time.Millisecond,
		Resolution: 2 * time.Microsecond,
	}
	t.Run("fake", func(t *testing.T) {
		h := h
		h.Open = func(t testing.TB, o devicetest.Options) device.Device {
			f := newFake(1)
			t.Cleanup(func() { f.assertEmpty(t) }) // when the device is closed
			return openFake(t, f, &cuda.Options{WaitTimeout: o.WaitTimeout, Err: o.Err})
		}
		h.Allocates = []string{"all"} // the fake itself does
		devicetest.Run(t, h)
	})
	// Host functions are work of the CPU once there was some.
	t.Run("fake with work of the CPU", func(t *testing.T) {
		h := h
		h.Open = func(t testing.TB, o devicetest.Options) device.Device {
			f := newFake(1)
			t.Cleanup(func() { f.assertEmpty(t) })
			return served(t, openFake(t, f, &cuda.Options{WaitTimeout: o.WaitTimeout, Err: o.Err}))
		}
		h.Allocates = []string{"all"}
		devicetest.Run(t, h)
	})
	t.Run("gpu", func(t *testing.T) {
		open(t, nil) // or the test ends here; and while it is open the context stays
		h := h
		h.Open = func(t testing.TB, o devicetest.Options) device.Device {
			return open(t, &cuda.Options{WaitTimeout: o.WaitTimeout, Err: o.Err})
		}
		h.Allocates = []string{"HostFunc", "WaitValue32", "nested Graph.Launch"}
		devicetest.Run(t, h)
	})
	t.Run("gpu with work of the CPU", func(t *testing.T) {
		open(t, nil)
		h := h
		h.Open = func(t testing.TB, o devicetest.Options) device.Device {
			return served(t, open(t, &cuda.Options{WaitTimeout: o.WaitTimeout, Err: o.Err}))
		}
		h.Allocates = []string{"HostFunc", "WaitValue32", "nested Graph.Launch"}
		devicetest.Run(t, h)
	})
}

// served returns the device after it has done work of the CPU.
func served(t testing.TB, d *cuda.Device) *cuda.Device {
	s := newStream(t, d)
	work := &heldCopy{d: d, to: alloc(t, d, 64)}
	work.may.Store(true)
	require.NoError(t, s.HostWork(work))
	synchronize(t, s)
	require.NoError(t, s.Close())
	require.NoError(t, d.Free(work.to))
	return d
}

// Many host functions that have yet to run hold up neither the caller nor copies to other places of the device that work of the CPU makes.
func TestManyHostFuncsBehindWork(t *testing.T) {
	onEach(t, &cuda.Options{WaitTimeout: 20 * time.Second}, func(t *testing.T, d *cuda.Device) {
		served(t, d)
		s := newStream(t, d)
		work := &heldCopy{d: d, to: alloc(t, d, 64)}
		var ran atomic.Int32
		require.NoError(t, s.HostWork(work))
		enqueued := make(chan error, 1)
		go func() {
			var err error
			for range 400 {
				err = errors.Join(err, s.HostFunc(func() { ran.Add(1) }))
			}
			enqueued <- err
		}()
		select {
		case err := <-enqueued:
			require.NoError(t, err)
		case <-time.After(10 * time.Second):
			require.Fail(t, "enqueueing host functions waits for those before")
		}
		work.may.Store(true)
		synchronize(t, s)
		require.EqualValues(t, 400, ran.Load())
	})
}

func TestIdentity(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		assert.Equal(t, device.CUDA, d.Kind())
		assert.Equal(t, 0, d.Index())
		assert.NotEmpty(t, d.Name())
		assert.Regexp(t, `^GPU-[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$`, d.UUID())
		assert.Regexp(t, `^[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:`, d.PCIBusID())
		assert.Positive(t, d.Multiprocessors())
		free, total, err := d.MemInfo()
		require.NoError(t, err)
		assert.LessOrEqual(t, free, total)
		n, err := d.Attribute(int(cu.AttrMultiprocessors))
		require.NoError(t, err)
		assert.Equal(t, d.Multiprocessors(), n)
	})
}

func TestTooLittleMemorySaysHowMuchThereIs(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		_, err := d.Alloc(1 << 50)
		require.ErrorIs(t, err, device.ErrNoMemory)
		require.ErrorContains(t, err, "bytes are free")
	})
}

// The enqueueing itself may get stuck in the driver when a queue is full; a wait ends all the same.
func TestWaitEndsInAFullQueue(t *testing.T) {
	d := open(t, &cuda.Options{WaitTimeout: 300 * time.Millisecond})
	s := newStream(t, d)
	p := alloc(t, d, 8)
	require.NoError(t, s.WaitValue32(p, 1))
	for range 5000 {
		require.NoError(t, s.Fill(p.Add(4), 1, 4))
	}
	require.ErrorIs(t, s.Synchronize(bounded(t)), os.ErrDeadlineExceeded)
}

// The waits of a graph's replays are waits of their own: each may last as long as WaitTimeout, also where one follows directly on another.
func TestWaitsOfReplaysAreNotOne(t *testing.T) {
	t.Parallel() // it waits
	// Waits last longer than a machine may stand still.
	const replays, waits = 8, 2600 * time.Millisecond
	onEach(t, &cuda.Options{WaitTimeout: waits}, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		p := alloc(t, d, 8)
		g := capture(t, s, func() {
			require.NoError(t, s.WaitValue32(p, 1))
			require.NoError(t, s.WriteValue32(p, 0))
		})
		for range replays {
			require.NoError(t, g.Launch(s))
		}
		for range replays {
			time.Sleep(waits / (replays - 2))
			require.NoError(t, d.CopyFromHost(p, []byte{1, 0, 0, 0}))
			_, err := s.Query() // the fake goes on when it is asked
			require.NoError(t, err)
		}
		synchronize(t, s)

		// One that lasts too long still ends, in whichever replay.
		for range 2 {
			require.NoError(t, g.Launch(s))
			require.ErrorIs(t, s.Synchronize(bounded(t)), os.ErrDeadlineExceeded)
		}
		require.NoError(t, g.Close())
	})
}

// A replay that has begun, and has not come to its wait, is not in the wait that the replay before it was in.
func TestReplayIsNotInTheWaitBefore(t *testing.T) {
	t.Parallel() // it waits
	f := newFake(1)
	drv := f.driver()
	var closed atomic.Bool
	batch := drv.StreamBatchMemOp
	drv.StreamBatchMemOp = func(s cu.StreamHandle, n uint32, ops *cu.BatchMemOp, flags uint32) cu.Result {
		all := unsafe.Slice(ops, n)
		if r := batch(s, 1, &all[0], flags); r != cu.Success || n == 1 {
			return r
		}
		f.mu.Lock()
		f.enqueue(s, func() bool { return !closed.Load() })
		f.mu.Unlock()
		return batch(s, n-1, &all[1], flags)
	}
	const waits = 2600 * time.Millisecond // which is longer than a machine may stand still
	d, err := cuda.Open(&cuda.Options{Driver: drv, WaitTimeout: waits})
	require.NoError(t, err)
	closeInTheEnd(t, d)
	s := newStream(t, d)
	p := alloc(t, d, 8)
	g := capture(t, s, func() {
		require.NoError(t, s.WaitValue32(p, 1))
		require.NoError(t, s.WriteValue32(p, 0))
	})
	require.NoError(t, g.Launch(s))
	require.NoError(t, g.Launch(s))
	_, err = s.Query()
	require.NoError(t, err)
	time.Sleep(60 * time.Millisecond) // the watcher sees the first wait
	closed.Store(true)
	require.NoError(t, d.CopyFromHost(p, []byte{1, 0, 0, 0}))
	_, err = s.Query()
	require.NoError(t, err)
	time.Sleep(waits + 50*time.Millisecond)
	closed.Store(false)
	require.NoError(t, d.CopyFromHost(p, []byte{1, 0, 0, 0}))
	synchronize(t, s)
	require.NoError(t, g.Close())
}

// Close ends the waits of a graph that the stream has launched, also where another stream has launched the graph since.
func TestCloseEndsWaitsOfAGraphOfTwoStreams(t *testing.T) {
	t.Parallel() // it waits
	onEach(t, &cuda.Options{WaitTimeout: 2600 * time.Millisecond}, func(t *testing.T, d *cuda.Device) {
		s, other := newStream(t, d), newStream(t, d)
		p := alloc(t, d, 16)
		g := capture(t, s, func() {
			for i := range int64(4) { // each by itself may last as long
				require.NoError(t, s.WaitValue32(p.Add(4*i), 1))
			}
		})
		require.NoError(t, g.Launch(s))
		require.NoError(t, g.Launch(other))
		var work *device.WorkError
		err := s.Close()
		require.ErrorAs(t, err, &work)
		require.NotContains(t, err.Error(), "not ended the work")

		// To the other stream that is nothing any more.
		_ = other.Synchronize(bounded(t)) // the error was of its launch, too
		require.NoError(t, d.CopyFromHost(p, make([]byte, 16)))
		require.NoError(t, g.Launch(other))
		_, err = other.Query()
		require.NoError(t, err)
		time.Sleep(100 * time.Millisecond)
		for i := range 4 {
			require.NoError(t, d.CopyFromHost(p.Add(int64(4*i)), []byte{1, 0, 0, 0}))
		}
		synchronize(t, other)
		require.NoError(t, other.Close())
		require.NoError(t, g.Close())
	})
}

// The device must not remember words of waits that have ended: their memory may be somebody else's by then.
func TestEndedWaitsAreForgotten(t *testing.T) {
	gone := errors.New("gone")
	var lost atomic.Bool
	opts := &cuda.Options{WaitTimeout: 50 * time.Millisecond, Err: func() error {
		if lost.Load() {
			return gone
		}
		return nil
	}}
	onEach(t, opts, func(t *testing.T, d *cuda.Device) {
		lost.Store(false)
		s := newStream(t, d)
		p := alloc(t, d, 4)
		require.NoError(t, s.WriteValue32(p, 5))
		require.NoError(t, s.WaitValue32(p, 5))
		g := capture(t, s, func() { require.NoError(t, s.WaitValue32(p, 5)) })
		for range 3 {
			require.NoError(t, g.Launch(s))
		}
		e := newEvent(t, d)
		require.NoError(t, s.Record(e))
		require.NoError(t, e.Synchronize(bounded(t)), "the waits have ended, and nobody asks the stream")
		hold := make(chan struct{})
		release := time.AfterFunc(patience, func() { close(hold) })
		if d.Driver().Path != "fake" { // whose host functions run in whoever asks
			require.NoError(t, s.HostFunc(func() { <-hold })) // the stream is busy with something else
		}
		require.NoError(t, d.CopyFromHost(p, make([]byte, 4)))
		lost.Store(true)
		time.Sleep(200 * time.Millisecond)
		if release.Stop() {
			close(hold)
		}
		synchronize(t, s)
		assert.Equal(t, make([]byte, 4), read(t, d, p, 4))
	})
}

// TestWaitThatCannotBeEnded: a wait whose word cannot be written, as with a context that is lost, is logged once, and not at each look.
func TestWaitThatCannotBeEnded(t *testing.T) {
	f := newFake(1)
	var logged bytes.Buffer
	d := openFake(t, f, &cuda.Options{WaitTimeout: 30 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(&logged, &slog.HandlerOptions{Level: slog.LevelWarn}))})
	s, p := newStream(t, d), alloc(t, d, 4)
	require.NoError(t, s.WaitValue32(p, 1))
	f.failing("cuStreamWriteValue32_v2", cu.IllegalAddress)
	for range 40 { // the simulated driver goes on when it is asked
		_, err := s.Query()
		require.NoError(t, err)
		time.Sleep(10 * time.Millisecond)
	}
	f.failing("cuStreamWriteValue32_v2", cu.Success)
	require.ErrorIs(t, s.Synchronize(bounded(t)), os.ErrDeadlineExceeded)
	require.NoError(t, d.Close())
	assert.Equal(t, 1, strings.Count(logged.String(), "ending a wait failed"), logged.String())
}

func TestClosedStreamHasNoHandle(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		assert.NotZero(t, s.Handle())
		require.NoError(t, s.Close())
		assert.Zero(t, s.Handle())
	})
}

// TestSynchronizeWaitsForWhatACloseHasLeft: a stream whose Close has given its work up is still at work, and may use memory.
func TestSynchronizeWaitsForWhatACloseHasLeft(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, &cuda.Options{WaitTimeout: 20 * time.Millisecond})
	s := newStream(t, d)
	var over atomic.Bool
	f.mu.Lock()
	f.enqueue(cu.StreamHandle(s.Handle()), over.Load)
	f.mu.Unlock()
	require.ErrorIs(t, s.Close(), os.ErrDeadlineExceeded)
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, d.Synchronize(short), context.DeadlineExceeded)
	over.Store(true)
	require.NoError(t, d.Synchronize(bounded(t)))
	require.NoError(t, d.Close())
	f.assertEmpty(t)
}

// What only CUDA devices have is closed with the device as well.
func TestDeviceCloseEndsTheRest(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		_, nilErr := d.NewFaultWord(nil)
		var arg *errs.ArgumentError
		require.ErrorAs(t, nilErr, &arg)
		w, err := d.NewFaultWord(func(uint64) error { return errors.New("boom") })
		require.NoError(t, err)
		require.NoError(t, d.Close())
		assert.Equal(t, cuda.Stats{}, d.Stats())

		_, moduleErr := d.LoadModule([]byte(".version 7.0"))
		_, faultErr := d.NewFaultWord(func(uint64) error { return nil })
		_, _, infoErr := d.MemInfo()
		_, attrErr := d.Attribute(int(cu.AttrVMM))
		for i, err := range []error{
			moduleErr, faultErr, infoErr, attrErr, w.Close(), d.WithContext(func() error { return nil }),
		} {
			assert.ErrorIs(t, err, device.ErrClosed, "call %d", i)
		}
		assert.Zero(t, w.Load())
	})
}

// A failure that the host found is told as one that a kernel found, once.
func TestFaultOfTheHost(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		boom := errors.New("boom")
		w, err := d.NewFaultWord(func(word uint64) error { return fmt.Errorf("%w %d", boom, word) })
		require.NoError(t, err)
		s := newStream(t, d)
		require.NoError(t, s.Synchronize(t.Context()))
		w.(*cuda.FaultWord).Store(7)
		w.(*cuda.FaultWord).Store(8)
		err = s.Synchronize(t.Context())
		require.ErrorIs(t, err, boom)
		require.ErrorContains(t, err, "boom 7", "the first counts")
		require.NoError(t, s.Synchronize(t.Context()))
		assert.EqualValues(t, 7, w.Load())
		require.NoError(t, w.Close())
		w.(*cuda.FaultWord).Store(9)
		assert.EqualValues(t, 7, w.Load())
	})
}
