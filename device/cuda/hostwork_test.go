package cuda_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	cu "github.com/symmem/symmem/internal/cuda"
)

// endless is work that never ends.
type endless struct{}

func (endless) Start() (device.HostProgress, error) { return endless{}, nil }
func (endless) Poll() (bool, error)                 { return false, nil }
func (endless) String() string                      { return "endless" }

// openings open a device on the simulated driver, and on a GPU where there is one.
var openings = map[string]func(t *testing.T, o *cuda.Options) *cuda.Device{
	"fake": func(t *testing.T, o *cuda.Options) *cuda.Device { return openFake(t, newFake(1), o) },
	"gpu":  func(t *testing.T, o *cuda.Options) *cuda.Device { return open(t, o) },
}

// TestHostWorkThatDoesNotEnd: the stream goes on with an error, and so does a graph, and both can be used again.
func TestHostWorkThatDoesNotEnd(t *testing.T) {
	for name, open := range openings {
		synchronize := func(t *testing.T, s device.Stream, want error) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			err := s.Synchronize(ctx)
			require.ErrorIs(t, err, want)
			var work *device.WorkError
			require.ErrorAs(t, err, &work)
			assert.Equal(t, "HostWork(endless)", work.Op)
			require.NoError(t, s.Synchronize(ctx))
		}
		t.Run(name+"/times out", func(t *testing.T) {
			d := open(t, &cuda.Options{WaitTimeout: 60 * time.Millisecond})
			s := newStream(t, d)
			require.NoError(t, s.HostWork(endless{}))
			synchronize(t, s, os.ErrDeadlineExceeded)
			require.NoError(t, s.BeginCapture())
			require.NoError(t, s.HostWork(endless{}))
			g, err := s.EndCapture()
			require.NoError(t, err)
			for range 3 {
				require.NoError(t, g.Launch(s))
				synchronize(t, s, os.ErrDeadlineExceeded)
			}
			require.NoError(t, g.Close())
		})
		t.Run(name+"/its own bound", func(t *testing.T) {
			// Work that has the device's bound for itself says what it waited for, though it looks a little later.
			own := errors.New("rank 3 did not come")
			d := open(t, &cuda.Options{WaitTimeout: 60 * time.Millisecond})
			s := newStream(t, d)
			began := time.Now()
			require.NoError(t, s.HostWork(&jobOf{poll: func() (bool, error) {
				if time.Since(began) < 160*time.Millisecond {
					return false, nil
				}
				return true, own
			}}))
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			require.ErrorIs(t, s.Synchronize(ctx), own)
		})
		t.Run(name+"/a peer is lost", func(t *testing.T) {
			// The ranks that are left go on, and their work ends or fails by itself.
			d := open(t, &cuda.Options{Err: func() error { return errors.New("rank 3 is gone") }})
			s := newStream(t, d)
			require.NoError(t, s.HostWork(lasting(100*time.Millisecond)))
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			require.NoError(t, s.Synchronize(ctx))
		})
		t.Run(name+"/the stream is closed", func(t *testing.T) {
			d := open(t, &cuda.Options{WaitTimeout: 500 * time.Millisecond})
			s := newStream(t, d)
			for range 10 {
				require.NoError(t, s.HostWork(endless{}))
			}
			began := time.Now()
			var work *device.WorkError
			require.ErrorAs(t, s.Close(), &work)
			assert.Less(t, time.Since(began), 20*time.Second)
		})
	}
}

// copying is work of the CPU that copies by another stream of the device and waits for the event behind the copy.
type copying struct {
	stream device.Stream
	event  device.Event
	to, of device.Ptr
	runs   atomic.Int64
}

func (c *copying) Start() (device.HostProgress, error) {
	c.runs.Add(1)
	return c, errors.Join(c.stream.Copy(c.to, c.of, 8), c.stream.Record(c.event))
}

func (c *copying) Poll() (bool, error) { return c.event.Query() }

