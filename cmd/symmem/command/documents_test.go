package command

import (
	"errors"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/fleet"
	"github.com/symmem/symmem/cmd/symmem/internal/process"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/testneed"
)

// TestDocumentedCommands: every line of a document that calls this command names a sub-command and flags that it has, with values that
// it takes, and every variable SYMMEM_* that a document names is one that something reads.
func TestDocumentedCommands(t *testing.T) {
	const root = "../../.."
	pages, err := filepath.Glob(root + "/docs/*.md")
	require.NoError(t, err)
	if _, err := os.Stat(root + "/README.md"); errors.Is(err, fs.ErrNotExist) {
		testneed.Missing(t, "checkout", "this is not run in a checkout: the documents are not here")
	}
	pages = append(pages, root+"/README.md", root+"/CONTRIBUTING.md", root+"/SECURITY.md")

	// What is typed: lines of blocks, and code in lines of text.
	code := regexp.MustCompile("(?m)^ *(?:\\$ )?((?:[A-Z_]+=\\S* )*(?:\\./|go run \\./cmd/)?symmem (?:doctor|run|rendezvous|verify|bench|tune|version|completion)\\b.*)$|" +
		"`((?:[A-Z_]+=[^` ]* )*(?:\\./|go run \\./cmd/)?symmem (?:doctor|run|rendezvous|verify|bench|tune|version|completion)\\b[^`]*)`")
	variable := regexp.MustCompile(`SYMMEM_[A-Z0-9_]*[A-Z0-9]`)
	commands, variables := 0, 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range code.FindAllStringSubmatch(string(text), -1) {
			line := m[1] + m[2]
			assert.NoError(t, parses(line), "%s: %s", page, line)
			commands++
		}
		for _, name := range variable.FindAllString(string(text), -1) {
			_, err := config.Load(&config.LoadOptions{Environ: func() []string { return []string{name + "=x", "SYMMEM_CONFIG="} }})
			if err != nil && strings.Contains(err.Error(), "environment variable is") {
				mistyped := name == "SYMMEM_BAKEND" // shown as a mistake
				assert.True(t, mistyped, "%s: %s is not read by anything", page, name)
			}
			variables++
		}
	}
	assert.Greater(t, commands, 40, "commands in the documents")
	assert.Greater(t, variables, 40, "variables in the documents")
}

// parses returns what is wrong with a line of a shell that calls the command.
func parses(line string) error {
	line = strings.ReplaceAll(line, `\|`, "|") // in tables
	line, _, _ = strings.Cut(line, " #")
	var words, environ []string
	for _, w := range regexp.MustCompile(`'[^']*'|\S+`).FindAllString(line, -1) {
		words = append(words, strings.Trim(w, "'"))
	}
	for strings.Contains(words[0], "=") {
		environ, words = append(environ, words[0]), words[1:]
	}
	if _, err := config.Load(&config.LoadOptions{Environ: func() []string { return environ }}); err != nil {
		return err
	}
	words = words[slices.IndexFunc(words, func(w string) bool { return path.Base(w) == "symmem" })+1:]
	for i, w := range words {
		switch w {
		case "N": // any number
			words[i] = "1"
		case "B": // any backend
			words[i] = "host"
		}
	}
	root := app{&process.Process{}}.rootCommand()
	root.InitDefaultCompletionCmd()
	cmd, args, err := root.Find(words)
	if err != nil {
		return err
	}
	if err := cmd.ParseFlags(args); err != nil {
		return err
	}
	if len(words) > 1 { // else it is the name of a sub-command, in text
		if err := cmd.ValidateArgs(cmd.Flags().Args()); err != nil {
			return err
		}
	}
	if f := cmd.Flags().Lookup("backend"); f != nil && f.Value.Type() == "string" { // of verify and bench
		if _, err := fleet.Choose(f.Value.String(), f.Changed, config.Default()); err != nil {
			return err
		}
	}
	_, err = config.Load(&config.LoadOptions{Flags: cmd.Flags(), Environ: func() []string { return nil }})
	return err
}

// TestParses: the check above finds mistakes.
func TestParses(t *testing.T) {
	for line, right := range map[string]bool{
		"symmem doctor": true,
		"SYMMEM_BACKEND=native,host symmem run -n N -- PROGRAM": true,
		"go run ./cmd/symmem verify # comment":                  true,
		"symmem verify --backend all --filter '^a|b c'":         true,
		"SYMMEM_BAKEND=native symmem doctor":                    false,
		"SYMMEM_TIMEOUT=60 symmem doctor":                       false,
		"symmem doctor --bakend host":                           false,
		"symmem bench --backend hots":                           false,
		"symmem bench --reps x":                                 false,
		"symmem run --multicast maybe -n 2 -- ./program":        false,
		"symmem verify everything":                              false,
	} {
		err := parses(line)
		assert.Equal(t, right, err == nil, "%s: %v", line, err)
	}
}
