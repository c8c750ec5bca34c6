package group

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/testneed"
)

// meetAtPorts joins n ranks at the ports, rank 0 late by some time, and closes them again.
func meetAtPorts(t *testing.T, n int, base Options, late time.Duration) []error {
	ctx := testContext(t)
	groups, failures := make([]*Group, n), make([]error, n)
	var wait sync.WaitGroup
	for rank := range n {
		o := base
		o.Rank, o.WorldSize = rank, n
		wait.Go(func() {
			if rank == 0 {
				time.Sleep(late)
			}
			if groups[rank], failures[rank] = Join(ctx, &o); failures[rank] == nil {
				failures[rank] = groups[rank].Close(ctx)
			}
		})
	}
	wait.Wait()
	return failures
}

// TestPortOfAnother: the ranks of a job meet, whoever has the first of its ports, and however late rank 0 comes.
func TestPortOfAnother(t *testing.T) {
	drain := func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }
	const token = "the token of this job alone"
	limits := defaultLimits
	limits.attempt = 100 * time.Millisecond
	// Each has a job of its own name: the ports of several lie side by side.
	for name, another := range map[string]func(t *testing.T) (addr string, finish func()){
		"silent":  func(t *testing.T) (string, func()) { return answering(t, drain), func() {} },
		"closing": func(t *testing.T) (string, func()) { return answering(t, func(net.Conn) {}), func() {} },
		"greeting, and then silent": func(t *testing.T) (string, func()) {
			return answering(t, func(c net.Conn) { _, _ = c.Write(prologue(modePlain)); drain(c) }), func() {}
		},
		"no service": func(t *testing.T) (string, func()) {
			return answering(t, func(c net.Conn) { _, _ = c.Write([]byte("hey")) }), func() {}
		},
		"another version": func(t *testing.T) (string, func()) {
			return answering(t, func(c net.Conn) { _, _ = c.Write(append([]byte(protocolMagic), 9, modePlain)); drain(c) }), func() {}
		},
		"another job": func(t *testing.T) (string, func()) {
			addr, _, finish := startJob(t, 2, Options{Job: "another"})
			return addr, finish
		},
		"another job with a token": func(t *testing.T) (string, func()) {
			addr, _, finish := startJob(t, 2, Options{Job: "another", Token: "another token, as long as this"})
			return addr, finish
		},
		"an earlier attempt": func(t *testing.T) (string, func()) {
			addr, _, finish := startJob(t, 2, Options{Job: t.Name(), Restart: 1})
			return addr, finish
		},
	} {
		for _, secret := range []string{"", token} {
			t.Run(name+" token="+strconv.FormatBool(secret != ""), func(t *testing.T) {
				t.Parallel()
				addr, finish := another(t)
				defer finish()
				o := Options{Addr: addr, Ports: 8, Job: t.Name(), Restart: 2, Token: secret, limits: &limits}
				for _, late := range []time.Duration{0, 700 * time.Millisecond} {
					requireNone(t, meetAtPorts(t, 3, o, late))
				}
			})
		}
	}
}

// TestPortOfSomebodySilent: what says nothing at one port keeps no rank from looking at the next, even if it is given all the time that there is.
func TestPortOfSomebodySilent(t *testing.T) {
	limits := defaultLimits
	limits.attempt = time.Hour
	addr := answering(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	requireNone(t, meetAtPorts(t, 3, Options{Addr: addr, Ports: 8, Job: t.Name(), Timeout: 20 * time.Second, limits: &limits}, 50*time.Millisecond))
}

// TestSlowServiceBehindAnother: a service that takes its time for the hello is not passed over for another one, which asks for its turn again and again.
func TestSlowServiceBehindAnother(t *testing.T) {
	t.Parallel() // it waits, most of the time
	limits := defaultLimits
	limits.attempt = 100 * time.Millisecond
	addr, _, finish := startJob(t, 2, Options{Job: "another"})
	defer finish()
	host, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	n, err := strconv.Atoi(port)
	require.NoError(t, err)
	var l *lateListener
	ports := 1
	for ; l == nil && ports < MaxPorts; ports++ {
		if next, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(n+ports))); err == nil {
			l = &lateListener{Listener: next}
		}
	}
	require.NotNil(t, l)
	l.late.Store(int64(150 * time.Millisecond)) // a hello takes several times as long as a first attempt may
	groups, failures := joinAll(t, 3, func(rank int) *Options {
		o := &Options{Rank: rank, WorldSize: 3, Addr: addr, Ports: ports, Job: t.Name(), Timeout: 20 * time.Second, limits: &limits}
		if rank == 0 {
			o.Listener = l
		}
		return o
	})
	requireNone(t, failures)
	l.late.Store(0)
	leaveAll(t, groups)
}

