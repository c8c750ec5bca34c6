package nccl

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
)

// endsSoon waits until the channel is closed.
func endsSoon(t *testing.T, ended <-chan struct{}, what string) {
	t.Helper()
	require.NotNil(t, ended, what)
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Fatal(what)
	}
}

// goesOn fails the test if the channel is closed.
func goesOn(t *testing.T, ended <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-ended:
		t.Fatal(what)
	case <-time.After(10 * time.Millisecond):
	}
}

// givenUpBy returns the error of f, which is given up soon.
func givenUpBy(t *testing.T, f func(ctx context.Context) error) *StuckError {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	var stuck *StuckError
	require.ErrorAs(t, f(ctx), &stuck)
	return stuck
}

// TestCommunicatorMadeLate is aborted, and whoever waits is told afterwards.
func TestCommunicatorMadeLate(t *testing.T) {
	for _, result := range []Result{Success, InProgress, SystemError} {
		f := table()
		release := make(chan struct{})
		var aborted atomic.Int64
		f.CommInitRankScalable = func(comm *CommHandle, _, _, _ int32, _ *UniqueID, _ *ConfigLayout) Result {
			<-release
			if result != SystemError {
				*comm = 0xc0
			}
			return result
		}
		f.CommAbort = func(h CommHandle) Result { aborted.Add(int64(h)); return Success }
		l := library(t, f)
		stuck := givenUpBy(t, func(ctx context.Context) error {
			_, err := l.NewComm(ctx, options(true))
			return err
		})
		goesOn(t, stuck.Ended, "the call has not returned")
		close(release)
		endsSoon(t, stuck.Ended, "the communicator was not given up")
		want := 0xc0
		if result == SystemError {
			want = 0
		}
		assert.EqualValues(t, want, aborted.Load(), "%v", result)
	}
}

// TestChildMadeLate is aborted, whether the call or what it has begun ends late, or the parent's end is what ends it.
func TestChildMadeLate(t *testing.T) {
	for _, how := range []string{"call", "progress", "parent"} {
		t.Run(how, func(t *testing.T) {
			f := table()
			release := make(chan struct{})
			var busy atomic.Bool
			var child, parent atomic.Int64
			f.CommSplit = func(_ CommHandle, _, _ int32, comm *CommHandle, _ *ConfigLayout) Result {
				if how == "call" {
					<-release
				} else {
					busy.Store(true)
				}
				*comm = 0xc1
				return InProgress
			}
			f.CommAsyncError = func(_ CommHandle, r *Result) Result {
				if *r = Success; busy.Load() {
					*r = InProgress
				}
				return Success
			}
			f.CommAbort = func(h CommHandle) Result {
				if h == 0xc1 {
					child.Add(1)
				} else {
					parent.Add(1)
				}
				return Success
			}
			c, err := library(t, f).NewComm(t.Context(), options(true))
			require.NoError(t, err)
			stuck := givenUpBy(t, func(ctx context.Context) error {
				_, err := c.Split(ctx, nil)
				return err
			})
			goesOn(t, stuck.Ended, "the split is under way")
			switch how {
			case "call":
				close(release)
			case "progress":
				busy.Store(false)
			case "parent":
				require.NoError(t, c.Abort(t.Context(), errs.ErrPeerLost))
				assert.EqualValues(t, 1, child.Load(), "Abort waits for what is left of the call")
			}
			endsSoon(t, stuck.Ended, "the child was not given up")
			assert.EqualValues(t, 1, child.Load())
			if how != "parent" {
				require.NoError(t, c.Destroy(t.Context()), "which aborts it")
			}
			assert.EqualValues(t, 1, parent.Load())
		})
	}
}

// TestWindowMadeLate: a registration that was given up uses the memory until NCCL says that it has ended, or until the communicator's abort has.
func TestWindowMadeLate(t *testing.T) {
	for _, how := range []string{"call", "progress", "abort", "cannot ask"} {
		t.Run(how, func(t *testing.T) {
			f := table()
			release := make(chan struct{})
			var busy, deaf atomic.Bool
			f.CommWindowRegister = func(_ CommHandle, _ uint64, _ uintptr, w *WindowHandle, _ WindowFlags) Result {
				switch how {
				case "call":
					<-release
				case "cannot ask":
					deaf.Store(true)
				}
				busy.Store(how != "call")
				*w = 0x77
				return Success
			}
			f.CommAsyncError = func(_ CommHandle, r *Result) Result {
				if *r = Success; busy.Load() {
					*r = InProgress
				}
				if deaf.Load() {
					return SystemError
				}
				return Success
			}
			var removed atomic.Int64
			f.CommWindowDeregister = func(_ CommHandle, w WindowHandle) Result { removed.Add(int64(w)); return Success }
			f.CommAbort = func(CommHandle) Result { <-release; return Success }
			c, err := library(t, f).NewComm(t.Context(), options(true))
			require.NoError(t, err)
			stuck := givenUpBy(t, func(ctx context.Context) error {
				_, err := c.Register(ctx, 1<<40, 4096, WindowDefault)
				return err
			})
			goesOn(t, stuck.Ended, "the registration is under way")
			_, err = c.Lsa()
			require.ErrorIs(t, err, errs.ErrClosed, "asking does not wait for it")
			aborted := make(chan error, 1)
			switch how {
			case "call":
				close(release)
			case "progress":
				busy.Store(false)
			default:
				go func() { aborted <- c.Abort(t.Context(), errs.ErrPeerLost) }()
				goesOn(t, stuck.Ended, "the abort is under way")
				close(release)
				require.NoError(t, <-aborted)
			}
			endsSoon(t, stuck.Ended, "nobody has noticed the end")
			if how == "call" || how == "progress" {
				assert.EqualValues(t, 0x77, removed.Load(), "the window is removed")
				if how == "progress" {
					close(release)
				}
				require.NoError(t, c.Abort(t.Context(), errs.ErrPeerLost))
			}
		})
	}
}

