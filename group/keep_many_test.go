package group

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group/durable"
)

// stepStore counts what it is asked to keep at a time, and keeps nothing.
type stepStore struct {
	durable.Store
	mu      sync.Mutex
	begin   chan struct{} // the first commit waits for it
	commits [][][]durable.Change
}

func (s *stepStore) Commit(_ context.Context, groups [][]durable.Change) error {
	<-s.begin
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(groups) > 0 { // else it was only asked whether it is still the service's
		s.commits = append(s.commits, groups)
	}
	return nil
}

func (s *stepStore) Close() error { return nil }

// kept returns the keys that are kept, in order.
func (s *stepStore) kept() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []string
	for _, changes := range slices.Concat(s.commits...) {
		for _, c := range changes {
			keys = append(keys, c.Key)
		}
	}
	return keys
}

// TestKeepsInSteps: what very many ranks change at once is kept in steps, each of which has the whole time of a commit, and in its order. Whoever is told of something is
// told as soon as that is kept.
func TestKeepsInSteps(t *testing.T) {
	ctx := testContext(t)
	s := &stepStore{begin: make(chan struct{})}
	k := newKeeper(s, time.Minute, newSession(0, 0, nil, &defaultLimits).logger)
	const n = 10 * commitChanges
	var want []string
	var told []int
	large := make([]byte, commitBytes/2)
	for i := range n {
		key := fmt.Sprint(i)
		want = append(want, key)
		change := durable.Change{Key: key, Value: []byte("x")}
		if i < 6 {
			change.Value = large
		}
		k.keep(change)
		k.tell(func() {
			if now := s.kept(); len(now) <= i || now[i] != key {
				t.Errorf("change %d is not kept when it is told", i)
			}
			told = append(told, i)
		})
	}
	close(s.begin)
	require.NoError(t, k.flush(ctx))
	require.Equal(t, want, s.kept())
	require.Len(t, told, n)
	require.True(t, slices.IsSorted(told))
	for _, groups := range s.commits {
		size := 0
		for _, c := range slices.Concat(groups...) {
			size += len(c.Value)
		}
		require.LessOrEqual(t, len(groups), commitChanges)
		require.LessOrEqual(t, size, commitBytes+len(large))
	}
	require.NoError(t, k.end(ctx, false))
}

// TestManyLeave: that a rank has gone is one change of one key, unless something was kept for it.
func TestManyLeave(t *testing.T) {
	ctx := testContext(t)
	s := &stepStore{begin: make(chan struct{})}
	close(s.begin)
	const n = 100
	h := newHub(n, &defaultLimits)
	h.keeper = newKeeper(s, time.Minute, newSession(0, 0, nil, &defaultLimits).logger)
	news := &newsReader{losses: map[int]int{}}
	for rank := range n {
		_, ok := h.attach(Member{WorldRank: rank}, news)
		require.True(t, ok)
	}
	h.request(3, worldName, &storeRequest{id: 1, verb: verbSet, key: "k", replyTo: make(replyChan, 1)})
	for rank := range n {
		h.leave(rank)
	}
	require.NoError(t, h.keeper.flush(ctx))
	all := 0
	for _, c := range slices.Concat(slices.Concat(s.commits...)...) {
		if c.All && strings.HasPrefix(c.Key, "reply/") {
			require.Equal(t, repliesKey(3), c.Key)
			all++
		}
	}
	require.Equal(t, 1, all)
	require.NoError(t, h.keeper.end(ctx, false))
}
