package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/tensor"
)

// stages are where a rank dies: it kills itself there, and the others go on into what needs it.
var stages = []string{"open", "allocate", "rendezvous", "plan", "all_reduce/one_shot", "all_reduce/two_shot", "all_reduce/transfers", "all_reduce/hierarchical", "graph", "transfer", "wait", "barrier", "sub_group", "close_tensor", "close_rank"}

// pointerStages are those of plans that load and store through peer pointers.
var pointerStages = []string{"all_reduce/one_shot", "all_reduce/two_shot"}

// survived is what a rank that lives on says.
type survived struct {
	Stage string        // what it was in when it got the error
	Error string        // of that
	Lost  bool          // the error is ErrPeerLost
	Names int           // the rank that the error names
	Took  time.Duration // from when the others were last known to live
	After string        // why the survivors could not go on among themselves, or ""
}

// TestKill kills one rank at each stage. The others get an error that names it, and go on among themselves. In the whole matrix each rank has its turn at every stage, in the short one they take turns
// over the stages: where the rendezvous is served outside of them, rank 0 dies at every other one, open and close_rank among them, and ranks 1 and 2 by turns at those between; where rank 0
// serves it, ranks 2 and 1 do by turns.
func TestKill(t *testing.T) {
	for _, name := range backend.Names() {
		t.Run("backend="+name, func(t *testing.T) {
			requireBackend(t, name)
			requireGPUs(t, name, killWorld)
			t.Run("served", func(t *testing.T) { kill(t, name, &killing{served: true, islands: "auto"}, 0, 1, 0, 2) })
			// Where rank 0 serves the rendezvous, the library moves everything; elsewhere the ranks of one host share memory.
			kill(t, name, &killing{islands: "off"}, 2, 1)
		})
	}
}

// killWorld is how many ranks there are when one of them dies.
const killWorld = 3

// killing says where the ranks are of which one dies, and how they meet.
type killing struct {
	on      *hosts   // nil is here
	served  bool     // the rendezvous is served outside of the ranks, and not by rank 0
	islands string   // SYMMEM_NIXL_ISLANDS
	without []string // stages that the backend has not there
}

// kill kills ranks at each stage: in the short matrix one, by the turns that are given, and in the whole one each that has a turn.
func kill(t *testing.T, name string, k *killing, turns ...int) {
	stages := slices.Clone(stages)
	for _, alg := range endless(name) {
		stages = append(stages, "all_reduce/"+alg.String())
	}
	for _, victim := range slices.Compact(slices.Sorted(slices.Values(turns))) {
		t.Run(fmt.Sprintf("rank=%d", victim), func(t *testing.T) {
			for i, stage := range stages {
				has := hasHierarchical(name) || stage != "all_reduce/"+kernels.Hierarchical.String()
				if has && !slices.Contains(k.without, stage) && (wholeMatrix(t) || turns[i%len(turns)] == victim) {
					t.Run(stage, func(t *testing.T) { killAt(t, name, k, victim, stage) })
				}
			}
		})
	}
}

// killAt kills a rank at a stage.
func killAt(t *testing.T, name string, k *killing, victim int, stage string) {
	if slices.Contains(pointerStages, stage) && !capabilities(t, name).PeerPointers {
		requireCapability(t, name, killWorld, "peer_pointers")
		t.Skipf("backend %s has no peer pointers", name)
	}
	world := runWorldOn(t, k.on, killWorld, fmt.Sprintf("kill:%s:%d", stage, victim), fmt.Sprintf("%s=%t", servedVariable, k.served), "SYMMEM_NIXL_ISLANDS="+k.islands, "SYMMEM_BACKEND="+name, "SYMMEM_TIMEOUT=20s", "SYMMEM_KERNEL_TIMEOUT=60s")
	for _, p := range world {
		if p.rank == victim {
			assert.Error(t, p.err, "the victim was killed")
			assert.False(t, p.end.Done)
			continue
		}
		require.NoErrorf(t, p.err, "rank %d", p.rank)
		require.Truef(t, p.end.Done, "rank %d did not come to its end", p.rank)
		require.Emptyf(t, p.end.Error, "rank %d", p.rank)
		require.Lenf(t, p.lines, 1, "rank %d", p.rank)
		var s survived
		require.NoError(t, json.Unmarshal(p.lines[0], &s))
		t.Logf("rank %d knew after %v, in %s: %s", p.rank, s.Took.Round(time.Millisecond), s.Stage, s.Error)
		assert.Truef(t, s.Lost, "rank %d: %s", p.rank, s.Error)
		assert.Equalf(t, victim, s.Names, "rank %d: %s", p.rank, s.Error)
		assert.Emptyf(t, s.After, "rank %d", p.rank)
		assert.Less(t, s.Took, config.Default().LivenessTimeout, "a lost rank is known by then")
	}
}

