package group

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/symmem/symmem/group/internal/pb"
)

// remote reaches the hub of rank 0 over the network.
type remote struct {
	session  *session
	conn     *grpc.ClientConn
	stream   grpc.BidiStreamingClient[pb.ClientMessage, pb.ServerMessage]
	cancel   context.CancelFunc
	outbox   *outbox
	socket   *heardConn
	liveness time.Duration
	ended    chan struct{} // closed when the stream has ended
	work     sync.WaitGroup

	mu       sync.Mutex
	leaving  bool
	rounds   map[roundKey]*remoteRound
	requests map[uint64]storeReceiver
}

type roundKey struct {
	group string
	seq   uint64
}

// remoteRound is a collective call that waits for its outcome.
type remoteRound struct {
	to    outcomeReceiver
	blobs [][]byte // of the messages so far
}

const (
	firstBackoff = 10 * time.Millisecond
	lastBackoff  = time.Second
	// longestAttempt is the bound of later attempts to connect, as a multiple of that of the first.
	longestAttempt = 10
	// queueFactor is how much a rank queues before it refuses requests, as a multiple of what the service queues for a rank.
	queueFactor = 4
)

// connect reaches the service, trying again with growing, jittered pauses until the context ends or the service refuses.
func connect(ctx context.Context, s *session, m Member, o *Options) (*remote, error) {
	started := time.Now()
	backoff := firstBackoff
	var last error
	bound := s.limits.attempt
	for attempts := 1; ; attempts++ {
		r, err := attempt(ctx, s, m, o, bound)
		if err == nil {
			return r, nil
		}
		var refusal *RefusedError
		if errors.As(err, &refusal) {
			refusal.Addr = o.Addr
			return nil, refusal
		}
		if errors.Is(err, errAttempt) { // the service may be busy with many others: more patience, so that it is not asked in vain
			bound = min(2*bound, longestAttempt*s.limits.attempt)
		}
		if last == nil || !cutShort(ctx) { // the attempt that the context cut short says the least
			last = err
		}
		s.logger.Debug("connecting to the rendezvous service", "address", o.Addr, "attempt", attempts, "error", err)
		pause := time.NewTimer(backoff/2 + rand.N(backoff))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return nil, &ConnectError{Addr: o.Addr, Attempts: attempts, Waited: time.Since(started), Last: last, Err: ctx.Err()}
		}
		backoff = min(2*backoff, lastBackoff)
	}
}

// cutShort reports whether the context has ended or is about to: operations that have its deadline may end a moment before it.
func cutShort(ctx context.Context) bool {
	const moment = 20 * time.Millisecond
	deadline, bounded := ctx.Deadline()
	return ctx.Err() != nil || bounded && time.Until(deadline) < moment
}

// errAttempt is the error of an attempt that timed out.
var errAttempt = errors.New("no answer in time")

// attempt connects once. Only making the connection has a bound of its own, because neither a listening socket whose service has not started nor a
// host that is gone answers. From the hello on, the rank may be stopped, or the service busy, for as long as the context lasts.
func attempt(ctx context.Context, s *session, m Member, o *Options, bound time.Duration) (*remote, error) {
	secure, socket, err := secureConnection(ctx, o, bound)
	if err != nil {
		return nil, err
	}
	r := &remote{
		session:  s,
		outbox:   newOutbox(queueFactor*s.limits.queued, queueFactor*s.limits.queueBytes),
		socket:   socket,
		liveness: o.LivenessTimeout,
		ended:    make(chan struct{}),
		rounds:   make(map[roundKey]*remoteRound),
		requests: make(map[uint64]storeReceiver),
	}
	if err := r.open(ctx, secure, m, o); err != nil {
		return nil, closing(err, socket)
	}
	return r, nil
}

// secureConnection returns an authenticated connection, and the connection below it.
func secureConnection(ctx context.Context, o *Options, bound time.Duration) (net.Conn, *heardConn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, bound, fmt.Errorf("%w: %v", errAttempt, bound))
	defer cancel()
	because := func(err error) error {
		if cause := context.Cause(ctx); errors.Is(cause, errAttempt) {
			return fmt.Errorf("%w: %w", cause, err)
		}
		return fileLimit(err)
	}
	var dialer net.Dialer
	raw, err := dialer.DialContext(ctx, "tcp", o.Addr)
	if err != nil {
		return nil, nil, because(err)
	}
	socket := &heardConn{Conn: raw}
	secure, err := handshakeClient(ctx, socket, o)
	if err != nil {
		return nil, nil, closing(because(fmt.Errorf("connected, but %w", err)), raw)
	}
	return secure, socket, nil
}

// closing closes c and returns err joined with the error of closing, unless c was closed already.
func closing(err error, c io.Closer) error {
	if closeErr := c.Close(); closeErr != nil && !errors.Is(closeErr, net.ErrClosed) {
		return errors.Join(err, closeErr)
	}
	return err
}

