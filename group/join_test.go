package group

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group/internal/pb"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/testneed"
)

// listenLoopback returns a listening socket on a port that the system picks.
func listenLoopback(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	return l
}

// newJob joins n ranks in this process, each over its own connection, and closes them when the test ends.
func newJob(t testing.TB, n int, base Options) []*Group {
	t.Helper()
	groups, failures := tryJob(t, n, base)
	requireNone(t, failures)
	t.Cleanup(func() { leaveAll(t, groups) })
	return groups
}

func tryJob(t testing.TB, n int, base Options) ([]*Group, []error) {
	t.Helper()
	l := listenLoopback(t)
	base.WorldSize, base.Addr = n, l.Addr().String()
	return joinAll(t, n, func(rank int) *Options {
		o := base
		o.Rank, o.LocalRank = rank, rank
		if rank == 0 {
			o.Listener = l
		}
		return &o
	})
}

// joinAll joins n ranks at once, each with its options.
func joinAll(t testing.TB, n int, options func(rank int) *Options) ([]*Group, []error) {
	t.Helper()
	ctx := testContext(t)
	groups, failures := make([]*Group, n), make([]error, n)
	var wait sync.WaitGroup
	for rank := range n {
		o := options(rank)
		wait.Go(func() { groups[rank], failures[rank] = Join(ctx, o) })
	}
	wait.Wait()
	return groups, failures
}

// leaveAll closes all ranks at once, as rank 0 waits for the others.
func leaveAll(t testing.TB, groups []*Group) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	defer cancel()
	for rank, err := range onAll(groups, func(g *Group) error { return g.Close(ctx) }) {
		if !errors.Is(err, ErrClosed) {
			assert.NoErrorf(t, err, "closing rank %d", rank)
		}
	}
}

func TestJoin(t *testing.T) {
	for _, token := range []string{"", "secret"} {
		t.Run("token="+token, func(t *testing.T) {
			groups := newJob(t, 4, Options{Job: "j", Token: token})
			ctx := testContext(t)
			requireNone(t, onAll(groups, func(g *Group) error {
				if g.Size() != 4 || len(g.Members()) != 4 || g.Members()[3].LocalRank != 3 || g.Members()[1].Process != processID() {
					return fmt.Errorf("members: %+v", g.Members())
				}
				for round := range 20 {
					all, err := g.AllGather(ctx, "x", []byte(strings.Repeat(fmt.Sprint(g.Rank()), round)))
					if err != nil {
						return err
					}
					for rank, b := range all {
						if string(b) != strings.Repeat(fmt.Sprint(rank), round) {
							return fmt.Errorf("round %d rank %d: %q", round, rank, b)
						}
					}
					b, err := g.Broadcast(ctx, "b", round%4, []byte(fmt.Sprint("from ", g.Rank())))
					if err != nil || string(b) != fmt.Sprint("from ", round%4) {
						return fmt.Errorf("broadcast %d: %q %w", round, b, err)
					}
				}
				return g.Barrier(ctx, "end")
			}))
		})
	}
}

// TestOddJobNames joins a job whose launcher gave it a name of any bytes.
func TestOddJobNames(t *testing.T) {
	for _, job := range []string{"a\xffb\xfe", "\x00", strings.Repeat("\xff", maxText), strings.Repeat("é", 1000)} {
		groups, failures := tryJob(t, 2, Options{Job: job})
		requireNone(t, failures)
		leaveAll(t, groups)
	}
	addr, _, finish := startJob(t, 2, Options{Job: strings.Repeat("\xff", maxText)})
	_, err := Join(testContext(t), &Options{Rank: 1, WorldSize: 2, Addr: addr, Job: strings.Repeat("\xfe", maxText)})
	requireRefused(t, err, RefusedJob, addr)
	require.Less(t, len(err.Error()), 2000)
	require.Contains(t, err.Error(), "(4096 bytes)")
	finish()
}

func TestJoinAlone(t *testing.T) {
	g, err := Join(testContext(t), nil)
	require.NoError(t, err)
	require.NoError(t, g.Barrier(testContext(t), "alone"))
	require.Equal(t, []int{1, 0}, []int{g.Size(), g.Rank()})
	require.NoError(t, g.Close(testContext(t)))
	require.ErrorIs(t, g.Close(testContext(t)), ErrClosed)
	require.ErrorIs(t, g.Barrier(testContext(t), "closed"), ErrClosed)

	g, err = Join(testContext(t), &Options{Listener: listenLoopback(t)})
	require.NoError(t, err)
	require.NoError(t, g.Close(testContext(t)))
}

