package nccl

import (
	"context"
	"testing"

	"go.uber.org/goleak"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open is New for callers that want an interface.
func open(ctx context.Context, g *group.Group, o *Options) (backend.Backend, error) {
	b, err := New(ctx, g, o)
	if err != nil {
		return nil, err
	}
	return b, nil
}

// withMemory opens the backend, runs f over its memory, and closes it.
func withMemory(ctx context.Context, g *group.Group, o *Options, f func(b *Backend, m *memory.Memory) error) error {
	b, err := New(ctx, g, o)
	if err != nil {
		return err
	}
	return backendtest.WithMemory(ctx, g, b, func(m *memory.Memory) error { return f(b, m) })
}
