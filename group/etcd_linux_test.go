package group

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/group/durable"
	_ "github.com/symmem/symmem/group/durable/etcd"
	"github.com/symmem/symmem/internal/testneed"
)

// etcdServer is a server of etcd's own, a process.
type etcdServer struct {
	url string
	dir string
	cmd *exec.Cmd
}

// theEtcd is the one that most tests share; TestMain ends it.
var theEtcd struct {
	sync.Once
	server *etcdServer
	err    error
}

// etcdURL returns the URL of a place in a server that is there until all tests have ended.
func etcdURL(t *testing.T) string {
	t.Helper()
	if _, err := exec.LookPath("etcd"); err != nil {
		testneed.Missing(t, "etcd", err)
	}
	theEtcd.Do(func() {
		dir, err := os.MkdirTemp("", "etcd")
		if theEtcd.err = err; err == nil {
			theEtcd.server, theEtcd.err = startEtcd(dir, freePort(t), freePort(t))
		}
	})
	require.NoError(t, theEtcd.err)
	return theEtcd.server.url + "/test"
}

func endEtcd() {
	if s := theEtcd.server; s != nil {
		s.kill()
		_ = os.RemoveAll(s.dir) // it is in the system's temporary folder
	}
}

func freePort(t testing.TB) int {
	t.Helper()
	return int(netip.MustParseAddrPort(testneed.FreeAddress(t)).Port())
}

// startEtcd starts a server that keeps its data in dir.
func startEtcd(dir string, client, peer int, flags ...string) (*etcdServer, error) {
	at, peers := fmt.Sprintf("http://127.0.0.1:%d", client), fmt.Sprintf("http://127.0.0.1:%d", peer)
	s := &etcdServer{url: fmt.Sprintf("etcd://127.0.0.1:%d", client), dir: dir}
	s.cmd = exec.Command("etcd", append([]string{"--data-dir", filepath.Join(dir, "data"), "--listen-client-urls", at, "--advertise-client-urls", at,
		"--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers, "--initial-cluster", "default=" + peers,
		"--heartbeat-interval", "20", "--election-timeout", "200", "--log-level", "error"}, flags...)...)
	log, err := os.OpenFile(filepath.Join(dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	s.cmd.Stdout, s.cmd.Stderr = log, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for {
		store, err := durable.Open(ctx, s.url+"/probe", durable.Options{Name: "probe", TTL: time.Second})
		if err == nil {
			return s, store.Close()
		}
		if ctx.Err() != nil {
			s.kill()
			text, _ := os.ReadFile(filepath.Join(dir, "log"))
			return nil, fmt.Errorf("etcd does not answer: %w: %s", err, text)
		}
	}
}

func (s *etcdServer) kill() {
	_ = s.cmd.Process.Signal(syscall.SIGCONT)
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait() // it was killed
}
