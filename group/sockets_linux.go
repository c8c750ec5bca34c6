package group

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// fileTimeout bounds how long a connection that brings a file may take to say so.
var fileTimeout = 5 * time.Second

// maxFileConns is how many connections a rank serves at once; further ones wait in the kernel. They may be strangers' of the same user, so where there are as many,
// those that have brought nothing for fileSilence are ended. A rank sends as soon as it has connected; one that was kept from it connects again, fileTries times.
const (
	maxFileConns = 64
	fileSilence  = 10 * time.Millisecond
	fileTries    = 10
)

// socketCarrier passes files between processes over an abstract unix socket of each receiver, which needs no file system and
// is gone with its process. The socket is opened at the first exchange that receives.
type socketCarrier struct {
	session *session
	slots   chan struct{}
	dial    func(ctx context.Context, address string) (*net.UnixConn, error)                        // dialFiles
	take    func(l *net.UnixListener) (*net.UnixConn, error)                                        // its AcceptUnix
	read    func(conn messageReader, message, control []byte) (n, controlled, flags int, err error) // readMessage

	mu       sync.Mutex
	listener *net.UnixListener
	expected map[[16]byte]*socketExchange // by the nonce of their tickets
	conns    map[*net.UnixConn]*fileConn
	closed   bool
	done     chan struct{} // closed by close
	work     sync.WaitGroup
}

// fileConn is a connection that was accepted.
type fileConn struct {
	since time.Time
	spoke bool // its message was read
	ended bool // because it brought nothing, and others may
}

func newFileCarrier(s *session) carrier {
	return &socketCarrier{
		session:  s,
		slots:    make(chan struct{}, maxFileConns),
		dial:     dialFiles,
		take:     (*net.UnixListener).AcceptUnix,
		read:     readMessage,
		expected: make(map[[16]byte]*socketExchange),
		conns:    make(map[*net.UnixConn]*fileConn),
		done:     make(chan struct{}),
	}
}

// fileTicket is what a rank tells the others at the beginning of an exchange.
type fileTicket struct {
	Address string   // of its socket; "" if it receives nothing
	Nonce   [16]byte // to be brought with the file
	NetNS   string   // its network namespace, "" if not known
	PIDNS   string   // the name space that its process id counts in, "" if not known
}

// namespace returns the identity of one of this process's name spaces, or "" where /proc does not say.
func namespace(kind string) string {
	link, err := os.Readlink("/proc/self/ns/" + kind)
	if err != nil {
		return ""
	}
	return link
}

// socketExchange is one exchange under way.
type socketExchange struct {
	carrier *socketCarrier
	parcel  *parcel
	ticket  fileTicket
	tickets []fileTicket // by rank

	mu       sync.Mutex
	ended    bool
	arrived  []arrivedFile // by rank
	missing  int
	failure  error
	refusal  error         // of the last connection that was refused
	progress chan struct{} // closed when nothing is missing, or failure is set
	settled  bool
}

// arrivedFile is a file and the process that sent it.
type arrivedFile struct {
	file *os.File
	pid  int32
}

func (c *socketCarrier) prepare(p *parcel) (exchange, []byte, error) {
	x := &socketExchange{
		carrier:  c,
		parcel:   p,
		ticket:   fileTicket{NetNS: namespace("net"), PIDNS: namespace("pid")},
		arrived:  make([]arrivedFile, p.group.Size()),
		missing:  len(p.senders),
		progress: make(chan struct{}),
	}
	if len(p.senders) > 0 {
		if _, err := rand.Read(x.ticket.Nonce[:]); err != nil {
			return nil, nil, fmt.Errorf("making a nonce: %w", err)
		}
		address, err := c.expect(x)
		if err != nil {
			return nil, nil, err
		}
		x.ticket.Address = address
	}
	text, err := json.Marshal(x.ticket)
	if err != nil {
		x.end()
		return nil, nil, fmt.Errorf("encoding a ticket: %w", err)
	}
	return x, text, nil
}

// expect opens the socket at first need and returns its address.
func (c *socketCarrier) expect(x *socketExchange) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return "", ErrClosed
	}
	if c.listener == nil {
		l, err := listenPackets("@symmem-" + rand.Text())
		if err != nil {
			return "", fmt.Errorf("opening a socket for files: %w", fileLimit(err))
		}
		c.listener = l
		c.work.Go(func() { c.accept(l) })
	}
	c.expected[x.ticket.Nonce] = x
	return c.listener.Addr().String(), nil
}

