package group

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/symmem/symmem/group/internal/pb"
)

// longToken is one that may be used on any address.
const longToken = "a token that is long enough"

// tightLimits returns limits that a test reaches quickly.
func tightLimits() *limits {
	lim := defaultLimits
	lim.pending, lim.patience, lim.handshake = 8, 100*time.Millisecond, 500*time.Millisecond
	return &lim
}

// startJob lets rank 0 wait for the others. finish joins those and closes the job.
func startJob(t *testing.T, n int, base Options) (addr string, rank0 *service, finish func()) {
	t.Helper()
	l := listenLoopback(t)
	base.WorldSize, base.Addr = n, l.Addr().String()
	o, err := base.checked()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	s := newSession(0, o.Timeout, nil, o.bounds())
	world := make([]int, n)
	for i := range world {
		world[i] = i
	}
	g := newGroup(s, worldName, 0, &roster{world: world})
	require.NoError(t, s.add(g))
	s.files = newFileCarrier(s)
	m, err := thisProcess(0, 0, "")
	require.NoError(t, err)
	o.Listener = l
	transport, err := host(ctx, s, m, o)
	require.NoError(t, err)
	s.transport = transport
	finished := false
	finish = func() {
		finished = true
		groups, failures := make([]*Group, n), make([]error, n)
		groups[0] = g
		var wait sync.WaitGroup
		wait.Go(func() { failures[0] = meet(ctx, g, m) })
		for rank := 1; rank < n; rank++ {
			o := base
			o.Rank = rank
			wait.Go(func() { groups[rank], failures[rank] = Join(ctx, &o) })
		}
		wait.Wait()
		requireNone(t, failures)
		requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "undisturbed") }))
		leaveAll(t, groups)
	}
	t.Cleanup(func() {
		if !finished {
			transport.service.stop()
		}
	})
	return base.Addr, transport.service, finish
}

// endsSoon waits for the other side to end the connection.
func endsSoon(t *testing.T, c net.Conn) {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(30*time.Second)))
	_, err := io.Copy(io.Discard, c)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
	var timeout net.Error
	require.False(t, errors.As(err, &timeout) && timeout.Timeout(), "the connection stands")
}

