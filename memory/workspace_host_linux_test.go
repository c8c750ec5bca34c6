package memory_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// TestTrimWorkspace: a large block goes when its last workspace is closed, on all ranks, and small ones stay; then there is room for more.
func TestTrimWorkspace(t *testing.T) {
	const large = 24 << 20
	t.Cleanup(memory.KeepWorkspace(16 << 20))
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		b, err := host.New(g, nil)
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		count := func(want int) error {
			if have := m.Entries(); have != want {
				return fmt.Errorf("%d allocations in place of %d", have, want)
			}
			return nil
		}
		for range 3 {
			small, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "small", Bytes: 4096})
			if err != nil {
				return err
			}
			one, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "one", Bytes: large})
			if err != nil {
				return err
			}
			two, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "two", Bytes: large})
			if err != nil {
				return err
			}
			if err := errors.Join(m.TrimWorkspace(ctx), count(3), one.Close(ctx)); err != nil {
				return err
			}
			part, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "part of what one had", Bytes: large / 2})
			if err != nil {
				return err
			}
			err = errors.Join(
				m.TrimWorkspace(ctx), count(3), reachable(m, part),
				part.Close(ctx), m.TrimWorkspace(ctx), count(2),
				small.Close(ctx), m.TrimWorkspace(ctx), count(2),
				two.Close(ctx), count(2), m.TrimWorkspace(ctx), count(1),
			)
			if err != nil {
				return err
			}
		}
		return errors.Join(m.Close(ctx), m.TrimWorkspace(ctx))
	}))
}

// reachable fails if some rank's part of a workspace has no memory.
func reachable(m *memory.Memory, c *memory.Workspace) error {
	for r := range m.Group().Size() {
		p, err := c.Peer(r)
		if err == nil {
			err = m.Device().CopyToHost(make([]byte, 1), p)
		}
		if err != nil {
			return fmt.Errorf("a workspace in use, on rank %d: %w", r, err)
		}
	}
	return nil
}

// TestWorkspaceRequests: ranks that ask for different workspaces, or for a size that there cannot be, are all told, and each rank's size is
// made from what all offer.
func TestWorkspaceRequests(t *testing.T) {
	onAiling(t, func(ctx context.Context, _ *ailing, m *memory.Memory, odd bool) error {
		ask := func(usual, different memory.WorkspaceRequest) error {
			if odd {
				usual = different
			}
			c, err := m.NewWorkspace(ctx, usual)
			if err == nil {
				err = errors.Join(errors.New("it was given"), c.Close(ctx))
			}
			return err
		}
		sized := func(bytes int64, err error) memory.WorkspaceRequest {
			return memory.WorkspaceRequest{Purpose: "test", Size: func([]memory.WorkspaceOffer) (int64, error) { return bytes, err }}
		}
		usual := memory.WorkspaceRequest{Purpose: "test", Bytes: 100}
		for _, x := range []struct {
			name             string
			usual, different memory.WorkspaceRequest
			want             error
		}{
			{"another purpose", usual, memory.WorkspaceRequest{Purpose: "other", Bytes: 100}, errs.ErrMismatch},
			{"another size", usual, memory.WorkspaceRequest{Purpose: "test", Bytes: 101}, errs.ErrMismatch},
			{"0 bytes", memory.WorkspaceRequest{Purpose: "test"}, memory.WorkspaceRequest{Purpose: "test"}, errs.ErrInvalid},
			{"a size of 0 bytes", sized(0, nil), sized(0, nil), errs.ErrInvalid},
			{"a negative size", sized(-1, nil), sized(-1, nil), errs.ErrInvalid},
			{"more than any plan needs", sized(1<<40+1, nil), sized(1<<40+1, nil), errs.ErrInvalid},
			{"a size that fails", sized(100, errs.ErrNotReachable), sized(100, errs.ErrNotReachable), errs.ErrNotReachable},
			{"one that cannot", usual, memory.WorkspaceRequest{Purpose: "test", Bytes: 100, Failure: errs.ErrNotReachable}, errs.ErrNotReachable},
		} {
			if err := ask(x.usual, x.different); !errors.Is(err, x.want) {
				return fmt.Errorf("%s: %w", x.name, err)
			}
		}
		c, err := m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Offer: []byte{byte(m.Group().Rank() + 1)}, Size: offered})
		if err != nil {
			return err
		}
		if c.Bytes() != 3*4096 {
			return fmt.Errorf("a workspace of %d bytes", c.Bytes())
		}
		// A second one needs no rendezvous: it is in the same block.
		next, err := m.NewWorkspace(ctx, usual)
		if err != nil {
			return err
		}
		if n := m.Entries(); n != 1 {
			return fmt.Errorf("two small workspaces take %d allocations", n)
		}
		return errors.Join(next.Close(ctx), c.Close(ctx))
	})
}

