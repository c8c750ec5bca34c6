package group

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// defaultTimeout bounds every collective call whose context does not end sooner.
const defaultTimeout = 60 * time.Second

// defaultLivenessTimeout is how long a rank may be silent before it counts as lost.
const defaultLivenessTimeout = 10 * time.Second

// graceTimeout is how long a rank that gives up waits for the hub to say who was missing.
const graceTimeout = time.Second

// transport carries one rank's calls to the hub, wherever that is. Answers go to the receivers given in the calls; after
// session.serviceLost none may come.
type transport interface {
	arrive(group string, seq uint64, a *arrival)
	abandon(group string, seq uint64, reason string)
	request(group string, req *storeRequest)
	cancelGet(group, key string, id uint64)
	leaveGroup(group string)
	// flush waits until the outcomes that the hub has handed out cannot be lost with this process, for at most graceTimeout.
	flush()
	// abort declares this rank lost.
	abort(reason string)
	// goodbye takes this rank out of the job and frees the transport, whatever it returns.
	goodbye(ctx context.Context) error
}

// session is one rank's part in a job: what all of its groups share.
type session struct {
	worldRank int
	served    bool // the service is no rank's
	timeout   time.Duration
	logger    *slog.Logger
	transport transport
	files     carrier
	requests  atomic.Uint64 // the next store request
	done      chan struct{} // closed when the service is gone
	id        string        // unique to this join
	limits    *limits

	mu     sync.Mutex
	groups map[string]*Group
	broken *PeerLostError // the service is gone
	closed bool
	calls  int   // collective calls under way
	bytes  int64 // that they bring
}

func newSession(worldRank int, timeout time.Duration, logger *slog.Logger, l *limits) *session {
	if timeout <= 0 {
		timeout = defaultTimeout
	}
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &session{
		worldRank: worldRank,
		timeout:   timeout,
		logger:    logger.With("rank", worldRank),
		groups:    make(map[string]*Group),
		done:      make(chan struct{}),
		id:        rand.Text(),
		limits:    l,
	}
}

// add registers g for the rank's news. It is called before the hub knows the group, so that no news is missed.
func (s *session) add(g *Group) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.over(); err != nil {
		return err
	}
	switch {
	case len(s.groups) >= s.limits.groups:
		return &QuotaError{Op: "Sub", What: quotaGroups, Limit: int64(s.limits.groups)}
	case s.groups[g.name] != nil:
		return fmt.Errorf("group %s exists already: %w", g.name, ErrInvalid)
	}
	s.groups[g.name] = g
	return nil
}

// addRefused registers g, which is one too many, for as long as the other ranks are told so: this rank still hears of losses, and of its own end.
func (s *session) addRefused(g *Group) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.over(); err != nil {
		return err
	}
	s.groups[g.name] = g
	return nil
}

// over says why there is no news any more; nil as long as there is. The session is locked.
func (s *session) over() error {
	switch {
	case s.closed:
		return ErrClosed
	case s.broken != nil:
		return s.broken
	}
	return nil
}

// begin counts a collective call with its bytes. It returns the number of calls under way, this one included, and the bytes that were counted, or -1
// if they are too many and were not counted.
func (s *session) begin(size int) (calls int, counted int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls++
	if s.bytes+int64(size) > s.limits.callBytes {
		return s.calls, -1
	}
	s.bytes += int64(size)
	return s.calls, int64(size)
}

// finish undoes what begin counted.
func (s *session) finish(counted int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls--
	s.bytes -= max(counted, 0)
}

func (s *session) remove(g *Group) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.groups, g.name)
}

// receiveLoss marks the groups that the lost rank was in. It does not block.
func (s *session) receiveLoss(l *loss) {
	s.mu.Lock()
	for _, name := range l.groups {
		if g := s.groups[name]; g != nil {
			g.fail(g.peerLost(l))
		}
	}
	s.mu.Unlock()
	s.logger.Warn("rank lost", "lost", l.worldRank, "host", l.host, "pid", l.pid, "reason", l.reason)
}

// serviceLost marks every group: nobody can be reached any more.
func (s *session) serviceLost(reason string) {
	if !s.markBroken(reason) {
		return
	}
	s.logger.Warn("rendezvous service lost", "reason", reason)
}

// markBroken notes that the service is gone, and reports whether that was not known before.
func (s *session) markBroken(reason string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.broken != nil {
		return false
	}
	s.broken = &PeerLostError{Group: worldName, Rank: 0, Reason: reason}
	if world := s.groups[worldName]; s.served {
		s.broken.Rank = -1
	} else if world != nil && len(world.members) > 0 {
		s.broken.Host, s.broken.PID = world.members[0].Host, world.members[0].PID
	}
	for _, g := range s.groups {
		g.fail(s.broken)
	}
	close(s.done)
	return true
}

// close ends every group of the rank.
func (s *session) close() {
	s.mu.Lock()
	s.closed = true
	groups := s.groups
	s.groups = make(map[string]*Group)
	s.mu.Unlock()
	for _, g := range groups {
		g.end()
	}
}

// outcomeChan receives the one outcome of a collective call.
type outcomeChan chan *outcome

func (c outcomeChan) receiveOutcome(_ string, _ uint64, o *outcome) { c <- o }

// replyChan receives the one reply to a store request.
type replyChan chan *storeReply

func (c replyChan) receiveReply(r *storeReply) { c <- r }

// localTransport reaches a hub in the same process.
type localTransport struct {
	hub       *hub
	worldRank int
}

func (t *localTransport) arrive(group string, seq uint64, a *arrival) {
	a.data = slices.Clone(a.data) // it is shared with the other ranks, and the caller may change its own when it gives up
	t.hub.arrive(t.worldRank, group, seq, a)
}

// flush does nothing: the ranks are in this process.
func (t *localTransport) flush() {}

func (t *localTransport) abandon(group string, seq uint64, reason string) {
	t.hub.abandon(t.worldRank, group, seq, reason)
}

func (t *localTransport) request(group string, req *storeRequest) {
	req.value, req.old = slices.Clone(req.value), slices.Clone(req.old)
	t.hub.request(t.worldRank, group, req)
}

func (t *localTransport) cancelGet(group, key string, id uint64) {
	t.hub.cancelGet(t.worldRank, group, key, id)
}

func (t *localTransport) leaveGroup(group string)           { t.hub.leaveGroup(t.worldRank, group) }
func (t *localTransport) abort(reason string)               { t.hub.lose(t.worldRank, reason) }
func (t *localTransport) goodbye(ctx context.Context) error { t.hub.leave(t.worldRank); return nil }
