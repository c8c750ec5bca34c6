package cuda_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
)

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
		n, err := d.Attribute(cuda.AttrMultiprocessors)
		require.NoError(t, err)
		assert.Equal(t, d.Multiprocessors(), n)
	})
}

func TestAllocIsZeroed(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		var total int64
		seen := map[device.Ptr]int64{}
		for _, n := range []int64{1, 255, 256, 4097, 1 << 20, 9<<20 + 5} {
			p := alloc(t, d, n)
			assert.Zero(t, p%256)
			assert.Equal(t, int(n), bytes.Count(read(t, d, p, int(n)), []byte{0}))
			require.NoError(t, d.CopyFromHost(p, bytes.Repeat([]byte{7}, int(n)))) // whoever gets it next must not see this
			seen[p] = n
			total += n
		}
		assert.Equal(t, cuda.Stats{Allocations: 6, Bytes: total}, d.Stats())
		for p := range seen {
			require.NoError(t, d.Free(p))
			require.ErrorIs(t, d.Free(p), device.ErrInvalid, "a second Free")
		}
		assert.Equal(t, cuda.Stats{}, d.Stats())
		for _, n := range []int64{0, -1, math.MinInt64} {
			_, err := d.Alloc(n)
			var arg *device.ArgumentError
			require.ErrorAs(t, err, &arg)
		}
		_, err := d.Alloc(1 << 50)
		require.ErrorIs(t, err, device.ErrNoMemory)
		require.ErrorContains(t, err, "bytes are free")
	})
}

func TestCopiesOfAnySize(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		for _, n := range []int{0, 1, 3, 4096, 4 << 20, 4<<20 + 1, 21<<20 + 7} {
			p := alloc(t, d, int64(max(n, 1)))
			src := make([]byte, n)
			for i := range src {
				src[i] = byte(i*7 + i>>12)
			}
			require.NoError(t, d.CopyFromHost(p, src))
			require.True(t, bytes.Equal(src, read(t, d, p, n)), "%d bytes", n)
			require.ErrorIs(t, d.CopyFromHost(p, make([]byte, max(n, 1)+1)), device.ErrInvalid, "one byte too many")
			require.ErrorIs(t, d.CopyToHost(make([]byte, max(n, 1)+1), p), device.ErrInvalid)
			require.NoError(t, d.Free(p))
		}
		for _, p := range []device.Ptr{0, 8, math.MaxUint64} {
			require.ErrorIs(t, d.CopyFromHost(p, []byte{1, 2}), device.ErrInvalid, "%v", p)
			require.ErrorIs(t, d.CopyToHost(make([]byte, 2), p), device.ErrInvalid, "%v", p)
		}
	})
}

func TestStreamMovesMemory(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		assert.Same(t, d, s.Device())
		for _, n := range []int64{1, 7, 4096, 5000, 9<<20 + 3} {
			a, b := alloc(t, d, n), alloc(t, d, n)
			require.NoError(t, s.Fill(a, 0xab, n))
			require.NoError(t, s.Copy(b, a, n))
			require.NoError(t, s.Fill(a, 1, n))
			synchronize(t, s)
			assert.Equal(t, int(n), bytes.Count(read(t, d, b, int(n)), []byte{0xab}))
			assert.Equal(t, int(n), bytes.Count(read(t, d, a, int(n)), []byte{1}))
		}
		done, err := s.Query()
		require.NoError(t, err)
		assert.True(t, done)
	})
}

