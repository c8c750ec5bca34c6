package group

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// heardConn notes when it was last read from: every byte is a sign of life, also one of a message that takes minutes to come.
type heardConn struct {
	net.Conn
	heard atomic.Int64 // time since the start of the process
}

func (c *heardConn) hear() { c.heard.Store(int64(time.Since(processStart))) }

// silence returns how long ago the last byte came.
func (c *heardConn) silence() time.Duration {
	return time.Since(processStart) - time.Duration(c.heard.Load())
}

func (c *heardConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.hear()
	}
	return n, err
}

// Write tells the peer that no more will come when it fails. gRPC leaves a connection whose writing has failed to its reading, and after a write that
// alone has failed both sides would read until their deadlines. What the peer has sent before, such as why it ends the connection, can still be read.
func (c *heardConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) { // that is of the handshake, and whoever has set it closes the connection
		if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite() // it fails if the connection is gone, which both sides know then
		} else {
			_ = c.Close()
		}
	}
	return n, err
}

// The time is monotonic, so setting the clock does not make a rank look silent.
var processStart = time.Now()

// boundedListener accepts the connections of the rendezvous service. Until a rank is admitted on a connection, which may be
// anyone's, it may take little: there are few such connections at a time, each has a deadline, and little is read from it. Where
// others wait for a place, the deadline is short, and whoever holds the most places loses one first. A source that holds many of
// them has the shortest deadline: the system's queue in front of Accept does not know sources, so what somebody puts into it has to be
// taken out as fast as it comes, or nobody else's turn comes.
type boundedListener struct {
	net.Listener
	limits *limits
	logger *slog.Logger
	most   int           // pending connections
	done   chan struct{} // closed by Close
	room   chan struct{} // holds a token after a place became free

	mu      sync.Mutex
	closed  bool
	pending map[*serviceSocket]struct{} // on which no rank is admitted yet
	sources map[string]int              // how many of them come from where
	known   map[string]time.Time        // when a rank was last admitted from there
	evicted int                         // connections that were ended for others
	lent    int64                       // bytes beyond the bound that were read from them
	spare   *os.File                    // is closed to accept a connection when no further file can be opened
	full    *FileLimitError             // the last time that there were too many open files
	refused int                         // connections that were refused for that
	failure error                       // of the last connection, if it could not be taken for another reason
}

// serviceSocket is an accepted connection.
type serviceSocket struct {
	heardConn
	listener  *boundedListener
	source    string // where it comes from
	began     time.Time
	proven    atomic.Bool // its peer knows the token
	evicted   atomic.Bool // it was ended for others
	admitted  atomic.Bool
	service   atomic.Pointer[service] // that of the rank that was admitted
	received  atomic.Int64            // bytes, until a rank is admitted
	returns   atomic.Bool             // a rank may come back on it
	lent      int64                   // guarded by the listener's lock: how many bytes beyond the bound were read
	claimed   bool                    // likewise: a rank is being admitted, and nobody ends the connection meanwhile
	connected atomic.Bool             // a rank has said hello on it
	liveness  atomic.Int64            // nanoseconds of silence after which the rank counts the service as lost, if it says so
	due       atomic.Int64            // bytes of the messages that gRPC was given to send
	messages  atomic.Int64            // bytes of messages that the system has taken to send
}

var errUnproven = errors.New("too much was sent before a rank was admitted")

func newBoundedListener(l net.Listener, lim *limits, logger *slog.Logger) *boundedListener {
	b := &boundedListener{
		Listener: l, limits: lim, logger: logger, most: lim.pendingLimit(), done: make(chan struct{}), room: make(chan struct{}, 1),
		pending: make(map[*serviceSocket]struct{}), sources: make(map[string]int),
		known: make(map[string]time.Time),
	}
	b.keepSpare()
	return b
}

// Accept returns the next connection. It fails only when the listener is closed: other errors, such as too many open files, are temporary.
func (l *boundedListener) Accept() (net.Conn, error) {
	const shortest, longest = 10 * time.Millisecond, time.Second
	pause := shortest
	for {
		if !l.waitForRoom() {
			return nil, net.ErrClosed
		}
		conn, err := l.Listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return nil, err
		case err == nil && l.keepSpare():
			l.noteFailure(nil)
			if c := l.track(conn); c != nil {
				return c, nil
			}
			return nil, net.ErrClosed
		case err == nil:
			l.turnAway(conn)
			continue
		}
		l.noteFailure(err)
		// Closing the spare file frees a descriptor to accept one connection with, so that the peer can be told what is wrong.
		l.noteFull(err)
		if l.dropSpare() {
			continue
		}
		l.logger.Warn("accepting a connection", "error", fileLimit(err))
		timer := time.NewTimer(pause)
		pause = min(2*pause, longest)
		select {
		case <-timer.C:
		case <-l.done:
			timer.Stop()
			return nil, net.ErrClosed
		}
	}
}

