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

// islesName is far with islands of two ranks, the first of one: ranks of one island have addresses of each other's memory.
const islesName = "isles"

func init() {
	backend.Register(farName, farFactory{})
	backend.Register(islesName, farFactory{islands: true})
}

type farFactory struct{ islands bool }

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
	o := &backendtest.FarOptions{Delay: 20 * time.Microsecond}
	if f.islands {
		o.Name = islesName
		for _, m := range env.Group.Members() {
			o.Islands = append(o.Islands, (m.WorldRank+1)/2)
		}
	}
	return backendtest.Far(b, env.Group, o), nil
}
