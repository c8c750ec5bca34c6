package suite

import (
	"fmt"
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/symmem/symmem/device"
)

// TestCaseNames: each case can be chosen by its name, which has no character that go test's -run takes for something else, and is no other
// case's.
func TestCaseNames(t *testing.T) {
	plain := regexp.MustCompile(`^[a-z0-9_]+(/[a-z0-9_]+)+$`)
	for _, kind := range []device.Kind{device.Host, device.CUDA} {
		for _, backend := range []string{"host", "nccl", "nvshmem"} {
			for _, world := range []int{1, 2, 4, 8} {
				for _, short := range []bool{false, true} {
					at := fmt.Sprintf("%v, %s, %d ranks, short %t", kind, backend, world, short)
					seen := map[string]bool{}
					for _, c := range Cases(&Options{Device: kind, Backend: backend, World: world, Short: short}) {
						assert.Regexp(t, plain, c.Name, at)
						assert.False(t, seen[c.Name], "%s: two cases are %s", at, c.Name)
						seen[c.Name] = true
					}
					assert.Greater(t, len(seen), 300, at)
				}
			}
		}
	}
}
