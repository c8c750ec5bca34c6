package tune

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/measure"
	"github.com/symmem/symmem/kernels/tuning"
)

// TestIncomplete: what an interrupt has cut short says so, for people and as JSON, which is no table then.
func TestIncomplete(t *testing.T) {
	form := measure.Candidate{Form: "one_shot_push"}
	points := []measure.Point{point(1<<10, form, form)}
	var all, cut strings.Builder
	require.NoError(t, write(&all, h200(), points, ""))
	assert.NotContains(t, all.String(), "incomplete")
	require.NoError(t, write(&cut, h200(), points, "interrupted"))
	assert.Equal(t, all.String()+"\nincomplete: interrupted\n", cut.String())

	cut.Reset()
	table := tableOf(h200(), points)
	require.NoError(t, writeIncomplete(&cut, table, "interrupted"))
	var got struct {
		Incomplete string
		Rules      []tuning.Rule
	}
	require.NoError(t, json.Unmarshal([]byte(cut.String()), &got))
	assert.Equal(t, "interrupted", got.Incomplete)
	assert.Len(t, got.Rules, len(table.Rules))
	_, err := tuning.Parse("x", []byte(cut.String()))
	assert.ErrorContains(t, err, "incomplete")
}

// TestUnmeasured: whatever kept sizes from being measured, the user hears that they were not.
func TestUnmeasured(t *testing.T) {
	assert.Empty(t, unmeasured("", 6, 6))
	assert.Equal(t, "the time of 1m0s was over: 4 of 6 sizes were measured", unmeasured("the time of 1m0s was over", 4, 6))
	assert.Equal(t, "4 of 6 sizes were measured: for the others a rank had no memory, or there was no form", unmeasured("", 4, 6))
}
