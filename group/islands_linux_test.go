package group

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime/debug"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/internal/testneed"
)

// newApart joins n ranks that take each other for processes of their own.
func newApart(t *testing.T, n int) []*Group {
	old := islandsTimeout
	islandsTimeout = time.Second
	t.Cleanup(func() { islandsTimeout = old })
	groups := newJob(t, n, Options{Timeout: 30 * time.Second})
	apart := &roster{members: groups[0].Members(), world: groups[0].world}
	for r := range apart.members {
		apart.members[r].Process = fmt.Sprint("process of rank ", r)
	}
	for _, g := range groups {
		g.roster, g.members = apart, apart.members
	}
	return groups
}

// islandsOn finds the islands on every rank, which must be the same.
func islandsOn(t *testing.T, groups []*Group) *Islands {
	t.Helper()
	ctx := testContext(t)
	all := make([]*Islands, len(groups))
	requireNone(t, onAll(groups, func(g *Group) (err error) {
		all[g.Rank()], err = g.Islands(ctx)
		return err
	}))
	for _, islands := range all {
		require.Equal(t, all[0], islands)
	}
	return all[0]
}

// TestIslandsBetweenProcesses: processes of one machine find that they share memory, again without an exchange, and leave nothing behind.
func TestIslandsBetweenProcesses(t *testing.T) {
	workers := startWorkers(t, "islands", 3, -1)
	for rank, r := range reports(t, workers, -1) {
		assert.Equalf(t, "0-2 ", r.Text, "rank %d", rank)
		assert.Emptyf(t, r.Closed, "rank %d", rank)
	}
}

// TestIslandsLeaveNothing: no file and no memory stays, and files are passed as before.
func TestIslandsLeaveNothing(t *testing.T) {
	groups := newApart(t, 4)
	ctx := testContext(t)
	find := func() {
		assert.Equal(t, "0-3", islandsOn(t, groups).String())
		for _, g := range groups {
			g.islands.Store(nil)
		}
	}
	find()
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // it closes what was forgotten
	before := openFiles(t)
	for range 20 {
		find()
	}
	requireOpenFiles(t, before)
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	assert.NotContains(t, string(maps), "memfd:symmem")
	requireNone(t, onAll(groups, func(g *Group) error { return exchangePipes(ctx, g) }))
}

// TestDeafIslands: a rank that cannot receive files is alone, in everybody's eyes, and nobody waits long.
func TestDeafIslands(t *testing.T) {
	groups := newApart(t, 3)
	groups[1].session.files.(*socketCarrier).read = func(messageReader, []byte, []byte) (int, int, int, error) {
		return 0, 0, 0, errors.New("deaf")
	}
	islands := islandsOn(t, groups)
	assert.Equal(t, "0,2; 1", islands.String())
	// Who passes it a file may find its socket closed by then, and says so, too.
	assert.Contains(t, islands.Why(), "rank 1 cannot pass memory to rank 0: receiving a file: deaf")
}

// TestIslandsInVain: where a rank refuses what others pass it, all know before the time is up that ranks have for each other, also where that is short.
func TestIslandsInVain(t *testing.T) {
	groups := newApart(t, 2)
	islandsTimeout = time.Hour // newApart puts it back
	for _, g := range groups {
		g.session.timeout = 2 * time.Second
	}
	groups[1].session.files.(*socketCarrier).read = func(messageReader, []byte, []byte) (int, int, int, error) {
		return 0, 0, 0, io.EOF
	}
	islands := islandsOn(t, groups)
	assert.Equal(t, "0; 1", islands.String())
	// Rank 0 may find the connection closed while it sends; then rank 1 has nothing to wait for.
	assert.Regexp(t, "rank 1 cannot pass memory to rank 0: |rank 0 cannot pass memory to rank 1: ", islands.Why())
}

// TestDeafIslandsSay: a rank that cannot receive files says so, too, where nobody has managed to send it one, for it hung up.
func TestDeafIslandsSay(t *testing.T) {
	groups := newApart(t, 3)
	why := map[int]string{2: "its own reason"}
	trial := newIslandTrial(groups[0], groups[0].take(4), why)
	defer trial.end()
	trial.x.fail(errors.New("deaf"))
	assert.Empty(t, trial.write(testContext(t), nil))
	assert.Equal(t, map[int]string{1: "deaf", 2: "its own reason"}, why)
}

