package memory_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// meetingFactory is that of a backend whose ranks meet when it is opened, as those over GPUs do.
type meetingFactory struct{ backend.Factory }

func (f meetingFactory) Open(ctx context.Context, env *backend.Env) (backend.Backend, error) {
	if _, err := backend.Tell(ctx, env.Group, "opening backend meeting", 0, nil); err != nil {
		return nil, err
	}
	return f.Factory.Open(ctx, env)
}

// TestOpenWithoutOne: a rank that cannot begin to open a backend is heard by the others, none of which waits for it, and all are in step.
func TestOpenWithoutOne(t *testing.T) {
	host, err := backend.Lookup("host")
	require.NoError(t, err)
	backend.Register("meeting", meetingFactory{host})
	var none context.Context
	for what, c := range map[string]struct {
		name string
		ctx  context.Context
		want error
	}{
		"no context":        {"meeting", none, errs.ErrInvalid},
		"a name of nothing": {"nothing", t.Context(), errs.ErrInvalid},
		"another name":      {"host", t.Context(), errs.ErrMismatch},
	} {
		groups, err := group.Local(3, &group.LocalOptions{Timeout: 20 * time.Second})
		require.NoError(t, err)
		open := func(of context.Context, name string) func(g *group.Group) error {
			return func(g *group.Group) error {
				ctx, asked := t.Context(), "meeting"
				if g.Rank() == 1 {
					ctx, asked = of, name
				}
				m, err := memory.Open(ctx, asked, &backend.Env{Group: g}, nil)
				if err != nil {
					return err
				}
				return m.Close(t.Context())
			}
		}
		for rank, err := range backendtest.OnAll(groups, open(c.ctx, c.name)) {
			assert.ErrorIs(t, err, c.want, "%s: rank %d", what, rank)
		}
		backendtest.RequireAll(t, backendtest.OnAll(groups, open(t.Context(), "meeting")))
		for _, g := range groups {
			require.NoError(t, g.Close(t.Context()))
		}
	}
}
