package command

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/cmd/symmem/internal/exit"
)

// TestVerifySimulateIsTheCommands: only the command symmem carries simulated GPUs, which are no backend, and their seed is of nothing else.
// docs/simulate.md shows what the command does with them.
func TestVerifySimulateIsTheCommands(t *testing.T) {
	for _, tt := range []struct {
		args []string
		says string
	}{
		{[]string{"--simulate"}, "no simulated GPUs"},
		{[]string{"--seed", "3"}, "--simulate"},
		{[]string{"--weak"}, "--simulate"},
		{[]string{"--simulate", "--ranks", "0"}, "--ranks is 0"},
		{[]string{"--backend", "simulated"}, "allowed are"},
		// Settings that would do nothing are refused, and others are not.
		{[]string{"--simulate", "--tuning", "x"}, "--tuning is not for --simulate"},
		{[]string{"--simulate", "--token", "x"}, "--token is not for --simulate"},
		{[]string{"--simulate", "--rank", "0"}, "--rank is not for --simulate"},
		{[]string{"--simulate", "--picky-last-device", "4"}, "--picky-last-device is not for --simulate"},
		{[]string{"--simulate", "--multicast", "off", "--timeout", "9s", "--channels", "2"}, "no simulated GPUs"},
	} {
		r := call(t, "", environ(), append([]string{"verify"}, tt.args...)...)
		assert.Equal(t, exit.Usage, r.status, "%v: %s", tt.args, r.out)
		assert.Contains(t, r.err, tt.says, "%v", tt.args)
	}
	assert.NotContains(t, backend.Names(), "simulated")
}
