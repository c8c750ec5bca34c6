package group

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
)

// eachKind runs a test over every kind of group: in this process, over the network, and over a service that keeps what it knows in a store.
func eachKind(t *testing.T, n int, fn func(t *testing.T, groups []*Group)) {
	t.Run("local", func(t *testing.T) { fn(t, newLocal(t, n, nil)) })
	t.Run("network", func(t *testing.T) { fn(t, newJob(t, n, Options{})) })
	eachStore(t, func(t *testing.T, store string) { fn(t, newKept(t, n, store)) })
}

// sendingTransport tells when it has sent that its rank has come to a call.
type sendingTransport struct {
	transport
	sent chan<- struct{}
}

func (s sendingTransport) arrive(group string, seq uint64, a *arrival) {
	s.transport.arrive(group, seq, a)
	s.sent <- struct{}{}
}

// endingWhenAllCame is a context that ends when the hub knows that all of the groups' ranks have come to the next call. over has to be called behind that.
func endingWhenAllCame(ctx context.Context, groups []*Group) (short context.Context, over func()) {
	short, cancel := context.WithCancel(ctx)
	sent := make(chan struct{}, len(groups))
	for _, g := range groups {
		g.session.transport = sendingTransport{g.session.transport, sent}
	}
	var wait sync.WaitGroup
	wait.Go(func() {
		defer cancel()
		for range groups {
			<-sent
		}
		for _, g := range groups { // what the hub answers to a rank it does behind what it heard from it before
			_, _, _ = g.Store().TryGet(ctx, "any")
		}
	})
	return short, func() {
		wait.Wait()
		for _, g := range groups {
			g.session.transport = g.session.transport.(sendingTransport).transport
		}
	}
}

func TestMismatch(t *testing.T) {
	eachKind(t, 4, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		for rank, err := range onAll(groups, func(g *Group) error {
			switch g.Rank() {
			case 0:
				_, err := g.AllGather(ctx, "same", nil)
				return err
			case 1:
				return g.Barrier(ctx, "same")
			case 2:
				_, err := g.Broadcast(ctx, "same", 1, nil)
				return err
			}
			_, err := g.AllGather(ctx, "other", nil)
			return err
		}) {
			require.ErrorIsf(t, err, ErrMismatch, "rank %d", rank)
			var mismatch *MismatchError
			require.ErrorAs(t, err, &mismatch)
			require.Equal(t, []string{`all-gather "same"`, `barrier "same"`, `broadcast "same" from root 1`, `all-gather "other"`},
				mismatch.Values)
		}
		// One has not come when the first gives up: the others learn of the mismatch all the same.
		short, over := endingWhenAllCame(ctx, groups[:3])
		for _, err := range onAll(groups[:3], func(g *Group) error { return g.Barrier(short, fmt.Sprint(g.Rank()/2)) }) {
			var mismatch *MismatchError
			require.ErrorAs(t, err, &mismatch)
			require.Equal(t, "has not come", mismatch.Values[3])
		}
		over()
		var mismatch *MismatchError
		require.ErrorAs(t, groups[3].Barrier(ctx, "0"), &mismatch)
		requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "after") }))
		t.Log(mismatch)
	})
}

func TestVote(t *testing.T) {
	cause := errors.New("cannot map")
	eachKind(t, 3, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		requireNone(t, onAll(groups, func(g *Group) error { return g.Vote(ctx, "mapping", nil) }))
		for rank, err := range onAll(groups, func(g *Group) error {
			if g.Rank() == 0 {
				return g.Vote(ctx, "mapping", nil)
			}
			return g.Vote(ctx, "mapping", fmt.Errorf("rank %d: %w", g.Rank(), cause))
		}) {
			var vote *VoteError
			require.ErrorAs(t, err, &vote)
			require.Equal(t, []RankFailure{{Rank: 1, Text: "rank 1: cannot map"}, {Rank: 2, Text: "rank 2: cannot map"}}, vote.Failures)
			require.Equal(t, rank != 0, errors.Is(err, cause))
		}
		// A failure of any length and content arrives as text.
		for _, err := range onAll(groups, func(g *Group) error {
			return g.Vote(ctx, "long\xff", errors.New(strings.Repeat("é\xff", 3*maxText)))
		}) {
			var vote *VoteError
			require.ErrorAs(t, err, &vote)
			require.Len(t, vote.Failures, 3)
		}
	})
}

