package memory_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/group"
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