func TestBadRangesAreRefused(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		p := alloc(t, d, 1024)
		for _, c := range []struct {
			p device.Ptr
			n int64
		}{{0, 1}, {p, -1}, {p, math.MinInt64}, {math.MaxUint64, 1}, {math.MaxUint64 - 3, 8}, {0x1000, 8}} {
			require.ErrorIs(t, s.Fill(c.p, 1, c.n), device.ErrInvalid, "%v %d", c.p, c.n)
			require.ErrorIs(t, s.Copy(c.p, p, c.n), device.ErrInvalid, "%v %d", c.p, c.n)
			require.ErrorIs(t, s.Copy(p, c.p, c.n), device.ErrInvalid, "%v %d", c.p, c.n)
		}
		for _, q := range []device.Ptr{p + 1, p + 2, 0, math.MaxUint64 - 3} {
			require.ErrorIs(t, s.WriteValue32(q, 1), device.ErrInvalid)
			require.ErrorIs(t, s.WaitValue32(q, 1), device.ErrInvalid)
		}
		require.ErrorIs(t, s.Copy(p, p.Add(8), 16), device.ErrInvalid, "overlap")
		require.ErrorIs(t, s.Copy(p.Add(8), p, 16), device.ErrInvalid, "overlap")
		require.NoError(t, s.Copy(p, p.Add(16), 16))
		require.NoError(t, s.Copy(0, 0, 0), "0 bytes is no work")
		require.NoError(t, s.Fill(0, 0, 0))
		require.ErrorIs(t, s.WriteValue32(0x1000, 1), device.ErrInvalid, "nothing is there")
		require.ErrorIs(t, s.WaitValue32(0x1000, 1), device.ErrInvalid)
		synchronize(t, s)
		_ = alloc(t, d, 8) // the context has survived
	})
}

func TestHostFuncsRunInOrder(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		p := alloc(t, d, 4)
		const n = 300
		var got []int
		for i := range n {
			require.NoError(t, s.HostFunc(func() { got = append(got, i) }))
			require.NoError(t, s.WriteValue32(p, uint32(i)))
		}
		synchronize(t, s)
		require.Len(t, got, n)
		for i, v := range got {
			require.Equal(t, i, v)
		}
		assert.EqualValues(t, n-1, binary.LittleEndian.Uint32(read(t, d, p, 4)))
		assert.Zero(t, d.Stats().HostFuncs)
	})
}

func TestFailedHostFuncs(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		cause := errors.New("index of doom")
		var after counter
		require.NoError(t, s.HostFunc(func() { panic(cause) }))
		require.NoError(t, s.HostFunc(runtime.Goexit))
		require.NoError(t, s.HostFunc(after.run))
		err := s.Synchronize(bounded(t))
		require.ErrorIs(t, err, cause)
		var work *cuda.WorkError
		require.ErrorAs(t, err, &work)
		assert.Equal(t, "HostFunc", work.Op)
		assert.Equal(t, 1, work.More)
		var p *cuda.PanicError
		require.ErrorAs(t, err, &p)
		assert.Contains(t, p.Stack, "contract_test.go")
		assert.EqualValues(t, 1, after.runs.Load(), "later work still runs")
		synchronize(t, s)
		require.NoError(t, s.HostFunc(runtime.Goexit))
		require.ErrorContains(t, s.Close(), "Goexit", "an error nobody asked for is not lost")
	})
}

func TestSeveralGoroutines(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		const workers, each = 16, 50
		shared := newStream(t, d)
		var total counter
		errsOf := make([]error, workers)
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				errsOf[w] = func() error {
					for i := range each {
						s, err := d.NewStream()
						if err != nil {
							return err
						}
						p, err := d.Alloc(int64(1000 + w))
						if err != nil {
							return err
						}
						e, err := d.NewEvent()
						if err != nil {
							return err
						}
						b := make([]byte, 1000+w)
						if err := errors.Join(s.Fill(p, byte(i), int64(len(b))), s.Record(e), shared.WaitEvent(e), shared.HostFunc(total.run),
							s.Synchronize(context.Background()), d.CopyToHost(b, p)); err != nil {
							return err
						}
						if bytes.Count(b, []byte{byte(i)}) != len(b) {
							return errors.New("wrong bytes")
						}
						if err := errors.Join(e.Close(), d.Free(p), s.Close(), d.Synchronize(context.Background())); err != nil {
							return err
						}
						if i%10 == 0 {
							runtime.GC()
						}
					}
					return nil
				}()
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errsOf...))
		synchronize(t, shared)
		assert.EqualValues(t, workers*each, total.runs.Load())
		assert.Equal(t, cuda.Stats{Streams: 1}, d.Stats())
	})
}

