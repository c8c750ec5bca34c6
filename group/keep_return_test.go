package group

import (
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group/durable"
	"github.com/symmem/symmem/group/internal/pb"
)

// TestReturnFromDeadHost: ranks that have connected to a host that does not answer, and does not say that it is gone either, are with the next service in time.
func TestReturnFromDeadHost(t *testing.T) {
	t.Parallel() // it waits, most of the time
	for name, tt := range map[string]struct {
		greets   bool // it does so before it dies
		attempts int  // of each rank, before the next service is there
	}{
		"before the greeting": {false, 4},
		"before the welcome":  {true, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := testContext(t)
			lim := defaultLimits
			lim.attempt = 500 * time.Millisecond
			s := newKeptService(t, 2, Options{
				Job: uniqueJob(), Store: "memory://here/" + uniqueJob(), Timeout: 20 * time.Second, LivenessTimeout: 500 * time.Millisecond, limits: &lim,
			})
			groups := s.join()
			require.Error(t, s.end())
			var dead net.Listener
			var err error
			require.Eventually(t, func() bool {
				dead, err = net.Listen("tcp", s.addr)
				return err == nil
			}, 10*time.Second, 5*time.Millisecond, "listening again: %v", err)
			var greeting sync.WaitGroup
			for range len(groups) * tt.attempts {
				conn, err := dead.Accept()
				require.NoError(t, err)
				defer conn.Close()
				if tt.greets {
					greeting.Go(func() {
						if _, err := io.ReadFull(conn, make([]byte, prologueLength)); err == nil {
							_, _ = conn.Write(prologue(modePlain))
						}
					})
				}
			}
			greeting.Wait()
			require.NoError(t, dead.Close())
			s.start(nil)
			requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "all are back") }))
			s.finish(ctx, groups)
		})
	}
}

// TestReturnToForgottenJob: ranks that come back to a service which knows nothing of them, as its store has forgotten the job or it has none, are refused. They would take
// a job that begins for theirs, without the keys and the groups that they have made.
func TestReturnToForgottenJob(t *testing.T) {
	t.Parallel() // it waits, most of the time
	for _, next := range []string{"the store has forgotten", "there is no store"} {
		t.Run(next, func(t *testing.T) {
			t.Parallel()
			ctx := testContext(t)
			store := "memory://here/" + uniqueJob()
			s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: store})
			groups := s.join()
			_, err := groups[0].Store().Add(ctx, "n", 5)
			require.NoError(t, err)
			require.Error(t, s.end())
			if s.opts.Store = ""; next == "the store has forgotten" {
				s.opts.Store = store
				place := memoryPlaceOf(store, s.opts.Job+"\x000")
				place.mu.Lock()
				clear(place.kept)
				place.mu.Unlock()
			}
			s.start(nil)
			for rank, err := range onAll(groups, func(g *Group) error {
				sum, err := g.Store().Add(ctx, "n", 1)
				if err == nil {
					t.Errorf("rank %d counts from the start: %d", g.Rank(), sum)
				}
				return err
			}) {
				var lost *PeerLostError
				require.ErrorAsf(t, err, &lost, "rank %d", rank)
				require.Contains(t, lost.Reason, "knows nothing of")
			}
			for _, g := range groups {
				_ = g.Close(ctx) // its service is lost
			}
			require.Error(t, s.end())
		})
	}
}

// TestManyGroupsLeftMeanwhile: however many groups a rank leaves while there is no service, it is in none of them for the next one.
func TestManyGroupsLeftMeanwhile(t *testing.T) {
	t.Parallel() // it waits, most of the time
	ctx := testContext(t)
	s := newKeptService(t, 2, Options{Job: uniqueJob(), Store: "memory://here/" + uniqueJob(), Timeout: 10 * time.Second})
	groups := s.join()
	subs := make([][]*Group, 2)
	requireNone(t, onAll(groups, func(g *Group) error {
		for range 200 {
			sub, err := g.Sub(ctx, []int{0, 1})
			if err != nil {
				return err
			}
			subs[g.Rank()] = append(subs[g.Rank()], sub)
		}
		return nil
	}))
	require.Error(t, s.end())
	for _, sub := range subs[0] {
		require.NoError(t, sub.Close(ctx))
	}
	s.start(nil)
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "back") }))
	for i, sub := range subs[1] {
		var lost *PeerLostError
		require.ErrorAsf(t, sub.Barrier(ctx, "alone"), &lost, "group %d", i)
		require.Contains(t, lost.Reason, "has left")
	}
	s.finish(ctx, groups)
}

