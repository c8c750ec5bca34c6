package symmem_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend/backendtest"
	nativebackend "github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/simcuda"
	"github.com/symmem/symmem/internal/testneed"
	"github.com/symmem/symmem/kernels"
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/tensor"
)

// tableFile writes a table with one rule of all-reduce between each number of ranks, for devices of that name.
func tableFile(t *testing.T, device, link string, ranks []int, steps ...tuning.Step) string {
	t.Helper()
	table := tuning.Table{Version: tuning.Version, Devices: []string{device}, Link: link}
	for _, n := range ranks {
		table.Rules = append(table.Rules, tuning.Rule{Collective: tuning.AllReduce, Ranks: n, Source: tuning.Measured, Steps: steps})
	}
	text, err := table.Text()
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "table.json")
	require.NoError(t, os.WriteFile(path, text, 0o600))
	return path
}

// openWith opens ranks in this process that meet over the network as processes do, each with its own setting tuning. What they get, by rank.
func openWith(t *testing.T, files ...string) ([]*symmem.Rank, []error) {
	t.Helper()
	addr := testneed.FreeAddress(t)
	ranks, errs := make([]*symmem.Rank, len(files)), make([]error, len(files))
	var wg sync.WaitGroup
	for i, file := range files {
		wg.Go(func() {
			cfg := config.Default()
			cfg.Backend, cfg.Tuning = []string{"host"}, file
			cfg.Rank, cfg.WorldSize, cfg.RendezvousAddr, cfg.Timeout = i, len(files), addr, 20*time.Second
			ranks[i], errs[i] = symmem.Open(t.Context(), cfg, &symmem.Options{Environ: nobody.Environ})
		})
	}
	wg.Wait()
	return ranks, errs
}

// onAll runs f on every rank at the same time.
func onAll(t *testing.T, ranks []*symmem.Rank, f func(r *symmem.Rank) error) {
	t.Helper()
	backendtest.RequireAll(t, backendtest.OnAll(ranks, f))
}

// twoOf makes two tensors of so many elements, which all ranks reach.
func twoOf(ctx context.Context, r *symmem.Rank, n int64) (made [2]*tensor.Tensor, err error) {
	for i := range made {
		if made[i], err = r.Zeros(ctx, tensor.Float32, n); err != nil {
			return made, err
		}
		if err := made[i].Rendezvous(ctx); err != nil {
			return made, err
		}
	}
	return made, nil
}

// taken is the form that auto takes for an all-reduce of so many bytes.
func taken(t *testing.T, ranks []*symmem.Rank, bytes int64) kernels.Algorithm {
	t.Helper()
	forms := make([]kernels.Algorithm, len(ranks))
	onAll(t, ranks, func(r *symmem.Rank) error {
		x, err := r.Zeros(t.Context(), tensor.Float32, bytes/4)
		if err != nil {
			return err
		}
		if err := x.Rendezvous(t.Context()); err != nil {
			return err
		}
		p, err := kernels.NewAllReduce(t.Context(), x, kernels.Sum, nil)
		if err != nil {
			return err
		}
		forms[r.Rank()] = p.Algorithm()
		return errors.Join(p.Close(t.Context()), x.Close(t.Context()))
	})
	for _, f := range forms {
		require.Equal(t, forms[0], f)
	}
	return forms[0]
}

func closeRanks(t *testing.T, ranks []*symmem.Rank) {
	t.Helper()
	onAll(t, ranks, func(r *symmem.Rank) error { return r.Close(context.WithoutCancel(t.Context())) })
}

