package group

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/symmem/symmem/group/internal/pb"
)

// remote reaches the hub of the rendezvous service over the network. If the service is kept, it looks for the one that comes after it when its connection
// breaks, and brings there again what it waits for.
type remote struct {
	session  *session
	member   Member
	options  *Options
	outbox   *outbox
	liveness time.Duration
	kept     bool // what the service knows outlives it
	ctx      context.Context
	cancel   context.CancelFunc // ends the connection, and the search for another
	ended    chan struct{}      // closed when there is no connection any more, and will be none
	work     sync.WaitGroup
	hello    sync.Mutex   // held while the rank says hello
	asking   atomic.Int32 // addresses that wait for it

	mu       sync.Mutex
	link     *link
	leaving  bool
	rounds   map[roundKey]*remoteRound
	requests map[uint64]remoteRequest
	// What the service may not have heard yet, if it is kept:
	left     []string // groups
	aborting *pb.ClientMessage
}

// link is one connection to the service.
type link struct {
	conn   *grpc.ClientConn
	stream grpc.BidiStreamingClient[pb.ClientMessage, pb.ServerMessage]
	cancel context.CancelFunc
	socket *heardConn
	theirs int64         // nanoseconds of silence after which the service counts this rank as lost, if it says so
	ended  chan struct{} // closed when the stream has ended
	why    atomic.Pointer[string]
	work   sync.WaitGroup
}

type roundKey struct {
	group string
	seq   uint64
}

// remoteRound is a collective call that waits for its outcome.
type remoteRound struct {
	to      outcomeReceiver
	blobs   [][]byte          // of the messages so far
	arrival *pb.ClientMessage // if the service is kept
	abandon *pb.ClientMessage // if this rank has given up, likewise
}

// remoteRequest is a request that waits for its reply.
type remoteRequest struct {
	to      storeReceiver
	message *pb.ClientMessage // if the service is kept
}

const (
	firstBackoff = 10 * time.Millisecond
	lastBackoff  = time.Second
	// longestAttempt is the bound of later attempts to connect, as a multiple of that of the first. Those to a service that was started again, which does not wait
	// for long, are bounded by longestReturn.
	longestAttempt = 10
	// queueFactor is how much a rank queues before it refuses requests, as a multiple of what the service queues for a rank.
	queueFactor = 4
)

// connect reaches the service, trying again with growing, jittered pauses until the context ends or the service refuses.
func connect(ctx context.Context, s *session, m Member, o *Options) (*remote, error) {
	r := &remote{
		session:  s,
		member:   m,
		options:  o,
		outbox:   newOutbox(queueFactor*s.limits.queued, queueFactor*s.limits.queueBytes),
		liveness: o.LivenessTimeout,
		ended:    make(chan struct{}),
		rounds:   make(map[roundKey]*remoteRound),
		requests: make(map[uint64]remoteRequest),
	}
	// The connection lives as long as the session.
	r.ctx, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
	l, err := r.find(ctx, false)
	if err != nil {
		r.cancel()
		return nil, err
	}
	r.work.Go(func() { r.run(l) })
	return r, nil
}

// longestReturn bounds an attempt to connect to a service that was started again: the host before may not say that it is gone, and the service gives up ranks
// that are not back within their liveness timeout and returnTime.
func (o *Options) longestReturn() time.Duration { return max(o.bounds().attempt, o.LivenessTimeout/2) }

// sighting is how one attempt to connect has ended.
type sighting struct {
	port    int // which of the addresses
	attempt int // there, from 1
	link    *link
	err     error
}

