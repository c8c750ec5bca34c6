package terminal

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cheggaaa/pb/v3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/cmd/symmem/internal/terminal/terminaltest"
)

// TestProgressFits: whatever the width, no line is wider than the terminal, and what is shown says how much of how much.
func TestProgressFits(t *testing.T) {
	for _, columns := range []uint16{10, 24, 40, 80, 200} {
		tty, written := terminaltest.Open(t, columns)
		p := NewProgress(tty)
		require.True(t, p.on)
		p.Say("starting %d ranks of a program with a long name", 1000)
		for i := range 12 {
			p.Show("host", i, 600, "all_reduce/two_shot/bf16/1048577/delayed")
			if columns >= 80 {
				time.Sleep(60 * time.Millisecond) // nothing is foretold from less than half a second
			}
		}
		p.Clear()
		out := written()
		assert.NotContains(t, out, "\n")
		for part := range strings.SplitSeq(out, "\r") {
			assert.Less(t, pb.CellCount(part), int(columns), "%q", part)
		}
		if columns >= 24 {
			assert.Contains(t, out, "host 11 of 600")
		}
		if columns >= 80 {
			assert.Contains(t, out, " left all_reduce/two_shot", "the time that is left")
		}
		assert.True(t, strings.HasSuffix(out, strings.Repeat(" ", int(columns)-1)+"\r"), "it is removed at the end")
	}
}

// TestNullIsNoTerminal: not every character device is a terminal.
func TestNullIsNoTerminal(t *testing.T) {
	null, err := os.Open(os.DevNull)
	require.NoError(t, err)
	assert.False(t, Is(null))
	require.NoError(t, null.Close())
	tty, written := terminaltest.Open(t, 80)
	assert.True(t, Is(tty))
	written()
}

func TestProgressElsewhereIsSilent(t *testing.T) {
	var out strings.Builder
	p := NewProgress(&out)
	p.Say("starting")
	p.Show("host", 1, 2, "x")
	p.Clear()
	assert.Empty(t, out.String())
}
