package group

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/symmem/symmem/group/internal/pb"
	"github.com/symmem/symmem/internal/errs"
)

const (
	// answerWindow is how many bytes the service may send a rank that the rank has not yet taken: the outcome of an all-gather of 256 bytes among 1024
	// ranks goes without waiting for the rank in between. gRPC begins with 64 KiB, and measures the connection to find more.
	answerWindow = 1 << 20
	// requestWindow is how many bytes a rank may send the service that the service has not yet taken, so it bounds what gRPC keeps for a rank. If it were
	// not set, gRPC would measure the connection to find a size, with a ping for each request that comes after a pause, and go up to 16 MiB.
	requestWindow = 1 << 20
	// streamBuffer is how many bytes go to a socket, or come from it, in one call, where there are so many.
	streamBuffer = 128 << 10
)

// maxHeaders bounds the headers of a stream, in bytes.
const maxHeaders = 8 << 10

// service lets the ranks of one job reach its hub from other processes.
type service struct {
	front    *front
	hub      *hub
	options  *Options
	logger   *slog.Logger
	limits   *limits
	again    bool // the ranks may open the job again here when it is over, as rank 0 serves
	many     bool // other jobs are served at the same address
	stopping chan struct{}
	once     sync.Once      // that closes it
	work     sync.WaitGroup // the watch; what streams have started is the front's

	mu       sync.Mutex
	stopped  bool
	serving  map[*serviceSocket]struct{} // those of streams whose ranks were admitted
	attached map[int]*serviceConn        // by world rank
}

// serviceConn is the connection of one rank.
type serviceConn struct {
	service *service
	rank    atomic.Int64 // -1 until the rank is attached
	session string       // which join of the rank it is
	socket  *serviceSocket
	outbox  *outbox
	phase   atomic.Int32
	parted  atomic.Bool   // the rank has said goodbye, or is lost
	early   bool          // it was refused in this job, and may be one of the next
	gone    chan struct{} // closed when the rank is no longer attached over this connection
	once    sync.Once

	broken   time.Time // guarded by the service's lock: when the connection broke before the rank spoke
	brokeHow string
}

// The phases of a connection. A rank that has not spoken since it was admitted may not know that it was admitted: it can say hello again over another
// connection, which then replaces this one.
const (
	phaseFresh int32 = iota
	phaseSpoken
	phaseReplaced
)

// startService serves a job on l until stop is called. It takes over l. again says that the ranks may open the job again when it is over.
func startService(l net.Listener, h *hub, o *Options, again bool, logger *slog.Logger) (*service, error) {
	s := newService(h, o, again, logger.With("service", l.Addr().String()))
	f, err := newFront(l, o, s.logger)
	if err != nil {
		return nil, err
	}
	s.front, f.returns = f, h.keeper != nil && h.keeper.restored // where no service was before this one, nobody comes back
	f.find = func(context.Context, *pb.Hello) (*service, func(), error) { return s, func() {}, nil }
	f.start()
	s.work.Go(s.watch)
	return s, nil
}

// newService makes what a job needs, and starts nothing.
func newService(h *hub, o *Options, again bool, logger *slog.Logger) *service {
	return &service{hub: h, options: o, limits: o.bounds(), logger: logger, again: again, stopping: make(chan struct{}), serving: make(map[*serviceSocket]struct{}), attached: make(map[int]*serviceConn)}
}

// stop ends all connections, also those that are of no job yet, and waits for the goroutines.
func (s *service) stop() {
	s.end()
	s.front.stop()
	s.work.Wait()
}

// shut lets no further rank in, if nobody is there, and reports whether that is so.
func (s *service) shut() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = s.stopped || len(s.hub.attached()) == 0
	return s.stopped
}

// end lets the streams of all ranks end, and no further rank in.
func (s *service) end() {
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	s.once.Do(func() { close(s.stopping) })
}

// leave is the end of the stream of a rank that was admitted.
func (s *service) leave(c *serviceSocket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.serving, c)
}