// find connects, as connect does. again says that this rank was admitted before. It looks at all addresses at the same time: who is at one of them in place of the
// service may be silent for as long as anybody waits.
func (r *remote) find(ctx context.Context, again bool) (*link, error) {
	o := r.options
	started := time.Now()
	addrs := o.addrs()
	looking, stop := context.WithCancel(ctx)
	defer stop()
	seen := make(chan sighting)
	var looks sync.WaitGroup
	for port, addr := range addrs {
		looks.Go(func() { r.look(looking, stop, sighting{port: port}, addr, again, seen) })
	}
	go func() {
		looks.Wait()
		close(seen)
	}()
	attempts := 0
	var found *link
	var decided *RefusedError
	lasts, doubts := make([]error, len(addrs)), make([]*RefusedError, len(addrs))
	var strange time.Time // since when somebody answers who may be somebody else
	for at := range seen {
		attempts = max(attempts, at.attempt)
		switch {
		case at.link != nil:
			found = at.link
			continue
		case decided != nil:
			continue
		case lasts[at.port] == nil || !cutShort(ctx): // the attempt that the context cut short says the least
			lasts[at.port] = at.err
		}
		doubts[at.port] = nil
		if refusal, ok := errors.AsType[*RefusedError](at.err); ok {
			refusal.Addr = addrs[at.port]
			perhaps, certain := refusal.Reason.elsewhere()
			switch {
			case len(addrs) == 1 || !perhaps:
				decided = refusal
			case !certain && !again: // a rank that was admitted with what it has is refused by somebody else
				doubts[at.port] = refusal
			}
		}
		doubt := cmp.Or(doubts...)
		switch {
		case doubt == nil:
			strange = time.Time{}
		case strange.IsZero():
			strange = time.Now()
		case time.Since(strange) > o.bounds().doubt:
			decided = cmp.Or(decided, doubt)
		}
		if decided != nil {
			stop()
		}
	}
	switch {
	case found != nil:
		return found, nil
	case decided != nil:
		return nil, decided
	}
	last := lasts[0]
	for _, err := range lasts { // a refusal says most
		if _, ok := errors.AsType[*RefusedError](err); ok {
			last = err
			break
		}
	}
	return nil, &ConnectError{Addr: o.Addr, Ports: o.Ports, Served: o.Served, Attempts: attempts, Waited: time.Since(started), Last: last, Err: ctx.Err()}
}

// look tries to connect to an address until it has, or ctx ends, and tells how each attempt has ended.
func (r *remote) look(ctx context.Context, stop context.CancelFunc, at sighting, addr string, again bool, seen chan<- sighting) {
	s, o := r.session, r.options
	backoff, bound := firstBackoff, s.limits.attempt
	for at.attempt = 1; ; at.attempt++ {
		at.link, at.err = r.attempt(ctx, stop, addr, bound, again)
		if errors.Is(at.err, errAttempt) { // the service may be busy with many others: more patience, so that it is not asked in vain
			bound = min(2*bound, longestAttempt*s.limits.attempt)
			if again {
				bound = min(bound, o.longestReturn())
			}
		}
		if at.err != nil {
			s.logger.Debug("connecting to the rendezvous service", "address", addr, "attempt", at.attempt, "error", at.err)
		}
		seen <- at
		if at.link != nil {
			return
		}
		if !rest(ctx, backoff/2+rand.N(backoff)) {
			return
		}
		backoff = min(2*backoff, lastBackoff)
	}
}

// rest waits for that time, and reports whether the context has not ended meanwhile.
func rest(ctx context.Context, pause time.Duration) bool {
	over := time.NewTimer(pause)
	select {
	case <-over.C:
		return true
	case <-ctx.Done():
		over.Stop()
		return false
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
// host that is gone answers. From the hello on, the rank may be stopped, or the service busy, for as long as the context lasts; where the rank comes back, as
// long as the service is not silent. It says hello at one address at a time, and welcomed, called once it was, keeps it from being welcomed at two. So a hello has the
// bound too once another address waits for its turn: who answers here may be somebody else, and silent from now on.
func (r *remote) attempt(ctx context.Context, welcomed context.CancelFunc, addr string, bound time.Duration, again bool) (*link, error) {
	secure, socket, err := secureConnection(ctx, r.options, addr, bound)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	r.asking.Add(1)
	r.hello.Lock()
	r.asking.Add(-1)
	defer r.hello.Unlock()
	if err := context.Cause(ctx); err != nil {
		return nil, closing(err, socket)
	}
	if time.Since(began) > r.session.limits.patience/2 { // a service with much to do may have ended a connection on which nothing was said for so long
		if err := closing(nil, socket); err != nil {
			r.session.logger.Debug("closing a connection to the rendezvous service", "error", err)
		}
		if secure, socket, err = secureConnection(ctx, r.options, addr, bound); err != nil {
			return nil, err
		}
	}
	if !again {
		var ends func()
		ctx, ends = r.hurried(ctx, bound)
		defer ends()
	}
	l := &link{socket: socket, ended: make(chan struct{})}
	if err := r.open(ctx, l, secure, again); err != nil {
		close(l.ended)
		l.work.Wait()
		if why := l.why.Load(); why != nil {
			err = fmt.Errorf("%s: %w", *why, err)
		}
		if cause := context.Cause(ctx); errors.Is(cause, errAttempt) {
			err = fmt.Errorf("%w: %w", cause, err)
		}
		return nil, closing(err, socket)
	}
	welcomed()
	return l, nil
}

// hurried returns a context that ends when the bound is over and an address waits for its turn to be told hello. ends frees it.
func (r *remote) hurried(ctx context.Context, bound time.Duration) (_ context.Context, ends func()) {
	const look = 10 * time.Millisecond
	ctx, end := context.WithCancelCause(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		timer := time.NewTimer(bound)
		defer timer.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-timer.C:
			}
			if r.asking.Load() > 0 {
				end(fmt.Errorf("%w: %v", errAttempt, bound))
				return
			}
			timer.Reset(look)
		}
	})
	return ctx, func() {
		end(nil)
		watch.Wait()
	}
}

