package config_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/spf13/viper"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/errs"
)

// environ returns a fixed environment, so that the one the tests run in does not matter.
func environ(entries ...string) func() []string {
	return func() []string { return entries }
}

// writeFile writes a configuration file into a new directory.
func writeFile(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "settings.yaml")
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

// parsed returns a set of flags that has parsed args.
func parsed(t *testing.T, args ...string) *pflag.FlagSet {
	t.Helper()
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	config.AddFlags(fs)
	require.NoError(t, fs.Parse(args))
	return fs
}

// refusals collects the refused arguments in err by name.
func refusals(t *testing.T, err error) map[string]*errs.ArgumentError {
	t.Helper()
	require.Error(t, err)
	found := map[string]*errs.ArgumentError{}
	var walk func(error)
	walk = func(err error) {
		switch e := err.(type) { //nolint:errorlint // the whole tree is walked
		case *errs.ArgumentError:
			found[e.Arg] = e
		case interface{ Unwrap() []error }:
			for _, err := range e.Unwrap() {
				walk(err)
			}
		case interface{ Unwrap() error }:
			walk(e.Unwrap())
		}
	}
	walk(err)
	return found
}

// samples are two values for each key, as text and as they must arrive.
var samples = map[string][2]struct {
	text string
	want any
}{
	"backend":             {{"native, host", []string{"native", "host"}}, {"nccl,auto", []string{"nccl", "auto"}}},
	"rank":                {{"3", 3}, {"0", 0}},
	"world-size":          {{"8", 8}, {"16", 16}},
	"local-rank":          {{"1", 1}, {"2", 2}},
	"local-world-size":    {{"4", 4}, {"8", 8}},
	"launcher":            {{"slurm", "slurm"}, {"Torchrun", "torchrun"}},
	"rendezvous-addr":     {{"node1:29400", "node1:29400"}, {"[::1]:1", "[::1]:1"}},
	"rendezvous-fd":       {{"3", 3}, {"77", 77}},
	"job":                 {{"0123", "0123"}, {"train 7", "train 7"}},
	"restart":             {{"2", 2}, {"9", 9}},
	"token":               {{"hunter2", config.NewSecret("hunter2")}, {"1234", config.NewSecret("1234")}},
	"timeout":             {{"90s", 90 * time.Second}, {"5m", 5 * time.Minute}},
	"kernel-timeout":      {{"1.5s", 1500 * time.Millisecond}, {"1h", time.Hour}},
	"liveness-timeout":    {{"250ms", 250 * time.Millisecond}, {"3s", 3 * time.Second}},
	"device":              {{"2", "2"}, {"GPU-5a1e0f3c-7a91-4b7f-9d0c-3f3c0a0f1b2d", "GPU-5a1e0f3c-7a91-4b7f-9d0c-3f3c0a0f1b2d"}},
	"share-device":        {{"true", true}, {"1", true}},
	"multicast":           {{"off", "off"}, {"ON", "on"}},
	"net-devices":         {{"eth0, mlx5_0:1", []string{"eth0", "mlx5_0:1"}}, {"all", []string{"all"}}},
	"unprotected-network": {{"refuse", "refuse"}, {"ALLOW", "allow"}},
	"channels":            {{"1", 1}, {"1024", 1024}},
	"rendezvous-served":   {{"true", true}, {"1", true}},
	"rendezvous-store":    {{"etcd://10.0.0.1:2379/jobs", config.NewSecret("etcd://10.0.0.1:2379/jobs")}, {"etcds://host:1/x", config.NewSecret("etcds://host:1/x")}},
	"max-blocks":          {{"1", 1}, {"32", 32}},
	"rank-order":          {{"true", true}, {"1", true}},
	"tuning":              {{"table.json", "table.json"}, {"/etc/symmem/h200.json", "/etc/symmem/h200.json"}},
	"log-level":           {{"debug", "debug"}, {"WARN", "warn"}},
}

