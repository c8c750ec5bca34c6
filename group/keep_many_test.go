package group

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/symmem/symmem/group/durable"
	"github.com/symmem/symmem/group/internal/pb"
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

// waitingStore keeps nothing, and ends a commit with what it is given, or with nothing once that is closed.
type waitingStore struct {
	durable.Store
	commits chan error
}

func (s *waitingStore) Commit(ctx context.Context, groups [][]durable.Change) error {
	if len(groups) == 0 {
		return nil
	}
	select {
	case err := <-s.commits:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *waitingStore) Close() error { return nil }

// greedyStream is the stream of a rank that stores values without end, and waits for none of them.
type greedyStream struct {
	grpc.ServerStream
	asked atomic.Int64
}

func (s *greedyStream) Send(*pb.ServerMessage) error { return nil }

func (s *greedyStream) Recv() (*pb.ClientMessage, error) {
	return &pb.ClientMessage{Body: &pb.ClientMessage_Store{Store: &pb.StoreRequest{
		Id: uint64(s.asked.Add(1)), Group: worldName, Verb: uint32(verbSet), Key: []byte("k"), Value: make([]byte, 1<<20)}}}, nil
}

// TestChangesThatWait: where a rank changes more than the store takes, no more is read from it before there is room, and a rank that waits for that goes with its connection, with
// the store, and with the service.
func TestChangesThatWait(t *testing.T) {
	ctx := testContext(t)
	o, err := (&Options{WorldSize: 1}).checked()
	require.NoError(t, err)
	reads := func(t *testing.T) (k *keeper, commits chan error, s *service, c *serviceConn, stream *greedyStream, ended <-chan struct{}) {
		h := newHub(1, &defaultLimits)
		commits = make(chan error)
		h.keeper = newKeeper(&waitingStore{commits: commits}, time.Minute, o.Logger)
		s = newService(h, o, false, o.Logger)
		c = &serviceConn{service: s, outbox: newOutbox(1<<20, 1<<40), gone: make(chan struct{})}
		_, ok := h.attach(Member{}, c)
		require.True(t, ok)
		c.rank.Store(0)
		stream = &greedyStream{}
		over := make(chan struct{})
		go func() {
			defer close(over)
			c.read(stream)
		}()
		require.Eventually(t, func() bool { return h.keeper.full() != nil }, 20*time.Second, time.Millisecond)
		time.Sleep(20 * time.Millisecond)
		require.LessOrEqual(t, stream.asked.Load(), int64(waitingBytes>>20+2), "no more is read")
		return h.keeper, commits, s, c, stream, over
	}
	requireOver := func(t *testing.T, over <-chan struct{}) {
		t.Helper()
		select {
		case <-over:
		case <-ctx.Done():
			t.Fatal("it reads on, or waits")
		}
	}
	t.Run("until the store takes more", func(t *testing.T) {
		k, commits, s, _, stream, over := reads(t)
		before := stream.asked.Load()
		close(commits)
		require.Eventually(t, func() bool { return stream.asked.Load() > before+100 }, 20*time.Second, time.Millisecond)
		s.end()
		requireOver(t, over)
		require.NoError(t, k.flush(ctx))
		k.mu.Lock()
		waiting := k.waiting
		k.mu.Unlock()
		require.Zero(t, waiting)
		require.NoError(t, k.end(ctx, false))
	})
	t.Run("the store fails", func(t *testing.T) {
		k, commits, _, _, _, over := reads(t)
		commits <- &durable.StoreError{Op: "keeping", Condition: durable.Full}
		requireOver(t, over)
		require.NoError(t, k.end(ctx, false))
	})
	t.Run("the connection breaks", func(t *testing.T) {
		k, commits, _, c, _, over := reads(t)
		c.detach()
		requireOver(t, over)
		close(commits)
		require.NoError(t, k.end(ctx, false))
	})
	t.Run("the service ends", func(t *testing.T) {
		k, commits, s, _, _, over := reads(t)
		s.end()
		requireOver(t, over)
		close(commits)
		require.NoError(t, k.end(ctx, false))
	})
}

// TestRepliesThatAreNotTaken: of a rank that does not say that it has its answers, a bounded number of them is kept. It may ask for what changes nothing.
func TestRepliesThatAreNotTaken(t *testing.T) {
	ctx := testContext(t)
	s := &stepStore{begin: make(chan struct{})}
	close(s.begin)
	lim := defaultLimits
	lim.replies, lim.replyBytes = 10, 1000
	h := newHub(2, &lim)
	h.keeper = newKeeper(s, time.Minute, newSession(0, 0, nil, &lim).logger)
	for rank := range 2 {
		_, ok := h.attach(Member{WorldRank: rank}, &newsReader{losses: map[int]int{}})
		require.True(t, ok)
	}
	id := uint64(0)
	ask := func(rank int, r storeRequest) *storeReply {
		answer := make(replyChan, 1)
		id++
		r.id, r.replyTo = id, answer
		h.request(rank, worldName, &r)
		return <-answer
	}
	requireQuota := func(r *storeReply, text string, limit int64) {
		t.Helper()
		require.Equal(t, &failure{kind: failQuota, text: text, limit: limit}, r.failure)
	}
	add := storeRequest{verb: verbAdd, key: "n", delta: 1}
	for range lim.replies {
		require.Nil(t, ask(0, add).failure)
	}
	requireQuota(ask(0, add), quotaReplies, int64(lim.replies))
	require.Equal(t, "10", string(ask(0, storeRequest{verb: verbTryGet, key: "n"}).value))
	require.Nil(t, ask(1, add).failure, "another rank")
	h.taken(0, "", 0, 3)
	require.Equal(t, int64(12), ask(0, add).number)
	requireQuota(ask(0, add), quotaReplies, int64(lim.replies))

	h.taken(1, "", 0, 1) // not its own: nothing
	swap := storeRequest{verb: verbCompareAndSwap, key: "large", value: make([]byte, 600)}
	require.True(t, ask(1, swap).swapped)
	swap.old, swap.hasOld = swap.value, true
	require.True(t, ask(1, swap).swapped)
	requireQuota(ask(1, swap), quotaReplyBytes, lim.replyBytes)
	h.leave(1)
	require.Zero(t, growth(h, 1).replyBytes)
	require.NoError(t, h.keeper.end(ctx, false))
}