// TestHostWorkInFullQueues: more is enqueued than the driver's queues hold, so that the calls which enqueue wait for room, while the
// work that makes the room calls the driver too.
func TestHostWorkInFullQueues(t *testing.T) {
	d := open(t, nil)
	s := newStream(t, d)
	w := &copying{stream: newStream(t, d), event: newEvent(t, d), to: alloc(t, d, 8), of: alloc(t, d, 8)}
	const n, parts = 4000, 50
	finish := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		require.NoError(t, s.Synchronize(ctx))
		assert.EqualValues(t, n, w.runs.Swap(0))
	}
	for range n {
		require.NoError(t, s.HostWork(w))
	}
	finish()
	require.NoError(t, s.BeginCapture())
	for range parts {
		require.NoError(t, s.HostWork(w))
		require.NoError(t, s.Fill(w.of, 1, 8))
	}
	g, err := s.EndCapture()
	require.NoError(t, err)
	for range n / parts {
		require.NoError(t, g.Launch(s))
	}
	finish()
	require.NoError(t, g.Close())
}

// noting is work of the CPU that notes its name.
type noting struct {
	name string
	to   *[]string
}

func (n noting) Start() (device.HostProgress, error) { return n, nil }
func (n noting) Poll() (bool, error)                 { *n.to = append(*n.to, n.name); return true, nil }

// TestHostWorkBehindHostWork: the CPU goes on with work behind work without the GPU, and with nothing that is behind anything else.
func TestHostWorkBehindHostWork(t *testing.T) {
	for name, open := range openings {
		t.Run(name, func(t *testing.T) {
			d := open(t, nil)
			s, other := newStream(t, d), newStream(t, d)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			var order []string
			work := func(name string) { t.Helper(); require.NoError(t, s.HostWork(noting{name, &order})) }
			note := func(name string) {
				t.Helper()
				require.NoError(t, s.HostFunc(func() { order = append(order, name) }))
			}
			event, between := newEvent(t, d), newEvent(t, d)
			all := func() {
				t.Helper()
				work("a")
				work("b")
				work("c")
				note("1")
				work("d")
				require.NoError(t, s.Record(between))
				work("e")
				note("2")
				require.NoError(t, s.Record(event))
				require.NoError(t, other.WaitEvent(event))
				require.NoError(t, other.HostWork(noting{"f", &order}))
				require.NoError(t, other.Record(event))
				require.NoError(t, s.WaitEvent(event))
				work("g")
			}
			want := []string{"a", "b", "c", "1", "d", "e", "2", "f", "g"}
			for range 3 {
				all()
			}
			require.NoError(t, s.Synchronize(ctx))
			assert.Equal(t, append(append(append([]string(nil), want...), want...), want...), order)
			ended, err := between.Query()
			require.NoError(t, err)
			assert.True(t, ended)

			order = nil
			require.NoError(t, s.BeginCapture())
			all()
			g, err := s.EndCapture()
			require.NoError(t, err)
			work("z")
			require.NoError(t, g.Launch(s))
			work("z")
			require.NoError(t, g.Launch(s))
			require.NoError(t, s.Synchronize(ctx))
			assert.Equal(t, append(append(append([]string{"z"}, want...), "z"), want...), order)
			require.NoError(t, g.Close())

			// Whoever has the handle may have enqueued something between two works.
			order = nil
			require.NotZero(t, s.Handle())
			all()
			require.NoError(t, s.Synchronize(ctx))
			assert.Equal(t, want, order)
		})
	}
}

