package command

import (
	"encoding/json"
	"errors"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/cmd/symmem/internal/settings"
	"github.com/symmem/symmem/internal/testneed"
)

// shownCommands returns the commands that users see.
func shownCommands() []*cobra.Command {
	return slices.DeleteFunc(app{&process.Process{}}.rootCommand().Commands(), func(c *cobra.Command) bool { return c.Hidden })
}

// TestFlagsAreAlike: --json is the same on every command that has results, and -n on every one that starts ranks.
func TestFlagsAreAlike(t *testing.T) {
	var withJSON, withRanks []string
	for _, cmd := range shownCommands() {
		if flag := cmd.Flags().Lookup("json"); flag != nil {
			withJSON = append(withJSON, cmd.Name())
			assert.Equal(t, "bool", flag.Value.Type(), cmd.Name())
			assert.Equal(t, jsonUsage, flag.Usage, cmd.Name())
		}
		if flag := cmd.Flags().ShorthandLookup("n"); flag != nil {
			withRanks = append(withRanks, cmd.Name())
			assert.Equal(t, "ranks", flag.Name)
			assert.Equal(t, "int", flag.Value.Type())
		}
	}
	assert.ElementsMatch(t, []string{"verify", "doctor", "bench", "tune", "version"}, withJSON)
	assert.ElementsMatch(t, []string{"run", "verify", "bench", "tune"}, withRanks)
}

// documentOf reads the only thing that was printed, a document.
func documentOf(t *testing.T, text string) map[string]any {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	var document map[string]any
	require.NoError(t, d.Decode(&document), text)
	_, err := d.Token()
	require.True(t, errors.Is(err, io.EOF), "more than the document was printed: %s", text)
	return document
}

// TestJSONOnly: with --json a document is printed, and nothing else, whether all is well or not. The number of ranks in it is that of -n.
func TestJSONOnly(t *testing.T) {
	few := []string{"--short", "--filter", "^agreement/size$"}
	for name, tt := range map[string]struct {
		args   []string
		status int
		has    []string
	}{
		"version":              {[]string{"version"}, exit.OK, []string{"version", "go"}},
		"doctor":               {[]string{"doctor"}, healthyHere(), []string{"backends", "verdict", "config"}},
		"doctor finds trouble": {[]string{"doctor", "--backend", "absent"}, exit.Failure, []string{"backends", "verdict", "config"}},
		"verify":               {append([]string{"verify", "-n", "2"}, few...), healthyHere(), []string{"ranks", "backends", "summary"}},
		"verify fails":         {append([]string{"verify", "-n", "2", "--backend", "absent"}, few...), exit.Failure, []string{"ranks", "backends", "summary"}},
	} {
		t.Run(name, func(t *testing.T) {
			if tt.args[0] == "verify" && runtime.GOOS != "linux" {
				testneed.Missing(t, "host", "ranks are started on Linux only")
			}
			r := call(t, "", environ(), append(tt.args, "--json")...)
			assert.Equal(t, tt.status, r.status, r.err)
			document := documentOf(t, r.out)
			for _, key := range tt.has {
				assert.Contains(t, document, key)
			}
			if slices.Contains(tt.args, "-n") {
				assert.EqualValues(t, 2, document["ranks"])
			}
		})
	}
}

// TestRefusedFlags: what a command that starts ranks gives each rank itself, it refuses, and so does not show.
func TestRefusedFlags(t *testing.T) {
	values := map[string]string{"rank": "0", "world-size": "2", "local-rank": "0", "local-world-size": "2", "launcher": "none",
		"rendezvous-addr": "127.0.0.1:7", "rendezvous-fd": "9", "rendezvous-served": "true", "rendezvous-store": "etcd://h:1/x", "restart": "1"}
	for _, command := range []string{"run", "verify", "bench", "tune"} {
		help := call(t, "", environ(), command, "--help").out
		for _, key := range settings.PlaceKeys {
			require.Contains(t, values, key)
			args := []string{command, "-n", "2", "--" + key + "=" + values[key]}
			if command == "run" {
				args = append(args, "true")
			}
			r := call(t, "", environ(), args...)
			assert.Equal(t, exit.Usage, r.status, "%v\n%s", args, r.out)
			assert.Contains(t, r.err, "--"+key+" is not for "+command)
			assert.NotRegexp(t, `--`+key+`\b[^-]`, help)
		}
	}
	for _, cmd := range shownCommands() {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Hidden {
				assert.NotRegexp(t, `--`+f.Name+`\b[^-]`, cmd.UsageString(), cmd.Name())
			} else {
				assert.Regexp(t, `--`+f.Name+`\b`, cmd.UsageString(), cmd.Name())
			}
		})
	}
}

// TestEveryChoiceIsCompleted: a flag whose error lists what is allowed has its values completed too, on every command that has it.
func TestEveryChoiceIsCompleted(t *testing.T) {
	for flag, value := range map[string]string{"backend": "host", "require": "host", "kind": "all_reduce", "dtype": "f32", "op": "sum", "algorithm": "auto",
		"mode": "graph", "place": "out", "peer": "nccl", "multicast": "auto", "log-level": "info"} {
		found := false
		for _, cmd := range shownCommands() {
			if f := cmd.Flags().Lookup(flag); f == nil || f.Hidden {
				continue
			}
			found = true
			words := completions(t, cmd.Name(), "--"+flag, "")
			assert.Contains(t, words, value, "%s --%s", cmd.Name(), flag)
			assert.Contains(t, completions(t, cmd.Name(), "--"+flag+"="), value, "%s --%s=", cmd.Name(), flag)
		}
		assert.True(t, found, "no command has --%s", flag)
	}
}

// TestCompletionScripts: every shell that is known gets a script that asks this command.
func TestCompletionScripts(t *testing.T) {
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		r := call(t, "", environ(), "completion", shell)
		assert.Equal(t, exit.OK, r.status, r.err)
		assert.Contains(t, r.out, "__complete", shell)
		assert.Contains(t, r.out, "symmem", shell)
	}
}
