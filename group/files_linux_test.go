package group

import (
	"context"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// openFiles counts this process's open files.
func openFiles(t testing.TB) int {
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

// keepInherited lets no process that a test starts have what this one has inherited: those that have few files would have none left.
func keepInherited(t testing.TB) {
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, e := range entries {
		if fd, err := strconv.Atoi(e.Name()); err == nil && fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
}

// requireOpenFiles waits until no more than want files are open: connections are closed by other goroutines.
func requireOpenFiles(t testing.TB, want int) {
	t.Helper()
	require.Eventually(t, func() bool { return openFiles(t) <= want }, 30*time.Second, 20*time.Millisecond,
		"more than %d files are open", want)
}

func TestExchangeFileLeaksNothing(t *testing.T) {
	eachKind(t, 2, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		rounds := 1000
		if testing.Short() {
			rounds = 100
		}
		exchange := func(n int) {
			requireNone(t, onAll(groups, func(g *Group) error {
				for i := range n {
					var own *os.File
					if i%5 != 4 || g.Rank() == 0 { // every fifth fails on one rank
						own = os.Stdin
					}
					files, err := g.ExchangeFile(ctx, "round", own)
					if (err == nil) != (i%5 != 4) {
						return err
					}
					if err := closeFiles(files); err != nil {
						return err
					}
				}
				return nil
			}))
		}
		exchange(5)
		before := openFiles(t)
		exchange(rounds)
		requireOpenFiles(t, before)
	})
}

func TestExchangeFileUpToTheLimit(t *testing.T) {
	var old unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	eachKind(t, 3, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
		own, err := os.Open(os.DevNull)
		require.NoError(t, err)
		defer own.Close()
		before := openFiles(t)
		// Every number of files that may still be opened fails in another place.
		for spare := range uint64(9) {
			top, err := unix.FcntlInt(own.Fd(), unix.F_DUPFD_CLOEXEC, 0) // the lowest free number
			require.NoError(t, err)
			require.NoError(t, unix.Close(top))
			limit := unix.Rlimit{Cur: uint64(top) + spare, Max: old.Max}
			require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
			results := make([][]*os.File, len(groups))
			failures := onAll(groups, func(g *Group) error {
				var err error
				results[g.Rank()], err = g.ExchangeFile(ctx, "few", own)
				return err
			})
			require.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old))
			for _, files := range results {
				require.NoError(t, closeFiles(files))
			}
			limited := 0
			for rank, err := range failures {
				require.Equalf(t, failures[0] == nil, err == nil, "rank %d: %v", rank, err)
				var typed *FileLimitError
				if errors.As(err, &typed) {
					limited++
					assert.Equal(t, limit.Cur, typed.Limit)
				}
			}
			if failures[0] != nil {
				require.Positivef(t, limited, "no rank had the typed error: %v", failures)
			}
			t.Logf("%d spare: %v", spare, failures[0])
			requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
			requireOpenFiles(t, before)
		}
	})
}

// TestStrangersAtTheSocket sends what nobody expects to a rank's socket: it is closed, and exchanges go on.
func TestStrangersAtTheSocket(t *testing.T) {
	groups := newJob(t, 2, Options{})
	ctx := testContext(t)
	requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
	c := groups[0].session.files.(*socketCarrier)
	c.mu.Lock()
	address := c.listener.Addr().String()
	c.mu.Unlock()
	before := openFiles(t)
	tag := fileTag{group: worldName, sender: 1}
	text, err := tag.encode()
	require.NoError(t, err)
	for _, message := range [][]byte{[]byte("x"), text, make([]byte, 2*tagLength)} {
		for _, fds := range []int{0, 1, 3} {
			conn, err := net.Dial("unixpacket", address)
			require.NoError(t, err)
			var rights []byte
			if fds > 0 {
				rights = unix.UnixRights(make([]int, fds)...)
			}
			_, _, err = conn.(*net.UnixConn).WriteMsgUnix(message, rights, nil)
			require.NoError(t, err)
			require.NoError(t, conn.Close())
		}
	}
	require.NoError(t, sendNothing(t, address, 3).Close())
	stays := sendNothing(t, address, 3)
	silent, err := net.Dial("unixpacket", address)
	require.NoError(t, err)
	requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
	require.NoError(t, errors.Join(silent.Close(), stays.Close()))
	requireOpenFiles(t, before)
}

