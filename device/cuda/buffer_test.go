package cuda_test

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
)

// staged is work of the CPU that reads a buffer, changes it and has the device copy it back, on a stream of its own.
type staged struct {
	s      device.Stream
	ended  device.Event
	mem    []byte
	stage  device.Ptr
	at     device.Ptr
	copied bool
}

func (w *staged) Start() (device.HostProgress, error) {
	w.copied = false
	return w, w.copy(w.stage, w.at)
}

func (w *staged) copy(dst, src device.Ptr) error {
	if err := w.s.Copy(dst, src, int64(len(w.mem))); err != nil {
		return err
	}
	return w.s.Record(w.ended)
}

func (w *staged) Poll() (bool, error) {
	ended, err := w.ended.Query()
	if !ended || err != nil || w.copied {
		return ended, err
	}
	for i := range w.mem {
		w.mem[i]++
	}
	w.copied = true
	return false, w.copy(w.at, w.stage)
}

// TestHostBuffer: work of the CPU sees what its stream has written before, and the stream what the work has.
func TestHostBuffer(t *testing.T) {
	for _, graph := range []bool{false, true} {
		onEach(t, nil, func(t *testing.T, d *cuda.Device) {
			const size = 1001
			b, err := d.NewHostBuffer(size)
			require.NoError(t, err)
			assert.Equal(t, make([]byte, size), b.Bytes())
			assert.Zero(t, b.Ptr()%8)
			_, err = d.NewHostBuffer(0)
			require.ErrorIs(t, err, device.ErrInvalid)
			_, err = d.NewHostBuffer(-1)
			require.ErrorIs(t, err, device.ErrInvalid)
			beside, err := d.NewWorkStream()
			require.NoError(t, err)
			ended, err := d.NewEvent()
			require.NoError(t, err)
			s, x := newStream(t, d), alloc(t, d, size)
			w := &staged{s: beside, ended: ended, mem: b.Bytes(), stage: b.Ptr(), at: x}
			if graph {
				require.NoError(t, s.BeginCapture())
			}
			require.NoError(t, s.Fill(x, 7, size))
			require.NoError(t, s.HostWork(w))
			require.NoError(t, s.HostWork(w))
			if graph {
				g, err := s.EndCapture()
				require.NoError(t, err)
				require.NoError(t, g.Launch(s))
				require.NoError(t, g.Launch(s))
			}
			synchronize(t, s)
			got := make([]byte, size)
			require.NoError(t, d.CopyToHost(got, x))
			assert.Equal(t, bytes.Repeat([]byte{9}, size), got)
			assert.Equal(t, 1, d.Stats().HostBuffers)
			require.NoError(t, b.Close())
			assert.Nil(t, b.Bytes())
			require.ErrorIs(t, b.Close(), device.ErrClosed)
			_, err = d.NewHostBuffer(8) // which the device's Close frees
			require.NoError(t, err)
		})
	}
}

// TestHostBufferOutlivesWork: a buffer that a stream may use is not given back before the stream has ended.
func TestHostBufferOutlivesWork(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	holds := func(p device.Ptr) bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.find(p, 1) != nil
	}
	b, err := d.NewHostBuffer(8)
	require.NoError(t, err)
	s := newStream(t, d)
	work := &heldCopy{d: d, to: alloc(t, d, 64)}
	require.NoError(t, s.HostWork(work))
	require.NoError(t, b.Close())
	time.Sleep(30 * time.Millisecond) // several looks
	assert.True(t, holds(b.Ptr()), "a buffer was freed that a stream may use")
	work.may.Store(true)
	synchronize(t, s)
	require.Eventually(t, func() bool { return !holds(b.Ptr()) }, patience, time.Millisecond)
}

// TestWorkStream: it has the highest priority there is, so that it shares no queue with streams that wait; or none, where the driver has none.
func TestWorkStream(t *testing.T) {
	for _, has := range []bool{true, false} {
		table := newFake(1).driver()
		create := table.StreamCreateWithPriority
		var priorities []int32
		table.StreamCreateWithPriority = func(s *cu.StreamHandle, flags uint32, priority int32) cu.Result {
			priorities = append(priorities, priority)
			return create(s, flags, priority)
		}
		if !has {
			table.StreamCreateWithPriority = nil
		}
		d, err := cuda.Open(&cuda.Options{Driver: table})
		require.NoError(t, err)
		closeInTheEnd(t, d)
		s, err := d.NewStream()
		require.NoError(t, err)
		assert.Empty(t, priorities)
		beside, err := d.NewWorkStream()
		require.NoError(t, err)
		if has {
			assert.Equal(t, []int32{-5}, priorities)
		}
		require.NoError(t, beside.Close())
		require.NoError(t, s.Close())
		require.NoError(t, d.Close())
		_, err = d.NewWorkStream()
		require.ErrorIs(t, err, device.ErrClosed)
		_, err = d.NewHostBuffer(8)
		require.ErrorIs(t, err, device.ErrClosed)
	}
}
