//go:build unix

package symmem

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"
)

// inheritedListener takes over the listening socket of a descriptor, where ranks look for it: at one of so many ports from that of addr on. What is none stays open: it is
// the program's, which may have got the number of a socket that an earlier Open has taken.
func inheritedListener(fd int, addr string, ports int) (net.Listener, error) {
	listens, err := syscall.GetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_ACCEPTCONN)
	switch {
	case errors.Is(err, syscall.ENOTSOCK), errors.Is(err, syscall.EBADF):
		return nil, os.NewSyscallError("getsockopt", err)
	case err == nil && listens == 0: // package net takes a connection for a listener
		return nil, errors.New("the socket does not listen")
	case err == nil:
		if at, err := syscall.Getsockname(fd); err != nil {
			return nil, os.NewSyscallError("getsockname", err)
		} else if err := listensAt(at, addr, ports); err != nil {
			return nil, err
		}
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

// listensAt says why a socket that listens is not the one that ranks look for. Its host may have any of the names that a host has.
func listensAt(at syscall.Sockaddr, addr string, ports int) error {
	var port int
	switch at := at.(type) {
	case *syscall.SockaddrInet4:
		port = at.Port
	case *syscall.SockaddrInet6:
		port = at.Port
	default:
		return errors.New("the socket is none of TCP")
	}
	_, text, err := net.SplitHostPort(addr)
	if err != nil {
		return nil // what there is an error for anyway, or no address at all
	}
	first, err := net.LookupPort("tcp", text)
	if err == nil && (port < first || port >= first+max(ports, 1)) {
		return fmt.Errorf("the socket listens at port %d, and the ranks look for the service at %s", port, addr)
	}
	return nil
}
