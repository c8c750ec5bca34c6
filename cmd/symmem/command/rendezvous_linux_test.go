package command

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/launch"
	"github.com/symmem/symmem/cmd/symmem/internal/verify"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/testneed"
)

// TestRendezvous: ranks meet at the service, rank 0 may go first, and the service ends with the last.
func TestRendezvous(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	addr := testneed.FreeAddress(t)
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

// TestRendezvousJobs: without a number of ranks it is for any jobs, and ends with the last; to stay is said to it, and a signal ends it then.
func TestRendezvousJobs(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, stay := range []bool{false, true} {
		addr := testneed.FreeAddress(t)
		args := []string{"rendezvous", "--listen", addr}
		if stay {
			args = append(args, "--stay")
		}
		ended := make(chan result, 1)
		go func() { ended <- call(t, "", environ("SYMMEM_TOKEN=0123456789abcdef"), args...) }()
		there := make(chan *group.Group, 5)
		var wait sync.WaitGroup
		for job, size := range map[string]int{"two": 2, "three": 3} {
			for rank := range size {
				wait.Go(func() {
					g, err := group.Join(ctx, &group.Options{Rank: rank, WorldSize: size, Addr: addr, Served: true, Job: job, Token: "0123456789abcdef"})
					if assert.NoError(t, err) {
						there <- g
					}
				})
			}
		}
		wait.Wait()
		close(there)
		for g := range there {
			require.NoError(t, g.Close(ctx))
		}
		if stay {
			select {
			case r := <-ended:
				t.Fatal("it did not stay:", r.status, r.err)
			case <-time.After(300 * time.Millisecond):
			}
			self, err := os.FindProcess(os.Getpid())
			require.NoError(t, err)
			require.NoError(t, self.Signal(syscall.SIGTERM))
		}
		r := <-ended
		want := exit.OK
		if stay {
			want = launch.SignalStatus(syscall.SIGTERM)
		}
		assert.Equal(t, want, r.status, r.err)
		assert.Equal(t, "rendezvous at "+addr+"\n", r.out)
	}
}

// TestRendezvousEnds: a signal ends it, with the status that shells define.
func TestRendezvousEnds(t *testing.T) {
	addr := testneed.FreeAddress(t)
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
		"a job of many":   {[]string{"--listen", "127.0.0.1:0", "--job", "j"}, exit.Usage, "--job is of one job, whose number of ranks, --world-size, is missing"},
		"an attempt":      {[]string{"--listen", "127.0.0.1:0", "--restart", "1"}, exit.Usage, "--restart is of one job"},
		"no ranks":        {[]string{"--listen", "127.0.0.1:0", "--world-size", "0"}, exit.Usage, "is 0, which is no number of ranks"},
		"one that stays":  {[]string{"--listen", "127.0.0.1:0", "--stay", "--world-size", "2"}, exit.Usage, "--stay is for any number of jobs, and world-size (flag --world-size), which is 2, for one"},
		"jobs of anybody": {[]string{"--listen", "0.0.0.0:0"}, exit.Usage, "symmem: rendezvous: --listen is 0.0.0.0:0; allowed: a loopback"},
		"a short token":   {[]string{"--listen", "0.0.0.0:0", "--token", "abc"}, exit.Usage, "rendezvous: the length of token (flag --token) is 3; allowed: at least 16 bytes where --listen, "},
		"arguments":       {[]string{"--listen", "127.0.0.1:0", "2"}, exit.Usage, "takes no arguments"},
		"a rank's flag":   {[]string{"--listen", "127.0.0.1:0", "--world-size", "2", "--backend", "host"}, exit.Usage, "--backend is for ranks"},
		"a bad address":   {[]string{"--listen", "nowhere", "--world-size", "2"}, exit.Usage, "symmem: --listen: listen tcp: address nowhere"},
		"no port":         {[]string{"--listen", "127.0.0.1:99999"}, exit.Usage, "symmem: --listen: listen tcp: address 99999: invalid port"},
		"no store":        {[]string{"--listen", "127.0.0.1:0", "--rendezvous-store", "nonsense"}, exit.Usage, `rendezvous-store (flag --rendezvous-store): ServeJobs: opening a store: the store is "nonsense"`},
		"no store of one": {[]string{"--listen", "127.0.0.1:0", "--world-size", "2", "--rendezvous-store", "redis://here"}, exit.Usage, `the kind of the store is "redis"`},
		"a busy port":     {[]string{"--listen", busy.Addr().String(), "--world-size", "2"}, exit.Failure, "in use"},
		"open to anybody": {[]string{"--listen", "0.0.0.0:0", "--world-size", "2"}, exit.Usage, "SYMMEM_TOKEN"},
		"too many":        {[]string{"--listen", "127.0.0.1:0", "--world-size", "99999"}, exit.Usage, "world-size (flag --world-size) is 99999; allowed: 1 to 16384"},
	} {
		t.Run(name, func(t *testing.T) {
			r := call(t, "", environ(), append([]string{"rendezvous"}, tt.args...)...)
			assert.Equal(t, tt.status, r.status, r.err)
			assert.Contains(t, r.err, tt.says)
			assert.Empty(t, r.out, "no address is told of a service that is not there")
		})
	}
	t.Run("one that stays, by a variable", func(t *testing.T) {
		r := call(t, "", environ("SYMMEM_WORLD_SIZE=4"), "rendezvous", "--listen", "127.0.0.1:0", "--stay")
		assert.Equal(t, exit.Usage, r.status)
		assert.Contains(t, r.err, "world-size (variable SYMMEM_WORLD_SIZE), which is 4, for one")
	})
	t.Run("an output that takes nothing", func(t *testing.T) {
		var errOut syncBuffer
		status := run(t.Context(), []string{"rendezvous", "--listen", "127.0.0.1:0", "--world-size", "2"}, nil, fullWriter{}, &errOut, environ())
		assert.Equal(t, exit.Failure, status)
		assert.Contains(t, errOut.String(), "full")
	})
}