// TestSlowloris keeps every place for a connection that is not yet trusted taken, by connections that say nothing, little or a
// byte now and then. Ranks join all the same, and every such connection ends.
func TestSlowloris(t *testing.T) {
	lim := tightLimits()
	addr, service, finish := startJob(t, 3, Options{Token: longToken, limits: lim})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wait sync.WaitGroup
	for i := range 4 * lim.pending {
		wait.Go(func() {
			for ctx.Err() == nil {
				c, err := net.Dial("tcp", addr)
				if err != nil {
					continue
				}
				stop := interruptible(ctx, c)
				switch i % 3 {
				case 1:
					_, _ = c.Write(prologue(modeTLS)[:3])
				case 2:
					for _, b := range append(prologue(modeTLS), make([]byte, 100)...) {
						if _, err := c.Write([]byte{b}); err != nil {
							break
						}
						time.Sleep(10 * time.Millisecond)
					}
				}
				_, _ = io.Copy(io.Discard, c)
				stop()
				_ = c.Close()
			}
		})
	}
	most := func() int {
		service.front.listener.mu.Lock()
		defer service.front.listener.mu.Unlock()
		return len(service.front.listener.pending)
	}
	require.Eventually(t, func() bool { return most() == lim.pending }, 10*time.Second, time.Millisecond)
	joined := make(chan struct{})
	go func() {
		defer close(joined)
		finish()
	}()
	for {
		assert.LessOrEqual(t, most(), lim.pending)
		select {
		case <-joined:
			cancel()
			wait.Wait()
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// TestStrangersEnd opens connections that are trusted but on which no rank is admitted: each ends by itself.
func TestStrangersEnd(t *testing.T) {
	for _, token := range []string{"", longToken} {
		t.Run(fmt.Sprintf("token=%t", token != ""), func(t *testing.T) {
			t.Parallel() // it waits
			lim := tightLimits()
			lim.handshake = 1500 * time.Millisecond // in which each of the strangers comes as far as it goes
			o := Options{Token: token, limits: lim}
			addr, service, finish := startJob(t, 2, o)
			dial := func() (raw, secure net.Conn) {
				raw, err := net.Dial("tcp", addr)
				require.NoError(t, err)
				secure, err = handshakeClient(t.Context(), raw, &Options{Token: token, Addr: addr})
				require.NoError(t, err)
				return raw, secure
			}
			silent, err := net.Dial("tcp", addr)
			require.NoError(t, err)
			_, trusted := dial()
			_, large := dial()
			written := make(chan error, 1)
			go func() { _, err := large.Write(make([]byte, 64<<20)); written <- err }()
			require.Error(t, <-written, "a stranger may not send without end")

			// An HTTP/2 connection without a stream, one with a stream without a hello, one with a beat and no rank, one refused.
			client := func() (pb.RendezvousClient, net.Conn) {
				raw, secure := dial()
				conn, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
					grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return secure, nil }),
					grpc.WithIdleTimeout(0), grpc.WithDisableRetry())
				require.NoError(t, err)
				conn.Connect()
				t.Cleanup(func() { _ = conn.Close() })
				return pb.NewRendezvousClient(conn), raw
			}
			client()
			mute, _ := client()
			stream, err := mute.Connect(t.Context())
			require.NoError(t, err)
			early, _ := client()
			beat, err := early.Beat(t.Context())
			require.NoError(t, err)
			_, err = beat.Recv()
			require.ErrorContains(t, err, "no rank was admitted")
			odd, _ := client()
			oddStream, err := odd.Connect(t.Context())
			require.NoError(t, err)
			require.NoError(t, oddStream.Send(&pb.ClientMessage{Body: &pb.ClientMessage_Goodbye{}}))
			answer, err := oddStream.Recv()
			require.NoError(t, err)
			require.EqualValues(t, RefusedProtocol, answer.GetRefusal().GetReason())

			_, err = stream.Recv()
			require.Error(t, err)
			endsSoon(t, silent)
			endsSoon(t, trusted)
			endsSoon(t, large)
			require.Eventually(t, func() bool {
				service.front.listener.mu.Lock()
				defer service.front.listener.mu.Unlock()
				return len(service.front.listener.pending) == 0
			}, 30*time.Second, 5*time.Millisecond)
			finish()
		})
	}
}

// TestWrongTokens tries many tokens at once. Each is refused as such, and the job is not disturbed.
func TestWrongTokens(t *testing.T) {
	addr, _, finish := startJob(t, 2, Options{Token: longToken, limits: tightLimits()})
	var wait sync.WaitGroup
	failures := make([]error, 50)
	for i := range failures {
		wait.Go(func() {
			_, failures[i] = Join(t.Context(), &Options{Rank: 1, WorldSize: 2, Addr: addr, Token: fmt.Sprintf("the guess number %8d", i)})
		})
	}
	wait.Wait()
	for _, err := range failures {
		var refusal *RefusedError
		require.ErrorAs(t, err, &refusal)
		require.Equal(t, RefusedToken, refusal.Reason)
		require.NotContains(t, err.Error(), "guess")
	}
	finish()
}