// settle waits a moment, but not past the context, for the streams of ranks that have left, so that their goodbyes are answered. It returns the sockets of
// those that are still there.
func (s *service) settle(ctx context.Context) []*serviceSocket {
	ctx, cancel := context.WithTimeout(ctx, graceTimeout)
	defer cancel()
	look := time.NewTicker(5 * time.Millisecond)
	defer look.Stop()
	for {
		s.mu.Lock()
		left := slices.Collect(maps.Keys(s.serving))
		s.mu.Unlock()
		if len(left) == 0 {
			return nil
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return left
		}
	}
}

// close ends the job's streams, also those to which nothing more can be written, and waits for them.
func (s *service) close(ctx context.Context) {
	s.end()
	ctx = context.WithoutCancel(ctx) // what has nothing more to wait for ends at once
	for left := s.settle(ctx); len(left) > 0; left = s.settle(ctx) {
		for _, c := range left {
			if err := c.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
				s.logger.Debug("closing a connection", "from", c.RemoteAddr(), "error", err)
			}
		}
	}
	s.work.Wait()
}

// connect serves the rank that says hello for as long as it takes part.
func (s *service) connect(stream grpc.BidiStreamingServer[pb.ClientMessage, pb.ServerMessage], socket *serviceSocket, h *pb.Hello) error {
	c := &serviceConn{service: s, socket: socket, outbox: newOutbox(s.limits.queued, s.limits.queueBytes), gone: make(chan struct{})}
	c.rank.Store(-1)
	refusal := c.admit(h)
	if refusal == refusedEnding && (s.hub.keeper != nil || s.again) || refusal == refusedDropped || c.early && s.ends(stream.Context()) {
		return status.Error(codes.Unavailable, refusal.Text) // another service goes on with the job, or begins it again, or the rank comes again
	}
	if refusal != nil {
		return refuse(stream, socket, refusal, s.logger)
	}
	defer s.leave(socket)
	s.front.work.Go(func() { c.read(stream) })
	c.write(stream)
	if s.hub.keeper != nil && !c.parted.Load() {
		// Not as after a goodbye: the rank is to look for the next service.
		return status.Error(codes.Unavailable, "the rendezvous service is stopping")
	}
	return nil
}

// beat sends a rank heartbeats until the stream has ended.
func (s *service) beat(stream grpc.BidiStreamingServer[pb.Heartbeat, pb.Heartbeat], socket *serviceSocket) error {
	ended := make(chan struct{})
	s.front.work.Go(func() {
		defer close(ended)
		for {
			if _, err := stream.Recv(); err != nil {
				return
			}
		}
	})
	ticker := time.NewTicker(beatInterval(s.options.LivenessTimeout, socket.liveness.Load()))
	defer ticker.Stop()
	for {
		if err := socket.send(stream, &pb.Heartbeat{}); err != nil {
			return err
		}
		select {
		case <-ticker.C:
		case <-ended:
			return nil
		case <-s.stopping:
			return nil
		}
	}
}

// mayEnd reports whether a rank that is none of this job may be one of the next, which begins where this one ends: its ranks have begun to leave.
func (s *service) mayEnd(h *pb.Hello) bool { return s.again && !h.GetAgain() && s.hub.ending() }

// ends waits a moment for the end of a job that can be opened again, and reports whether rank 0 has left. A rank that has left may be ahead of the others, which all
// leave to open the job again: it has to come again until rank 0 does that too.
func (s *service) ends(ctx context.Context) bool {
	moment := time.NewTimer(s.limits.doubt)
	defer moment.Stop()
	select {
	case <-moment.C:
	case <-ctx.Done(): // rank 0 takes no more connections
	case <-s.stopping:
	}
	return !s.hub.isPresent(0)
}

// refusedEnding refuses a rank that comes while the service stops, refusedDropped one whose connection is being closed, of which the rank does not hear.
var (
	refusedEnding  = refused(RefusedLate, "the job is ending")
	refusedDropped = refused(RefusedLate, "the connection was ended while others waited, or because it took too long")
)