// listenPackets listens at an address. It is as [net.ListenUnix], which panics when the system does not say what address the socket has.
func listenPackets(address string) (*net.UnixListener, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), address)
	defer f.Close() // FileListener duplicates it
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: address}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	if err := unix.Listen(fd, math.MaxUint16); err != nil { // the kernel lowers it to the most that it allows
		return nil, os.NewSyscallError("listen", err)
	}
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	return l.(*net.UnixListener), nil
}

func (c *socketCarrier) close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	close(c.done)
	var err error
	if c.listener != nil {
		err = c.listener.Close()
	}
	for conn := range c.conns {
		err = errors.Join(err, conn.Close())
	}
	clear(c.conns)
	c.mu.Unlock()
	c.work.Wait()
	return err
}

// accept serves connections until the listener is closed.
func (c *socketCarrier) accept(l *net.UnixListener) {
	for {
		if !c.room() {
			return
		}
		// A connection that could not be accepted concerns the exchanges that existed before. One begun since may find that all is well again; if not,
		// it is there for the next failure.
		waiting := c.pending()
		conn, err := c.take(l)
		if err != nil {
			<-c.slots
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// Most likely this process has too many files open. The exchanges fail now; the socket stays for later ones.
			failed := fmt.Errorf("accepting a connection that brings a file: %w", fileLimit(err))
			if !stillQueued(err) {
				waiting = c.pending() // the file is lost, and may be that of an exchange begun since
			}
			for _, x := range waiting {
				x.fail(failed)
			}
			pause := time.NewTimer(10 * time.Millisecond)
			select {
			case <-pause.C:
			case <-c.done:
				pause.Stop()
				return
			}
			continue
		}
		if !c.track(conn) {
			<-c.slots
			return
		}
		c.work.Go(func() {
			defer func() { <-c.slots }()
			err := c.receive(conn)
			if c.untrack(conn) {
				err = errors.Join(err, conn.Close())
			}
			if err != nil {
				c.session.logger.Warn("refused a passed file", "error", err)
				for _, x := range c.pending() {
					x.refused(err)
				}
			}
		})
	}
}

// room waits until one more connection can be served, and keeps a slot for it; false if the carrier is closed.
func (c *socketCarrier) room() bool {
	for {
		wait := time.NewTimer(fileSilence)
		select {
		case c.slots <- struct{}{}:
			wait.Stop()
			return true
		case <-c.done:
			wait.Stop()
			return false
		case <-wait.C:
			c.endSilent()
		}
	}
}

// endSilent ends the connections that have brought nothing for too long. What one has sent just now is still read, and one that sends afterwards is told.
func (c *socketCarrier) endSilent() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn, f := range c.conns {
		if f.spoke || f.ended || time.Since(f.since) < fileSilence {
			continue
		}
		f.ended = true
		if err := conn.CloseRead(); err != nil {
			c.session.logger.Debug("ending a connection for files", "error", err)
		}
	}
}

// heard notes that a message was read from a connection, or reports, if it was not, that the connection was ended for want of one.
func (c *socketCarrier) heard(conn *net.UnixConn, message bool) (ended bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := c.conns[conn]
	if f == nil {
		return false // the carrier was closed
	}
	f.spoke = message
	return f.ended && !message
}

// stillQueued reports whether the connection that could not be accepted can be accepted later: accepting it is what has failed. Otherwise the net package
// had it, and has closed it.
func stillQueued(err error) bool {
	call, ok := errors.AsType[*os.SyscallError](err)
	return ok && strings.HasPrefix(call.Syscall, "accept")
}

// track remembers a connection so that close can end it, or closes it if that has happened.
func (c *socketCarrier) track(conn *net.UnixConn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		if err := conn.Close(); err != nil {
			c.session.logger.Debug("closing a connection for files", "error", err)
		}
		return false
	}
	c.conns[conn] = &fileConn{since: time.Now()}
	return true
}

// untrack forgets a connection, and reports whether it is still to be closed.
func (c *socketCarrier) untrack(conn *net.UnixConn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, ok := c.conns[conn]
	delete(c.conns, conn)
	return ok
}

func (c *socketCarrier) failAll(err error) {
	for _, x := range c.pending() {
		x.fail(err)
	}
}

// pending returns the exchanges that expect files.
func (c *socketCarrier) pending() []*socketExchange {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.expected))
}

