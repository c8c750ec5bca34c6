package dl_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/dl"
	"github.com/symmem/symmem/internal/errs"
)

func TestErrorTexts(t *testing.T) {
	e := &dl.Error{Library: "CUDA driver", Call: "cuMemCreate", Code: 2, Name: "CUDA_ERROR_OUT_OF_MEMORY", Text: "out of memory",
		Err: errs.ErrNoMemory}
	assert.EqualError(t, e, "CUDA driver: cuMemCreate returned 2 (CUDA_ERROR_OUT_OF_MEMORY: out of memory)")
	require.ErrorIs(t, e, errs.ErrNoMemory)
	assert.EqualError(t, &dl.Error{Library: "L", Call: "c", Code: 7}, "L: c returned 7")
	assert.EqualError(t, &dl.Error{Library: "L", Call: "c", Code: 7, Text: "bad", Hint: "do better"},
		"L: c returned 7 (bad); do better")
	assert.EqualError(t, &dl.LoadError{Library: "L", Hint: "install it"}, "loading L: there is nowhere to look for it; install it")
	assert.EqualError(t, &dl.LoadError{Library: "L", Attempts: []dl.Attempt{{Path: "a.so", Text: "a.so: bad"}, {Path: "b.so", Text: "worse"}}},
		"loading L: tried a.so (bad); tried b.so (worse)")
	many := []dl.Attempt{{Path: "a.so", Text: "a.so: bad"}}
	for range 5 {
		many = append(many, dl.Attempt{Path: "x.so", Text: "x.so: cannot open shared object file: No such file or directory"})
	}
	assert.EqualError(t, &dl.LoadError{Library: "L", Attempts: many, Hint: "install it"},
		"loading L: tried a.so (bad); it is at none of 5 places (symmem doctor --verbose lists them); install it")
	assert.EqualError(t, &dl.SymbolError{Library: "L", Symbols: []string{"a", "b"}, Hint: "version 2 has it"},
		"L does not have a, b; version 2 has it")
}

func TestOpenWithoutNames(t *testing.T) {
	_, err := dl.Open(dl.Search{Library: "nothing"})
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.NotErrorIs(t, err, errs.ErrUnsupported)
}

// TestFound tells a library that is not there from one that is and cannot be loaded, by what loaders say.
func TestFound(t *testing.T) {
	for name, c := range map[string]struct {
		attempt dl.Attempt
		missing bool
		reason  string
	}{
		"glibc, not there":  {dl.Attempt{Path: "liba.so.1", Text: "liba.so.1: cannot open shared object file: No such file or directory"}, true, "cannot open shared object file: No such file or directory"},
		"musl, not there":   {dl.Attempt{Path: "liba.so.1", Text: "Error loading shared library liba.so.1: No such file or directory"}, true, "Error loading shared library liba.so.1: No such file or directory"},
		"no file matches":   {dl.Attempt{Path: "/x/*/liba.so", Text: "no such file"}, true, "no such file"},
		"needs another":     {dl.Attempt{Path: "/x/liba.so", Text: "libb.so.12: cannot open shared object file: No such file or directory"}, false, "libb.so.12: cannot open shared object file: No such file or directory"},
		"needs another (2)": {dl.Attempt{Path: "/x/liba.so", Text: "Error loading shared library libb.so.12: No such file or directory (needed by /x/liba.so)"}, false, "Error loading shared library libb.so.12: No such file or directory (needed by /x/liba.so)"},
		"broken":            {dl.Attempt{Path: "/x/liba.so", Text: "/x/liba.so: file too short"}, false, "file too short"},
		"another processor": {dl.Attempt{Path: "/x/liba.so", Text: "/x/liba.so: wrong ELF class: ELFCLASS32"}, false, "wrong ELF class: ELFCLASS32"},
		"may not be read":   {dl.Attempt{Path: "/x/liba.so", Text: "/x/liba.so: cannot open shared object file: Permission denied"}, false, "cannot open shared object file: Permission denied"},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, c.missing, c.attempt.Missing())
			assert.Equal(t, c.reason, c.attempt.Reason())
			absent := dl.Attempt{Path: "first.so", Text: "first.so: cannot open shared object file: No such file or directory"}
			found, ok := (&dl.LoadError{Attempts: []dl.Attempt{absent, c.attempt}}).Found()
			assert.Equal(t, !c.missing, ok)
			if ok {
				assert.Equal(t, c.attempt, found)
			}
		})
	}
}