func TestEveryKeyFromEverySource(t *testing.T) {
	keys := config.Keys()
	require.Len(t, samples, len(keys), "a sample for each key")
	for _, key := range keys {
		t.Run(key.Name, func(t *testing.T) {
			require.Contains(t, samples, key.Name)
			for _, sample := range samples[key.Name] {
				path := writeFile(t, fmt.Sprintf("%s: %q\n", key.Name, sample.text))
				v := viper.New()
				v.Set(key.Name, sample.text)
				for name, load := range map[string]struct {
					load func() (config.Config, error)
					from config.Source
				}{
					"file": {func() (config.Config, error) {
						return config.Load(&config.LoadOptions{File: path, Environ: environ()})
					}, config.Source{File: path}},
					"env": {func() (config.Config, error) {
						return config.Load(&config.LoadOptions{Environ: environ(key.Env + "=" + sample.text)})
					}, config.Source{Env: key.Env}},
					"flag": {func() (config.Config, error) {
						flags := parsed(t, "--"+key.Name+"="+sample.text)
						return config.Load(&config.LoadOptions{Flags: flags, Environ: environ()})
					}, config.Source{Flag: "--" + key.Name}},
					"explicit text": {func() (config.Config, error) {
						return config.Load(&config.LoadOptions{Explicit: map[string]any{key.Name: sample.text}, Environ: environ()})
					}, config.Source{Program: true}},
					"explicit value": {func() (config.Config, error) {
						return config.Load(&config.LoadOptions{Explicit: map[string]any{key.Name: sample.want}, Environ: environ()})
					}, config.Source{Program: true}},
					"viper": {func() (config.Config, error) {
						return config.FromViper(v)
					}, config.Source{Program: true}},
				} {
					c, err := load.load()
					if !assert.NoError(t, err, name) {
						continue
					}
					assert.Equal(t, sample.want, c.Value(key.Name), name)
					assert.Equal(t, load.from, c.Source(key.Name), name)
					assert.NoError(t, c.Validate(), name)
					// Nothing else has changed.
					for _, other := range config.Keys() {
						if other.Name != key.Name {
							assert.Equal(t, config.Default().Value(other.Name), c.Value(other.Name), "%s: %s", name, other.Name)
							assert.Equal(t, config.Source{}, c.Source(other.Name), "%s: %s", name, other.Name)
						}
					}
				}
			}
		})
	}
}

func TestPrecedence(t *testing.T) {
	// Each row turns sources on; the strongest of them must win.
	for mask := range 16 {
		opts := &config.LoadOptions{}
		want, from := config.Default().Channels, config.Source{}
		var env []string
		if mask&1 != 0 {
			opts.File = writeFile(t, "channels: 1")
			want, from = 1, config.Source{File: opts.File}
		}
		if mask&2 != 0 {
			env = append(env, "SYMMEM_CHANNELS=2")
			want, from = 2, config.Source{Env: "SYMMEM_CHANNELS"}
		}
		if mask&4 != 0 {
			opts.Flags = parsed(t, "--channels=3")
			want, from = 3, config.Source{Flag: "--channels"}
		} else {
			opts.Flags = parsed(t) // a flag that is not set must not win with its default
		}
		if mask&8 != 0 {
			opts.Explicit = map[string]any{"channels": 4}
			want, from = 4, config.Source{Program: true}
		}
		opts.Environ = environ(env...)
		c, err := config.Load(opts)
		require.NoError(t, err, "sources %04b", mask)
		assert.Equal(t, want, c.Channels, "sources %04b", mask)
		assert.Equal(t, from, c.Source("channels"), "sources %04b", mask)
	}
}

func TestListsReplaceEachOther(t *testing.T) {
	// A list of a stronger source takes the place of a longer one of a weaker source, whatever the form of either.
	path := writeFile(t, "backend: [nccl, nvshmem, host]")
	c, err := config.Load(&config.LoadOptions{File: path, Environ: environ("SYMMEM_BACKEND=native")})
	require.NoError(t, err)
	assert.Equal(t, []string{"native"}, c.Backend)

	flags := parsed(t, "--backend=host", "--backend=nixl,auto")
	c, err = config.Load(&config.LoadOptions{File: path, Environ: environ(), Flags: flags})
	require.NoError(t, err)
	assert.Equal(t, []string{"host", "nixl", "auto"}, c.Backend)

	for _, content := range []string{"backend: [nccl, host]", "backend: nccl, host", "backend:\n  - nccl\n  - ' host ,'"} {
		c, err = config.Load(&config.LoadOptions{File: writeFile(t, content), Environ: environ()})
		require.NoError(t, err, content)
		assert.Equal(t, []string{"nccl", "host"}, c.Backend, content)
	}

	mine := []string{"host"}
	c, err = config.Load(&config.LoadOptions{Environ: environ(), Explicit: map[string]any{"backend": mine}})
	require.NoError(t, err)
	c.Backend[0] = "changed"
	assert.Equal(t, "host", mine[0], "the caller's list is not shared")
}

