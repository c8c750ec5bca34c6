package group

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// crowdedLimit is how many files the process of runCrowded may have open, and on their way.
const crowdedLimit = 120

// crowdedReport is what became of the exchanges of runCrowded, by rank.
type crowdedReport struct {
	Waited, Ended, GaveUp []string // the errors; in the second exchange the connections that wait are ended
	Limited               []bool   // what gave up is a FileLimitError with the limit
}

// runCrowded is a process that has two ranks, and as many files on their way as it may have. The ranks exchange files until some were taken, and then while none is.
func runCrowded() error {
	limit := unix.Rlimit{Cur: crowdedLimit, Max: crowdedLimit}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	groups, failures := make([]*Group, 2), make([]error, 2)
	var wait sync.WaitGroup
	var dialed atomic.Int64
	for rank := range groups {
		o := &Options{Rank: rank, WorldSize: 2, Addr: l.Addr().String(), Timeout: 30 * time.Second}
		if rank == 0 {
			o.Listener = l
		}
		wait.Go(func() {
			if groups[rank], failures[rank] = Join(ctx, o); failures[rank] == nil {
				groups[rank].session.files.(*socketCarrier).dial = func(ctx context.Context, address string) (*net.UnixConn, error) {
					dialed.Add(1)
					return dialFiles(ctx, address)
				}
			}
		})
	}
	wait.Wait()
	if err := errors.Join(failures...); err != nil {
		return err
	}

	// until exchanges files while too many are on their way, which are taken when the ranks have connected so often.
	until := func(dials int64) (texts []string, err error) {
		take, err := crowd()
		if err != nil {
			return nil, err
		}
		dialed.Store(0)
		over, taken := make(chan struct{}), make(chan error, 1)
		go func() {
			for {
				select {
				case <-over:
					taken <- take()
					return
				case <-time.After(5 * time.Millisecond):
				}
				if dialed.Load() >= dials {
					time.Sleep(20 * time.Millisecond) // so that they have tried; it holds if they have not
					taken <- take()
					return
				}
				for _, g := range groups {
					if dials > 2 { // as where others have all connections that a rank serves
						g.session.files.(*socketCarrier).endSilent()
					}
				}
			}
		}()
		for _, err := range onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }) {
			texts = append(texts, fmt.Sprint(err))
		}
		close(over)
		return texts, <-taken
	}
	var report crowdedReport
	if report.Waited, err = until(2); err != nil {
		return err
	}
	if report.Ended, err = until(6 * fileTries); err != nil {
		return err
	}

	take, err := crowd()
	if err != nil {
		return err
	}
	short, end := context.WithTimeout(ctx, 2*time.Second)
	defer end()
	for _, err := range onAll(groups, func(g *Group) error { return exchangePipes(short, g) }) {
		limited, ok := errors.AsType[*FileLimitError](err)
		report.GaveUp, report.Limited = append(report.GaveUp, fmt.Sprint(err)), append(report.Limited, ok && limited.Limit == crowdedLimit)
	}
	if err := take(); err != nil {
		return err
	}
	failures = onAll(groups, func(g *Group) error { return errors.Join(exchangePipes(ctx, g), g.Close(ctx)) })
	return errors.Join(json.NewEncoder(os.Stdout).Encode(report), errors.Join(failures...))
}

// crowd sends more files than may be on their way; take takes them.
func crowd() (take func() error, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	files := make([]int, crowdedLimit+1)
	for i := range files {
		files[i] = 2
	}
	if err := unix.Sendmsg(pair[0], []byte{0}, unix.UnixRights(files...), nil, 0); err != nil {
		return nil, err
	}
	return func() error { return errors.Join(unix.Close(pair[0]), unix.Close(pair[1])) }, nil // what nobody has taken by now is gone
}

// TestTooManyFilesOnTheirWay: files of the user that others have sent, and nobody has taken, hold up an exchange and do not fail it. What gives up says what is wrong.
func TestTooManyFilesOnTheirWay(t *testing.T) {
	self, err := os.Open("/proc/self/exe") // which another user may not be able to open by its path
	require.NoError(t, err)
	defer self.Close()
	cmd := exec.CommandContext(testContext(t), "/proc/self/fd/3")
	cmd.ExtraFiles = []*os.File{self}
	cmd.Env = append(os.Environ(), "SYMMEM_TEST_GROUP_WORKER=crowded")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() == 0 { // for whom there is no such limit
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534}
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	keepInherited(t)
	out, err := cmd.Output()
	require.NoError(t, err, &stderr)
	var report crowdedReport
	require.NoError(t, json.Unmarshal(out, &report))
	assert.Equal(t, []string{"<nil>", "<nil>"}, report.Waited)
	assert.Equal(t, []string{"<nil>", "<nil>"}, report.Ended)
	assert.Contains(t, report.Limited, true, report.GaveUp)
	for _, text := range report.GaveUp {
		assert.Contains(t, text, "too many open files: the limit of this process is 120")
		assert.Contains(t, text, "on their way through sockets")
	}
}
