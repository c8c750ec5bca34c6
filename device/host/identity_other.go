//go:build !linux

package host

import (
	"fmt"
	"os"
)

// bootID returns the name of the host: this module asks no more of systems other than Linux, where no processes share memory.
func bootID() (string, error) {
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("asking for the host's name: %w", err)
	}
	return name, nil
}

// cpuName is not known here.
func cpuName() string { return "" }