// TestHugeJobName brings job names of any length and content to the service. The answer is short.
func TestHugeJobName(t *testing.T) {
	addr, _, finish := startJob(t, 2, Options{Job: "right"})
	for _, size := range []int{100, 100 << 10, 1 << 20, 20 << 20} {
		raw, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		secure, err := handshakeClient(t.Context(), raw, &Options{Addr: addr})
		require.NoError(t, err)
		m, err := thisProcess(1, 0, "")
		require.NoError(t, err)
		r := &remote{
			outbox: newOutbox(1, 1), session: newSession(1, 0, nil, &defaultLimits), member: m, ctx: t.Context(),
			options: &Options{Addr: addr, WorldSize: 2, Job: strings.Repeat("\xffx\n", size/3)},
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		err = r.open(ctx, &link{socket: &heardConn{Conn: raw}}, secure, false)
		require.Error(t, err)
		require.NoError(t, ctx.Err(), "it ended by itself")
		cancel()
		require.Less(t, len(err.Error()), 1000)
	}
	finish()
}

// growth returns what the hub keeps for a rank, and in stores.
func growth(h *hub, rank int) hubRank {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := h.ranks[rank]
	r.unopened = append([]string(nil), r.unopened...)
	return r
}

// TestGreedyRank sends whatever the hub would have to keep, without end and without reading answers for long. What is kept is
// bounded, and the other ranks go on.
func TestGreedyRank(t *testing.T) {
	lim := defaultLimits
	lim.keys, lim.storeBytes = 100, 1<<20
	lim.calls, lim.callBytes, lim.groups, lim.gets = 20, 1<<20, 10, 30
	lim.queued, lim.queueBytes = 50, 1<<20
	groups, failures := tryJob(t, 3, Options{limits: &lim})
	requireNone(t, failures)
	ctx := testContext(t)
	h := groups[0].session.transport.(*hostTransport).hub
	service := groups[0].session.transport.(*hostTransport).service
	r := groups[2].session.transport.(*remote)
	flush := func() { // all that was sent has been done
		t.Helper()
		answer := make(outcomeChan, 1)
		r.arrive("none", 0, &arrival{kind: kindBarrier, to: answer})
		select {
		case <-answer:
		case <-ctx.Done():
			t.Fatal("no answer")
		}
	}
	arrival := func(group string, seq uint64, kind kind, data []byte, members ...int64) *pb.ClientMessage {
		return &pb.ClientMessage{Body: &pb.ClientMessage_Arrival{Arrival: &pb.Arrival{
			Group: group, Sequence: seq, Kind: uint32(kind), Data: data, Members: members}}}
	}
	store := func(verb verb, key string, value []byte) *pb.ClientMessage {
		return &pb.ClientMessage{Body: &pb.ClientMessage_Store{Store: &pb.StoreRequest{
			Id: 1 << 60, Group: worldName, Verb: uint32(verb), Key: []byte(key), Value: value}}}
	}
	for i := range uint64(200) {
		r.outbox.put(arrival(worldName, 100+i, kindAllGather, make([]byte, 100<<10)))
	}
	flush()
	kept := growth(h, 2)
	require.Positive(t, kept.calls)
	require.LessOrEqual(t, kept.callBytes, 2*lim.callBytes)
	for i := range uint64(200) {
		r.outbox.put(&pb.ClientMessage{Body: &pb.ClientMessage_Abandon{Abandon: &pb.Abandon{Group: worldName, Sequence: 100 + i}}})
	}
	flush()
	require.Zero(t, growth(h, 2).calls)
	require.Zero(t, growth(h, 2).callBytes)
	for i := range uint64(200) {
		r.outbox.put(arrival(worldName, 1000+i, kindBarrier, nil))
	}
	flush()
	require.Equal(t, 2*lim.calls, growth(h, 2).calls)
	for i := range uint64(200) {
		r.outbox.put(&pb.ClientMessage{Body: &pb.ClientMessage_Abandon{Abandon: &pb.Abandon{Group: worldName, Sequence: 1000 + i}}})
	}
	for i := range 1000 { // groups that are never opened, and given up
		name := fmt.Sprint("unopened", i)
		r.outbox.put(arrival(name, 0, kindSub, nil, 0, 1, 2))
		r.outbox.put(&pb.ClientMessage{Body: &pb.ClientMessage_Abandon{Abandon: &pb.Abandon{Group: name}}})
	}
	for i := range 1000 { // groups of its own
		r.outbox.put(arrival(fmt.Sprint("own", i), 0, kindSub, nil, 2))
	}
	flush()
	require.LessOrEqual(t, growth(h, 2).opened, 2*lim.groups)
	for i := range 1000 {
		r.outbox.put(store(verbSet, fmt.Sprint("key", i), nil), store(verbGet, fmt.Sprint("nobody sets", i), nil))
	}
	flush()
	require.Equal(t, lim.gets, growth(h, 2).gets)
	h.mu.Lock()
	require.Equal(t, lim.keys, h.keys)
	require.LessOrEqual(t, len(h.groups), 1+2*lim.groups)
	h.mu.Unlock()
	for i := range 100 {
		r.outbox.put(store(verbSet, fmt.Sprint("key", i%90), make([]byte, 100<<10)))
	}
	flush()
	h.mu.Lock()
	require.Positive(t, h.storeBytes)
	require.LessOrEqual(t, h.storeBytes, lim.storeBytes)
	h.mu.Unlock()

	// The world was spoilt by the calls that the rank gave up; what the others have among themselves was not.
	requireNone(t, onAll(groups[:2], func(g *Group) error {
		sub, err := g.Sub(ctx, []int{0, 1})
		if err != nil {
			return err
		}
		return sub.Barrier(ctx, "undisturbed")
	}))

	// What is longer than any rank sends loses it its place.
	service.mu.Lock()
	c := service.attached[2]
	service.mu.Unlock()
	r.outbox.put(arrival(strings.Repeat("g", 1<<20), 0, kindBarrier, nil))
	<-groups[0].Lost()
	require.ErrorContains(t, groups[0].Err(), "the name of a group of 1048576 bytes")
	<-c.gone
	leaveAll(t, groups)
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Zero(t, h.keys)
	require.Zero(t, h.storeBytes)
}

// TestDeafRank asks again and again for a large value and reads no answer.
func TestDeafRank(t *testing.T) {
	lim := defaultLimits
	lim.queueBytes = 4 << 20
	groups, failures := tryJob(t, 2, Options{limits: &lim})
	requireNone(t, failures)
	ctx := testContext(t)
	require.NoError(t, groups[0].Store().Set(ctx, "large", make([]byte, 1<<20)))
	service := groups[0].session.transport.(*hostTransport).service

	// The rank leaves, and what takes its place on the wire is written by hand. A stream whose messages nobody takes is full soon.
	service.mu.Lock()
	c := service.attached[1]
	service.mu.Unlock()
	stuck := &stuckStream{release: make(chan struct{}), ctx: ctx}
	deaf := &serviceConn{service: service, socket: c.socket, outbox: newOutbox(lim.queued, lim.queueBytes), gone: make(chan struct{})}
	deaf.rank.Store(1)
	var wait sync.WaitGroup
	wait.Go(func() { deaf.read(stuck) })
	wait.Go(func() { deaf.write(stuck) })
	require.Eventually(t, deaf.outbox.full, 30*time.Second, time.Millisecond)
	asked := func() int {
		stuck.mu.Lock()
		defer stuck.mu.Unlock()
		return stuck.asked
	}
	before := asked()
	time.Sleep(50 * time.Millisecond)
	require.LessOrEqual(t, asked(), before+1, "no more is read")
	deaf.outbox.mu.Lock()
	require.LessOrEqual(t, deaf.outbox.bytes, lim.queueBytes+2<<20)
	deaf.outbox.mu.Unlock()
	close(stuck.release) // it begins to read, and is served again
	require.Eventually(t, func() bool { return asked() > before+10 }, 30*time.Second, time.Millisecond)
	deaf.once.Do(func() { close(deaf.gone) })
	wait.Wait()
	leaveAll(t, groups)
}

// stuckStream is the stream of a rank that asks without end, and takes no answer before it is released.
type stuckStream struct {
	grpc.ServerStream
	ctx     context.Context
	release chan struct{}
	mu      sync.Mutex
	asked   int
}

func (s *stuckStream) Context() context.Context       { return s.ctx }
func (s *stuckStream) Send(m *pb.ServerMessage) error { return s.SendMsg(m) }
func (s *stuckStream) SendMsg(any) error              { <-s.release; return nil }
func (s *stuckStream) Recv() (*pb.ClientMessage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked++
	return &pb.ClientMessage{Body: &pb.ClientMessage_Store{Store: &pb.StoreRequest{
		Id: 1 << 60, Group: worldName, Verb: uint32(verbTryGet), Key: []byte("large")}}}, nil
}

// TestQuotas goes beyond each quota with the calls that programs make: each says which, and its limit.
func TestQuotas(t *testing.T) {
	lim := defaultLimits
	lim.keys, lim.storeBytes = 10, 10<<10
	lim.calls, lim.callBytes, lim.groups, lim.gets = 4, 8<<10, 3, 5
	groups := newJob(t, 2, Options{limits: &lim})
	ctx := testContext(t)
	quota := func(err error, what string, limit int64) {
		t.Helper()
		var q *QuotaError
		require.ErrorAs(t, err, &q)
		require.Equal(t, what, q.What)
		require.Equal(t, limit, q.Limit)
		t.Log(err)
	}
	s := groups[1].Store()
	for i := range lim.keys {
		require.NoError(t, s.Set(ctx, fmt.Sprint(i), nil))
	}
	quota(s.Set(ctx, "more", nil), quotaKeys, 10)
	_, err := s.Add(ctx, "more", 1)
	quota(err, quotaKeys, 10)
	_, _, err = s.CompareAndSwap(ctx, "more", nil, nil)
	quota(err, quotaKeys, 10)
	require.NoError(t, s.Set(ctx, "1", make([]byte, 9<<10)), "one that is there")
	quota(s.Set(ctx, "2", make([]byte, 2<<10)), quotaStoreBytes, 10<<10)
	require.NoError(t, s.Set(ctx, "1", nil))
	require.NoError(t, s.Set(ctx, "2", make([]byte, 2<<10)))
	_, err = s.Delete(ctx, "2")
	require.NoError(t, err)
	require.NoError(t, s.Set(ctx, "more", make([]byte, 8<<10)))

	short, cancel := context.WithCancel(ctx)
	waiting := make(chan error, lim.gets)
	for range lim.gets {
		go func() {
			_, err := s.Get(short, "never")
			waiting <- err
		}()
	}
	h := groups[0].session.transport.(*hostTransport).hub
	require.Eventually(t, func() bool { return growth(h, 1).gets == lim.gets }, 10*time.Second, time.Millisecond)
	_, err = s.Get(ctx, "never")
	quota(err, quotaGets, int64(lim.gets))
	cancel()
	for range lim.gets {
		require.ErrorIs(t, <-waiting, context.Canceled)
	}

	// Too many bytes at a time: the rank comes to the call and says so, so every rank learns of it.
	for rank, err := range onAll(groups, func(g *Group) error {
		_, err := g.AllGather(ctx, "large", make([]byte, g.Rank()*9<<10))
		return err
	}) {
		var vote *VoteError
		require.ErrorAs(t, err, &vote)
		require.Equal(t, 1, vote.Failures[0].Rank)
		if rank == 1 {
			quota(err, quotaCallBytes, 8<<10)
		}
	}
	for _, err := range onAll(groups, func(g *Group) error { // the world counts
		for range lim.groups - 1 {
			if _, err := g.Sub(ctx, []int{0, 1}); err != nil {
				return err
			}
		}
		_, err := g.Sub(ctx, []int{0, 1})
		return err
	}) {
		quota(err, quotaGroups, int64(lim.groups))
		require.ErrorContains(t, err, " failed: ranks 0, 1: ")
	}

	// More calls at a time than are allowed: the ones beyond fail, on all ranks.
	failures := [][]error{make([]error, 6), make([]error, 6)}
	requireNone(t, onAll(groups, func(g *Group) error {
		var wait sync.WaitGroup
		if g.Rank() == 0 { // comes when all of the other's calls are under way
			for deadline := time.Now().Add(30 * time.Second); growth(h, 1).calls < 6; time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					return errors.New("the calls do not come")
				}
			}
		}
		for i := range failures[0] {
			if g.Rank() == 0 {
				failures[0][i] = g.Barrier(ctx, "many")
				continue
			}
			wait.Go(func() { failures[1][i] = g.Barrier(ctx, "many") })
		}
		wait.Wait()
		return nil
	}))
	beyond := 0
	for _, err := range failures[1] {
		var q *QuotaError
		if errors.As(err, &q) {
			beyond++
			quota(err, quotaCalls, 4)
		}
	}
	require.Equal(t, 2, beyond)
	var vote *VoteError
	require.ErrorAs(t, errors.Join(failures[0]...), &vote)
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "after") }))
}

