package config_test

import (
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/options"
)

// withToy declares the options of a backend toy for the test, and those of a backend plain, which has none.
func withToy(t *testing.T) {
	t.Helper()
	t.Cleanup(func() { options.Forget("toy"); options.Forget("plain") })
	require.NoError(t, options.Declare("toy", []options.Option{
		{Name: "mode", Values: []string{"slow", "fast"}, Default: "slow", Usage: "how it goes"},
		{Name: "slab-size", Form: "a number of bytes below 1000", Check: func(v string) bool { return len(v) <= 3 }, Usage: "how much"},
		{Name: "library", Usage: "where it is"},
	}))
	require.NoError(t, options.Declare("plain", nil))
}

// TestReserved: what options must not be called is what is called so here.
func TestReserved(t *testing.T) {
	var names []string
	for _, k := range config.Keys() {
		require.Empty(t, k.Backend)
		names = append(names, k.Name)
	}
	require.ElementsMatch(t, append(names, "config", "cuda-library"), options.Reserved)
}

// TestBackendOptions: the options of a backend in this program are keys like others, from every source, in the same order of precedence.
func TestBackendOptions(t *testing.T) {
	withToy(t)
	keys := config.Keys()
	require.Equal(t, []config.Key{
		{Name: "toy-library", Env: "SYMMEM_TOY_LIBRARY", Usage: "backend toy: where it is", Backend: "toy"},
		{Name: "toy-mode", Env: "SYMMEM_TOY_MODE", Default: "slow", Usage: "backend toy: how it goes", Backend: "toy"},
		{Name: "toy-slab-size", Env: "SYMMEM_TOY_SLAB_SIZE", Usage: "backend toy: how much", Backend: "toy"},
	}, keys[len(keys)-3:])

	file := writeFile(t, "toy-mode: slow\nToy-Slab-Size: 010\ntoy-library:\nchannels: 3\n")
	for _, tt := range []struct {
		env, flags      []string
		explicit        map[string]any
		mode, from      string
		size, sizedFrom string
	}{
		{nil, nil, nil, "slow", "file " + file, "010", "file " + file},
		{[]string{"SYMMEM_TOY_MODE= fast "}, nil, nil, "fast", "variable SYMMEM_TOY_MODE", "010", "file " + file},
		{[]string{"SYMMEM_TOY_MODE=fast"}, []string{"--toy-mode=slow"}, nil, "slow", "flag --toy-mode", "010", "file " + file},
		{[]string{"SYMMEM_TOY_MODE=slow", "SYMMEM_TOY_SLAB_SIZE="}, []string{"--toy-mode=slow"}, map[string]any{"toy-mode": "fast", "toy-slab-size": 70}, "fast", "the program", "70", "the program"},
		{nil, nil, map[string]any{"toy-slab-size": "", "toy-mode": nil}, "slow", "file " + file, "010", "file " + file},
		{nil, nil, map[string]any{"toy-slab-size": 5 * time.Second}, "slow", "file " + file, "5s", "the program"},
	} {
		c, err := config.Load(&config.LoadOptions{File: file, Environ: environ(tt.env...), Flags: parsed(t, tt.flags...), Explicit: tt.explicit})
		require.NoError(t, err)
		require.NoError(t, c.Validate())
		require.Equal(t, []any{tt.mode, tt.size, "", 3}, []any{c.Value("toy-mode"), c.Value("toy-slab-size"), c.Value("toy-library"), c.Channels})
		require.Equal(t, []string{tt.from, tt.sizedFrom, "default"},
			[]string{c.Source("toy-mode").String(), c.Source("toy-slab-size").String(), c.Source("toy-library").String()})
		require.Equal(t, map[string]string{"toy-mode": tt.mode, "toy-slab-size": tt.size}, c.BackendOptions, "only what was set")
		require.Contains(t, c.String(), " toy-library= toy-mode="+tt.mode+" toy-slab-size="+tt.size)
		require.Contains(t, c.LogValue().String(), "toy-mode="+tt.mode)
	}

	v := viper.New()
	v.Set("toy-mode", "fast")
	c, err := config.FromViper(v)
	require.NoError(t, err)
	require.Equal(t, "fast", c.Value("toy-mode"))
	require.Equal(t, "the program", c.Source("toy-mode").String())

	mine := config.Default()
	require.Equal(t, "slow", mine.Value("toy-mode"))
	mine.BackendOptions = map[string]string{"toy-mode": "fast"}
	c, err = mine.Resolve(environ("SYMMEM_TOY_MODE=slow", "SYMMEM_TOKEN=t"))
	require.NoError(t, err)
	require.Equal(t, "fast", c.Value("toy-mode"))
	require.Equal(t, "the program", c.Source("toy-mode").String())
	c, err = mine.Resolve(environ("SYMMEM_TOY_MODE=slow", "SYMMEM_TOY_SLAB_SIZE=7", "SYMMEM_TOY_LIBRARY= /lib/toy "))
	require.NoError(t, err)
	require.Equal(t, map[string]string{"toy-mode": "fast", "toy-library": "/lib/toy"}, c.BackendOptions, "the library's file comes from its variable, and nothing else")
	require.Equal(t, []string{"the program", "default", "variable SYMMEM_TOY_LIBRARY"},
		[]string{c.Source("toy-mode").String(), c.Source("toy-slab-size").String(), c.Source("toy-library").String()})
	require.Equal(t, map[string]string{"toy-mode": "fast"}, mine.BackendOptions, "the caller's map is not changed")
	mine.BackendOptions["toy-library"], mine.RendezvousAddr = "/mine", "node1:29400"
	c, err = mine.Resolve(environ("SYMMEM_TOY_LIBRARY=/lib/toy"))
	require.NoError(t, err)
	require.Equal(t, "/mine", c.Value("toy-library"))
	mine.BackendOptions["toy-library"] = ""
	c, err = mine.Resolve(environ("SYMMEM_TOY_LIBRARY=/lib/toy"))
	require.NoError(t, err)
	require.Equal(t, "/lib/toy", c.Value("toy-library"))
	_, err = mine.Resolve(environ("SYMMEM_TOY_LIBRARY=a\nb"))
	require.ErrorIs(t, err, config.ErrInvalid)
	require.ErrorContains(t, err, "variable SYMMEM_TOY_LIBRARY: ")

	require.Contains(t, options.LibraryVariables(), "SYMMEM_TOY_LIBRARY")
	require.NotContains(t, options.LibraryVariables(), "SYMMEM_TOY_MODE")

	own := pflag.NewFlagSet("own", pflag.ContinueOnError)
	own.String("toy-mode", "mine", "the program's own")
	config.AddFlags(own)
	require.NoError(t, own.Parse([]string{"--toy-mode=other"}))
	c, err = config.Load(&config.LoadOptions{Flags: own, Environ: environ()})
	require.NoError(t, err)
	require.Equal(t, "slow", c.Value("toy-mode"), "a program's own flag sets nothing")
}