// sendNothing sends files in two messages without a byte, which packages net and unix would not do.
func sendNothing(t *testing.T, address string, files int) net.Conn {
	t.Helper()
	conn, err := net.Dial("unixpacket", address)
	require.NoError(t, err)
	rights := unix.UnixRights(make([]int, files)...)
	header := unix.Msghdr{Control: &rights[0]}
	header.SetControllen(len(rights))
	raw, err := conn.(*net.UnixConn).SyscallConn()
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, raw.Control(func(fd uintptr) {
			_, _, errno := unix.Syscall(unix.SYS_SENDMSG, fd, uintptr(unsafe.Pointer(&header)), unix.MSG_NOSIGNAL)
			assert.Truef(t, errno == 0 || errno == unix.EPIPE, "%v", errno) // the other side may have ended it after the first
		}))
	}
	return conn
}

// endingReader tells the end so often before it gives a message.
type endingReader struct{ ends int }

func (r *endingReader) ReadMsgUnix(b, _ []byte) (int, int, int, *net.UnixAddr, error) {
	if r.ends > 0 {
		r.ends--
		return 0, 0, 0, nil, io.EOF
	}
	return copy(b, "message"), 3, 5, nil, nil
}

// TestEndBeforeTheMessage: the kernel may tell the end of a connection before the message that came first.
func TestEndBeforeTheMessage(t *testing.T) {
	for ends, want := range []error{nil, nil, io.EOF} {
		b := make([]byte, 100)
		n, controlled, flags, err := readMessage(&endingReader{ends}, b, nil)
		require.ErrorIs(t, err, want, ends)
		if want == nil {
			assert.Equal(t, "message", string(b[:n]))
			assert.Equal(t, []int{3, 5}, []int{controlled, flags})
		}
	}
}

// TestFileThatCannotBeReceived fails the system call that takes a file: every rank hears of it at once, and not when its time is
// over.
func TestFileThatCannotBeReceived(t *testing.T) {
	groups := newJob(t, 3, Options{})
	ctx := testContext(t)
	c := groups[1].session.files.(*socketCarrier)
	var fails atomic.Pointer[error] // another connection may still be read from when the exchange has failed
	c.read = func(conn messageReader, message, control []byte) (int, int, int, error) {
		if reason := fails.Load(); reason != nil {
			return 0, 0, 0, &net.OpError{Op: "read", Net: "unixpacket", Err: os.NewSyscallError("recvmsg", *reason)}
		}
		return readMessage(conn, message, control)
	}
	for _, reason := range []error{unix.ENOMEM, unix.ENOBUFS, unix.EMFILE} {
		fails.Store(&reason)
		for rank, err := range onAll(groups, func(g *Group) error {
			_, err := g.ExchangeFile(ctx, "unlucky", os.Stdin)
			return err
		}) {
			var vote *VoteError
			require.ErrorAs(t, err, &vote)
			require.Equal(t, 1, vote.Failures[0].Rank)
			require.ErrorContains(t, err, reason.Error())
			require.Equal(t, rank == 1, errors.Is(err, reason))
			require.Equal(t, rank == 1 && reason == unix.EMFILE, errors.As(err, new(*FileLimitError)))
		}
	}
	fails.Store(nil)
	requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
}