// heldConn reads nothing while it is held.
type heldConn struct {
	net.Conn
	held *atomic.Pointer[chan struct{}] // closed when reading goes on; nil if it is not held
}

func (c *heldConn) Read(b []byte) (int, error) {
	if held := c.held.Load(); held != nil {
		<-*held
	}
	return c.Conn.Read(b)
}

// TestOutboxHasRoomForOne: of many that find an outbox that is nearly full at the same time, only as many as there is room for put something into it.
func TestOutboxHasRoomForOne(t *testing.T) {
	for range 200 {
		o := newOutbox(3, 1<<20)
		var wait sync.WaitGroup
		var taken atomic.Int64
		begin := make(chan struct{})
		for range 32 {
			wait.Go(func() {
				<-begin
				if o.offer(rawFrame("x")) {
					taken.Add(1)
				}
			})
		}
		close(begin)
		wait.Wait()
		require.EqualValues(t, 3, taken.Load())
		require.Len(t, o.take(), 3)
	}
}

// TestFullOutbox fills what a rank has to send, while the service reads nothing.
func TestFullOutbox(t *testing.T) {
	t.Parallel()
	lim := defaultLimits
	lim.queued, lim.queueBytes = 8, 1<<20
	var held atomic.Pointer[chan struct{}]
	l := &wrappingListener{Listener: listenLoopback(t), wrap: func(c net.Conn) net.Conn { return &heldConn{c, &held} }}
	groups, failures := joinOver(t, l, 2, Options{limits: &lim, LivenessTimeout: 2 * time.Minute})
	requireNone(t, failures)
	s := groups[1].Store()
	goOn := make(chan struct{})
	open := sync.OnceFunc(func() { close(goOn) })
	defer open()
	defer time.AfterFunc(time.Minute, open).Stop() // long before a rank counts as lost
	held.Store(&goOn)
	var wait sync.WaitGroup
	results := make([]error, 16)
	for i := range results {
		wait.Go(func() {
			results[i] = s.Set(t.Context(), "k", bytes.Repeat([]byte{1}, 1<<20))
			if _, full := errors.AsType[*QuotaError](results[i]); full {
				open()
			}
		})
	}
	wait.Wait()
	var q *QuotaError
	require.ErrorAs(t, errors.Join(results...), &q)
	require.Equal(t, quotaQueueBytes, q.What)
	require.EqualValues(t, queueFactor*lim.queueBytes, q.Limit)
	t.Log(q)
	require.NoError(t, s.Set(t.Context(), "k", nil))
	leaveAll(t, groups)
}