// TestBackendOptionsRefused: a value that the backend does not allow, and an option that it does not have, are errors that say so; an option
// of a backend that is not in this program is one that says to import it.
func TestBackendOptionsRefused(t *testing.T) {
	withToy(t)
	load := func(env ...string) error {
		_, err := config.Load(&config.LoadOptions{Environ: environ(env...)})
		return err
	}
	file := func(content string) error {
		_, err := config.Load(&config.LoadOptions{File: writeFile(t, content), Environ: environ()})
		return err
	}
	explicit := func(key string, value any) error {
		_, err := config.Load(&config.LoadOptions{Explicit: map[string]any{key: value}, Environ: environ()})
		return err
	}
	given := config.Default()
	given.BackendOptions = map[string]string{"toy-mode": "quick", "toy-mood": "good", "nccl-window": "symmetric"}
	const absent = "there is no backend nccl in this program: if it is meant for one, import its package (github.com/symmem/symmem/backend/all has all of this module)"
	for what, tt := range map[string]struct {
		err   error
		parts []string
		not   string
	}{
		"value in a variable":   {load("SYMMEM_TOY_MODE=quick"), []string{`variable SYMMEM_TOY_MODE: configuration: toy-mode is "quick"; allowed: slow, fast`}, ""},
		"value that is checked": {load("SYMMEM_TOY_SLAB_SIZE=1000"), []string{`toy-slab-size is "1000"; allowed: a number of bytes below 1000`}, ""},
		"value with a newline":  {load("SYMMEM_TOY_LIBRARY=a\nb"), []string{`toy-library is "a\nb"; allowed: a text of at most 4096 bytes, all of them printable`}, ""},
		"value without end":     {load("SYMMEM_TOY_LIBRARY=" + strings.Repeat("a", 5000)), []string{"aaa… (5000 bytes)"}, strings.Repeat("a", 100)},
		"value in the file":     {file("toy-mode: quick"), []string{"settings.yaml: configuration: toy-mode is"}, ""},
		"list in the file":      {file("toy-mode: [slow]"), []string{"settings.yaml: configuration: toy-mode is a list; allowed: a text"}, ""},
		"keys in the file":      {file("toy-mode:\n  token: hunter2"), []string{"toy-mode is keys and values"}, "hunter2"},
		"program's value":       {explicit("toy-mode", 2.5), []string{"the program: configuration: toy-mode is 2.5; allowed: a text"}, ""},
		"unknown variable":      {load("SYMMEM_TOY_MOOD=x"), []string{"SYMMEM_TOY_MOOD", "SYMMEM_TOY_MODE is the nearest"}, "import"},
		"unknown key":           {file("toy-mood: fast"), []string{"toy-mood", "toy-mode is the nearest"}, "import"},
		"none to have":          {load("SYMMEM_PLAIN_MODE=x"), []string{"SYMMEM_PLAIN_MODE", "correct it or unset it"}, "import"},
		"absent in a variable":  {load("SYMMEM_OTHER_SIZE=1"), []string{"SYMMEM_OTHER_SIZE", strings.ReplaceAll(absent, "backend nccl", "backend other")}, ""},
		"absent in the file":    {file("nccl-window: symmetric"), []string{"nccl-window", absent}, ""},
		"absent by the program": {explicit("nccl-window", "plain"), []string{"the program", absent}, ""},
		"typing error":          {load("SYMMEM_WORLD_SIZ=2"), []string{"SYMMEM_WORLD_SIZE is the nearest"}, "import"},
		"all of a Config": {given.Validate(), []string{`toy-mode is "quick"; allowed: slow, fast`, "backend option is toy-mood", "toy-mode is the nearest",
			"backend option is nccl-window", absent}, ""},
	} {
		t.Run(what, func(t *testing.T) {
			require.ErrorIs(t, tt.err, config.ErrInvalid)
			for _, part := range tt.parts {
				assert.ErrorContains(t, tt.err, part)
			}
			if tt.not != "" {
				assert.NotContains(t, tt.err.Error(), tt.not)
			}
		})
	}
}