// TestFileWhoseConnectionIsLost: a connection that brings a file is accepted, and lost when the net package cannot watch it. Every rank hears why, also
// when the exchange has begun while the socket was waiting for a connection already, and whether or not the sender has seen the end of the connection.
func TestFileWhoseConnectionIsLost(t *testing.T) {
	groups := newJob(t, 3, Options{})
	ctx := testContext(t)
	c := groups[1].session.files.(*socketCarrier)
	var lose atomic.Bool
	c.take = func(l *net.UnixListener) (*net.UnixConn, error) {
		conn, err := l.AcceptUnix()
		if err == nil && lose.CompareAndSwap(true, false) {
			return nil, errors.Join(&net.OpError{Op: "accept", Net: "unixpacket", Err: unix.ENOSPC}, conn.Close())
		}
		return conn, err
	}
	requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) })) // now the socket waits
	lose.Store(true)
	short, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for rank, err := range onAll(groups, func(g *Group) error {
		_, err := g.ExchangeFile(short, "unlucky", os.Stdin)
		return err
	}) {
		require.ErrorAs(t, err, new(*VoteError))
		require.ErrorContains(t, err, "rank 1: ")
		require.ErrorContains(t, err, unix.ENOSPC.Error())
		require.Equal(t, rank == 1, errors.Is(err, unix.ENOSPC))
	}
	requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
}

// losingListener loses each connection that it accepts.
type losingListener struct {
	net.Listener
	err error
}

func (l *losingListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return nil, errors.Join(l.err, conn.Close())
}

// TestConnectionsThatAreLost: a service that can take no connection can say why, until it takes one.
func TestConnectionsThatAreLost(t *testing.T) {
	inner := &losingListener{listenLoopback(t), &net.OpError{Op: "accept", Net: "tcp", Err: unix.ENOSPC}}
	l := newBoundedListener(inner, &defaultLimits, newSession(0, 0, nil, &defaultLimits).logger)
	ended := make(chan error, 1)
	go func() {
		_, err := l.Accept()
		ended <- err
	}()
	require.NoError(t, l.hindrance())
	conn, err := net.Dial("tcp", inner.Addr().String())
	require.NoError(t, err)
	require.Eventually(t, func() bool { return l.hindrance() != nil }, 10*time.Second, time.Millisecond)
	require.ErrorIs(t, l.hindrance(), unix.ENOSPC)
	require.NoError(t, conn.Close())
	require.NoError(t, l.Close())
	require.ErrorIs(t, <-ended, net.ErrClosed)

	l = newBoundedListener(listenLoopback(t), &defaultLimits, newSession(0, 0, nil, &defaultLimits).logger)
	defer l.Close()
	l.noteFailure(unix.ENOSPC)
	conn, err = net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	_, err = l.Accept()
	require.NoError(t, err)
	require.NoError(t, l.hindrance(), "it has taken one since")
}

func TestTagRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		tag := fileTag{
			seq:    rapid.Uint64().Draw(t, "seq"),
			sender: rapid.IntRange(0, MaxWorldSize-1).Draw(t, "sender"),
			group:  rapid.StringN(0, 200, maxText).Draw(t, "group"),
		}
		copy(tag.nonce[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "nonce"))
		text, err := tag.encode()
		require.NoError(t, err)
		again, err := decodeTag(text)
		require.NoError(t, err)
		require.Equal(t, tag, again)
		cut := rapid.IntRange(0, len(text)-1).Draw(t, "cut")
		_, err = decodeTag(text[:cut])
		require.Error(t, err)
		_, err = decodeTag(append(text, 0))
		require.Error(t, err)
	})
	long := fileTag{group: string(make([]byte, math.MaxUint16))}
	_, err := long.encode()
	require.ErrorIs(t, err, ErrInvalid)
}

func FuzzTag(f *testing.F) {
	for _, tag := range []fileTag{{}, {seq: 1, sender: 3, group: "world/0-3#1"}} {
		text, err := tag.encode()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, message []byte) {
		tag, err := decodeTag(message)
		if err != nil {
			return
		}
		again, err := tag.encode()
		require.NoError(t, err)
		require.Equal(t, message, again)
	})
}