func TestFileSearch(t *testing.T) {
	t.Run("working directory", func(t *testing.T) {
		t.Chdir(t.TempDir())
		c, err := config.Load(&config.LoadOptions{Environ: environ()})
		require.NoError(t, err, "no file is no error")
		assert.Equal(t, config.Default().Channels, c.Channels)

		require.NoError(t, os.WriteFile("symmem.yaml", []byte("channels: 7"), 0o600))
		c, err = config.Load(&config.LoadOptions{Environ: environ()})
		require.NoError(t, err)
		assert.Equal(t, 7, c.Channels)
		assert.Equal(t, "file symmem.yaml", c.Source("channels").String())
	})
	t.Run("named", func(t *testing.T) {
		one, two, three := writeFile(t, "channels: 1"), writeFile(t, "channels: 2"), writeFile(t, "channels: 3")
		opts := &config.LoadOptions{Environ: environ("SYMMEM_CONFIG=" + one)}
		c, err := config.Load(opts)
		require.NoError(t, err)
		assert.Equal(t, 1, c.Channels)
		opts.Flags = parsed(t, "--config", two)
		c, err = config.Load(opts)
		require.NoError(t, err)
		assert.Equal(t, 2, c.Channels)
		opts.File = three
		c, err = config.Load(opts)
		require.NoError(t, err)
		assert.Equal(t, 3, c.Channels)
	})
	t.Run("missing", func(t *testing.T) {
		missing := filepath.Join(t.TempDir(), "nowhere.yaml")
		for _, opts := range []*config.LoadOptions{
			{File: missing, Environ: environ()},
			{Flags: parsed(t, "--config", missing), Environ: environ()},
			{Environ: environ("SYMMEM_CONFIG=" + missing)},
		} {
			_, err := config.Load(opts)
			require.ErrorIs(t, err, os.ErrNotExist)
			assert.ErrorContains(t, err, missing)
		}
	})
	t.Run("not regular", func(t *testing.T) {
		_, err := config.Load(&config.LoadOptions{File: t.TempDir(), Environ: environ()})
		require.ErrorIs(t, err, config.ErrInvalid)
		assert.ErrorContains(t, err, "a regular file")
	})
	t.Run("too large", func(t *testing.T) {
		_, err := config.Load(&config.LoadOptions{File: writeFile(t, strings.Repeat("# comment\n", 200_000)), Environ: environ()})
		require.ErrorIs(t, err, config.ErrInvalid)
		assert.ErrorContains(t, err, "1048576 bytes")
	})
}

func TestFileContent(t *testing.T) {
	for _, test := range []struct{ name, content, wrong string }{
		{"empty", "", ""},
		{"comment only", "# nothing\n", ""},
		{"null document", "---\n", ""},
		{"key without value", "channels:\nrank: 1\n", ""},
		{"other case", "Channels: 3\nRANK: 2\n", ""},
		{"JSON", `{"channels": 3, "backend": ["host"], "device": 1}`, ""},
		{"list", "- channels\n", "something else than keys and values"},
		{"no YAML", "channels: [1\n", "line"},
		{"no YAML, without a line", "a: b: c\n", "the file is no YAML"},
		{"a tab", "\tchannels: 1\n", "the file is no YAML"},
		{"a value that is none", "channels: !!binary 1\n", "channels"},
		{"key twice", "channels: 3\nchannels: 4\n", "channels again in line 2"},
		{"key twice in two cases", "channels: 3\nChannels: 4\n", "each key once, whatever its case"},
		{"two documents", "channels: 3\n---\nchannels: 4\n", "more than one YAML document"},
		{"typing error", "chanels: 3\n", "channels is the nearest"},
		{"other writing", "world_size: 3\n", "world-size is the nearest"},
		{"section", "rendezvous:\n  addr: node1:1\n", "key is rendezvous;"},
		{"map as value", "channels: {a: 1}\n", "a whole decimal number"},
		{"empty map as value", "backend: {}\n", "a list of names"},
		{"list as value", "channels: [1]\n", "a whole decimal number"},
		{"bool as number", "rank: true\n", "a whole decimal number"},
		{"fraction as number", "rank: 1.5\n", "a whole decimal number"},
		{"number as duration", "timeout: 60\n", "a duration with its unit"},
		{"number as job", "job: 0123\n", "a number in quotes"},
		{"number in list", "backend: [native, 3]\n", "(entry 1 is none)"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := config.Load(&config.LoadOptions{File: writeFile(t, test.content), Environ: environ()})
			if test.wrong == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, test.wrong)
			require.ErrorIs(t, err, config.ErrInvalid)
		})
	}
}

func TestTypingErrorsInTheEnvironment(t *testing.T) {
	for typed, right := range map[string]string{
		"SYMMEM_BAKEND":      "SYMMEM_BACKEND",
		"SYMMEM_WORLDSIZE":   "SYMMEM_WORLD_SIZE",
		"SYMMEM_RNAK":        "SYMMEM_RANK",
		"SYMMEM_TIME_OUT":    "SYMMEM_TIMEOUT",
		"SYMMEM_CONFIG_FILE": "SYMMEM_CONFIG",
		"SYMMEM_RDZV_ADDR":   "SYMMEM_RENDEZVOUS_ADDR",
	} {
		_, err := config.Load(&config.LoadOptions{Environ: environ(typed + "=1")})
		require.ErrorIs(t, err, config.ErrInvalid, typed)
		assert.ErrorContains(t, err, typed)
		assert.ErrorContains(t, err, right+" is the nearest")
	}

	_, err := config.Load(&config.LoadOptions{Environ: environ("SYMMEM_FOO=1")})
	require.ErrorContains(t, err, "SYMMEM_FOO; allowed")
	assert.ErrorContains(t, err, "correct it or unset it")
	assert.NotContains(t, err.Error(), "nearest", "another word is no typing error")

	_, err = config.Load(&config.LoadOptions{Environ: environ("SYMMEM_B=1", "SYMMEM_A=1", "SYMMEM_CHANNELS=0")})
	require.Error(t, err)
	text := err.Error()
	assert.Contains(t, text, "SYMMEM_A;")
	assert.Contains(t, text, "SYMMEM_B;")
	assert.Contains(t, text, "variable SYMMEM_CHANNELS: configuration: channels is 0; allowed: 1 to 1024")
}