// byHand takes a rank's part in looking for islands, with what word gives for each round.
func byHand(ctx context.Context, g *Group, word func(round int) []byte) ([]islandsWord, error) {
	var words []islandsWord
	seq := g.take(4)
	for round, op := range []string{"tickets", "passing files", "writing", "reading"} {
		o, err := g.call(ctx, seq+uint64(round), &arrival{kind: kindAllGather, op: "islands: " + op, data: word(round)}, nil)
		if err != nil {
			return nil, err
		}
		words = readIslands(o.blobs)
	}
	return words, nil
}

// TestOddIslanders: what a rank of another version says, or one that makes things up, puts nobody but itself elsewhere.
func TestOddIslanders(t *testing.T) {
	everybody := func(version int, why string) func(int) []byte {
		return func(int) []byte {
			return fmt.Appendf(nil, `{"Version":%d,"Ticket":"e30=","Ranks":[0,1,2,-4,1000],"Why":{"0":%q,"77":"x"}}`, version, why)
		}
	}
	for name, c := range map[string]struct {
		word func(round int) []byte
		why  string
	}{
		"another version":     {everybody(2, ""), "run the same version of symmem everywhere"},
		"nothing":             {func(int) []byte { return nil }, "run the same version of symmem everywhere"},
		"no text":             {func(int) []byte { return []byte("\x00{{") }, "run the same version of symmem everywhere"},
		"it reaches all":      {everybody(1, ""), "rank 0 cannot pass memory to rank 1: rank 1 has no place to receive files"},
		"a long reason":       {everybody(1, strings.Repeat("long ", 10000)), "rank 1 cannot pass memory to rank 0"},
		"at first, not later": {func(round int) []byte { return everybody(1+round, "")(0) }, "rank 0 cannot pass memory to rank 1"},
	} {
		t.Run(name, func(t *testing.T) {
			groups := newApart(t, 3)
			ctx := testContext(t)
			var found [3]*Islands
			requireNone(t, onAll(groups, func(g *Group) (err error) {
				if g.Rank() == 1 {
					_, err = byHand(ctx, g, c.word)
				} else {
					found[g.Rank()], err = g.Islands(ctx)
				}
				return err
			}))
			require.Equal(t, found[0], found[2])
			assert.Equal(t, "0,2; 1", found[0].String())
			assert.Contains(t, found[0].Why(), c.why)
			assert.LessOrEqual(t, len(found[0].Why()), maxText)
		})
	}
}

// TestLyingIslander: a rank that says that it wrote into others' memory, and did not, is alone.
func TestLyingIslander(t *testing.T) {
	groups := newApart(t, 2)
	ctx := testContext(t)
	var found *Islands
	requireNone(t, onAll(groups, func(g *Group) (err error) {
		if g.Rank() == 0 {
			found, err = g.Islands(ctx)
			return err
		}
		// It has a place to receive files, takes part in everything, and never writes.
		trial := newIslandTrial(g, g.seq.Load(), map[int]string{})
		defer trial.end()
		_, err = byHand(ctx, g, func(int) []byte {
			text, _ := json.Marshal(islandsWord{Version: islandsVersion, Ranks: []int{0}, Ticket: trial.ticket()})
			return text
		})
		return err
	}))
	assert.Equal(t, "0; 1", found.String())
	assert.Contains(t, found.Why(), "rank 0 cannot pass memory to rank 1")
}

// TestOlderIslander: a rank that does everything right, as another version does it, is alone.
func TestOlderIslander(t *testing.T) {
	for _, version := range []int{islandsVersion, islandsVersion + 1} {
		groups := newApart(t, 2)
		ctx := testContext(t)
		var found *Islands
		requireNone(t, onAll(groups, func(g *Group) (err error) {
			if g.Rank() == 0 {
				found, err = g.Islands(ctx)
				return err
			}
			seq := g.take(4)
			trial := newIslandTrial(g, seq, map[int]string{})
			defer trial.end()
			word := islandsWord{Version: version, Ticket: trial.ticket()}
			for round, op := range []string{"tickets", "passing files", "writing", "reading"} {
				text, _ := json.Marshal(word)
				o, err := g.call(ctx, seq+uint64(round), &arrival{kind: kindAllGather, op: "islands: " + op, data: text}, nil)
				if err != nil {
					return err
				}
				words := readIslands(o.blobs)
				switch round {
				case 0:
					word.Ranks = trial.send(ctx, words)
				case 1:
					word.Ranks = trial.write(ctx, []int{0})
				case 2:
					word.Ranks = trial.read([]int{0})
				}
			}
			return nil
		}))
		assert.Equal(t, map[bool]string{true: "0,1", false: "0; 1"}[version == islandsVersion], found.String())
	}
}

