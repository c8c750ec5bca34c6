package memory_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// slowRoad is the way between one rank and the rendezvous service, on which the answers can be held up.
type slowRoad struct {
	net.Listener
	service string
	answers sync.RWMutex  // held for writing, none come
	got     chan struct{} // closed by rank 0, when it has got what rank 1 is to miss
}

func newSlowRoad(t *testing.T, service string) *slowRoad {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := &slowRoad{Listener: l, service: service, got: make(chan struct{})}
	var ways sync.WaitGroup
	t.Cleanup(func() {
		require.NoError(t, l.Close())
		ways.Wait()
	})
	ways.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", service)
			if err != nil {
				_ = from.Close()
				continue
			}
			pass := func(dst io.WriteCloser, src io.Reader, held sync.Locker) {
				b := make([]byte, 64<<10)
				for {
					n, err := src.Read(b)
					held.Lock()
					_, failed := dst.Write(b[:n])
					held.Unlock()
					if err != nil || failed != nil {
						_ = dst.Close() // which ends the other way too
						return
					}
				}
			}
			ways.Go(func() { pass(to, from, new(sync.Mutex)) })
			ways.Go(func() { pass(from, to, r.answers.RLocker()) })
		}
	})
	return r
}

// TestWorkspaceThatOneRankMissed: a rank that gives up asking for a workspace, which the others have got, does not share the next one with them: it
// would be at another place than theirs.
func TestWorkspaceThatOneRankMissed(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	road := newSlowRoad(t, l.Addr().String())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	opts := []*group.Options{
		{WorldSize: 2, Rank: 0, Listener: l, Timeout: 20 * time.Second},
		{WorldSize: 2, Rank: 1, Addr: road.Addr().String(), Timeout: 20 * time.Second},
	}
	backendtest.RequireAll(t, backendtest.OnAll(opts, func(o *group.Options) error {
		g, err := group.Join(ctx, o)
		if err != nil {
			return err
		}
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		err = missOne(ctx, m, road)
		return errors.Join(err, g.Barrier(ctx, "end"), m.Close(ctx), g.Close(ctx))
	}))
}

// missOne has rank 1 miss that it has got a workspace.
func missOne(ctx context.Context, m *memory.Memory, road *slowRoad) error {
	g := m.Group()
	request := memory.WorkspaceRequest{Purpose: "test", Bytes: 4096}
	first, err := m.NewWorkspace(ctx, request)
	if err != nil {
		return err
	}
	if g.Rank() == 0 {
		missed, err := m.NewWorkspace(ctx, request)
		close(road.got)
		if err != nil {
			return fmt.Errorf("the one that rank 1 misses: %w", err)
		}
		if err := missed.Close(ctx); !errors.Is(err, errs.ErrMismatch) { // rank 1 asks for the next one
			return fmt.Errorf("giving back the one that rank 1 missed: %w", err)
		}
	} else {
		impatient, cancel := context.WithCancel(ctx)
		defer cancel()
		go func() { <-road.got; cancel() }()
		road.answers.Lock()
		_, err := m.NewWorkspace(impatient, request)
		road.answers.Unlock()
		if !errors.Is(err, context.Canceled) {
			return fmt.Errorf("without answers: %w", err)
		}
		if _, err := m.NewWorkspace(ctx, request); !errors.Is(err, errs.ErrMismatch) {
			return fmt.Errorf("while rank 0 gives back what this rank missed: %w", err)
		}
	}
	next, err := m.NewWorkspace(ctx, request)
	if err == nil {
		// Both are there, so they should be at one place.
		if err = shared(ctx, m, next); err == nil {
			err = next.Close(ctx)
		}
		return errors.Join(err, first.Close(ctx))
	}
	if !errors.Is(err, errs.ErrMismatch) {
		return fmt.Errorf("a workspace after that: %w", err)
	}
	return first.Close(ctx)
}

// shared fails if what a rank writes into its part of a workspace is not what the others find there.
func shared(ctx context.Context, m *memory.Memory, w *memory.Workspace) error {
	g := m.Group()
	own, err := w.Peer(g.Rank())
	if err == nil {
		err = m.Device().CopyFromHost(own, []byte{byte(g.Rank() + 1)})
	}
	if err = g.Vote(ctx, "written", err); err != nil {
		return err
	}
	for r := range g.Size() {
		p, err := w.Peer(r)
		if err != nil {
			return err
		}
		found := make([]byte, 1)
		if err := m.Device().CopyToHost(found, p); err != nil {
			return err
		}
		if found[0] != byte(r+1) {
			return fmt.Errorf("rank %d has written %d into its workspace, and rank %d finds %d there", r, r+1, g.Rank(), found[0])
		}
	}
	return nil
}