// secureConnection returns an authenticated connection, and the connection below it.
func secureConnection(ctx context.Context, o *Options, addr string, bound time.Duration) (net.Conn, *heardConn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, bound, fmt.Errorf("%w: %v", errAttempt, bound))
	defer cancel()
	because := func(err error) error {
		if cause := context.Cause(ctx); errors.Is(cause, errAttempt) {
			return fmt.Errorf("%w: %w", cause, err)
		}
		return fileLimit(err)
	}
	var dialer net.Dialer
	raw, err := dialer.DialContext(ctx, "tcp", addr)
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

// open says hello on an authenticated connection, and starts the goroutines that carry messages, all but the one that reads.
func (r *remote) open(ctx context.Context, l *link, conn net.Conn, again bool) error {
	readBuffer := streamBuffer
	if _, batched := conn.(*batchedTLS); batched { // it has a buffer below TLS, where one saves calls to the system
		readBuffer = 0
	}
	var dialed atomic.Bool
	var err error
	l.conn, err = grpc.NewClient("passthrough:///"+r.options.Addr,
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
		grpc.WithInitialWindowSize(answerWindow),
		grpc.WithInitialConnWindowSize(answerWindow),
		grpc.WithReadBufferSize(readBuffer),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxServerMessage), grpc.MaxCallSendMsgSize(maxClientMessage),
			grpc.ForceCodecV2(newAnswerCodec())),
	)
	if err != nil {
		return fmt.Errorf("preparing the connection: %w", err)
	}
	// The stream lives as long as the session; until it is welcomed it ends with the attempt.
	streamCtx, cancel := context.WithCancel(r.ctx)
	l.cancel = cancel
	stop := context.AfterFunc(ctx, cancel)
	l.socket.hear()
	if again {
		l.work.Go(func() { r.watch(l) })
	}
	err = r.welcome(streamCtx, l, again)
	if err == nil && !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		stop()
		cancel()
		return closing(err, l.conn)
	}
	l.socket.hear()
	l.work.Go(func() { r.write(l) })
	if !again {
		l.work.Go(func() { r.watch(l) })
	}
	l.work.Go(func() { r.beat(streamCtx, l) })
	return nil
}

func (r *remote) welcome(ctx context.Context, l *link, again bool) error {
	var err error
	if l.stream, err = pb.NewRendezvousClient(l.conn).Connect(ctx); err != nil {
		return fmt.Errorf("opening the stream: %w", err)
	}
	o := r.options
	hello := &pb.Hello{
		Job: []byte(o.Job), Restart: int64(o.Restart), WorldSize: int64(o.WorldSize), Member: r.member.toWire(), Session: r.session.id,
		Again: again, Liveness: int64(o.LivenessTimeout), Served: o.Served,
	}
	if again {
		hello.Waits = r.waits()
	}
	err = l.stream.Send(&pb.ClientMessage{Body: &pb.ClientMessage_Hello{Hello: hello}})
	if err != nil && !errors.Is(err, io.EOF) { // EOF: the stream has ended, and Recv says why
		return fmt.Errorf("saying hello: %w", err)
	}
	answer, err := l.stream.Recv()
	if err != nil {
		return fmt.Errorf("waiting for the welcome: %w", err)
	}
	switch b := answer.GetBody().(type) {
	case *pb.ServerMessage_Welcome:
		l.theirs = b.Welcome.GetLiveness()
		r.welcomed(l, b.Welcome.GetKept(), again)
		return nil
	case *pb.ServerMessage_Refusal:
		return refused(RefusalReason(b.Refusal.GetReason()), "%s", clip(b.Refusal.GetText()))
	}
	return refused(RefusedProtocol, "the service answered hello with %T", answer.GetBody())
}

