package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/tensor"
)

func init() { jobs["sockets"] = socketsJob }

// socketsJob is one rank that moves memory to the next one, and says which sockets of its own others could send to at any time from its
// first moment on: those of TCP that listen, and all of UDP. With them it names shared memory that other users can write.
func socketsJob(ctx context.Context, cfg config.Config, _ string, say func(any)) error {
	stop, done := make(chan struct{}), make(chan struct{})
	seen := map[string]bool{}
	var failed error
	var mu sync.Mutex
	look := func() {
		open, err := openSockets(os.Getpid())
		loose, shmErr := looseMemory(os.Getpid())
		mu.Lock()
		defer mu.Unlock()
		failed = errors.Join(failed, err, shmErr)
		for _, s := range append(open, loose...) {
			seen[s] = true
		}
	}
	go func() {
		defer close(done)
		for {
			look()
			select {
			case <-stop:
				return
			case <-time.After(2 * time.Millisecond):
			}
		}
	}()
	err := ringOnce(ctx, cfg, look)
	close(stop)
	<-done
	sockets := []string{}
	for s := range seen {
		sockets = append(sockets, s)
	}
	slices.Sort(sockets)
	say(sockets)
	return errors.Join(err, failed)
}

// ringOnce opens a rank, puts a tensor to the next rank, calls moved while all that it took is open, and closes. A look that only ran
// beside it could take longer on a busy machine than the tensor lives.
func ringOnce(ctx context.Context, cfg config.Config, moved func()) (err error) {
	r, err := symmem.Open(ctx, cfg, &symmem.Options{BootID: os.Getenv(bootVariable)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close(ctx)) }()
	t, err := r.Zeros(ctx, tensor.Int32, 1<<16)
	if err != nil {
		return err
	}
	s, err := r.NewStream()
	if err != nil {
		return err
	}
	if err := t.Rendezvous(ctx); err != nil {
		return err
	}
	next, before := (r.Rank()+1)%r.WorldSize(), (r.Rank()+r.WorldSize()-1)%r.WorldSize()
	err = errors.Join(t.Put(s, next, t), t.Signal(s, next, 0), t.Wait(s, before, 0), t.Barrier(s, 1), s.Synchronize(ctx))
	moved()
	return errors.Join(err, s.Close(), t.Close(ctx))
}

// openSockets lists the sockets of a process that others could send to, as "tcp 127.0.0.1:123".
func openSockets(pid int) ([]string, error) {
	own := map[string]bool{}
	folder := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		to, err := os.Readlink(filepath.Join(folder, e.Name()))
		if err != nil {
			continue // it was closed meanwhile
		}
		if inode, ok := strings.CutPrefix(to, "socket:["); ok {
			own[strings.TrimSuffix(inode, "]")] = true
		}
	}
	var open []string
	for _, protocol := range []string{"tcp", "tcp6", "udp", "udp6"} {
		table, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, protocol))
		if errors.Is(err, os.ErrNotExist) {
			continue // a kernel without IPv6
		} else if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(table)) {
			// Columns as in proc_pid_net(5): number, local address, remote address, state, ..., inode at 9. State 0A is listening.
			fields := strings.Fields(line)
			if len(fields) < 10 || !own[fields[9]] || strings.HasPrefix(protocol, "tcp") && fields[3] != "0A" {
				continue
			}
			addr, err := procAddr(fields[1])
			if err != nil {
				return nil, err
			}
			open = append(open, protocol+" "+addr.String())
		}
	}
	return open, nil
}

// looseMemory lists the System V shared memory that a process has made and that not only its user may use, as "shared memory 7, mode 660".
func looseMemory(pid int) ([]string, error) {
	table, err := os.ReadFile("/proc/sysvipc/shm")
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil // a kernel without it
	} else if err != nil {
		return nil, err
	}
	var loose []string
	for line := range strings.Lines(string(table)) {
		// Columns as in proc_sysvipc(5): key, id, permissions, size, creator's process.
		fields := strings.Fields(line)
		if len(fields) < 5 || fields[4] != strconv.Itoa(pid) {
			continue
		}
		mode, err := strconv.ParseUint(fields[2], 8, 32)
		if err != nil {
			return nil, err
		}
		if mode&0o077 != 0 {
			loose = append(loose, fmt.Sprintf("shared memory %s, mode %o", fields[1], mode&0o777))
		}
	}
	return loose, nil
}

