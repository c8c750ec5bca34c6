package tests

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// TestTwoHosts runs the suite between two network namespaces that are joined by cables: as far as the library can tell, two
// hosts. They share no sockets, each rank has a boot id of its own, and UCX goes by TCP. It needs to be root; where that is
// not so it is skipped, which is a failure with "netns" in SYMMEM_TEST_REQUIRE.
func TestTwoHosts(t *testing.T) {
	const name = "nixl"
	requireBackend(t, name)
	if deviceKind(t, name) != device.Host {
		skipWithout(t, "netns", "backend nixl works on GPUs here; between hosts it is tried with memory of the CPU")
	}
	onProcessesAt(t, twoHosts(t), name, 2)
}

// cables join the two hosts. The rendezvous service is reached by the first.
var cables = []string{"cable", "second"}

// twoHosts makes two namespaces, each with one end of each cable, that pretend to be hosts with one rank each.
func twoHosts(t *testing.T) *hosts {
	t.Helper()
	return hostsOf(t, 1)
}

// hostsOf is twoHosts with so many ranks on the first host, and the others on the second.
func hostsOf(t *testing.T, first int) *hosts {
	t.Helper()
	on := twoContainers(t, first)
	on.env = func(rank int) []string {
		host := 0
		if rank >= first {
			host, rank = 1, rank-first
		}
		return []string{fmt.Sprintf("%s=host %d", bootVariable, host), fmt.Sprintf("SYMMEM_LOCAL_RANK=%d", rank), fmt.Sprintf("SYMMEM_LOCAL_WORLD_SIZE=%d", first)}
	}
	return on
}

// TestIslands runs the suite over two hosts with two ranks each, in network namespaces as those of TestTwoHosts: what is between the ranks of a host
// goes by address, and the rest by TCP.
func TestIslands(t *testing.T) {
	const name = "nixl"
	requireBackend(t, name)
	if deviceKind(t, name) != device.Host {
		skipWithout(t, "netns", "backend nixl works on GPUs here; between hosts it is tried with memory of the CPU")
	}
	onProcessesAt(t, hostsOf(t, 2), name, 4)
}