// TestExcuse: a rank has failed by itself and leaves, while the others wait for it in another call. They learn why.
func TestExcuse(t *testing.T) {
	eachKind(t, 3, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		failed := fmt.Errorf("allocating 5 bytes: %w", errs.ErrNoMemory)
		// One that was got over is forgotten.
		groups[0].Excuse(errors.New("an old failure"))
		requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "goes on") }))
		for rank, err := range onAll(groups, func(g *Group) error {
			if g.Rank() == 2 {
				g.Excuse(failed)
				return g.Vote(ctx, "closing", nil)
			}
			_, err := g.AllGather(ctx, "rendezvous", nil)
			return err
		}) {
			var vote *VoteError
			require.ErrorAs(t, err, &vote)
			require.Equal(t, []RankFailure{{Rank: 2, Text: failed.Error(), Conditions: []error{errs.ErrNoMemory}}}, vote.Failures)
			require.ErrorIs(t, err, errs.ErrNoMemory, "on rank %d", rank)
			require.NotErrorIs(t, err, ErrMismatch)
			require.Equal(t, rank == 2, errors.Is(err, failed))
		}
		// It is still known in the next call, and so is a mismatch of others that no failure explains.
		short, over := endingWhenAllCame(ctx, groups[1:])
		for _, err := range onAll(groups[1:], func(g *Group) error { return g.Barrier(short, fmt.Sprint(g.Rank())) }) {
			var vote *VoteError
			require.ErrorAs(t, err, &vote)
		}
		over()
		require.Error(t, groups[0].Barrier(ctx, "0"))
		requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "together") }))
		for _, err := range onAll(groups, func(g *Group) error { return g.Barrier(ctx, fmt.Sprint(g.Rank())) }) {
			require.ErrorIs(t, err, ErrMismatch)
		}
	})
}

func TestGiveUp(t *testing.T) {
	eachKind(t, 4, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		failures := onAll(groups[:3], func(g *Group) error {
			if g.Rank() == 2 {
				_, err := g.AllGather(short, "r", nil)
				return err
			}
			_, err := g.AllGather(ctx, "r", nil)
			return err
		})
		_, late := groups[3].AllGather(ctx, "r", nil)
		failures = append(failures, late)
		for rank, err := range failures {
			if rank == 2 {
				var missing *MissingRanksError
				require.ErrorAs(t, err, &missing)
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Contains(t, missing.Missing, 3)
				continue
			}
			var abandoned *AbandonedError
			require.ErrorAs(t, err, &abandoned)
			require.Equal(t, 2, abandoned.Rank)
			require.Contains(t, abandoned.Reason, "deadline")
		}
		// Cancelled is told apart from late.
		cancelled, cancel := context.WithCancel(ctx)
		cancel()
		require.ErrorIs(t, groups[0].Barrier(cancelled, "b"), context.Canceled)
		requireNone(t, onAll(groups[1:], func(g *Group) error {
			var abandoned *AbandonedError
			if err := g.Barrier(ctx, "b"); !errors.As(err, &abandoned) {
				return fmt.Errorf("not abandoned: %w", err)
			}
			return nil
		}))
		// One rank is far ahead of the others, further than failures are remembered one by one.
		const ahead = 3 * maxTombstones
		for range ahead {
			require.Error(t, groups[1].Barrier(cancelled, "ahead"))
		}
		requireNone(t, onAll(slices.Concat(groups[:1], groups[2:]), func(g *Group) error {
			for i := range ahead {
				var abandoned *AbandonedError
				if err := g.Barrier(ctx, "ahead"); !errors.As(err, &abandoned) {
					return fmt.Errorf("call %d: not abandoned: %w", i, err)
				}
			}
			return nil
		}))
		requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "after") }))
	})
}