// TestCloseWithStrangers closes a job while connections are open that say nothing: rank 0 does not wait for them.
func TestCloseWithStrangers(t *testing.T) {
	for _, leaves := range []bool{true, false} {
		t.Run(fmt.Sprintf("the other leaves=%t", leaves), func(t *testing.T) {
			groups, failures := tryJob(t, 2, Options{})
			requireNone(t, failures)
			service := groups[0].session.transport.(*hostTransport).service
			addr := service.front.listener.Addr().String()
			silent, err := net.Dial("tcp", addr)
			require.NoError(t, err)
			defer silent.Close()
			greeted, err := net.Dial("tcp", addr)
			require.NoError(t, err)
			defer greeted.Close()
			_, err = handshakeClient(t.Context(), greeted, &Options{Addr: addr})
			require.NoError(t, err)
			require.Eventually(t, func() bool {
				service.front.listener.mu.Lock()
				defer service.front.listener.mu.Unlock()
				return len(service.front.listener.pending) == 2
			}, 10*time.Second, time.Millisecond)
			if leaves {
				require.NoError(t, groups[1].Close(testContext(t)))
			}
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			began := time.Now()
			err = groups[0].Close(ctx)
			require.Less(t, time.Since(began), 5*time.Second)
			if leaves {
				require.NoError(t, err)
			} else {
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.NoError(t, groups[1].Close(testContext(t)))
			}
		})
	}
}

