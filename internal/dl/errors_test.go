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
	assert.EqualError(t, &dl.LoadError{Library: "L", Attempts: []dl.Attempt{{"a.so", "a.so: bad"}, {"b.so", "worse"}}},
		"loading L: tried a.so (bad); tried b.so (worse)")
	assert.EqualError(t, &dl.SymbolError{Library: "L", Symbols: []string{"a", "b"}, Hint: "version 2 has it"},
		"L does not have a, b; version 2 has it")
}

func TestOpenWithoutNames(t *testing.T) {
	_, err := dl.Open(dl.Search{Library: "nothing"})
	require.ErrorIs(t, err, errs.ErrUnavailable)
	assert.NotErrorIs(t, err, errs.ErrUnsupported)
}
