package tests

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/config"
	"github.com/symmem/symmem/internal/multicast"
	"github.com/symmem/symmem/tests/suite"
)

// byNature lists the capabilities that a backend has on no machine: cases that need one are skipped also where the backend is required.
// Any other capability that is missing is missing on this machine.
var byNature = map[string][]string{
	"host":    {"multicast", "register"},
	farName:   {"peer_pointers", "contiguous", "multicast", "register"},
	"nvshmem": {"contiguous", "ranks_in_one_process"},
	"nixl":    {"peer_pointers", "contiguous", "multicast", "ranks_in_one_process"}, // the last with memory of GPUs only
}

// multicastSetting is the setting under which the suite runs: SYMMEM_MULTICAST, as a program takes it.
func multicastSetting() string { return cmp.Or(os.Getenv("SYMMEM_MULTICAST"), config.MulticastAuto) }

// excused reports whether a case may be skipped on a backend that is required, because of what it lacks; policy says whether multicast
// may be used at all.
func excused(backend, missing string, world int, policy *multicast.Policy) bool {
	switch {
	case missing == suite.MoreRanks, slices.Contains(byNature[backend], missing):
		return true
	case missing == "multicast":
		return world == 1 || policy.Forbidden != "" // there is nobody to reach, or somebody has switched it off
	}
	return false
}

// requireCapability fails the test if the backend is required and lacks the capability on this machine, where others have it.
func requireCapability(t *testing.T, name string, world int, capability string) {
	t.Helper()
	policy, err := multicast.NewPolicy("tests", multicastSetting(), os.Getenv)
	require.NoError(t, err)
	if slices.Contains(required(), name) && !excused(name, capability, world, policy) {
		t.Errorf("SYMMEM_TEST_REQUIRE names backend %s, which has no %s on this machine", name, capability)
	}
}

// checker turns the results of a run of the suite into the test's.
type checker struct {
	t       *testing.T
	backend string
	world   int
	skipped map[string]int // by reason
}

// check fails the test for a case that failed, and for one that was skipped although the backend is required.
func (c *checker) check(res suite.Result) {
	c.t.Helper()
	switch res.Status {
	case suite.Failed:
		c.t.Errorf("%s: %s", res.Case, res.Reason)
	case suite.Skipped:
		if c.skipped == nil {
			c.skipped = map[string]int{}
		}
		if c.skipped[res.Reason] == 0 {
			requireCapability(c.t, c.backend, c.world, res.Missing)
		}
		c.skipped[res.Reason]++
	}
}

// log says how many cases ended how, and why some were skipped.
func (c *checker) log(sum suite.Summary) {
	c.t.Helper()
	text := sum.String()
	for _, why := range slices.Sorted(maps.Keys(c.skipped)) {
		text += fmt.Sprintf("\n%d skipped: %s", c.skipped[why], why)
	}
	c.t.Log(text)
}

// TestExcused: a required backend may lack what it has nowhere, and what was switched off, and nothing else.
func TestExcused(t *testing.T) {
	free, off := &multicast.Policy{}, &multicast.Policy{Forbidden: "it is switched off"}
	for _, tt := range []struct {
		backend, missing string
		world            int
		policy           *multicast.Policy
		want             bool
	}{
		{"host", "register", 2, free, true},
		{"host", "multicast", 2, free, true},
		{"host", "graphs", 2, free, false},
		{"host", suite.MoreRanks, 1, free, true},
		{"far", "peer_pointers", 3, free, true},
		{"native", "register", 2, free, false},
		{"native", "peer_pointers", 2, off, false},
		{"native", "multicast", 2, free, false},
		{"native", "multicast", 2, off, true},
		{"native", "multicast", 1, free, true},
		{"nvshmem", "contiguous", 2, free, true},
		{"nvshmem", "register", 2, free, false},
		{"nixl", "peer_pointers", 2, free, true},
		{"nixl", "register", 2, free, false},
		{"a new one", "transfers", 2, free, false},
	} {
		assert.Equal(t, tt.want, excused(tt.backend, tt.missing, tt.world, tt.policy), "%+v", tt)
	}
	known := map[string]bool{}
	for _, c := range (backend.Capabilities{}).List() {
		known[c.Name] = true
	}
	for name, lacks := range byNature {
		_, err := backend.Lookup(name)
		require.NoError(t, err)
		for _, c := range lacks {
			assert.True(t, known[c], "%s lacks %q, which is no capability", name, c)
		}
	}
}
