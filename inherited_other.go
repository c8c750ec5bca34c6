//go:build !unix

package symmem

import (
	"errors"
	"net"
	"os"
)

// inheritedListener takes over the listening socket of a descriptor.
func inheritedListener(fd int, _ string, _ int) (net.Listener, error) {
	f := os.NewFile(uintptr(fd), "rendezvous socket")
	l, err := net.FileListener(f)
	return l, errors.Join(err, f.Close())
}
