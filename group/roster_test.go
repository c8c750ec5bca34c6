package group

import (
	"context"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestMembersAreShared: the ranks of a process that know the same of a group share it, in the world and in groups of it, and what Members gives is a copy.
func TestMembersAreShared(t *testing.T) {
	const n = 5
	groups := newJob(t, n, Options{})
	first := groups[0].Members()
	require.Len(t, first, n)
	first[1].Host = "changed"
	for rank, g := range groups {
		require.Same(t, &groups[0].members[0], &g.members[0], "rank %d", rank)
		require.NotEqual(t, "changed", g.Members()[1].Host)
		require.Equal(t, rank, g.Members()[rank].LocalRank)
	}
	subs := make([]*Group, n)
	ctx := testContext(t)
	requireNone(t, onAll(groups, func(g *Group) (err error) {
		if g.Rank() != 2 {
			subs[g.Rank()], err = g.Sub(ctx, []int{0, 1, 3, 4})
		}
		return err
	}))
	for _, sub := range subs {
		if sub == nil {
			continue
		}
		require.Same(t, &subs[0].members[0], &sub.members[0])
		require.Equal(t, []int{0, 1, 3, 4}, sub.world)
		for i, m := range sub.Members() {
			require.Equal(t, sub.world[i], m.WorldRank)
			require.Equal(t, sub.world[i], m.LocalRank)
		}
	}
	// A group of a group counts in the world, as its parent does.
	last := make([]*Group, n)
	requireNone(t, onAll([]*Group{subs[1], subs[3]}, func(g *Group) (err error) {
		last[g.world[g.Rank()]], err = g.Sub(ctx, []int{1, 2})
		return err
	}))
	require.Equal(t, []int{1, 3}, last[1].world)
	require.Same(t, &last[1].members[0], &last[3].members[0])
	require.Equal(t, 3, last[3].Members()[1].WorldRank)
}

// TestMembersAreNotMixed: a world of which something else is known has its own.
func TestMembersAreNotMixed(t *testing.T) {
	one, other := newJob(t, 2, Options{}), newJob(t, 2, Options{BootID: "another"})
	require.NotSame(t, &one[0].members[0], &other[0].members[0])
	require.Equal(t, "another", other[1].Members()[0].BootID)
	require.NotEqual(t, "another", one[1].Members()[0].BootID)
	sub, err := worldOf([][]byte{{}, {}})
	require.NoError(t, err)
	longer, err := worldOf([][]byte{{}, {}, {}})
	require.NoError(t, err)
	require.Len(t, sub.members, 2)
	require.Len(t, longer.members, 3)
	_, err = worldOf([][]byte{{}, {0xff}})
	require.ErrorContains(t, err, "decoding rank 1")
}

// TestMembersAreForgotten: what nobody uses any more is not kept.
func TestMembersAreForgotten(t *testing.T) {
	known := func() int {
		worlds.mu.Lock()
		defer worlds.mu.Unlock()
		return len(worlds.known)
	}
	func() {
		groups := newLocalJob(t, 3)
		require.Positive(t, known())
		requireNone(t, onAll(groups, func(g *Group) error {
			sub, err := g.Sub(t.Context(), []int{0, 1, 2})
			if err != nil {
				return err
			}
			return sub.Close(t.Context())
		}))
		leaveAll(t, groups)
	}()
	require.Eventually(t, func() bool { runtime.GC(); return known() == 0 }, time.Minute, 10*time.Millisecond)
}

// newLocalJob is newJob for a test that closes the groups itself.
func newLocalJob(t *testing.T, n int) []*Group {
	groups, failures := tryJob(t, n, Options{BootID: "forgotten"})
	requireNone(t, failures)
	return groups
}

// BenchmarkMembers measures the heap of a process that has all ranks of a large world.
func BenchmarkMembers(b *testing.B) {
	for b.Loop() {
		groups, failures := tryJob(b, 1024, Options{LivenessTimeout: time.Minute})
		requireNone(b, failures)
		for range 5 { // what joining has left behind goes
			runtime.GC()
			time.Sleep(100 * time.Millisecond)
		}
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		b.ReportMetric(float64(m.HeapAlloc)/1e6, "MB-heap")
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		requireNone(b, onAll(groups, func(g *Group) error { return g.Close(ctx) }))
		cancel()
	}
}
