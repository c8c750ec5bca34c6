package memory_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// hollow is the backend host, but rank 0 gets nothing from one of its methods, and no error.
type hollow struct {
	backend.Backend
	method string
}

type hollowFactory struct {
	backend.Factory
	method string
}

var errHollow = errors.New("it cannot be opened")

func (f hollowFactory) Open(ctx context.Context, env *backend.Env) (backend.Backend, error) {
	none := (*hollow)(nil) // as from a function that returns its own type
	switch {
	case env.Group.Rank() != 0:
		f.method = ""
	case f.method == "Open":
		return none, nil
	case f.method == "Open with an error":
		return none, errHollow
	}
	b, err := f.Factory.Open(ctx, env)
	return &hollow{Backend: b, method: f.method}, err
}

func (b *hollow) Close(ctx context.Context) error { return b.Backend.Close(ctx) }

func (b *hollow) Device() device.Device {
	if b.method == "Device" {
		return nil
	}
	return b.Backend.Device()
}

func (b *hollow) Capabilities() backend.Capabilities {
	c := b.Backend.Capabilities()
	c.Register = b.method == "Register"
	return c
}

func (b *hollow) Register(context.Context, device.Ptr, int64) (backend.Allocation, error) {
	return nil, nil
}

func (b *hollow) Allocate(ctx context.Context, bytes int64) (backend.Allocation, error) {
	if b.method == "Allocate" {
		return nil, nil
	}
	return b.Backend.Allocate(ctx, bytes)
}

func (b *hollow) Rendezvous(ctx context.Context, a backend.Allocation) (backend.Mapping, error) {
	m, err := b.Backend.Rendezvous(ctx, a)
	if b.method != "Rendezvous" || err != nil {
		return m, err
	}
	return nil, m.Unmap(ctx)
}

// TestBackendThatGivesNothing: a backend that returns neither what it is asked for nor an error is refused, on every rank where they need it together,
// instead of a panic of one rank for which the others wait.
func TestBackendThatGivesNothing(t *testing.T) {
	f, err := backend.Lookup("host")
	require.NoError(t, err)
	for _, method := range []string{"open", "open-error", "device", "register", "allocate", "rendezvous"} {
		name := map[string]string{"open": "Open", "open-error": "Open with an error", "device": "Device", "register": "Register", "allocate": "Allocate",
			"rendezvous": "Rendezvous"}[method]
		backend.Register("hollow-"+method, hollowFactory{f, name})
		t.Run(method, func(t *testing.T) {
			failures := onEach(t, 2, func(ctx context.Context, g *group.Group) error {
				ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
				defer cancel()
				m, err := memory.Open(ctx, "hollow-"+method, &backend.Env{Group: g}, nil)
				if err != nil {
					return err
				}
				var failure error
				if method == "register" {
					_, failure = m.Register(ctx, 4096, 16, "")
				} else {
					_, failure = m.NewHeap(ctx, 1024)
				}
				return errors.Join(failure, m.Close(ctx))
			})
			switch method {
			case "open-error":
				require.ErrorIs(t, failures[0], errHollow)
				require.Error(t, failures[1])
				return
			case "register":
				failures = failures[:1] // the call is local
			}
			requireConditions(t, failures, errs.ErrInvalid)
			require.ErrorContains(t, failures[0], name+" is a function that returned no")
		})
	}
}
