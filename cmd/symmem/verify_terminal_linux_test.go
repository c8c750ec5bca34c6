package main

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/cmd/symmem/internal/exit"
	"github.com/symmem/symmem/cmd/symmem/internal/terminal/terminaltest"
)

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
			tty, written := terminaltest.Open(t, 60)
			args := []string{"verify", "-n", "2", "--backend", "host", "--short", "--filter", fewCases}
			status := run(t.Context(), args, nil, tty, tty, environ(tt.env...))
			out := written()
			assert.Equal(t, exit.OK, status, out)
			assert.Regexp(t, `host \d+ of \d+`, out)
			assert.Equal(t, tt.colour, strings.Contains(out, "\x1b[32m"), "%q", out)
		})
	}
}
