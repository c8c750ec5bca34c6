package kernels

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/memory"
)

// TestMeasureSpeedWithoutContext: a rank that measures the links without a context tells the others, and the next measurement is in step.
func TestMeasureSpeedWithoutContext(t *testing.T) {
	machine, err := simcuda.New(simcuda.Config{GPUs: 2, Seed: 1})
	require.NoError(t, err)
	backendtest.RequireAll(t, backendtest.OnRanks(t, 2, nil, func(ctx context.Context, g *group.Group) error {
		b, err := native.New(ctx, g, &native.Options{Driver: machine.Driver(), LocalRank: g.Rank(), Multicast: config.MulticastOff, KernelTimeout: time.Minute})
		if err != nil {
			return err
		}
		m := memory.New(b, g, &memory.Options{KernelTimeout: time.Minute})
		given, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		if g.Rank() == 1 {
			given = nil
		}
		_, err = MeasureSpeed(given, m)
		if vote, ok := errors.AsType[*group.VoteError](err); !ok || !errors.Is(err, errs.ErrInvalid) || len(vote.Failures) != 1 || vote.Failures[0].Rank != 1 {
			return fmt.Errorf("rank 1 without a context: %w", err)
		}
		if _, err := MeasureSpeed(ctx, m); err != nil {
			return err
		}
		return m.Close(ctx)
	}))
	assert.NoError(t, machine.Err())
}
