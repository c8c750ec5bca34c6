package command

import (
	"context"
	"net"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/group"
)

// freeAddress is an address that nobody listens on.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return l.Addr().String()
}

// TestRendezvous: ranks meet at the service, rank 0 may go first, and the service ends with the last.
func TestRendezvous(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	addr := freeAddress(t)
	ended := make(chan result, 1)
	go func() {
		ended <- call(t, "", environ("SYMMEM_TOKEN=0123456789abcdef"), "rendezvous", "--listen", addr, "--world-size", "3", "--job", "three", "--log-level", "debug")
	}()
	groups := make([]*group.Group, 3)
	var wait sync.WaitGroup
	for rank := range groups {
		wait.Go(func() {
			var err error
			groups[rank], err = group.Join(ctx, &group.Options{
				Rank: rank, WorldSize: 3, Addr: addr, Served: true, Job: "three", Token: "0123456789abcdef",
			})
			assert.NoError(t, err)
		})
	}
	wait.Wait()
	for _, g := range groups {
		require.NotNil(t, g)
		require.NoError(t, g.Close(ctx))
	}
	r := <-ended
	assert.Equal(t, exit.OK, r.status, r.err)
	assert.Equal(t, "rendezvous at "+addr+"\n", r.out)
	assert.Contains(t, r.err, "rank attached")
}

// TestRendezvousEnds: a signal ends it, with the status that shells define.
func TestRendezvousEnds(t *testing.T) {
	addr := freeAddress(t)
	ended := make(chan result, 1)
	go func() { ended <- call(t, "", environ(), "rendezvous", "--listen", addr, "--world-size", "2") }()
	require.Eventually(t, func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	}, 30*time.Second, 10*time.Millisecond)
	self, err := os.FindProcess(os.Getpid())
	require.NoError(t, err)
	require.NoError(t, self.Signal(syscall.SIGTERM))
	r := <-ended
	assert.Equal(t, launch.SignalStatus(syscall.SIGTERM), r.status)
	assert.Contains(t, r.err, "ranks 0, 1")
}

func TestRendezvousRefuses(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer busy.Close()
	for name, tt := range map[string]struct {
		args   []string
		status int
		says   string
	}{
		"no address":      {[]string{"--world-size", "2"}, exit.Usage, "--listen"},
		"no ranks":        {[]string{"--listen", "127.0.0.1:0"}, exit.Usage, "--world-size"},
		"arguments":       {[]string{"--listen", "127.0.0.1:0", "2"}, exit.Usage, "takes no arguments"},
		"a rank's flag":   {[]string{"--listen", "127.0.0.1:0", "--world-size", "2", "--backend", "host"}, exit.Usage, "--backend is for ranks"},
		"a bad address":   {[]string{"--listen", "nowhere", "--world-size", "2"}, exit.Failure, "nowhere"},
		"a busy port":     {[]string{"--listen", busy.Addr().String(), "--world-size", "2"}, exit.Failure, "in use"},
		"open to anybody": {[]string{"--listen", "0.0.0.0:0", "--world-size", "2"}, exit.Failure, "SYMMEM_TOKEN"},
		"too many":        {[]string{"--listen", "127.0.0.1:0", "--world-size", "99999"}, exit.Failure, "16384"},
	} {
		t.Run(name, func(t *testing.T) {
			r := call(t, "", environ(), append([]string{"rendezvous"}, tt.args...)...)
			assert.Equal(t, tt.status, r.status, r.err)
			assert.Contains(t, r.err, tt.says)
		})
	}
}