func TestSynchronizeEndsWithItsContext(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		g := newGate(t, d)
		e := newEvent(t, d)
		var after counter
		g.hold(t, s)
		require.NoError(t, s.HostFunc(after.run))
		require.NoError(t, s.Record(e))
		ctx, cancel := context.WithCancel(context.Background())
		time.AfterFunc(20*time.Millisecond, cancel)
		require.ErrorIs(t, s.Synchronize(ctx), context.Canceled)
		require.ErrorIs(t, d.Synchronize(ctx), context.Canceled)
		require.ErrorIs(t, e.Synchronize(ctx), context.Canceled)
		done, err := s.Query()
		require.NoError(t, err)
		assert.False(t, done)
		done, err = e.Query()
		require.NoError(t, err)
		assert.False(t, done)
		assert.Zero(t, after.runs.Load())
		g.open(t)
		require.NoError(t, d.Synchronize(bounded(t)))
		assert.EqualValues(t, 1, after.runs.Load(), "the work goes on")
		require.NoError(t, s.Synchronize(ctx), "what is done needs no context")
		var none context.Context
		require.ErrorIs(t, s.Synchronize(none), device.ErrInvalid)
		require.ErrorIs(t, d.Synchronize(none), device.ErrInvalid)
		require.ErrorIs(t, e.Synchronize(none), device.ErrInvalid)
	})
}

func TestSynchronizeWaitsOnlyForWhatCameBefore(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		first, second := newGate(t, d), newGate(t, d)
		first.hold(t, s)
		result := make(chan error, 1)
		go func() { result <- s.Synchronize(context.Background()) }()
		time.Sleep(20 * time.Millisecond) // most often it waits by now; if not, it waits for the second gate as well
		second.hold(t, s)
		first.open(t)
		time.AfterFunc(200*time.Millisecond, func() {
			assert.NoError(t, second.by.WriteValue32(second.word, 1))
		})
		select {
		case err := <-result:
			require.NoError(t, err)
		case <-time.After(patience):
			require.FailNow(t, "Synchronize hangs")
		}
		synchronize(t, s)
	})
}

func TestValuesAcrossStreams(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		a, b := newStream(t, d), newStream(t, d)
		flag, data, sums := alloc(t, d, 8), alloc(t, d, 64), alloc(t, d, 64*200)
		const turns, start = 200, uint32(0xffffffa0) // passes through zero
		require.NoError(t, a.WriteValue32(flag, start))
		require.NoError(t, a.WriteValue32(flag.Add(4), start))
		synchronize(t, a)
		for i := uint32(1); i <= turns; i++ {
			require.NoError(t, b.WaitValue32(flag, start+i))
			require.NoError(t, b.Copy(sums.Add(64*int64(i-1)), data, 64))
			require.NoError(t, b.WriteValue32(flag.Add(4), start+i))

			require.NoError(t, a.Fill(data, byte(i), 64))
			require.NoError(t, a.WriteValue32(flag, start+i))
			require.NoError(t, a.WaitValue32(flag.Add(4), start+i))
		}
		synchronize(t, a)
		synchronize(t, b)
		got := read(t, d, sums, 64*turns)
		for i := range turns {
			require.Equal(t, 64, bytes.Count(got[64*i:][:64], []byte{byte(i + 1)}), "turn %d", i)
		}
	})
}