// killed are the forms of all-reduce in which a rank dies, if the backend has what they need: of a family, the one that the device
// has.
var killed = []kernels.Algorithm{kernels.OneShot, kernels.TwoShot, kernels.Transfers, kernels.Hierarchical}

// hasHierarchical reports whether hierarchical goes over memory of the backend. Between GPUs it takes NCCL, or a backend's own puts to other hosts.
func hasHierarchical(backend string) bool { return backend != "native" && backend != "nvshmem" }

// endless are the all-reduces of the library below a backend in which a rank may die, as its kernels can be ended.
func endless(backend string) []kernels.Algorithm {
	if backend == kernels.NCCL.Backend() {
		return []kernels.Algorithm{kernels.NCCL}
	}
	return nil
}

// endsInAnError reports whether the work on a stream of that stage needs the rank that dies in it, so that the stream must tell.
func endsInAnError(stage string) bool {
	return strings.HasPrefix(stage, "all_reduce/") || slices.Contains([]string{"transfer", "wait", "barrier", "graph"}, stage)
}

// killJob is one rank of TestKill, or of such between hosts.
func killJob(ctx context.Context, cfg config.Config, arg string, say func(any)) error {
	stage, number, _ := strings.Cut(arg, ":")
	victim, err := strconv.Atoi(number)
	if err != nil {
		return err
	}
	dies := cfg.Rank == victim
	last := time.Now() // when this rank last knew that all live
	die := func(at string) {
		if dies && at == stage {
			p, err := os.FindProcess(os.Getpid())
			if err == nil {
				err = p.Kill()
			}
			time.Sleep(time.Minute) // until it takes effect
			panic(fmt.Sprint("still alive: ", err))
		}
	}
	at := "open"
	var r *symmem.Rank
	err = func() error {
		var err error
		if r, err = symmem.Open(ctx, cfg, &symmem.Options{BootID: os.Getenv(bootVariable)}); err != nil {
			return err
		}
		s, err := r.NewStream()
		if err != nil {
			return err
		}
		enter := func(name string) error {
			if at == stage && endsInAnError(stage) {
				return fmt.Errorf("all work of %s ended, and none told of the rank that has died in it", stage)
			}
			if err := r.Barrier(ctx); err != nil {
				return err
			}
			last = time.Now()
			at = name
			die(name)
			return nil
		}
		if err := enter("open"); err != nil {
			return err
		}
		if err := enter("allocate"); err != nil {
			return err
		}
		t, err := r.Zeros(ctx, tensor.Float32, 100_000)
		if err != nil {
			return err
		}
		if err := enter("rendezvous"); err != nil {
			return err
		}
		if err := t.Rendezvous(ctx); err != nil {
			return err
		}
		plans, err := killPlans(ctx, r, t, s, enter)
		if err != nil {
			return err
		}
		if r.Memory().CanSignal() {
			if err := killSends(ctx, t, s, stage, victim, enter); err != nil {
				return err
			}
		}
		if err := enter("sub_group"); err != nil {
			return err
		}
		all, err := r.Sub(ctx, []int{0, 1, 2})
		if err != nil {
			return err
		}
		if err := all.Close(ctx); err != nil {
			return err
		}
		if err := enter("close_tensor"); err != nil {
			return err
		}
		for _, p := range plans {
			if err := p.Close(ctx); err != nil {
				return err
			}
		}
		if err := t.Close(ctx); err != nil {
			return err
		}
		if err := enter("close_rank"); err != nil {
			return err
		}
		return nil
	}()
	if r == nil {
		return fmt.Errorf("opening: %w", err)
	}
	if err == nil {
		err = r.Close(ctx)
		r = nil
	}
	if err == nil {
		return errors.New("a rank has died and nobody noticed")
	}
	s := survived{Stage: at, Error: err.Error(), Lost: errors.Is(err, symmem.ErrPeerLost), Names: -1, Took: time.Since(last)}
	if lost, ok := errors.AsType[*group.PeerLostError](err); ok {
		s.Names = lost.Rank
	}
	if r != nil {
		if after := survivorsGoOn(ctx, r, victim); after != nil {
			s.After = after.Error()
		}
		// The rank's own close must not hang, and tells of the loss.
		if err := r.Close(ctx); err != nil && !errors.Is(err, symmem.ErrPeerLost) {
			s.After += "; closing: " + err.Error()
		}
	}
	say(s)
	return nil
}

