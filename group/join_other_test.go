package group

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/symmem/symmem/internal/testneed"
)

// TestJoinAgainAsAnother: ranks that all leave may join again as a world of another size, or as the next attempt, in whichever order they leave.
func TestJoinAgainAsAnother(t *testing.T) {
	ctx := testContext(t)
	sizes, restarts := []int{3, 2, 2, 3, 3}, []int{0, 0, 1, 1, 2}
	for _, served := range []bool{false, true} {
		for last := range 2 { // these ranks are in each of the worlds
			addr := testneed.FreeAddress(t)
			if served {
				addr = newJobsService(t, Options{Stay: true}).addr
			}
			left, begun := make([]chan struct{}, len(sizes)), make([]sync.Once, len(sizes))
			for i := range left {
				left[i] = make(chan struct{})
			}
			failures := make([]error, 3)
			var wait sync.WaitGroup
			for rank := range failures {
				wait.Go(func() {
					for i, size := range sizes {
						if rank >= size {
							<-left[i]
							continue
						}
						g, err := Join(ctx, &Options{Rank: rank, WorldSize: size, Restart: restarts[i], Addr: addr, Served: served, Job: "again"})
						if err == nil && rank == last {
							time.Sleep(20 * time.Millisecond) // the others are back before it leaves
						}
						if err == nil {
							err = g.Close(ctx)
						}
						begun[i].Do(func() { close(left[i]) })
						if err != nil {
							failures[rank] = fmt.Errorf("world %d, last %d, served %v: %w", i, last, served, err)
							return
						}
					}
				})
			}
			wait.Wait()
			requireNone(t, failures)
		}
	}
}
