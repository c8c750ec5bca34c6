package nvshmem

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nvshmem"
	"github.com/symmem/symmem/memory"
)

// noChunk is a library that gives this rank no memory.
type noChunk struct{ library }

func (l noChunk) Align(alignment, bytes int64) (uint64, error) {
	_, err := l.library.Align(alignment, bytes)
	return 0, err
}

// TestHeapGrowsOnSomeRanks: where the heap grows by several chunks for one piece, here the arena, and the first does not come on one rank, the others do
// not wait for it in the library.
func TestHeapGrowsOnSomeRanks(t *testing.T) {
	for _, fails := range []bool{false, true} {
		m := newMachine(3)
		backendtest.RequireAll(t, backendtest.OnRanks(t, 3, nil, func(ctx context.Context, g *group.Group) error {
			o := m.options(g.Rank())
			o.Chunk, o.Arena, o.KernelTimeout = 4<<20, 8<<20, 5*time.Second
			if load := o.load; fails && g.Rank() == 0 {
				o.load = func(n *nvshmem.Options) (library, error) {
					l, err := load(n)
					return noChunk{l}, err
				}
			}
			err := withMemory(ctx, g, o, func(*Backend, *memory.Memory) error { return nil })
			if !fails {
				if n := m.called("align"); n < 2 {
					return fmt.Errorf("the heap has grown by %d chunks: %w", n, err)
				}
				return err
			}
			_, stuck := errors.AsType[*nvshmem.StuckError](err)
			if stuck || !errors.Is(err, errs.ErrNoMemory) || !strings.Contains(err.Error(), "torn the heap down") || !strings.Contains(err.Error(), "rank 0") {
				return fmt.Errorf("opening: %w", err)
			}
			return nil
		}))
		if !fails {
			assert.Empty(t, m.left())
		}
		m.release()
	}
}
