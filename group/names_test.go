package group

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/testneed"
)

// nameService answers for every name, once it knows them.
type nameService struct {
	known atomic.Bool
	asked atomic.Int64 // questions that it did not know the answer to
	ipv4  [4]byte
	ipv6  net.IP // nil for none
}

// newNameService makes the names of this process those of a service of the test's own, until the test ends.
func newNameService(t *testing.T) *nameService {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	s := &nameService{ipv4: [4]byte{127, 0, 0, 1}}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		question := make([]byte, 512)
		for {
			n, from, err := conn.ReadFrom(question)
			if err != nil {
				return
			}
			_, _ = conn.WriteTo(s.answer(question[:n]), from) // who has gone does not hear it
		}
	}()
	before := net.DefaultResolver
	net.DefaultResolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "udp", conn.LocalAddr().String())
	}}
	t.Cleanup(func() {
		net.DefaultResolver = before
		assert.NoError(t, conn.Close())
		<-ended
	})
	return s
}

// answer is that of RFC 1035 to a message with one question: the addresses, or that there is no such name.
func (s *nameService) answer(question []byte) []byte {
	const header, noSuchName, typeA, typeAAAA = 12, 3, 1, 28
	end := header
	for question[end] != 0 {
		end += 1 + int(question[end])
	}
	kind := binary.BigEndian.Uint16(question[end+1:])
	end += 1 + 4
	flags, answers := uint16(0x8180), uint16(0)
	var record []byte
	switch {
	case !s.known.Load():
		flags |= noSuchName
		s.asked.Add(1)
	case kind == typeA:
		answers, record = 1, append([]byte{0xc0, header, 0, typeA, 0, 1, 0, 0, 0, 0, 0, 4}, s.ipv4[:]...)
	case kind == typeAAAA && s.ipv6 != nil:
		answers, record = 1, append([]byte{0xc0, header, 0, typeAAAA, 0, 1, 0, 0, 0, 0, 0, 16}, s.ipv6.To16()...)
	}
	m := append([]byte{}, question[:2]...)
	for _, field := range []uint16{flags, 1, answers, 0, 0} {
		m = binary.BigEndian.AppendUint16(m, field)
	}
	return append(append(m, question[header:end]...), record...)
}