// TestOpenTuningFile: auto goes by the file that the setting names, and sub-groups for which it has no rules by what there is without it.
func TestOpenTuningFile(t *testing.T) {
	ranks, errs := openWith(t, "", "")
	require.NoError(t, errors.Join(errs...))
	assert.Equal(t, kernels.TwoShot, taken(t, ranks, 64<<10))
	device := ranks[0].Device().Name()
	assert.Contains(t, ranks[0].Memory().Tuning().Names(), "the shipped table for links of kind host")
	closeRanks(t, ranks)

	for _, name := range []string{device, tuning.AnyDevice} {
		file := tableFile(t, name, tuning.LinkHost, []int{3}, tuning.Step{UpTo: 32 << 10, Form: "two_shot"}, tuning.Step{UpTo: 64 << 10, Form: "one_shot"}, tuning.Step{Form: "transfers"})
		ranks, errs = openWith(t, file, file, file)
		require.NoError(t, errors.Join(errs...))
		assert.Equal(t, kernels.TwoShot, taken(t, ranks, 1<<10))
		assert.Equal(t, kernels.OneShot, taken(t, ranks, 64<<10))
		assert.Equal(t, kernels.Transfers, taken(t, ranks, 64<<10+4))
		assert.Contains(t, ranks[1].Memory().Tuning().Names(), file+", else the shipped table")
		subs := make([]*symmem.Rank, 2)
		onAll(t, ranks[:2], func(r *symmem.Rank) (err error) {
			subs[r.Rank()], err = r.Sub(t.Context(), []int{0, 1})
			return err
		})
		assert.Equal(t, kernels.TwoShot, taken(t, subs, 64<<10))
		closeRanks(t, subs)
		closeRanks(t, ranks)
	}
}

// TestOpenTuningIsAgreed: a file that one rank has and others have not, or that differs, or cannot be read on one, or is for something else, fails Open on every rank, with the same error.
func TestOpenTuningIsAgreed(t *testing.T) {
	one := tableFile(t, tuning.AnyDevice, tuning.LinkHost, []int{2}, tuning.Step{Form: "one_shot"})
	two := tableFile(t, tuning.AnyDevice, tuning.LinkHost, []int{2}, tuning.Step{Form: "two_shot"})
	broken := filepath.Join(t.TempDir(), "broken.json")
	require.NoError(t, os.WriteFile(broken, []byte(`{"version": 1, "forms": 3}`), 0o600))
	for name, tt := range map[string]struct {
		files []string
		is    error
		parts []string
	}{
		"on one rank only": {[]string{one, ""}, symmem.ErrMismatch, []string{"the table that the setting tuning names", "no file", "SHA-256"}},
		"not on rank 0":    {[]string{"", one}, symmem.ErrMismatch, []string{"no file"}},
		"different":        {[]string{one, two}, symmem.ErrMismatch, []string{one, two}},
		"broken on one":    {[]string{one, broken}, symmem.ErrInvalid, []string{"rank 1", broken, "field", "forms", "symmem tune"}},
		"not there":        {[]string{"/no/such.json", "/no/such.json"}, fs.ErrNotExist, []string{"ranks 0, 1", "/no/such.json"}},
		"of a GPU": {[]string{tableFile(t, "NVIDIA H200", tuning.LinkNVLink, []int{2}, tuning.Step{Form: "one_shot_ll"})}, symmem.ErrInvalid,
			[]string{"devices", "NVIDIA H200", "symmem tune"}},
		"of other ranks": {[]string{tableFile(t, tuning.AnyDevice, tuning.LinkHost, []int{3, 4}, tuning.Step{Form: "one_shot"})}, symmem.ErrInvalid, []string{"rules for 2 ranks", "symmem tune"}},
	} {
		t.Run(name, func(t *testing.T) {
			files := tt.files
			if len(files) == 1 {
				files = append(files, files[0])
			}
			_, errs := openWith(t, files...)
			for _, err := range errs {
				require.ErrorIs(t, err, tt.is)
				for _, part := range tt.parts {
					assert.ErrorContains(t, err, part)
				}
			}
			assert.Equal(t, strings.ReplaceAll(errs[0].Error(), "\n", " "), strings.ReplaceAll(errs[1].Error(), "\n", " "))
		})
	}
	// The same table may lie elsewhere on every rank.
	text, err := os.ReadFile(one)
	require.NoError(t, err)
	copied := filepath.Join(t.TempDir(), "copied.json")
	require.NoError(t, os.WriteFile(copied, text, 0o600))
	ranks, errs := openWith(t, one, copied)
	require.NoError(t, errors.Join(errs...))
	assert.Equal(t, kernels.OneShot, taken(t, ranks, 1<<20))
	closeRanks(t, ranks)
}

// onGPUs opens a rank on a simulated GPU of each name.
func onGPUs(t *testing.T, file string, names ...string) ([]*symmem.Rank, error) {
	t.Helper()
	return onMachine(t, simcuda.Config{}, file, names...)
}

