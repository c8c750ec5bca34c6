package host

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// bootIDFile holds the kernel's identity of this boot.
var bootIDFile = "/proc/sys/kernel/random/boot_id"

// bootID returns the kernel's identity of this boot: the same for all processes of the host, in containers too. Where it is hidden, as in
// some sandboxes, it is one of this process alone.
func bootID() (string, error) {
	b, err := os.ReadFile(bootIDFile)
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM) {
		return "", err // it is not hidden
	}
	if id := strings.TrimSpace(string(b)); err == nil && id != "" {
		return id, nil
	}
	return ownID(), nil
}

// ownID is unique to this process.
var ownID = sync.OnceValue(rand.Text)

// cpuName is what the CPU calls itself, or "" where the kernel does not tell, as on arm64. It reads only the first
// processor's lines: a large machine has hundreds.
func cpuName() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	b, err := io.ReadAll(io.LimitReader(f, 4096))
	if err != nil {
		return ""
	}
	for line := range bytes.Lines(b) {
		if key, value, ok := bytes.Cut(line, []byte(":")); ok && string(bytes.TrimSpace(key)) == "model name" {
			return string(bytes.TrimSpace(value))
		}
	}
	return ""
}