// TestRendezvousKilled: a service that keeps its state in etcd is killed, more than once, while symmem verify runs as the job's ranks; each time one is
// started in its place, and the job ends as if nothing had happened.
func TestRendezvousKilled(t *testing.T) {
	if _, err := exec.LookPath("etcd"); err != nil {
		testneed.Missing(t, "etcd", err)
	}
	dir, client, peer := t.TempDir(), testneed.FreeAddress(t), testneed.FreeAddress(t)
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	server := exec.CommandContext(ctx, "etcd", "--data-dir", dir, "--listen-client-urls", "http://"+client, "--advertise-client-urls", "http://"+client,
		"--listen-peer-urls", "http://"+peer, "--initial-advertise-peer-urls", "http://"+peer, "--initial-cluster", "default=http://"+peer, "--log-level", "error")
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, server.Start())
	defer func() { _ = server.Wait() }() // it was killed
	defer func() { _ = server.Process.Kill() }()

	const size = 3
	addr := testneed.FreeAddress(t)
	token := "SYMMEM_TOKEN=0123456789abcdef"
	start := func() *command {
		return startCommand(t, environ(token, "SYMMEM_RENDEZVOUS_STORE=etcd://"+client+"/jobs"), "rendezvous", "--listen", addr, "--world-size", "3", "--job", "killed")
	}
	service := start()
	ranks := make(chan []result, 1)
	go func() {
		ranks <- ranksOf(t, size, func(rank int) []string {
			return []string{token, fmt.Sprint("SYMMEM_RANK=", rank), "SYMMEM_WORLD_SIZE=3", "SYMMEM_JOB=killed", "SYMMEM_RENDEZVOUS_ADDR=" + addr, "SYMMEM_RENDEZVOUS_SERVED=true"}
		}, same("verify", "--short", "--backend", "host", "--filter", "^(agreement|put|signals)", "--json"))
	}()
	kills := 0
	var ends []result
	for ends == nil {
		select {
		case ends = <-ranks:
		case <-time.After(300 * time.Millisecond):
			if kills == 5 {
				ends = <-ranks
				break
			}
			require.NoError(t, service.cmd.Process.Kill())
			<-service.ended
			service = start()
			kills++
		}
	}
	for rank, r := range ends {
		require.Equal(t, exit.OK, r.status, "rank %d: %s\n%s", rank, r.err, r.out)
	}
	assert.Positive(t, kills)
	var v verify.Verification
	require.NoError(t, json.Unmarshal([]byte(ends[0].out), &v))
	assert.Positive(t, v.Summary.Passed)
	assert.Zero(t, v.Summary.Failed)
	assert.Equal(t, exit.OK, service.status(t), service.err)
	t.Log("killed", kills, "times;", v.Summary.Passed, "cases")
}