func TestLegalVariables(t *testing.T) {
	c, err := config.Load(&config.LoadOptions{Environ: environ(
		"SYMMEM_TEST_REQUIRE=native", "SYMMEM_CONFIG=", "SYMMEM_NO_SUCH_KEY=", "SYMMEM_CHANNELS=", "SYMMEM_RANK=",
		"RANK=7", "=C:=C:\\", "nonsense", "SYMMEM_CUDA_LIBRARY=/opt/libcuda.so.1",
	)})
	require.NoError(t, err)
	assert.Equal(t, config.Default().String(), c.String(), "an empty variable is unset")

	links := []string{
		"SYMMEM_SERVICE_HOST=10.0.0.7", "SYMMEM_SERVICE_PORT=29500", "SYMMEM_SERVICE_PORT_RENDEZVOUS=29500",
		"SYMMEM_PORT=tcp://10.0.0.7:29500", "SYMMEM_PORT_29500_TCP=tcp://10.0.0.7:29500", "SYMMEM_PORT_29500_TCP_ADDR=10.0.0.7",
		"SYMMEM_TRAINER_SERVICE_HOST=10.0.0.8",
	}
	_, err = config.Load(&config.LoadOptions{Environ: environ(append(links, "KUBERNETES_SERVICE_HOST=10.0.0.1")...)})
	require.NoError(t, err, "Kubernetes names services in every pod")
	_, err = config.Load(&config.LoadOptions{Environ: environ(links...)})
	require.ErrorIs(t, err, config.ErrInvalid, "outside of a pod these are typing errors")
}

func TestExplicitKeys(t *testing.T) {
	_, err := config.Load(&config.LoadOptions{Environ: environ(), Explicit: map[string]any{"channel": 3}})
	require.ErrorIs(t, err, config.ErrInvalid)
	assert.ErrorContains(t, err, "channels is the nearest")

	c, err := config.Load(&config.LoadOptions{Environ: environ("SYMMEM_RANK=1"), Explicit: map[string]any{"rank": nil}})
	require.NoError(t, err)
	assert.Equal(t, 1, c.Rank, "nil is not given")

	for _, value := range []any{int8(2), int64(2), uint16(2), 2.0, " 2 "} {
		c, err = config.Load(&config.LoadOptions{Environ: environ(), Explicit: map[string]any{"rank": value}})
		require.NoError(t, err, "%T", value)
		assert.Equal(t, 2, c.Rank, "%T", value)
	}
	for _, value := range []any{uint64(1) << 63, 2.5, time.Second, true, "0x2", "", []int{2}, struct{}{}} {
		_, err = config.Load(&config.LoadOptions{Environ: environ(), Explicit: map[string]any{"rank": value}})
		assert.ErrorIs(t, err, config.ErrInvalid, "%T", value)
	}
	c, err = config.Load(&config.LoadOptions{Environ: environ(), Explicit: map[string]any{"device": 3}})
	require.NoError(t, err)
	assert.Equal(t, "3", c.Device)
}

func TestTruth(t *testing.T) {
	for text, want := range map[string]bool{"true": true, "TRUE": true, " 1 ": true, "false": false, "0": false} {
		c, err := config.Load(&config.LoadOptions{Environ: environ("SYMMEM_SHARE_DEVICE=" + text)})
		require.NoError(t, err, text)
		assert.Equal(t, want, c.ShareDevice, text)
	}
	c, err := config.Load(&config.LoadOptions{Environ: environ(), File: writeFile(t, "share-device: true\n")})
	require.NoError(t, err)
	assert.True(t, c.ShareDevice)
	c, err = config.Load(&config.LoadOptions{Environ: environ("SYMMEM_SHARE_DEVICE=true"), Flags: parsed(t, "--share-device=false")})
	require.NoError(t, err)
	assert.False(t, c.ShareDevice, "a flag goes before a variable")
	c, err = config.Load(&config.LoadOptions{Environ: environ(), Flags: parsed(t, "--share-device")})
	require.NoError(t, err)
	assert.True(t, c.ShareDevice)
	for _, value := range []any{"perhaps", "2", "", 1, 1.0, []string{"true"}} {
		_, err := config.Load(&config.LoadOptions{Environ: environ(), Explicit: map[string]any{"share-device": value}})
		require.ErrorIs(t, err, config.ErrInvalid, "%v", value)
		assert.Equal(t, "true or false", refusals(t, err)["share-device"].Allowed, "%v", value)
	}
}