func TestDeadlineNamesTheMissing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		groups, err := Local(8, &LocalOptions{Timeout: 28 * time.Second})
		require.NoError(t, err)
		came := slices.Concat(groups[:3], groups[4:7])
		for i, err := range onAll(came, func(g *Group) error {
			if g.Rank() > 0 {
				time.Sleep(time.Second)
			}
			_, err := g.AllGather(t.Context(), "rendezvous 3", nil)
			return err
		}) {
			if i == 0 {
				require.EqualError(t, err, `all-gather "rendezvous 3": waiting for ranks 3, 7 of 8 after 28s: context deadline exceeded`)
			} else {
				require.EqualError(t, err,
					`all-gather "rendezvous 3": rank 0 gave up waiting for ranks 3, 7: context deadline exceeded after 28s`)
			}
		}
		_, err = groups[0].Store().Get(t.Context(), "absent")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "nobody has set it after 28s")
		closeAll(t, groups)
	})
}

func TestSub(t *testing.T) {
	eachKind(t, 4, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		// Overlapping groups, opened in an order that cannot deadlock, side by side, with data that tells them apart.
		lists := [][]int{{0, 1}, {1, 2, 3}, {0, 3}, {0, 1, 2, 3}, {2}, {0, 1}}
		requireNone(t, onAll(groups, func(g *Group) error {
			var wait sync.WaitGroup
			var mu sync.Mutex
			var failures []error
			for i, ranks := range lists {
				if !slices.Contains(ranks, g.Rank()) {
					continue
				}
				sub, err := g.Sub(ctx, ranks)
				if err != nil {
					return err
				}
				if sub.Rank() != slices.Index(ranks, g.Rank()) || sub.Size() != len(ranks) || sub.Members()[0].WorldRank != ranks[0] {
					return fmt.Errorf("%s: rank %d of %d: %+v", sub.Name(), sub.Rank(), sub.Size(), sub.Members())
				}
				wait.Go(func() {
					for range 20 {
						all, err := sub.AllGather(ctx, "r", fmt.Append(nil, i, g.Rank()))
						for rank, b := range all {
							if string(b) != fmt.Sprint(i, ranks[rank]) {
								err = errors.Join(err, fmt.Errorf("%s: rank %d brought %q", sub.Name(), rank, b))
							}
						}
						mu.Lock()
						failures = append(failures, err)
						mu.Unlock()
					}
					if err := sub.Close(ctx); err != nil {
						mu.Lock()
						failures = append(failures, err)
						mu.Unlock()
					}
				})
			}
			wait.Wait()
			return errors.Join(failures...)
		}))
		names := make([]string, 2)
		requireNone(t, onAll(groups[:2], func(g *Group) error {
			sub, err := g.Sub(ctx, []int{0, 1})
			if err != nil {
				return err
			}
			inner, err := sub.Sub(ctx, []int{0, 1})
			if err != nil {
				return err
			}
			names[g.Rank()] = inner.Name()
			// The groups have stores of their own.
			if err := inner.Store().Set(ctx, fmt.Sprint(g.Rank()), nil); err != nil {
				return err
			}
			if _, ok, err := sub.Store().TryGet(ctx, fmt.Sprint(g.Rank())); ok || err != nil {
				return fmt.Errorf("stores are shared: %v %w", ok, err)
			}
			return errors.Join(inner.Close(ctx), sub.Close(ctx))
		}))
		require.Equal(t, []string{"world/0,1#3/0,1#1", "world/0,1#3/0,1#1"}, names)
	})
}