// TestForeign: what may be an option of a backend that only another program has passes where that is asked for; typing errors do not.
func TestForeign(t *testing.T) {
	withToy(t)
	load := func(file string, env ...string) error {
		_, err := config.Load(&config.LoadOptions{File: writeFile(t, file), Environ: environ(env...), Foreign: true})
		return err
	}
	_, err := config.Load(&config.LoadOptions{Environ: environ("SYMMEM_NCCL_LIBRARY=/x", "SYMMEM_NIXL_LIBRARY=/y")})
	require.NoError(t, err, "variables of this module's backends are for all programs of a machine")
	require.NoError(t, load("nccl-window: x\nother-colour: red", "SYMMEM_NCCL_WINDOW=y", "SYMMEM_OTHER_SIZE=1"))
	for _, name := range []string{"toy-mood", "plain-mode", "world-siz", "mood"} {
		require.ErrorIs(t, load(name+": x"), config.ErrInvalid, name)
		require.ErrorIs(t, load("", options.Env(name)+"=x"), config.ErrInvalid, name)
	}
	_, err = config.Load(&config.LoadOptions{Environ: environ(), Explicit: map[string]any{"nccl-window": "x"}, Foreign: true})
	require.ErrorIs(t, err, config.ErrInvalid, "what the program says itself is for itself")
}