func TestAllWrongValuesAtOnce(t *testing.T) {
	path := writeFile(t, "backend: auto, host\nchannels: 2000\ntimeout: 60\ntoken: 7777\n")
	_, err := config.Load(&config.LoadOptions{
		File:     path,
		Environ:  environ("SYMMEM_RANK=eight", "SYMMEM_RENDEZVOUS_ADDR=node1", "SYMMEM_MULTICAST=maybe"),
		Flags:    parsed(t, "--restart=-1", "--world-size=4"),
		Explicit: map[string]any{"local-rank": 9, "local-world-size": 8},
	})
	require.ErrorIs(t, err, config.ErrInvalid)
	found := refusals(t, err)
	for _, key := range []string{"backend", "channels", "timeout", "token", "rank", "rendezvous-addr", "multicast", "restart",
		"local-rank", "local-world-size"} {
		assert.Contains(t, found, key)
	}
	assert.Len(t, found, 10)
	assert.Equal(t, "eight", found["rank"].Value)
	assert.NotContains(t, err.Error(), "7777", "a secret stays secret when it is refused")
	for _, where := range []string{"file " + path + ": configuration: channels", "variable SYMMEM_RANK: configuration: rank",
		"flag --restart: configuration: restart", "the program: configuration: local-rank"} {
		assert.Contains(t, err.Error(), where)
	}
}

func TestValidate(t *testing.T) {
	require.NoError(t, config.Default().Validate())
	for _, test := range []struct {
		key    string
		change func(*config.Config)
	}{
		{"backend", func(c *config.Config) { c.Backend = nil }},
		{"backend", func(c *config.Config) { c.Backend = []string{"host", "nccl", "host"} }},
		{"backend", func(c *config.Config) { c.Backend = []string{"auto", "host"} }},
		{"backend", func(c *config.Config) { c.Backend = []string{"host", ""} }},
		{"backend", func(c *config.Config) { c.Backend = []string{"host,nccl"} }},
		{"backend", func(c *config.Config) { c.Backend = []string{"ho st"} }},
		{"rank", func(c *config.Config) { c.Rank = -2 }},
		{"rank", func(c *config.Config) { c.Rank, c.WorldSize = 4, 4 }},
		{"world-size", func(c *config.Config) { c.WorldSize = -1 }},
		{"local-rank", func(c *config.Config) { c.LocalRank = -2 }},
		{"local-rank", func(c *config.Config) { c.LocalRank, c.LocalWorldSize = 2, 2 }},
		{"local-world-size", func(c *config.Config) { c.LocalWorldSize = -1 }},
		{"local-world-size", func(c *config.Config) { c.LocalWorldSize, c.WorldSize = 3, 2 }},
		{"launcher", func(c *config.Config) { c.Launcher = "a\x00b" }},
		{"rendezvous-addr", func(c *config.Config) { c.RendezvousAddr = "node1" }},
		{"rendezvous-addr", func(c *config.Config) { c.RendezvousAddr = ":29400" }},
		{"rendezvous-addr", func(c *config.Config) { c.RendezvousAddr = "node1:0" }},
		{"rendezvous-addr", func(c *config.Config) { c.RendezvousAddr = "node1:65536" }},
		{"rendezvous-addr", func(c *config.Config) { c.RendezvousAddr = "node1:http" }},
		{"rendezvous-addr", func(c *config.Config) { c.RendezvousAddr = "http://node1:80" }},
		{"rendezvous-addr", func(c *config.Config) { c.RendezvousAddr = "no de:80" }},
		{"rendezvous-fd", func(c *config.Config) { c.RendezvousFD = 2 }},
		{"rendezvous-fd", func(c *config.Config) { c.RendezvousFD = -2 }},
		{"job", func(c *config.Config) { c.Job = "a\nb" }},
		{"job", func(c *config.Config) { c.Job = strings.Repeat("x", 256) }},
		{"restart", func(c *config.Config) { c.Restart = -1 }},
		{"token", func(c *config.Config) { c.Token = config.NewSecret("[redacted]") }},
		{"token", func(c *config.Config) { c.Token = config.NewSecret("a\x07b") }},
		{"token", func(c *config.Config) { c.Token = config.NewSecret(strings.Repeat("x", 4097)) }},
		{"timeout", func(c *config.Config) { c.Timeout = 0 }},
		{"kernel-timeout", func(c *config.Config) { c.KernelTimeout = -1 }},
		{"liveness-timeout", func(c *config.Config) { c.LivenessTimeout = 0 }},
		{"device", func(c *config.Config) { c.Device = "-1" }},
		{"device", func(c *config.Config) { c.Device = "a b" }},
		{"multicast", func(c *config.Config) { c.Multicast = "" }},
		{"net-devices", func(c *config.Config) { c.NetDevices = []string{"eth0,eth1"} }},
		{"net-devices", func(c *config.Config) { c.NetDevices = []string{"eth0", "eth0"} }},
		{"net-devices", func(c *config.Config) { c.NetDevices = []string{"eth0", "all"} }},
		{"net-devices", func(c *config.Config) { c.NetDevices = []string{"^eth0"} }},
		{"unprotected-network", func(c *config.Config) { c.UnprotectedNetwork = "" }},
		{"channels", func(c *config.Config) { c.Channels = 0 }},
		{"channels", func(c *config.Config) { c.Channels = 1025 }},
		{"log-level", func(c *config.Config) { c.LogLevel = "verbose" }},
	} {
		c := config.Default()
		test.change(&c)
		err := c.Validate()
		require.ErrorIs(t, err, config.ErrInvalid, "%s: %v", test.key, c)
		found := refusals(t, err)
		assert.Len(t, found, 1, "%v", err)
		require.Contains(t, found, test.key)
		assert.NotEmpty(t, found[test.key].Allowed)
	}
	assert.Error(t, config.Config{}.Validate(), "the zero Config says rank 0 of nothing")
}

