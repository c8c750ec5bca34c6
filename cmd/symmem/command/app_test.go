package command

import (
	"bytes"
	"encoding/json"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/build"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
)

func TestUsageErrors(t *testing.T) {
	for name, tt := range map[string]struct {
		args []string
		env  []string
		says string
	}{
		"no command":              {nil, nil, "a command is missing"},
		"unknown command":         {[]string{"dance"}, nil, `no command "dance"`},
		"help with nothing":       {[]string{"help", "dance"}, nil, `no command "dance" to help with`},
		"help with half of it":    {[]string{"help", "run", "dance"}, nil, `no command "run dance" to help with`},
		"completion of no shell":  {[]string{"completion", "dance"}, nil, `"dance"`},
		"unknown flag":            {[]string{"run", "--dance"}, nil, "unknown flag: --dance"},
		"run without a program":   {[]string{"run", "-n", "2"}, nil, "program to start is missing"},
		"run without ranks":       {[]string{"run", "true"}, nil, "-n, the number of ranks, is missing"},
		"run of no ranks":         {[]string{"run", "-n", "0", "true"}, nil, "1 to 1024"},
		"run of too many":         {[]string{"run", "-n", "5000", "true"}, nil, "1 to 1024"},
		"run with a text as n":    {[]string{"run", "-n", "many", "true"}, nil, "invalid argument"},
		"a number out of range":   {[]string{"verify", "-n", "99999999999999999999"}, nil, `"-n, --ranks": allowed is a whole number (number of ranks`},
		"a time without a unit":   {[]string{"run", "--grace=10"}, nil, `"--grace": allowed is a duration with its unit, like 90s or 2m (how long ranks`},
		"neither true nor false":  {[]string{"verify", "--short=maybe"}, nil, `"maybe" for "--short": allowed is true or false`},
		"a long value":            {[]string{"bench", "--reps", strings.Repeat("1", 100000)}, nil, `111"… (100000 bytes) for "--reps"`},
		"run with a bad grace":    {[]string{"run", "-n", "1", "--grace", "0s", "true"}, nil, "--grace is 0s"},
		"run with a rank":         {[]string{"run", "-n", "1", "--rank", "0", "true"}, nil, "--rank is not for run"},
		"bad setting":             {[]string{"run", "-n", "1", "--multicast", "perhaps", "true"}, nil, "auto, on or off"},
		"bad variable":            {[]string{"run", "-n", "1", "true"}, []string{"SYMMEM_WORLDSIZE=3"}, "SYMMEM_WORLD_SIZE"},
		"doctor with arguments":   {[]string{"doctor", "me"}, nil, `"me"`},
		"version with arguments":  {[]string{"version", "x"}, nil, `"x"`},
		"verify, unknown backend": {[]string{"verify", "--backend", "host,abacus"}, nil, "abacus"},
		"verify, by a variable":   {[]string{"verify"}, []string{"SYMMEM_BACKEND=hots"}, "there is no backend hots (variable SYMMEM_BACKEND)"},
		"bench, by a variable":    {[]string{"bench"}, []string{"SYMMEM_BACKEND=host,abacus"}, "there is no backend abacus (variable SYMMEM_BACKEND)"},
		"tune, by a variable":     {[]string{"tune"}, []string{"SYMMEM_BACKEND=abacus"}, "there is no backend abacus (variable SYMMEM_BACKEND)"},
		"verify, all among names": {[]string{"verify", "--backend", "host,all"}, nil, "all stands alone"},
		"verify, twice":           {[]string{"verify", "--backend", "host,host"}, nil, "host twice"},
		"verify, require":         {[]string{"verify", "--require", "abacus"}, nil, "--require"},
		"verify, filter":          {[]string{"verify", "--filter", "("}, nil, "--filter"},
		"verify, empty filter":    {[]string{"verify", "--filter", "no such case"}, nil, "no case matches"},
		"verify, ranks":           {[]string{"verify", "--ranks", "0"}, nil, "--ranks is 0"},
		"bench, sizes":            {[]string{"bench", "--sizes", "1M:1K"}, nil, "begins above its end"},
		"bench, everything":       {[]string{"bench", "--dtype", "f8", "--op", "xor", "--mode", "x", "--plot", "z"}, nil, "xor"},
		"bench, dtype":            {[]string{"bench", "--dtype", "foo"}, nil, `--dtype is "foo"; allowed are f16, bf16`},
		"bench, op":               {[]string{"bench", "--op", "foo"}, nil, `--op is "foo"; allowed are sum, prod`},
		"bench, algorithm":        {[]string{"bench", "--algorithm", "three_shot"}, nil, `--algorithm is "three_shot"; allowed are all, auto, one_shot, two_shot`},
		"bench, file":             {[]string{"bench", "--output", "/no/such/folder/x.json"}, nil, "no such file"},
		"a rank of verify":        {[]string{"verify-rank"}, nil, "started by symmem itself"},
		"tune, sizes":             {[]string{"tune", "--sizes", "17"}, nil, "multiples of 16"},
		"tune, everything":        {[]string{"tune", "--kind", "put", "--dtype", "f8", "-n", "1", "--reps", "1", "--time", "-1s"}, nil, "--time is -1s"},
		"tune, kinds":             {[]string{"tune", "--kind", "all_gathr"}, nil, "did you mean all_gather"},
		"tune, two backends":      {[]string{"tune", "--backend", "host,host2"}, nil, "allowed are"},
		"tune, all backends":      {[]string{"tune", "--backend", "all"}, nil, "one name, or auto"},
		"tune, a table":           {[]string{"tune", "--tuning", "x.json"}, nil, "--output names the file"},
		"tune, no folder":         {[]string{"tune", "--output", "/no/such/folder/x.json"}, nil, "no such file"},
		"a rank of tune":          {[]string{"tune-rank", "--spec", "{"}, nil, "--spec"},
		"a rank of bench":         {[]string{"bench-rank", "--spec", "{"}, nil, "--spec"},
		"a probe of nothing":      {[]string{"probe", "abacus"}, nil, "abacus"},
	} {
		t.Run(name, func(t *testing.T) {
			r := call(t, "", environ(tt.env...), tt.args...)
			assert.Equal(t, exit.Usage, r.status)
			assert.Contains(t, r.err, tt.says)
			assert.Empty(t, r.out)
			lines := strings.Split(strings.TrimSpace(r.err), "\n")
			assert.Regexp(t, `^Run 'symmem.* --help' for usage\.$`, lines[len(lines)-1])
			assert.NotContains(t, r.err, "goroutine ")
		})
	}
}