func TestJoinBadOptions(t *testing.T) {
	for name, o := range map[string]*Options{
		"world":    {WorldSize: -1},
		"huge":     {WorldSize: MaxWorldSize + 1},
		"rank":     {Rank: 2, WorldSize: 2, Addr: "127.0.0.1:1"},
		"restart":  {Restart: -1},
		"timeout":  {Timeout: -1},
		"liveness": {LivenessTimeout: time.Millisecond},
		"no addr":  {WorldSize: 2},
		"addr":     {WorldSize: 2, Addr: "nonsense"},
		"listener": {Rank: 1, WorldSize: 2, Addr: "127.0.0.1:1", Listener: listenLoopback(t)},
		"tls":      {WorldSize: 2, Addr: "127.0.0.1:1", TLS: clientTLS(&Options{})},
		"job":      {Job: strings.Repeat("x", maxText+1)},
		// No token: loopback only, on both sides.
		"serve everywhere":  {WorldSize: 2, Addr: ":0"},
		"serve on all":      {WorldSize: 2, Addr: "0.0.0.0:0"},
		"look elsewhere":    {Rank: 1, WorldSize: 2, Addr: "192.0.2.1:9"},
		"short token":       {WorldSize: 2, Addr: "0.0.0.0:0", Token: "fifteen bytes.."},
		"short token there": {Rank: 1, WorldSize: 2, Addr: "192.0.2.1:9", Token: "fifteen bytes.."},
		"look elsewhere v6": {Rank: 1, WorldSize: 2, Addr: "[2001:db8::1]:9"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Join(testContext(t), o)
			var argument *errs.ArgumentError
			require.ErrorAs(t, err, &argument)
			require.ErrorIs(t, err, ErrInvalid)
		})
	}
	t.Run("listener on all addresses", func(t *testing.T) {
		l, err := net.Listen("tcp", ":0")
		require.NoError(t, err)
		_, err = Join(testContext(t), &Options{WorldSize: 2, Listener: l})
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, "token")
		require.ErrorIs(t, l.Close(), net.ErrClosed, "Join has taken the listener over")
	})
	t.Run("short token on all addresses", func(t *testing.T) {
		l, err := net.Listen("tcp", ":0")
		require.NoError(t, err)
		_, err = Join(testContext(t), &Options{WorldSize: 2, Listener: l, Token: "fifteen bytes.."})
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, "at least 16 bytes")
		require.NotContains(t, err.Error(), "fifteen")
	})
	t.Run("long token on all addresses", func(t *testing.T) {
		l, err := net.Listen("tcp", ":0")
		require.NoError(t, err)
		_, err = Join(testContext(t), &Options{WorldSize: 2, Listener: l, Token: "sixteen bytes...", Timeout: 10 * time.Millisecond})
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

// TestRefusals runs a job of three ranks of which one is still to come, lets strangers in vain, and then completes it.
func TestRefusals(t *testing.T) {
	ctx := testContext(t)
	l := listenLoopback(t)
	limits := defaultLimits
	limits.doubt = 50 * time.Millisecond
	base := Options{WorldSize: 3, Addr: l.Addr().String(), Job: "right", Restart: 2, Token: "secret", limits: &limits}
	groups := make([]*Group, 3)
	failures := make([]error, 3)
	var wait sync.WaitGroup
	join := func(rank int) {
		o := base
		o.Rank = rank
		if rank == 0 {
			o.Listener = l
		}
		wait.Go(func() { groups[rank], failures[rank] = Join(ctx, &o) })
	}
	join(0)
	join(1)
	refusals := map[string]struct {
		change func(o *Options)
		reason RefusalReason
	}{
		"wrong token":      {func(o *Options) { o.Token = "guess" }, RefusedToken},
		"no token":         {func(o *Options) { o.Token = "" }, RefusedToken},
		"wrong job":        {func(o *Options) { o.Job = "wrong" }, RefusedJob},
		"wrong restart":    {func(o *Options) { o.Restart = 1 }, RefusedRestart},
		"wrong world size": {func(o *Options) { o.WorldSize = 4 }, RefusedWorldSize},
	}
	for name, r := range refusals {
		t.Run(name, func(t *testing.T) {
			o := base
			o.Rank = 2
			r.change(&o)
			_, err := Join(ctx, &o)
			requireRefused(t, err, r.reason, base.Addr)
		})
	}
	t.Run("rank out of range", func(t *testing.T) {
		// Join itself refuses such options, so this is what another implementation would see.
		o := base
		s := newSession(7, 0, nil, &defaultLimits)
		m, err := thisProcess(7, 0, "")
		require.NoError(t, err)
		_, err = connect(ctx, s, m, &o)
		requireRefused(t, err, RefusedRank, base.Addr)
	})
	t.Run("wrong version", func(t *testing.T) {
		conn, err := net.Dial("tcp", base.Addr)
		require.NoError(t, err)
		defer conn.Close()
		_, err = conn.Write(append([]byte(protocolMagic), protocolVersion+1, modeTLS))
		require.NoError(t, err)
		answer, err := io.ReadAll(conn)
		require.NoError(t, err)
		require.Equal(t, prologue(modeTLS), answer, "the service says its version and hangs up")
	})
	t.Run("something else entirely", func(t *testing.T) {
		_, err := (&http.Client{Timeout: time.Minute}).Get("http://" + base.Addr + "/")
		require.Error(t, err)
	})
	t.Run("duplicate rank", func(t *testing.T) {
		o := base
		o.Rank = 0 // present for certain; its own Join would listen, so it is made as another rank's
		s := newSession(0, 0, nil, &defaultLimits)
		m, err := thisProcess(0, 0, "")
		require.NoError(t, err)
		_, err = connect(ctx, s, m, &o)
		requireRefused(t, err, RefusedDuplicate, base.Addr)
	})
	join(2)
	wait.Wait()
	requireNone(t, failures)
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "undisturbed") }))
	require.NoError(t, groups[2].Close(ctx))
	t.Run("late rank", func(t *testing.T) {
		o := base
		o.Rank = 2
		_, err := Join(ctx, &o)
		requireRefused(t, err, RefusedLate, base.Addr)
	})
	sub := onAll(groups[:2], func(g *Group) error {
		s, err := g.Sub(ctx, []int{0, 1})
		if err != nil {
			return err
		}
		return s.Barrier(ctx, "still undisturbed")
	})
	requireNone(t, sub)
	leaveAll(t, groups)
}

