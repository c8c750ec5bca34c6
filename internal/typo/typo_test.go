package typo_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/internal/typo"
)

func TestSlips(t *testing.T) {
	for _, tt := range []struct {
		given, name string
		slips       int
		like        bool
	}{
		{"rank", "rank", 0, true},
		{"rnak", "rank", 1, true},
		{"on", "in", 1, true},
		{"backnd", "backend", 1, true},
		{"world_siez", "world_size", 1, true},
		{"bf61", "bf16", 1, true},
		{"foo", "f16", 2, false},
		{"foo", "job", 2, false},
		{"b", "job", 3, false},
		{"config_file", "config", 5, true},
		{"rdzv_addr", "rendezvous_addr", 6, true},
		{"mood", "mode", 2, false},
		{"toy_mood", "toy_mode", 2, true},
		{"", "rank", 4, false},
		{strings.Repeat("rank", 1000), "rank", 4000, false},
	} {
		n, like := typo.Slips(tt.given, tt.name)
		assert.Equal(t, tt.slips, n, "%.20s, %s", tt.given, tt.name)
		assert.Equal(t, tt.like, like, "%.20s, %s", tt.given, tt.name)
	}
}