// TestRankComesBackAtTheLastMoment: a rank that comes back after the service has looked who is missing, and before it has declared those lost, stays in the job.
func TestRankComesBackAtTheLastMoment(t *testing.T) {
	h := newHub(3, &defaultLimits)
	for rank := range h.ranks { // present, as an earlier service has left them
		h.ranks[rank] = hubRank{state: rankPresent, session: "join", member: Member{WorldRank: rank}}
		h.present++
	}
	news := new(newsOrder)
	require.True(t, h.back(0, "join", nil, news, func() {}))
	missing := h.awaited()
	require.Equal(t, []int{1, 2}, missing)
	require.True(t, h.back(1, "join", nil, news, func() {}))
	for _, rank := range missing {
		h.loseAwaited(rank, "it has not come back")
	}
	require.Equal(t, []int{0, 1}, h.attached())
	require.Equal(t, []string{"loss of 2", "loss of 2"}, news.told, "both ranks")
}

// newsOrder notes what a rank is told, in order.
type newsOrder struct{ told []string }

func (n *newsOrder) receiveLoss(l *loss) {
	n.told = append(n.told, fmt.Sprint("loss of ", l.worldRank))
}

func (n *newsOrder) receiveOutcome(group string, seq uint64, o *outcome) {
	n.told = append(n.told, fmt.Sprintf("call %d of %s: %d blobs", seq, group, len(o.blobs)))
}

// TestOutcomeBeforeLaterLoss: a call that has ended well ends so on a rank that the service before did not tell of it, though a member was lost since: the others have its
// outcome, and a rank that hears of the loss first gives the call up.
func TestOutcomeBeforeLaterLoss(t *testing.T) {
	ctx := testContext(t)
	name := uniqueJob()
	hub := func() *hub {
		store, err := durable.Open(ctx, "memory://here/"+name, durable.Options{Name: name})
		require.NoError(t, err)
		kept, err := store.Load(ctx)
		require.NoError(t, err)
		h := newHub(3, &defaultLimits)
		h.keeper = newKeeper(store, time.Second, newSession(0, 0, nil, &defaultLimits).logger)
		require.NoError(t, h.restore(kept))
		return h
	}
	h := hub()
	for rank := range h.ranks {
		_, ok := h.attachAs(Member{WorldRank: rank}, "join", new(newsOrder), func() {})
		require.True(t, ok)
	}
	for rank := range h.ranks {
		h.arrive(rank, worldName, 7, &arrival{kind: kindAllGather, op: "all", data: []byte{byte(rank)}, to: make(outcomeChan, 1)})
	}
	h.taken(1, worldName, 7, 0)
	h.lose(2, "the test says so")
	require.NoError(t, h.keeper.flush(ctx))
	require.NoError(t, h.keeper.end(ctx, false))

	h = hub()
	news := new(newsOrder)
	require.True(t, h.back(0, "join", []*pb.Taken{{Group: worldName, Sequence: 7}}, news, func() {}))
	require.NoError(t, h.keeper.flush(ctx))
	require.Equal(t, []string{"call 7 of world: 3 blobs", "loss of 2"}, news.told)
	again := make(outcomeChan, 1) // it brings the call again all the same
	h.arrive(0, worldName, 7, &arrival{kind: kindAllGather, op: "all", data: []byte{0}, to: again})
	require.NoError(t, h.keeper.flush(ctx))
	require.Len(t, (<-again).blobs, 3)
	require.NoError(t, h.keeper.end(ctx, true))
}

// TestReturnTakesItsTime: ranks that are missing have the time that they are given again whenever another one has come back, and time in which the service did not get to
// run does not count.
func TestReturnTakesItsTime(t *testing.T) {
	now := time.Now()
	const bound = 10 * time.Second
	r := returning{missing: 3, last: now}
	pass := func(d time.Duration, missing int) (late bool) {
		for ; d > 0 && !late; d -= servedLook {
			now = now.Add(servedLook)
			late = r.late(now, missing, bound)
		}
		return late
	}
	require.False(t, pass(bound, 3))
	require.False(t, pass(bound, 2), "one has come back meanwhile")
	now = now.Add(time.Hour)
	require.False(t, pass(servedLook, 1), "one has come back, and the others could not")
	now = now.Add(time.Hour)
	require.False(t, pass(bound/2, 1), "the service did not run")
	require.True(t, pass(bound, 1))
	require.False(t, r.late(now.Add(bound), 0, bound), "all are back")
}
