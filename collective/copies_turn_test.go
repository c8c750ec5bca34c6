package collective

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/memory"
)

// TestCopiesOfTwoRuns: computed copies of a run that comes while those of another are under way, as where graphs of a plan are on two streams, are not made, and are the plan's last.
func TestCopiesOfTwoRuns(t *testing.T) {
	p := &Plan{name: "copies", memory: new(memory.Memory)}
	c := &copyStep{work: &programWork{plan: p}, copies: func() ([]Copy, error) {
		t.Error("a second run finds out what to copy")
		return nil, nil
	}}
	c.work.running.Store(true) // of the first
	run, err := c.Start()
	require.NoError(t, err)
	ended, err := run.Poll()
	assert.True(t, ended)
	assert.ErrorIs(t, err, errs.ErrTwoStreams)
	assert.ErrorIs(t, p.Err(), errs.ErrTwoStreams)
	assert.True(t, c.work.running.Load(), "the first is still under way")
}