// TestNameThatIsNotKnownYet: rank 0, and a service of its own, wait for the name of the host that they serve on, as the ranks that look for them do.
func TestNameThatIsNotKnownYet(t *testing.T) {
	free := func(t *testing.T) string {
		_, port, err := net.SplitHostPort(testneed.FreeAddress(t))
		require.NoError(t, err)
		return port
	}
	const token = "sixteen bytes..."
	t.Run("rank 0", func(t *testing.T) {
		names := newNameService(t)
		addr := "job-0.symmem.test.:" + free(t)
		made := make(chan struct{})
		go func() { // the name is made when rank 0 has asked for it, and again
			defer close(made)
			for names.asked.Load() < 8 {
				time.Sleep(time.Millisecond)
			}
			names.known.Store(true)
		}()
		groups, failures := joinAll(t, 2, func(rank int) *Options {
			return &Options{Rank: rank, WorldSize: 2, Addr: addr, Token: token, Timeout: 30 * time.Second}
		})
		names.asked.Add(8) // whatever became of the ranks
		<-made
		requireNone(t, failures)
		leaveAll(t, groups)
	})
	t.Run("a service", func(t *testing.T) {
		names := newNameService(t)
		addr := "job-0.symmem.test.:" + free(t)
		ctx, cancel := context.WithCancel(testContext(t))
		served := make(chan error, 1)
		go func() {
			served <- Serve(ctx, &Options{WorldSize: 1, Addr: addr, Token: token, Timeout: 30 * time.Second})
		}()
		require.Eventually(t, func() bool { return names.asked.Load() >= 4 || len(served) > 0 }, 30*time.Second, time.Millisecond)
		names.known.Store(true)
		g, err := Join(ctx, &Options{WorldSize: 1, Served: true, Addr: addr, Token: token, Timeout: 30 * time.Second})
		if err == nil {
			err = g.Close(ctx)
		}
		if err != nil {
			cancel()
		}
		assert.NoError(t, err)
		assert.NoError(t, <-served)
		cancel()
	})
	t.Run("another address first", func(t *testing.T) {
		port := free(t)
		l, err := net.Listen("tcp", "[::1]:"+port)
		if err != nil {
			testneed.Missing(t, "IPv6", err.Error())
		}
		require.NoError(t, l.Close())
		names := newNameService(t)
		names.ipv4, names.ipv6 = [4]byte{192, 0, 2, 1}, net.IPv6loopback // package net tries to listen at the former, which no host has
		names.known.Store(true)
		addr := "job-0.symmem.test.:" + port
		groups, failures := joinAll(t, 2, func(rank int) *Options {
			return &Options{Rank: rank, WorldSize: 2, Addr: addr, Token: token, Timeout: 30 * time.Second}
		})
		requireNone(t, failures)
		leaveAll(t, groups)
	})
	t.Run("of another host", func(t *testing.T) {
		names := newNameService(t)
		names.ipv4 = [4]byte{192, 0, 2, 1}
		names.known.Store(true)
		for _, host := range []string{"192.0.2.1", "job-0.symmem.test."} {
			_, err := Join(testContext(t), &Options{WorldSize: 2, Addr: net.JoinHostPort(host, "29400"), Token: token, Timeout: time.Hour})
			require.ErrorIs(t, err, ErrUnavailable)
			assert.ErrorContains(t, err, "an address of the host on which this runs")
			assert.NotContains(t, err.Error(), "using the port")
		}
	})
	t.Run("never", func(t *testing.T) {
		names := newNameService(t)
		o := &Options{WorldSize: 2, Addr: "job-0.symmem.test.:29400", Token: token, Timeout: 200 * time.Millisecond}
		_, joined := Join(testContext(t), o)
		for _, err := range []error{joined, Serve(testContext(t), o)} {
			require.ErrorIs(t, err, ErrUnavailable)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			assert.ErrorContains(t, err, `is "job-0.symmem.test." spelled right`)
			assert.NotContains(t, err.Error(), "using the port")
		}
		assert.Greater(t, names.asked.Load(), int64(4))
	})
	t.Run("without a token", func(t *testing.T) {
		newNameService(t)
		o := &Options{WorldSize: 2, Addr: "job-0.symmem.test.:29400", Timeout: time.Hour}
		_, first := Join(testContext(t), o)
		other := *o
		other.Rank = 1
		_, second := Join(testContext(t), &other)
		for _, err := range []error{first, second, Serve(testContext(t), o)} {
			require.ErrorIs(t, err, ErrUnavailable)
			assert.ErrorContains(t, err, `is "job-0.symmem.test." spelled right`)
		}
	})
	t.Run("a port", func(t *testing.T) {
		newNameService(t)
		ctx := testContext(t)
		_, err := Join(ctx, &Options{WorldSize: 2, Addr: "job-0.symmem.test.:no-such-port", Token: token, Timeout: time.Hour})
		require.ErrorIs(t, err, ErrUnavailable)
		require.NoError(t, ctx.Err())
		assert.ErrorContains(t, err, "no-such-port")
	})
}

// TestNameOfLoopback: a host's own name may be a loopback address there, as Debian makes it. Other hosts do not reach rank 0 then, and it says so when ranks are missing.
func TestNameOfLoopback(t *testing.T) {
	names := newNameService(t)
	names.known.Store(true)
	const says = "ranks on other hosts do not reach rank 0"
	var joins sync.WaitGroup
	for host, told := range map[string]bool{"node1.test.": true, "127.0.0.1": false, "localhost": false} {
		joins.Go(func() {
			_, err := Join(testContext(t), &Options{WorldSize: 2, Addr: net.JoinHostPort(host, "0"), Token: "sixteen bytes...", Timeout: 50 * time.Millisecond})
			_, missing := errors.AsType[*MissingRanksError](err)
			assert.True(t, missing, "%s: %v", host, err)
			if told {
				assert.ErrorContains(t, err, says)
				assert.ErrorContains(t, err, `"node1.test." is 127.0.0.1 here`)
			} else {
				assert.NotContains(t, fmt.Sprint(err), says, host)
			}
		})
	}
	joins.Wait()
}
