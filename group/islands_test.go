package group

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestIslandsOfOneProcess: its ranks share memory, those of the same machine; a sub-group knows what its group knew.
func TestIslandsOfOneProcess(t *testing.T) {
	groups := newLocal(t, 5, &LocalOptions{BootIDs: []string{"a", "b", "a", "b", "c"}})
	ctx := testContext(t)
	requireNone(t, onAll(groups, func(g *Group) error {
		early, err := g.Sub(ctx, []int{0, 1, 2, 3, 4})
		if err != nil {
			return err
		}
		for _, g := range []*Group{early, g} {
			islands, err := g.Islands(ctx)
			if err != nil {
				return err
			}
			assert.Equal(t, "0,2; 1,3; 4", islands.String())
			assert.Equal(t, 3, islands.Count())
			assert.Empty(t, islands.Why(), "no machine has several")
			assert.Equal(t, []int{1, 3}, islands.Of(3))
			assert.Nil(t, islands.Of(5))
			assert.True(t, islands.Same(0, 2) && !islands.Same(0, 1) && !islands.Same(0, 5) && !islands.Same(-1, 0))
		}
		if g.Rank() == 0 {
			return early.Close(ctx)
		}
		sub, err := g.Sub(ctx, []int{1, 2, 3, 4})
		if err != nil {
			return err
		}
		islands, err := sub.Islands(ctx)
		if err != nil {
			return err
		}
		assert.Equal(t, "0,2; 1; 3", islands.String())
		return nil
	}))
}

// TestWhoIsInAnIsland: ranks that reach each other both ways, and all others of the island.
func TestWhoIsInAnIsland(t *testing.T) {
	const why = "the reason"
	all := func(size int) []islandsWord {
		words := make([]islandsWord, size)
		for r := range words {
			for other := range size {
				words[r].Ranks = append(words[r].Ranks, other)
			}
		}
		return words
	}
	for name, c := range map[string]struct {
		machines string // by rank
		words    []islandsWord
		want     string
		why      string
	}{
		"all":            {"aaaa", all(4), "0-3", ""},
		"nobody":         {"aaa", make([]islandsWord, 3), "0; 1; 2", "ranks 0 and 1 do not reach each other's memory; ranks 0 and 2 do not reach each other's memory; and 1 more"},
		"two machines":   {"abab", all(4), "0,2; 1,3", ""},
		"unknown":        {"  ", all(2), "0; 1", ""},
		"one direction":  {"aa", []islandsWord{{Ranks: []int{1}}, {Why: map[int]string{0: why}}}, "0; 1", "rank 1 cannot pass memory to rank 0: the reason"},
		"no triangle":    {"aaa", []islandsWord{{Ranks: []int{1}}, {Ranks: []int{0, 2}}, {Ranks: []int{1}, Why: map[int]string{0: why}}}, "0,1; 2", "rank 2 cannot pass memory to rank 0: the reason"},
		"not with all":   {"aaa", []islandsWord{{Ranks: []int{1, 2}}, {Ranks: []int{0}, Why: map[int]string{2: why}}, {Ranks: []int{0}}}, "0,1; 2", "rank 1 cannot pass memory to rank 2: the reason"},
		"the other pair": {"aaa", []islandsWord{{}, {Ranks: []int{2}}, {Ranks: []int{1}}}, "0; 1,2", "ranks 0 and 1 do not reach each other's memory; ranks 0 and 2 do not reach each other's memory"},
		"nonsense":       {"aa", []islandsWord{{Ranks: []int{-1, 7, 1, 1}, Why: map[int]string{9: why}}, {Ranks: []int{0, 99}}}, "0,1", ""},
		"two and two":    {"aaaa", []islandsWord{{Ranks: []int{2}}, {Ranks: []int{3}}, {Ranks: []int{0}, Why: map[int]string{1: why}}, {Ranks: []int{1}}}, "0,2; 1,3", ""},
	} {
		t.Run(name, func(t *testing.T) {
			g := &Group{members: make([]Member, len(c.words))}
			for r := range g.members {
				g.members[r].Process = fmt.Sprint(r)
				if id := c.machines[r : r+1]; id != " " {
					g.members[r].BootID = id
				}
			}
			g.world = make([]int, len(c.words))
			islands := g.islandsOf(c.words)
			assert.Equal(t, c.want, islands.String())
			if c.why != "" {
				require.Equal(t, c.why, islands.Why())
			}
			if islands.Count() == 1 {
				assert.Empty(t, islands.Why())
			}
		})
	}
}

// TestIslandsOfManyRanks: what works may take as long as it likes in all, and what does not has one bound.
func TestIslandsOfManyRanks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := vain{islandsTimeout}
		after := func(d time.Duration, failure error) func(ctx context.Context) error {
			return func(ctx context.Context) error {
				select {
				case <-time.After(d):
					return failure
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		}
		for range 1000 {
			require.NoError(t, v.try(t.Context(), after(islandsTimeout/50, nil)))
		}
		refused := errors.New("refused")
		require.ErrorIs(t, v.try(t.Context(), after(islandsTimeout/2, refused)), refused)
		require.NoError(t, v.try(t.Context(), after(islandsTimeout/3, nil)), "there is half of the time")
		began := time.Now()
		require.ErrorIs(t, v.try(t.Context(), after(islandsTimeout, nil)), context.DeadlineExceeded)
		require.ErrorIs(t, v.try(t.Context(), after(islandsTimeout, nil)), context.DeadlineExceeded)
		require.Equal(t, islandsTimeout/2, time.Since(began))
	})
}
