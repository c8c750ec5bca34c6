package group

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/symmem/symmem/group/internal/pb"
)

// service lets the ranks of other processes reach the hub of rank 0.
type service struct {
	pb.UnimplementedRendezvousServer

	hub      *hub
	options  *Options
	logger   *slog.Logger
	server   *grpc.Server
	stopping chan struct{}
	work     sync.WaitGroup // every goroutine of the service that gRPC does not wait for

	mu       sync.Mutex
	stopped  bool
	attached map[int]*serviceConn // by world rank
}

// serviceConn is the connection of one rank.
type serviceConn struct {
	service *service
	rank    atomic.Int64 // -1 until the rank is attached
	raw     net.Conn
	outbox  *outbox
	heard   atomic.Int64  // when the rank was last heard, as time since the service's start
	gone    chan struct{} // closed when the rank is no longer attached
	once    sync.Once
}

// startService serves on l until stop is called. It takes l over.
func startService(l net.Listener, h *hub, o *Options) (*service, error) {
	var certificates *tls.Config
	if o.Token != "" {
		var err error
		if certificates, err = serviceTLS(o); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	s := &service{
		hub:      h,
		options:  o,
		logger:   o.Logger.With("rank", o.Rank, "service", l.Addr().String()),
		stopping: make(chan struct{}),
		attached: make(map[int]*serviceConn),
	}
	s.server = grpc.NewServer(
		grpc.Creds(&gate{service: s, certificates: certificates}),
		grpc.ForceServerCodecV2(newFrameCodec()),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.MaxConcurrentStreams(1),
		grpc.MaxRecvMsgSize(maxClientMessage),
		grpc.MaxSendMsgSize(maxServerMessage),
		grpc.WaitForHandlers(true),
	)
	pb.RegisterRendezvousServer(s.server, s)
	s.work.Go(func() {
		if err := s.server.Serve(l); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			s.logger.Error("serving the rendezvous", "error", err)
		}
	})
	s.work.Go(s.watch)
	return s, nil
}

// stop ends all connections and waits for the service's goroutines.
func (s *service) stop() {
	s.mu.Lock()
	stopped := s.stopped
	s.stopped = true
	s.mu.Unlock()
	if !stopped {
		close(s.stopping)
	}
	s.server.Stop()
	s.work.Wait()
}

// drain waits a moment for the connections of ranks that have left, so that their goodbyes are answered.
func (s *service) drain() {
	ended := make(chan struct{})
	timer := time.NewTimer(graceTimeout)
	defer timer.Stop()
	s.work.Go(func() {
		s.server.GracefulStop()
		close(ended)
	})
	select {
	case <-ended:
	case <-timer.C:
	}
}

// gate is gRPC's view of the handshake that every connection begins with.
type gate struct {
	service      *service
	certificates *tls.Config
}

// gateInfo leads from a stream to its connection.
type gateInfo struct {
	credentials.CommonAuthInfo
	raw net.Conn
}

// AuthType names the handshake.
func (gateInfo) AuthType() string { return protocolMagic }

// ServerHandshake lets a connection in that knows the token. gRPC has set a deadline.
func (g *gate) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, err := handshakeService(raw, g.service.options, g.certificates)
	if err != nil {
		g.service.logger.Warn("refused a connection", "from", raw.RemoteAddr(), "error", err)
		return nil, nil, closing(err, raw)
	}
	level := credentials.NoSecurity
	if g.certificates != nil {
		level = credentials.PrivacyAndIntegrity
	}
	return conn, gateInfo{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: level}, raw: raw}, nil
}

// ClientHandshake is not used: ranks make their connections themselves.
func (g *gate) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("the service's credentials are not for clients")
}

// Info names the handshake.
func (g *gate) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: protocolMagic}
}

// Clone gives g itself, which never changes.
func (g *gate) Clone() credentials.TransportCredentials { return g }

// OverrideServerName is for clients.
func (g *gate) OverrideServerName(string) error { return nil }

// Connect serves one rank for as long as it takes part.
func (s *service) Connect(stream grpc.BidiStreamingServer[pb.ClientMessage, pb.ServerMessage]) error {
	p, ok := peer.FromContext(stream.Context())
	if !ok {
		return errors.New("the connection is unknown")
	}
	info, ok := p.AuthInfo.(gateInfo)
	if !ok {
		return errors.New("the connection has passed no handshake")
	}
	c := &serviceConn{service: s, raw: info.raw, outbox: newOutbox(), gone: make(chan struct{})}
	c.rank.Store(-1)
	hello := make(chan *pb.Hello, 1)
	s.work.Go(func() { c.read(stream, hello) })

	timer := time.NewTimer(handshakeTimeout)
	defer timer.Stop()
	var refusal *RefusedError
	select {
	case h, ok := <-hello:
		switch {
		case !ok:
			return nil
		case h == nil:
			refusal = refused(RefusedProtocol, "the first message was no hello")
		default:
			refusal = c.admit(h)
		}
	case <-timer.C:
		refusal = refused(RefusedProtocol, "no hello came within %v", handshakeTimeout)
	case <-s.stopping:
		return nil
	}
	if refusal != nil {
		s.logger.Warn("refused a rank", "from", info.raw.RemoteAddr(), "reason", refusal.Text)
		return stream.Send(&pb.ServerMessage{Body: &pb.ServerMessage_Refusal{Refusal: &pb.Refusal{
			Reason: uint32(refusal.Reason), Text: refusal.Text,
		}}})
	}
	c.write(stream)
	return nil
}

