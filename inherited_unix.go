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
	syscall.ForkLock.RLock()
	own, err := syscall.Dup(fd)
	if err == nil {
		syscall.CloseOnExec(own)
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, os.NewSyscallError("dup", err)
	}
	f := os.NewFile(uintptr(own), "rendezvous socket")
	var l net.Listener
	listens, err := syscall.GetsockoptInt(own, syscall.SOL_SOCKET, syscall.SO_ACCEPTCONN)
	switch {
	case err != nil:
		err = os.NewSyscallError("getsockopt", err)
	case listens == 0: // package net takes a connection for a listener
		err = errors.New("the socket does not listen")
	default:
		l, err = net.FileListener(f)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	if err := syscall.Close(fd); err != nil {
		return nil, errors.Join(os.NewSyscallError("close", err), l.Close())
	}
	return l, nil
}
