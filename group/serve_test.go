package group

import (
	"context"
	"errors"
	"math"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/symmem/symmem/group/internal/pb"
	"github.com/symmem/symmem/internal/errs"
)

// served joins n ranks to a service of Serve. ended has what Serve returns.
func served(t *testing.T, n int, base Options) (groups []*Group, ended <-chan error) {
	t.Helper()
	ctx := testContext(t)
	l := listenLoopback(t)
	base.WorldSize = n
	service := base
	service.Listener = l
	end := make(chan error, 1)
	go func() { end <- Serve(ctx, &service) }()
	groups, failures := joinAll(t, n, func(rank int) *Options {
		o := base
		o.Rank, o.Addr, o.Served = rank, l.Addr().String(), true
		return &o
	})
	requireNone(t, failures)
	return groups, end
}

// TestServe: no rank is another's service: each can leave when it likes, rank 0 too, and be lost; Serve ends with the last.
func TestServe(t *testing.T) {
	for name, base := range map[string]Options{"plain": {Job: "j"}, "token": {Job: "j", Token: "0123456789abcdef"}} {
		t.Run(name, func(t *testing.T) {
			ctx := testContext(t)
			groups, ended := served(t, 4, base)
			requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "all") }))

			// Rank 0 leaves at once, and the others go on.
			require.NoError(t, groups[0].Close(ctx))
			left := groups[1:]
			for rank, err := range onAll(left, func(g *Group) error { return g.Barrier(ctx, "without") }) {
				var lost *PeerLostError
				require.ErrorAsf(t, err, &lost, "rank %d", rank+1)
				require.Zero(t, lost.Rank)
			}
			subs := make([]*Group, 4)
			requireNone(t, onAll(left, func(g *Group) (err error) {
				subs[g.Rank()], err = g.Sub(ctx, []int{1, 2, 3})
				return err
			}))
			requireNone(t, onAll(subs[1:], func(g *Group) error { return g.Barrier(ctx, "three") }))

			// Another one is lost.
			groups[2].Abort("the test says so")
			for _, rank := range []int{1, 3} {
				err := subs[rank].Barrier(ctx, "two")
				var lost *PeerLostError
				require.ErrorAs(t, err, &lost)
				require.Equal(t, 1, lost.Rank)
			}
			select {
			case err := <-ended:
				t.Fatalf("Serve has ended with ranks in the job: %v", err)
			case <-time.After(3 * servedLook):
			}
			requireNone(t, onAll([]*Group{groups[1], groups[2], groups[3]}, func(g *Group) error { return g.Close(ctx) }))
			require.NoError(t, <-ended)
		})
	}
}

// TestServeAlone: a world of one joins a service too.
func TestServeAlone(t *testing.T) {
	groups, ended := served(t, 1, Options{})
	require.NoError(t, groups[0].Barrier(testContext(t), "alone"))
	require.NoError(t, groups[0].Close(testContext(t)))
	require.NoError(t, <-ended)
}

// TestServeRankZeroDies: the connection of rank 0 breaks, and the service and the others stay.
func TestServeRankZeroDies(t *testing.T) {
	ctx := testContext(t)
	groups, ended := served(t, 3, Options{})
	r, ok := groups[0].session.transport.(*remote)
	require.True(t, ok)
	require.NoError(t, r.link.socket.Close())
	for _, rank := range []int{1, 2} {
		var lost *PeerLostError
		require.ErrorAs(t, groups[rank].Barrier(ctx, "after"), &lost)
		require.Zero(t, lost.Rank)
	}
	two := make([]*Group, 3)
	requireNone(t, onAll(groups[1:], func(g *Group) (err error) {
		two[g.Rank()], err = g.Sub(ctx, []int{1, 2})
		return err
	}))
	requireNone(t, onAll(two[1:], func(g *Group) error { return g.Barrier(ctx, "two") }))
	for _, g := range groups {
		_ = g.Close(ctx)
	}
	require.NoError(t, <-ended)
}