// admit lets the rank in that says hello, or says why not. After that its connection takes part in liveness.
func (c *serviceConn) admit(h *pb.Hello) *RefusedError {
	s, o, m := c.service, c.service.options, memberFromWire(h.GetMember())
	switch {
	case h.GetJob() != o.Job:
		return refused(RefusedJob, "this is job %q, not %q; is the address right?", o.Job, h.GetJob())
	case h.GetRestart() != int64(o.Restart):
		return refused(RefusedRestart, "this is attempt %d of the job, not %d", o.Restart, h.GetRestart())
	case h.GetWorldSize() != int64(o.WorldSize):
		return refused(RefusedWorldSize, "this world has %d ranks, not %d", o.WorldSize, h.GetWorldSize())
	case m.WorldRank < 0 || m.WorldRank >= o.WorldSize:
		return refused(RefusedRank, "rank %d is outside of a world of %d", m.WorldRank, o.WorldSize)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return refused(RefusedLate, "the job is ending")
	}
	c.hear()
	c.rank.Store(int64(m.WorldRank))
	// The welcome is queued before the hub may queue anything else.
	c.outbox.put(&pb.ServerMessage{Body: &pb.ServerMessage_Welcome{Welcome: &pb.Welcome{}}})
	if before, ok := s.hub.attach(m, c); !ok {
		c.rank.Store(-1)
		if before == rankPresent {
			return refused(RefusedDuplicate, "rank %d is present already; every rank needs its own number", m.WorldRank)
		}
		return refused(RefusedLate, "rank %d has left this job or was lost; a rank that starts again needs a new attempt of the job", m.WorldRank)
	}
	s.attached[m.WorldRank] = c
	s.logger.Debug("rank attached", "attached", m.WorldRank, "host", m.Host, "pid", m.PID)
	return nil
}

// write sends what is queued until the rank is gone, and then what was queued before that.
func (c *serviceConn) write(stream grpc.BidiStreamingServer[pb.ClientMessage, pb.ServerMessage]) {
	for {
		ended := false
		select {
		case <-c.outbox.wake:
		case <-c.gone:
			ended = true
		case <-c.service.stopping:
			c.lose("the rendezvous service was stopped")
			return
		}
		for _, m := range c.outbox.take() {
			if err := send(stream, m); err != nil {
				c.lose(broke(err))
				return
			}
		}
		if ended {
			return
		}
	}
}

// pendingOutcome is an outcome that is encoded when it is sent, outside of the hub's lock.
type pendingOutcome struct {
	group   string
	seq     uint64
	outcome *outcome
}

func send(stream grpc.ServerStream, message any) error {
	p, ok := message.(pendingOutcome)
	if !ok {
		return stream.SendMsg(message)
	}
	frames, err := p.outcome.encoded(p.group, p.seq)
	if err != nil {
		return err
	}
	for _, frame := range frames {
		if err := stream.SendMsg(frame); err != nil {
			return err
		}
	}
	return nil
}

// read takes the rank's messages until the stream ends. The first goes to hello.
func (c *serviceConn) read(stream grpc.BidiStreamingServer[pb.ClientMessage, pb.ServerMessage], hello chan<- *pb.Hello) {
	first, err := stream.Recv()
	if err != nil {
		close(hello)
		return
	}
	hello <- first.GetHello()
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			c.lose("it ended its connection without saying goodbye")
			return
		case err != nil:
			c.lose(broke(err))
			return
		}
		c.hear()
		if !c.serve(m) {
			return
		}
	}
}

