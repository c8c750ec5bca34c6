package group

import (
	"fmt"
	"os/exec"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/internal/processors"
	"github.com/symmem/symmem/internal/testneed"
)

// TestBoundRanks starts ranks that are bound to processors, as launchers do, and asks each whether there are enough of them.
func TestBoundRanks(t *testing.T) {
	var mine unix.CPUSet
	require.NoError(t, unix.SchedGetaffinity(0, &mine))
	var usable []int
	for p := 0; len(usable) < 2 && p < 64*len(mine); p++ {
		if mine.IsSet(p) {
			usable = append(usable, p)
		}
	}
	if len(usable) < 2 {
		testneed.Missing(t, "processors", "the tests may run on one processor only")
	}
	if q := processors.Here().Quota; q > 0 && q < 2000 {
		testneed.Missing(t, "processors", fmt.Sprintf("the tests have a quota of %d thousandths of a processor", q))
	}
	one, other := usable[:1], usable[1:]
	for _, tt := range []struct {
		name           string
		ranks          [][]int // the processors of each
		oversubscribed bool
	}{
		{"a core each", [][]int{one, other}, false},
		{"the same core", [][]int{other, other}, true},
		{"three on two cores", [][]int{one, other, one}, true},
		{"one is free to make room", [][]int{usable, one}, false},
		{"two on one core, one on both", [][]int{one, one, usable}, true},
		{"free", [][]int{usable, usable}, false},
		{"three, free", [][]int{usable, usable, usable}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			workers := startWorkersBy(t, "processors", len(tt.ranks), -1, func(rank int, cmd *exec.Cmd) error {
				// A process inherits what the thread may use that starts it.
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				var only unix.CPUSet
				for _, p := range tt.ranks[rank] {
					only.Set(p)
				}
				require.NoError(t, unix.SchedSetaffinity(0, &only))
				defer func() { assert.NoError(t, unix.SchedSetaffinity(0, &mine)) }()
				return cmd.Start()
			})
			for rank, r := range reports(t, workers, -1) {
				assert.Equal(t, fmt.Sprintf("oversubscribed: %v", tt.oversubscribed), r.Text, "rank %d", rank)
			}
		})
	}
}
