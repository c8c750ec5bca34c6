package symmem_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/group"
)

// TestOpenRefusesSettings: the zero Config takes all that the user has set, or nothing: what cannot be understood is refused, with all
// that is wrong, before anything is opened.
func TestOpenRefusesSettings(t *testing.T) {
	file := func(content string) string {
		path := filepath.Join(t.TempDir(), "settings.yaml")
		require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
		return "SYMMEM_CONFIG=" + path
	}
	for name, tt := range map[string]struct {
		vars  []string
		is    error
		parts []string
	}{
		"a number that is none":   {[]string{"SYMMEM_WORLD_SIZE=two"}, symmem.ErrInvalid, []string{"variable SYMMEM_WORLD_SIZE", "two", "a whole decimal number"}},
		"no unit":                 {[]string{"SYMMEM_TIMEOUT=60"}, symmem.ErrInvalid, []string{"variable SYMMEM_TIMEOUT", "a duration with its unit"}},
		"multicast on the CPU":    {[]string{"SYMMEM_MULTICAST=on", "SYMMEM_BACKEND=host"}, symmem.ErrUnsupported, []string{"backend host has no multicast"}},
		"a word that is none":     {[]string{"SYMMEM_MULTICAST=perhaps"}, symmem.ErrInvalid, []string{"variable SYMMEM_MULTICAST", "auto, on or off"}},
		"an unknown variable":     {[]string{"SYMMEM_BAKEND=host"}, symmem.ErrInvalid, []string{"SYMMEM_BAKEND", "SYMMEM_BACKEND"}},
		"an unknown backend":      {[]string{"SYMMEM_BACKEND=nvlink"}, symmem.ErrInvalid, []string{"nvlink", "host", "backend/all"}},
		"a bad descriptor":        {[]string{"SYMMEM_RENDEZVOUS_FD=first"}, symmem.ErrInvalid, []string{"variable SYMMEM_RENDEZVOUS_FD", "first"}},
		"an unknown key":          {[]string{file("world_size: 8")}, symmem.ErrInvalid, []string{"settings.yaml", "world_size", "world-size"}},
		"a bad value in the file": {[]string{file("channels: many")}, symmem.ErrInvalid, []string{"settings.yaml", "channels", "many"}},
		"no YAML":                 {[]string{file("channels: [")}, nil, []string{"settings.yaml"}},
		"no file":                 {[]string{"SYMMEM_CONFIG=/nowhere/symmem.yaml"}, fs.ErrNotExist, []string{"/nowhere/symmem.yaml"}},
		"all of it":               {[]string{"SYMMEM_TIMEOUT=60", "SYMMEM_BAKEND=host", file("channels: 0")}, symmem.ErrInvalid, []string{"SYMMEM_TIMEOUT", "SYMMEM_BAKEND", "channels"}},
	} {
		t.Run(name, func(t *testing.T) {
			opts := &symmem.Options{Environ: func() []string { return tt.vars }}
			_, err := symmem.Open(t.Context(), config.Config{}, opts)
			_, local := symmem.OpenLocal(t.Context(), 2, config.Config{}, opts)
			for _, err := range []error{err, local} {
				require.Error(t, err)
				if tt.is != nil {
					require.ErrorIs(t, err, tt.is)
				}
				for _, part := range tt.parts {
					require.ErrorContains(t, err, part)
				}
			}
		})
	}
}

// TestLivenessHasOneBound: the least liveness-timeout of the settings is that of the group, so that a rank which joins nobody is told of the key.
func TestLivenessHasOneBound(t *testing.T) {
	cfg := config.Default()
	cfg.LivenessTimeout = 100*time.Millisecond - 1
	_, err := symmem.Open(t.Context(), cfg, nobody)
	require.ErrorIs(t, err, symmem.ErrInvalid)
	require.ErrorContains(t, err, "liveness-timeout is 99.999999ms; allowed: 100ms or more")
	_, err = group.Join(t.Context(), &group.Options{WorldSize: 1, LivenessTimeout: cfg.LivenessTimeout})
	require.ErrorIs(t, err, symmem.ErrInvalid)
	cfg.LivenessTimeout++
	r, err := symmem.Open(t.Context(), cfg, nobody)
	require.NoError(t, err)
	require.NoError(t, r.Close(t.Context()))
}

// TestOpenTakesSettings: the zero Config takes variables before the file, and the file before defaults; any other Config is taken as it is.
func TestOpenTakesSettings(t *testing.T) {
	path := filepath.Join(t.TempDir(), "settings.yaml")
	require.NoError(t, os.WriteFile(path, []byte("channels: 7\nmax-blocks: 5\nrank-order: true\nbackend: nvlink\n"), 0o600))
	vars := []string{"SYMMEM_CONFIG=" + path, "SYMMEM_BACKEND=host"}
	opts := &symmem.Options{Environ: func() []string { return vars }}
	loaded, err := config.Load(&config.LoadOptions{Environ: nobody.Environ, Explicit: map[string]any{"channels": 9}})
	require.NoError(t, err)
	for _, tt := range []struct {
		cfg      config.Config
		channels int
		blocks   int
	}{{config.Config{}, 7, 5}, {config.Default(), 64, 0}, {loaded, 9, 0}} {
		r, err := symmem.Open(t.Context(), tt.cfg, opts)
		require.NoError(t, err)
		require.Equal(t, tt.channels, r.Memory().Channels())
		require.Equal(t, tt.blocks, r.Memory().MaxBlocks())
		require.Equal(t, tt.blocks > 0, r.Memory().RankOrder())
		require.Equal(t, "host", r.Backend())
		require.NoError(t, r.Close(t.Context()))
		ranks, err := symmem.OpenLocal(t.Context(), 1, tt.cfg, opts)
		require.NoError(t, err)
		sub, err := ranks[0].Sub(t.Context(), []int{0})
		require.NoError(t, err)
		for _, r := range []*symmem.Rank{ranks[0], sub} {
			require.Equal(t, tt.channels, r.Memory().Channels())
			require.Equal(t, tt.blocks, r.Memory().MaxBlocks())
			require.Equal(t, tt.blocks > 0, r.Memory().RankOrder())
		}
		require.NoError(t, sub.Close(t.Context()))
		require.NoError(t, ranks[0].Close(t.Context()))
	}
	// What neither Default nor Load has made would be half of a Config.
	vars = nil
	_, err = symmem.Open(t.Context(), config.Config{Backend: []string{"host"}}, opts)
	require.ErrorIs(t, err, symmem.ErrInvalid)
	require.ErrorContains(t, err, "without rendezvous-fd, timeout, kernel-timeout, liveness-timeout, multicast, unprotected-network, channels;")
	require.ErrorContains(t, err, "config.Default()")
}