// admit admits the rank that says hello, or says why not. From then on its connection is watched for silence.
func (c *serviceConn) admit(h *pb.Hello) *RefusedError {
	s, o, m := c.service, c.service.options, memberFromWire(h.GetMember())
	switch {
	case string(h.GetJob()) != o.Job:
		return refused(RefusedJob, "this is job %s, not %s; is the address right?", quoteJob(o.Job), quoteJob(string(h.GetJob())))
	case h.GetRestart() != int64(o.Restart):
		c.early = h.GetRestart() > int64(o.Restart) && s.mayEnd(h)
		return refused(RefusedRestart, "this is attempt %d of the job, not %d", o.Restart, h.GetRestart())
	case h.GetWorldSize() != int64(o.WorldSize):
		if present, absent := s.hub.standing(); s.many && (len(present)+len(absent) == 0 || len(absent) == o.WorldSize) {
			return refusedEnding // the job is over, or has not begun and may not: it can be opened with any number of ranks
		}
		c.early = s.mayEnd(h)
		return refused(RefusedWorldSize, "this world has %d ranks, not %d", o.WorldSize, h.GetWorldSize())
	case m.WorldRank < 0 || m.WorldRank >= o.WorldSize:
		return refused(RefusedRank, "rank %d is outside of a world of %d", m.WorldRank, o.WorldSize)
	}
	m.Host, m.BootID, m.Process, c.session = clip(m.Host), clip(m.BootID), clip(m.Process), clip(h.GetSession())
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return refusedEnding
	}
	if h.GetAgain() && !s.hub.knows(m.WorldRank) {
		return refused(RefusedLate, "this service knows nothing of rank %d, which was in the job before: its store has forgotten the job, or it has none; start "+
			"the job again as another attempt", m.WorldRank)
	}
	if !c.socket.claim() {
		return refusedDropped
	}
	c.socket.hear()
	c.socket.liveness.Store(h.GetLiveness())
	welcome := func() { // before the hub queues anything else
		c.outbox.put(&pb.ServerMessage{Body: &pb.ServerMessage_Welcome{Welcome: &pb.Welcome{
			Kept: s.hub.keeper != nil, Liveness: int64(o.LivenessTimeout),
		}}})
	}
	if before, ok := s.hub.attachAs(m, c.session, c, welcome); !ok && (s.hub.keeper == nil || !s.hub.back(m.WorldRank, c.session, h.GetWaits(), c, welcome)) {
		if before != rankPresent || !s.replace(m.WorldRank, c, h.GetWaits(), welcome) {
			c.socket.unclaim()
			if before == rankPresent {
				text := "rank %d is present already; every rank needs its own number"
				if s.many {
					text += ", and every job its own name: set SYMMEM_JOB"
				}
				return refused(RefusedDuplicate, text, m.WorldRank)
			}
			c.early = s.again && before == rankLeft && !h.GetAgain()
			return refused(RefusedLate, "rank %d has left this job or was lost; a rank that starts again needs a new attempt of the job",
				m.WorldRank)
		}
	}
	c.socket.service.Store(s)
	c.rank.Store(int64(m.WorldRank)) // not before: what it says until then would be taken for that of the rank that is present already
	s.attached[m.WorldRank], s.serving[c.socket] = c, struct{}{}
	c.socket.admit()
	s.logger.Debug("rank attached", "attached", m.WorldRank, "host", m.Host, "pid", m.PID)
	return nil
}

