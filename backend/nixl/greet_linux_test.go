package nixl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/backend/backendtest"
	devhost "github.com/symmem/symmem/device/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
)

// watchedEngine notes its requests, and checks that memory which they use stays registered, and mapped until it is closed.
type watchedEngine struct {
	*fakeEngine
	t *testing.T

	mu       sync.Mutex
	requests []*fakeRequest
	blocks   []nixl.Block
}

// mark is written into memory before it is to be unmapped.
var mark = []byte("kept for ever???")

func (e *watchedEngine) Register(m nixl.Memory, b nixl.Block) error {
	err := e.fakeEngine.Register(m, b)
	if err == nil && m == nixl.DRAM {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.blocks = append(e.blocks, b)
	}
	return err
}

func (e *watchedEngine) NewRequest(op nixl.Op, m nixl.Memory, local, remote []nixl.Block, peer string) (request, error) {
	r, err := e.fakeEngine.NewRequest(op, m, local, remote, peer)
	if err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.requests = append(e.requests, r.(*fakeRequest))
	return r, nil
}

func (e *watchedEngine) Deregister(m nixl.Memory, b nixl.Block) error {
	e.mu.Lock()
	for _, r := range e.requests {
		e.net.mu.Lock()
		working := r.active && !r.released && r.local[0].Addr >= b.Addr && r.local[0].Addr < b.Addr+b.Bytes
		e.net.mu.Unlock()
		if working {
			e.t.Errorf("%s: %v is deregistered while a write from it to %s is under way", e.name, b, r.peer)
		}
	}
	e.mu.Unlock()
	return e.fakeEngine.Deregister(m, b)
}

func (e *watchedEngine) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, b := range e.blocks {
		if content, err := peek(b); err != nil || len(content) < len(mark) {
			e.t.Errorf("%s: %v is unmapped while the agent works: %v", e.name, b, err)
			continue
		}
		copy(bytesAt(b), mark)
	}
	return e.fakeEngine.Close()
}

// peek returns the first bytes of memory, which may not be there.
func peek(b nixl.Block) ([]byte, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = errors.Join(r.Close(), w.Close()) }()
	n, err := unix.Write(int(w.Fd()), bytesAt(b)[:min(len(mark), int(b.Bytes))])
	if err != nil {
		return nil, err
	}
	content := make([]byte, n)
	_, err = r.Read(content)
	return content, err
}

// greeting opens backends whose ranks do not reach each other, and returns their errors and what they have registered.
func greeting(t *testing.T, net *network, timeout, patience time.Duration) ([]error, []nixl.Block) {
	t.Helper()
	var mu sync.Mutex
	var engines []*watchedEngine
	failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		d, err := devhost.New(nil)
		if err != nil {
			return err
		}
		b, err := New(ctx, g, &Options{Opened: d, Islands: islandsOff, greetTimeout: patience, engine: func(name string) (engine, error) {
			e, err := net.engine(name)
			if err != nil {
				return nil, err
			}
			w := &watchedEngine{fakeEngine: e.(*fakeEngine), t: t}
			mu.Lock()
			defer mu.Unlock()
			engines = append(engines, w)
			return w, nil
		}})
		if err == nil {
			err = errors.Join(errors.New("it was opened"), b.Close(ctx))
		}
		return errors.Join(err, d.Close())
	})
	require.Len(t, engines, 2)
	var blocks []nixl.Block
	for _, e := range engines {
		assert.True(t, e.closed, "%s ends", e.name)
		assert.Zero(t, e.late)
		blocks = append(blocks, e.blocks...)
	}
	require.NotEmpty(t, blocks)
	return failed, blocks
}

// requireFreed fails the test if memory that was marked is there still.
func requireFreed(t *testing.T, blocks []nixl.Block) {
	t.Helper()
	for _, b := range blocks {
		if content, err := peek(b); err == nil { // or something else is there by now
			require.False(t, bytes.Equal(content, mark), "%v stays mapped", b)
		}
	}
}

// TestGreetingThatHangs: every rank hears which rank was not reached and what to look at, by whichever bound the time is over, and no memory is deregistered
// or unmapped under a write, and none stays.
func TestGreetingThatHangs(t *testing.T) {
	for name, bounds := range map[string][2]time.Duration{
		"its own bound":      {30 * time.Second, 50 * time.Millisecond},
		"the caller's bound": {2 * time.Second, greetTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			failed, blocks := greeting(t, &network{hang: func() bool { return true }}, bounds[0], bounds[1])
			for r, err := range failed {
				var vote *group.VoteError
				require.ErrorAs(t, err, &vote, "rank %d", r)
				for peer := range 2 {
					require.ErrorContains(t, err, fmt.Sprintf("rank %d was not reached; can its host be connected to", peer), "rank %d", r)
				}
				require.ErrorIs(t, err, context.DeadlineExceeded)
			}
			requireFreed(t, blocks)
		})
	}
}