// TestUnprovenBytes: a connection on which no rank is admitted is read only so far, whatever is above it.
func TestUnprovenBytes(t *testing.T) {
	lim := tightLimits()
	lim.unproven = 1000
	l := newBoundedListener(listenLoopback(t), lim, newSession(0, 0, nil, lim).logger)
	defer l.Close()
	for _, admitted := range []bool{false, true} {
		c, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		accepted, err := l.Accept()
		require.NoError(t, err)
		if admitted {
			accepted.(*serviceSocket).admit()
		}
		_, err = c.Write(make([]byte, 5000))
		require.NoError(t, err)
		n, err := io.ReadFull(accepted, make([]byte, 5000))
		if admitted {
			require.NoError(t, err)
			require.NoError(t, accepted.Close())
		} else {
			require.ErrorIs(t, err, errUnproven)
			require.LessOrEqual(t, n, 1000)
		}
		require.NoError(t, c.Close())
	}
	require.Empty(t, l.pending)
}

// TestAdmittedConnectionStays: a connection that was chosen to be ended for others, or for its age, stays if a rank is admitted on it before it is closed: that rank
// would be lost, and the job with it. On one that was chosen first, no rank is admitted.
func TestAdmittedConnectionStays(t *testing.T) {
	lim := tightLimits()
	l := newBoundedListener(listenLoopback(t), lim, newSession(0, 0, nil, lim).logger)
	defer l.Close()
	base := Options{Rank: 0, WorldSize: 2, Addr: l.Addr().String(), Timeout: 20 * time.Second}
	o, err := base.checked()
	require.NoError(t, err)
	o.limits = lim
	service := newService(newHub(2, lim), o, false, l.logger)
	hello := &pb.Hello{WorldSize: 2, Member: Member{WorldRank: 1}.toWire(), Session: "one"}
	accepted := func() *serviceConn {
		t.Helper()
		c, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		s, err := l.Accept()
		require.NoError(t, err)
		conn := &serviceConn{service: service, socket: s.(*serviceSocket), outbox: newOutbox(lim.queued, lim.queueBytes), gone: make(chan struct{})}
		conn.rank.Store(-1)
		return conn
	}
	closed := func(c *serviceConn) bool {
		t.Helper()
		require.NoError(t, c.socket.SetReadDeadline(time.Now().Add(time.Millisecond)))
		_, err := c.socket.Read(make([]byte, 1))
		return !errors.Is(err, os.ErrDeadlineExceeded)
	}
	ends := map[string]func(c *serviceSocket){
		"others wait":       l.evict,
		"it takes too long": func(*serviceSocket) { require.NoError(t, l.closePending(0)) },
	}
	for why, end := range ends {
		late := accepted()
		end(late.socket)
		require.Equal(t, refusedDropped, late.admit(hello), why)
		require.EqualValues(t, -1, late.attachedRank(), why)
		require.NotContains(t, service.attached, 1, why)
	}
	admitted := accepted()
	require.Nil(t, admitted.admit(hello))
	refusedOne := accepted()
	require.Equal(t, RefusedDuplicate, refusedOne.admit(&pb.Hello{WorldSize: 2, Member: Member{WorldRank: 1}.toWire(), Session: "another"}).Reason)
	claimed := accepted()
	require.True(t, claimed.socket.claim())
	for why, end := range ends {
		for _, c := range []*serviceConn{admitted, claimed} {
			end(c.socket)
			require.False(t, closed(c), why)
		}
	}
	_, err = refusedOne.socket.Write([]byte{0})
	require.Error(t, err, "a connection whose rank was refused is not kept for ever")
	claimed.socket.unclaim()
	require.NoError(t, l.closePending(0))
	require.Empty(t, l.pending)
	require.Empty(t, l.sources)
	for _, c := range []*serviceConn{admitted, claimed} {
		_ = c.socket.Close()
	}
}