// receive takes one file from a connection and passes it to the exchange that expects it. A file that no exchange expects is closed.
func (c *socketCarrier) receive(conn *net.UnixConn) error {
	sender, err := peerOf(conn)
	if err != nil {
		if !errors.Is(err, errOtherUser) && !senderFailed(err) {
			c.failAll(err)
		}
		return err
	}
	if err := conn.SetDeadline(time.Now().Add(fileTimeout)); err != nil {
		return fmt.Errorf("setting a deadline: %w", err)
	}
	message := make([]byte, tagLength+1)
	control := make([]byte, unix.CmsgSpace(4*4)) // room for more than one, to see that there is only one
	n, controlled, flags, err := c.read(conn, message, control)
	if errors.Is(err, os.ErrDeadlineExceeded) && conn.CloseRead() == nil && conn.SetDeadline(time.Time{}) == nil {
		// This process may not have got to run, and what was sent meanwhile has not been looked for. What is sent from now on, its sender is told.
		if last, lastControlled, lastFlags, lastErr := c.read(conn, message, control); lastErr == nil {
			n, controlled, flags, err = last, lastControlled, lastFlags, nil
		}
	}
	if c.heard(conn, err == nil) {
		err = fmt.Errorf("a connection brought nothing while %d were open: %w", maxFileConns, err)
	}
	if err != nil {
		err = fmt.Errorf("receiving a file: %w", fileLimit(err))
		if !senderFailed(err) {
			c.failAll(err)
		}
		return err
	}
	files, err := takeFiles(control[:controlled])
	if err == nil && flags&unix.MSG_TRUNC != 0 {
		err = fmt.Errorf("receiving a file: the message is longer than %d bytes", tagLength)
	}
	var tag fileTag
	if err == nil {
		tag, err = decodeTag(message[:n])
	}
	if err != nil {
		return errors.Join(err, closeFiles(files))
	}
	c.mu.Lock()
	x := c.expected[tag.nonce]
	c.mu.Unlock()
	if x == nil {
		return errors.Join(fmt.Errorf("rank %d brings a file that no exchange expects", tag.sender), closeFiles(files))
	}
	switch {
	case len(files) == 0 && flags&unix.MSG_CTRUNC != 0:
		err = fmt.Errorf("receiving a file: %w", fileLimit(unix.EMFILE)) // the kernel dropped it for want of a descriptor
		x.fail(err)
		return err
	case len(files) != 1 || flags&unix.MSG_CTRUNC != 0:
		return errors.Join(fmt.Errorf("rank %d brings %d files in one message, not 1", tag.sender, len(files)), closeFiles(files))
	}
	if err := x.accept(tag, arrivedFile{file: files[0], pid: sender.Pid}); err != nil {
		return errors.Join(err, closeFiles(files))
	}
	return nil
}

// senderFailed reports whether a message could not be read because of its sender, who may be a stranger: it sent nothing, or went away. Any other
// reason lies with this process, and the file that was sent is lost.
func senderFailed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed)
}

// messageReader is what readMessage needs of a connection.
type messageReader interface {
	ReadMsgUnix(b, oob []byte) (n, oobn, flags int, addr *net.UnixAddr, err error)
}

// readMessage reads one message. The end of the connection is believed only when it is reported twice: where the sender writes and closes while a
// read finds nothing yet, Linux (net/unix/af_unix.c, __unix_dgram_recvmsg, at least up to 6.18) looks for a message first and for the end second, and
// reports the end although the message is there.
//
// Package net takes a message without a byte for the end too. Files that came with it are open in this process all the same, so it is a message here.
func readMessage(conn messageReader, message, control []byte) (n, controlled, flags int, err error) {
	for range 2 {
		n, controlled, flags, _, err = conn.ReadMsgUnix(message, control)
		if !errors.Is(err, io.EOF) {
			break
		}
		if controlled > 0 || flags&unix.MSG_CTRUNC != 0 {
			return n, controlled, flags, nil
		}
	}
	return n, controlled, flags, err
}

var errOtherUser = errors.New("another user")

// peerOf returns the process at the other end, which must be of this user or root's.
func peerOf(conn *net.UnixConn) (*unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("asking who is at the other end: %w", err)
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return nil, fmt.Errorf("asking who is at the other end: %w", err)
	}
	if credErr != nil {
		return nil, fmt.Errorf("asking who is at the other end: %w", credErr)
	}
	if own := os.Geteuid(); cred.Uid != uint32(own) && cred.Uid != 0 {
		return nil, fmt.Errorf("process %d at the other end belongs to %w, %d; allowed are this process's user %d, and root",
			cred.Pid, errOtherUser, cred.Uid, own)
	}
	return cred, nil
}