// TestGreetingThatIsLate: writes that end after they were given up find the memory where it was.
func TestGreetingThatIsLate(t *testing.T) {
	failed, blocks := greeting(t, &network{delay: 500 * time.Millisecond}, 30*time.Second, 50*time.Millisecond)
	for r, err := range failed {
		require.ErrorContains(t, err, "was not reached", "rank %d", r)
		require.NotErrorIs(t, err, errs.ErrMismatch, "rank %d", r)
		assert.NotContains(t, err.Error(), "closing backend", "rank %d: the writes end in time", r)
	}
	requireFreed(t, blocks)
}

// TestGreetingThatFailsElsewhere: a rank that has nothing under way itself gives its memory back only when nobody writes to it any more.
func TestGreetingThatFailsElsewhere(t *testing.T) {
	for name, bounds := range map[string][2]time.Duration{
		"the writes end":           {30 * time.Second, 400 * time.Millisecond},
		"the writes are cancelled": {time.Second, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			net := &network{delay: bounds[1], blind: true, fail: func(engine, call string) error {
				if call == "NewRequest" && strings.HasPrefix(engine, "world-0-") {
					return errBackend
				}
				return nil
			}}
			failed, blocks := greeting(t, net, bounds[0], 50*time.Millisecond)
			for r, err := range failed {
				require.ErrorContains(t, err, "reaching rank 1", "rank %d", r)
				assert.NotContains(t, err.Error(), "closing backend", "rank %d", r)
			}
			assert.Zero(t, net.astray.Load(), "what was written to memory that was given back")
			requireFreed(t, blocks)
		})
	}
}

// TestGreetingThatIsGivenUp: a rank whose caller does not wait any longer gives its memory back when the others have ended their writes to it.
func TestGreetingThatIsGivenUp(t *testing.T) {
	net := &network{blind: true, slow: func(engine string) time.Duration {
		if strings.HasPrefix(engine, "world-1-") {
			return 600 * time.Millisecond
		}
		return 0
	}}
	failed := backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		d, err := devhost.New(nil)
		if err != nil {
			return err
		}
		if g.Rank() == 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, 300*time.Millisecond)
			defer cancel()
		}
		b, err := New(ctx, g, &Options{Opened: d, Islands: islandsOff, engine: net.engine})
		if err == nil {
			err = errors.Join(errors.New("it was opened"), b.Close(ctx))
		}
		return errors.Join(err, d.Close())
	})
	for r, err := range failed {
		require.ErrorContains(t, err, "context deadline exceeded", "rank %d", r)
	}
	assert.Zero(t, net.astray.Load(), "what was written to memory that was given back")
}

// slowly is a context that ends when it is asked for its end so often.
type slowly struct {
	context.Context
	end  context.CancelFunc
	left atomic.Int32
}

func (s *slowly) Done() <-chan struct{} {
	if s.left.Add(-1) == 0 {
		s.end()
	}
	return s.Context.Done()
}

// TestOpeningThatIsGivenUp: at whichever step the caller of one rank waits no longer, the other ranks hear of it, and wait for nobody.
func TestOpeningThatIsGivenUp(t *testing.T) {
	const patience = 20 * time.Second
	for steps, opened := int32(1), false; !opened; steps++ {
		require.Less(t, steps, int32(200))
		net := &network{}
		for r, err := range backendtest.OnRanks(t, 2, &group.LocalOptions{Timeout: patience}, func(ctx context.Context, g *group.Group) error {
			d, err := devhost.New(nil)
			if err != nil {
				return err
			}
			if g.Rank() == 0 {
				within, cancel := context.WithCancel(ctx)
				defer cancel()
				s := &slowly{Context: within, end: cancel}
				s.left.Store(steps)
				ctx = s
			}
			began := time.Now()
			b, err := New(ctx, g, &Options{Opened: d, Islands: islandsOff, engine: net.engine, shareFlags: true})
			if time.Since(began) >= patience {
				return fmt.Errorf("it took %v: %w", time.Since(began), err)
			}
			if err == nil {
				if g.Rank() == 0 {
					opened = true
				}
				err = b.Close(context.WithoutCancel(ctx))
			} else {
				err = nil
			}
			return errors.Join(err, d.Close())
		}) {
			require.NoError(t, err, "rank %d, step %d", r, steps)
		}
	}
}