func requireRefused(t *testing.T, err error, reason RefusalReason, addr string) {
	t.Helper()
	var refusal *RefusedError
	require.ErrorAs(t, err, &refusal)
	require.Equal(t, reason, refusal.Reason, refusal.Error())
	require.Equal(t, addr, refusal.Addr)
	t.Log(err)
}

// answering serves every connection with fn until the test ends.
func answering(t *testing.T, fn func(net.Conn)) string {
	l := listenLoopback(t)
	var wait sync.WaitGroup
	wait.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wait.Go(func() {
				defer conn.Close()
				fn(conn)
			})
		}
	})
	t.Cleanup(func() {
		assert.NoError(t, l.Close())
		wait.Wait()
	})
	return l.Addr().String()
}

func TestJoinFindsSomethingElse(t *testing.T) {
	drain := func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }
	web := answering(t, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 100))
		_, _ = c.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
	})
	short := answering(t, func(c net.Conn) { _, _ = c.Write([]byte("hey")); _ = c.(*net.TCPConn).CloseWrite(); drain(c) })
	newer := answering(t, func(c net.Conn) { _, _ = c.Write(append([]byte(protocolMagic), 9, modePlain)); drain(c) })
	for addr, reason := range map[string]RefusalReason{web: RefusedNotService, short: RefusedNotService, newer: RefusedVersion} {
		_, err := Join(testContext(t), &Options{Rank: 1, WorldSize: 2, Addr: addr})
		requireRefused(t, err, reason, addr)
	}

	nobody := testneed.FreeAddress(t)
	silent := answering(t, drain)
	closing := answering(t, func(net.Conn) {})
	for i, addr := range []string{nobody, silent, closing} {
		served := i == 0
		_, err := Join(testContext(t), &Options{Rank: 1, WorldSize: 2, Addr: addr, Served: served, Timeout: 300 * time.Millisecond})
		var failed *ConnectError
		require.ErrorAs(t, err, &failed)
		require.ErrorIs(t, err, ErrUnavailable)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, addr, failed.Addr)
		require.Positive(t, failed.Attempts)
		require.Equal(t, served, failed.Served)
		require.ErrorContains(t, err, map[bool]string{false: "is rank 0 running", true: "is what serves it (symmem run, symmem rendezvous) running"}[served])
		t.Log(err)
	}
}