// procAddr reads an address of /proc/net/tcp: words of 32 bits in the order of the machine, and the port.
func procAddr(text string) (netip.AddrPort, error) {
	host, port, _ := strings.Cut(text, ":")
	n, err := strconv.ParseUint(port, 16, 16)
	if err != nil || len(host)%8 != 0 {
		return netip.AddrPort{}, fmt.Errorf("address %q: %w", text, err)
	}
	var raw []byte
	for ; host != ""; host = host[8:] {
		word, err := strconv.ParseUint(host[:8], 16, 32)
		if err != nil {
			return netip.AddrPort{}, fmt.Errorf("address %q: %w", text, err)
		}
		raw = append(raw, byte(word), byte(word>>8), byte(word>>16), byte(word>>24))
	}
	addr, _ := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(addr.Unmap(), uint16(n)), nil
}

// socketsOf runs socketsJob and gives what each rank said.
func socketsOf(t *testing.T, on *hosts, size int, env ...string) [][]string {
	t.Helper()
	world := runWorldOn(t, on, size, "sockets", append([]string{"SYMMEM_BACKEND=nixl", "SYMMEM_DEVICE=host"}, env...)...)
	said := make([][]string, size)
	for r, p := range world {
		require.NoErrorf(t, p.err, "rank %d", r)
		require.Emptyf(t, p.end.Error, "rank %d", r)
		require.Lenf(t, p.lines, 1, "rank %d", r)
		require.NoError(t, json.Unmarshal(p.lines[0], &said[r]))
	}
	return said
}

// TestSocketsOnOneHost: the ranks of one host open nothing that others could connect to, but for the rendezvous service, and no memory
// that others could write.
func TestSocketsOnOneHost(t *testing.T) {
	requireBackend(t, "nixl")
	for r, said := range socketsOf(t, nil, 3) {
		if r == 0 {
			assert.LessOrEqual(t, len(said), 1, "%v", said)
			said = slices.DeleteFunc(said, func(s string) bool { return strings.HasPrefix(s, "tcp 127.0.0.1:") })
		}
		assert.Empty(t, said, "rank %d", r)
	}
}

// TestSocketsBetweenHosts: ranks of two hosts open ports on the interface that leads to the rendezvous service and on no other one, or on
// those that were named.
func TestSocketsBetweenHosts(t *testing.T) {
	requireHostNIXL(t)
	on := hostsOf(t, 1, 1)
	rendezvous := netip.MustParseAddrPort(on.addr)
	check := func(said [][]string, subnet string) {
		for r, sockets := range said {
			data := 0
			for _, s := range sockets {
				_, text, _ := strings.Cut(s, " ")
				addr, err := netip.ParseAddrPort(text)
				require.NoError(t, err)
				if r == 0 && addr == rendezvous {
					continue
				}
				data++
				assert.Truef(t, netip.MustParsePrefix(subnet).Contains(addr.Addr()), "rank %d listens on %s", r, s)
			}
			assert.Positivef(t, data, "rank %d moves memory by no port of its own: %v", r, sockets)
		}
	}
	check(socketsOf(t, &on.hosts, 2), "10.213.77.0/24")
	check(socketsOf(t, &on.hosts, 2, "SYMMEM_NET_DEVICES=second"), "10.213.78.0/24")

	world := runWorldOn(t, &on.hosts, 2, "sockets", "SYMMEM_BACKEND=nixl", "SYMMEM_UNPROTECTED_NETWORK=refuse", "SYMMEM_DEVICE=host")
	for r, p := range world {
		assert.Containsf(t, p.end.Error, "unprotected-network is refuse", "rank %d", r)
	}
	world = runWorldOn(t, &on.hosts, 2, "sockets", "SYMMEM_BACKEND=nixl", "SYMMEM_NET_DEVICES=third", "SYMMEM_DEVICE=host")
	for r, p := range world {
		assert.Containsf(t, p.end.Error, `net-devices`, "rank %d", r)
		assert.Containsf(t, p.end.Error, `cable`, "rank %d", r)
	}
}
