//go:build unix

package symmem

import (
	"errors"
	"net"
	"os"
	"syscall"
)

// inheritedListener takes over the listening socket of a descriptor. What is none stays open: it is the program's, which may have got the number of a socket that an
// earlier Open has taken.
func inheritedListener(fd int) (net.Listener, error) {
	listens, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_ACCEPTCONN)
	switch {
	case errors.Is(err, syscall.ENOTSOCK), errors.Is(err, syscall.EBADF):
		return nil, os.NewSyscallError("getsockopt", err)
	case err == nil && listens == 0: // package net takes a connection for a listener
		return nil, errors.New("the socket does not listen")
	}
	f := os.NewFile(uintptr(fd), "rendezvous socket")
	if err != nil { // it is a socket
		return nil, errors.Join(os.NewSyscallError("getsockopt", err), f.Close())
	}
	l, err := net.FileListener(f)
	if err = errors.Join(err, f.Close()); err != nil && l != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, err
}
