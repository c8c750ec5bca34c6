package symmem_test

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/config"
)

func init() { backend.Register("witness", &witness) }

// witness is a backend that keeps what it was opened with and opens host.
var witness witnessFactory

type witnessFactory struct {
	mu   sync.Mutex
	seen []backend.Env
}

// witnessOptions are its options.
type witnessOptions struct{ Mark int }

// Preference is less than that of any backend that a test may want.
func (*witnessFactory) Preference(bool) int { return -1000 }

func (*witnessFactory) Options() []backend.Option {
	return []backend.Option{{Name: "colour", Values: []string{"red", "blue"}, Default: "red", Usage: "what it looks like"}, {Name: "library", Usage: "where it is"}}
}

func (*witnessFactory) Takes(v any) bool { _, ok := v.(*witnessOptions); return ok }

func (*witnessFactory) Probe(ctx context.Context, env *backend.Env) (backend.Capabilities, error) {
	if _, err := env.Option("witness", "colour"); err != nil {
		return backend.Capabilities{}, err
	}
	f, err := backend.Lookup(host.Name)
	if err != nil {
		return backend.Capabilities{}, err
	}
	return f.Probe(ctx, env)
}

func (w *witnessFactory) Open(ctx context.Context, env *backend.Env) (backend.Backend, error) {
	f, err := backend.Lookup(host.Name)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	w.seen = append(w.seen, *env)
	w.mu.Unlock()
	e := *env
	e.Given = nil
	return f.Open(ctx, &e)
}

// took returns what the backend was opened with since it was last asked.
func (w *witnessFactory) took() []backend.Env {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen := w.seen
	w.seen = nil
	return seen
}

// TestOpenHandsOptions: a backend's options reach it from the file and from variables with the zero Config, and from any other Config as it is,
// but for the file of a native library, which comes from its variable.
func TestOpenHandsOptions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "settings.yaml")
	require.NoError(t, os.WriteFile(path, []byte("witness-colour: blue\n"), 0o600))
	blue := config.Default()
	blue.Backend, blue.BackendOptions = []string{"witness"}, map[string]string{"witness-colour": "blue"}
	plain := config.Default()
	plain.Backend = []string{"witness"}
	for what, tt := range map[string]struct {
		cfg     config.Config
		vars    []string
		want    string
		library string
	}{
		"default":                {config.Config{}, []string{"SYMMEM_BACKEND=witness"}, "red", ""},
		"variable":               {config.Config{}, []string{"SYMMEM_BACKEND=witness", "SYMMEM_WITNESS_COLOUR=blue", "SYMMEM_WITNESS_LIBRARY=/a"}, "blue", "/a"},
		"file":                   {config.Config{}, []string{"SYMMEM_BACKEND=witness", "SYMMEM_CONFIG=" + path}, "blue", ""},
		"variable before file":   {config.Config{}, []string{"SYMMEM_BACKEND=witness", "SYMMEM_CONFIG=" + path, "SYMMEM_WITNESS_COLOUR=red"}, "red", ""},
		"Config":                 {blue, []string{"SYMMEM_WITNESS_COLOUR=red"}, "blue", ""},
		"variable behind Config": {plain, []string{"SYMMEM_WITNESS_COLOUR=blue", "SYMMEM_WITNESS_LIBRARY=/a"}, "red", "/a"},
	} {
		t.Run(what, func(t *testing.T) {
			witness.took()
			opts := &symmem.Options{Environ: func() []string { return tt.vars }}
			r, err := symmem.Open(t.Context(), tt.cfg, opts)
			require.NoError(t, err)
			s, err := r.Sub(t.Context(), []int{0})
			require.NoError(t, err)
			require.NoError(t, s.Close(t.Context()))
			require.NoError(t, r.Close(t.Context()))
			seen := witness.took()
			require.Len(t, seen, 2, "the rank and its sub-group")
			for _, env := range seen {
				got, err := env.Option("witness", "colour")
				require.NoError(t, err)
				require.Equal(t, tt.want, got)
				got, err = env.Option("witness", "library")
				require.NoError(t, err)
				require.Equal(t, tt.library, got)
				require.Equal(t, config.Default().LivenessTimeout, env.LivenessTimeout)
			}
		})
	}
	plain.BackendOptions = map[string]string{"witness-colour": "green"}
	for _, cfg := range []config.Config{{}, plain} {
		opts := &symmem.Options{Environ: func() []string { return []string{"SYMMEM_BACKEND=witness", "SYMMEM_WITNESS_COLOUR=green"} }}
		_, err := symmem.OpenLocal(t.Context(), 2, cfg, opts)
		require.ErrorIs(t, err, symmem.ErrInvalid)
		require.ErrorContains(t, err, `is "green"; allowed: red, blue`)
	}
}