func TestSourceOfChangedValues(t *testing.T) {
	c, err := config.Load(&config.LoadOptions{Environ: environ("SYMMEM_RANK=3", "SYMMEM_BACKEND=host")})
	require.NoError(t, err)
	changed := c
	changed.Rank = 4
	changed.Backend = []string{"host", "auto"}
	changed.Channels = 5
	assert.Equal(t, "the program", changed.Source("rank").String())
	assert.Equal(t, "the program", changed.Source("backend").String())
	assert.Equal(t, "the program", changed.Source("channels").String())
	assert.Equal(t, "variable SYMMEM_RANK", c.Source("rank").String(), "a copy does not change its original")

	own := config.Default()
	own.WorldSize = 2
	assert.Equal(t, "the program", own.Source("world-size").String())
	assert.Equal(t, "default", own.Source("rank").String())
	assert.Equal(t, config.Source{}, own.Source("no-such-key"))
	assert.Nil(t, own.Value("no-such-key"))
}

func TestFlagsOfTheProgramAreLeftAlone(t *testing.T) {
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	fs.String("timeout", "never", "the program's own")
	fs.String("config", "/nowhere", "the program's own")
	config.AddFlags(fs)
	config.AddFlags(fs)
	require.NoError(t, fs.Parse([]string{"--timeout=whenever", "--config=/no/where", "--channels=2"}))
	c, err := config.Load(&config.LoadOptions{Flags: fs, Environ: environ()})
	require.NoError(t, err)
	assert.Equal(t, config.Default().Timeout, c.Timeout)
	assert.Equal(t, 2, c.Channels)
}

func TestFromViper(t *testing.T) {
	c, err := config.FromViper(nil)
	require.NoError(t, err)
	assert.Equal(t, config.Default().String(), c.String())

	v := viper.New()
	v.SetConfigType("json")
	require.NoError(t, v.ReadConfig(strings.NewReader(
		`{"name": "mine", "symmem": {"world-size": 8, "timeout": "5s", "backend": ["host"], "token": "hunter2"}}`)))
	c, err = config.FromViper(v.Sub("symmem"))
	require.NoError(t, err)
	assert.Equal(t, 8, c.WorldSize)
	assert.Equal(t, 5*time.Second, c.Timeout)
	assert.Equal(t, []string{"host"}, c.Backend)
	assert.Equal(t, "hunter2", c.Token.Reveal())

	_, err = config.FromViper(v)
	require.ErrorIs(t, err, config.ErrInvalid)
	assert.ErrorContains(t, err, "key is name;")

	v = viper.New()
	v.Set("backnd", "host")
	v.Set("rank", "x")
	_, err = config.FromViper(v)
	require.ErrorIs(t, err, config.ErrInvalid)
	assert.ErrorContains(t, err, "backend is the nearest")
	assert.Contains(t, refusals(t, err), "rank")

	// All flags bound to a viper of the program, and the environment seen by AutomaticEnv only.
	t.Setenv("MINE_CHANNELS", "7")
	v = viper.New()
	v.SetEnvPrefix("mine")
	v.AutomaticEnv()
	require.NoError(t, v.BindPFlags(parsed(t, "--rank=2")))
	c, err = config.FromViper(v)
	require.NoError(t, err)
	assert.Equal(t, 2, c.Rank)
	assert.Equal(t, 7, c.Channels)

	v = viper.New()
	require.NoError(t, v.BindPFlags(parsed(t, "--config=mine.yaml")))
	_, err = config.FromViper(v)
	require.ErrorIs(t, err, config.ErrInvalid)
}

