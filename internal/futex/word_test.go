package futex_test

import (
	"errors"
	"math"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/futex"
)

// within returns a bound that no test reaches unless something is broken.
func within() futex.Bound { return futex.Bound{Deadline: time.Now().Add(time.Minute)} }

func newWord(t testing.TB) *futex.Word {
	t.Helper()
	w, err := futex.At(make([]byte, futex.WordSize))
	require.NoError(t, err)
	return w
}

func TestAtRefusesWhatCannotBeAWord(t *testing.T) {
	b := make([]byte, 64)
	for _, bad := range [][]byte{nil, {}, b[:7], b[4:], b[1:]} {
		_, err := futex.At(bad)
		require.ErrorIs(t, err, errs.ErrInvalid)
	}
	w, err := futex.At(b[8:16])
	require.NoError(t, err)
	w.Store(0x01020304)
	assert.Equal(t, uint32(0x01020304), *(*uint32)(unsafe.Pointer(&b[8])), "the value is the first half")
	assert.Zero(t, *(*uint32)(unsafe.Pointer(&b[12])), "at rest there is no sleeper")
	assert.EqualValues(t, futex.WordSize, unsafe.Sizeof(*w))
}

func TestWordCountsInACircle(t *testing.T) {
	w := newWord(t)
	w.Store(math.MaxUint32)
	require.NoError(t, w.WaitAtLeast(math.MaxUint32-7, futex.Bound{}))
	assert.Equal(t, uint32(2), w.Add(3))
	require.NoError(t, w.WaitAtLeast(math.MaxUint32, futex.Bound{}))
	require.NoError(t, w.WaitAtLeast(2, futex.Bound{}))
	err := w.WaitAtLeast(3, futex.Bound{Deadline: time.Now()})
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	var timeout *futex.TimeoutError
	require.ErrorAs(t, err, &timeout)
	assert.Equal(t, &futex.TimeoutError{Want: 3, Have: 2}, timeout)
	assert.EqualError(t, err, "it did not come within the time that the setting kernel-timeout gives (the word is at 2, and not at 3)")
	assert.True(t, timeout.Timeout())
	assert.Equal(t, uint32(2), w.Load())
}

func TestBoundEndsASleep(t *testing.T) {
	gone := errors.New("rank 3 is gone")
	plain := new(uint32)
	w := newWord(t)
	waits := map[string]func(futex.Bound) error{
		"word":  func(b futex.Bound) error { return w.WaitAtLeast(1, b) },
		"plain": func(b futex.Bound) error { return futex.WaitAtLeast(plain, 1, b) },
	}
	for name, wait := range waits {
		t.Run(name, func(t *testing.T) {
			require.ErrorIs(t, wait(futex.Bound{Deadline: time.Now().Add(30 * time.Millisecond)}), os.ErrDeadlineExceeded)
			require.ErrorIs(t, wait(futex.Bound{Err: func() error { return gone }}), gone)

			asked := 0
			err := wait(futex.Bound{Deadline: time.Now().Add(time.Minute), Err: func() error {
				if asked++; asked == 4 {
					return gone
				}
				return nil
			}})
			require.ErrorIs(t, err, gone)
			assert.Equal(t, 4, asked, "the bound is asked before every sleep")
		})
	}
	// Nobody sleeps any more, so the count must be back at zero: the second half of the word.
	assert.Zero(t, *(*uint32)(unsafe.Add(unsafe.Pointer(w), 4)))
}

func TestStoreWakesASleeper(t *testing.T) {
	w := newWord(t)
	sleepers := (*atomic.Uint32)(unsafe.Add(unsafe.Pointer(w), 4))
	done := make(chan error, 1)
	go func() { done <- w.WaitAtLeast(7, within()) }()
	require.Eventually(t, func() bool { return sleepers.Load() == 1 }, time.Minute, time.Millisecond)
	w.Store(6) // not enough: it wakes and sleeps again
	w.Store(7)
	require.NoError(t, <-done)
	assert.Zero(t, sleepers.Load())
}

func TestPlainWordSeesPublishedAndPlainWrites(t *testing.T) {
	addr := new(uint32)
	for v := uint32(1); v <= 20; v++ {
		done := make(chan error, 1)
		go func() { done <- futex.WaitAtLeast(addr, v, within()) }()
		time.Sleep(300 * time.Microsecond)
		if v%2 == 0 {
			futex.Publish(addr, v)
		} else {
			atomic.StoreUint32(addr, v) // wakes nobody
		}
		require.NoError(t, <-done)
	}
}

