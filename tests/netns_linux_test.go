package tests

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
	"github.com/symmem/symmem/tests/suite"
)

// TestTwoHosts runs the suite between two network namespaces that are joined by cables: as far as the library can tell, two
// hosts. They share no sockets, each rank has a boot id of its own, and data goes by TCP. It needs to be root; where that is
// not so it is skipped, which is a failure with "netns" in SYMMEM_TEST_REQUIRE.
func TestTwoHosts(t *testing.T) {
	requireHostNIXL(t)
	suiteOverTCP(t, hostsOf(t, 1, 1).overTCP(), 2)
}

// TestIslands runs the suite over two hosts with two ranks each, in network namespaces as those of TestTwoHosts: what is between the ranks of a host
// goes by address, and the rest by TCP. Forms that do not look at islands, most types of elements and bad input are left to TestTwoHosts.
func TestIslands(t *testing.T) {
	requireHostNIXL(t)
	suiteOverTCP(t, hostsOf(t, 2, 2).overTCP(), 4, islandCases...)
}

// islandCases are all that may depend on who is on which island.
var islandCases = []string{
	"memory/.*", "transfer/.*", "slice/.*", "heap/.*", "signal/.*", "graph/.*", "groups/.*", "lifetime/.*", "rank/.*", "same_bits/.*",
	"all_reduce/auto/.*", "all_reduce/hierarchical/[a-z]+_.*", "all_reduce/hierarchical/(f32|bf16)/.*", "(all_gather|all_to_all|broadcast|reduce|reduce_scatter)/hierarchical/.*",
	"all_to_all_v/.*",
}

// someCases are of each sort one or two: the ring, and what has counts that must not be mixed up, puts before signals and sums over islands.
var someCases = []string{
	"transfer/ring_put", "transfer/ring_get", "signal/put", "signal/counted", "heap/moves", "groups/ring_of_pairs",
	"all_reduce/hierarchical/replay_100", "all_reduce/hierarchical/f32/out/65537/blocked", "all_reduce/hierarchical/bf16/2050/delayed",
	"all_gather/hierarchical/every_count", "broadcast/hierarchical/every_count", "reduce_scatter/hierarchical/every_count", "all_to_all/hierarchical/every_count",
}

// TestThreeIslands runs the suite over three hosts with two ranks each as TestIslands does over two; in the short matrix some of its cases.
func TestThreeIslands(t *testing.T) {
	requireHostNIXL(t)
	cases := islandCases
	if !wholeMatrix(t) {
		cases = someCases
	}
	suiteOverTCP(t, hostsOf(t, 2, 2, 2).overTCP(), 6, cases...)
}

// suiteOverTCP runs the suite without its large cases, or those of its cases that patterns name, on hosts whose data goes by TCP, and looks whether it did:
// by the second cable, which nothing else uses.
func suiteOverTCP(t *testing.T, on *joined, size int, patterns ...string) {
	t.Helper()
	opts := options(t, "nixl", size)
	opts.Short = true
	for _, p := range patterns {
		opts.Filter = regexp.MustCompile("^(" + p + ")$")
		require.NotEmpty(t, suite.Cases(opts), "no case is named %s any more", p)
	}
	if patterns != nil {
		opts.Filter = regexp.MustCompile("^(" + strings.Join(patterns, "|") + ")$")
	}
	runCases(t, &on.hosts, "nixl", opts, size, "suite")
	for h := range on.network.hosts {
		bytes := on.network.sent(t, h, dataDevice)
		t.Logf("host %d has sent %d bytes of data, and %d segments of TCP once more", h, bytes, on.network.sentAgain(t, h))
		assert.Greater(t, bytes, int64(leastData), "host %d: the data has not gone by the cable", h)
	}
}