func TestSubRefuses(t *testing.T) {
	groups := newLocal(t, 4, nil)
	ctx := testContext(t)
	for _, ranks := range [][]int{nil, {}, {1}, {0, 4}, {-1, 0}, {0, 0}, {1, 0}} {
		_, err := groups[0].Sub(ctx, ranks)
		require.ErrorIsf(t, err, ErrInvalid, "%v", ranks)
	}
	// Nobody else comes; then all do.
	short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	_, err := groups[0].Sub(short, []int{0, 1})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	_, err = groups[1].Sub(ctx, []int{0, 1})
	var abandoned *AbandonedError
	require.ErrorAs(t, err, &abandoned)
	requireNone(t, onAll(groups[:2], func(g *Group) error {
		sub, err := g.Sub(ctx, []int{0, 1})
		if err != nil {
			return err
		}
		return sub.Close(ctx)
	}))
	h := groups[0].session.transport.(*localTransport).hub
	require.Len(t, h.groups, 1, "only the world is left")
}

func TestSubKey(t *testing.T) {
	even := make([]int, 1000)
	for i := range even {
		even[i] = 2 * i
	}
	require.Equal(t, "0,2,5", subKey([]int{0, 2, 5}))
	require.Equal(t, "0,1,3-7", subKey([]int{0, 1, 3, 4, 5, 6, 7}))
	require.Less(t, len(subKey(even)), 40)
	require.NotEqual(t, subKey(even), subKey(even[1:]))
}

func TestAbort(t *testing.T) {
	eachKind(t, 4, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		with, without := make([]*Group, 4), make([]*Group, 4)
		requireNone(t, onAll(groups, func(g *Group) error {
			var err error
			if g.Rank() != 3 {
				if without[g.Rank()], err = g.Sub(ctx, []int{0, 1, 2}); err != nil {
					return err
				}
			}
			if g.Rank() >= 2 {
				with[g.Rank()], err = g.Sub(ctx, []int{2, 3})
			}
			return err
		}))
		waiting := make(chan error, 1)
		go func() {
			_, err := with[2].Store().Get(ctx, "never")
			waiting <- err
		}()
		for rank, err := range onAll(groups, func(g *Group) error {
			if g.Rank() == 3 {
				g.Abort("the GPU fell off the bus")
				return g.Barrier(ctx, "own")
			}
			return g.Barrier(ctx, "r")
		}) {
			var lost *PeerLostError
			require.ErrorAs(t, err, &lost)
			require.ErrorIs(t, err, ErrPeerLost)
			require.Equal(t, 3, lost.Rank, "seen by rank %d", rank)
			require.Contains(t, lost.Reason, "bus")
		}
		var lost *PeerLostError
		require.ErrorAs(t, <-waiting, &lost)
		require.Equal(t, with[2].Name(), lost.Group)
		require.Equal(t, 1, lost.Rank, "in the ranks of its group")
		<-with[2].Lost()
		require.ErrorIs(t, with[2].Err(), ErrPeerLost)
		require.NoError(t, without[0].Err())
		requireNone(t, onAll(without[:3], func(g *Group) error { return g.Barrier(ctx, "goes on") }))
		_, err := groups[0].Sub(ctx, []int{0, 3})
		require.ErrorIs(t, err, ErrPeerLost)
		// The store still answers what it can.
		require.NoError(t, groups[0].Store().Set(ctx, "k", []byte("v")))
		v, err := groups[1].Store().Get(ctx, "k")
		require.NoError(t, err)
		require.Equal(t, "v", string(v))
	})
}

func TestClose(t *testing.T) {
	eachKind(t, 3, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		pending := make(chan error, 1)
		sub := make([]*Group, 3)
		requireNone(t, onAll(groups, func(g *Group) error {
			var err error
			sub[g.Rank()], err = g.Sub(ctx, []int{0, 1, 2})
			return err
		}))
		go func() { pending <- groups[1].Barrier(ctx, "the others never come") }()
		require.NoError(t, sub[2].Close(ctx))
		require.ErrorIs(t, sub[2].Close(ctx), ErrClosed)
		require.ErrorIs(t, sub[2].Err(), ErrClosed)
		require.ErrorIs(t, sub[2].Store().Set(ctx, "k", nil), ErrClosed)
		// Who has left is not lost, but cannot be waited for.
		err := sub[0].Barrier(ctx, "one has left")
		var lost *PeerLostError
		require.ErrorAs(t, err, &lost)
		require.Equal(t, 2, lost.Rank)
		require.Contains(t, lost.Reason, "left")
		require.NoError(t, sub[0].Err())
		require.NoError(t, groups[1].Close(ctx))
		require.ErrorIs(t, <-pending, ErrClosed)
		require.ErrorIs(t, sub[1].Err(), ErrClosed, "closing the world closes all groups")
		require.NoError(t, groups[0].Err())
	})
}