func TestJoinBusyPort(t *testing.T) {
	l := listenLoopback(t)
	defer l.Close()
	_, err := Join(testContext(t), &Options{WorldSize: 2, Addr: l.Addr().String()})
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, l.Addr().String())
}

func TestJoinNobodyComes(t *testing.T) {
	t.Parallel()
	l := listenLoopback(t)
	o := Options{WorldSize: 8, Addr: l.Addr().String(), Timeout: time.Minute}
	failures := make([]error, 2)
	var wait sync.WaitGroup
	for i, rank := range []int{0, 3} {
		o := o
		o.Rank = rank
		if rank == 0 {
			o.Listener, o.Timeout = l, 2*time.Second
		}
		wait.Go(func() { _, failures[i] = Join(t.Context(), &o) })
	}
	wait.Wait()
	var missing *MissingRanksError
	require.ErrorAs(t, failures[0], &missing)
	require.ErrorIs(t, failures[0], context.DeadlineExceeded)
	require.Equal(t, []int{1, 2, 4, 5, 6, 7}, missing.Missing)
	var abandoned *AbandonedError
	require.ErrorAs(t, failures[1], &abandoned)
	require.Equal(t, 0, abandoned.Rank)
	t.Log(failures[0], failures[1])
}

// TestJoinTooLate: ranks that come a little after rank 0, which serves the rendezvous, has given up learn that, whether others are there or not.
func TestJoinTooLate(t *testing.T) {
	for name, others := range map[string]int{"alone": 0, "with another": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // it waits, most of the time
			for try := 1; !joinsTooLate(t, others); try++ {
				require.Less(t, try, 5, "rank 0 has gone each time, and not only as this process stood still")
			}
		})
	}
}

// joinsTooLate has ranks come too late, and looks at what they are told. It reports whether rank 0 was there still, which it is for a moment.
func joinsTooLate(t *testing.T, others int) bool {
	t.Helper()
	l := listenLoopback(t)
	o := Options{WorldSize: 5, Addr: l.Addr().String(), Timeout: 5 * time.Second}
	const timeout = 300 * time.Millisecond // of rank 0
	join := func(rank int) <-chan error {
		o := o
		if o.Rank = rank; rank == 0 {
			o.Listener, o.Timeout = l, timeout
		}
		failed := make(chan error, 1)
		go func() {
			_, err := Join(testContext(t), &o)
			failed <- err
		}()
		return failed
	}
	zero := join(0)
	for rank := 1; rank < 4; rank++ {
		if rank == others+1 {
			time.Sleep(2 * timeout)
		}
		err := <-join(rank)
		if _, nobody := errors.AsType[*ConnectError](err); nobody && len(zero) > 0 {
			return false
		}
		var abandoned *AbandonedError
		require.ErrorAs(t, err, &abandoned)
		require.Equal(t, 0, abandoned.Rank)
		if rank > others {
			require.Contains(t, abandoned.Missing, rank)
		}
	}
	var missing *MissingRanksError
	require.ErrorAs(t, <-zero, &missing)
	require.Contains(t, missing.Missing, 4)
	return true
}

func TestLargeBlobs(t *testing.T) {
	groups := newJob(t, 3, Options{})
	ctx := testContext(t)
	large := make([]byte, MaxBlob)
	for i := range large {
		large[i] = byte(i * 7)
	}
	requireNone(t, onAll(groups, func(g *Group) error {
		all, err := g.AllGather(ctx, "large", large)
		if err != nil {
			return err
		}
		for _, b := range all {
			if !slices.Equal(b, large) {
				return errors.New("a large blob was changed")
			}
		}
		return nil
	}))
	// One rank's blob is too large: that rank gets the typed error, all get the vote, which is what it is.
	for rank, err := range onAll(groups, func(g *Group) error {
		data := large
		if g.Rank() == 1 {
			data = make([]byte, MaxBlob+1)
		}
		_, err := g.AllGather(ctx, "too large", data)
		return err
	}) {
		var vote *VoteError
		require.ErrorAs(t, err, &vote)
		require.Len(t, vote.Failures, 1)
		require.Equal(t, 1, vote.Failures[0].Rank)
		require.ErrorIs(t, err, ErrInvalid)
		require.Equal(t, rank == 1, errors.As(err, new(*errs.ArgumentError)))
	}
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "after") }))
}

