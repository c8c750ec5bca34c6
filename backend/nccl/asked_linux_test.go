package nccl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
	"github.com/symmem/symmem/memory"
)

// TestPutsThatCannotBeAskedFor: that NCCL answers with a code when it is asked for puts is that there are none. That it has lost a peer is no answer to that: no rank
// opens.
func TestPutsThatCannotBeAskedFor(t *testing.T) {
	h := hosts{"a", "a", "b", "b"}
	machineWith := func(answer nccl.Result) *machine {
		m := newMachine(2)
		m.version, m.gin = 23203, true
		m.fail = func(call string, rank, _ int) nccl.Result {
			if call == "ncclCommQueryProperties" && rank == 2 {
				return answer
			}
			return nccl.Success
		}
		return m
	}
	onPretended(t, machineWith(nccl.InvalidArgument), h, func(_ context.Context, _ *group.Group, b *Backend, _ *memory.Memory) error {
		if b.Moves() || !strings.Contains(b.noPuts, "does not say") {
			return fmt.Errorf("it puts: %s", b.noPuts)
		}
		return nil
	})
	m := machineWith(nccl.RemoteError)
	for rank, err := range backendtest.OnRanks(t, len(h), nil, func(ctx context.Context, g *group.Group) error {
		b, err := New(ctx, g, h.options(m, g.Rank()))
		if err == nil {
			return errors.Join(errors.New("it is open"), b.Close(ctx))
		}
		return err
	}) {
		require.ErrorIs(t, err, errs.ErrPeerLost, "rank %d", rank)
		require.ErrorContains(t, err, "rank 2")
		require.ErrorContains(t, err, "whether it can put")
	}
	m.requireClean(t)
}