// TestOpenKeepsNoCallersMap: what the program changes in its Config after Open is for what it opens next, and for no sub-group of what is open.
func TestOpenKeepsNoCallersMap(t *testing.T) {
	witness.took()
	cfg := config.Default()
	cfg.Backend, cfg.BackendOptions, cfg.NetDevices = []string{"witness"}, map[string]string{"witness-colour": "blue"}, []string{"eth0"}
	ranks, err := symmem.OpenLocal(t.Context(), 1, cfg, nobody)
	require.NoError(t, err)
	cfg.BackendOptions["witness-colour"], cfg.NetDevices[0] = "red", "eth1"
	s, err := ranks[0].Sub(t.Context(), []int{0})
	require.NoError(t, err)
	closeAll(t, []*symmem.Rank{s})
	closeAll(t, ranks)
	seen := witness.took()
	require.Len(t, seen, 2)
	for _, env := range seen {
		colour, err := env.Option("witness", "colour")
		require.NoError(t, err)
		require.Equal(t, "blue", colour)
		require.Equal(t, []string{"eth0"}, env.NetDevices)
	}
}

// TestOpenTakesOptions: options in a backend's own type reach that backend, which is chosen for them, and no other takes them.
func TestOpenTakesOptions(t *testing.T) {
	witness.took()
	mine := &witnessOptions{Mark: 7}
	ranks, err := symmem.OpenLocal(t.Context(), 2, config.Default(), &symmem.Options{Backend: mine, Environ: nobody.Environ})
	require.NoError(t, err)
	seen := witness.took()
	require.Len(t, seen, 2)
	for i, r := range ranks {
		require.Same(t, mine, seen[i].Given)
		require.Equal(t, "witness", r.Backend())
		require.NotEmpty(t, r.Refusals())
		require.Contains(t, r.Refusals()[0].Err, "options that are for backend witness (*symmem_test.witnessOptions)")
	}
	closeAll(t, ranks)

	ranks, err = symmem.OpenLocal(t.Context(), 1, config.Default(), &symmem.Options{Backend: &host.Options{KernelTimeout: 5 * time.Second}, Environ: nobody.Environ})
	require.NoError(t, err)
	require.Equal(t, "host", ranks[0].Backend())
	closeAll(t, ranks)

	named := config.Default()
	named.Backend = []string{"host"}
	_, err = symmem.Open(t.Context(), named, &symmem.Options{Backend: mine, Environ: nobody.Environ})
	require.ErrorIs(t, err, symmem.ErrUnavailable)
	require.ErrorContains(t, err, "backend host cannot be used")
	require.ErrorContains(t, err, "options that are for backend witness")

	_, err = symmem.OpenLocal(t.Context(), 2, config.Default(), &symmem.Options{Backend: witnessOptions{}, Environ: nobody.Environ})
	require.ErrorIs(t, err, symmem.ErrInvalid)
	require.ErrorContains(t, err, "of type symmem_test.witnessOptions")
	require.ErrorContains(t, err, "give a pointer")
}

// closeAll closes the ranks of one process.
func closeAll(t *testing.T, ranks []*symmem.Rank) {
	t.Helper()
	var wg sync.WaitGroup
	for _, r := range ranks {
		wg.Go(func() {
			if err := r.Close(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}
