package suite

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"time"
)

// resources is what this process holds.
type resources struct {
	files, mappings, goroutines int
}

func usage() (resources, error) {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return resources{}, err
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return resources{}, err
	}
	// Only shared memory: the Go runtime's own mappings come and go.
	return resources{files: len(fds), mappings: bytes.Count(maps, []byte("memfd:symmem")), goroutines: runtime.NumGoroutine()}, nil
}

// settles waits a little until the process holds no more than it did, and says what it holds too much.
func (r resources) settles() error {
	var now resources
	for range 100 {
		var err error
		if now, err = usage(); err != nil {
			return err
		}
		if now.files <= r.files && now.mappings <= r.mappings && now.goroutines <= r.goroutines {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("leaked: %d files where %d were, %d mappings of shared memory where %d were, %d goroutines where %d were",
		now.files, r.files, now.mappings, r.mappings, now.goroutines, r.goroutines)
}