// onMachine is onGPUs for a machine that has more.
func onMachine(t *testing.T, c simcuda.Config, file string, names ...string) ([]*symmem.Rank, error) {
	t.Helper()
	gpus := make([]simcuda.GPU, len(names))
	for i, name := range names {
		gpus[i].Name = name
	}
	c.GPUs, c.Each, c.Seed = len(names), gpus, 1
	m, err := simcuda.New(c)
	require.NoError(t, err)
	cfg := config.Default()
	cfg.Backend, cfg.Multicast, cfg.KernelTimeout, cfg.Tuning = []string{nativebackend.Name}, config.MulticastOff, time.Minute, file
	if c.Multicast {
		cfg.Multicast = config.MulticastOn
	}
	ranks, err := symmem.OpenLocal(t.Context(), len(names), cfg, &symmem.Options{Backend: &nativebackend.Options{Driver: m.Driver(), Multicast: cfg.Multicast}, Environ: nobody.Environ})
	t.Cleanup(func() {
		assert.Empty(t, m.Left())
		assert.Empty(t, m.Violations())
	})
	return ranks, err
}

// TestOpenTuningOfGPUs: a GPU that a table comes with goes by that, without anything being measured; others, and such that are not all alike, by a model of what was measured at open,
// which is the same on every rank.
func TestOpenTuningOfGPUs(t *testing.T) {
	names := func(ranks []*symmem.Rank) string {
		text := ranks[0].Memory().Tuning().Names()
		for _, r := range ranks {
			require.Equal(t, text, r.Memory().Tuning().Names(), "rank %d", r.Rank())
		}
		return text
	}
	ranks, err := onGPUs(t, "", "NVIDIA H200", "NVIDIA H200")
	require.NoError(t, err)
	assert.Equal(t, "the shipped table of NVIDIA H200 (2026-11-27)", names(ranks))
	closeRanks(t, ranks)

	for _, unlike := range [][]string{{"NVIDIA B200", "NVIDIA B200"}, {"NVIDIA H200", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"}, {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}} {
		ranks, err := onGPUs(t, "", unlike...)
		require.NoError(t, err)
		assert.Contains(t, names(ranks), fmt.Sprintf("a model of the links between %d ranks", len(unlike)))
		// Which form the model takes depends on how fast this machine was while the links were measured.
		step, ok := ranks[0].Memory().Tuning().Choose(tuning.AllReduce, len(unlike), tensor.Float32.String(), 1<<10, true, func(*tuning.Step) bool { return true })
		require.True(t, ok)
		assert.Equal(t, step.Form, taken(t, ranks, 1<<10).String())
		if len(unlike) == 3 { // of which two are alike
			subs := make([]*symmem.Rank, 2)
			onAll(t, ranks[:2], func(r *symmem.Rank) (err error) {
				subs[r.Rank()], err = r.Sub(t.Context(), []int{0, 1})
				return err
			})
			assert.Equal(t, "the shipped table of NVIDIA H200 (2026-11-27)", names(subs))
			closeRanks(t, subs)
		} else {
			subs := make([]*symmem.Rank, 2)
			onAll(t, ranks, func(r *symmem.Rank) (err error) {
				subs[r.Rank()], err = r.Sub(t.Context(), []int{0, 1})
				return err
			})
			assert.Equal(t, names(ranks), names(subs), "what was measured once serves sub-groups")
			closeRanks(t, subs)
		}
		closeRanks(t, ranks)
	}

	// A file that has a rule for everything leaves nothing to measure.
	whole := tuning.Model(tuning.LinkNVLink, 2, tuning.Speed{Hop: 2, Bandwidth: 300}, false)
	whole.Devices = []string{"NVIDIA B200"}
	text, err := whole.Text()
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "b200.json")
	require.NoError(t, os.WriteFile(file, text, 0o600))
	ranks, err = onGPUs(t, file, "NVIDIA B200", "NVIDIA B200")
	require.NoError(t, err)
	assert.Equal(t, file, names(ranks))
	closeRanks(t, ranks)
	_, err = onGPUs(t, file, "NVIDIA B200", "NVIDIA H200")
	require.ErrorIs(t, err, symmem.ErrInvalid)
	require.ErrorContains(t, err, `a table for ["NVIDIA B200" "NVIDIA H200"]`)
}

