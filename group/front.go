package group

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/symmem/symmem/group/internal/pb"
)

// front is the socket of a rendezvous service, and what comes to it before it is known of which job it is.
type front struct {
	pb.UnimplementedRendezvousServer

	options      *Options
	logger       *slog.Logger
	limits       *limits
	certificates *tls.Config
	listener     *boundedListener
	server       *grpc.Server
	returns      bool // a rank may come that was in its job before
	stopping     chan struct{}
	work         sync.WaitGroup // every goroutine that gRPC does not wait for
	once         sync.Once

	// find is the job that a rank comes for. An error is a refusal, or one for gRPC. The context is that of the rank's stream, and gone is called when that ends, also after an error.
	find func(context.Context, *pb.Hello) (s *service, gone func(), err error)
}

// newFront takes over l. It takes connections when it is started.
func newFront(l net.Listener, o *Options, logger *slog.Logger) (*front, error) {
	f := &front{options: o, logger: logger, limits: o.bounds(), stopping: make(chan struct{})}
	if o.Token != "" {
		var err error
		if f.certificates, err = serviceTLS(o); err != nil {
			return nil, errors.Join(err, l.Close())
		}
	}
	f.listener = newBoundedListener(l, f.limits, logger)
	f.server = grpc.NewServer(
		grpc.Creds(&gate{f}),
		grpc.ForceServerCodecV2(newFrameCodec()),
		grpc.ConnectionTimeout(f.limits.handshake),
		grpc.MaxConcurrentStreams(2), // Connect and Beat
		grpc.MaxHeaderListSize(maxHeaders),
		grpc.MaxRecvMsgSize(maxClientMessage),
		grpc.MaxSendMsgSize(maxServerMessage),
		grpc.WriteBufferSize(streamBuffer),
		grpc.InitialWindowSize(requestWindow),
		grpc.InitialConnWindowSize(requestWindow),
		grpc.WaitForHandlers(true),
	)
	pb.RegisterRendezvousServer(f.server, f)
	return f, nil
}

// start takes connections until stop is called.
func (f *front) start() {
	f.work.Go(func() {
		if err := f.server.Serve(f.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) && !errors.Is(err, net.ErrClosed) {
			f.logger.Error("serving the rendezvous", "error", err)
		}
	})
	f.work.Go(f.watch)
}

// stop ends all connections and waits for the goroutines.
func (f *front) stop() {
	f.once.Do(func() { close(f.stopping) })
	f.closeListener() // gRPC waits for the handshakes that are under way
	f.server.Stop()
	f.work.Wait()
}

// closeListener accepts no more connections, and ends those on which no rank was admitted.
func (f *front) closeListener() {
	if err := f.listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		f.logger.Debug("closing the listener", "error", err)
	}
}

