package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cheggaaa/pb/v3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// openTerminal gives a terminal of so many columns, and what was written to it once it is closed.
func openTerminal(t *testing.T, columns uint16) (tty *os.File, written func() string) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	fd := int(master.Fd())
	require.NoError(t, unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	require.NoError(t, err)
	tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetWinsize(int(tty.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 24, Col: columns}))
	var out syncBuffer
	var done sync.WaitGroup
	done.Go(func() { _, _ = io.Copy(&out, master) }) // it ends with an error when the terminal is closed
	return tty, func() string {
		require.NoError(t, tty.Close())
		done.Wait()
		require.NoError(t, master.Close())
		return out.String()
	}
}

// TestProgressFits: whatever the width, no line is wider than the terminal, and what is shown says how much of how much.
func TestProgressFits(t *testing.T) {
	for _, columns := range []uint16{10, 24, 40, 80, 200} {
		tty, written := openTerminal(t, columns)
		p := newProgress(tty)
		require.True(t, p.on)
		p.say("starting %d ranks of a program with a long name", 1000)
		for i := range 12 {
			p.show("host", i, 600, "all_reduce/two_shot/bf16/1048577/delayed")
			if columns >= 80 {
				time.Sleep(60 * time.Millisecond) // nothing is foretold from less than half a second
			}
		}
		p.clear()
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
	assert.False(t, isTerminal(null))
	require.NoError(t, null.Close())
	tty, written := openTerminal(t, 80)
	assert.True(t, isTerminal(tty))
	written()
}

func TestProgressElsewhereIsSilent(t *testing.T) {
	var out syncBuffer
	p := newProgress(&out)
	p.say("starting")
	p.show("host", 1, 2, "x")
	p.clear()
	assert.Empty(t, out.String())
}

// TestVerifyOnATerminal: progress on the terminal, colours unless NO_COLOR.
func TestVerifyOnATerminal(t *testing.T) {
	for name, tt := range map[string]struct {
		env    []string
		colour bool
	}{
		"a terminal": {[]string{"TERM=xterm", "NO_COLOR="}, true},
		"NO_COLOR":   {[]string{"TERM=xterm", "NO_COLOR=1"}, false},
		"a dumb one": {[]string{"TERM=dumb", "NO_COLOR="}, false},
	} {
		t.Run(name, func(t *testing.T) {
			tty, written := openTerminal(t, 60)
			args := []string{"verify", "-n", "2", "--backend", "host", "--short", "--filter", fewCases}
			status := run(t.Context(), args, nil, tty, tty, environ(tt.env...))
			out := written()
			assert.Equal(t, exitOK, status, out)
			assert.Regexp(t, `host \d+ of \d+`, out)
			assert.Equal(t, tt.colour, strings.Contains(out, "\x1b[32m"), "%q", out)
		})
	}
}