// onlyStep is tables that have one step for every collective, before those that are there.
func onlyStep(s tuning.Step, multicast bool) *tuning.Set {
	t := &tuning.Table{Name: "of a test"}
	for _, collective := range tuning.Collectives() {
		t.Rules = append(t.Rules, tuning.Rule{Collective: collective, Ranks: 2, AndMore: true, Multicast: multicast, Steps: []tuning.Step{s}})
	}
	return &tuning.Set{Tables: append([]*tuning.Table{t}, tuning.Default(false).Tables...), Multicast: multicast}
}

// TestOpenTablesReachPlans: the form, the number of blocks and the lap of a table are those of the plan, of every collective; ranks that were given different tables are all told, and none waits.
func TestOpenTablesReachPlans(t *testing.T) {
	ranks, err := onGPUs(t, "", "NVIDIA H200", "NVIDIA H200")
	require.NoError(t, err)
	defer closeRanks(t, ranks)
	norm := func(ctx context.Context, x, y *tensor.Tensor) (*kernels.Plan, error) {
		row, err := x.Sub(0, 1, 64)
		if err != nil {
			return nil, err
		}
		n := kernels.RMSNorm{Weight: kernels.LocalOf(y.Local()), Residual: kernels.LocalOf(y.Local())}
		n.Weight.NumElements, n.Residual.NumElements, n.Residual.Ptr = 64, 64, n.Residual.Ptr.Add(4096)
		return kernels.NewAllReduceRMSNorm(ctx, row, n, nil)
	}
	plans := map[string]struct {
		form string
		make func(ctx context.Context, x, y *tensor.Tensor) (*kernels.Plan, error)
	}{
		"all_reduce": {"two_shot_flow", func(ctx context.Context, x, _ *tensor.Tensor) (*kernels.Plan, error) {
			return kernels.NewAllReduce(ctx, x, kernels.Sum, nil)
		}},
		"all_reduce_many": {"two_shot_pull", func(ctx context.Context, x, y *tensor.Tensor) (*kernels.Plan, error) {
			return kernels.NewAllReduceMany(ctx, []kernels.Pair{{In: x}, {In: y}}, kernels.Sum, nil)
		}},
		"all_reduce_rms_norm": {"two_shot_push", norm},
		"broadcast": {"two_shot_pull", func(ctx context.Context, x, _ *tensor.Tensor) (*kernels.Plan, error) {
			return kernels.NewBroadcast(ctx, x, 0, nil)
		}},
		"reduce": {"one_shot_pull", func(ctx context.Context, x, y *tensor.Tensor) (*kernels.Plan, error) {
			return kernels.NewReduce(ctx, x, y, kernels.Sum, 0, nil)
		}},
		"all_to_all": {"one_shot_pull", func(ctx context.Context, x, y *tensor.Tensor) (*kernels.Plan, error) {
			return kernels.NewAllToAll(ctx, x, y, nil)
		}},
	}
	onAll(t, ranks, func(r *symmem.Rank) error {
		ctx := t.Context()
		made, err := twoOf(ctx, r, 4096)
		if err != nil {
			return err
		}
		home := r.Memory().Tuning()
		defer r.Memory().SetTuning(home)
		for _, name := range tuning.Collectives() {
			c, ok := plans[name]
			if !ok {
				continue // all-gather and reduce-scatter are as the last two
			}
			// The shipped table would take one step of these few bytes, in lines.
			r.Memory().SetTuning(onlyStep(tuning.Step{Form: c.form, Blocks: 2}, false))
			p, err := c.make(ctx, made[0], made[1])
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if p.Algorithm().String() != c.form {
				return fmt.Errorf("%s takes %s", name, p.Algorithm())
			}
			if err := p.Close(ctx); err != nil {
				return err
			}
			for _, step := range []tuning.Step{{Form: c.form, Blocks: 1 + r.Rank()}, {Form: []string{c.form, "transfers"}[r.Rank()]}} {
				r.Memory().SetTuning(onlyStep(step, false))
				if _, err := c.make(ctx, made[0], made[1]); !errors.Is(err, symmem.ErrMismatch) {
					return fmt.Errorf("%s, %+v: %w is no mismatch", name, step, err)
				}
			}
		}
		laps := onlyStep(tuning.Step{Form: tuning.Flow, LapBytes: tuning.Size(1+r.Rank()) << 12}, false)
		r.Memory().SetTuning(laps)
		if _, err := kernels.NewAllReduce(ctx, made[0], kernels.Sum, nil); !errors.Is(err, symmem.ErrMismatch) {
			return fmt.Errorf("laps: %w is no mismatch", err)
		}
		return errors.Join(made[1].Close(ctx), made[0].Close(ctx))
	})
}

