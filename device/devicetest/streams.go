package devicetest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

func streamRunsInOrder(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	p := alloc(t, d, 4)
	n := h.many(300, 5000)
	var got []int
	for i := range n {
		if i%2 == 0 {
			require.NoError(t, s.HostFunc(func() { got = append(got, i) }))
		} else {
			require.NoError(t, enqueue(s, func() error { got = append(got, i); return nil }))
		}
		require.NoError(t, s.WriteValue32(p, uint32(i)))
	}
	synchronize(t, s)
	require.Len(t, got, n)
	for i, v := range got {
		require.Equal(t, i, v)
	}
	assert.EqualValues(t, n-1, binary.LittleEndian.Uint32(read(t, d, p, 4)))
	assert.Zero(t, h.Held(d).Other)
	done, err := s.Query()
	require.NoError(t, err)
	assert.True(t, done)
	assert.Same(t, d, s.Device())
}

func streamMovesMemory(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	for _, n := range []int64{1, 7, 4096, 5000, 9<<20 + 3} {
		a, b := alloc(t, d, n), alloc(t, d, n)
		for _, last := range []byte{0, 1} {
			require.NoError(t, s.Fill(a, 0xab, n))
			require.NoError(t, s.Copy(b, a, n))
			require.NoError(t, s.Fill(a, last, n))
			synchronize(t, s)
			assert.Equal(t, int(n), bytes.Count(read(t, d, b, int(n)), []byte{0xab}))
			assert.Equal(t, int(n), bytes.Count(read(t, d, a, int(n)), []byte{last}))
		}
		require.NoError(t, d.Free(a))
		require.NoError(t, d.Free(b))
	}
	done, err := s.Query()
	require.NoError(t, err)
	assert.True(t, done)
}