// TestExchangeFileGivesUp leaves a rank alone in each round of an exchange.
func TestExchangeFileGivesUp(t *testing.T) {
	eachKind(t, 2, func(t *testing.T, groups []*Group) {
		ctx := testContext(t)
		requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
		before := openFiles(t)
		short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		defer cancel()
		_, err := groups[0].ExchangeFile(short, "alone", os.Stdin)
		var missing *MissingRanksError
		require.ErrorAs(t, err, &missing)
		require.Equal(t, []int{1}, missing.Missing)
		_, err = groups[1].ExchangeFile(ctx, "alone", os.Stdin)
		var abandoned *AbandonedError
		require.ErrorAs(t, err, &abandoned)
		requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
		requireOpenFiles(t, before)
	})
}

// TestSilentConnections: connections that bring nothing, as many as a rank serves and again as many when they are ended, keep no file from it. A rank whose own
// connection is ended with them, because it has not sent yet, connects again.
func TestSilentConnections(t *testing.T) {
	old := fileTimeout
	fileTimeout = time.Hour // nothing but the want of room ends them
	t.Cleanup(func() { fileTimeout = old })
	groups := newJob(t, 2, Options{})
	ctx := testContext(t)
	requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
	before := openFiles(t)
	c := groups[0].session.files.(*socketCarrier)
	address := c.listener.Addr().String()

	over := make(chan struct{})
	var strangers sync.WaitGroup
	var ended atomic.Int64
	for range maxFileConns {
		strangers.Go(func() {
			for {
				conn, err := dialFiles(ctx, address)
				if !assert.NoError(t, err) {
					return
				}
				gone := make(chan struct{})
				go func() {
					_, _ = conn.Read(make([]byte, 1)) // until rank 0 ends it, or the test does
					ended.Add(1)
					close(gone)
				}()
				select {
				case <-gone:
				case <-over:
				}
				assert.NoError(t, conn.Close())
				<-gone
				select {
				case <-over:
					return
				default:
				}
			}
		})
	}
	var slow atomic.Int64
	sender := groups[1].session.files.(*socketCarrier)
	sender.dial = func(ctx context.Context, address string) (*net.UnixConn, error) {
		conn, err := dialFiles(ctx, address)
		if err == nil && slow.Add(1) == 1 {
			_, err := conn.Read(make([]byte, 1)) // until rank 0 has ended it
			assert.ErrorIs(t, err, io.EOF)
		}
		return conn, err
	}
	requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
	assert.Greater(t, slow.Load(), int64(1), "it was sent again")
	assert.NotZero(t, ended.Load())
	close(over)
	strangers.Wait()
	requireOpenFiles(t, before)
}

// TestEndedAfterTheMessage: a file that has been sent is taken, although its connection is ended for its silence before it is read.
func TestEndedAfterTheMessage(t *testing.T) {
	groups := newJob(t, 2, Options{})
	ctx := testContext(t)
	for _, g := range groups {
		c := g.session.files.(*socketCarrier)
		c.read = func(conn messageReader, message, control []byte) (n, controlled, flags int, err error) {
			time.Sleep(2 * fileSilence) // it is old enough
			c.endSilent()
			return readMessage(conn, message, control)
		}
	}
	requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
}

// TestFileOfTheLastMoment: a file that has been sent is taken, although the time of its connection is up before it is looked for, as in a process that was stopped.
func TestFileOfTheLastMoment(t *testing.T) {
	old := fileTimeout
	fileTimeout = time.Millisecond
	t.Cleanup(func() { fileTimeout = old })
	groups := newJob(t, 2, Options{})
	ctx, cancel := context.WithTimeout(testContext(t), 5*time.Second)
	defer cancel()
	for _, g := range groups {
		c := g.session.files.(*socketCarrier)
		c.read = func(conn messageReader, message, control []byte) (n, controlled, flags int, err error) {
			time.Sleep(20 * time.Millisecond) // the process is stopped
			return readMessage(conn, message, control)
		}
	}
	requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
}