func TestWaitValueIsBounded(t *testing.T) {
	t.Run("timeout", func(t *testing.T) {
		onEach(t, &cuda.Options{WaitTimeout: 60 * time.Millisecond}, func(t *testing.T, d *cuda.Device) {
			s := newStream(t, d)
			p := alloc(t, d, 4)
			var after counter
			require.NoError(t, s.WaitValue32(p, 1))
			require.NoError(t, s.HostFunc(after.run))
			err := s.Synchronize(bounded(t))
			require.ErrorIs(t, err, os.ErrDeadlineExceeded)
			var work *cuda.WorkError
			require.ErrorAs(t, err, &work)
			assert.Equal(t, "WaitValue32", work.Op)
			assert.Equal(t, p, work.Addr)
			assert.EqualValues(t, 1, after.runs.Load())
		})
	})
	t.Run("in a graph", func(t *testing.T) {
		onEach(t, &cuda.Options{WaitTimeout: 60 * time.Millisecond}, func(t *testing.T, d *cuda.Device) {
			s := newStream(t, d)
			p := alloc(t, d, 4)
			g := capture(t, s, func() { require.NoError(t, s.WaitValue32(p, 1)) })
			require.NoError(t, g.Launch(s))
			require.ErrorIs(t, s.Synchronize(bounded(t)), os.ErrDeadlineExceeded)
		})
	})
	t.Run("lost peer", func(t *testing.T) {
		gone := errors.New("rank 3 is gone")
		var lost atomic.Bool
		opts := &cuda.Options{Err: func() error {
			if lost.Load() {
				return gone
			}
			return nil
		}}
		onEach(t, opts, func(t *testing.T, d *cuda.Device) {
			lost.Store(false)
			s := newStream(t, d)
			require.NoError(t, s.WaitValue32(alloc(t, d, 4), 1))
			time.AfterFunc(30*time.Millisecond, func() { lost.Store(true) })
			require.ErrorIs(t, s.Synchronize(bounded(t)), gone)
		})
	})
	t.Run("a full queue", func(t *testing.T) {
		// The enqueueing itself may get stuck in the driver; the wait ends all the same.
		d := open(t, &cuda.Options{WaitTimeout: 300 * time.Millisecond})
		s := newStream(t, d)
		p := alloc(t, d, 8)
		require.NoError(t, s.WaitValue32(p, 1))
		for range 5000 {
			require.NoError(t, s.Fill(p.Add(4), 1, 4))
		}
		require.ErrorIs(t, s.Synchronize(bounded(t)), os.ErrDeadlineExceeded)
	})
	t.Run("stream closed", func(t *testing.T) {
		onEach(t, &cuda.Options{WaitTimeout: 300 * time.Millisecond}, func(t *testing.T, d *cuda.Device) {
			s := newStream(t, d)
			p := alloc(t, d, 256)
			for i := range int64(5) {
				require.NoError(t, s.WaitValue32(p.Add(4*i), 1))
			}
			begin := time.Now()
			err := s.Close()
			var work *cuda.WorkError
			require.ErrorAs(t, err, &work)
			assert.Less(t, time.Since(begin), 20*time.Second)
			assert.Zero(t, d.Stats().Streams)
		})
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

func TestEventOrdersStreams(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		a, b := newStream(t, d), newStream(t, d)
		e := newEvent(t, d)
		g := newGate(t, d)
		var order []string
		g.hold(t, a)
		require.NoError(t, a.HostFunc(func() { order = append(order, "a") }))
		require.NoError(t, a.Record(e))
		require.NoError(t, b.WaitEvent(e))
		require.NoError(t, b.HostFunc(func() { order = append(order, "b") }))
		for _, q := range []interface{ Query() (bool, error) }{e, b} {
			done, err := q.Query()
			require.NoError(t, err)
			assert.False(t, done)
		}
		g.open(t)
		require.NoError(t, e.Synchronize(bounded(t)))
		synchronize(t, b)
		assert.Equal(t, []string{"a", "b"}, order)
	})
}

func TestEventNeverRecorded(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		e, f := newEvent(t, d), newEvent(t, d)
		require.NoError(t, s.WaitEvent(e))
		require.NoError(t, e.Synchronize(bounded(t)))
		done, err := e.Query()
		require.NoError(t, err)
		assert.True(t, done)
		_, err = e.Since(f)
		require.ErrorIs(t, err, device.ErrInvalid)
		synchronize(t, s)
	})
}

// A wait means the record that was the latest when the wait was called, even if the event was recorded again since.
func TestWaitEventMeansTheRecordAtItsCall(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		a, b := newStream(t, d), newStream(t, d)
		e := newEvent(t, d)
		early, late := newGate(t, d), newGate(t, d)
		early.hold(t, a)
		require.NoError(t, a.Record(e))
		require.NoError(t, b.WaitEvent(e))
		late.hold(t, a)
		require.NoError(t, a.Record(e))
		early.open(t)
		synchronize(t, b) // would lose patience if it meant the second record
		done, err := e.Query()
		require.NoError(t, err)
		assert.False(t, done, "Query means the latest record")
		late.open(t)
		require.NoError(t, e.Synchronize(bounded(t)))
	})
}

