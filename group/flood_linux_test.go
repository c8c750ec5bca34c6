package group

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// runFlooded is rank 0 of two with few open files, or with none to spare. It prints where it listens, and how its Join ended.
func runFlooded(full bool) error {
	const files = 48
	limit := unix.Rlimit{Cur: files, Max: files}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	timeout := 30 * time.Second
	joined := make(chan error, 1)
	if full {
		timeout = 7 * time.Second
	}
	ctx := context.Background()
	var g *Group
	go func() {
		var err error
		g, err = Join(ctx, &Options{WorldSize: 2, Listener: l, Addr: l.Addr().String(), Token: longToken, Timeout: timeout})
		joined <- err
	}()
	if full {
		time.Sleep(50 * time.Millisecond) // so that it has its spare file; it works without, too
		var kept []*os.File
		for {
			f, err := os.Open(os.DevNull)
			if err != nil {
				break
			}
			kept = append(kept, f)
		}
		defer func() { _ = closeFiles(kept) }()
	}
	fmt.Println(l.Addr())
	err = <-joined
	fmt.Printf("%v\n", err)
	if err == nil {
		return g.Close(ctx)
	}
	if limit := new(FileLimitError); !errors.As(err, &limit) || limit.Limit != files {
		return fmt.Errorf("no word of the limit of %d: %w", files, err)
	}
	return nil
}

// startFlooded returns the address of a process that runs runFlooded, and what it prints after that.
func startFlooded(t *testing.T, role string) (addr string, end func() string) {
	t.Helper()
	cmd := exec.CommandContext(testContext(t), os.Args[0])
	cmd.Env = append(os.Environ(), "SYMMEM_TEST_GROUP_WORKER="+role)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	keepInherited(t)
	require.NoError(t, cmd.Start())
	stdout := bufio.NewReader(out)
	addr, err = stdout.ReadString('\n')
	require.NoError(t, err, &stderr)
	return strings.TrimSpace(addr), func() string {
		text, err := io.ReadAll(stdout)
		require.NoError(t, err)
		require.NoError(t, cmd.Wait(), &stderr)
		return string(text)
	}
}

// TestConnectionFlood opens many more connections than rank 0 may have open files, and joins.
func TestConnectionFlood(t *testing.T) {
	t.Parallel()
	addr, end := startFlooded(t, "flooded")
	for range 100 {
		c, err := net.Dial("tcp", addr)
		require.NoError(t, err)
		defer c.Close()
	}
	ctx := testContext(t)
	// The flood is older than this rank, and takes all places that there are for strangers.
	g, err := Join(ctx, &Options{Rank: 1, WorldSize: 2, Addr: addr, Token: longToken})
	require.NoError(t, err)
	require.NoError(t, g.Close(ctx))
	assert.Contains(t, end(), "<nil>")
}

// TestTableOfFilesFull joins where rank 0 can open no further file: both sides say so.
func TestTableOfFilesFull(t *testing.T) {
	t.Parallel()
	addr, end := startFlooded(t, "full")
	_, err := Join(testContext(t), &Options{Rank: 1, WorldSize: 2, Addr: addr, Token: longToken, Timeout: 4 * time.Second})
	var limit *FileLimitError
	require.ErrorAs(t, err, &limit)
	require.ErrorIs(t, err, ErrUnavailable)
	require.EqualValues(t, 48, limit.Limit)
	require.Contains(t, limit.Owner, "rank 0")
	t.Log(err)
	text := end()
	require.Contains(t, text, "too many open files")
	t.Log(text)
}

// TestManyStrangers: a peer without the token opens many more connections than there are places, and opens each again as soon as it is ended. A rank
// comes to its turn behind all that wait, whether they come from another address than it or from the same.
func TestManyStrangers(t *testing.T) {
	for name, from := range map[string]net.IP{"another address": net.IPv4(127, 0, 0, 2), "the same address": net.IPv4(127, 0, 0, 1)} {
		t.Run(name, func(t *testing.T) {
			lim := defaultLimits
			lim.pending, lim.hurry = 8, 20*time.Millisecond
			addr, service, finish := startJob(t, 2, Options{Token: longToken, Timeout: 20 * time.Second, limits: &lim})
			ctx, cancel := context.WithCancel(t.Context())
			var wait sync.WaitGroup
			defer func() {
				cancel()
				wait.Wait()
			}()
			const strangers = 200
			var opened atomic.Int64
			dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: from}}
			for range strangers {
				wait.Go(func() {
					for ctx.Err() == nil {
						c, err := dialer.DialContext(ctx, "tcp", addr)
						if err != nil {
							return // the service is gone
						}
						opened.Add(1)
						stop := interruptible(ctx, c)
						_, _ = c.Write(prologue(modeTLS))
						_, _ = io.Copy(io.Discard, c)
						stop()
						_ = c.Close()
					}
				})
			}
			require.Eventually(t, func() bool { return opened.Load() >= strangers }, 30*time.Second, time.Millisecond)
			finish()
			service.front.listener.mu.Lock()
			defer service.front.listener.mu.Unlock()
			require.Empty(t, service.front.listener.pending)
			require.Empty(t, service.front.listener.sources)
		})
	}
}

// TestSourceOf: a network of IPv6 is one source, and an address of IPv4 is one however it is written.
func TestSourceOf(t *testing.T) {
	for address, source := range map[string]string{
		"192.0.2.7:5": "192.0.2.7", "[::ffff:192.0.2.7]:5": "192.0.2.7",
		"[2001:db8:1:2:3:4:5:6]:7": "2001:db8:1:2::/64", "[2001:db8:1:2::9]:7": "2001:db8:1:2::/64", "[fe80::1%1]:7": "fe80::/64",
	} {
		a, err := net.ResolveTCPAddr("tcp", address)
		require.NoError(t, err)
		require.Equal(t, source, sourceOf(a))
	}
	require.Equal(t, "/tmp/socket", sourceOf(&net.UnixAddr{Name: "/tmp/socket", Net: "unix"}))
}