// TestHostWorkInLongRuns: work may also be enqueued behind work that has ended.
func TestHostWorkInLongRuns(t *testing.T) {
	d := openFake(t, newFake(1), nil)
	s := newStream(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var order []string
	for range 500 {
		require.NoError(t, s.HostWork(noting{"x", &order}))
		require.NoError(t, s.HostWork(noting{"x", &order}))
		require.NoError(t, s.Synchronize(ctx))
	}
	assert.Len(t, order, 1000)
}

// TestHostWorkBehindVeryManyWorks: work waits for the GPU also when the CPU has gone on by itself with more works before it than the half of 2^32.
func TestHostWorkBehindVeryManyWorks(t *testing.T) {
	d := openFake(t, newFake(1), nil)
	s, word := newStream(t, d), alloc(t, d, 4)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var order []string
	require.NoError(t, s.HostWork(noting{"first", &order}))
	require.NoError(t, s.Synchronize(ctx))
	cuda.SkipWork(s, 1<<31-8)
	for range 16 {
		require.NoError(t, s.HostWork(noting{"behind", &order}))
	}
	require.NoError(t, s.Synchronize(ctx))
	began := make(chan struct{})
	require.NoError(t, s.WaitValue32(word, 1))
	require.NoError(t, s.HostWork(&jobOf{poll: func() (bool, error) { close(began); return true, nil }}))
	select {
	case <-began:
		t.Error("it began before the GPU had come to it")
	case <-time.After(100 * time.Millisecond):
	}
	require.NoError(t, d.CopyFromHost(word, []byte{1, 0, 0, 0}))
	require.NoError(t, s.Synchronize(ctx))
	<-began
	assert.Len(t, order, 17)
}

// heldUp is work that ends when it is let go.
type heldUp struct{ gone atomic.Bool }

func (h *heldUp) Start() (device.HostProgress, error) { return h, nil }
func (h *heldUp) Poll() (bool, error)                 { return h.gone.Load(), nil }

// TestManyWorksInOrder: much work behind work that lasts, and more of it while the first ends, each once and in its turn.
func TestManyWorksInOrder(t *testing.T) {
	d := openFake(t, newFake(1), nil)
	s := newStream(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var order, want []string
	first := &heldUp{}
	require.NoError(t, s.HostWork(first))
	for i := range 1000 {
		if i == 300 {
			first.gone.Store(true)
		}
		name := fmt.Sprint(i)
		want = append(want, name)
		require.NoError(t, s.HostWork(noting{name, &order}))
	}
	require.NoError(t, s.Synchronize(ctx))
	assert.Equal(t, want, order)
}

// step is work of the CPU, or a host function, that notes its number after some looks.
type step struct {
	number, looks int
	to            *steps
}

// steps are what a stream has done.
type steps struct {
	mu   sync.Mutex
	done []int
}

func (s *steps) note(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.done = append(s.done, n)
}

// stepRun is a run of a step.
type stepRun struct {
	step
	left int
}

func (s step) Start() (device.HostProgress, error) { return &stepRun{step: s, left: s.looks}, nil }

func (r *stepRun) Poll() (bool, error) {
	if r.left--; r.left >= 0 {
		return false, nil
	}
	r.to.note(r.number)
	return true, nil
}

// TestHostWorkAmongOtherWork enqueues work of the CPU and other work at random, directly and in graphs, on several streams at once:
// each does what it was given, in that order.
func TestHostWorkAmongOtherWork(t *testing.T) {
	for name, open := range openings {
		t.Run(name, func(t *testing.T) {
			d := open(t, nil)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var all sync.WaitGroup
			for seed := range uint64(3) {
				s := newStream(t, d)
				all.Go(func() { assert.NoError(t, amongOtherWork(ctx, s, rand.New(rand.NewPCG(seed, 7))), "seed %d", seed) })
			}
			all.Wait()
		})
	}
}

func amongOtherWork(ctx context.Context, s device.Stream, r *rand.Rand) error {
	var done steps
	var want []int
	event, err := s.Device().NewEvent()
	if err != nil {
		return err
	}
	enqueue := func(n int) error {
		if r.IntN(4) == 0 {
			if err := s.Record(event); err != nil {
				return err
			}
		}
		if r.IntN(4) == 0 {
			return s.HostFunc(func() { done.note(n) })
		}
		return s.(device.HostWorker).HostWork(step{number: n, looks: r.IntN(4), to: &done})
	}
	for n := 0; n < 300; n++ {
		if r.IntN(10) > 0 {
			if err := enqueue(n); err != nil {
				return err
			}
			want = append(want, n)
		} else {
			if err := s.BeginCapture(); err != nil {
				return err
			}
			var inside []int
			for range 1 + r.IntN(5) {
				n++
				if err := enqueue(n); err != nil {
					return err
				}
				inside = append(inside, n)
			}
			g, err := s.EndCapture()
			if err != nil {
				return err
			}
			for range r.IntN(4) {
				if err := g.Launch(s); err != nil {
					return err
				}
				want = append(want, inside...)
			}
			if err := g.Close(); err != nil {
				return err
			}
		}
		if r.IntN(40) == 0 {
			if err := s.Synchronize(ctx); err != nil {
				return err
			}
		}
	}
	if err := s.Synchronize(ctx); err != nil {
		return err
	}
	if !slices.Equal(done.done, want) {
		return fmt.Errorf("done: %v, wanted: %v", done.done, want)
	}
	return errors.Join(event.Close(), s.Close())
}

// jobOf is work of the CPU that tests are made of.
type jobOf struct {
	start func() error
	poll  func() (bool, error)
}

func (j *jobOf) Start() (device.HostProgress, error) {
	if j.start != nil {
		if err := j.start(); err != nil {
			return nil, err
		}
	}
	return j, nil
}

func (j *jobOf) Poll() (bool, error) {
	if j.poll == nil {
		return true, nil
	}
	return j.poll()
}

// TestRefusedLaunchTakesNothingOver: a launch that the driver never saw leaves the errors of the one under way to its stream.
func TestRefusedLaunchTakesNothingOver(t *testing.T) {
	f := newFake(1)
	d := openFake(t, f, nil)
	s, other := newStream(t, d), newStream(t, d)
	bad := errors.New("bad")
	var open atomic.Bool
	require.NoError(t, s.BeginCapture())
	require.NoError(t, s.HostWork(&jobOf{poll: func() (bool, error) {
		if open.Load() {
			return false, bad
		}
		return false, nil
	}}))
	g, err := s.EndCapture()
	require.NoError(t, err)
	require.NoError(t, g.Launch(s))
	f.failing("cuGraphLaunch", cu.InvalidValue)
	require.Error(t, g.Launch(other))
	f.failing("cuGraphLaunch", cu.Success)
	require.NoError(t, other.Close())
	require.ErrorIs(t, g.Launch(other), device.ErrClosed)
	open.Store(true)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.ErrorIs(t, s.Synchronize(ctx), bad)
	require.NoError(t, g.Close())
}

// TestHostWorkThatBlocks: the stream goes on after WaitTimeout though a call of the work does not return, and everything works when
// it has.
func TestHostWorkThatBlocks(t *testing.T) {
	for _, where := range []string{"start", "poll"} {
		t.Run(where, func(t *testing.T) {
			d := openFake(t, newFake(1), &cuda.Options{WaitTimeout: 60 * time.Millisecond})
			s := newStream(t, d)
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			gate := make(chan struct{})
			j := &jobOf{}
			if where == "start" {
				j.start = func() error { <-gate; return nil }
			} else {
				j.poll = func() (bool, error) { <-gate; return true, nil }
			}
			require.NoError(t, s.HostWork(j))
			require.ErrorIs(t, s.Synchronize(ctx), os.ErrDeadlineExceeded)
			close(gate)
			require.NoError(t, s.HostWork(&jobOf{}))
			require.NoError(t, s.Synchronize(ctx))
		})
	}
}

// toldOf is work that is told of failures.
type toldOf struct {
	device.HostWork
	failed func(error)
}

func (w toldOf) Failed(err error) { w.failed(err) }

// TestHostWorkThatWasCutOff: it is driven on to its end beside what comes after it, and can then be used again.
func TestHostWorkThatWasCutOff(t *testing.T) {
	d := openFake(t, newFake(1), &cuda.Options{WaitTimeout: 60 * time.Millisecond})
	s := newStream(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	var running, long, ended atomic.Bool
	long.Store(true)
	j := &jobOf{
		start: func() error {
			if running.Swap(true) {
				return errors.New("it is under way")
			}
			return nil
		},
		poll: func() (bool, error) {
			if long.Load() {
				return false, nil
			}
			running.Store(false)
			ended.Store(true)
			return true, nil
		},
	}
	var told, before atomic.Bool
	require.NoError(t, s.HostWork(toldOf{j, func(err error) { told.Store(errors.Is(err, os.ErrDeadlineExceeded)) }}))
	require.NoError(t, s.HostFunc(func() { before.Store(told.Load()) }))
	require.ErrorIs(t, s.Synchronize(ctx), os.ErrDeadlineExceeded)
	assert.True(t, before.Load(), "the work is told before the stream goes on")
	require.NoError(t, s.HostWork(&jobOf{}))
	require.NoError(t, s.Synchronize(ctx), "other work does not wait for it")
	long.Store(false)
	require.Eventually(t, ended.Load, 20*time.Second, time.Millisecond)
	require.NoError(t, s.HostWork(j))
	require.NoError(t, s.Synchronize(ctx))
}

// TestHostWorkBehindWorkThatWasCutOff: in a graph, too, what follows directly is done all the same.
func TestHostWorkBehindWorkThatWasCutOff(t *testing.T) {
	d := openFake(t, newFake(1), &cuda.Options{WaitTimeout: 60 * time.Millisecond})
	s := newStream(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	first := &heldUp{}
	defer first.gone.Store(true)
	var order []string
	require.NoError(t, s.BeginCapture())
	require.NoError(t, s.HostWork(first))
	require.NoError(t, s.HostWork(noting{"second", &order}))
	require.NoError(t, s.HostWork(noting{"third", &order}))
	g, err := s.EndCapture()
	require.NoError(t, err)
	require.NoError(t, g.Launch(s))
	require.ErrorIs(t, s.Synchronize(ctx), os.ErrDeadlineExceeded)
	assert.Equal(t, []string{"second", "third"}, order)

	// And the lane is good for the next launch.
	first.gone.Store(true)
	require.NoError(t, g.Launch(s))
	require.NoError(t, s.Synchronize(ctx))
	assert.Equal(t, []string{"second", "third", "second", "third"}, order)
	require.NoError(t, g.Close())
}

// TestHostWorkOutlivesItsStream: work that was cut off in a call that did not return is driven on to its end when that has returned, also if its stream was
// closed meanwhile.
func TestHostWorkOutlivesItsStream(t *testing.T) {
	for _, where := range []string{"start", "poll"} {
		t.Run(where, func(t *testing.T) {
			d := openFake(t, newFake(1), &cuda.Options{WaitTimeout: 60 * time.Millisecond})
			s := newStream(t, d)
			gate := make(chan struct{})
			var looks, ended atomic.Int32
			j := &jobOf{}
			if where == "start" {
				j.start = func() error { <-gate; return nil }
			}
			j.poll = func() (bool, error) {
				looks := looks.Add(1)
				if where == "poll" && looks == 1 {
					<-gate
				}
				if looks < 4 {
					return false, nil
				}
				ended.Add(1)
				return true, nil
			}
			require.NoError(t, s.HostWork(j))
			var work *device.WorkError
			require.ErrorAs(t, s.Close(), &work)
			close(gate)
			require.Eventually(t, func() bool { return ended.Load() > 0 }, 20*time.Second, time.Millisecond)
			other := newStream(t, d)
			require.NoError(t, other.HostWork(&jobOf{}))
			require.NoError(t, other.Synchronize(t.Context()))
			assert.EqualValues(t, 1, ended.Load())
		})
	}
}

// TestHostWorkThatEndsItsGoroutine: it fails, and later work is done.
func TestHostWorkThatEndsItsGoroutine(t *testing.T) {
	d := openFake(t, newFake(1), nil)
	s := newStream(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for _, j := range []*jobOf{
		{start: func() error { runtime.Goexit(); return nil }},
		{poll: func() (bool, error) { runtime.Goexit(); return true, nil }},
	} {
		require.NoError(t, s.HostWork(j))
		require.ErrorContains(t, s.Synchronize(ctx), "runtime.Goexit")
		require.NoError(t, s.HostWork(&jobOf{}))
		require.NoError(t, s.Synchronize(ctx))
	}
}

// TestCloseEndsWorksOfAGraphOfTwoStreams: those of a graph end with a stream that has launched it, also where another stream has launched it since.
func TestCloseEndsWorksOfAGraphOfTwoStreams(t *testing.T) {
	d := openFake(t, newFake(1), &cuda.Options{WaitTimeout: 200 * time.Millisecond})
	s, other := newStream(t, d), newStream(t, d)
	g := capture(t, s, func() {
		for range 4 { // each by itself may last longer
			require.NoError(t, s.HostWork(endless{}))
		}
	})
	require.NoError(t, g.Launch(s))
	require.NoError(t, g.Launch(other))
	var work *device.WorkError
	err := s.Close()
	require.ErrorAs(t, err, &work)
	require.NotContains(t, err.Error(), "not ended the work")
	require.Error(t, other.Close())
	require.NoError(t, g.Close())
}

// TestManyWorksEndWithTheirStream: none begins any more when the time of a closing stream is over.
func TestManyWorksEndWithTheirStream(t *testing.T) {
	d := openFake(t, newFake(1), &cuda.Options{WaitTimeout: 200 * time.Millisecond})
	s := newStream(t, d)
	for range 300 {
		require.NoError(t, s.HostWork(endless{}))
	}
	var work *device.WorkError
	err := s.Close()
	require.ErrorAs(t, err, &work)
	require.NoError(t, d.Close())
}