// serve does what one message asks for, and reports whether more may come.
func (c *serviceConn) serve(m *pb.ClientMessage) bool {
	h := c.service.hub
	rank := c.attachedRank()
	if rank < 0 { // it sends requests without waiting for its welcome
		return false
	}
	switch b := m.GetBody().(type) {
	case *pb.ClientMessage_Heartbeat:
	case *pb.ClientMessage_Arrival:
		a := b.Arrival
		h.arrive(rank, a.GetGroup(), a.GetSequence(), &arrival{
			kind: kind(a.GetKind()), op: a.GetOp(), root: int(a.GetRoot()), data: a.GetData(),
			refused: a.GetRefused(), refusal: a.GetRefusal(), members: toInts(a.GetMembers()), to: c,
		})
	case *pb.ClientMessage_Abandon:
		h.abandon(rank, b.Abandon.GetGroup(), b.Abandon.GetSequence(), b.Abandon.GetReason())
	case *pb.ClientMessage_Store:
		r := b.Store
		h.request(rank, r.GetGroup(), &storeRequest{
			id: r.GetId(), verb: verb(r.GetVerb()), key: string(r.GetKey()), value: r.GetValue(),
			old: r.GetOld(), hasOld: r.GetHasOld(), delta: r.GetDelta(), replyTo: c,
		})
	case *pb.ClientMessage_CancelGet:
		h.cancelGet(rank, b.CancelGet.GetGroup(), string(b.CancelGet.GetKey()), b.CancelGet.GetId())
	case *pb.ClientMessage_LeaveGroup:
		h.leaveGroup(rank, b.LeaveGroup.GetGroup())
	case *pb.ClientMessage_Abort:
		h.lose(rank, b.Abort.GetReason()) // the connection stays, for the goodbye
	case *pb.ClientMessage_Goodbye:
		h.leave(rank)
		c.detach()
		return false
	default:
		c.lose("it sent a message that this version does not know")
		return false
	}
	return true
}

// broke says in a loss how a rank's connection ended. gRPC cancels the streams of a connection that is gone.
func broke(err error) string {
	if status.Code(err) == codes.Canceled {
		return "its connection broke; its process has probably ended"
	}
	return "its connection broke: " + readable(err)
}

func (c *serviceConn) attachedRank() int { return int(c.rank.Load()) }

// lose is the end of a connection without a goodbye.
func (c *serviceConn) lose(reason string) {
	if rank := c.attachedRank(); rank >= 0 {
		c.service.hub.lose(rank, reason)
	}
	c.detach()
}

func (c *serviceConn) detach() {
	s := c.service
	s.mu.Lock()
	if rank := c.attachedRank(); rank >= 0 && s.attached[rank] == c {
		delete(s.attached, rank)
	}
	s.mu.Unlock()
	c.once.Do(func() { close(c.gone) })
}

// The time is monotonic: a clock that is set does not make a rank silent.
var processStart = time.Now()

func (c *serviceConn) hear() { c.heard.Store(int64(time.Since(processStart))) }

// heartbeatInterval gives every silence several chances to be broken.
func heartbeatInterval(liveness time.Duration) time.Duration { return min(time.Second, liveness/4) }

// watch sends heartbeats and ends the connections of silent ranks.
func (s *service) watch() {
	interval := heartbeatInterval(s.options.LivenessTimeout)
	beat, err := encodeFrame(&pb.ServerMessage{Body: &pb.ServerMessage_Heartbeat{Heartbeat: &pb.Heartbeat{}}})
	if err != nil { // an empty message can always be encoded
		s.logger.Error("making a heartbeat", "error", err)
		return
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	last := time.Now()
	for {
		select {
		case <-s.stopping:
			return
		case <-ticker.C:
		}
		// If this process did not get to run, neither did the goroutines that hear the ranks: their silence says nothing.
		late := time.Since(last) > 2*interval
		last = time.Now()
		var silent []*serviceConn
		s.mu.Lock()
		for _, c := range s.attached {
			c.outbox.put(beat)
			if late {
				c.hear()
			} else if time.Since(processStart)-time.Duration(c.heard.Load()) > s.options.LivenessTimeout {
				silent = append(silent, c)
			}
		}
		s.mu.Unlock()
		for _, c := range silent {
			c.lose(fmt.Sprintf("it was silent for %v", s.options.LivenessTimeout))
			if err := c.raw.Close(); err != nil { // its writer may be blocked in a full connection
				s.logger.Debug("closing the connection of a silent rank", "silent", c.attachedRank(), "error", err)
			}
		}
	}
}

// receiveOutcome queues the outcome of a round for the rank.
func (c *serviceConn) receiveOutcome(group string, seq uint64, o *outcome) {
	c.outbox.put(pendingOutcome{group: group, seq: seq, outcome: o})
}

// receiveReply queues the reply to a store request for the rank.
func (c *serviceConn) receiveReply(r *storeReply) {
	c.outbox.put(&pb.ServerMessage{Body: &pb.ServerMessage_Store{Store: &pb.StoreReply{
		Id: r.id, Value: r.value, Found: r.found, Swapped: r.swapped, Number: r.number, Failure: r.failure.toWire(),
	}}})
}

// receiveLoss queues the news of a loss for the rank.
func (c *serviceConn) receiveLoss(l *loss) {
	c.outbox.put(&pb.ServerMessage{Body: &pb.ServerMessage_Loss{Loss: l.toWire()}})
}
