package command

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
)

// completions asks the command what may come next, as shells do.
func completions(t *testing.T, args ...string) []string {
	t.Helper()
	r := call(t, "", environ(), append([]string{"__complete"}, args...)...)
	require.Equal(t, exit.OK, r.status, r.err)
	lines := strings.Split(strings.TrimSpace(r.out), "\n")
	return lines[:len(lines)-1] // the last one is for the shell
}

func TestCompletion(t *testing.T) {
	for name, tt := range map[string]struct {
		args []string
		has  []string
		not  []string
	}{
		"backends":          {[]string{"verify", "--backend", ""}, []string{"host", "native", "auto", "all"}, []string{"README.md"}},
		"no all for run":    {[]string{"run", "--backend", ""}, []string{"host", "auto"}, []string{"all"}},
		"a list":            {[]string{"bench", "--backend", "host,"}, []string{"host,native"}, []string{"host,host", "host"}},
		"kinds":             {[]string{"bench", "--kind", "put,"}, []string{"put,get", "put,all_reduce"}, []string{"put,put"}},
		"dtypes":            {[]string{"bench", "--dtype", "b"}, []string{"bf16"}, nil},
		"operations":        {[]string{"bench", "--op", ""}, []string{"sum", "avg"}, nil},
		"algorithms":        {[]string{"bench", "--algorithm", ""}, []string{"all", "auto", "two_shot", "nvshmem"}, nil},
		"modes":             {[]string{"bench", "--mode", ""}, []string{"eager", "graph"}, nil},
		"multicast":         {[]string{"doctor", "--multicast", ""}, []string{"auto", "on", "off"}, nil},
		"log levels":        {[]string{"run", "--log-level", ""}, []string{"debug", "error"}, nil},
		"launchers":         {[]string{"doctor", "--launcher", ""}, []string{"torchrun", "slurm", "none"}, []string{"explicit"}},
		"no refused flags":  {[]string{"run", "--"}, []string{"--ranks"}, []string{"--rank", "--rendezvous-fd", "--keeper-fd"}},
		"commands":          {[]string{""}, []string{"verify", "run", "doctor", "bench", "version"}, []string{"probe", "verify-rank"}},
		"nothing to verify": {[]string{"verify", ""}, nil, []string{"README.md"}},
	} {
		t.Run(name, func(t *testing.T) {
			var words []string
			for _, line := range completions(t, tt.args...) {
				word, _, _ := strings.Cut(line, "\t")
				words = append(words, word)
			}
			assert.Subset(t, words, tt.has)
			for _, word := range tt.not {
				assert.NotContains(t, words, word)
			}
		})
	}
}

// TestSuggestions: what was mistyped comes back with what was most likely meant.
func TestSuggestions(t *testing.T) {
	for args, meant := range map[string]string{
		"verfy":                            "verify",
		"benhc":                            "bench",
		"verify --bakend host":             "--backend",
		"run --rnaks 2 true":               "--ranks",
		"verify --backend hsot":            "host",
		"verify --require natve":           "native",
		"bench --kind putt":                "put",
		"bench --dtype bf61":               "bf16",
		"bench --op summ":                  "sum",
		"bench --algorithm twoshot":        "two_shot",
		"bench --mode grpah":               "graph",
		"bench --place on":                 "in",
		"bench --peer ncl":                 "nccl",
		"run -n 1 --multicast of true":     "off",
		"run -n 1 --log-level wran true":   "warn",
		"run -n 1 --log-level debugg true": "debug",
	} {
		t.Run(args, func(t *testing.T) {
			r := call(t, "", environ(), strings.Fields(args)...)
			assert.Equal(t, exit.Usage, r.status)
			assert.Contains(t, r.err, "(did you mean "+meant+"?)")
		})
	}
	for _, args := range []string{"dance", "bug", "verify --zzzz", "verify --backend abacus", "bench --op exclusive", "bench --dtype foo", "tune --dtype foo", "run --fog 1 true"} {
		r := call(t, "", environ(), strings.Fields(args)...)
		assert.Equal(t, exit.Usage, r.status)
		assert.NotContains(t, r.err, "did you mean", args)
	}
}

func TestVersionFlag(t *testing.T) {
	flag, command := call(t, "", environ(), "--version"), call(t, "", environ(), "version")
	require.Equal(t, exit.OK, flag.status, flag.err)
	assert.Equal(t, command.out, flag.out)
}
