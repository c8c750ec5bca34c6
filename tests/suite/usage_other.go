//go:build !linux

package suite

import (
	"fmt"
	"runtime"
	"time"
)

// resources is what this process holds, as far as this system tells.
type resources struct {
	goroutines int
}

func usage() (resources, error) { return resources{goroutines: runtime.NumGoroutine()}, nil }

// settles waits a little until the process holds no more than it did, and says what it holds too much.
func (r resources) settles() error {
	for range 100 {
		if runtime.NumGoroutine() <= r.goroutines {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("leaked: %d goroutines where %d were", runtime.NumGoroutine(), r.goroutines)
}