// killSends goes through the stages of what one rank puts or signals to another.
func killSends(ctx context.Context, t *tensor.Tensor, s device.Stream, stage string, victim int, enter func(string) error) error {
	sync := func(work error) error { return errors.Join(work, s.Synchronize(ctx)) }
	put, err := tensor.PrepareTransfer(backend.Write, victim, tensor.Pair{Local: t, Remote: t})
	if err != nil {
		return err
	}
	if err := enter("transfer"); err != nil {
		return err
	}
	// Where the memory of the dead can still be written, it is the next post that fails.
	for stop := time.Now().Add(10 * time.Second); stage == "transfer" && time.Now().Before(stop); {
		if err := sync(errors.Join(put.Post(s), put.WaitOn(s))); err != nil {
			return err
		}
	}
	if err := put.Close(); err != nil {
		return err
	}
	if err := enter("wait"); err != nil {
		return err
	}
	for peer := range t.WorldSize() {
		if err := t.Signal(s, peer, 0); err != nil {
			return err
		}
	}
	if err := sync(t.Wait(s, victim, 0)); err != nil {
		return err
	}
	if err := enter("barrier"); err != nil {
		return err
	}
	if err := sync(t.Barrier(s, 0)); err != nil {
		return err
	}
	return nil
}

// killPlans goes through the stages of plans, and gives the plans.
func killPlans(ctx context.Context, r *symmem.Rank, t *tensor.Tensor, s device.Stream, enter func(string) error) ([]*kernels.Plan, error) {
	if err := enter("plan"); err != nil {
		return nil, err
	}
	forms := slices.DeleteFunc(append(slices.Clone(killed), endless(r.Backend())...), func(a kernels.Algorithm) bool {
		return a.NeedsPeerPointers() && !r.Capabilities().PeerPointers || a == kernels.Hierarchical && !hasHierarchical(r.Backend()) || a == kernels.Transfers && !r.Memory().CanSignal()
	})
	var plans []*kernels.Plan
	for _, alg := range forms {
		p, err := kernels.NewAllReduce(ctx, t, kernels.Sum, &kernels.AllReduceOptions{Algorithm: alg})
		if err != nil {
			return nil, err
		}
		plans = append(plans, p)
	}
	sync := func(work error) error { return errors.Join(work, s.Synchronize(ctx)) }
	for i, p := range plans {
		if err := sync(errors.Join(p.Run(s), p.Run(s))); err != nil {
			return nil, err
		}
		if err := enter("all_reduce/" + forms[i].String()); err != nil {
			return nil, err
		}
		if err := sync(p.Run(s)); err != nil {
			return nil, err
		}
	}
	if err := s.BeginCapture(); err != nil {
		return nil, err
	}
	if err := plans[0].Run(s); err != nil {
		return nil, err
	}
	g, err := s.EndCapture()
	if err != nil {
		return nil, err
	}
	if err := enter("graph"); err != nil {
		return nil, err
	}
	return plans, errors.Join(sync(g.Launch(s)), g.Close())
}

// survivorsGoOn makes a group of those that live and reduces among them.
func survivorsGoOn(ctx context.Context, r *symmem.Rank, victim int) error {
	sub, err := r.Sub(ctx, slices.DeleteFunc([]int{0, 1, 2}, func(rank int) bool { return rank == victim }))
	if err != nil {
		return err
	}
	t, err := sub.Zeros(ctx, tensor.Float32, 1000)
	if err != nil {
		return err
	}
	if err := t.Rendezvous(ctx); err != nil {
		return err
	}
	if !r.Capabilities().PeerPointers && r.Memory().CanSignal() {
		return errors.Join(survivorsPut(ctx, sub, t), t.Close(ctx), sub.Close(ctx))
	}
	if err := tensor.Write(t.Local(), []float32{1}, 999); err != nil {
		return err
	}
	p, err := kernels.NewAllReduce(ctx, t, kernels.Sum, nil)
	if err != nil {
		return err
	}
	s, err := sub.NewStream()
	if err != nil {
		return err
	}
	if err := errors.Join(p.Run(s), s.Synchronize(ctx)); err != nil {
		return err
	}
	var got [1]float32
	if err := tensor.Read(t.Local(), got[:], 999); err != nil {
		return err
	}
	if got[0] != 2 {
		return fmt.Errorf("two survivors add 1 and 1 and get %v", got[0])
	}
	return errors.Join(p.Close(ctx), s.Close(), t.Close(ctx), sub.Close(ctx))
}

// survivorsPut has each of two ranks put its number into the other's memory.
func survivorsPut(ctx context.Context, sub *symmem.Rank, t *tensor.Tensor) error {
	s, err := sub.NewStream()
	if err != nil {
		return err
	}
	me, other := int64(sub.Rank()), int64(1-sub.Rank())
	mine, err := t.Sub(me, 1)
	if err != nil {
		return err
	}
	if err := tensor.Write(t.Local(), []float32{float32(me) + 7}, me); err != nil {
		return err
	}
	if err := errors.Join(mine.Put(s, int(other), mine), t.Signal(s, int(other), 0), t.Wait(s, int(other), 0), s.Synchronize(ctx), s.Close()); err != nil {
		return err
	}
	var got [1]float32
	if err := tensor.Read(t.Local(), got[:], other); err != nil {
		return err
	}
	if got[0] != float32(other)+7 {
		return fmt.Errorf("the other survivor put %v, and %v came", float32(other)+7, got[0])
	}
	return nil
}