// Close ends Accept, and every connection on which no rank was admitted.
func (l *boundedListener) Close() error {
	l.mu.Lock()
	first := !l.closed
	l.closed = true
	l.mu.Unlock()
	if !first {
		return net.ErrClosed
	}
	close(l.done)
	err := l.Listener.Close()
	l.dropSpare()
	return errors.Join(err, l.closePending(0))
}

// closePending ends the connections on which no rank was admitted in time.
func (l *boundedListener) closePending(age time.Duration) error {
	var old []*serviceSocket
	l.mu.Lock()
	for c := range l.pending {
		if time.Since(c.began) >= age && l.drop(c) {
			old = append(old, c)
		}
	}
	l.mu.Unlock()
	if len(old) > 0 {
		signal(l.room)
	}
	var err error
	for _, c := range old {
		if closeErr := c.Close(); closeErr != nil && !errors.Is(closeErr, net.ErrClosed) {
			err = errors.Join(err, closeErr)
		}
	}
	return err
}

func (l *boundedListener) track(conn net.Conn) *serviceSocket {
	c := &serviceSocket{heardConn: heardConn{Conn: conn}, listener: l, began: time.Now()}
	c.source = sourceOf(conn.RemoteAddr())
	l.mu.Lock()
	closed := l.closed
	if !closed {
		l.pending[c] = struct{}{}
		l.sources[c.source]++
	}
	l.mu.Unlock()
	if closed {
		if err := conn.Close(); err != nil {
			l.logger.Debug("closing a connection", "error", err)
		}
		return nil
	}
	return c
}

// sourceOf returns what connections of one peer have in common: the address, and of IPv6 the network, in which a peer may have as many as it likes.
func sourceOf(a net.Addr) string {
	at, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return a.String()
	}
	ip := at.Addr().Unmap()
	if ip.Is4() {
		return ip.String()
	}
	network, err := ip.Prefix(64)
	if err != nil {
		return ip.String()
	}
	return network.String()
}

// waitForRoom waits until one more connection may be pending, and reports false when the listener is closed.
func (l *boundedListener) waitForRoom() bool {
	for {
		l.mu.Lock()
		if l.closed {
			l.mu.Unlock()
			return false
		}
		if len(l.pending) < l.most {
			l.mu.Unlock()
			return true
		}
		slowest, wait := l.slowest()
		l.mu.Unlock()
		if slowest != nil {
			l.evict(slowest)
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-l.room:
		case <-timer.C:
		case <-l.done:
		}
		timer.Stop()
	}
}

// evict ends a connection on which no rank was admitted, because others wait for its place. If one was since the connection was chosen, it stays.
func (l *boundedListener) evict(c *serviceSocket) {
	l.mu.Lock()
	if !l.drop(c) {
		l.mu.Unlock()
		return
	}
	l.evicted++
	first := l.evicted == 1
	c.evicted.Store(true)
	l.mu.Unlock()
	level := slog.LevelDebug // the first one tells all, and there may be thousands a second
	if first {
		level = slog.LevelWarn
	}
	l.logger.Log(context.Background(), level, "ended a connection on which no rank was admitted in time while others waited", "from", c.RemoteAddr(),
		"time", time.Since(c.began), "connections at a time", l.most)
	if err := c.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		l.logger.Debug("closing a connection", "error", err)
	}
}

// slowest returns the pending connection to close, or for how long none has to be closed. It picks the oldest of those whose time is up, from the
// source that has the most, so that a source that opens many cannot keep out one that opens few. The caller holds the lock.
func (l *boundedListener) slowest() (*serviceSocket, time.Duration) {
	var worst *serviceSocket
	wait := l.limits.patience
	for c := range l.pending {
		if c.claimed {
			continue
		}
		if left := l.allowed(c) - time.Since(c.began); left > 0 {
			wait = min(wait, left)
			continue
		}
		if worst == nil || l.sources[c.source] > l.sources[worst.source] ||
			l.sources[c.source] == l.sources[worst.source] && c.began.Before(worst.began) {
			worst = c
		}
	}
	return worst, wait
}

// allowed returns for how long a connection may be pending while others wait. A rank may have its address in common with a source of many, so these
// have a moment too: a rank that is not hindered goes on within it. What is left to do after that takes the service's time as well as the rank's, and is
// not cut off so soon. Neither are connections from where ranks were just admitted, most likely from a host that starts many of them, or the service would
// have the same work again and again.
func (l *boundedListener) allowed(c *serviceSocket) time.Duration {
	said, greeting := c.received.Load(), int64(prologueLength)
	patience := l.limits.patience
	if said < greeting { // a rank sends its greeting as soon as it is connected
		patience /= 10
	}
	switch {
	case l.sources[c.source] <= max(1, l.most/4) || c.proven.Load():
		return patience
	case said <= greeting && time.Since(l.known[c.source]) > l.limits.patience:
		return min(patience, l.limits.moment(l.most))
	}
	return min(patience, l.limits.patience/4)
}

// keepSpare opens the spare file if it is not open, and reports whether it is.
func (l *boundedListener) keepSpare() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.spare != nil || l.closed {
		return true
	}
	f, err := os.Open(os.DevNull)
	if err != nil {
		l.noteFullLocked(err)
		// An error other than too many open files says nothing about connections.
		return fileLimit(err) == err //nolint:errorlint // whether it was changed
	}
	l.spare = f
	return true
}

