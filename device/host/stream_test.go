package host_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/host"
)

// ptrOf gives the address of b, for memory that a device knows by Map.
func ptrOf(b []byte) device.Ptr { return device.Ptr(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

func TestStreamRunsInOrder(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	const n = 5000
	var got []int
	for i := range n {
		if i%2 == 0 {
			require.NoError(t, s.HostFunc(func() { got = append(got, i) }))
		} else {
			require.NoError(t, s.Launch(kernel(func() error { got = append(got, i); return nil })))
		}
	}
	synchronize(t, s)
	require.Len(t, got, n)
	for i, v := range got {
		require.Equal(t, i, v)
	}
	done, err := s.Query()
	require.NoError(t, err)
	assert.True(t, done)
	assert.Same(t, d, s.Device())
}

func TestStreamMovesMemory(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	for _, n := range []int64{1, 7, 4096, 5000, 9<<20 + 3} {
		a, b := alloc(t, d, n), alloc(t, d, n)
		require.NoError(t, s.Fill(a, 0xab, n))
		require.NoError(t, s.Copy(b, a, n))
		require.NoError(t, s.Fill(a, 0, n))
		synchronize(t, s)
		got := make([]byte, n)
		require.NoError(t, d.CopyToHost(got, b))
		assert.Equal(t, int(n), bytes.Count(got, []byte{0xab}))
		require.NoError(t, d.CopyToHost(got, a))
		assert.Equal(t, int(n), bytes.Count(got, []byte{0}))
		require.NoError(t, d.Free(a))
		require.NoError(t, d.Free(b))
	}
}

func TestSeveralGoroutinesEnqueue(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	const workers, each = 8, 500
	var last [workers]int
	var failed error
	var wg sync.WaitGroup
	errsOf := make([]error, workers)
	for w := range workers {
		wg.Go(func() {
			for i := 1; i <= each; i++ {
				err := s.HostFunc(func() { // all of these run on one goroutine, one after the other
					if last[w] != i-1 {
						failed = errors.New("the order of a caller's work changed")
					}
					last[w] = i
				})
				errsOf[w] = errors.Join(errsOf[w], err)
				if i%100 == 0 {
					errsOf[w] = errors.Join(errsOf[w], s.Synchronize(context.Background()))
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errsOf...))
	synchronize(t, s)
	require.NoError(t, failed)
	for _, n := range last {
		assert.Equal(t, each, n)
	}
}

func TestSynchronizeEndsWithItsContext(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	g := newGate()
	var after counter
	require.NoError(t, s.Launch(g))
	require.NoError(t, s.Launch(&after))
	g.await(t)
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(20*time.Millisecond, cancel)
	require.ErrorIs(t, s.Synchronize(ctx), context.Canceled)
	require.ErrorIs(t, d.Synchronize(ctx), context.Canceled)
	short, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	require.ErrorIs(t, s.Synchronize(short), context.DeadlineExceeded)
	done, err := s.Query()
	require.NoError(t, err)
	assert.False(t, done)
	g.open()
	require.NoError(t, d.Synchronize(bounded(t)))
	assert.EqualValues(t, 1, after.runs.Load(), "the work goes on")
	require.NoError(t, s.Synchronize(ctx), "what is done needs no context")
	var none context.Context
	require.ErrorIs(t, s.Synchronize(none), device.ErrInvalid)
	require.ErrorIs(t, d.Synchronize(none), device.ErrInvalid)
	require.ErrorIs(t, newEvent(t, d).Synchronize(none), device.ErrInvalid)
}

func TestSynchronizeWaitsOnlyForWhatCameBefore(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	first, second := newGate(), newGate()
	require.NoError(t, s.Launch(first))
	first.await(t)
	result := make(chan error, 1)
	go func() { result <- s.Synchronize(context.Background()) }()
	time.Sleep(5 * time.Millisecond) // most often it waits by now; if not, it waits for the second gate as well
	require.NoError(t, s.Launch(second))
	first.open()
	second.await(t)
	go func() {
		time.Sleep(50 * time.Millisecond)
		second.open()
	}()
	select {
	case err := <-result:
		require.NoError(t, err)
	case <-time.After(patience):
		require.FailNow(t, "Synchronize hangs")
	}
	synchronize(t, s)
}

func TestErrorsAreReturnedOnce(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	boom := errors.New("peer died")
	var after counter
	require.NoError(t, s.Launch(kernel(func() error { return boom })))
	require.NoError(t, s.Launch(kernel(func() error { return errors.New("second") })))
	require.NoError(t, s.Launch(&after))

	err := s.Synchronize(bounded(t))
	require.ErrorIs(t, err, boom)
	var work *host.WorkError
	require.ErrorAs(t, err, &work)
	assert.Equal(t, "Launch(host_test.kernel)", work.Op)
	assert.Equal(t, 1, work.More)
	assert.EqualValues(t, 1, after.runs.Load(), "later work still runs")
	synchronize(t, s)

	require.NoError(t, s.Launch(kernel(func() error { return boom })))
	require.ErrorIs(t, s.Synchronize(bounded(t)), boom, "a new failure is returned again")
}

func TestErrorOfLaterWorkIsLeftForLater(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	g := newGate()
	boom := errors.New("later")
	require.NoError(t, s.Launch(g))
	g.await(t)
	ctx := bounded(t)
	// The target of a Synchronize is fixed when it is called; what fails behind it is another one's to return.
	event := newEvent(t, d)
	require.NoError(t, s.Record(event))
	result := make(chan error, 1)
	var called atomic.Bool
	go func() { called.Store(true); result <- s.Synchronize(ctx) }()
	require.Eventually(t, called.Load, patience, time.Millisecond)
	time.Sleep(20 * time.Millisecond)
	require.NoError(t, s.Launch(kernel(func() error { return boom })))
	g.open()
	first := <-result
	second := s.Synchronize(ctx)
	if first != nil { // the other goroutine was slow, and the failure belonged to its call
		require.ErrorIs(t, first, boom)
		require.NoError(t, second)
	} else {
		require.ErrorIs(t, second, boom)
	}
}

func TestManyFailuresAreCounted(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	first := errors.New("first")
	require.NoError(t, s.Launch(kernel(func() error { return first })))
	for range 999 {
		require.NoError(t, s.Launch(kernel(func() error { return errors.New("more") })))
	}
	err := s.Synchronize(bounded(t))
	require.ErrorIs(t, err, first)
	var work *host.WorkError
	require.ErrorAs(t, err, &work)
	assert.Equal(t, 999, work.More)
	synchronize(t, s)
}

func TestPanicsBecomeErrors(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	cause := errors.New("index of doom")
	var after counter
	for _, enqueue := range []func() error{
		func() error { return s.Launch(kernel(func() error { panic(cause) })) },
		func() error { return s.HostFunc(func() { panic(cause) }) },
	} {
		require.NoError(t, enqueue())
		require.NoError(t, s.Launch(&after))
		err := s.Synchronize(bounded(t))
		require.ErrorIs(t, err, cause)
		var p *host.PanicError
		require.ErrorAs(t, err, &p)
		assert.Contains(t, p.Stack, "stream_test.go")
	}
	var none *counter
	require.NoError(t, s.Launch(none), "a kernel that will panic")
	require.Error(t, s.Synchronize(bounded(t)))
	assert.EqualValues(t, 2, after.runs.Load())
}

func TestGoexitDoesNotStopTheStream(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	var before, after counter
	require.NoError(t, s.Launch(&before))
	require.NoError(t, s.HostFunc(runtime.Goexit))
	require.NoError(t, s.Launch(&after))
	require.ErrorContains(t, s.Synchronize(bounded(t)), "Goexit")
	assert.EqualValues(t, 1, before.runs.Load())
	assert.EqualValues(t, 1, after.runs.Load())

	// And inside of a graph within a graph, where the place must be found again.
	require.NoError(t, s.BeginCapture())
	require.NoError(t, s.Launch(&before))
	require.NoError(t, s.HostFunc(runtime.Goexit))
	require.NoError(t, s.Launch(&after))
	inner, err := s.EndCapture()
	require.NoError(t, err)
	require.NoError(t, s.BeginCapture())
	require.NoError(t, inner.Launch(s))
	require.NoError(t, s.Launch(&before))
	require.NoError(t, inner.Launch(s))
	outer, err := s.EndCapture()
	require.NoError(t, err)
	for range 3 {
		require.NoError(t, outer.Launch(s))
	}
	err = s.Synchronize(bounded(t))
	var work *host.WorkError
	require.ErrorAs(t, err, &work)
	assert.Equal(t, 5, work.More)
	assert.EqualValues(t, 1+9, before.runs.Load())
	assert.EqualValues(t, 1+6, after.runs.Load())
}

func TestValuesAcrossStreams(t *testing.T) {
	d := open(t, nil)
	a, b := newStream(t, d), newStream(t, d)
	flag, data := alloc(t, d, 8), alloc(t, d, 8)
	mem, err := d.Bytes(data, 8)
	require.NoError(t, err)
	const turns, start = 500, uint32(0xffffff00) // passes through zero
	require.NoError(t, a.WriteValue32(flag, start))
	require.NoError(t, a.WriteValue32(flag.Add(4), start))
	synchronize(t, a)
	sum := uint64(0)
	for i := uint32(1); i <= turns; i++ {
		require.NoError(t, b.WaitValue32(flag, start+i))
		require.NoError(t, b.HostFunc(func() { sum += binary.LittleEndian.Uint64(mem) }))
		require.NoError(t, b.WriteValue32(flag.Add(4), start+i))

		require.NoError(t, a.HostFunc(func() { binary.LittleEndian.PutUint64(mem, uint64(i)) }))
		require.NoError(t, a.WriteValue32(flag, start+i))
		require.NoError(t, a.WaitValue32(flag.Add(4), start+i))
	}
	synchronize(t, a)
	synchronize(t, b)
	assert.EqualValues(t, turns*(turns+1)/2, sum)
}

func TestWaitValueHoldsUpUntilTheValueIsThere(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	p := alloc(t, d, 4)
	mem, err := d.Bytes(p, 4)
	require.NoError(t, err)
	word := (*atomic.Uint32)(unsafe.Pointer(&mem[0]))
	var after counter
	require.NoError(t, s.WaitValue32(p, 5))
	require.NoError(t, s.Launch(&after))
	word.Store(4) // by other means, as a peer's kernel would
	time.Sleep(10 * time.Millisecond)
	assert.Zero(t, after.runs.Load())
	word.Store(6)
	synchronize(t, s)
	assert.EqualValues(t, 1, after.runs.Load())
	require.NoError(t, s.WaitValue32(p, 6))
	require.NoError(t, s.WaitValue32(p, 0x80000006+1), "more than half the circle ahead is behind")
	synchronize(t, s)
}

func TestWaitValueIsBounded(t *testing.T) {
	t.Run("timeout", func(t *testing.T) {
		d := open(t, &host.Options{WaitTimeout: 30 * time.Millisecond})
		s := newStream(t, d)
		p := alloc(t, d, 4)
		var after counter
		require.NoError(t, s.WaitValue32(p, 1))
		require.NoError(t, s.Launch(&after))
		err := s.Synchronize(bounded(t))
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		var work *host.WorkError
		require.ErrorAs(t, err, &work)
		assert.Equal(t, "WaitValue32", work.Op)
		assert.Equal(t, p, work.Addr)
		assert.EqualValues(t, 1, after.runs.Load())
	})
	t.Run("lost peer", func(t *testing.T) {
		gone := errors.New("rank 3 is gone")
		var lost atomic.Bool
		d := open(t, &host.Options{Err: func() error {
			if lost.Load() {
				return gone
			}
			return nil
		}})
		s := newStream(t, d)
		require.NoError(t, s.WaitValue32(alloc(t, d, 4), 1))
		time.AfterFunc(10*time.Millisecond, func() { lost.Store(true) })
		require.ErrorIs(t, s.Synchronize(bounded(t)), gone)
	})
	t.Run("stream closed", func(t *testing.T) {
		// Each of the ten could wait for half a second; Close gives them half a second together.
		d := open(t, &host.Options{WaitTimeout: 500 * time.Millisecond})
		s := newStream(t, d)
		p := alloc(t, d, 4)
		for range 10 {
			require.NoError(t, s.WaitValue32(p, 1))
		}
		err := s.Close()
		var work *host.WorkError
		require.ErrorAs(t, err, &work)
		assert.Equal(t, 9, work.More)
		assert.Zero(t, d.Stats().Streams)
	})
}

func TestStreamClose(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	e := newEvent(t, d)
	p := alloc(t, d, 64)
	var c counter
	require.NoError(t, s.HostFunc(func() { time.Sleep(10 * time.Millisecond) }))
	for range 1000 {
		require.NoError(t, s.Launch(&c))
	}
	require.NoError(t, s.Record(e))
	require.NoError(t, s.BeginCapture())
	require.NoError(t, s.Launch(&c))
	g, err := s.EndCapture()
	require.NoError(t, err)
	require.NoError(t, s.Close())
	assert.EqualValues(t, 1000, c.runs.Load(), "Close runs what is queued")
	assert.Equal(t, host.Stats{Events: 1, Graphs: 1, Allocations: 1, Bytes: 64}, d.Stats())

	_, queryErr := s.Query()
	_, endErr := s.EndCapture()
	for i, err := range []error{
		s.Close(), s.Launch(&c), s.HostFunc(func() {}), s.Copy(p, p.Add(32), 8), s.Copy(0, 0, 0), s.Copy(0, 0, 8), s.Fill(p, 1, 8),
		s.Fill(p, 1, 0), s.WriteValue32(p, 1), s.WriteValue32(0, 1), s.WaitValue32(p, 0), s.Record(e), s.WaitEvent(e),
		s.BeginCapture(), endErr, queryErr, s.Synchronize(bounded(t)), g.Launch(s),
	} {
		assert.ErrorIs(t, err, device.ErrClosed, "call %d", i)
	}
	assert.False(t, s.Capturing())
	done, err := e.Query()
	require.NoError(t, err)
	assert.True(t, done, "the event outlives its stream")

	boom := errors.New("boom")
	other := newStream(t, d)
	require.NoError(t, other.Launch(kernel(func() error { return boom })))
	require.ErrorIs(t, other.Close(), boom, "an error nobody asked for is not lost")
	require.ErrorIs(t, other.Close(), device.ErrClosed)
	require.NoError(t, newStream(t, d).Close(), "a stream that never worked")
}

func TestDeviceClose(t *testing.T) {
	d := open(t, nil)
	streams := []*host.Stream{newStream(t, d), newStream(t, d), newStream(t, d)}
	e := newEvent(t, d)
	p := alloc(t, d, 1<<20)
	_, err := d.Map(make([]byte, 128))
	require.NoError(t, err)
	boom := errors.New("boom")
	var c counter
	hold := newGate()
	require.NoError(t, streams[0].Launch(hold))
	for range 100 {
		require.NoError(t, streams[0].Launch(&c))
	}
	require.NoError(t, streams[0].Record(e))
	require.NoError(t, streams[1].WaitEvent(e))
	require.NoError(t, streams[1].Fill(p, 3, 1<<20))
	require.NoError(t, streams[1].Launch(kernel(func() error { return boom })))
	require.NoError(t, streams[1].BeginCapture())
	g, err := streams[1].EndCapture()
	require.NoError(t, err)
	require.NoError(t, streams[2].BeginCapture(), "a capture that nobody ends")
	hold.await(t)
	time.AfterFunc(20*time.Millisecond, hold.open)
	require.ErrorIs(t, d.Close(), boom)
	assert.EqualValues(t, 100, c.runs.Load())
	assert.Equal(t, host.Stats{}, d.Stats())

	_, allocErr := d.Alloc(1)
	_, mapErr := d.Map(make([]byte, 1))
	_, bytesErr := d.Bytes(p, 1)
	_, streamErr := d.NewStream()
	_, eventErr := d.NewEvent()
	_, queryErr := e.Query()
	for i, err := range []error{
		d.Close(), allocErr, mapErr, bytesErr, streamErr, eventErr, queryErr, d.Free(p), d.Unmap(p), d.CopyFromHost(p, []byte{1}),
		d.CopyToHost(make([]byte, 1), p), d.Synchronize(bounded(t)), e.Close(), e.Synchronize(bounded(t)), g.Close(),
		g.Launch(streams[0]), streams[0].Close(), streams[2].Launch(&c), streams[0].Record(e), streams[1].Copy(p, p, 1),
	} {
		assert.ErrorIs(t, err, device.ErrClosed, "call %d", i)
	}
}

func TestDeviceCloseRacesWithEverything(t *testing.T) {
	for range 30 {
		d, err := host.New(&host.Options{WaitTimeout: 100 * time.Millisecond})
		require.NoError(t, err)
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for range 50 {
					s, err := d.NewStream()
					if err != nil {
						assert.ErrorIs(t, err, device.ErrClosed)
						return
					}
					p, err := d.Alloc(64)
					if err == nil {
						_ = s.Fill(p, 1, 64)
						_ = s.WriteValue32(p, 1)
						_ = s.Synchronize(context.Background())
						_ = d.Free(p)
					}
					_ = s.Close()
				}
			})
		}
		assert.NoError(t, d.Close())
		wg.Wait()
		assert.Equal(t, host.Stats{}, d.Stats())
	}
}

func TestBadArguments(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	var noEvent *host.Event
	var noStream *host.Stream
	require.NoError(t, s.BeginCapture())
	g, err := s.EndCapture()
	require.NoError(t, err)
	other := open(t, nil)
	foreign := newEvent(t, other)
	_, sinceErr := newEvent(t, d).Since(foreign)
	for i, err := range []error{
		s.Launch(nil), s.HostFunc(nil), s.Record(nil), s.Record(noEvent), s.WaitEvent(nil), s.WaitEvent(noEvent), s.Record(foreign),
		g.Launch(nil), g.Launch(noStream), g.Launch(newStream(t, other)), sinceErr,
	} {
		var arg *device.ArgumentError
		assert.ErrorAs(t, err, &arg, "call %d", i)
	}
}

func TestEnqueueingAllocatesNothing(t *testing.T) {
	d := open(t, nil)
	s, other := newStream(t, d), newStream(t, d)
	e := newEvent(t, d)
	p := alloc(t, d, 4096)
	var c counter
	fn := func() {}
	require.NoError(t, s.BeginCapture())
	for range 10 {
		require.NoError(t, s.Launch(&c))
	}
	inner, err := s.EndCapture()
	require.NoError(t, err)
	require.NoError(t, s.BeginCapture())
	require.NoError(t, inner.Launch(s))
	outer, err := s.EndCapture()
	require.NoError(t, err)
	ctx := bounded(t)
	var failed error
	note := func(err error) {
		if err != nil {
			failed = err
		}
	}
	round := func() {
		for range 20 {
			note(s.Launch(&c))
			note(s.HostFunc(fn))
			note(s.Copy(p, p.Add(1024), 64))
			note(s.Fill(p.Add(128), 7, 64))
			note(s.WriteValue32(p.Add(2048), 1))
			note(s.WaitValue32(p.Add(2048), 1))
			note(s.Record(e))
			note(other.WaitEvent(e))
			note(inner.Launch(s))
			note(outer.Launch(s))
		}
		note(s.Synchronize(ctx))
		note(other.Synchronize(ctx))
		note(e.Synchronize(ctx))
	}
	for range 100 {
		round() // let the queues and lists of waiters grow to what they need
	}
	assert.Zero(t, testing.AllocsPerRun(100, round))
	require.NoError(t, failed)
}