// TestAbortDoesNotWaitForever for a call that never returns.
func TestAbortDoesNotWaitForever(t *testing.T) {
	f := table()
	release := make(chan struct{})
	f.CommWindowRegister = func(CommHandle, uint64, uintptr, *WindowHandle, WindowFlags) Result {
		<-release
		return InternalError
	}
	c, err := library(t, f).NewComm(t.Context(), options(true))
	require.NoError(t, err)
	stuck := givenUpBy(t, func(ctx context.Context) error {
		_, err := c.Register(ctx, 1<<40, 4096, WindowDefault)
		return err
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	err = c.Abort(ctx, errors.New("enough"))
	require.ErrorContains(t, err, "ending a call that was given up")
	assert.Zero(t, c.Handle(), "it is aborted all the same")
	goesOn(t, stuck.Ended, "the call has not returned")
	close(release)
	endsSoon(t, stuck.Ended, "nobody has noticed the end")
}

// TestAdoptedWithALateCall: a communicator that is the caller's is not ended, and nobody knows any more when its call ends.
func TestAdoptedWithALateCall(t *testing.T) {
	for _, ends := range []bool{true, false} {
		f := table()
		var busy atomic.Bool
		f.CommWindowRegister = func(CommHandle, uint64, uintptr, *WindowHandle, WindowFlags) Result { busy.Store(true); return Success }
		f.CommAsyncError = func(_ CommHandle, r *Result) Result {
			if *r = Success; busy.Load() {
				*r = InProgress
			}
			return Success
		}
		f.CommAbort = func(CommHandle) Result { t.Error("it was aborted"); return Success }
		c, err := library(t, f).Adopt(0xc0, nil)
		require.NoError(t, err)
		stuck := givenUpBy(t, func(ctx context.Context) error {
			_, err := c.Register(ctx, 1<<40, 4096, WindowDefault)
			return err
		})
		if ends {
			busy.Store(false)
			require.NoError(t, c.Destroy(t.Context()))
			endsSoon(t, stuck.Ended, "nobody has noticed the end")
			continue
		}
		givenUpBy(t, func(ctx context.Context) error { return c.Destroy(ctx) })
		assert.Zero(t, c.Handle())
		busy.Store(false)
		goesOn(t, stuck.Ended, "it was not asked for")
	}
}

// TestCommunicatorThatCannotBeEnded: where NCCL cannot be called, because the GPU's context cannot be made current, it still has the communicator, and Ended does
// not say otherwise. The communicator can be ended later.
func TestCommunicatorThatCannotBeEnded(t *testing.T) {
	broken := errors.New("no context")
	for what, end := range map[string]func(*Comm) error{
		"abort":   func(c *Comm) error { return c.Abort(t.Context(), errors.New("the test")) },
		"destroy": func(c *Comm) error { return c.Destroy(t.Context()) },
	} {
		t.Run(what, func(t *testing.T) {
			f := table()
			var calls atomic.Int32
			f.CommAbort = func(CommHandle) Result { calls.Add(1); return Success }
			f.CommDestroy = f.CommAbort
			o := options(true)
			fails := false
			f.CommFinalize = func(CommHandle) Result { fails = true; return Success }
			o.Scope = func(fn func() error) error {
				if fails {
					return broken
				}
				return fn()
			}
			c, err := library(t, f).NewComm(t.Context(), o)
			require.NoError(t, err)
			fails = what == "abort"
			require.ErrorIs(t, end(c), broken)
			goesOn(t, c.Ended(), what)
			require.False(t, c.Over())
			require.Zero(t, calls.Load())
			fails = false
			require.NoError(t, c.Abort(t.Context(), errors.New("the test")))
			require.EqualValues(t, 1, calls.Load())
			endsSoon(t, c.Ended(), what)
			require.ErrorIs(t, c.Abort(t.Context(), nil), errs.ErrClosed)
		})
	}
}