// open says hello on an authenticated connection, and starts the goroutines that carry messages.
func (r *remote) open(ctx context.Context, conn net.Conn, m Member, o *Options) error {
	var dialed atomic.Bool
	var err error
	r.conn, err = grpc.NewClient("passthrough:///"+o.Addr,
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the connection is secured already
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			if dialed.Swap(true) {
				return nil, errors.New("the connection is over")
			}
			return conn, nil
		}),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableRetry(),
		grpc.WithIdleTimeout(0),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxServerMessage), grpc.MaxCallSendMsgSize(maxClientMessage)),
	)
	if err != nil {
		return fmt.Errorf("preparing the connection: %w", err)
	}
	// The stream lives as long as the session; until it is welcomed it ends with the attempt.
	streamCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	r.cancel = cancel
	stop := context.AfterFunc(ctx, cancel)
	err = r.welcome(streamCtx, m, o)
	if err == nil && !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		stop()
		cancel()
		return closing(err, r.conn)
	}
	r.socket.hear()
	r.work.Go(r.read)
	r.work.Go(r.write)
	r.work.Go(r.watch)
	r.work.Go(func() { r.beat(streamCtx) })
	return nil
}

func (r *remote) welcome(ctx context.Context, m Member, o *Options) error {
	var err error
	if r.stream, err = pb.NewRendezvousClient(r.conn).Connect(ctx); err != nil {
		return fmt.Errorf("opening the stream: %w", err)
	}
	err = r.stream.Send(&pb.ClientMessage{Body: &pb.ClientMessage_Hello{Hello: &pb.Hello{
		Job: []byte(o.Job), Restart: int64(o.Restart), WorldSize: int64(o.WorldSize), Member: m.toWire(), Session: r.session.id,
	}}})
	if err != nil && !errors.Is(err, io.EOF) { // EOF: the stream has ended, and Recv says why
		return fmt.Errorf("saying hello: %w", err)
	}
	answer, err := r.stream.Recv()
	if err != nil {
		return fmt.Errorf("waiting for the welcome: %w", err)
	}
	switch b := answer.GetBody().(type) {
	case *pb.ServerMessage_Welcome:
		return nil
	case *pb.ServerMessage_Refusal:
		return refused(RefusalReason(b.Refusal.GetReason()), "%s", clip(b.Refusal.GetText()))
	}
	return refused(RefusedProtocol, "the service answered hello with %T", answer.GetBody())
}

// read takes the service's messages until the stream ends.
func (r *remote) read() {
	defer close(r.ended)
	for {
		m, err := r.stream.Recv()
		if err != nil {
			r.end(fmt.Sprintf("the connection to the rendezvous service broke: %v", readable(err)))
			return
		}
		switch b := m.GetBody().(type) {
		case *pb.ServerMessage_Outcome:
			if err := r.outcome(b.Outcome); err != nil {
				r.end(fmt.Sprintf("the rendezvous service sent what cannot be read: %v", err))
				return
			}
		case *pb.ServerMessage_Store:
			r.reply(b.Store)
		case *pb.ServerMessage_Loss:
			r.session.receiveLoss(lossFromWire(b.Loss))
		default:
			r.end(fmt.Sprintf("the rendezvous service sent a message that this version does not know: %T", b))
			return
		}
	}
}

// readable removes gRPC's wrapping from an error's text.
func readable(err error) string {
	if s, ok := status.FromError(err); ok && s.Message() != "" {
		return s.Message()
	}
	return err.Error()
}

// end tells the session that the service is gone, unless this rank is leaving it.
func (r *remote) end(reason string) {
	r.mu.Lock()
	leaving := r.leaving
	r.mu.Unlock()
	if !leaving {
		r.session.serviceLost(reason)
	}
	r.cancel()
}

// write sends what is queued until the stream ends.
func (r *remote) write() {
	for {
		select {
		case <-r.outbox.wake:
		case <-r.ended:
			return
		}
		for _, m := range r.outbox.take() {
			if err := r.stream.SendMsg(m.message); err != nil {
				r.cancel() // the reader tells the session
				return
			}
			r.outbox.sent(m)
		}
	}
}

// beat exchanges heartbeats with the service, over a stream of its own. What counts is that bytes come; see heardConn.
func (r *remote) beat(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := pb.NewRendezvousClient(r.conn).Beat(ctx)
	if err != nil { // the connection is over, as the reader will find
		return
	}
	r.work.Go(func() {
		for {
			if _, err := stream.Recv(); err != nil {
				return
			}
		}
	})
	ticker := time.NewTicker(heartbeatInterval(r.liveness))
	defer ticker.Stop()
	for stream.Send(&pb.Heartbeat{}) == nil {
		select {
		case <-r.ended:
			return
		case <-ticker.C:
		}
	}
}

// watch ends the connection when the service is silent.
func (r *remote) watch() {
	interval := heartbeatInterval(r.liveness)
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	last := time.Now()
	for {
		select {
		case <-r.ended:
			return
		case <-ticker.C:
		}
		late := time.Since(last) > 2*interval // see service.watch
		last = time.Now()
		if late {
			r.socket.hear()
		} else if r.socket.silence() > r.liveness {
			r.end(fmt.Sprintf("the rendezvous service was silent for %v", r.liveness))
			return
		}
	}
}