func TestEventSince(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		begin, end := newEvent(t, d), newEvent(t, d)
		g := newGate(t, d)
		const pause = 20 * time.Millisecond
		require.NoError(t, s.Record(begin))
		require.NoError(t, s.HostFunc(func() { time.Sleep(pause) }))
		g.hold(t, s)
		require.NoError(t, s.Record(end))
		_, err := end.Since(begin)
		require.ErrorIs(t, err, device.ErrInvalid, "not complete yet")
		g.open(t)
		synchronize(t, s)
		took, err := end.Since(begin)
		require.NoError(t, err)
		assert.GreaterOrEqual(t, took, pause-time.Millisecond)
		back, err := begin.Since(end)
		require.NoError(t, err)
		assert.InDelta(t, float64(took), -float64(back), 2000)
		same, err := end.Since(end)
		require.NoError(t, err)
		assert.Zero(t, same)
		_, err = end.Since(nil)
		require.ErrorIs(t, err, device.ErrInvalid)
	})
}

func TestEventClose(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s, other := newStream(t, d), newStream(t, d)
		e := newEvent(t, d)
		g := newGate(t, d)
		var c counter
		g.hold(t, s)
		require.NoError(t, s.Record(e))
		require.NoError(t, other.WaitEvent(e))
		require.NoError(t, other.HostFunc(c.run))
		require.NoError(t, e.Close())
		_, queryErr := e.Query()
		_, sinceErr := e.Since(newEvent(t, d))
		for i, err := range []error{e.Close(), queryErr, sinceErr, e.Synchronize(bounded(t)), s.Record(e), s.WaitEvent(e)} {
			assert.ErrorIs(t, err, device.ErrClosed, "call %d", i)
		}
		assert.Zero(t, c.runs.Load())
		g.open(t)
		synchronize(t, other)
		assert.EqualValues(t, 1, c.runs.Load(), "the wait outlives the event")
	})
}

func TestStreamClose(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		e := newEvent(t, d)
		p := alloc(t, d, 64)
		var c counter
		require.NoError(t, s.HostFunc(func() { time.Sleep(10 * time.Millisecond) }))
		for range 100 {
			require.NoError(t, s.HostFunc(c.run))
		}
		require.NoError(t, s.Record(e))
		g := capture(t, s, func() { require.NoError(t, s.Fill(p, 1, 8)) })
		require.NoError(t, s.Close())
		assert.EqualValues(t, 100, c.runs.Load(), "Close runs what is queued")
		assert.Equal(t, cuda.Stats{Events: 1, Graphs: 1, Allocations: 1, Bytes: 64}, d.Stats())
		assert.Zero(t, s.Handle())

		_, queryErr := s.Query()
		_, endErr := s.EndCapture()
		for i, err := range []error{
			s.Close(), s.HostFunc(func() {}), s.Copy(p, p.Add(32), 8), s.Copy(0, 0, 0), s.Copy(0, 0, 8), s.Fill(p, 1, 8), s.Fill(p, 1, 0),
			s.WriteValue32(p, 1), s.WriteValue32(0, 1), s.WaitValue32(p, 0), s.Record(e), s.WaitEvent(e), s.BeginCapture(), endErr,
			queryErr, s.Synchronize(bounded(t)), g.Launch(s),
		} {
			assert.ErrorIs(t, err, device.ErrClosed, "call %d", i)
		}
		assert.False(t, s.Capturing())
		done, err := e.Query()
		require.NoError(t, err)
		assert.True(t, done, "the event outlives its stream")
		require.NoError(t, newStream(t, d).Close(), "a stream that never worked")
	})
}