// dropSpare closes the spare file, and reports whether there was one.
func (l *boundedListener) dropSpare() bool {
	l.mu.Lock()
	f := l.spare
	l.spare = nil
	l.mu.Unlock()
	if f == nil {
		return false
	}
	if err := f.Close(); err != nil {
		l.logger.Debug("closing the spare file", "error", err)
	}
	return true
}

func (l *boundedListener) noteFull(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.noteFullLocked(err)
}

func (l *boundedListener) noteFullLocked(err error) {
	if full, ok := errors.AsType[*FileLimitError](fileLimit(err)); ok {
		l.full = full
	}
}

func (l *boundedListener) noteFailure(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failure = err
}

// hindrance returns an error if connections were refused, or could not even be accepted, because this process may open no further file, or if the last
// could not be taken for another reason. Otherwise it returns nil.
func (l *boundedListener) hindrance() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.full == nil && l.failure != nil:
		return fmt.Errorf("the rendezvous service could not take connections: %w", l.failure)
	case l.full == nil:
		return nil
	case l.refused == 0:
		return fmt.Errorf("the rendezvous service could not take connections: %w", l.full)
	}
	return fmt.Errorf("the rendezvous service turned %d connections away: %w", l.refused, l.full)
}

// turnAway tells the peer that there are too many open files. It reads the greeting first, because closing a connection that has unread bytes
// discards what was sent over it.
func (l *boundedListener) turnAway(conn net.Conn) {
	const moment = 50 * time.Millisecond
	err := conn.SetDeadline(time.Now().Add(moment))
	if err == nil {
		_, err = io.ReadFull(conn, make([]byte, prologueLength))
	}
	if err == nil {
		_, err = conn.Write(binary.BigEndian.AppendUint64(prologue(modeFull), openFileLimit()))
	}
	err = errors.Join(err, conn.Close())
	l.mu.Lock()
	l.refused++
	first, full := l.refused == 1, l.full
	l.mu.Unlock()
	level := slog.LevelDebug // the first one tells all
	if first {
		level = slog.LevelWarn
	}
	l.logger.Log(context.Background(), level, "turned a connection away", "from", conn.RemoteAddr(), "reason", full, "error", err)
	l.keepSpare()
}

func (l *boundedListener) forget(c *serviceSocket) {
	l.mu.Lock()
	ok := l.remove(c)
	l.mu.Unlock()
	if ok {
		signal(l.room)
	}
}

// remove takes a connection out of the pending ones, and reports whether it was one. The caller holds the lock.
func (l *boundedListener) remove(c *serviceSocket) bool {
	if _, pending := l.pending[c]; !pending {
		return false
	}
	delete(l.pending, c)
	if l.sources[c.source]--; l.sources[c.source] == 0 {
		delete(l.sources, c.source)
	}
	l.lent -= c.lent
	c.lent = 0
	return true
}

// drop takes a connection out of the pending ones that is to be closed, so that no rank is admitted on it any more. It reports false if one was, or is being
// admitted: closing the connection then would lose that rank. The caller holds the lock.
func (l *boundedListener) drop(c *serviceSocket) bool { return !c.claimed && l.remove(c) }

// claim keeps a connection from being ended for others while a rank is admitted on it. It reports false if it has been already.
func (c *serviceSocket) claim() bool {
	l := c.listener
	l.mu.Lock()
	defer l.mu.Unlock()
	_, c.claimed = l.pending[c]
	return c.claimed
}

// unclaim takes claim back, as no rank was admitted.
func (c *serviceSocket) unclaim() {
	l := c.listener
	l.mu.Lock()
	defer l.mu.Unlock()
	c.claimed = false
}

// admit removes the bounds from a connection on which a rank was admitted.
func (c *serviceSocket) admit() {
	c.admitted.Store(true)
	l := c.listener
	l.mu.Lock()
	l.known[c.source] = time.Now()
	l.mu.Unlock()
	l.forget(c)
}

func (c *serviceSocket) Read(b []byte) (int, error) {
	n, err := c.heardConn.Read(b)
	if n > 0 && !c.admitted.Load() && !c.may(c.received.Add(int64(n))) {
		return 0, closing(errUnproven, c)
	}
	return n, err
}

// may reports whether so many bytes may be read before a rank is admitted. A rank that comes back with very much under way says more than others; where
// many do at the same time, those beyond the bound of all have to come again.
func (c *serviceSocket) may(received int64) bool {
	l := c.listener
	over := received - l.limits.unproven
	switch {
	case over <= 0:
		return true
	case !c.returns.Load() || received > l.limits.returning:
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, pending := l.pending[c]; !pending { // a rank was admitted meanwhile, or the connection is closed
		return true
	}
	if l.lent+over-c.lent > l.limits.lent {
		return false
	}
	l.lent += over - c.lent
	c.lent = over
	return true
}

// Close ends the connection.
func (c *serviceSocket) Close() error {
	c.listener.forget(c)
	return c.Conn.Close()
}
