package memory_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// onEach calls f on each rank of a group in this process and gives the errors by rank.
func onEach(t *testing.T, n int, f func(ctx context.Context, g *group.Group) error) []error {
	t.Helper()
	groups, err := group.Local(n, nil)
	require.NoError(t, err)
	failures := make([]error, n)
	var all sync.WaitGroup
	for i, g := range groups {
		all.Go(func() { failures[i] = f(t.Context(), g) })
	}
	all.Wait()
	for _, g := range groups {
		require.NoError(t, g.Close(t.Context()))
	}
	return failures
}

// requireConditions fails the test unless each error is each of want and no other condition of the module.
func requireConditions(t *testing.T, failures []error, want ...error) {
	t.Helper()
	for rank, err := range failures {
		for _, c := range errs.All() {
			require.Equalf(t, slices.Contains(want, c), errors.Is(err, c), "rank %d: is it %q? %v", rank, c, err)
		}
	}
}

// TestOptionsOutOfBounds: what is beyond the bounds of an option is brought inside of them, since New has no error: a bound of a wait that has passed before it
// begins would end every wait.
func TestOptionsOutOfBounds(t *testing.T) {
	groups, err := group.Local(1, nil)
	require.NoError(t, err)
	b, err := host.New(groups[0], nil)
	require.NoError(t, err)
	for _, o := range []*memory.Options{nil, {}, {Channels: 64, KernelTimeout: -1}, {KernelTimeout: math.MinInt64, MaxBlocks: -1}} {
		m := memory.New(b, groups[0], o)
		require.Equal(t, 2*time.Minute, m.KernelTimeout())
		require.Equal(t, 64, m.Channels())
		require.Zero(t, m.MaxBlocks())
	}
	m := memory.New(b, groups[0], &memory.Options{Channels: -1})
	require.Equal(t, 1, m.Channels())
	require.NoError(t, m.Close(t.Context()))
	require.NoError(t, groups[0].Close(t.Context()))
}

// TestConditionsAreTold: what the ranks tell each other in a Tell, and in the records of a rendezvous, is the same condition on all.
func TestConditionsAreTold(t *testing.T) {
	all := errs.All()
	for i, c := range all {
		other := all[(i+3)%len(all)]
		mine := map[int]error{1: fmt.Errorf("a step: %w", c), 2: fmt.Errorf("a step: %w", other)}
		requireConditions(t, onEach(t, 3, func(ctx context.Context, g *group.Group) error {
			_, err := backend.Tell(ctx, g, "what", g.Rank(), mine[g.Rank()])
			return err
		}), c, other)
		requireConditions(t, onEach(t, 3, func(ctx context.Context, g *group.Group) error {
			_, err := memory.Exchange(ctx, g, &memory.Record{Backend: "b"}, mine[g.Rank()])
			return err
		}), c, other)
	}
	// One without a text is a failure too.
	for _, err := range onEach(t, 2, func(ctx context.Context, g *group.Group) error {
		var failure error
		if g.Rank() == 1 {
			failure = errors.New("")
		}
		_, err := backend.Tell(ctx, g, "what", 0, failure)
		return err
	}) {
		require.ErrorContains(t, err, "what failed: rank 1: *errors.errorString")
	}
}

// TestWrongListOnOneRank: a rank that asks for a backend that is not there tells the others so.
func TestWrongListOnOneRank(t *testing.T) {
	failures := onEach(t, 3, func(ctx context.Context, g *group.Group) error {
		list := []string{"host"}
		if g.Rank() == 1 {
			list = []string{"nvlink"}
		}
		_, _, err := backend.Choose(ctx, g, list, &backend.Env{Group: g})
		return err
	})
	requireConditions(t, failures, errs.ErrInvalid)
	for _, err := range failures {
		require.ErrorContains(t, err, `rank 1: backend: name is "nvlink"; allowed: `)
	}
}

func TestRefusedErrorFolds(t *testing.T) {
	e := &backend.RefusedError{Tried: []string{"a", "b"}}
	for rank := range 4 {
		e.Refusals = append(e.Refusals, backend.Refusal{Name: "a", Rank: rank, Err: "no driver", Conditions: []error{errs.ErrUnsupported}})
	}
	require.EqualError(t, &backend.RefusedError{Tried: []string{"a"}, Refusals: e.Refusals}, "backend a cannot be used: ranks 0-3: no driver")
	e.Refusals = append(e.Refusals, backend.Refusal{Name: "b", Rank: 2, Err: "no driver"})
	require.EqualError(t, e, "none of the backends a, b can be used:\n\ta on ranks 0-3: no driver\n\tb on rank 2: no driver")
	requireConditions(t, []error{e}, errs.ErrUnavailable, errs.ErrUnsupported)
}

// TestNothingGiven: what is needed and not there is refused.
func TestNothingGiven(t *testing.T) {
	var none context.Context
	groups, err := group.Local(1, nil)
	require.NoError(t, err)
	for what, open := range map[string]func() (*memory.Memory, error){
		"no context":     func() (*memory.Memory, error) { return memory.Open(none, "host", &backend.Env{Group: groups[0]}, nil) },
		"no environment": func() (*memory.Memory, error) { return memory.Open(t.Context(), "host", nil, nil) },
		"no group":       func() (*memory.Memory, error) { return memory.Open(t.Context(), "host", &backend.Env{}, nil) },
	} {
		require.NotPanics(t, func() { _, err = open() }, what)
		require.ErrorIs(t, err, errs.ErrInvalid, what)
	}
	m, err := memory.Open(t.Context(), "host", &backend.Env{Group: groups[0]}, nil)
	require.NoError(t, err)
	require.NotPanics(t, func() { err = m.InTurn(t.Context(), "nothing", nil) })
	require.ErrorIs(t, err, errs.ErrInvalid)
	require.NoError(t, m.Close(t.Context()))
	require.NoError(t, groups[0].Close(t.Context()))
}
