package group

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestSubGivenUpMeanwhile: a rank that gives a Sub up while there is no service is not waited for by those that come to it later, as where there is one.
func TestSubGivenUpMeanwhile(t *testing.T) {
	t.Parallel() // it waits, most of the time
	ctx := testContext(t)
	s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: "memory://here/" + uniqueJob(), Timeout: 30 * time.Second})
	groups := s.join()
	require.Error(t, s.end())
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	_, err := groups[0].Sub(short, []int{0, 1})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	s.start(nil)
	_, err = groups[0].Store().Add(ctx, "back", 1)
	require.NoError(t, err)
	_, err = groups[1].Sub(ctx, []int{0, 1})
	var abandoned *AbandonedError
	require.ErrorAs(t, err, &abandoned)
	require.Equal(t, 0, abandoned.Rank)
	subs := make([]*Group, 2)
	requireNone(t, onAll(groups, func(g *Group) (err error) {
		if subs[g.Rank()], err = g.Sub(ctx, []int{0, 1}); err != nil {
			return err
		}
		return subs[g.Rank()].Barrier(ctx, "in step")
	}))
	s.finish(ctx, groups)
}