func TestTagsNameTheKeys(t *testing.T) {
	// Programs embed Config in structs of their own, where only the tags say what the keys are.
	keys := config.Keys()
	typ := reflect.TypeFor[config.Config]()
	var tags []string
	for i := range typ.NumField() {
		if field := typ.Field(i); field.IsExported() && field.Name != "BackendOptions" { // whose keys are those of backends
			tags = append(tags, field.Tag.Get("mapstructure"))
		}
	}
	for i, key := range keys {
		require.Less(t, i, len(tags))
		assert.Equal(t, key.Name, tags[i])
		assert.Equal(t, "SYMMEM_"+strings.ToUpper(strings.ReplaceAll(key.Name, "-", "_")), key.Env)
		assert.NotEmpty(t, key.Usage)
	}
	assert.Len(t, tags, len(keys))
}

func TestSecretsAreNeverPrinted(t *testing.T) {
	const secret = "hunter2-hunter2"
	c := config.Default()
	c.Token = config.NewSecret(secret)
	type nested struct {
		c     config.Config // unexported: fmt calls no methods here
		token config.Secret
		Token config.Secret
		Ptr   *config.Secret
	}
	values := map[string]any{
		"secret": c.Token, "pointer": &c.Token, "config": c, "config pointer": &c,
		"nested": nested{c, c.Token, c.Token, &c.Token}, "slice": []config.Secret{c.Token}, "map": map[string]any{"t": c.Token},
	}
	for name, value := range values {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d", "%T"} {
			assert.NotContains(t, fmt.Sprintf(verb, value), secret, "%s %s", name, verb)
			assert.NotContains(t, fmt.Sprintf(verb, value), fmt.Sprintf("%x", secret), "%s %s", name, verb)
		}
		encoded, err := json.Marshal(value)
		require.NoError(t, err, name)
		assert.NotContains(t, string(encoded), secret, name)
		for _, handler := range []func(*bytes.Buffer) slog.Handler{
			func(b *bytes.Buffer) slog.Handler { return slog.NewTextHandler(b, nil) },
			func(b *bytes.Buffer) slog.Handler { return slog.NewJSONHandler(b, nil) },
		} {
			var out bytes.Buffer
			slog.New(handler(&out)).Info("loaded", "value", value)
			assert.NotContains(t, out.String(), secret, name)
		}
	}

	assert.Equal(t, "[redacted]", fmt.Sprint(c.Token))
	assert.Equal(t, `config.Secret("[redacted]")`, fmt.Sprintf("%#v", c.Token))
	assert.Contains(t, c.String(), "token=[redacted]")
	assert.Contains(t, config.Default().String(), "token= ")
	assert.Equal(t, secret, c.Token.Reveal())

	// Files that are no configuration, but secrets, named by mistake.
	path := writeFile(t, secret)
	_, err := config.Load(&config.LoadOptions{File: path, Environ: environ()})
	require.ErrorIs(t, err, config.ErrInvalid)
	assert.NotContains(t, err.Error(), secret[:7])
}

func TestSecret(t *testing.T) {
	var zero config.Secret
	assert.True(t, zero.IsZero())
	assert.Empty(t, zero.String())
	assert.Empty(t, zero.Reveal())
	assert.True(t, zero.Equal(config.NewSecret("")))
	assert.True(t, config.NewSecret("a").Equal(config.NewSecret("a")))
	assert.False(t, config.NewSecret("a").Equal(config.NewSecret("b")))
	assert.False(t, config.NewSecret("a").Equal(zero))

	var decoded struct{ Token config.Secret }
	require.NoError(t, json.Unmarshal([]byte(`{"Token": "hunter2"}`), &decoded))
	assert.Equal(t, "hunter2", decoded.Token.Reveal())
}

func TestLogValue(t *testing.T) {
	c := config.Default()
	c.Backend = []string{"native", "host"}
	c.Token = config.NewSecret("x")
	var out bytes.Buffer
	slog.New(slog.NewJSONHandler(&out, nil)).Info("loaded", "config", c)
	var line struct{ Config map[string]any }
	require.NoError(t, json.Unmarshal(out.Bytes(), &line))
	assert.Len(t, line.Config, len(config.Keys()))
	assert.Equal(t, "native,host", line.Config["backend"])
	assert.Equal(t, "[redacted]", line.Config["token"])
	assert.EqualValues(t, -1, line.Config["rank"])
}

func TestLevel(t *testing.T) {
	for name, want := range map[string]slog.Level{
		"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError,
	} {
		level, ok := config.Config{LogLevel: name}.Level()
		assert.True(t, ok, name)
		assert.Equal(t, want, level, name)
	}
	_, ok := config.Default().Level()
	assert.False(t, ok, "silent unless asked")
}

func TestLoadReadsTheProcessEnvironment(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("SYMMEM_CHANNELS", "12")
	c, err := config.Load(nil)
	require.NoError(t, err)
	assert.Equal(t, 12, c.Channels)
}