// drain waits a moment, but not past the context, for the connections of ranks that have left, so that their goodbyes are
// answered.
func (f *front) drain(ctx context.Context) {
	ended := make(chan struct{})
	timer := time.NewTimer(graceTimeout)
	defer timer.Stop()
	f.closeListener()
	f.work.Go(func() {
		f.server.GracefulStop()
		close(ended)
	})
	select {
	case <-ended:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// watch ends the connections on which nobody was admitted in time.
func (f *front) watch() {
	ticker := time.NewTicker(min(heartbeatInterval(f.options.LivenessTimeout), f.limits.handshake/4))
	defer ticker.Stop()
	for {
		select {
		case <-f.stopping:
			return
		case <-ticker.C:
		}
		if err := f.listener.closePending(f.limits.handshake); err != nil {
			f.logger.Debug("closing connections on which no rank was admitted", "error", err)
		}
	}
}

// Connect serves one rank for as long as it takes part. The connection ends soon after.
func (f *front) Connect(stream grpc.BidiStreamingServer[pb.ClientMessage, pb.ServerMessage]) error {
	socket, err := socketOf(stream.Context())
	if err != nil {
		return err
	}
	if socket.connected.Swap(true) {
		return status.Error(codes.AlreadyExists, "a rank connects once over a connection")
	}
	defer time.AfterFunc(graceTimeout, func() { // most often the rank has closed it by then
		if err := socket.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			f.logger.Debug("closing a connection", "from", socket.RemoteAddr(), "error", err)
		}
	})
	first := make(chan *pb.ClientMessage, 1)
	f.work.Go(func() {
		defer close(first)
		if m, err := stream.Recv(); err == nil {
			first <- m
		}
	})
	var hello *pb.Hello
	select { // the watch ends a connection on which no hello comes
	case m, ok := <-first:
		if !ok {
			return nil
		}
		hello = m.GetHello()
	case <-f.stopping:
		return nil
	}
	if hello == nil {
		return refuse(stream, socket, refused(RefusedProtocol, "the first message was no hello"), f.logger)
	}
	s, gone, err := f.find(stream.Context(), hello)
	defer gone()
	if refusal, ok := errors.AsType[*RefusedError](err); ok {
		return refuse(stream, socket, refusal, f.logger)
	}
	if err != nil {
		return err
	}
	return s.connect(stream, socket, hello)
}

// refuse tells a rank that it is not let in.
func refuse(stream grpc.ServerStream, socket *serviceSocket, refusal *RefusedError, logger *slog.Logger) error {
	logger.Warn("refused a rank", "from", socket.RemoteAddr(), "reason", refusal.Text)
	return socket.send(stream, &pb.ServerMessage{Body: &pb.ServerMessage_Refusal{Refusal: &pb.Refusal{
		Reason: uint32(refusal.Reason), Text: refusal.Text,
	}}})
}

// Beat exchanges heartbeats with a rank. What counts is that bytes come; see heardConn.
func (f *front) Beat(stream grpc.BidiStreamingServer[pb.Heartbeat, pb.Heartbeat]) error {
	socket, err := socketOf(stream.Context())
	if err != nil {
		return err
	}
	s := socket.service.Load()
	if s == nil {
		return status.Error(codes.FailedPrecondition, "no rank was admitted on this connection")
	}
	return s.beat(stream, socket)
}

// gate is gRPC's view of the handshake that every connection begins with.
type gate struct{ front *front }

// gateInfo finds the connection of a stream.
type gateInfo struct {
	credentials.CommonAuthInfo
	socket *serviceSocket
}

// AuthType names the handshake.
func (gateInfo) AuthType() string { return protocolMagic }

// ServerHandshake admits a connection whose peer knows the token. gRPC has set a deadline.
func (g *gate) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	socket, ok := raw.(*serviceSocket)
	if !ok {
		return nil, nil, closing(fmt.Errorf("a connection of the type %T is not the listener's", raw), raw)
	}
	conn, err := handshakeService(raw, g.front.options, g.front.certificates)
	if err != nil {
		if !socket.evicted.Load() { // else it is told already
			g.front.logger.Warn("refused a connection", "from", raw.RemoteAddr(), "error", err)
		}
		return nil, nil, closing(err, raw)
	}
	socket.returns.Store(g.front.returns)
	level := credentials.NoSecurity
	if g.front.certificates != nil {
		level = credentials.PrivacyAndIntegrity
		socket.proven.Store(true)
	}
	return &countingConn{Conn: conn, count: &socket.messages}, gateInfo{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: level}, socket: socket}, nil
}

// ClientHandshake is not used: ranks make their connections themselves.
func (g *gate) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("the service's credentials are not for clients")
}

// Info names the handshake.
func (g *gate) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: protocolMagic}
}

// Clone returns g itself, which never changes.
func (g *gate) Clone() credentials.TransportCredentials { return g }

// OverrideServerName is for clients.
func (g *gate) OverrideServerName(string) error { return nil }

// socketOf returns the connection that a stream runs over.
func socketOf(ctx context.Context) (*serviceSocket, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, errors.New("the connection is unknown")
	}
	info, ok := p.AuthInfo.(gateInfo)
	if !ok {
		return nil, errors.New("the connection has passed no handshake")
	}
	return info.socket, nil
}
