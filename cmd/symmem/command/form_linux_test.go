package command

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/verify"
)

// TestFormsOfOthers: an all-reduce that somebody else has registered is checked by verify and measured by bench, by its name.
func TestFormsOfOthers(t *testing.T) {
	r := call(t, "", environ(), "verify", "--json", "--backend", "host", "--ranks", "3", "--short", "--filter", "/own_sum/")
	require.Equal(t, exit.OK, r.status, "%s\n%s", r.out, r.err)
	var v verify.Verification
	require.NoError(t, json.Unmarshal([]byte(r.out), &v))
	assert.Greater(t, v.Summary.Passed, 15, "cases of the form")
	assert.Zero(t, v.Summary.Failed+v.Summary.Skipped)

	r = call(t, "", environ(), "bench", "--backend", "host", "--ranks", "2", "--kind", "all_reduce", "--algorithm", "own_sum", "--sizes", "1K", "--reps", "2")
	require.Equal(t, exit.OK, r.status, "%s\n%s", r.out, r.err)
	assert.Contains(t, r.out, "own_sum")

	r = call(t, "", environ(), "bench", "--algorithm", "own_summ")
	assert.Equal(t, exit.Usage, r.status)
	assert.Contains(t, r.err, "own_sum", "what was meant")
}