func TestHelp(t *testing.T) {
	for _, command := range []string{"run", "verify", "doctor", "bench", "tune", "version"} {
		r := call(t, "", environ(), command, "--help")
		assert.Equal(t, exit.OK, r.status)
		assert.Contains(t, r.out, "symmem "+command)
		if command != "version" {
			assert.Contains(t, r.out, "--kernel-timeout", "every setting is a flag of %s", command)
		}
	}
}

func TestVersion(t *testing.T) {
	r := call(t, "", environ(), "version")
	require.Equal(t, exit.OK, r.status)
	assert.Contains(t, r.out, runtime.Version())
	assert.Equal(t, 1, strings.Count(r.out, "\n"))

	r = call(t, "", environ(), "version", "--json")
	require.Equal(t, exit.OK, r.status)
	var b build.Info
	require.NoError(t, json.Unmarshal([]byte(r.out), &b))
	assert.Equal(t, build.Read(), b)
}

// full is a writer without room.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, syscall.ENOSPC }

// TestNoRoomForWords: what a command is to print and cannot is a failure, and no mistake in the command line.
func TestNoRoomForWords(t *testing.T) {
	for _, args := range [][]string{{"--help"}, {"help", "run"}, {"verify", "--help"}, {"completion", "bash"}, {"--version"}, {"version"}} {
		var said bytes.Buffer
		assert.Equal(t, exit.Failure, run(t.Context(), args, strings.NewReader(""), full{}, &said, nil), "%q", args)
		assert.Contains(t, said.String(), syscall.ENOSPC.Error(), "%q", args)
		assert.NotContains(t, said.String(), "for usage", "%q", args)
	}
}