// TestOpenAutoWithMulticast: where the tables say so and the ranks' memory has it, auto takes forms of multicast; not with RankOrder, not where the operation has none, and another form, on all ranks,
// when there are no more multicast objects.
func TestOpenAutoWithMulticast(t *testing.T) {
	ranks, err := onMachine(t, simcuda.Config{Multicast: true, MulticastObjects: 1}, "", "NVIDIA H200", "NVIDIA H200", "NVIDIA H200")
	require.NoError(t, err)
	defer closeRanks(t, ranks)
	require.True(t, ranks[0].Memory().Tuning().Multicast)
	onAll(t, ranks, func(r *symmem.Rank) error {
		ctx := t.Context()
		made, err := twoOf(ctx, r, 1024)
		if err != nil {
			return err
		}
		home := r.Memory().Tuning()
		var wrong error
		check := func(what string, want kernels.Algorithm, p *kernels.Plan, err error) {
			if err != nil {
				wrong = errors.Join(wrong, fmt.Errorf("%s: %w", what, err))
				return
			}
			if p.Algorithm() != want {
				wrong = errors.Join(wrong, fmt.Errorf("%s takes %s, and not %s", what, p.Algorithm(), want))
			}
			wrong = errors.Join(wrong, p.Close(ctx))
		}
		reduce := func(what string, want kernels.Algorithm, i int, op kernels.Op, rankOrder bool) {
			p, err := kernels.NewAllReduce(ctx, made[i], op, &kernels.AllReduceOptions{RankOrder: rankOrder})
			check(what, want, p, err)
		}
		r.Memory().SetTuning(onlyStep(tuning.Step{Form: "two_shot_multimem"}, true))
		reduce("a sum", kernels.TwoShotMultimem, 0, kernels.Sum, false)
		reduce("a sum in rank order", kernels.OneShotPush, 0, kernels.Sum, true)
		reduce("a maximum", kernels.OneShotLL, 0, kernels.Max, false)
		reduce("without objects", kernels.OneShotPush, 1, kernels.Sum, false)
		r.Memory().SetTuning(onlyStep(tuning.Step{Form: "one_shot_multimem"}, true))
		p, err := kernels.NewBroadcast(ctx, made[0], 0, nil)
		check("a broadcast", kernels.OneShotMultimem, p, err)
		p, err = kernels.NewBroadcast(ctx, made[1], 0, nil)
		check("a broadcast without objects", kernels.OneShotLL, p, err)
		p, err = kernels.NewBroadcast(ctx, made[0], 0, &kernels.Options{Algorithm: kernels.OneShot})
		check("a family", kernels.OneShotLL, p, err)
		p, err = kernels.NewAllReduce(ctx, made[1], kernels.Sum, &kernels.AllReduceOptions{Algorithm: kernels.TwoShotMultimem})
		if !errors.Is(err, symmem.ErrNoMemory) {
			wrong = errors.Join(wrong, fmt.Errorf("a form that was asked for: %v, %w", p, err))
		}
		// Whoever asks for the form would not come along to another one: that is told before anything is tried.
		r.Memory().SetTuning(onlyStep(tuning.Step{Form: "two_shot_multimem"}, true))
		p, err = kernels.NewAllReduce(ctx, made[1], kernels.Sum, &kernels.AllReduceOptions{Algorithm: []kernels.Algorithm{kernels.Auto, kernels.TwoShotMultimem, kernels.Auto}[r.Rank()]})
		if !errors.Is(err, symmem.ErrMismatch) {
			wrong = errors.Join(wrong, fmt.Errorf("a form that one rank has asked for: %v, %w", p, err))
		}
		r.Memory().SetTuning(home)
		return errors.Join(wrong, made[1].Close(ctx), made[0].Close(ctx))
	})
}