// twoContainers makes two network namespaces on this host, each with one end of each cable, as containers of one host have. The first has the
// first ranks, so many of them, and the second all others.
func twoContainers(t *testing.T, first int) *hosts {
	t.Helper()
	var names, addrs [2]string
	run := func(args ...string) {
		out, err := exec.Command("ip", args...).CombinedOutput()
		if err == nil {
			return
		}
		skipWithout(t, "netns", "network namespaces cannot be made here, for which one must be root and have the program ip: ip %s: %v: %s",
			strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	for i := range names {
		names[i] = fmt.Sprintf("symmem-%d-%d", os.Getpid(), i)
		addrs[i] = fmt.Sprintf("10.213.77.%d", i+1)
		run("netns", "add", names[i])
		t.Cleanup(func() {
			if out, err := exec.Command("ip", "netns", "del", names[i]).CombinedOutput(); err != nil {
				t.Errorf("removing namespace %s: %v: %s", names[i], err, out)
			}
		})
		run("-n", names[i], "link", "set", "lo", "up")
	}
	for c, cable := range cables {
		run("-n", names[0], "link", "add", cable, "type", "veth", "peer", "name", cable, "netns", names[1])
		for i := range names {
			run("-n", names[i], "addr", "add", fmt.Sprintf("10.213.%d.%d/24", 77+c, i+1), "dev", cable)
			run("-n", names[i], "link", "set", cable, "up")
		}
	}
	for i := range names {
		for _, cable := range cables {
			// The kernel finds the other end a little later.
			require.Eventually(t, func() bool {
				out, err := exec.Command("ip", "-n", names[i], "link", "show", cable).Output()
				return err == nil && strings.Contains(string(out), "state UP")
			}, 10*time.Second, 50*time.Millisecond)
		}
	}
	return &hosts{
		addr:  addrs[0] + ":17717",
		names: names[:],
		command: func(rank int) []string {
			if rank < first {
				return []string{"ip", "netns", "exec", names[0]}
			}
			return []string{"ip", "netns", "exec", names[1]}
		},
		env: func(int) []string { return nil },
	}
}

func init() { jobs["islands"] = islandsJob }

// islander is what one rank has found.
type islander struct {
	Backend  string
	Islands  string
	Pointers int      // peers with an address
	Refused  []string // the reasons why other backends were not taken
}

// islandsJob is one rank that opens, uses what it was given, and says what that is.
func islandsJob(ctx context.Context, cfg config.Config, _ string, say func(any)) (err error) {
	r, err := symmem.Open(ctx, cfg, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close(ctx)) }()
	islands, err := r.Group().Islands(ctx)
	if err != nil {
		return err
	}
	found := islander{Backend: r.Backend(), Islands: islands.String(), Pointers: r.Capabilities().PointerPeers}
	for _, refusal := range r.Refusals() {
		found.Refused = append(found.Refused, refusal.Name+": "+refusal.Err)
	}
	if err := tryNeighbours(ctx, r, islands); err != nil {
		return err
	}
	say(found)
	return nil
}

// tryNeighbours gives every rank the number of every other one by a put and a signal, looks at those that have an address here, and runs an
// all-reduce.
func tryNeighbours(ctx context.Context, r *symmem.Rank, islands *group.Islands) (err error) {
	me, size := r.Rank(), r.WorldSize()
	t, err := r.Zeros(ctx, tensor.Int64, int64(size))
	if err != nil {
		return err
	}
	own, err := r.Zeros(ctx, tensor.Int64, 1)
	if err != nil {
		return err
	}
	s, err := r.NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(t.Rendezvous(ctx), tensor.Write(own.Local(), []int64{int64(me + 1)}, 0)); err != nil {
		return err
	}
	place, err := t.Sub(int64(me), 1)
	if err != nil {
		return err
	}
	for peer := range size {
		if err := errors.Join(place.PutSignal(s, peer, own, 0)); err != nil {
			return err
		}
	}
	for peer := range size {
		if err := t.Wait(s, peer, 0); err != nil {
			return err
		}
	}
	if err := errors.Join(t.Barrier(s, 1), s.Synchronize(ctx)); err != nil {
		return err
	}
	for peer := range size {
		view, err := t.Remote(peer)
		switch near := islands.Same(me, peer); {
		case !near && !errors.Is(err, symmem.ErrNotReachable):
			return fmt.Errorf("rank %d is in another island, and its tensor is there: %v", peer, err)
		case !near:
			continue
		case err != nil:
			return err
		default:
			got := make([]byte, 8*size)
			if err := r.Device().CopyToHost(got, view.Ptr()); err != nil {
				return err
			}
			for other := range size {
				if n := binary.LittleEndian.Uint64(got[8*other:]); n != uint64(other+1) {
					return fmt.Errorf("rank %d has %d of rank %d", peer, n, other)
				}
			}
		}
	}
	if err := errors.Join(r.Barrier(ctx), r.AllReduce(ctx, t, kernels.Sum), r.Synchronize(ctx)); err != nil {
		return err
	}
	sum, err := tensor.ReadAll[int64](t.Local())
	if err != nil {
		return err
	}
	for other, n := range sum {
		if n != int64(size*(other+1)) {
			return fmt.Errorf("the sum of rank %d's numbers is %d", other, n)
		}
	}
	return errors.Join(s.Close(), t.Close(ctx), own.Close(ctx))
}

// TestContainersOfOneHost: between two network namespaces of one host, as containers have, no backend is chosen whose first rendezvous fails: it
// is nixl where that is, and otherwise all ranks are told the same reason, and what to do.
func TestContainersOfOneHost(t *testing.T) {
	const reason = "runs in another network namespace"
	on := twoContainers(t, 1)
	for _, p := range runWorldOn(t, on, 2, "islands", "SYMMEM_BACKEND=host") {
		assert.Contains(t, p.end.Error, reason)
		assert.Contains(t, p.end.Error, "give the containers of one host one network namespace")
		assert.NotContains(t, p.end.Error, "\n", "one line")
	}
	refused := func(p *process) bool { return strings.Contains(p.end.Error, reason) }
	world := runWorldOn(t, on, 2, "islands", "SYMMEM_BACKEND=auto", "SYMMEM_NIXL_LIBRARY=/none", "SYMMEM_DEVICE=host")
	for _, p := range world {
		assert.True(t, refused(p), p.end.Error)
	}
	t.Run("nixl", func(t *testing.T) {
		requireBackend(t, "nixl")
		check := func(on *hosts, size int, islands string, pointers ...int) {
			for rank, p := range runWorldOn(t, on, size, "islands", "SYMMEM_BACKEND=auto", "SYMMEM_DEVICE=host") {
				require.Empty(t, p.end.Error)
				var found islander
				require.Len(t, p.lines, 1)
				require.NoError(t, json.Unmarshal(p.lines[0], &found))
				assert.Equal(t, "nixl", found.Backend, "rank %d", rank)
				assert.Equal(t, islands, found.Islands)
				assert.Equal(t, pointers[rank], found.Pointers)
				assert.Contains(t, strings.Join(found.Refused, "\n"), reason)
			}
		}
		check(on, 2, "0; 1", 0, 0)
		check(on, 4, "0; 1-3", 0, 2, 2, 2)
	})
}

func init() { jobs["cut_off"] = cutOffJob }

// cutOff is what a rank says that was cut off from others, or whose peer has died.
type cutOff struct {
	Running bool          // it says that its all-reduces are under way, and nothing else
	Error   string        // of the all-reduce that failed
	Lost    bool          // the error is ErrPeerLost
	Took    time.Duration // since the last one that did not
	Closing string        // what else than a loss closing told of
}

// cutOffJob is one rank that runs all-reduces over islands until one fails.
func cutOffJob(ctx context.Context, cfg config.Config, _ string, say func(any)) error {
	r, err := symmem.Open(ctx, cfg, nil)
	if err != nil {
		return err
	}
	var last time.Time
	err = func() error {
		t, err := r.Zeros(ctx, tensor.Float32, 1<<20)
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
		p, err := kernels.NewAllReduce(ctx, t, kernels.Sum, &kernels.AllReduceOptions{Algorithm: kernels.Hierarchical})
		if err != nil {
			return err
		}
		for n := 0; ; n++ {
			if err := errors.Join(p.Run(s), s.Synchronize(ctx)); err != nil {
				return err
			}
			if last = time.Now(); n == 3 {
				say(cutOff{Running: true})
			}
		}
	}()
	found := cutOff{Error: err.Error(), Lost: errors.Is(err, symmem.ErrPeerLost), Took: time.Since(last)}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if closing := r.Close(ctx); closing != nil && !errors.Is(closing, symmem.ErrPeerLost) {
		found.Closing = closing.Error()
	}
	say(found)
	return nil
}

// TestIslandsCutOff: while an all-reduce over two islands is under way, a rank dies, or the cables are cut: every rank that is left knows within the liveness
// timeout, and comes to its end.
func TestIslandsCutOff(t *testing.T) {
	const name = "nixl"
	requireBackend(t, name)
	if deviceKind(t, name) != device.Host {
		skipWithout(t, "netns", "backend nixl works on GPUs here; between hosts it is tried with memory of the CPU")
	}
	const size, liveness, victim = 4, 5 * time.Second, 3
	for _, cut := range []bool{false, true} {
		t.Run(fmt.Sprintf("cables=%t", cut), func(t *testing.T) {
			on := hostsOf(t, 2)
			running := make(chan int, size)
			// UCX is told to go by the cables: processes that see each other have more ways than two hosts.
			found := make([]*cutOff, size)
			w := startWorld(t, on, size, "cut_off", func(rank int, line json.RawMessage) {
				var said cutOff
				if err := json.Unmarshal(line, &said); err != nil {
					t.Errorf("rank %d said %q: %v", rank, line, err)
				} else if said.Running {
					running <- rank
				} else {
					found[rank] = &said
				}
			}, "UCX_TLS=tcp", "UCX_NET_DEVICES="+strings.Join(cables, ","), "SYMMEM_BACKEND="+name, "SYMMEM_LIVENESS_TIMEOUT="+liveness.String(), "SYMMEM_KERNEL_TIMEOUT=60s")
			for range size {
				select {
				case <-running:
				case <-w.ended:
					w.showNews(t)
					t.Fatal("the ranks have ended without a fault")
				}
			}
			if cut {
				for _, cable := range cables {
					out, err := exec.Command("ip", "-n", on.names[1], "link", "set", cable, "down").CombinedOutput()
					require.NoError(t, err, string(out))
				}
			} else {
				require.NoError(t, w.processes[victim].cmd.Process.Kill())
			}
			w.wait(t)
			for rank, p := range w.processes {
				if !cut && rank == victim {
					continue
				}
				require.Emptyf(t, p.end.Error, "rank %d", rank)
				require.NotNilf(t, found[rank], "rank %d said nothing", rank)
				t.Logf("rank %d knew after %v: %s", rank, found[rank].Took.Round(time.Millisecond), found[rank].Error)
				assert.Truef(t, found[rank].Lost, "rank %d: %s", rank, found[rank].Error)
				assert.Lessf(t, found[rank].Took, 3*liveness, "rank %d", rank) // the service looks now and then, and the ranks after it
				if !cut {                                                      // what is under way to a host that cannot be reached ends when TCP gives it up, and its memory is kept until then
					assert.Emptyf(t, found[rank].Closing, "rank %d", rank)
				}
			}
		})
	}
}
