package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
)

// Open opens the named backend for this rank of env.Group and returns the rank's memory over it. Collective. ErrInvalid for no context, environment or group, and for a name that is
// not registered, on any rank; ErrMismatch if the ranks name different backends; else the errors of the backend, which are ErrUnavailable, ErrUnsupported or ErrInvalid where it cannot be opened, on every
// rank.
func Open(ctx context.Context, name string, env *backend.Env, opts *Options) (*Memory, error) {
	if err := errs.Given("memory.Open", "env", env, "what the backend is opened with"); err != nil {
		return nil, err
	}
	if err := errs.Given("memory.Open", "env.Group", env.Group, "a group"); err != nil {
		return nil, err
	}
	e := *env
	if e.Logger == nil {
		e.Logger = slog.New(slog.DiscardHandler)
	}
	ctx, failure := errs.WithContext("memory.Open", ctx, nil)
	f, openErr := backend.Lookup(name)
	ctx = group.Heard(ctx)
	// A rank that cannot begin says so before the others are in exchanges of the backend's, which it does not come to.
	names, err := backend.Tell(ctx, e.Group, "opening a backend", name, cmp.Or(failure, openErr))
	if err == nil {
		err = backend.Alike("name of the backend", names, func(n *string) string { return *n })
	}
	if err != nil {
		return nil, fmt.Errorf("opening backend %s: %w", name, err)
	}
	b, openErr := f.Open(ctx, &e)
	openErr = gave(name, "Open", "backend", b, openErr)
	if openErr == nil {
		openErr = gave(name, "Device", "device", b.Device(), nil)
	}
	if openErr == nil && e.Multicast == "on" && e.Parent == nil && !b.Capabilities().Multicast {
		// A group made of some of the ranks may do without.
		openErr = fmt.Errorf("multicast is on, and auto or off does without (SYMMEM_MULTICAST): %w", b.Capabilities().Missing(name, "multicast"))
	}
	if err := e.Group.Vote(ctx, "opening backend "+name, openErr); err != nil {
		if !errs.IsNil(b) {
			err = errors.Join(err, b.Close(context.WithoutCancel(ctx)))
		}
		return nil, fmt.Errorf("opening backend %s: %w", name, err)
	}
	return New(b, e.Group, opts), nil
}

// gave is the error of a backend's method, of which a backend that returns neither what it is asked for nor an error has one too: this rank would panic on
// it, and the others would wait.
func gave(name, method, what string, v any, err error) error {
	if err == nil && errs.IsNil(v) {
		return errs.Invalid("backend "+name, method, "a function that returned no "+what, "a "+what+" or an error")
	}
	return err
}

// fromBackend allocates from the backend.
func (m *Memory) fromBackend(ctx context.Context, bytes int64) (backend.Allocation, error) {
	a, err := m.backend.Allocate(ctx, bytes)
	return a, gave(m.backend.Name(), "Allocate", "allocation", a, err)
}