// replace moves an attached rank to another connection, if that belongs to the same join and nothing was said over the old connection. The caller
// holds the lock.
func (s *service) replace(rank int, c *serviceConn, waits []*pb.Taken, welcome func()) bool {
	old := s.attached[rank]
	if old == nil || c.session == "" || old.session != c.session || !old.phase.CompareAndSwap(phaseFresh, phaseReplaced) {
		return false
	}
	s.hub.redirect(rank, waits, c, welcome)
	s.logger.Debug("a rank goes on joining over another connection", "attached", rank)
	old.once.Do(func() { close(old.gone) })
	return true
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
			if c.service.hub.keeper == nil {
				c.lose("the rendezvous service was stopped")
			}
			return
		}
		for _, m := range c.outbox.take() {
			if err := c.send(stream, m.message); err != nil {
				c.breaks(broke(err))
				return
			}
			c.outbox.sent(m)
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

// send passes a message to gRPC, which writes it to the socket later, on a goroutine of its own.
func (c *serviceConn) send(stream grpc.ServerStream, message any) error {
	frames := []any{message}
	if p, ok := message.(pendingOutcome); ok {
		encoded, err := p.outcome.encoded(p.group, p.seq)
		if err != nil {
			return err
		}
		frames = frames[:0]
		for _, frame := range encoded {
			frames = append(frames, frame)
		}
	}
	for _, m := range frames {
		if err := c.socket.send(stream, m); err != nil {
			return err
		}
	}
	return nil
}

// flushed reports whether the socket has written all that was put into the outbox before.
func (c *serviceConn) flushed() bool { return c.outbox.empty() && c.socket.flushed() }

// flush waits until the sockets of all ranks have written what the hub has handed out for them, for at most graceTimeout. Then the system delivers it,
// even if this process exits.
func (s *service) flush() {
	timeout := time.NewTimer(graceTimeout)
	defer timeout.Stop()
	for _, rank := range s.hub.attached() { // it waits until the hub has handed out all answers
		s.mu.Lock()
		c := s.attached[rank]
		s.mu.Unlock()
		if c == nil {
			continue // rank 0, or one that has gone since
		}
		for pause := 20 * time.Microsecond; !c.flushed(); pause = min(2*pause, 5*time.Millisecond) {
			again := time.NewTimer(pause)
			select {
			case <-again.C:
				continue
			case <-c.gone:
			case <-s.stopping:
			case <-timeout.C:
				again.Stop()
				return
			}
			again.Stop()
			break
		}
	}
}

// read takes the messages of a rank that was admitted until the stream ends.
func (c *serviceConn) read(stream grpc.BidiStreamingServer[pb.ClientMessage, pb.ServerMessage]) {
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			c.breaks("it ended its connection without saying goodbye")
			return
		case err != nil:
			c.breaks(broke(err))
			return
		}
		// If the rank does not take its answers they pile up, so nothing more is requested for it meanwhile.
		for c.outbox.full() {
			select {
			case <-c.outbox.room:
			case <-c.gone:
				return
			case <-c.service.stopping:
				return
			}
		}
		// Nor if what the ranks have changed comes faster than it is kept.
		k := c.service.hub.keeper
		for room := k.full(); room != nil; room = k.full() {
			select {
			case <-room:
			case <-k.broken():
				return
			case <-c.gone:
				return
			case <-c.service.stopping:
				return
			}
		}
		if !c.serve(m) {
			return
		}
	}
}