// BenchmarkAllGather measures an all-gather of 256 random bytes a rank, with all ranks in this process.
func BenchmarkAllGather(b *testing.B) {
	for _, n := range []int{4, 64, 256, 1024} {
		for _, token := range []string{"", "secret"} {
			name := fmt.Sprintf("clients=%d", n)
			if token != "" {
				name += "/tls"
			}
			b.Run(name, func(b *testing.B) {
				groups := newJob(b, n, Options{Token: token, LivenessTimeout: time.Minute})
				b.ResetTimer()
				requireNone(b, onAll(groups, func(g *Group) error {
					data := randomBytes(uint64(g.Rank()), 256)
					for range b.N {
						if _, err := g.AllGather(b.Context(), "bench", data); err != nil {
							return err
						}
					}
					return nil
				}))
				b.StopTimer()
			})
		}
	}
}

func TestOwnCertificates(t *testing.T) {
	server, err := serviceTLS(&Options{Token: "t"}) // any certificate will do, if the ranks trust it
	require.NoError(t, err)
	roots := x509.NewCertPool()
	leaf, err := x509.ParseCertificate(server.Certificates[0].Certificate[0])
	require.NoError(t, err)
	roots.AddCert(leaf)
	trusting := &tls.Config{VerifyConnection: func(s tls.ConnectionState) error {
		_, err := s.PeerCertificates[0].Verify(x509.VerifyOptions{Roots: roots})
		return err
	}, InsecureSkipVerify: true} //nolint:gosec // VerifyConnection verifies
	l := listenLoopback(t)
	base := Options{WorldSize: 2, Addr: l.Addr().String(), Token: "t"}
	ctx := testContext(t)
	groups, failures := make([]*Group, 2), make([]error, 2)
	var wait sync.WaitGroup
	join := func(rank int, config *tls.Config) {
		o := base
		o.Rank, o.TLS = rank, config
		if rank == 0 {
			o.Listener = l
		}
		wait.Go(func() { groups[rank], failures[rank] = Join(ctx, &o) })
	}
	join(0, server)
	distrusting := base
	distrusting.Rank, distrusting.TLS = 1, &tls.Config{ServerName: "elsewhere"}
	_, err = Join(ctx, &distrusting)
	requireRefused(t, err, RefusedTLS, base.Addr)
	wrong := base
	wrong.Rank, wrong.TLS, wrong.Token = 1, trusting, "other"
	_, err = Join(ctx, &wrong)
	requireRefused(t, err, RefusedToken, base.Addr)
	join(1, trusting)
	wait.Wait()
	requireNone(t, failures)
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "secured") }))
	leaveAll(t, groups)
}

// TestImpostor connects a rank that knows the token to a service that does not.
func TestImpostor(t *testing.T) {
	config, err := serviceTLS(&Options{Token: "x"})
	require.NoError(t, err)
	addr := answering(t, func(c net.Conn) {
		greeting := make([]byte, prologueLength)
		if _, err := io.ReadFull(c, greeting); err != nil {
			return
		}
		if _, err := c.Write(greeting); err != nil {
			return
		}
		s := tls.Server(c, config)
		claim := make([]byte, 32)
		if _, err := io.ReadFull(s, claim); err != nil {
			return
		}
		_, _ = s.Write(append([]byte{proofAccepted}, claim...)) // the rank's own proof does not serve as the service's
	})
	_, err = Join(testContext(t), &Options{Rank: 1, WorldSize: 2, Addr: addr, Token: "secret"})
	requireRefused(t, err, RefusedToken, addr)
	require.ErrorContains(t, err, "could not prove")
}