// TestReturnBehindAnother: ranks look for a service that is started again for their timeout, also where another job's has its port, with a token of its own, since they know that
// theirs is the right one.
func TestReturnBehindAnother(t *testing.T) {
	t.Parallel() // it waits, most of the time
	ctx := testContext(t)
	limits := defaultLimits
	limits.doubt, limits.attempt = 300*time.Millisecond, 300*time.Millisecond
	l, err := net.Listen("tcp", testneed.FreeAddress(t)) // next to it nobody is likely to listen: a rank that joins does doubt itself
	require.NoError(t, err)
	s := &keptService{newTestService(t, l, Options{
		WorldSize: 2, Job: uniqueJob(), Store: "memory://here/" + uniqueJob(), Token: "the token of this job alone", Ports: 2, Timeout: 20 * time.Second, limits: &limits,
	}, Serve)}
	groups := s.join()
	require.Error(t, s.end())
	another := Options{WorldSize: 2, Addr: s.addr, Job: "another", Token: "another token, as long as this"}
	serving, stop := context.WithCancel(ctx)
	var other sync.WaitGroup
	other.Go(func() {
		var missing *MissingRanksError
		for !errors.As(Serve(serving, &another), &missing) && serving.Err() == nil {
			time.Sleep(5 * time.Millisecond) // until the port is free
		}
	})
	defer other.Wait()
	defer stop()
	time.Sleep(4 * limits.doubt) // they come to it some times
	o := s.opts
	o.Addr = s.addr
	s.ended = make(chan error, 1)
	go func() { s.ended <- Serve(ctx, &o) }()
	requireNone(t, onAll(groups, func(g *Group) error { return g.Barrier(ctx, "all are back") }))
	s.finish(ctx, groups)
}

// TestJobsWithOnePort: jobs that begin at one port at the same time each have one of their own, and nobody comes into another's.
func TestJobsWithOnePort(t *testing.T) {
	nobody := listenLoopback(t)
	require.NoError(t, nobody.Close())
	const jobs = 6
	for range 3 {
		failures := make([][]error, jobs)
		var wait sync.WaitGroup
		for i := range failures {
			wait.Go(func() {
				o := Options{Addr: nobody.Addr().String(), Ports: 16, Job: strconv.Itoa(i), Token: []string{"", "the token of the odd ones"}[i%2]}
				failures[i] = meetAtPorts(t, 2+i%3, o, time.Duration(i%2)*50*time.Millisecond)
			})
		}
		wait.Wait()
		for _, f := range failures {
			requireNone(t, f)
		}
	}
}

// TestPortsThatAreRefused: what cannot be mended by waiting ends at once, or as soon as no other port has answered, and names where.
func TestPortsThatAreRefused(t *testing.T) {
	limits := defaultLimits
	limits.doubt = 300 * time.Millisecond
	const token = "the token of this job alone"
	addr, _, finish := startJob(t, 2, Options{Job: t.Name(), Restart: 1, Token: token})
	base := Options{Rank: 1, WorldSize: 2, Addr: addr, Ports: 3, Job: t.Name(), Restart: 1, Token: token, Timeout: 30 * time.Second, limits: &limits}
	for name, tt := range map[string]struct {
		change func(*Options)
		reason RefusalReason
		doubt  bool
	}{
		"wrong token":      {func(o *Options) { o.Token = "guess" }, RefusedToken, true},
		"no token":         {func(o *Options) { o.Token = "" }, RefusedToken, true},
		"wrong restart":    {func(o *Options) { o.Restart = 0 }, RefusedRestart, true},
		"wrong world size": {func(o *Options) { o.WorldSize = 3 }, RefusedWorldSize, false},
	} {
		t.Run(name, func(t *testing.T) {
			o := base
			tt.change(&o)
			if !tt.doubt {
				endless := limits
				endless.doubt = time.Hour
				o.limits = &endless
			}
			started := time.Now()
			_, err := Join(testContext(t), &o)
			requireRefused(t, err, tt.reason, addr)
			require.NotErrorIs(t, err, context.DeadlineExceeded, "it has ended by itself")
			if tt.doubt {
				assert.GreaterOrEqual(t, time.Since(started), limits.doubt)
			}
		})
	}

	// Another's job may end, and this one's rank 0 come, at any time: that is waited for.
	stray := base
	stray.Job, stray.Timeout = "stray", 1500*time.Millisecond
	_, err := Join(testContext(t), &stray)
	var failed *ConnectError
	require.ErrorAs(t, err, &failed)
	assert.Equal(t, 3, failed.Ports)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	requireRefused(t, err, RefusedJob, addr)
	assert.ErrorContains(t, err, addr+" and the 2 ports after it")

	busy := base
	busy.Rank, busy.Ports = 0, 1
	_, err = Join(testContext(t), &busy)
	require.ErrorIs(t, err, ErrUnavailable)
	finish()

	for name, o := range map[string]Options{
		"a negative number":    {Addr: "127.0.0.1:2000", Ports: -1},
		"too many":             {Addr: "127.0.0.1:2000", Ports: MaxPorts + 1},
		"beyond the last port": {Addr: "127.0.0.1:65535", Ports: 2},
		"after any port":       {Addr: "127.0.0.1:0", Ports: 2},
		"after a name":         {Addr: "127.0.0.1:http", Ports: 2},
	} {
		o.Rank, o.WorldSize = 1, 2
		_, err := Join(testContext(t), &o)
		assert.ErrorIs(t, err, ErrInvalid, name)
	}
}

// TestPortsAreAllTaken: rank 0 says so, and names them.
func TestPortsAreAllTaken(t *testing.T) {
	for range 100 {
		l := listenLoopback(t)
		host, port, err := net.SplitHostPort(l.Addr().String())
		require.NoError(t, err)
		n, err := strconv.Atoi(port)
		require.NoError(t, err)
		next, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(n+1)))
		if err == nil {
			_, err = Join(testContext(t), &Options{WorldSize: 2, Addr: l.Addr().String(), Ports: 2})
			require.ErrorIs(t, err, ErrUnavailable)
			require.ErrorContains(t, err, l.Addr().String()+" and the port after it")
			require.NoError(t, next.Close())
			require.NoError(t, l.Close())
			return
		}
		require.NoError(t, l.Close())
	}
	t.Fatal("no two free ports")
}
