package measure

import (
	"context"
	"errors"
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
	assert.Subset(t, forms(f.points[1]), append(reduce, "two_shot_multimem"))
	assert.NotContains(t, forms(f.points[1]), "one_shot_multimem", "with which the ranks may have other bits than each other")
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

	// Of a list and of a norm every form that there is for the dtype is measured, a norm with whole rows only.
	var more found
	spec = TuneSpec{Kinds: []string{AllReduceMany, AllReduceRMSNorm}, Sizes: []int64{64, 1 << 10, 32 << 10}, DTypes: []string{"bf16", "i32"}, Repetitions: 3}
	onRanks(t, ranks, func(r *symmem.Rank) error { return Tune(t.Context(), r, spec, &more) })
	require.Len(t, more.points, 7)
	require.Equal(t, 7, more.machine.Points)
	for _, p := range more.points {
		switch {
		case p.Collective == AllReduceRMSNorm:
			assert.EqualValues(t, 32<<10, p.Bytes)
			assert.Subset(t, forms(p), []string{"one_shot_push", "two_shot_push", "two_shot_pull", "transfers"})
		case p.Bytes > 1<<10: // a form that was slow for less is not tried
			assert.Contains(t, forms(p), "two_shot_pull")
		case p.DType == "i32":
			assert.Subset(t, forms(p), []string{"one_shot_ll", "two_shot_pull", "transfers"})
		default:
			assert.Subset(t, forms(p), []string{"one_shot_push", "two_shot_pull", "transfers"})
		}
	}
}

// TestTuneWithLittleMemory: where one rank has no memory for the largest message, no rank measures it, and all of them measure what there is memory for.
func TestTuneWithLittleMemory(t *testing.T) {
	m, err := simcuda.New(simcuda.Config{GPUs: 2, Each: []simcuda.GPU{{}, {Memory: 64 << 20}}, Seed: 1})
	require.NoError(t, err)
	cfg := config.Default()
	cfg.Backend, cfg.Multicast, cfg.KernelTimeout = []string{native.Name}, config.MulticastOff, time.Minute
	ranks, err := symmem.OpenLocal(t.Context(), 2, cfg, &symmem.Options{Backend: &native.Options{Driver: m.Driver()}})
	require.NoError(t, err)
	var f found
	spec := TuneSpec{Kinds: []string{AllReduce, AllGather}, Sizes: []int64{1 << 10, 16 << 10, 128 << 20}, DTypes: []string{"bf16"}, Repetitions: 3}
	onRanks(t, ranks, func(r *symmem.Rank) error {
		return errors.Join(Tune(t.Context(), r, spec, &f), r.Close(context.WithoutCancel(t.Context())))
	})
	require.Empty(t, m.Left())
	require.Empty(t, m.Violations())
	require.Equal(t, 6, f.machine.Points)
	var measured []int64
	for _, p := range f.points {
		measured = append(measured, p.Bytes)
	}
	assert.Equal(t, []int64{1 << 10, 16 << 10, 1 << 10, 16 << 10}, measured)
}

// TestTuneListsOnTheHost: each form that a list has on the host is measured, those too that Auto takes for short lists only.
func TestTuneListsOnTheHost(t *testing.T) {
	cfg := config.Default()
	cfg.Backend = []string{"host"}
	ranks, err := symmem.OpenLocal(t.Context(), 2, cfg, nil)
	require.NoError(t, err)
	var f found
	spec := TuneSpec{Kinds: []string{AllReduceMany}, Sizes: []int64{1 << 10}, DTypes: []string{"f32"}, Repetitions: 3}
	onRanks(t, ranks, func(r *symmem.Rank) error { return errors.Join(Tune(t.Context(), r, spec, &f), r.Close(t.Context())) })
	require.Len(t, f.points, 1)
	var forms []string
	for _, c := range f.points[0].All {
		forms = append(forms, c.Form)
	}
	assert.ElementsMatch(t, []string{"one_shot", "two_shot", "transfers"}, forms)
	assert.Equal(t, "one_shot", f.points[0].Default.Form, "what the table says")
}

// TestRoomier: the fewest blocks come first that are hardly slower than the fastest of the same form and lap.
func TestRoomier(t *testing.T) {
	at := func(form string, blocks int, lap int64, median float64) Timed {
		return Timed{Candidate: Candidate{Form: form, Blocks: blocks, Lap: lap}, Median: median}
	}
	all := []Timed{
		at("pull", 0, 0, 100), at("pull", 128, 0, 99), at("pull", 64, 0, 101.9), at("pull", 32, 0, 102.1), at("pull", 16, 0, 150),
		at("flow", 0, 16, 98), at("flow", 16, 16, 97), at("flow", 0, 32, 96),
	}
	of := func(than Candidate) (blocks []int) {
		for _, c := range roomier(all, than) {
			assert.Equal(t, [2]any{than.Form, than.Lap}, [2]any{c.Form, c.Lap})
			blocks = append(blocks, c.Blocks)
		}
		return blocks
	}
	assert.Equal(t, []int{64}, of(Candidate{Form: "pull"}))
	assert.Equal(t, []int{64}, of(Candidate{Form: "pull", Blocks: 128}), "more leave no room")
	assert.Empty(t, of(Candidate{Form: "pull", Blocks: 64}))
	assert.Equal(t, []int{16}, of(Candidate{Form: "flow", Lap: 16}))
	assert.Empty(t, of(Candidate{Form: "flow", Lap: 32}))
	assert.Empty(t, roomier(nil, Candidate{Form: "pull"}))
}