// TestGroupsThatNobodyOpens: what a rank tried to open in vain is not kept for ever.
func TestGroupsThatNobodyOpens(t *testing.T) {
	h := newHub(3, &defaultLimits)
	for rank := range 3 {
		h.attach(Member{WorldRank: rank}, &newsReader{losses: map[int]int{}})
	}
	for i := range 1000 {
		name := fmt.Sprint(i)
		h.arrive(2, name, 0, &arrival{kind: kindSub, members: []int{0, 1, 2}, to: make(outcomeChan, 1)})
		h.abandon(2, name, 0, "test")
	}
	require.LessOrEqual(t, len(h.groups), 1+maxTombstones)
	require.LessOrEqual(t, h.ranks[2].opened, maxTombstones)
	// The latest is still known to a rank that comes late.
	late := make(outcomeChan, 1)
	h.arrive(0, "999", 0, &arrival{kind: kindSub, members: []int{0, 1, 2}, to: late})
	require.Equal(t, failGaveUp, (<-late).failure.kind)
}

// TestReturningBytes: more is read from connections on which a rank may come back, and not without end: neither from one nor from all of them.
func TestReturningBytes(t *testing.T) {
	lim := tightLimits()
	lim.unproven, lim.returning, lim.lent = 1000, 3000, 2500
	l := newBoundedListener(listenLoopback(t), lim, newSession(0, 0, nil, lim).logger)
	defer l.Close()
	accepted := func() *serviceSocket {
		t.Helper()
		c, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		s, err := l.Accept()
		require.NoError(t, err)
		_, err = c.Write(make([]byte, 5000))
		require.NoError(t, err)
		require.NoError(t, s.SetReadDeadline(time.Now().Add(30*time.Second)))
		s.(*serviceSocket).returns.Store(true)
		return s.(*serviceSocket)
	}
	first, second := accepted(), accepted()
	_, err := io.ReadFull(first, make([]byte, 3000))
	require.NoError(t, err)
	_, err = io.ReadFull(second, make([]byte, 1500))
	require.NoError(t, err)
	_, err = io.ReadFull(second, make([]byte, 100))
	require.ErrorIs(t, err, errUnproven, "all places together")
	third := accepted()
	_, err = io.ReadFull(third, make([]byte, 1500))
	require.NoError(t, err, "the second one has given back what it had")
	_, err = io.ReadFull(first, make([]byte, 1))
	require.ErrorIs(t, err, errUnproven, "one alone")
	third.admit()
	require.Zero(t, l.lent)
	_, err = io.ReadFull(third, make([]byte, 3500))
	require.NoError(t, err)
	require.NoError(t, third.Close())
}