func TestCloseOfTheServiceTellsWhoIsLeft(t *testing.T) {
	groups, failures := tryJob(t, 3, Options{})
	requireNone(t, failures)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.NoError(t, groups[1].Close(testContext(t)))
	err := groups[0].Close(short)
	var missing *MissingRanksError
	require.ErrorAs(t, err, &missing)
	require.Equal(t, []int{2}, missing.Missing)
	<-groups[2].Lost()
	var lost *PeerLostError
	require.ErrorAs(t, groups[2].Err(), &lost)
	require.Equal(t, 0, lost.Rank)
	require.Equal(t, processID(), groups[2].Members()[lost.Rank].Process)
	require.NoError(t, groups[2].Close(testContext(t)))
}

func TestStore(t *testing.T) {
	eachKind(t, 3, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		s, other := groups[1].Store(), groups[2].Store()
		_, ok, err := s.TryGet(ctx, "k")
		require.NoError(t, err)
		require.False(t, ok)
		got := make(chan string, 1)
		go func() {
			v, err := other.Get(ctx, "k")
			got <- fmt.Sprint(string(v), err)
		}()
		value := []byte("v1")
		require.NoError(t, s.Set(ctx, "k", value))
		value[0] = 'x' // the store has its own
		require.Equal(t, "v1<nil>", <-got)
		v, ok, err := other.TryGet(ctx, "k")
		require.NoError(t, err)
		require.True(t, ok)
		v[0] = 'y' // and so have we
		current, swapped, err := s.CompareAndSwap(ctx, "k", []byte("v1"), []byte("v2"))
		require.NoError(t, err)
		require.True(t, swapped)
		require.Equal(t, "v2", string(current))
		current, swapped, err = s.CompareAndSwap(ctx, "k", []byte("v1"), []byte("v3"))
		require.NoError(t, err)
		require.False(t, swapped)
		require.Equal(t, "v2", string(current))
		_, swapped, err = s.CompareAndSwap(ctx, "new", nil, nil)
		require.NoError(t, err)
		require.True(t, swapped)
		_, swapped, err = s.CompareAndSwap(ctx, "new", nil, nil)
		require.NoError(t, err)
		require.False(t, swapped, "an empty value is not an absent one")
		current, swapped, err = s.CompareAndSwap(ctx, "absent", []byte{}, nil)
		require.NoError(t, err)
		require.False(t, swapped)
		require.Nil(t, current)
		requireNone(t, onAll(groups, func(g *Group) error {
			for range 50 {
				if _, err := g.Store().Add(ctx, "n", 2); err != nil {
					return err
				}
			}
			return nil
		}))
		n, err := s.Add(ctx, "n", -1)
		require.NoError(t, err)
		require.Equal(t, int64(299), n)
		_, err = s.Add(ctx, "k", 1)
		require.ErrorIs(t, err, ErrInvalid)
		require.NoError(t, s.Set(ctx, "max", []byte("9223372036854775807")))
		_, err = s.Add(ctx, "max", 1)
		require.ErrorIs(t, err, ErrInvalid)
		existed, err := s.Delete(ctx, "k")
		require.NoError(t, err)
		require.True(t, existed)
		existed, err = s.Delete(ctx, "k")
		require.NoError(t, err)
		require.False(t, existed)
		for _, key := range []string{"", strings.Repeat("k", maxText+1)} {
			require.ErrorIs(t, s.Set(ctx, key, nil), ErrInvalid)
		}
		require.ErrorIs(t, s.Set(ctx, "k", make([]byte, MaxBlob+1)), ErrInvalid)
		require.NoError(t, s.Set(ctx, "\xff\x00", []byte("any bytes")))
		v, err = other.Get(ctx, "\xff\x00")
		require.NoError(t, err)
		require.Equal(t, "any bytes", string(v))
		cancelled, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		defer cancel()
		_, err = s.Get(cancelled, "never")
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

// TestManyAtOnce calls from several goroutines of each rank, in an order that is alike on all ranks.
func TestManyAtOnce(t *testing.T) {
	eachKind(t, 3, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		requireNone(t, onAll(groups, func(g *Group) error {
			failures := make([]error, 40)
			var wait sync.WaitGroup
			for i := range failures {
				seq := g.take(1) // what AllGather does first; taken here so that the order is fixed
				wait.Go(func() {
					o, err := g.call(ctx, seq, &arrival{kind: kindAllGather, op: fmt.Sprint(i), data: fmt.Append(nil, g.Rank(), i)}, nil)
					if err == nil && string(o.blobs[2]) != fmt.Sprint(2, i) {
						err = fmt.Errorf("call %d: %q", i, o.blobs)
					}
					failures[i] = err
				})
			}
			wait.Wait()
			return errors.Join(failures...)
		}))
	})
}

func TestErrorTexts(t *testing.T) {
	for want, err := range map[string]error{
		`rank 3 of group world is lost (process 12 on h): silent`: &PeerLostError{Group: "world", Rank: 3, Host: "h", PID: 12, Reason: "silent"},
		"x: ranks disagree:\n\tranks 0-2, 4: a\n\trank 3: b":      &MismatchError{What: "x", Values: []string{"a", "a", "a", "b", "a"}},
		`v failed: ranks 0-2, 5: a; more of a`: &VoteError{Op: "v", Failures: []RankFailure{{Rank: 0, Text: "a\nmore of a"}, {Rank: 1, Text: "a\nmore of a"},
			{Rank: 2, Text: "a\nmore of a"}, {Rank: 5, Text: "a\nmore of a"}}},
		"v failed:\n\tranks 0, 2: a\n\trank 1: b":                 &VoteError{Op: "v", Failures: []RankFailure{{Rank: 0, Text: "a"}, {Rank: 1, Text: "b"}, {Rank: 2, Text: "a"}}},
		`refused by h:1 (token): wrong`:                           &RefusedError{Addr: "h:1", Reason: RefusedToken, Text: "wrong"},
		`barrier "b": rank 2 gave up waiting for ranks 0, 5: why`: &AbandonedError{Op: `barrier "b"`, Rank: 2, Missing: []int{0, 5}, Reason: "why"},
		`b: waiting for ranks 0-8 of 10 after 1.5s: context canceled`: &MissingRanksError{Op: "b", Missing: []int{0, 1, 2, 3, 4, 5, 6, 7, 8},
			Size: 10, Waited: 1500 * time.Millisecond, Err: context.Canceled},
	} {
		assert.EqualError(t, err, want)
	}
	many := &VoteError{Op: "v"}
	for i := range 30 {
		many.Failures = append(many.Failures, RankFailure{Rank: i, Text: fmt.Sprint("reason ", i)})
	}
	assert.ErrorContains(t, many, "\n\trank 15: reason 15\n\tand 14 more")
}

// TestSharedContextEnds: ranks whose contexts end together all get their own context's error, whoever of them gave up first.
func TestSharedContextEnds(t *testing.T) {
	for range 100 {
		groups, err := Local(4, nil)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		failed := make([]error, 3)
		var wg sync.WaitGroup
		for r := range failed { // rank 3 stays away
			wg.Go(func() { failed[r] = groups[r].Barrier(ctx, "b") })
		}
		time.AfterFunc(100*time.Microsecond, cancel)
		wg.Wait()
		for r, err := range failed {
			require.ErrorIs(t, err, context.Canceled, "rank %d", r)
		}
		for _, g := range groups {
			require.NoError(t, g.Close(t.Context()))
		}
	}
}