// leastData is what each host sends at least in the cases of the suite, in bytes. What is not data is some kilobytes.
const leastData = 200_000

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
	on := containersOf(t, 1, 3)
	for _, p := range runWorldOn(t, &on.hosts, 2, "islands", "SYMMEM_BACKEND=host") {
		assert.Contains(t, p.end.Error, reason)
		assert.Contains(t, p.end.Error, "give the containers of one host one network namespace")
		assert.NotContains(t, p.end.Error, "\n", "one line")
	}
	refused := func(p *process) bool { return strings.Contains(p.end.Error, reason) }
	world := runWorldOn(t, &on.hosts, 2, "islands", "SYMMEM_BACKEND=auto", "SYMMEM_NIXL_LIBRARY=/none", "SYMMEM_DEVICE=host")
	for _, p := range world {
		assert.True(t, refused(p), p.end.Error)
	}
	t.Run("nixl", func(t *testing.T) {
		requireBackend(t, "nixl")
		check := func(size int, islands string, pointers ...int) {
			for rank, p := range runWorldOn(t, &on.hosts, size, "islands", "SYMMEM_BACKEND=auto", "SYMMEM_DEVICE=host") {
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
		check(2, "0; 1", 0, 0)
		check(4, "0; 1-3", 0, 2, 2, 2)
	})
}

// TestTokensOfHosts: a rank of another host that has a wrong token, or none, is told so; the others wait for it no longer than their timeout, and name it.
func TestTokensOfHosts(t *testing.T) {
	const token, timeout = "the one that all of the job have", 3 * time.Second
	for name, wrong := range map[string]string{"wrong": "another one that is as long as it", "none": ""} {
		t.Run(name, func(t *testing.T) {
			on := hostsOf(t, 1, 2)
			env := on.env
			on.env = func(rank int) []string {
				vars := append(env(rank), "SYMMEM_TOKEN="+token)
				if rank == 2 {
					vars[len(vars)-1] = "SYMMEM_TOKEN=" + wrong
				}
				return vars
			}
			begun := time.Now()
			for rank, p := range runWorldOn(t, &on.hosts, 3, "islands", "SYMMEM_BACKEND=host", "SYMMEM_TIMEOUT="+timeout.String()) {
				assert.NotContains(t, p.end.Error, token, "rank %d", rank)
				if rank == 2 {
					assert.Contains(t, p.end.Error, "token")
					continue
				}
				assert.Contains(t, p.end.Error, "rank 2", "rank %d", rank)
			}
			assert.Less(t, time.Since(begun), 10*timeout)
		})
	}
}

func init() { jobs["cut_off"] = cutOffJob }

// cutOff is what a rank says that was cut off from others, or whose peer has died.
type cutOff struct {
	Running  bool          // it says that its all-reduces are under way, and nothing else
	Error    string        // of the all-reduce that failed
	Lost     bool          // the error is ErrPeerLost
	Names    int           // the rank that the error names
	Took     time.Duration // since the last one that did not
	After    string        // why those that are left could not go on among themselves, or ""
	Closing  string        // what else than a loss closing told of
	ClosedIn time.Duration
}

// cutOffJob is one rank that runs all-reduces over islands until one fails. Those that are not among the lost, which the argument lists, go on among themselves.
func cutOffJob(ctx context.Context, cfg config.Config, arg string, say func(any)) error {
	var lost []int
	for text := range strings.SplitSeq(arg, ",") {
		rank, err := strconv.Atoi(text)
		if err != nil {
			return err
		}
		lost = append(lost, rank)
	}
	r, err := symmem.Open(ctx, cfg, &symmem.Options{BootID: os.Getenv(bootVariable)})
	if err != nil {
		return err
	}
	last := time.Now()
	runs := 0
	err = sumsOverIslands(ctx, r, 1<<20, func() bool {
		if last = time.Now(); runs == 3 {
			say(cutOff{Running: true})
		}
		runs++
		return true
	})
	found := cutOff{Error: err.Error(), Lost: errors.Is(err, symmem.ErrPeerLost), Names: -1, Took: time.Since(last)}
	if lost, ok := errors.AsType[*group.PeerLostError](err); ok {
		found.Names = lost.Rank
	}
	if !slices.Contains(lost, r.Rank()) {
		if err := goOn(ctx, r, lost); err != nil {
			found.After = err.Error()
		}
	}
	began := time.Now()
	if closing := r.Close(ctx); closing != nil && !errors.Is(closing, symmem.ErrPeerLost) {
		found.Closing = closing.Error()
	}
	found.ClosedIn = time.Since(began)
	say(found)
	return nil
}

// sumsOverIslands runs all-reduces over islands as long as more says so after each, and looks at what they give.
func sumsOverIslands(ctx context.Context, r *symmem.Rank, elements int64, more func() bool) error {
	t, err := r.Zeros(ctx, tensor.Float32, elements)
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
	size := r.WorldSize()
	mine, want := make([]float32, elements), make([]float32, elements)
	for n := 0; ; n++ {
		for i := range mine {
			v := (i + n) % 1000
			mine[i], want[i] = float32(v+r.Rank()), float32(size*v+size*(size-1)/2)
		}
		if err := tensor.Write(t.Local(), mine, 0); err != nil {
			return err
		}
		if err := errors.Join(p.Run(s), s.Synchronize(ctx)); err != nil {
			return err
		}
		got, err := tensor.ReadAll[float32](t.Local())
		if err != nil {
			return err
		}
		for i, v := range got {
			if v != want[i] {
				return fmt.Errorf("run %d: element %d of %d is %v, not %v", n, i, elements, v, want[i])
			}
		}
		if !more() {
			return errors.Join(p.Close(ctx), s.Close(), t.Close(ctx))
		}
	}
}

// goOn has the ranks that are left sum up among themselves.
func goOn(ctx context.Context, r *symmem.Rank, lost []int) error {
	var left []int
	for rank := range r.WorldSize() {
		if !slices.Contains(lost, rank) {
			left = append(left, rank)
		}
	}
	sub, err := r.Sub(ctx, left)
	if err != nil {
		return err
	}
	runs := 0
	return errors.Join(sumsOverIslands(ctx, sub, 1000, func() bool { runs++; return runs < 3 }), sub.Close(ctx))
}

// TestIslandsCutOff: while an all-reduce over islands is under way, a rank dies, or a host is cut off: every rank that is left knows within the liveness
// timeout, they go on among themselves, and all come to their end.
func TestIslandsCutOff(t *testing.T) {
	requireHostNIXL(t)
	t.Run("death", func(t *testing.T) {
		on := hostsOf(t, 2, 2).overTCP()
		loseWithin(t, on, 4, []int{3}, func(w *world) { require.NoError(t, w.processes[3].cmd.Process.Kill()) })
	})
	t.Run("cut", func(t *testing.T) {
		on := hostsOf(t, 2, 2, 2).overTCP()
		loseWithin(t, on, 6, []int{4, 5}, func(*world) { on.network.cut(t, 2) })
	})
}

// knownLater is how much later than the liveness timeout a loss may be known in loseWithin, where the time goes from the end of the last all-reduce: the next one has
// begun by the time of the loss, and when that is known the machine, which is busy, and may stand still for seconds, has to wake up the work that waits. A loss that was noticed after
// twice the timeout would be known later still.
const knownLater = 4 * time.Second

// loseWithin has ranks be lost by what lose does in the midst of all-reduces, and looks at what the others say, and the lost themselves if they live.
func loseWithin(t *testing.T, on *joined, size int, lost []int, lose func(w *world)) {
	t.Helper()
	const liveness = 5 * time.Second
	running := make(chan int, size)
	found := make([]*cutOff, size)
	job := "cut_off:" + strings.Join(strings.Fields(strings.Trim(fmt.Sprint(lost), "[]")), ",")
	w := startWorld(t, &on.hosts, size, job, func(rank int, line json.RawMessage) {
		var said cutOff
		if err := json.Unmarshal(line, &said); err != nil {
			t.Errorf("rank %d said %q: %v", rank, line, err)
		} else if said.Running {
			running <- rank
		} else {
			found[rank] = &said
		}
	}, "SYMMEM_BACKEND=nixl", "SYMMEM_LIVENESS_TIMEOUT="+liveness.String(), "SYMMEM_KERNEL_TIMEOUT=30s")
	for range size {
		select {
		case <-running:
		case <-w.ended:
			w.showNews(t)
			t.Fatal("the ranks have ended without a fault")
		}
	}
	lose(w)
	w.wait(t)
	for rank, p := range w.processes {
		if !p.end.Done && slices.Contains(lost, rank) {
			continue // it was killed
		}
		require.Emptyf(t, p.end.Error, "rank %d", rank)
		require.NotNilf(t, found[rank], "rank %d said nothing", rank)
		f := found[rank]
		t.Logf("rank %d knew after %v and closed in %v: %s; %s", rank, f.Took.Round(time.Millisecond), f.ClosedIn.Round(time.Millisecond), f.Error, f.Closing)
		assert.Truef(t, f.Lost, "rank %d: %s", rank, f.Error)
		if slices.Contains(lost, rank) {
			assert.Equalf(t, 0, f.Names, "rank %d: the rank with the service is lost to it: %s", rank, f.Error)
		} else {
			assert.Containsf(t, lost, f.Names, "rank %d: %s", rank, f.Error)
			assert.Emptyf(t, f.After, "rank %d could not go on", rank)
		}
		assert.Lessf(t, f.Took, liveness+knownLater, "rank %d", rank)
		assert.Emptyf(t, f.Closing, "rank %d", rank)
	}
}

// TestKillBetweenHosts is TestKill between two hosts, one of which has two ranks: a rank dies that has one survivor on its own host and one on the other, or is alone on its own. The rendezvous
// is served outside of the ranks, on the host of rank 0, or by rank 0.
func TestKillBetweenHosts(t *testing.T) {
	requireHostNIXL(t)
	t.Run("served", func(t *testing.T) {
		kill(t, "nixl", &killing{on: &hostsOf(t, 2, 1).overTCP().hosts, served: true, islands: "auto"}, 0, 1, 0, 2)
	})
	t.Run("by_rank_0", func(t *testing.T) {
		kill(t, "nixl", &killing{on: &hostsOf(t, 1, 2).overTCP().hosts, islands: "auto"}, 2, 1)
	})
}

// TestNarrowLink: between two hosts with two ranks each whose link is narrow and loses packets, the suite's results are right, and so is what is told of a rank that dies.
func TestNarrowLink(t *testing.T) {
	requireHostNIXL(t)
	on := hostsOf(t, 2, 2).overTCP()
	t.Log("the link is worsened by", on.network.worsen(t))
	suiteOverTCP(t, on, 4, someCases...)
	again := 0
	for h := range on.network.hosts {
		again += on.network.sentAgain(t, h)
	}
	assert.Positive(t, again, "packets that were lost")
	t.Run("death", func(t *testing.T) {
		loseWithin(t, on, 4, []int{3}, func(w *world) { require.NoError(t, w.processes[3].cmd.Process.Kill()) })
	})
}