// TestSpeaksBeforeItIsRefused: what comes over a connection whose rank is about to be refused, as it is present already, is not taken for what that rank says.
func TestSpeaksBeforeItIsRefused(t *testing.T) {
	lim := tightLimits()
	l := newBoundedListener(listenLoopback(t), lim, newSession(0, 0, nil, lim).logger)
	defer l.Close()
	o, err := (&Options{WorldSize: 2, Addr: l.Addr().String()}).checked()
	require.NoError(t, err)
	h := newHub(2, lim)
	o.limits = lim
	s := newService(h, o, false, l.logger)
	accepted := func() *serviceConn {
		near, far := net.Pipe()
		t.Cleanup(func() { _, _ = near.Close(), far.Close() })
		c := &serviceConn{service: s, socket: l.track(near), outbox: newOutbox(lim.queued, lim.queueBytes), gone: make(chan struct{})}
		c.rank.Store(-1)
		return c
	}
	hello := func(session string) *pb.Hello {
		return &pb.Hello{WorldSize: 2, Member: Member{WorldRank: 1}.toWire(), Session: session}
	}
	first, second := accepted(), accepted()
	require.Nil(t, first.admit(hello("one")))
	h.mu.Lock() // the service has much to do
	refusal := make(chan *RefusedError, 1)
	go func() { refusal <- second.admit(hello("another")) }()
	for claimed := false; !claimed; time.Sleep(time.Millisecond) {
		l.mu.Lock()
		claimed = second.socket.claimed
		l.mu.Unlock()
	}
	time.Sleep(20 * time.Millisecond) // so that it waits for the hub
	served := make(chan bool, 1)
	go func() {
		served <- second.serve(&pb.ClientMessage{Body: &pb.ClientMessage_Abort{Abort: &pb.Abort{Reason: "a stranger says so"}}})
	}()
	time.Sleep(20 * time.Millisecond) // so that it would wait for the hub too
	h.mu.Unlock()
	require.False(t, <-served)
	require.Equal(t, RefusedDuplicate, (<-refusal).Reason)
	require.Equal(t, []int{1}, h.attached())
}