// TestUnrulyRank is let in and then sends what no rank of this package sends. It is lost or answered; the others go on.
func TestUnrulyRank(t *testing.T) {
	for name, messages := range map[string][]*pb.ClientMessage{
		"nothing inside":   {{}},
		"a second hello":   {{Body: &pb.ClientMessage_Hello{Hello: &pb.Hello{}}}},
		"an empty arrival": {{Body: &pb.ClientMessage_Arrival{}}, {}},
		"odd requests": {
			{Body: &pb.ClientMessage_Arrival{Arrival: &pb.Arrival{Group: "none", Kind: 77, Root: -5, Members: []int64{-1, 9}}}},
			{Body: &pb.ClientMessage_Arrival{Arrival: &pb.Arrival{Group: "s", Kind: uint32(kindSub), Members: []int64{-1, 1 << 40}}}},
			{Body: &pb.ClientMessage_Arrival{Arrival: &pb.Arrival{Group: worldName, Sequence: 1 << 63, Kind: uint32(kindBroadcast), Root: -5}}},
			{Body: &pb.ClientMessage_Abandon{Abandon: &pb.Abandon{Group: worldName, Sequence: 1 << 62}}},
			{Body: &pb.ClientMessage_Store{Store: &pb.StoreRequest{Group: worldName, Verb: 1 << 31}}},
			{Body: &pb.ClientMessage_CancelGet{}},
			{Body: &pb.ClientMessage_LeaveGroup{LeaveGroup: &pb.LeaveGroup{Group: "none"}}},
			{},
		},
	} {
		t.Run(name, func(t *testing.T) {
			groups, failures := tryJob(t, 3, Options{})
			requireNone(t, failures)
			ctx := testContext(t)
			r := groups[2].session.transport.(*remote)
			for _, m := range messages {
				r.outbox.put(m)
			}
			for _, g := range groups {
				<-g.Lost() // of those in a group with it
			}
			requireNone(t, onAll(groups[:2], func(g *Group) error {
				if err := g.Err(); !errors.Is(err, ErrPeerLost) {
					return err
				}
				sub, err := g.Sub(ctx, []int{0, 1})
				if err != nil {
					return err
				}
				return sub.Barrier(ctx, "undisturbed")
			}))
			leaveAll(t, groups)
		})
	}
}

// TestOptionDefaults: the defaults are those that the documentation of Options names.
func TestOptionDefaults(t *testing.T) {
	o, err := (&Options{}).checked()
	require.NoError(t, err)
	require.Equal(t, []any{1, 60 * time.Second, 10 * time.Second}, []any{o.WorldSize, o.Timeout, o.LivenessTimeout})
}

// TestJoinAloneWithoutTime: a rank alone, whose context has ended before, does not join, and the socket that it was given is closed.
func TestJoinAloneWithoutTime(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	l := listenLoopback(t)
	_, err := Join(ended, &Options{WorldSize: 1, Addr: l.Addr().String(), Listener: l})
	require.ErrorIs(t, err, context.Canceled)
	_, err = l.Accept()
	require.ErrorIs(t, err, net.ErrClosed)
}

// TestJoinAgain: where rank 0 serves, all ranks may leave and join again, in whichever order they leave.
func TestJoinAgain(t *testing.T) {
	ctx := testContext(t)
	for _, token := range []string{"", "secret"} {
		for last := range 3 {
			addr := testneed.FreeAddress(t)
			failures := make([]error, 3)
			var wait sync.WaitGroup
			for rank := range failures {
				o := Options{Rank: rank, WorldSize: 3, Addr: addr, Job: "again", Token: token}
				wait.Go(func() {
					for range 3 {
						g, err := Join(ctx, &o)
						if err == nil && rank == last {
							time.Sleep(20 * time.Millisecond) // the others are back before it leaves
						}
						if err == nil {
							err = g.Close(ctx)
						}
						if err != nil {
							failures[rank] = err
							return
						}
					}
				})
			}
			wait.Wait()
			requireNone(t, failures)
		}
	}
}

// TestJoinSaysWhere: a rank that waits for others in vain says where, which they can be compared with.
func TestJoinSaysWhere(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	_, err = Join(t.Context(), &Options{Listener: l, WorldSize: 2, Timeout: 50 * time.Millisecond})
	require.ErrorContains(t, err, "joining the job at "+l.Addr().String()+" as rank 0 of 2: ")
	require.Equal(t, `job "training" at host:29500`, meetingPlace(&Options{Job: "training", Addr: "host:29500"}))
	require.Equal(t, "the job", meetingPlace(&Options{}))
}
