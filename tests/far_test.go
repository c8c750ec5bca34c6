package tests

import (
	"context"
	"fmt"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
)

// farName is a backend without peer pointers that needs nothing: host memory, reached by transfers and flags only.
const farName = "far"

func init() { backend.Register(farName, farFactory{}) }

type farFactory struct{}

func (farFactory) near() (backend.Factory, error) { return backend.Lookup("host") }

func (f farFactory) Probe(ctx context.Context, env *backend.Env) (backend.Capabilities, error) {
	near, err := f.near()
	if err != nil {
		return backend.Capabilities{}, err
	}
	c, err := near.Probe(ctx, env)
	return backendtest.FarCapabilities(c), err
}

func (f farFactory) Open(ctx context.Context, env *backend.Env) (backend.Backend, error) {
	near, err := f.near()
	if err != nil {
		return nil, err
	}
	b, err := near.Open(ctx, env)
	if err != nil {
		return nil, fmt.Errorf("opening what is near: %w", err)
	}
	return backendtest.Far(b, env.Group, &backendtest.FarOptions{Delay: 20 * time.Microsecond}), nil
}
