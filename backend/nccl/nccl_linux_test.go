package nccl

import (
	"context"
	"testing"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/nccl"
)

func TestConformanceOnFake(t *testing.T) {
	for _, version := range []nccl.Version{22803, 22809, 22907} {
		t.Run(version.String(), func(t *testing.T) {
			m := newMachine(4)
			m.version = version
			backendtest.Run(t, backendtest.Harness{
				Open: func(ctx context.Context, g *group.Group) (backend.Backend, error) {
					return open(ctx, g, m.plain(g.Rank()))
				},
				WorldSizes: []int{1, 2, 4},
			})
			m.requireClean(t)
		})
	}
}