func (r *remote) outcome(m *pb.Outcome) error {
	blobs, err := splitBlobs(m)
	if err != nil {
		return err
	}
	key := roundKey{group: m.GetGroup(), seq: m.GetSequence()}
	r.mu.Lock()
	round := r.rounds[key]
	if round == nil {
		r.mu.Unlock()
		return nil // nobody waits for it any more
	}
	if round.blobs = append(round.blobs, blobs...); m.GetMore() {
		r.mu.Unlock()
		return nil
	}
	delete(r.rounds, key)
	r.mu.Unlock()
	round.to.receiveOutcome(key.group, key.seq, &outcome{blobs: round.blobs, failure: failureFromWire(m.GetFailure()), own: true})
	return nil
}

func (r *remote) reply(m *pb.StoreReply) {
	r.mu.Lock()
	to := r.requests[m.GetId()]
	delete(r.requests, m.GetId())
	r.mu.Unlock()
	if to == nil {
		return // it was cancelled
	}
	to.receiveReply(&storeReply{
		id: m.GetId(), value: m.GetValue(), found: m.GetFound(), swapped: m.GetSwapped(), number: m.GetNumber(),
		failure: failureFromWire(m.GetFailure()),
	})
}

// queueFull returns the failure of a request for which the outbox has no room.
func (r *remote) queueFull() *failure {
	if r.outbox.crowded() {
		return &failure{kind: failQuota, text: quotaQueued, limit: int64(r.outbox.most)}
	}
	return &failure{kind: failQuota, text: quotaQueueBytes, limit: r.outbox.large}
}

func (r *remote) arrive(group string, seq uint64, a *arrival) {
	r.mu.Lock()
	r.rounds[roundKey{group: group, seq: seq}] = &remoteRound{to: a.to}
	r.mu.Unlock()
	// The message is encoded later by another goroutine, when the caller may have given up and changed its data.
	r.outbox.put(&pb.ClientMessage{Body: &pb.ClientMessage_Arrival{Arrival: &pb.Arrival{
		Group: group, Sequence: seq, Kind: uint32(a.kind), Op: a.op, Root: int64(a.root), Data: append([]byte(nil), a.data...),
		Refused: a.refused, Refusal: a.refusal, Excuse: a.excuse, Members: toInt64s(a.members),
		Conditions: a.conditions, ExcuseConditions: a.excuseConditions,
	}}})
}

func (r *remote) abandon(group string, seq uint64, reason string) {
	r.outbox.put(&pb.ClientMessage{Body: &pb.ClientMessage_Abandon{Abandon: &pb.Abandon{
		Group: group, Sequence: seq, Reason: clip(reason),
	}}})
}

func (r *remote) request(group string, req *storeRequest) {
	if r.outbox.full() {
		req.replyTo.receiveReply(&storeReply{id: req.id, failure: r.queueFull()})
		return
	}
	r.mu.Lock()
	r.requests[req.id] = req.replyTo
	r.mu.Unlock()
	r.outbox.put(&pb.ClientMessage{Body: &pb.ClientMessage_Store{Store: &pb.StoreRequest{
		Id: req.id, Group: group, Verb: uint32(req.verb), Key: []byte(req.key), Value: append([]byte(nil), req.value...),
		Old: append([]byte(nil), req.old...), HasOld: req.hasOld, Delta: req.delta,
	}}})
}

func (r *remote) cancelGet(group, key string, id uint64) {
	r.mu.Lock()
	delete(r.requests, id)
	r.mu.Unlock()
	r.outbox.put(&pb.ClientMessage{Body: &pb.ClientMessage_CancelGet{CancelGet: &pb.CancelGet{
		Group: group, Key: []byte(key), Id: id,
	}}})
}

func (r *remote) leaveGroup(group string) {
	r.mu.Lock()
	for key := range r.rounds {
		if key.group == group {
			delete(r.rounds, key)
		}
	}
	r.mu.Unlock()
	r.outbox.put(&pb.ClientMessage{Body: &pb.ClientMessage_LeaveGroup{LeaveGroup: &pb.LeaveGroup{Group: group}}})
}

// flush does nothing: the outcomes are the service's to send.
func (r *remote) flush() {}

func (r *remote) abort(reason string) {
	r.outbox.put(&pb.ClientMessage{Body: &pb.ClientMessage_Abort{Abort: &pb.Abort{Reason: clip(reason)}}})
}

// goodbye leaves the job. The service answers by ending the stream.
func (r *remote) goodbye(ctx context.Context) error {
	r.mu.Lock()
	r.leaving = true
	r.mu.Unlock()
	r.outbox.put(&pb.ClientMessage{Body: &pb.ClientMessage_Goodbye{Goodbye: &pb.Goodbye{}}})
	ctx, cancel := context.WithTimeout(ctx, r.liveness)
	defer cancel()
	var err error
	select {
	case <-r.ended:
	case <-ctx.Done():
		err = fmt.Errorf("the rendezvous service did not confirm the goodbye, this rank may count as lost: %w", ctx.Err())
	}
	r.cancel()
	if closeErr := r.conn.Close(); err == nil {
		err = closeErr
	}
	r.work.Wait()
	return err
}
