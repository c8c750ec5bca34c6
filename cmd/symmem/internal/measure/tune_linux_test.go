package measure

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/backendtest"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/kernels/tuning"
)

// simulated gives ranks with a simulated GPU of that name each.
func simulated(t *testing.T, ranks int, name string) []*symmem.Rank {
	t.Helper()
	each := make([]simcuda.GPU, ranks)
	for i := range each {
		each[i].Name = name
	}
	m, err := simcuda.New(simcuda.Config{GPUs: ranks, Each: each, Seed: 1, Multicast: true})
	require.NoError(t, err)
	cfg := config.Default()
	cfg.Backend, cfg.Multicast, cfg.KernelTimeout = []string{native.Name}, config.MulticastOn, time.Minute
	all, err := symmem.OpenLocal(t.Context(), ranks, cfg, &symmem.Options{Backend: &native.Options{Driver: m.Driver(), Multicast: config.MulticastOn}})
	require.NoError(t, err)
	t.Cleanup(func() {
		onRanks(t, all, func(r *symmem.Rank) error { return r.Close(context.WithoutCancel(t.Context())) })
		require.Empty(t, m.Left())
		require.Empty(t, m.Violations())
	})
	return all
}

// onRanks runs f on every rank at the same time.
func onRanks(t *testing.T, all []*symmem.Rank, f func(r *symmem.Rank) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnAll(all, f))
}

// found collects what rank 0 reports.
type found struct {
	machine *TunedMachine
	points  []Point
	late    string
}

func (f *found) Tuned(t Tuned) error {
	switch {
	case t.Machine != nil:
		f.machine = t.Machine
	case t.Point != nil:
		f.points = append(f.points, *t.Point)
	default:
		f.late = t.Late
	}
	return nil
}

func (f *found) Refuse(reason string) error {
	f.late = reason
	return nil
}

// TestTuneOnSimulatedGPUs: every form of the collectives is measured, multimem ones apart for memory that has multicast, with several numbers of blocks and laps; the ranks go by their own tables again
// afterwards.
func TestTuneOnSimulatedGPUs(t *testing.T) {
	ranks := simulated(t, 3, "Somebody's GPU")
	before := ranks[0].Memory().Tuning()
	assert.Contains(t, before.Names(), "a model of the links between 3 ranks")
	var f found
	spec := TuneSpec{Kinds: []string{AllReduce, Broadcast}, Sizes: []int64{1 << 10}, DTypes: []string{"bf16"}, Repetitions: 3}
	onRanks(t, ranks, func(r *symmem.Rank) error { return Tune(t.Context(), r, spec, &f) })
	require.Len(t, f.points, 4)
	require.Equal(t, 4, f.machine.Points)
	assert.Equal(t, []string{"Somebody's GPU"}, f.machine.Devices)
	assert.Equal(t, tuning.LinkNVLink, f.machine.Link)
	forms := func(p Point) (all []string) {
		for _, c := range p.All {
			if c.Blocks == 0 {
				all = append(all, c.Form)
			}
		}
		return all
	}
	reduce := []string{"one_shot_ll", "one_shot_push", "one_shot_pull", "two_shot_push", "two_shot_pull", "two_shot_flow", "transfers"}
	assert.Subset(t, forms(f.points[0]), reduce)
	assert.NotContains(t, forms(f.points[0]), "two_shot_multimem")
	assert.Subset(t, forms(f.points[1]), append(reduce, "one_shot_multimem", "two_shot_multimem"))
	assert.True(t, f.points[1].Multicast)
	assert.Subset(t, forms(f.points[3]), []string{"one_shot_ll", "one_shot_pull", "two_shot_pull", "one_shot_multimem", "transfers"})
	for _, p := range f.points {
		assert.Positive(t, p.Best.Median)
		blocks := map[string][]int{}
		for _, c := range p.All {
			blocks[c.Form] = append(blocks[c.Form], c.Blocks)
		}
		assert.Equal(t, []int{0}, blocks["transfers"], "copies have no blocks")
		// The plain forms come first, so their fastest is what the others were compared with.
		plain := p.All[:len(blocks)]
		for _, c := range plain {
			if c.Form != "transfers" && c.Median <= contender*best(plain).Median {
				assert.Subset(t, blocks[c.Form], tuneBlocks, "numbers of blocks were not tried of %s", c.Form)
			}
		}
	}
	for _, r := range ranks {
		assert.Contains(t, r.Memory().Tuning().Names(), "a model of the links between 3 ranks")
	}

	// Shares are whole vectors, so that the largest message is longer than was asked for: 1056 bytes between three.
	var shared found
	spec.Kinds = []string{AllGather, ReduceScatter, AllToAll}
	onRanks(t, ranks, func(r *symmem.Rank) error { return Tune(t.Context(), r, spec, &shared) })
	assert.Equal(t, shared.machine.Points, len(shared.points))
	assert.GreaterOrEqual(t, len(shared.points), 3)
}