// takeFiles returns the files of a control message, owned by the caller even if there is an error.
func takeFiles(control []byte) ([]*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, fmt.Errorf("reading a control message: %w", err)
	}
	var files []*os.File
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return files, fmt.Errorf("reading passed files: %w", err)
		}
		for _, fd := range fds { // closed on exec already: the net package asks the kernel for it
			files = append(files, os.NewFile(uintptr(fd), "passed file"))
		}
	}
	return files, nil
}

// accept takes a file that is expected.
func (x *socketExchange) accept(tag fileTag, a arrivedFile) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	rank := -1
	for _, r := range x.parcel.senders {
		if x.parcel.group.world[r] == tag.sender {
			rank = r
		}
	}
	switch {
	case x.ended:
		return fmt.Errorf("rank %d brings a file to an exchange that is over", tag.sender)
	case rank < 0 || tag.group != x.parcel.group.name || tag.seq != x.parcel.seq:
		return fmt.Errorf("rank %d brings a file for call %d of group %s, which this exchange is not", tag.sender, tag.seq, clip(tag.group))
	case x.arrived[rank].file != nil:
		return fmt.Errorf("rank %d brings a second file", tag.sender)
	}
	x.arrived[rank] = a
	x.missing--
	x.settle()
	return nil
}

func (x *socketExchange) fail(err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.failure == nil && !x.settled {
		x.failure = err
		x.settle()
	}
}

func (x *socketExchange) failed() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.failure
}

// refused notes what was wrong with a connection that came while the exchange was waiting. It may have been a stranger's.
func (x *socketExchange) refused(err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.refusal = err
}

// settle wakes collect. The caller holds the lock.
func (x *socketExchange) settle() {
	if !x.settled && (x.missing == 0 || x.failure != nil) {
		x.settled = true
		close(x.progress)
	}
}

func (x *socketExchange) meet(tickets [][]byte) error {
	x.tickets = make([]fileTicket, len(tickets))
	for rank, text := range tickets {
		if err := json.Unmarshal(text, &x.tickets[rank]); err != nil {
			return fmt.Errorf("reading the ticket of rank %d: %w", rank, err)
		}
		if theirs := x.tickets[rank].NetNS; theirs != "" && x.ticket.NetNS != "" && theirs != x.ticket.NetNS {
			return fmt.Errorf("rank %d runs in another network namespace (%s, here %s), which files cannot be passed to; "+
				"give the containers of one host one network namespace: %w", rank, theirs, x.ticket.NetNS, ErrUnsupported)
		}
	}
	return nil
}

func (x *socketExchange) deliver(ctx context.Context) error {
	if x.parcel.send == nil {
		return nil
	}
	ctx, cancel := x.untilLost(ctx)
	defer cancel()
	for rank, ticket := range x.tickets {
		if rank == x.parcel.group.rank || ticket.Address == "" {
			continue
		}
		if err := x.sendTo(ctx, rank, ticket); err != nil {
			return fmt.Errorf("sending the file to rank %d: %w", rank, err)
		}
	}
	return nil
}

// untilLost returns a context that a loss ends too. cancel frees what that takes.
func (x *socketExchange) untilLost(ctx context.Context) (_ context.Context, cancel func()) {
	ctx, end := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-x.parcel.group.stopped:
			end()
		case <-ctx.Done():
		}
	})
	return ctx, func() { end(); watch.Wait() }
}

// sendTo connects to one rank and leaves the file in its socket. It does not wait for the rank to take it. A rank that has too many connections may end this one before
// it has brought the file, and takes another. One that waits for other files on their way may be ended often.
func (x *socketExchange) sendTo(ctx context.Context, rank int, ticket fileTicket) error {
	crowd := ctx
	if deadline, bounded := ctx.Deadline(); bounded {
		var cancel context.CancelFunc
		crowd, cancel = context.WithTimeout(ctx, time.Until(deadline)/2)
		defer cancel()
	}
	for try := 1; ; {
		err := x.tryToSend(ctx, crowd, rank, ticket)
		switch {
		case !errors.Is(err, unix.EPIPE) || ctx.Err() != nil:
			return err
		case errors.Is(err, unix.ETOOMANYREFS) && crowd.Err() == nil:
		case try == fileTries:
			return err
		default:
			try++
		}
	}
}

