package symmem_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	nativebackend "github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/simcuda"
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
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := l.Addr().String()
	require.NoError(t, l.Close())
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
	errs := make([]error, len(ranks))
	var wg sync.WaitGroup
	for i, r := range ranks {
		wg.Go(func() { errs[i] = f(r) })
	}
	wg.Wait()
	for i, err := range errs {
		require.NoErrorf(t, err, "rank %d", i)
	}
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
	gpus := make([]simcuda.GPU, len(names))
	for i, name := range names {
		gpus[i].Name = name
	}
	m, err := simcuda.New(simcuda.Config{GPUs: len(names), Each: gpus, Seed: 1})
	require.NoError(t, err)
	cfg := config.Default()
	cfg.Backend, cfg.Multicast, cfg.KernelTimeout, cfg.Tuning = []string{nativebackend.Name}, config.MulticastOff, time.Minute, file
	ranks, err := symmem.OpenLocal(t.Context(), len(names), cfg, &symmem.Options{Backend: &nativebackend.Options{Driver: m.Driver()}, Environ: nobody.Environ})
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
	assert.Equal(t, "the shipped table of NVIDIA H200 (2026-11-22)", names(ranks))
	closeRanks(t, ranks)

	for _, unlike := range [][]string{{"NVIDIA B200", "NVIDIA B200"}, {"NVIDIA H200", "NVIDIA H200", "NVIDIA A100-SXM4-80GB"}, {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}} {
		ranks, err := onGPUs(t, "", unlike...)
		require.NoError(t, err)
		assert.Contains(t, names(ranks), fmt.Sprintf("a model of the links between %d ranks", len(unlike)))
		assert.Equal(t, kernels.OneShotPush, taken(t, ranks, 1<<10))
		if len(unlike) == 3 { // of which two are alike
			subs := make([]*symmem.Rank, 2)
			onAll(t, ranks[:2], func(r *symmem.Rank) (err error) {
				subs[r.Rank()], err = r.Sub(t.Context(), []int{0, 1})
				return err
			})
			assert.Equal(t, "the shipped table of NVIDIA H200 (2026-11-22)", names(subs))
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
