package all_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	_ "github.com/symmem/symmem/backend/all"
	"github.com/symmem/symmem/backend/host"
	"github.com/symmem/symmem/backend/native"
	"github.com/symmem/symmem/backend/nccl"
	"github.com/symmem/symmem/backend/nixl"
	"github.com/symmem/symmem/backend/nvshmem"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/options"
)

// TestOrder: what auto prefers, of this module's backends: direct load and store first, the library that needs least around it before the
// others, the CPU last. The numbers are those that the documentation of Preferred promises to others who want a place among them.
func TestOrder(t *testing.T) {
	require.Equal(t, []string{"native", "nccl", "nvshmem", "nixl", "host"}, backend.Names())
	_, err := backend.Lookup("of_nobody")
	require.ErrorContains(t, err, "import its package", "all of this module are there")
	for name, want := range map[string][2]int{
		native.Name: {500, 500}, nccl.Name: {400, 400}, nvshmem.Name: {300, 300}, nixl.Name: {200, -100}, host.Name: {0, 0},
	} {
		f, err := backend.Lookup(name)
		require.NoError(t, err)
		p := f.(backend.Preferred)
		require.Equal(t, want, [2]int{p.Preference(false), p.Preference(true)}, name)
	}
	usable := func(names map[string]bool) func(string) (bool, bool, error) {
		return func(name string) (bool, bool, error) { onHost, there := names[name]; return there, onHost, nil }
	}
	for _, tt := range []struct {
		names map[string]bool // whether it works on the CPU's memory
		want  string
	}{
		{map[string]bool{"host": true, "nixl": true}, "host"},
		{map[string]bool{"host": true, "nixl": false}, "nixl"},
		{map[string]bool{"host": true, "nixl": false, "nvshmem": false}, "nvshmem"},
		{map[string]bool{"nixl": true}, "nixl"},
		{map[string]bool{"host": true, "nccl": false, "nvshmem": false}, "nccl"},
		{map[string]bool{"host": true, "native": false, "nccl": false}, "native"},
	} {
		got, _, err := backend.Pick(nil, usable(tt.names))
		require.NoError(t, err)
		require.Equal(t, tt.want, got, tt.names)
	}
}

// TestTakes: each backend takes its own options and no other's.
func TestTakes(t *testing.T) {
	given := map[string]any{
		host.Name: &host.Options{}, native.Name: &native.Options{}, nccl.Name: &nccl.Options{}, nvshmem.Name: &nvshmem.Options{}, nixl.Name: &nixl.Options{},
	}
	for _, name := range backend.Names() {
		f, err := backend.Lookup(name)
		require.NoError(t, err)
		c := f.(backend.Configurable)
		for of, v := range given {
			require.Equal(t, of == name, c.Takes(v), "%s and %T", name, v)
		}
		require.False(t, c.Takes(nil))
	}
}

// TestVariables: the variables of these backends are what they were before backends could declare them, and come by way of the configuration.
func TestVariables(t *testing.T) {
	vars := []string{"SYMMEM_CUDA_LIBRARY=/c", "SYMMEM_NCCL_LIBRARY=/a", "SYMMEM_NCCL_WINDOW=symmetric", "SYMMEM_NIXL_LIBRARY=/b", "SYMMEM_NVSHMEM_ARENA=1G"}
	cfg, err := config.Load(&config.LoadOptions{Environ: func() []string { return vars }})
	require.NoError(t, err)
	require.Equal(t, map[string]string{"nccl-library": "/a", "nccl-window": "symmetric", "nixl-library": "/b", "nvshmem-arena": "1G"}, cfg.BackendOptions)
	require.Equal(t, "variable SYMMEM_NCCL_WINDOW", cfg.Source("nccl-window").String())
	require.Equal(t, []string{"SYMMEM_CUDA_LIBRARY", "SYMMEM_NCCL_LIBRARY", "SYMMEM_NIXL_LIBRARY", "SYMMEM_NVSHMEM_LIBRARY"}, options.LibraryVariables())
	var defaults []string
	for _, k := range config.Keys() {
		if k.Backend != "" {
			defaults = append(defaults, k.Name+"="+k.Default)
		}
	}
	require.Equal(t, []string{"nccl-library=", "nccl-window=plain", "nixl-islands=auto", "nixl-library=", "nvshmem-arena=64M", "nvshmem-library="}, defaults)

	for name, value := range map[string]string{"NCCL_WINDOW": "round", "NVSHMEM_ARENA": "much", "NVSHMEM_ARNA": "1", "HOST_SIZE": "1"} {
		_, err := config.Load(&config.LoadOptions{Environ: func() []string { return []string{"SYMMEM_" + name + "=" + value} }})
		require.ErrorIs(t, err, config.ErrInvalid)
		require.ErrorContains(t, err, "SYMMEM_"+name)
		require.NotContains(t, err.Error(), "import")
	}
}