// TestServeEnds: it does not wait for ever for those who do not come while nobody is there, and names them.
func TestServeEnds(t *testing.T) {
	ctx := testContext(t)
	t.Run("a rank never comes", func(t *testing.T) {
		l := listenLoopback(t)
		o := Options{WorldSize: 3, Timeout: 700 * time.Millisecond}
		service := o
		service.Listener = l
		ended := make(chan error, 1)
		go func() { ended <- Serve(ctx, &service) }()
		for rank := range 2 {
			own := o
			own.Rank, own.Addr, own.Served = rank, l.Addr().String(), true
			go func() {
				if g, err := Join(ctx, &own); err == nil {
					_ = g.Close(ctx)
				}
			}()
		}
		var missing *MissingRanksError
		require.ErrorAs(t, <-ended, &missing)
		assert.Equal(t, []int{2}, missing.Missing)
	})
	t.Run("its context ends first", func(t *testing.T) {
		l := listenLoopback(t)
		ctx, cancel := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- Serve(ctx, &Options{WorldSize: 2, Listener: l}) }()
		groups := make([]*Group, 2)
		var wait sync.WaitGroup
		for rank := range 2 {
			wait.Go(func() {
				groups[rank], _ = Join(testContext(t), &Options{Rank: rank, WorldSize: 2, Addr: l.Addr().String(), Served: true})
			})
		}
		wait.Wait()
		require.False(t, slices.Contains(groups, nil))
		cancel()
		var missing *MissingRanksError
		err := <-ended
		require.ErrorAs(t, err, &missing)
		require.ErrorIs(t, err, context.Canceled)
		assert.Equal(t, []int{0, 1}, missing.Missing)
		for _, g := range groups {
			var lost *PeerLostError
			require.ErrorAs(t, g.Barrier(testContext(t), "after"), &lost)
			_ = g.Close(testContext(t))
		}
	})
	t.Run("before any rank", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(ctx, 2*servedLook)
		defer cancel()
		err := Serve(ctx, &Options{WorldSize: 2, Listener: listenLoopback(t)})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		var missing *MissingRanksError
		require.ErrorAs(t, err, &missing)
		assert.Equal(t, []int{0, 1}, missing.Missing)
	})
}

// TestServeBadOptions: what cannot be served is refused, with what was given and what is allowed, and a listener is closed all the same.
func TestServeBadOptions(t *testing.T) {
	ctx := testContext(t)
	l := listenLoopback(t)
	require.ErrorIs(t, Serve(ctx, &Options{WorldSize: -1, Listener: l}), errs.ErrInvalid)
	_, err := l.Accept()
	require.ErrorIs(t, err, net.ErrClosed)
	for text, o := range map[string]*Options{
		"Serve: Addr":     {WorldSize: 2},
		"Serve: Addr is ": {WorldSize: 2, Addr: "nowhere"},
	} {
		require.ErrorIs(t, Serve(ctx, o), errs.ErrInvalid)
		require.ErrorContains(t, Serve(ctx, o), text)
	}
	require.ErrorIs(t, Serve(ctx, nil), errs.ErrInvalid, "nil is a world of one, which needs an address where it is served")
	require.ErrorIs(t, Serve(ctx, &Options{WorldSize: 2, Addr: "0.0.0.0:0"}), errs.ErrInvalid, "beyond loopback without a token")

	busy := listenLoopback(t)
	defer busy.Close()
	require.ErrorIs(t, Serve(ctx, &Options{WorldSize: 2, Addr: busy.Addr().String()}), errs.ErrUnavailable)
	_, err = Join(ctx, &Options{WorldSize: 2, Served: true})
	require.ErrorContains(t, err, "Addr")
	_, err = Join(ctx, &Options{WorldSize: 2, Served: true, Listener: listenLoopback(t)})
	require.ErrorIs(t, err, errs.ErrInvalid)
	// A rank 0 that does not know of the service says what may be wrong.
	_, err = Join(ctx, &Options{WorldSize: 2, Addr: busy.Addr().String(), Timeout: time.Second})
	require.True(t, errors.Is(err, errs.ErrUnavailable))
	require.ErrorContains(t, err, "join it as the others do")
}

// nowhere is a listener whose address the system does not say.
type nowhere struct{ net.Listener }

func (nowhere) Addr() net.Addr { return nil }

// TestListenerWithoutAddress: where a socket listens at is not known, it may be any address, which no short token protects.
func TestListenerWithoutAddress(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	err = Serve(t.Context(), &Options{Listener: nowhere{l}, WorldSize: 1, Job: "nowhere"})
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "address")
	_, err = l.Accept()
	require.ErrorIs(t, err, net.ErrClosed)
}

