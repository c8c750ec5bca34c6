package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A module with a function that waits for another, and tests: one that sees what it gives, one that is long.
var smallModule = map[string]string{
	"go.mod": "module small\n\ngo 1.21\n",
	"small.go": `package small

func Add(x, y int) int {
	sum := make(chan int, 1)
	sum <- x + y
	return <-sum
}
`,
	"small_test.go": `package small

import (
	"testing"
	"time"
)

func TestAdd(t *testing.T) {
	if Add(1, 2) != 3 {
		t.Fatal("not 3")
	}
}

func TestNothing(*testing.T) { Add(1, 2) }

func TestLong(*testing.T) { time.Sleep(time.Minute) }
`,
}

// TestTry: a mutant is noticed by a test that fails, and by one that hangs; not by one that does not end in time without the mutant either.
func TestTry(t *testing.T) {
	dir := t.TempDir()
	for name, text := range smallModule {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	const patience = 2 * time.Second
	wrong := mutant{file: "small.go", old: "x + y", new: "x - y"}
	hangs := mutant{file: "small.go", old: "\tsum <- x + y\n", new: ""}
	for _, c := range []struct {
		name   string
		of     mutant
		tests  string
		by     string // how it begins
		failed string
	}{
		{"fails", wrong, "TestAdd", "--- FAIL: TestAdd", ""},
		{"survives", wrong, "TestNothing", "", ""},
		{"does not end", hangs, "TestAdd|TestNothing", "panic: test timed out", ""},
		{"would not end anyhow", wrong, "TestLong", "", "take more than 2s without it too"},
		{"is not tested", wrong, "TestAnother", "", "no test in . matches"},
		{"is not there", mutant{file: "small.go", old: "x * y"}, "TestAdd", "", "0 times and not once"},
		{"does not compile", mutant{file: "small.go", old: "x + y", new: "x + z"}, "TestAdd", "", "does not compile"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.of.tests = []stage{{".", c.tests, patience}}
			by, err := c.of.try(dir, t.TempDir())
			if c.failed != "" {
				require.ErrorContains(t, err, c.failed)
				return
			}
			require.NoError(t, err)
			if c.by == "" {
				require.Empty(t, by)
			}
			require.Contains(t, by, c.by)
		})
	}
}