func (x *socketExchange) tryToSend(ctx, crowd context.Context, rank int, ticket fileTicket) error {
	g := x.parcel.group
	tag := fileTag{nonce: ticket.Nonce, seq: x.parcel.seq, sender: g.world[g.rank], group: g.name}
	message, err := tag.encode()
	if err != nil {
		return err
	}
	conn, err := x.carrier.dial(ctx, ticket.Address)
	if err != nil {
		return err
	}
	stop := interruptible(ctx, conn)
	defer stop()
	receiver, err := peerOf(conn)
	if err == nil {
		err = x.checkProcess(rank, receiver.Pid)
	}
	if err == nil {
		err = sendFile(crowd, conn, message, x.parcel.send)
	}
	if ctx.Err() != nil {
		err = errors.Join(ctx.Err(), err)
	}
	return errors.Join(err, conn.Close())
}

// checkProcess refuses a process other than the rank's, as far as the process ids can be compared.
func (x *socketExchange) checkProcess(rank int, pid int32) error {
	want := x.parcel.group.members[rank].PID
	if theirs := x.tickets[rank].PIDNS; theirs == "" || theirs != x.ticket.PIDNS || int(pid) == want {
		return nil
	}
	return fmt.Errorf("process %d is at the other end, and rank %d is process %d", pid, rank, want)
}

// dialFiles connects to a rank's socket; its queue of connections may be full for a moment.
func dialFiles(ctx context.Context, address string) (*net.UnixConn, error) {
	var dialer net.Dialer
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		conn, err := dialer.DialContext(ctx, "unixpacket", address)
		if err == nil {
			return conn.(*net.UnixConn), nil //nolint:forcetypeassert // what a dialer gives for this network
		}
		if errors.Is(err, unix.ECONNREFUSED) {
			return nil, fmt.Errorf("%w; is the rank in another network namespace (a container of its own)?", err)
		}
		if !errors.Is(err, unix.EAGAIN) {
			return nil, fileLimit(err)
		}
		if !rest(ctx, pause) {
			return nil, errors.Join(ctx.Err(), err)
		}
	}
}

// sendFile writes one message with the file. The system allows a user only so many files at a time that were sent and not taken yet, whoever has sent them: a file beyond that
// waits for the others until crowd ends, which is before the time is over, so that the ranks can still be told why it has not come.
func sendFile(crowd context.Context, conn *net.UnixConn, message []byte, f *os.File) error {
	var crowded error
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		var writeErr error
		if err := withDescriptor(f, func(fd int) {
			_, _, writeErr = conn.WriteMsgUnix(message, unix.UnixRights(fd), nil)
		}); err != nil {
			return err
		}
		switch {
		case writeErr == nil:
			return nil
		case !errors.Is(writeErr, unix.ETOOMANYREFS):
			return errors.Join(writeErr, crowded)
		}
		crowded = &FileLimitError{Limit: openFileLimit(), Err: fmt.Errorf("as many of this user are on their way through sockets, to processes that do not take them: %w", writeErr)}
		if !rest(crowd, pause) {
			return crowded
		}
	}
}

func (x *socketExchange) collect(ctx context.Context) ([]*os.File, error) {
	if len(x.parcel.senders) > 0 {
		select {
		case <-x.progress:
		case <-x.parcel.group.stopped:
		case <-ctx.Done():
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case x.failure != nil:
		return nil, x.failure
	case x.missing > 0 && x.parcel.group.Err() != nil:
		return nil, x.parcel.group.Err()
	case x.missing > 0 && x.refusal != nil:
		return nil, fmt.Errorf("%d files have not come: %w; a connection was refused meanwhile: %w", x.missing, ctx.Err(), x.refusal)
	case x.missing > 0:
		return nil, fmt.Errorf("%d files have not come: %w", x.missing, ctx.Err())
	}
	for _, rank := range x.parcel.senders {
		if err := x.checkProcess(rank, x.arrived[rank].pid); err != nil {
			return nil, err
		}
	}
	files := make([]*os.File, len(x.arrived))
	for rank := range x.arrived {
		files[rank], x.arrived[rank].file = x.arrived[rank].file, nil
	}
	return files, nil
}

func (x *socketExchange) end() {
	x.carrier.mu.Lock()
	delete(x.carrier.expected, x.ticket.Nonce)
	x.carrier.mu.Unlock()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.ended = true
	for rank, a := range x.arrived {
		if a.file != nil {
			x.arrived[rank].file = nil
			if err := a.file.Close(); err != nil {
				x.carrier.session.logger.Warn("closing a passed file that was not claimed", "error", err)
			}
		}
	}
}