func FuzzLoad(f *testing.F) {
	f.Add("channels: 3\nbackend: [a, b]", "SYMMEM_RANK=1", "SYMMEM_BACKEND=a,b")
	f.Add("rank: {}\n? [a]\n: b", "SYMMEM_=", "SYMMEM_TOKEN=\xff")
	f.Add("a: &a [*a]", "SYMMEM_TIMEOUT=9e99s", "SYMMEM_DEVICE=-")
	f.Add("---\n...\n--- !!binary x", "SYMMEM_RENDEZVOUS_ADDR=[::1%lo]:1", "=")
	f.Fuzz(func(t *testing.T, content, one, two string) {
		c, err := config.Load(&config.LoadOptions{File: writeFile(t, content), Environ: environ(one, two)})
		if err == nil {
			err = c.Validate()
			if err != nil {
				t.Fatalf("loaded, but not valid: %v", err)
			}
			return
		}
		if errors.Is(err, os.ErrNotExist) {
			t.Fatalf("lost the file: %v", err)
		}
	})
}

func TestResolve(t *testing.T) {
	vars := []string{"SYMMEM_CHANNELS=5", "SYMMEM_TOKEN=from outside", "SYMMEM_RENDEZVOUS_FD=7", "SYMMEM_WORLD_SIZE=3"}
	found, err := config.Config{}.Resolve(environ(vars...))
	require.NoError(t, err)
	loaded, err := config.Load(&config.LoadOptions{Environ: environ(vars...)})
	require.NoError(t, err)
	require.Equal(t, loaded, found, "the zero Config is what Load finds")

	mine := config.Default()
	mine.Channels = 9
	given, err := mine.Resolve(environ(vars...))
	require.NoError(t, err)
	assert.Equal(t, 9, given.Channels)
	assert.Equal(t, 0, given.WorldSize, "the launcher is asked for it later")
	assert.Equal(t, "from outside", given.Token.Reveal())
	assert.Equal(t, 7, given.RendezvousFD)
	for key, want := range map[string]string{
		"channels": "the program", "token": "variable SYMMEM_TOKEN", "rendezvous-fd": "variable SYMMEM_RENDEZVOUS_FD", "timeout": "default",
	} {
		assert.Equal(t, want, given.Source(key).String(), key)
	}
	assert.True(t, mine.Token.IsZero(), "the caller's is not changed")

	// What the program says itself stays, and what belongs to a place that it names is not taken from elsewhere.
	mine.Token, mine.RendezvousFD = config.NewSecret("mine"), 4
	given, err = mine.Resolve(environ(vars...))
	require.NoError(t, err)
	assert.Equal(t, "mine", given.Token.Reveal())
	assert.Equal(t, 4, given.RendezvousFD)
	mine = config.Default()
	mine.RendezvousAddr = "node1:29400"
	given, err = mine.Resolve(environ(vars...))
	require.NoError(t, err)
	assert.Equal(t, mine, given)

	_, err = config.Default().Resolve(environ("SYMMEM_RENDEZVOUS_FD=one", "SYMMEM_TOKEN=a\x01b"))
	bad := refusals(t, err)
	require.Contains(t, bad, "rendezvous-fd")
	assert.Equal(t, "one", bad["rendezvous-fd"].Value)
	require.Contains(t, bad, "token")
	require.ErrorContains(t, err, "variable SYMMEM_TOKEN")
	require.ErrorContains(t, err, "variable SYMMEM_RENDEZVOUS_FD")

	// Half of a Config is none, whether it has a place or not.
	for _, half := range []config.Config{{Channels: 5}, {Rank: 1, WorldSize: 2, RendezvousAddr: "a:1"}, {Token: config.NewSecret("t")}, {Timeout: time.Second, Multicast: "off"}} {
		_, err := half.Resolve(environ(vars...))
		bad := refusals(t, err)
		require.Len(t, bad, 1, "%v", err)
		require.Contains(t, bad, "Config")
		assert.Contains(t, bad["Config"].Advice, "config.Default()")
	}
}

// TestDates: a day is a text, which YAML would make a moment of: it may name a job, and is shown as it was written where it is refused.
func TestDates(t *testing.T) {
	for _, day := range []string{"2026-11-23", "2026-11-23 10:00:00", "'2026-11-23'"} {
		c, err := config.Load(&config.LoadOptions{File: writeFile(t, "job: "+day+"\ntoken: "+day), Environ: environ()})
		require.NoError(t, err)
		assert.Equal(t, strings.Trim(day, "'"), c.Job)
		assert.Equal(t, strings.Trim(day, "'"), c.Token.Reveal())
	}
	_, err := config.Load(&config.LoadOptions{File: writeFile(t, "rank: 2026-11-23\ntimeout: 2026-11-23"), Environ: environ()})
	for _, key := range []string{"rank", "timeout"} {
		require.Contains(t, refusals(t, err), key)
		assert.Equal(t, "2026-11-23", refusals(t, err)[key].Value)
	}
}
