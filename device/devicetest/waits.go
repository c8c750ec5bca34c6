package devicetest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
)

func valuesAcrossStreams(t *testing.T, h Harness) {
	d := h.open(t)
	a, b := newStream(t, d), newStream(t, d)
	turns, start := h.many(200, 500), uint32(0xffffffa0) // passes through zero
	flag, data, sums := alloc(t, d, 8), alloc(t, d, 64), alloc(t, d, int64(64*turns))
	// Where this process sees the memory, Go code that the streams order by values alone must see it as well.
	var shared []byte
	if m, ok := d.(device.HostMemory); ok {
		var err error
		shared, err = m.Bytes(alloc(t, d, 8), 8)
		require.NoError(t, err)
	}
	require.NoError(t, a.WriteValue32(flag, start))
	require.NoError(t, a.WriteValue32(flag.Add(4), start))
	synchronize(t, a)
	sum := uint64(0)
	for n := range turns {
		i := uint32(n + 1)
		require.NoError(t, b.WaitValue32(flag, start+i))
		require.NoError(t, b.Copy(sums.Add(64*int64(n)), data, 64))
		if shared != nil {
			require.NoError(t, b.HostFunc(func() { sum += binary.LittleEndian.Uint64(shared) }))
		}
		require.NoError(t, b.WriteValue32(flag.Add(4), start+i))

		require.NoError(t, a.Fill(data, byte(i), 64))
		if shared != nil {
			require.NoError(t, a.HostFunc(func() { binary.LittleEndian.PutUint64(shared, uint64(i)) }))
		}
		require.NoError(t, a.WriteValue32(flag, start+i))
		require.NoError(t, a.WaitValue32(flag.Add(4), start+i))
	}
	synchronize(t, a)
	synchronize(t, b)
	got := read(t, d, sums, 64*turns)
	for i := range turns {
		require.Equal(t, 64, bytes.Count(got[64*i:][:64], []byte{byte(i + 1)}), "turn %d", i)
	}
	if shared != nil {
		assert.EqualValues(t, turns*(turns+1)/2, sum)
	}
}

func waitValueHoldsUp(t *testing.T, h Harness) {
	d := h.open(t)
	s, other := newStream(t, d), newStream(t, d)
	p := alloc(t, d, 4)
	var after counter
	require.NoError(t, s.WaitValue32(p, 5))
	require.NoError(t, enqueue(s, after.RunKernel))
	require.NoError(t, other.WriteValue32(p, 4))
	synchronize(t, other)
	time.Sleep(10 * time.Millisecond)
	done, err := s.Query()
	require.NoError(t, err)
	assert.False(t, done)
	assert.Zero(t, after.runs.Load())
	require.NoError(t, other.WriteValue32(p, 6))
	synchronize(t, s)
	assert.EqualValues(t, 1, after.runs.Load())
	require.NoError(t, s.WaitValue32(p, 6))
	require.NoError(t, s.WaitValue32(p, 0x80000006+1), "more than half the circle ahead is behind")
	synchronize(t, s)
}

func waitValueTimesOut(t *testing.T, h Harness) {
	d := h.Open(t, Options{WaitTimeout: 60 * time.Millisecond})
	s := newStream(t, d)
	p := alloc(t, d, 4)
	var after counter
	require.NoError(t, s.WaitValue32(p, 1))
	require.NoError(t, enqueue(s, after.RunKernel))
	err := s.Synchronize(bounded(t))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	var work *device.WorkError
	require.ErrorAs(t, err, &work)
	assert.Equal(t, "WaitValue32", work.Op)
	assert.Equal(t, p, work.Addr)
	assert.EqualValues(t, 1, after.runs.Load())
}

func waitValueTimesOutInAGraph(t *testing.T, h Harness) {
	d := h.Open(t, Options{WaitTimeout: 60 * time.Millisecond})
	s := newStream(t, d)
	p := alloc(t, d, 4)
	g := capture(t, s, func() { require.NoError(t, s.WaitValue32(p, 1)) })
	require.NoError(t, g.Launch(s))
	require.ErrorIs(t, s.Synchronize(bounded(t)), os.ErrDeadlineExceeded)
}

func waitValueEndsWhenAPeerIsLost(t *testing.T, h Harness) {
	gone := errors.New("rank 3 is gone")
	var lost atomic.Bool
	d := h.Open(t, Options{Err: func() error {
		if lost.Load() {
			return gone
		}
		return nil
	}})
	s := newStream(t, d)
	require.NoError(t, s.WaitValue32(alloc(t, d, 4), 1))
	time.AfterFunc(30*time.Millisecond, func() { lost.Store(true) })
	require.ErrorIs(t, s.Synchronize(bounded(t)), gone)
}

func waitValueEndsWhenItsStreamIsClosed(t *testing.T, h Harness) {
	d := h.Open(t, Options{WaitTimeout: 500 * time.Millisecond})
	s := newStream(t, d)
	p := alloc(t, d, 256)
	for i := range int64(10) {
		require.NoError(t, s.WaitValue32(p.Add(4*i), 1))
	}
	begin := time.Now()
	err := s.Close()
	var work *device.WorkError
	require.ErrorAs(t, err, &work)
	assert.Less(t, time.Since(begin), 20*time.Second)
	assert.Zero(t, h.Held(d).Streams)
}

// The longest Duration is no bound at all: it does not wrap around to one that is over.
func longestWaitTimeout(t *testing.T, h Harness) {
	d := h.Open(t, Options{WaitTimeout: math.MaxInt64})
	s, other := newStream(t, d), newStream(t, d)
	p := alloc(t, d, 4)
	began := time.Now()
	hostWork(t, s, &job{gate: func() bool { return time.Since(began) > 100*time.Millisecond }})
	synchronize(t, s)

	require.NoError(t, s.WaitValue32(p, 1))
	closed := make(chan error, 1)
	go func() { closed <- s.Close() }()
	select {
	case err := <-closed:
		require.NoError(t, err, "it waits for what is written later")
		require.Fail(t, "the stream has ended before its wait")
	case <-time.After(100 * time.Millisecond):
	}
	require.NoError(t, other.WriteValue32(p, 1))
	require.NoError(t, <-closed)
}
