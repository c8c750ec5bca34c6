package main

import (
	"bytes"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestListFits: every mutant still has its place in the module, once, and makes Go of Go. Whoever changes what is in the list finds out
// at once, and not when the list is run next.
func TestListFits(t *testing.T) {
	seen := map[string]bool{}
	for _, m := range mutants {
		name := m.file + ": " + m.why
		assert.False(t, seen[name], "two mutants are called %q", name)
		seen[name] = true
		text, err := os.ReadFile(filepath.Join("..", "..", filepath.FromSlash(m.file)))
		require.NoError(t, err, "%s", name)
		if n := bytes.Count(text, []byte(m.old)); n != 1 {
			t.Errorf("%s: %q is in the file %d times and not once", name, m.old, n)
			continue
		}
		changed := bytes.Replace(text, []byte(m.old), []byte(m.new), 1)
		assert.NotEqual(t, text, changed, "%s: it changes nothing", name)
		_, err = parser.ParseFile(token.NewFileSet(), m.file, changed, parser.SkipObjectResolution)
		assert.NoError(t, err, "%s", name)
		assert.NotEmpty(t, m.tests, "%s: no tests should notice it", name)
	}
}