// waits lists what this rank waits for. What is added to it before the rank is welcomed, the service does not know.
func (r *remote) waits() []*pb.Taken {
	r.mu.Lock()
	defer r.mu.Unlock()
	var waits []*pb.Taken
	for key := range r.rounds {
		waits = append(waits, &pb.Taken{Group: key.group, Sequence: key.seq})
	}
	for id := range r.requests {
		waits = append(waits, &pb.Taken{Request: id})
	}
	return waits
}

// welcomed takes the connection that was made. A rank that has come back brings again all that it waits for, and what the service before may not have
// heard, in place of what is queued.
func (r *remote) welcomed(l *link, kept, again bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.link, r.kept = l, kept
	if !again {
		return
	}
	messages := []any{&pb.ClientMessage{Body: &pb.ClientMessage_Taken{Taken: &pb.Taken{}}}} // so that the service knows that the rank knows
	keys := slices.SortedFunc(maps.Keys(r.rounds), func(a, b roundKey) int {
		return cmp.Or(cmp.Compare(a.seq, b.seq), cmp.Compare(a.group, b.group))
	})
	for _, key := range keys {
		round := r.rounds[key]
		round.blobs = nil
		if messages = append(messages, round.arrival); round.abandon != nil {
			messages = append(messages, round.abandon)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(r.requests)) {
		messages = append(messages, r.requests[id].message)
	}
	for _, group := range r.left {
		messages = append(messages, leaveMessage(group))
	}
	if r.aborting != nil {
		messages = append(messages, r.aborting)
	}
	if r.leaving {
		messages = append(messages, goodbyeMessage())
	}
	r.outbox.reset(messages)
}

// run reads from one connection after the other, until this rank has left or the service is lost.
func (r *remote) run(l *link) {
	defer close(r.ended)
	defer r.cancel()
	for {
		why := r.read(l)
		if silent := l.why.Load(); silent != nil {
			why.reason, why.said = *silent, false
		}
		l.cancel()
		close(l.ended)
		if err := l.conn.Close(); err != nil {
			r.session.logger.Debug("closing a connection to the rendezvous service", "error", err)
		}
		l.work.Wait()
		r.mu.Lock()
		kept, leaving := r.kept, r.leaving
		r.mu.Unlock()
		switch {
		case leaving && (!kept || why.said || r.ctx.Err() != nil):
			return // the service has answered the goodbye, or nobody waits for the answer
		case !kept || why.garbled || r.ctx.Err() != nil:
			r.session.serviceLost(why.reason)
			return
		}
		r.session.logger.Warn("looking for the next rendezvous service", "reason", why.reason)
		ctx, cancel := context.WithTimeout(r.ctx, r.options.Timeout)
		next, err := r.find(ctx, true)
		cancel()
		if err != nil {
			if !leaving {
				r.session.serviceLost(fmt.Sprintf("%s; and there is none in its place: %v", why.reason, err))
			}
			return
		}
		l = next
	}
}

// ending is why a connection is over.
type ending struct {
	reason  string
	said    bool // the service has ended it in good order
	garbled bool // it sent what this version does not know
}

// read takes the service's messages until the stream ends.
func (r *remote) read(l *link) ending {
	for {
		m, err := l.stream.Recv()
		if err != nil {
			return ending{reason: fmt.Sprintf("the connection to the rendezvous service broke: %v", readable(err)), said: errors.Is(err, io.EOF)}
		}
		switch b := m.GetBody().(type) {
		case *pb.ServerMessage_Outcome:
			if err := r.outcome(b.Outcome); err != nil {
				return ending{reason: fmt.Sprintf("the rendezvous service sent what cannot be read: %v", err), garbled: true}
			}
		case *pb.ServerMessage_Store:
			r.reply(b.Store)
		case *pb.ServerMessage_Loss:
			r.session.receiveLoss(lossFromWire(b.Loss))
		default:
			return ending{reason: fmt.Sprintf("the rendezvous service sent a message that this version does not know: %T", b), garbled: true}
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

// write sends what is queued until the stream ends.
func (r *remote) write(l *link) {
	for {
		select {
		case <-r.outbox.wake:
		case <-l.ended:
			signal(r.outbox.wake) // it may have been for the next connection
			return
		}
		for _, m := range r.outbox.take() {
			if err := l.stream.SendMsg(m.message); err != nil {
				l.cancel() // the reader tells the session
				return
			}
			r.outbox.sent(m)
		}
	}
}

// beat exchanges heartbeats with the service, over a stream of its own. What counts is that bytes come; see heardConn.
func (r *remote) beat(ctx context.Context, l *link) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := pb.NewRendezvousClient(l.conn).Beat(ctx)
	if err != nil { // the connection is over, as the reader will find
		return
	}
	l.work.Go(func() {
		for {
			if _, err := stream.Recv(); err != nil {
				return
			}
		}
	})
	ticker := time.NewTicker(beatInterval(r.liveness, l.theirs))
	defer ticker.Stop()
	for stream.Send(&pb.Heartbeat{}) == nil {
		select {
		case <-l.ended:
			return
		case <-ticker.C:
		}
	}
}

// watch ends the connection when the service is silent.
func (r *remote) watch(l *link) {
	ticker := time.NewTicker(watchPause(r.liveness))
	defer ticker.Stop()
	last := time.Now()
	for {
		select {
		case <-l.ended:
			return
		case <-ticker.C:
		}
		late := isLate(time.Since(last), r.liveness)
		last = time.Now()
		if late {
			l.socket.hear()
		} else if silence := l.socket.silence(); silence > longestSilence(r.liveness) {
			why := "the rendezvous service " + wasSilent(silence, r.liveness)
			l.why.Store(&why)
			l.cancel()
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
	if round == nil { // nobody waits for it any more
		r.take(&pb.Taken{Group: key.group, Sequence: key.seq})
		r.mu.Unlock()
		return nil
	}
	if round.blobs == nil {
		round.blobs = blobs
	} else {
		round.blobs = append(round.blobs, blobs...)
	}
	if m.GetMore() {
		r.mu.Unlock()
		return nil
	}
	delete(r.rounds, key)
	r.take(&pb.Taken{Group: key.group, Sequence: key.seq})
	r.mu.Unlock()
	round.to.receiveOutcome(key.group, key.seq, &outcome{blobs: round.blobs, failure: failureFromWire(m.GetFailure()), own: true})
	return nil
}

func (r *remote) reply(m *pb.StoreReply) {
	r.mu.Lock()
	req := r.requests[m.GetId()]
	delete(r.requests, m.GetId())
	r.take(&pb.Taken{Request: m.GetId()})
	r.mu.Unlock()
	if req.to != nil { // else it was cancelled
		req.to.receiveReply(replyFromWire(m))
	}
}

// take tells a service that is kept that this rank has what was kept for it. The caller holds the lock.
func (r *remote) take(what *pb.Taken) {
	if r.kept {
		r.outbox.put(&pb.ClientMessage{Body: &pb.ClientMessage_Taken{Taken: what}})
	}
}

// queueFull returns the failure of a request for which the outbox has no room.
func (r *remote) queueFull() *failure {
	if r.outbox.crowded() {
		return &failure{kind: failQuota, text: quotaQueued, limit: int64(r.outbox.most)}
	}
	return &failure{kind: failQuota, text: quotaQueueBytes, limit: r.outbox.large}
}

func (r *remote) arrive(group string, seq uint64, a *arrival) {
	// The message is encoded later by another goroutine, when the caller may have given up and changed its data.
	m := &pb.ClientMessage{Body: &pb.ClientMessage_Arrival{Arrival: &pb.Arrival{
		Group: group, Sequence: seq, Kind: uint32(a.kind), Op: a.op, Root: int64(a.root), Data: append([]byte(nil), a.data...),
		Refused: a.refused, Refusal: a.refusal, Excuse: a.excuse, Members: toInt64s(a.members),
		Conditions: a.conditions, ExcuseConditions: a.excuseConditions,
	}}}
	round := &remoteRound{to: a.to}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.kept {
		round.arrival = m
	}
	r.rounds[roundKey{group: group, seq: seq}] = round
	r.outbox.put(m)
}

func (r *remote) abandon(group string, seq uint64, reason string) {
	m := &pb.ClientMessage{Body: &pb.ClientMessage_Abandon{Abandon: &pb.Abandon{
		Group: group, Sequence: seq, Reason: clip(reason),
	}}}
	r.mu.Lock()
	defer r.mu.Unlock()
	if round := r.rounds[roundKey{group: group, seq: seq}]; round != nil && r.kept {
		round.abandon = m
	}
	r.outbox.put(m)
}

func (r *remote) request(group string, req *storeRequest) {
	if r.outbox.full() || !r.offer(group, req) {
		req.replyTo.receiveReply(&storeReply{id: req.id, failure: r.queueFull()})
	}
}

// offer sends a request, unless what is to be sent before it is too much.
func (r *remote) offer(group string, req *storeRequest) bool {
	m := &pb.ClientMessage{Body: &pb.ClientMessage_Store{Store: &pb.StoreRequest{
		Id: req.id, Group: group, Verb: uint32(req.verb), Key: []byte(req.key), Value: append([]byte(nil), req.value...),
		Old: append([]byte(nil), req.old...), HasOld: req.hasOld, Delta: req.delta,
	}}}
	pending := remoteRequest{to: req.replyTo}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.kept {
		pending.message = m
	}
	if !r.outbox.offer(m) {
		return false
	}
	r.requests[req.id] = pending // the reply is looked for with the lock held
	return true
}

func (r *remote) cancelGet(group, key string, id uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.requests, id)
	r.outbox.put(&pb.ClientMessage{Body: &pb.ClientMessage_CancelGet{CancelGet: &pb.CancelGet{
		Group: group, Key: []byte(key), Id: id,
	}}})
}

func leaveMessage(group string) *pb.ClientMessage {
	return &pb.ClientMessage{Body: &pb.ClientMessage_LeaveGroup{LeaveGroup: &pb.LeaveGroup{Group: group}}}
}

func goodbyeMessage() *pb.ClientMessage {
	return &pb.ClientMessage{Body: &pb.ClientMessage_Goodbye{Goodbye: &pb.Goodbye{}}}
}

func (r *remote) leaveGroup(group string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, round := range r.rounds {
		// A service that comes after this one has to hear of a call that was given up: in a group that it does not know, who comes later would wait for this rank.
		if key.group == group && round.abandon == nil {
			delete(r.rounds, key)
		}
	}
	if r.kept {
		// A service may not have heard of as many as a rank may have open: to open further ones, it has to have kept what came before.
		if r.left = append(r.left, group); len(r.left) > r.session.limits.groups {
			r.left = slices.Delete(r.left, 0, 1)
		}
	}
	r.outbox.put(leaveMessage(group))
}

// flush does nothing: the outcomes are the service's to send.
func (r *remote) flush() {}

func (r *remote) abort(reason string) {
	m := &pb.ClientMessage{Body: &pb.ClientMessage_Abort{Abort: &pb.Abort{Reason: clip(reason)}}}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.kept {
		r.aborting = m
	}
	r.outbox.put(m)
}

// goodbye leaves the job. The service answers by ending the stream. If ctx ends first, the goodbye has a moment more to get there: without it the others would take this
// rank for lost.
func (r *remote) goodbye(ctx context.Context) error {
	r.mu.Lock()
	r.leaving = true
	r.outbox.put(goodbyeMessage())
	r.mu.Unlock()
	bounded, cancel := context.WithTimeout(ctx, r.liveness)
	defer cancel()
	err := r.parted(bounded)
	if err != nil && ctx.Err() != nil {
		moment, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(r.liveness, graceTimeout))
		defer cancel()
		if r.parted(moment) == nil {
			err = nil
		}
	}
	if err != nil {
		err = fmt.Errorf("the rendezvous service did not confirm the goodbye, this rank may count as lost: %w", err)
	}
	r.cancel()
	r.work.Wait()
	return err
}

// parted waits until the service has answered the goodbye, or is gone.
func (r *remote) parted(ctx context.Context) error {
	select {
	case <-r.ended:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