func TestWaitAndWake(t *testing.T) {
	addr := new(uint32)
	require.NoError(t, futex.Wait(addr, 1, time.Minute), "a word that is not old is no reason to sleep")
	require.NoError(t, futex.Wait(addr, 0, time.Millisecond), "the timeout is no error")
	require.NoError(t, futex.Wait(addr, 0, 0))
	require.NoError(t, futex.Wait(addr, 0, -time.Second))
	n, err := futex.Wake(addr, futex.All)
	require.NoError(t, err)
	assert.Zero(t, n)
	n, err = futex.Wake(addr, -1)
	require.NoError(t, err)
	assert.Zero(t, n)
}

// A ring of many more goroutines than cores hands a token round: each waits for its own turn in one word all share, so that
// every store wakes all of them, and in a word of its own in the second half.
func TestMoreWaitersThanCores(t *testing.T) {
	members := 8 * runtime.NumCPU()
	const laps = 50
	t.Run("one word", func(t *testing.T) {
		w := newWord(t)
		errsOf := make([]error, members)
		var wg sync.WaitGroup
		for i := range members {
			wg.Go(func() {
				for lap := range laps {
					turn := uint32(lap*members + i)
					if errsOf[i] = w.WaitAtLeast(turn, within()); errsOf[i] != nil {
						return
					}
					if got := w.Add(1); got != turn+1 {
						errsOf[i] = errors.New("two had the token")
						return
					}
				}
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errsOf...))
		assert.Equal(t, uint32(laps*members), w.Load())
	})
	t.Run("a word each", func(t *testing.T) {
		words := make([]*futex.Word, members)
		for i := range words {
			words[i] = newWord(t)
		}
		errsOf := make([]error, members)
		var wg sync.WaitGroup
		for i := range members {
			wg.Go(func() {
				for lap := range uint32(laps) {
					if errsOf[i] = words[i].WaitAtLeast(lap+1, within()); errsOf[i] != nil {
						return
					}
					next := lap + 1
					if i == members-1 {
						next++ // the first member is a lap ahead of the last
					}
					words[(i+1)%members].Store(next)
				}
			})
		}
		words[0].Store(1)
		wg.Wait()
		require.NoError(t, errors.Join(errsOf...))
	})
}

func TestWaitsAllocateNothing(t *testing.T) {
	w := newWord(t)
	plain := new(uint32)
	w.Store(1)
	*plain = 1
	assert.Zero(t, testing.AllocsPerRun(1000, func() { _ = w.WaitAtLeast(1, futex.Bound{}) }))

	// A wait that sleeps and then succeeds: a partner answers each turn after the waiter counts as a sleeper.
	sleepers := (*atomic.Uint32)(unsafe.Add(unsafe.Pointer(w), 4))
	var turn atomic.Uint32
	turn.Store(1)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if v := turn.Load(); v != w.Load() && sleepers.Load() != 0 {
				w.Store(v)
			} else {
				time.Sleep(20 * time.Microsecond)
			}
		}
	}()
	bound := within()
	bound.Err = func() error { return nil }
	failed := false
	assert.Zero(t, testing.AllocsPerRun(50, func() {
		failed = w.WaitAtLeast(turn.Add(1), bound) != nil || failed
	}))
	close(stop)
	<-stopped
	assert.False(t, failed)
	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		_ = futex.WaitAtLeast(plain, 1, bound)
		futex.Publish(plain, 1)
	}))
}

func BenchmarkWaitFastPath(b *testing.B) {
	w := newWord(b)
	bound := within()
	b.ReportAllocs()
	for b.Loop() {
		if err := w.WaitAtLeast(0, bound); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkStoreWithoutSleepers(b *testing.B) {
	w := newWord(b)
	for b.Loop() {
		w.Store(1)
	}
}

func BenchmarkPublishWithoutSleepers(b *testing.B) {
	addr := new(uint32)
	for b.Loop() {
		futex.Publish(addr, 1)
	}
}

// BenchmarkFruitlessSpin is the cost of a wait that gives up at once: the looks at the word before the first sleep.
func BenchmarkFruitlessSpin(b *testing.B) {
	w := newWord(b)
	gone := errors.New("gone")
	bound := futex.Bound{Err: func() error { return gone }}
	b.ReportAllocs()
	for b.Loop() {
		if err := w.WaitAtLeast(1, bound); err != gone {
			b.Fatal(err)
		}
	}
}