// TestIslanderDies: the death of a rank, in any round, ends the call on all others with its number.
func TestIslanderDies(t *testing.T) {
	for round := range 4 {
		t.Run(fmt.Sprint("round=", round), func(t *testing.T) {
			groups := newApart(t, 3)
			ctx := testContext(t)
			failures := onAll(groups, func(g *Group) error {
				if g.Rank() != 1 {
					_, err := g.Islands(ctx)
					return err
				}
				_, err := byHand(ctx, g, func(r int) []byte {
					if r == round {
						g.Abort("test")
					}
					return []byte(`{"Version":1}`)
				})
				return err
			})
			for rank, err := range failures {
				require.ErrorIsf(t, err, ErrPeerLost, "rank %d", rank)
				var lost *PeerLostError
				require.ErrorAs(t, err, &lost)
				require.Equal(t, 1, lost.Rank)
			}
			// The survivors find theirs.
			survivors := make([]*Group, 0, 2)
			var mu sync.Mutex
			requireNone(t, onAll([]*Group{groups[0], groups[2]}, func(g *Group) error {
				sub, err := g.Sub(ctx, []int{0, 2})
				mu.Lock()
				defer mu.Unlock()
				survivors = append(survivors, sub)
				return err
			}))
			requireNone(t, onAll(survivors, func(g *Group) error {
				islands, err := g.Islands(ctx)
				if err == nil && islands.String() != "0,1" {
					err = errors.New(islands.String())
				}
				return err
			}))
		})
	}
}

// TestIslanderGivesUp: a rank whose context ends fails the call on all, which can be made again.
func TestIslanderGivesUp(t *testing.T) {
	groups := newApart(t, 2)
	ctx, cancel := context.WithCancel(testContext(t))
	cancel()
	_, err := groups[0].Islands(ctx) // before the other comes: a call to which all have come is over, whatever their contexts
	require.ErrorIs(t, err, context.Canceled)
	_, err = groups[1].Islands(testContext(t))
	var abandoned *AbandonedError
	require.ErrorAs(t, err, &abandoned)
	require.Equal(t, 0, abandoned.Rank)
	assert.Equal(t, "0,1", islandsOn(t, groups).String())
}

// impostor is the main function of a process that waits at a socket for a file that is meant for a rank, and says what came.
func runImpostor() error {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: "@symmem-test-impostor-" + fmt.Sprint(os.Getpid()), Net: "unixpacket"})
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	conn, err := l.AcceptUnix()
	if err != nil {
		return err
	}
	control := make([]byte, unix.CmsgSpace(16))
	_, controlled, _, err := readMessage(conn, make([]byte, 10000), control)
	fmt.Println(controlled, errors.Is(err, io.EOF))
	return nil
}

// TestImpostors: a process at the address of a rank gets no file, if it belongs to another user or is not the rank's.
func TestImpostors(t *testing.T) {
	for name, c := range map[string]struct {
		user *syscall.Credential
		why  string
	}{
		"another user":    {&syscall.Credential{Uid: 65534, Gid: 65534}, "another user"},
		"another process": {nil, "is at the other end, and rank 1 is process"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.user != nil && os.Geteuid() != 0 {
				testneed.Missing(t, "root", "only root starts processes of another user")
			}
			self, err := os.Open("/proc/self/exe") // which another user may not be able to open by its path
			require.NoError(t, err)
			defer self.Close()
			cmd := exec.CommandContext(testContext(t), "/proc/self/fd/3")
			cmd.ExtraFiles = []*os.File{self}
			cmd.Env = append(os.Environ(), "SYMMEM_TEST_GROUP_WORKER=impostor")
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Credential: c.user}
			cmd.Stderr = os.Stderr
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
			said := bufio.NewReader(out)
			address, err := said.ReadString('\n')
			require.NoError(t, err)

			groups := newApart(t, 2)
			ctx := testContext(t)
			var found *Islands
			requireNone(t, onAll(groups, func(g *Group) (err error) {
				if g.Rank() == 0 {
					found, err = g.Islands(ctx)
					return err
				}
				ticket, _ := json.Marshal(fileTicket{Address: strings.TrimSpace(address), NetNS: namespace("net"), PIDNS: namespace("pid")})
				_, err = byHand(ctx, g, func(int) []byte {
					text, _ := json.Marshal(islandsWord{Version: islandsVersion, Ticket: ticket, Ranks: []int{0}})
					return text
				})
				return err
			}))
			assert.Equal(t, "0; 1", found.String())
			assert.Contains(t, found.Why(), c.why)
			got, err := said.ReadString('\n')
			require.NoError(t, err)
			assert.Equal(t, "0 true\n", got, "the impostor got something")
		})
	}
}