func TestDeviceClose(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		streams := []*cuda.Stream{newStream(t, d), newStream(t, d), newStream(t, d)}
		e := newEvent(t, d)
		p := alloc(t, d, 1<<20)
		boom := errors.New("boom")
		var c counter
		w, err := d.NewFaultWord(func(uint64) error { return boom })
		require.NoError(t, err)
		require.NoError(t, streams[0].HostFunc(func() { time.Sleep(20 * time.Millisecond) }))
		for range 100 {
			require.NoError(t, streams[0].HostFunc(c.run))
		}
		require.NoError(t, streams[0].Record(e))
		require.NoError(t, streams[1].WaitEvent(e))
		require.NoError(t, streams[1].Fill(p, 3, 1<<20))
		require.NoError(t, streams[1].HostFunc(func() { panic(boom) }))
		g := capture(t, streams[1], func() { require.NoError(t, streams[1].HostFunc(c.run)) })
		require.NoError(t, streams[2].BeginCapture(), "a capture that nobody ends")
		require.NoError(t, streams[2].HostFunc(c.run))
		require.ErrorIs(t, d.Close(), boom)
		assert.EqualValues(t, 100, c.runs.Load())
		assert.Equal(t, cuda.Stats{}, d.Stats())

		_, allocErr := d.Alloc(1)
		_, streamErr := d.NewStream()
		_, eventErr := d.NewEvent()
		_, queryErr := e.Query()
		_, moduleErr := d.LoadModule([]byte(".version 7.0"))
		_, faultErr := d.NewFaultWord(func(uint64) error { return nil })
		_, _, infoErr := d.MemInfo()
		_, attrErr := d.Attribute(cuda.AttrVMM)
		for i, err := range []error{
			d.Close(), allocErr, streamErr, eventErr, queryErr, moduleErr, faultErr, infoErr, attrErr, d.Free(p),
			d.CopyFromHost(p, []byte{1}), d.CopyToHost(make([]byte, 1), p), d.CopyToHost(nil, p), d.Synchronize(bounded(t)), e.Close(),
			e.Synchronize(bounded(t)), g.Close(), g.Launch(streams[0]), streams[0].Close(), streams[2].HostFunc(c.run),
			streams[0].Record(e), streams[1].Copy(p, p.Add(8), 1), w.Close(), d.WithContext(func() error { return nil }),
		} {
			assert.ErrorIs(t, err, device.ErrClosed, "call %d", i)
		}
		assert.Zero(t, w.Load())
	})
}

func TestDeviceCloseRacesWithEverything(t *testing.T) {
	test := func(t *testing.T, open func() *cuda.Device) {
		for range 5 {
			d := open()
			var wg sync.WaitGroup
			for range 4 {
				wg.Go(func() {
					for range 30 {
						s, err := d.NewStream()
						if err != nil {
							assert.ErrorIs(t, err, device.ErrClosed)
							return
						}
						p, err := d.Alloc(64)
						if err == nil {
							_ = s.Fill(p, 1, 64)
							_ = s.WriteValue32(p, 1)
							_ = s.WaitValue32(p, 1)
							_ = s.Synchronize(context.Background())
							_ = d.Free(p)
						}
						_ = s.Close()
					}
				})
			}
			assert.NoError(t, d.Close())
			wg.Wait()
			assert.Equal(t, cuda.Stats{}, d.Stats())
		}
	}
	t.Run("fake", func(t *testing.T) {
		f := newFake(1)
		test(t, func() *cuda.Device { return openFake(t, f, nil) })
		f.assertEmpty(t)
	})
	t.Run("gpu", func(t *testing.T) {
		keep := open(t, nil) // so that the context stays
		assert.NotNil(t, keep)
		test(t, func() *cuda.Device { return open(t, nil) })
	})
}

func TestBadArguments(t *testing.T) {
	onEach(t, nil, func(t *testing.T, d *cuda.Device) {
		s := newStream(t, d)
		var noEvent *cuda.Event
		var noStream *cuda.Stream
		g := capture(t, s, func() {})
		other := openFake(t, newFake(1), nil)
		foreign := newEvent(t, other)
		_, sinceErr := newEvent(t, d).Since(foreign)
		_, faultErr := d.NewFaultWord(nil)
		for i, err := range []error{
			s.HostFunc(nil), s.Record(nil), s.Record(noEvent), s.WaitEvent(nil), s.WaitEvent(noEvent), s.Record(foreign), g.Launch(nil),
			g.Launch(noStream), g.Launch(newStream(t, other)), sinceErr, faultErr,
		} {
			var arg *device.ArgumentError
			assert.ErrorAs(t, err, &arg, "call %d", i)
		}
		require.NoError(t, other.Close())
	})
}
