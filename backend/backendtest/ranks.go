package backendtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
)

// ranksTimeout bounds what OnRanks runs, so that ranks that wait for each other end with an error instead of the test binary.
const ranksTimeout = 2 * time.Minute

// OnRanks makes a group of size ranks in this process, runs f on each of them at the same time, waits until all have returned,
// leaves the group, and returns what f returned, by rank. Nil options are the defaults of [group.Local]. The context of f ends
// after two minutes.
func OnRanks(t testing.TB, size int, opts *group.LocalOptions, f func(ctx context.Context, g *group.Group) error) []error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), ranksTimeout)
	defer cancel()
	groups, err := group.Local(size, opts)
	require.NoError(t, err)
	failed := OnAll(groups, func(g *group.Group) error { return f(ctx, g) })
	for r, g := range groups {
		assert.NoError(t, g.Close(ctx), "rank %d leaves", r)
	}
	return failed
}

// OnAll runs f on each of the ranks at the same time, waits until all have returned, and returns what f returned, by rank.
func OnAll[R any](ranks []R, f func(r R) error) []error {
	failed := make([]error, len(ranks))
	var wg sync.WaitGroup
	for i, r := range ranks {
		wg.Go(func() { failed[i] = f(r) })
	}
	wg.Wait()
	return failed
}

// RequireAll fails the test if a rank has failed; the errors are those of [OnRanks] or [OnAll], by rank.
func RequireAll(t testing.TB, failed []error) {
	t.Helper()
	ok := true
	for r, err := range failed {
		ok = assert.NoError(t, err, "rank %d", r) && ok
	}
	if !ok {
		t.FailNow() // when all have been heard: what one rank failed of may be what another has done
	}
}

// WithMemory makes symmetric memory over b, runs f on it, waits until all ranks have come so far, and closes the memory, which closes b. Collective.
// A rank whose f fails still takes part until the end, so that the others do not wait for it.
func WithMemory(ctx context.Context, g *group.Group, b backend.Backend, f func(m *memory.Memory) error) error {
	m := memory.New(b, g, &memory.Options{Channels: 2})
	err := f(m)
	return errors.Join(err, g.Barrier(ctx, "end"), m.Close(ctx))
}

// InCall reports whether a collective call that another goroutine makes has the turn of the memory: so what is called now comes behind it.
func InCall(m *memory.Memory) bool {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	_, taken := errors.AsType[*memory.TurnError](m.InTurn(ended, "a look", func(context.Context, error) error { return nil }))
	return taken
}

// WithWindow allocates, maps, runs f on the window unless it is nil, and frees. Collective: every rank takes part in every step, whatever has failed
// before, but f is not run on a rank that has no window.
func WithWindow(ctx context.Context, m *memory.Memory, bytes int64, f func(w *memory.Window) error) error {
	a, err := m.Allocate(ctx, bytes, "")
	// Whoever has no memory brings a nil allocation, so that the others are told.
	w, mapErr := m.Rendezvous(ctx, a, memory.Record{})
	if err = errors.Join(err, mapErr); err == nil && f != nil {
		err = f(w)
	}
	if a != nil {
		err = errors.Join(err, m.Free(ctx, a))
	}
	return err
}

// TryWindow is WithWindow with ExchangeBytes: memory is allocated, every rank reaches it on all others, and it is freed.
func TryWindow(ctx context.Context, m *memory.Memory, bytes int64) error {
	return WithWindow(ctx, m, bytes, func(w *memory.Window) error { return ExchangeBytes(ctx, m, w) })
}

// ExchangeBytes writes a byte of this rank's to several places of every rank's copy, the last bytes among them, and reads what all ranks wrote,
// through every address that there is: the peers' and, where the window has one, the contiguous view. It does nothing if the window has fewer bytes
// than there are ranks. Collective.
func ExchangeBytes(ctx context.Context, m *memory.Memory, w *memory.Window) error {
	g := m.Group()
	me, ranks := int64(g.Rank()), int64(g.Size())
	// Each place has a byte for every rank, and the places do not overlap.
	var places []int64
	if w.Bytes() >= ranks {
		places = append(places, w.Bytes()-ranks)
	}
	if w.Bytes() >= 4*ranks {
		places = append(places, 0, w.Bytes()/2)
	}
	for r := range g.Size() {
		for _, at := range places {
			p, err := w.Peer(r, at+me)
			if err != nil {
				return err
			}
			if err := m.Device().CopyFromHost(p, []byte{Sent(g.Rank(), r)}); err != nil {
				return err
			}
		}
	}
	if err := g.Barrier(ctx, "written"); err != nil {
		return err
	}
	base, stride, viewErr := w.Contiguous(0)
	for r := range g.Size() {
		want := make([]byte, ranks)
		for from := range want {
			want[from] = Sent(from, r)
		}
		for _, at := range places {
			p, err := w.Peer(r, at)
			if err != nil {
				return err
			}
			addresses := []device.Ptr{p}
			if viewErr == nil {
				addresses = append(addresses, base.Add(int64(r)*stride+at))
			}
			for _, p := range addresses {
				got := make([]byte, ranks)
				if err := m.Device().CopyToHost(got, p); err != nil {
					return err
				}
				if !bytes.Equal(got, want) {
					return fmt.Errorf("at %d of rank %d's copy, %s, there is %v and not %v", at, r, p, got, want)
				}
			}
		}
	}
	return g.Barrier(ctx, "read") // before anybody writes something else
}

// Sent returns the byte that ExchangeBytes writes from one rank to another.
func Sent(from, to int) byte { return byte(10*to + from + 1) }

// OpenFiles counts the file descriptors of this process. Linux only.
func OpenFiles() (int, error) {
	names, err := os.ReadDir("/proc/self/fd")
	return len(names), err
}

// FilesLeft waits until no more than most file descriptors of this process are open, and counts them: connections are closed by other goroutines, and
// what an earlier test has lost by the collector. It gives up after ten seconds.
func FilesLeft(most int) (int, error) {
	for until := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		n, err := OpenFiles()
		switch {
		case err != nil || n <= most:
			return n, err
		case time.Now().After(until):
			return n, fmt.Errorf("%d descriptors are open where %d were", n, most)
		}
	}
}