func severalGoroutinesEnqueue(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	const workers = 8
	each := h.many(100, 500)
	var last [workers]int
	var failed error
	var wg sync.WaitGroup
	errsOf := make([]error, workers)
	for w := range workers {
		wg.Go(func() {
			for i := 1; i <= each; i++ {
				err := s.HostFunc(func() { // all of these run one after the other
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

func severalGoroutines(t *testing.T, h Harness) {
	d := h.open(t)
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
	assert.Equal(t, Held{Streams: 1}, h.Held(d))
}

func synchronizeEndsWithItsContext(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	g := newGate(t, d)
	e := newEvent(t, d)
	var after counter
	g.hold(t, s)
	require.NoError(t, enqueue(s, after.RunKernel))
	require.NoError(t, s.Record(e))
	g.await(t)
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(20*time.Millisecond, cancel)
	require.ErrorIs(t, s.Synchronize(ctx), context.Canceled)
	require.ErrorIs(t, d.Synchronize(ctx), context.Canceled)
	require.ErrorIs(t, e.Synchronize(ctx), context.Canceled)
	short, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	require.ErrorIs(t, s.Synchronize(short), context.DeadlineExceeded)
	for _, q := range []interface{ Query() (bool, error) }{s, e} {
		done, err := q.Query()
		require.NoError(t, err)
		assert.False(t, done)
	}
	assert.Zero(t, after.runs.Load())
	g.open(t)
	require.NoError(t, d.Synchronize(bounded(t)))
	assert.EqualValues(t, 1, after.runs.Load(), "the work goes on")
	require.NoError(t, s.Synchronize(ctx), "what is done needs no context")
	var none context.Context
	require.ErrorIs(t, s.Synchronize(none), device.ErrInvalid)
	require.ErrorIs(t, d.Synchronize(none), device.ErrInvalid)
	require.ErrorIs(t, e.Synchronize(none), device.ErrInvalid)
	require.ErrorIs(t, newEvent(t, d).Synchronize(none), device.ErrInvalid)
}

func synchronizeWaitsOnlyForWhatCameBefore(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	first, second := newGate(t, d), newGate(t, d)
	first.hold(t, s)
	first.await(t)
	result := make(chan error, 1)
	go func() { result <- s.Synchronize(context.Background()) }()
	time.Sleep(20 * time.Millisecond) // most often it waits by now; if not, it waits for the second gate as well
	second.hold(t, s)
	first.open(t)
	second.await(t)
	opened := make(chan error, 1)
	time.AfterFunc(100*time.Millisecond, func() { opened <- second.by.WriteValue32(second.word, 1) })
	select {
	case err := <-result:
		require.NoError(t, err)
	case <-time.After(patience):
		require.FailNow(t, "Synchronize hangs")
	}
	require.NoError(t, <-opened)
	synchronize(t, s)
}

// Work that was enqueued has to be waited for also while its stream closes: who frees memory asks the device.
func synchronizeWaitsForStreamsThatClose(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	g := newGate(t, d)
	var after counter
	g.hold(t, s)
	require.NoError(t, enqueue(s, after.RunKernel))
	g.await(t)
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	require.Eventually(t, func() bool {
		_, err := s.Query()
		return errors.Is(err, device.ErrClosed)
	}, patience, time.Millisecond)
	short, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	assert.ErrorIs(t, d.Synchronize(short), context.DeadlineExceeded)
	g.open(t)
	require.NoError(t, d.Synchronize(bounded(t)))
	assert.EqualValues(t, 1, after.runs.Load())
	require.NoError(t, <-closed)
	require.NoError(t, d.Synchronize(bounded(t)))
}

// A stream may come to a capture with work under way, also one that joins the capture of another: who frees memory has to wait for it.
func synchronizeWaitsForWhatCameBeforeACapture(t *testing.T, h Harness) {
	for _, how := range []string{"begins", "joins"} {
		t.Run(how, func(t *testing.T) {
			d := h.open(t)
			origin, fork := newStream(t, d), newStream(t, d)
			forked, joined := newEvent(t, d), newEvent(t, d)
			held := origin
			if how == "joins" {
				held = fork
			}
			g := newGate(t, d)
			g.hold(t, held)
			g.await(t)
			require.NoError(t, origin.BeginCapture())
			require.NoError(t, origin.Record(forked))
			require.NoError(t, fork.WaitEvent(forked))
			short, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
			defer cancel()
			assert.ErrorIs(t, d.Synchronize(short), context.DeadlineExceeded)
			g.open(t)
			require.NoError(t, d.Synchronize(bounded(t)))
			require.NoError(t, fork.Record(joined))
			require.NoError(t, origin.WaitEvent(joined))
			graph, err := origin.EndCapture()
			require.NoError(t, err)
			require.NoError(t, graph.Close())
		})
	}
}

func badArguments(t *testing.T, h Harness) {
	d := h.open(t)
	s := newStream(t, d)
	g := capture(t, s, func() {})
	other := h.Other(t)
	foreign := newEvent(t, other)
	_, sinceErr := newEvent(t, d).Since(foreign)
	refused := []error{
		s.HostFunc(nil), s.Record(nil), s.Record(h.NilEvent), s.WaitEvent(nil), s.WaitEvent(h.NilEvent), s.Record(foreign),
		g.Launch(nil), g.Launch(h.NilStream), g.Launch(newStream(t, other)), sinceErr,
	}
	if l, ok := s.(device.HostLauncher); ok {
		refused = append(refused, l.Launch(nil))
	}
	for i, err := range refused {
		var arg *errs.ArgumentError
		assert.ErrorAs(t, err, &arg, "call %d", i)
	}
	require.NoError(t, other.Close())
}

func enqueueingAllocatesNothing(t *testing.T, h Harness) {
	if slices.Contains(h.Allocates, "all") {
		t.Skip("every call of this device allocates")
	}
	d := h.open(t)
	s, other := newStream(t, d), newStream(t, d)
	e := newEvent(t, d)
	p := alloc(t, d, 4096)
	var c counter
	fn := func() {}
	launcher, launches := s.(device.HostLauncher)
	tenKernels := func() {
		for range 10 {
			if launches {
				require.NoError(t, launcher.Launch(&c))
			} else {
				require.NoError(t, s.Fill(p.Add(512), 1, 64))
			}
		}
	}
	plain, inner := capture(t, s, tenKernels), capture(t, s, tenKernels)
	outer := capture(t, s, func() { require.NoError(t, inner.Launch(s)) })

	type call struct {
		name string
		do   func() error
	}
	calls := []call{
		{"HostFunc", func() error { return s.HostFunc(fn) }},
		{"Copy", func() error { return s.Copy(p, p.Add(1024), 64) }},
		{"Fill", func() error { return s.Fill(p.Add(128), 7, 64) }},
		{"WriteValue32", func() error { return s.WriteValue32(p.Add(2048), 1) }},
		{"WaitValue32", func() error { return s.WaitValue32(p.Add(2048), 1) }},
		{"Record", func() error { return s.Record(e) }},
		{"WaitEvent", func() error { return other.WaitEvent(e) }},
		{"Graph.Launch", func() error { return plain.Launch(s) }},
		{"nested Graph.Launch", func() error { return inner.Launch(s) }},
		{"nested Graph.Launch", func() error { return outer.Launch(s) }},
	}
	if launches {
		calls = append(calls, call{"Launch", func() error { return launcher.Launch(&c) }})
	}
	calls = slices.DeleteFunc(calls, func(c call) bool { return slices.Contains(h.Allocates, c.name) })
	ctx := bounded(t)
	var failed error
	note := func(err error) {
		if err != nil {
			failed = err
		}
	}
	round := func() {
		for range 20 {
			for i := range calls {
				note(calls[i].do())
			}
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
