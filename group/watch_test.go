package group

import (
	"fmt"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group/internal/pb"
)

// watched are the liveness timeouts of the tests below: the shortest, and two on either side of where heartbeats go every second.
var watched = []time.Duration{minLivenessTimeout, 3 * time.Second, 10 * time.Second}

// eachSilence runs f in a bubble, where time is exact, for each liveness timeout and for silences that begin at several moments between two heartbeats, so that
// between two looks they have several lengths.
func eachSilence(t *testing.T, f func(t *testing.T, liveness, begin time.Duration)) {
	for _, liveness := range watched {
		for eighth := range time.Duration(8) {
			begin := heartbeatInterval(liveness)*eighth/8 + time.Millisecond
			t.Run(fmt.Sprintf("%v/%v", liveness, begin), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { f(t, liveness, begin) })
			})
		}
	}
}

// requireInTime fails unless a loss was known when the liveness timeout was over, and not long before.
func requireInTime(t *testing.T, took, liveness time.Duration) {
	t.Helper()
	require.LessOrEqual(t, took, liveness, "it is known by then")
	require.Greater(t, took, liveness*7/8, "it may be silent")
}

// watchedService has ranks 1 and so on of a world with nobody at the other end. They have spoken, and say no more.
func watchedService(t *testing.T, size int, liveness time.Duration, closing func()) (*service, []*serviceConn) {
	lim := &defaultLimits
	l := newBoundedListener(listenLoopback(t), lim, newSession(0, 0, nil, lim).logger)
	t.Cleanup(func() { _ = l.Close() })
	o, err := (&Options{WorldSize: size, Addr: l.Addr().String(), LivenessTimeout: liveness}).checked()
	require.NoError(t, err)
	s := newService(newHub(size, lim), o, false, l.logger)
	conns := make([]*serviceConn, size)
	for rank := 1; rank < size; rank++ {
		near, far := net.Pipe()
		t.Cleanup(func() { _, _ = near.Close(), far.Close() })
		c := &serviceConn{service: s, socket: l.track(slowToClose{near, closing}), outbox: newOutbox(100, 1<<20), gone: make(chan struct{})}
		c.rank.Store(-1)
		require.Nil(t, c.admit(&pb.Hello{WorldSize: int64(size), Member: Member{WorldRank: rank}.toWire(), Session: "one"}))
		c.phase.Store(phaseSpoken)
		conns[rank] = c
	}
	s.work.Go(s.watch)
	t.Cleanup(func() { s.end(); s.work.Wait() })
	return s, conns
}

// slowToClose is a connection whose closing takes as long as a call.
type slowToClose struct {
	net.Conn
	closing func()
}

func (c slowToClose) Close() error {
	c.closing()
	return c.Conn.Close()
}

// TestSilentRankIsKnown: whenever a rank falls silent, the others know when the liveness timeout is over.
func TestSilentRankIsKnown(t *testing.T) {
	eachSilence(t, func(t *testing.T, liveness, begin time.Duration) {
		s, conns := watchedService(t, 2, liveness, func() {})
		time.Sleep(begin)
		conns[1].socket.hear()
		since := time.Now()
		<-conns[1].gone
		took := time.Since(since)
		requireInTime(t, took, liveness)
		s.hub.mu.Lock()
		defer s.hub.mu.Unlock()
		assert.Equal(t, "it "+wasSilent(took, liveness), s.hub.ranks[1].loss.reason)
	})
}

// TestSilentServiceIsKnown: whenever the service falls silent, a rank knows when the liveness timeout is over.
func TestSilentServiceIsKnown(t *testing.T) {
	eachSilence(t, func(t *testing.T, liveness, begin time.Duration) {
		r, known := &remote{liveness: liveness}, make(chan struct{})
		l := &link{socket: &heardConn{}, ended: make(chan struct{}), cancel: func() { close(known) }}
		l.socket.hear()
		l.work.Go(func() { r.watch(l) })
		time.Sleep(begin)
		l.socket.hear()
		since := time.Now()
		<-known
		took := time.Since(since)
		requireInTime(t, took, liveness)
		assert.Equal(t, "the rendezvous service "+wasSilent(took, liveness), *l.why.Load())
		l.work.Wait()
	})
}

// TestWatchIsHeldUp: a watch that did not get to run, as in a process that was stopped, takes no silence meanwhile for a loss.
func TestWatchIsHeldUp(t *testing.T) {
	for _, liveness := range watched {
		synctest.Test(t, func(t *testing.T) {
			held := make(chan time.Time, 2)
			_, conns := watchedService(t, 3, liveness, func() {
				time.Sleep(5 * liveness)
				held <- time.Now()
			})
			time.Sleep(heartbeatInterval(liveness) + time.Millisecond)
			conns[2].socket.hear() // so that rank 1 is lost first
			<-conns[1].gone
			since := <-held
			<-conns[2].gone
			took := time.Since(since)
			require.Greater(t, took, liveness*7/8, "it may be silent for as long as if it had been heard then")
			require.LessOrEqual(t, took, liveness+watchPause(liveness))
			<-held
		})
	}
}