// TestWorkspaceAlike: where one rank has taken workspace that the others have not, no workspace is given any more: it would not be at one place.
func TestWorkspaceAlike(t *testing.T) {
	onAiling(t, func(ctx context.Context, _ *ailing, m *memory.Memory, odd bool) error {
		request := memory.WorkspaceRequest{Purpose: "test", Bytes: 100}
		c, err := m.NewWorkspace(ctx, request)
		if err != nil {
			return err
		}
		if odd && !m.TakeAlone() {
			return errors.New("there is no workspace to take")
		}
		if given, err := m.NewWorkspace(ctx, request); !errors.Is(err, errs.ErrMismatch) {
			if err == nil {
				err = given.Close(ctx)
			}
			return fmt.Errorf("a workspace that is at another place on one rank: %w", err)
		}
		return c.Close(ctx)
	})
}

// offered is 4096 bytes for each rank of three that has offered its number.
func offered(offers []memory.WorkspaceOffer) (bytes int64, err error) {
	for rank, o := range offers {
		if !slices.Equal(o.Offer, []byte{byte(rank + 1)}) || o.Device == "" {
			return 0, fmt.Errorf("rank %d offers %v and has device %q", rank, o.Offer, o.Device)
		}
		bytes += 4096
	}
	return bytes, nil
}

// TestWorkspaceEnds: a closed workspace has no address any more, and is closed once. One that the device of a rank still uses is not given
// back there, and not handed out again. What is left goes with the memory.
func TestWorkspaceEnds(t *testing.T) {
	t.Cleanup(memory.KeepWorkspace(16 << 20))
	backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
		b, err := newAiling(g)
		if err != nil {
			return err
		}
		m := memory.New(b, g, nil)
		if err := endsOfWorkspaces(ctx, m, g.Rank() == 2); err != nil {
			g.Abort("the test has failed") // the other ranks may be waiting
			return errors.Join(err, m.Close(ctx))
		}
		return nil
	}))
}

// endsOfWorkspaces is one rank of TestWorkspaceEnds, which closes the memory. The device of one rank is busy.
func endsOfWorkspaces(ctx context.Context, m *memory.Memory, busy bool) error {
	take := func(bytes int64) (*memory.Workspace, error) {
		return m.NewWorkspace(ctx, memory.WorkspaceRequest{Purpose: "test", Bytes: bytes})
	}
	rank := m.Group().Rank()
	c, err := take(100)
	if err != nil {
		return err
	}
	if err := errors.Join(c.Err(), c.Close(ctx)); err != nil {
		return err
	}
	_, noPeer := c.Peer(rank)
	_, noSignals := c.Signals(ctx, 0, &memory.SignalsOptions{Channels: 1, Op: "test"})
	for name, err := range map[string]error{"Err": c.Err(), "Peer": noPeer, "Signals": noSignals, "Close": c.Close(ctx)} {
		if !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("%s of a closed workspace: %w", name, err)
		}
	}

	if c, err = take(100); err != nil {
		return err
	}
	used, err := c.Peer(rank)
	if err != nil {
		return err
	}
	s, err := m.Device().NewStream()
	if err != nil {
		return err
	}
	held := make(chan struct{})
	mine, cancel := ctx, func() {}
	if busy {
		if err := s.HostFunc(func() { <-held }); err != nil {
			return err
		}
		mine, cancel = context.WithTimeout(ctx, 30*time.Millisecond)
	} else {
		time.Sleep(60 * time.Millisecond) // rank 2's time is up before it can tell the others
	}
	err = c.Close(mine)
	given := c.Err()
	cancel()
	close(held)
	if err == nil || errors.Is(err, context.DeadlineExceeded) != busy {
		return fmt.Errorf("closing a workspace that the device of rank 2 uses: %w", err)
	}
	if vote, ok := errors.AsType[*group.VoteError](err); !ok || len(vote.Failures) != 1 || vote.Failures[0].Rank != 2 {
		return fmt.Errorf("closing a workspace that the device of rank 2 uses: %w", err)
	}
	if errors.Is(given, errs.ErrClosed) == busy {
		return fmt.Errorf("a workspace that the device of rank 2 uses, after closing: %w", given)
	}
	if err := errors.Join(s.Synchronize(ctx), s.Close()); err != nil {
		return err
	}
	next, err := take(100)
	if err != nil {
		return err
	}
	if p, err := next.Peer(rank); p == used || err != nil {
		return fmt.Errorf("a workspace that the device of rank 2 used is handed out again: %w", err)
	}

	large, err := take(24 << 20)
	if err != nil {
		return err
	}
	if err := errors.Join(large.Close(ctx), m.Close(ctx)); err != nil {
		return err
	}
	_, none := take(100)
	_, noSignals = next.Signals(ctx, 0, &memory.SignalsOptions{Channels: 1, Op: "test"})
	for name, err := range map[string]error{"Err": next.Err(), "NewWorkspace": none, "Signals": noSignals} {
		if !errors.Is(err, errs.ErrClosed) {
			return fmt.Errorf("%s after the memory was closed: %w", name, err)
		}
	}
	if err := errors.Join(next.Close(ctx), m.TrimWorkspace(ctx)); err != nil {
		return fmt.Errorf("what went with the memory: %w", err)
	}
	return nil
}