// TestLivenessTimeoutsDiffer: the service and the ranks judge silence by timeouts of their own, and none of them that merely has nothing to do is lost
// by the shorter one.
func TestLivenessTimeoutsDiffer(t *testing.T) {
	t.Parallel() // it waits
	// The short one is shorter than the time between two beats of who knows of none.
	const short, idle = 700 * time.Millisecond, 2800 * time.Millisecond
	for name, liveness := range map[string]struct{ service, ranks time.Duration }{
		"the service's is short": {service: short}, "the ranks' is short": {ranks: short},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := testContext(t)
			l := listenLoopback(t)
			ended := make(chan error, 1)
			go func() { ended <- Serve(ctx, &Options{WorldSize: 2, Listener: l, LivenessTimeout: liveness.service}) }()
			groups, failures := make([]*Group, 2), make([]error, 2)
			var wait sync.WaitGroup
			for rank := range groups {
				wait.Go(func() {
					groups[rank], failures[rank] = Join(ctx, &Options{
						Rank: rank, WorldSize: 2, Addr: l.Addr().String(), Served: true, LivenessTimeout: liveness.ranks,
					})
				})
			}
			wait.Wait()
			requireNone(t, failures)
			select {
			case <-groups[0].Lost():
			case <-groups[1].Lost():
			case <-time.After(idle):
			}
			for _, g := range groups {
				require.NoError(t, g.Err())
			}
			requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "after") }))
			requireNone(t, onAll(groups, func(g *Group) error { return g.Close(ctx) }))
			require.NoError(t, <-ended)
		})
	}
}

// TestBeatInterval: a peer that does not say by what it judges is one of an earlier release, and none makes this side beat without end.
func TestBeatInterval(t *testing.T) {
	require.Equal(t, time.Second, beatInterval(10*time.Second, 0))
	require.Equal(t, time.Second, beatInterval(10*time.Second, -1))
	require.Equal(t, 125*time.Millisecond, beatInterval(10*time.Second, int64(500*time.Millisecond)))
	require.Equal(t, 125*time.Millisecond, beatInterval(500*time.Millisecond, int64(10*time.Second)))
	require.Equal(t, minLivenessTimeout/4, beatInterval(10*time.Second, 1))
}

// freeze admits rank 1 of 2 to a service, where it says nothing more. Its connection stands.
func freeze(ctx context.Context, t *testing.T, o *Options) {
	t.Helper()
	conn, err := net.Dial("tcp", o.Addr)
	require.NoError(t, err)
	conn, err = handshakeClient(ctx, conn, o)
	require.NoError(t, err)
	client, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return conn, nil }), grpc.WithIdleTimeout(0), grpc.WithDisableRetry())
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	stream, err := pb.NewRendezvousClient(client).Connect(ctx)
	require.NoError(t, err)
	m, err := thisProcess(1, 0, "")
	require.NoError(t, err)
	require.NoError(t, stream.Send(&pb.ClientMessage{Body: &pb.ClientMessage_Hello{Hello: &pb.Hello{WorldSize: 2, Member: m.toWire(), Session: "frozen"}}}))
	answer, err := stream.Recv()
	require.NoError(t, err)
	require.NotNil(t, answer.GetWelcome())
}

// TestServeFrozenRank: a rank that is stopped for good after its welcome, before it has said anything else, is lost when it could have joined by then.
// Its connection stands.
func TestServeFrozenRank(t *testing.T) {
	t.Parallel() // it waits
	ctx := testContext(t)
	l := listenLoopback(t)
	ended := make(chan error, 1)
	go func() {
		ended <- Serve(ctx, &Options{WorldSize: 2, Listener: l, Timeout: 800 * time.Millisecond, LivenessTimeout: 400 * time.Millisecond})
	}()
	o := &Options{Rank: 1, WorldSize: 2, Addr: l.Addr().String(), Served: true}
	freeze(ctx, t, o)

	o.Rank, o.Timeout = 0, 15*time.Second
	_, err := Join(ctx, o)
	var lost *PeerLostError
	require.ErrorAs(t, err, &lost)
	require.Equal(t, 1, lost.Rank)
	require.ErrorContains(t, err, "since it was admitted")
	select {
	case err := <-ended:
		require.NoError(t, err)
	case <-time.After(30 * time.Second):
		t.Fatal("the job is not over")
	}
}

// TestServeWithoutEnd: the longest timeout that there is is no bound, and no rank has been silent for longer.
func TestServeWithoutEnd(t *testing.T) {
	t.Parallel() // it waits
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	l := listenLoopback(t)
	ended := make(chan error, 1)
	go func() {
		ended <- Serve(ctx, &Options{WorldSize: 2, Listener: l, Timeout: math.MaxInt64, LivenessTimeout: 400 * time.Millisecond})
	}()
	o := &Options{Rank: 1, WorldSize: 2, Addr: l.Addr().String(), Served: true}
	freeze(ctx, t, o)

	o.Rank, o.Timeout = 0, 1200*time.Millisecond
	_, err := Join(ctx, o)
	var missing *MissingRanksError
	require.ErrorAs(t, err, &missing, "nobody is lost")
	require.Equal(t, []int{1}, missing.Missing)
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
}
