package nccl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// onRanks runs f on each of size ranks of this process and gives their errors, by rank.
func onRanks(t *testing.T, size int, opts *group.LocalOptions, f func(ctx context.Context, g *group.Group) error) []error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	groups, err := group.Local(size, opts)
	require.NoError(t, err)
	failed := make([]error, size)
	var wg sync.WaitGroup
	for r, g := range groups {
		wg.Go(func() { failed[r] = f(ctx, g) })
	}
	wg.Wait()
	for _, g := range groups {
		require.NoError(t, g.Close(ctx))
	}
	return failed
}

// open is New for those who want an interface.
func open(ctx context.Context, g *group.Group, o *Options) (backend.Backend, error) {
	b, err := New(ctx, g, o)
	if err != nil {
		return nil, err
	}
	return b, nil
}

// withMemory opens the backend, runs f over its memory, and closes it.
func withMemory(ctx context.Context, g *group.Group, o *Options, f func(b *Backend, m *backend.Memory) error) error {
	b, err := New(ctx, g, o)
	if err != nil {
		return err
	}
	m := backend.NewMemory(b, g, &backend.MemoryOptions{Channels: 2})
	err = f(b, m)
	if e := g.Barrier(ctx, "end"); e != nil {
		err = errors.Join(err, e)
	}
	return errors.Join(err, m.Close(ctx))
}

func requireAll(t *testing.T, failed []error) {
	t.Helper()
	for r, err := range failed {
		require.NoError(t, err, "rank %d", r)
	}
}

// rendezvous allocates, makes the window, runs f on it and frees it.
func rendezvous(ctx context.Context, m *backend.Memory, bytes int64, f func(w *backend.Window) error) error {
	a, err := m.Allocate(ctx, bytes, "")
	// Whoever has no memory brings a nil allocation, so that the others are told.
	w, err2 := m.Rendezvous(ctx, a, backend.Record{})
	if err = errors.Join(err, err2); err == nil && f != nil {
		err = f(w)
	}
	if a != nil {
		err = errors.Join(err, m.Free(ctx, a))
	}
	return err
}

// exchangeBytes writes a byte of this rank's to the beginning, the middle and the end of every copy, and reads what the others
// wrote, by all addresses that there are.
func exchangeBytes(ctx context.Context, m *backend.Memory, w *backend.Window, size int64) error {
	g := m.Group()
	me := int64(g.Rank())
	places := []int64{0, size / 2, size - 16}
	for r := range g.Size() {
		for _, at := range places {
			p, err := w.Peer(r, at+me)
			if err != nil {
				return err
			}
			if err := m.Device().CopyFromHost(p, []byte{byte(10*r) + byte(me) + 1}); err != nil {
				return err
			}
		}
	}
	if err := g.Barrier(ctx, "written"); err != nil {
		return err
	}
	base, stride, viewErr := w.Contiguous(0)
	for r := range g.Size() {
		want := make([]byte, g.Size())
		for i := range want {
			want[i] = byte(10*r) + byte(i) + 1
		}
		for _, at := range places {
			p, err := w.Peer(r, at)
			if err != nil {
				return err
			}
			from := []device.Ptr{p}
			if viewErr == nil {
				from = append(from, base.Add(int64(r)*stride+at))
			}
			for _, p := range from {
				got := make([]byte, len(want))
				if err := m.Device().CopyToHost(got, p); err != nil {
					return err
				}
				if !bytes.Equal(got, want) {
					return fmt.Errorf("at %d of rank %d's copy, %s, there is %v and not %v", at, r, p, got, want)
				}
			}
		}
	}
	return g.Barrier(ctx, "read")
}

// openFiles counts the descriptors of this process.
func openFiles() (int, error) {
	names, err := os.ReadDir("/proc/self/fd")
	return len(names), err
}
