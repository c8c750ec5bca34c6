package backend

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
)

// Open opens the named backend for this rank of env.Group and gives the rank's memory over it. Collective.
func Open(ctx context.Context, name string, env *Env, opts *MemoryOptions) (*Memory, error) {
	e := *env
	if e.Logger == nil {
		e.Logger = slog.New(slog.DiscardHandler)
	}
	f, openErr := Lookup(name)
	var b Backend
	if openErr == nil {
		b, openErr = f.Open(ctx, &e)
	}
	if err := e.Group.Vote(ctx, "opening backend "+name, openErr); err != nil {
		if b != nil {
			err = errors.Join(err, b.Close(context.WithoutCancel(ctx)))
		}
		return nil, fmt.Errorf("opening backend %s: %w", name, err)
	}
	return NewMemory(b, e.Group, opts), nil
}