// serve does what one message asks for, and reports whether more may come.
func (c *serviceConn) serve(m *pb.ClientMessage) bool {
	h := c.service.hub
	rank := c.attachedRank()
	if rank < 0 { // what was not admitted says nothing
		return false
	}
	if !c.phase.CompareAndSwap(phaseFresh, phaseSpoken) && c.phase.Load() == phaseReplaced {
		return false
	}
	if err := oversized(m, c.service.options.WorldSize); err != nil {
		c.lose(err.Error())
		return false
	}
	switch b := m.GetBody().(type) {
	case *pb.ClientMessage_Arrival:
		a := b.Arrival
		h.arrive(rank, a.GetGroup(), a.GetSequence(), &arrival{
			kind: kind(a.GetKind()), op: a.GetOp(), root: int(a.GetRoot()), data: a.GetData(),
			refused: a.GetRefused(), refusal: a.GetRefusal(), excuse: a.GetExcuse(), members: toInts(a.GetMembers()), to: c,
			conditions: a.GetConditions(), excuseConditions: a.GetExcuseConditions(),
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
		h.keeper.tell(func() { c.parted.Store(true); c.detach() })
		return false
	case *pb.ClientMessage_Taken:
		h.taken(rank, b.Taken.GetGroup(), b.Taken.GetSequence(), b.Taken.GetRequest())
	default:
		c.lose("it sent a message that this version does not know")
		return false
	}
	return true
}

// broke returns the reason of a loss: how the rank's connection ended. gRPC cancels the streams of a connection that is gone.
func broke(err error) string {
	if status.Code(err) == codes.Canceled {
		return "its connection broke; its process has probably ended"
	}
	return "its connection broke: " + readable(err)
}

func (c *serviceConn) attachedRank() int { return int(c.rank.Load()) }

// oversized refuses what no rank of this package sends: texts and lists beyond their bounds, which the hub would keep.
func oversized(m *pb.ClientMessage, worldSize int) error {
	a, r := m.GetArrival(), m.GetStore()
	// A text that was clipped may have grown when it was made valid.
	const longest = 4 * maxText
	for what, size := range map[string]int{
		"the name of a group": max(len(a.GetGroup()), len(r.GetGroup()), len(m.GetAbandon().GetGroup()), len(m.GetCancelGet().GetGroup()),
			len(m.GetTaken().GetGroup())),
		"an op text":            len(a.GetOp()),
		"the text of a failure": max(len(a.GetRefusal()), len(a.GetExcuse())),
		"a key":                 max(len(r.GetKey()), len(m.GetCancelGet().GetKey())),
		"a reason":              max(len(m.GetAbandon().GetReason()), len(m.GetAbort().GetReason())),
	} {
		if size > longest {
			return fmt.Errorf("it sent %s of %d bytes; allowed are at most %d", what, size, longest)
		}
	}
	if size := max(len(a.GetData()), len(r.GetValue()), len(r.GetOld())); size > MaxBlob {
		return fmt.Errorf("it sent a blob of %d bytes; allowed are at most %d", size, MaxBlob)
	}
	if n := max(len(a.GetConditions()), len(a.GetExcuseConditions())); n > errs.MaxCodes {
		return fmt.Errorf("it sent %d conditions of a failure; allowed are at most %d", n, errs.MaxCodes)
	}
	if len(a.GetMembers()) > worldSize {
		return fmt.Errorf("it asked for a group of %d ranks in a world of %d", len(a.GetMembers()), worldSize)
	}
	return nil
}

// breaks is the end of a connection without a goodbye. A rank that has not spoken yet may come again over another one.
func (c *serviceConn) breaks(reason string) {
	s := c.service
	s.mu.Lock()
	waits := c.attachedRank() >= 0 && c.phase.Load() == phaseFresh && s.attached[c.attachedRank()] == c
	if waits && c.broken.IsZero() {
		c.broken, c.brokeHow = time.Now(), reason
	}
	s.mu.Unlock()
	if !waits {
		c.lose(reason)
	}
}

// lose declares the rank lost.
func (c *serviceConn) lose(reason string) {
	if rank := c.attachedRank(); rank >= 0 && c.phase.Load() != phaseReplaced {
		c.service.hub.lose(rank, reason)
		c.parted.Store(true)
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

// heartbeatInterval is short enough that several beats fit into the silence that is allowed.
func heartbeatInterval(liveness time.Duration) time.Duration { return min(time.Second, liveness/4) }

// beatInterval is for heartbeats to a peer that judges by a liveness timeout of its own, of so many nanoseconds, or does not say by which: what one side
// may take for silence, the other has to come before.
func beatInterval(own time.Duration, theirs int64) time.Duration {
	if theirs > 0 {
		own = min(own, max(time.Duration(theirs), minLivenessTimeout))
	}
	return heartbeatInterval(own)
}

// watchPause is how long a watch pauses between two looks at how long a peer has been silent.
func watchPause(liveness time.Duration) time.Duration { return heartbeatInterval(liveness) / 4 }

// longestSilence is that of a peer that is not lost yet. It leaves time for one more look, so that a loss is known when the liveness timeout is over, and
// not at the next look.
func longestSilence(liveness time.Duration) time.Duration { return liveness - watchPause(liveness) }

// isLate reports whether so much time has passed since the last look that this process did not get to run. Then neither did the goroutines that read from
// the peers, so silence proves nothing.
func isLate(since, liveness time.Duration) bool { return since > 2*heartbeatInterval(liveness) }

// wasSilent says how long a lost peer was silent, and how long it might have been.
func wasSilent(silence, liveness time.Duration) string {
	return fmt.Sprintf("was silent for %v, and the liveness timeout is %v", silence.Round(10*time.Millisecond), liveness)
}

// watch ends the connections of silent ranks.
func (s *service) watch() {
	liveness := s.options.LivenessTimeout
	ticker := time.NewTicker(watchPause(liveness))
	defer ticker.Stop()
	last := time.Now()
	for {
		select {
		case <-s.stopping:
			return
		case <-ticker.C:
		}
		late := isLate(time.Since(last), liveness)
		last = time.Now()
		for _, lost := range s.silent(late) {
			lost.conn.lose(lost.reason)
			// Its writer may be blocked in a full connection.
			if err := lost.conn.socket.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
				s.logger.Debug("closing the connection of a silent rank", "silent", lost.conn.attachedRank(), "error", err)
			}
		}
	}
}

// silentConn is a connection whose rank counts as lost, and why.
type silentConn struct {
	conn   *serviceConn
	reason string
}

// silent returns the connections whose ranks are lost. A rank that has not spoken since it was admitted may have been stopped while it joined, for which
// it has the Timeout too; if its connection broke, it has the LivenessTimeout to connect again.
func (s *service) silent(late bool) []silentConn {
	var silent []silentConn
	s.mu.Lock()
	defer s.mu.Unlock()
	liveness := s.options.LivenessTimeout
	longest := longestSilence(liveness)
	for _, c := range s.attached {
		silence := c.socket.silence()
		switch {
		case late:
			if c.socket.hear(); !c.broken.IsZero() {
				c.broken = time.Now() // the rank could not come again either
			}
		case !c.broken.IsZero():
			if time.Since(c.broken) > longest && c.phase.CompareAndSwap(phaseFresh, phaseSpoken) {
				silent = append(silent, silentConn{c, c.brokeHow})
			}
		case c.phase.Load() == phaseSpoken && silence > longest:
			silent = append(silent, silentConn{c, "it " + wasSilent(silence, liveness)})
		case silence > s.options.Timeout+longest && c.phase.CompareAndSwap(phaseFresh, phaseSpoken): // else the job would never be over
			silent = append(silent, silentConn{c, fmt.Sprintf("it was silent for %v since it was admitted", silence.Round(10*time.Millisecond))})
		}
	}
	return silent
}

// receiveOutcome queues the outcome of a round for the rank.
func (c *serviceConn) receiveOutcome(group string, seq uint64, o *outcome) {
	c.outbox.put(pendingOutcome{group: group, seq: seq, outcome: o})
}

// receiveReply queues the reply to a store request for the rank.
func (c *serviceConn) receiveReply(r *storeReply) {
	c.outbox.put(&pb.ServerMessage{Body: &pb.ServerMessage_Store{Store: replyToWire(r)}})
}

// receiveLoss queues the news of a loss for the rank.
func (c *serviceConn) receiveLoss(l *loss) {
	frame, err := l.encoded()
	if err != nil { // its texts were made valid where they came from
		c.service.logger.Error("encoding a loss", "error", err)
		return
	}
	c.outbox.put(frame)
}
