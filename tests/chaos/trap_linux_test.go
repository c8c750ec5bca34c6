package chaos

import (
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A trap holds a process up at each of some system calls, and lets another process decide what becomes of it. It is a seccomp filter that
// the process sets on all of its threads, and needs no library and no privilege. The Go runtime's own calls are never among those that
// fail: a runtime that gets no memory ends the process.

// call is a system call that can be trapped.
type call struct {
	name   string
	number uintptr
	arg    int          // the argument that is looked at,
	mask   uint32       // its bits that count: 0, none do,
	want   uint32       // and what they must be
	errnos []unix.Errno // what it may fail with; none if the runtime makes it too
	file   string       // how the name of the file that it is about begins, in /proc/PID/fd; "" is any
	raw    bool         // the runtime waits for it as it waits for no other: a process whose call hangs does nothing at all
}

// calls are those that can be trapped.
var calls = []call{
	{name: "memfd_create", number: unix.SYS_MEMFD_CREATE, errnos: []unix.Errno{unix.EMFILE, unix.ENFILE, unix.ENOMEM}},
	{name: "ftruncate", number: unix.SYS_FTRUNCATE, errnos: []unix.Errno{unix.ENOMEM, unix.ENOSPC}},
	{name: "fcntl(F_ADD_SEALS)", number: unix.SYS_FCNTL, arg: 1, mask: math.MaxUint32, want: unix.F_ADD_SEALS, errnos: []unix.Errno{unix.EPERM, unix.EBUSY}},
	{name: "mmap(MAP_SHARED)", number: unix.SYS_MMAP, arg: 3, mask: unix.MAP_SHARED, want: unix.MAP_SHARED, errnos: []unix.Errno{unix.ENOMEM, unix.EAGAIN}},
	{name: "mmap(MAP_NORESERVE)", number: unix.SYS_MMAP, arg: 3, mask: unix.MAP_NORESERVE, want: unix.MAP_NORESERVE, errnos: []unix.Errno{unix.ENOMEM}},
	{name: "sendmsg", number: unix.SYS_SENDMSG, errnos: []unix.Errno{unix.ENOBUFS, unix.ETOOMANYREFS, unix.EPIPE}},
	{name: "recvmsg", number: unix.SYS_RECVMSG, errnos: []unix.Errno{unix.ENOMEM, unix.ECONNRESET}},
	{name: "socket", number: unix.SYS_SOCKET, errnos: []unix.Errno{unix.EMFILE, unix.ENFILE, unix.ENOBUFS}},
	{name: "bind", number: unix.SYS_BIND, errnos: []unix.Errno{unix.EADDRINUSE, unix.ENOMEM}},
	{name: "connect", number: unix.SYS_CONNECT, errnos: []unix.Errno{unix.ECONNREFUSED, unix.ETIMEDOUT, unix.ENOBUFS}},
	{name: "accept4", number: unix.SYS_ACCEPT4, errnos: []unix.Errno{unix.EMFILE, unix.ENFILE, unix.ECONNABORTED}},
	{name: "setsockopt", number: unix.SYS_SETSOCKOPT, errnos: []unix.Errno{unix.ENOMEM, unix.EINVAL}},
	{name: "write", number: unix.SYS_WRITE},
	{name: "getsockopt", number: unix.SYS_GETSOCKOPT, errnos: []unix.Errno{unix.ENOBUFS}},
}

// further are those that only the sweep lets fail.
var further = []call{
	{name: "fcntl(F_GET_SEALS)", number: unix.SYS_FCNTL, arg: 1, mask: math.MaxUint32, want: unix.F_GET_SEALS, errnos: []unix.Errno{unix.EINVAL}},
	{name: "fcntl(F_DUPFD_CLOEXEC)", number: unix.SYS_FCNTL, arg: 1, mask: math.MaxUint32, want: unix.F_DUPFD_CLOEXEC, errnos: []unix.Errno{unix.EMFILE}},
	{name: "fstat", number: unix.SYS_FSTAT, errnos: []unix.Errno{unix.ENOMEM, unix.EIO}},
	{name: "openat", number: unix.SYS_OPENAT, errnos: []unix.Errno{unix.EMFILE, unix.EACCES, unix.ENOMEM}},
	{name: "listen", number: unix.SYS_LISTEN, errnos: []unix.Errno{unix.EADDRINUSE}},
	{name: "getsockname", number: unix.SYS_GETSOCKNAME, errnos: []unix.Errno{unix.ENOBUFS}, raw: true},
	{name: "getpeername", number: unix.SYS_GETPEERNAME, errnos: []unix.Errno{unix.ENOTCONN}, raw: true},
	{name: "munmap", number: unix.SYS_MUNMAP, errnos: []unix.Errno{unix.ENOMEM}},
	{name: "madvise(MADV_HUGEPAGE)", number: unix.SYS_MADVISE, arg: 2, mask: math.MaxUint32, want: unix.MADV_HUGEPAGE, errnos: []unix.Errno{unix.EINVAL, unix.ENOMEM}},
	{name: "epoll_ctl(EPOLL_CTL_ADD)", number: unix.SYS_EPOLL_CTL, arg: 1, mask: math.MaxUint32, want: unix.EPOLL_CTL_ADD, errnos: []unix.Errno{unix.ENOSPC, unix.ENOMEM}, raw: true},
	{name: "getrlimit", number: unix.SYS_GETRLIMIT, errnos: []unix.Errno{unix.EPERM}, raw: true},
	{name: "read(socket)", number: unix.SYS_READ, file: "socket:", errnos: []unix.Errno{unix.ECONNRESET, unix.ETIMEDOUT}},
	{name: "write(socket)", number: unix.SYS_WRITE, file: "socket:", errnos: []unix.Errno{unix.EPIPE, unix.ECONNRESET}},
	{name: "close(memfd)", number: unix.SYS_CLOSE, file: "/memfd:", errnos: []unix.Errno{unix.EIO}},
	{name: "close(socket)", number: unix.SYS_CLOSE, file: "socket:", errnos: []unix.Errno{unix.EIO}},
}

// match reports whether a call that is held up is one of these.
func (c *call) match(n *notification) bool {
	if uintptr(n.Number) != c.number || uint32(n.Args[c.arg])&c.mask != c.want&c.mask {
		return false
	}
	if c.file == "" {
		return true
	}
	if n.Args[0] == controlFile {
		return false
	}
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", n.PID, n.Args[0]))
	return err == nil && strings.HasPrefix(name, c.file)
}

// The layout of struct seccomp_data, of linux/seccomp.h.
const (
	dataNumber = 0
	dataArgs   = 16
)

// filter is the program that notifies of the calls and allows all others.
func filter(traps []*call) []unix.SockFilter {
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	leave := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }
	equal := func(k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jt: yes, Jf: no}
	}
	var program []unix.SockFilter
	for _, c := range traps {
		if c.mask == 0 {
			program = append(program, load(dataNumber), equal(uint32(c.number), 0, 1), leave(unix.SECCOMP_RET_USER_NOTIF))
			continue
		}
		program = append(program, load(dataNumber), equal(uint32(c.number), 0, 4),
			load(dataArgs+8*uint32(c.arg)), // the lower half: both architectures are little-endian
			unix.SockFilter{Code: unix.BPF_ALU | unix.BPF_AND | unix.BPF_K, K: c.mask},
			equal(c.want, 0, 1), leave(unix.SECCOMP_RET_USER_NOTIF))
	}
	return append(program, leave(unix.SECCOMP_RET_ALLOW))
}

// trap traps the calls in all threads of this process and gives the descriptor that notifications come from.
func trap(traps []*call) (int, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return 0, fmt.Errorf("PR_SET_NO_NEW_PRIVS: %w", err)
	}
	program := filter(traps)
	p := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	// Without WAIT_KILLABLE_RECV a signal of the Go runtime would make a call be notified of twice.
	const flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_TSYNC | unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH |
		unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&p)))
	runtime.KeepAlive(program)
	if errno != 0 {
		return 0, fmt.Errorf("seccomp with notifications (Linux 5.19): %w", errno)
	}
	return int(fd), nil
}

// notification is a call that is held up: struct seccomp_notif of linux/seccomp.h.
type notification struct {
	ID     uint64
	PID    uint32
	Flags  uint32
	Number int32
	Arch   uint32
	IP     uint64
	Args   [6]uint64
}

// verdict is struct seccomp_notif_resp.
type verdict struct {
	ID    uint64
	Value int64
	Error int32
	Flags uint32
}

// watch decides on the calls that are held up, one after the other, until the process has ended. A decision of 0 lets the call go on, after the
// channel is closed if there is one.
func watch(listener int, decide func(n *notification) (unix.Errno, <-chan struct{})) error {
	var held sync.WaitGroup
	defer unix.Close(listener)
	defer held.Wait()
	for {
		p := []unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}
		if _, err := unix.Poll(p, -1); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("waiting for a trapped call: %w", err)
		}
		if p[0].Revents&unix.POLLIN == 0 {
			if p[0].Revents != 0 {
				return nil // nobody is left who could make one
			}
			continue
		}
		var n notification
		if errno := ioctl(listener, unix.SECCOMP_IOCTL_NOTIF_RECV, unsafe.Pointer(&n)); errno != 0 {
			if errno == unix.ENOENT || errno == unix.EINTR { // killed in the meantime
				continue
			}
			return fmt.Errorf("receiving a trapped call: %w", errno)
		}
		errno, until := decide(&n)
		if until != nil {
			held.Go(func() {
				<-until
				_ = answer(listener, n.ID, errno)
			})
			continue
		}
		if err := answer(listener, n.ID, errno); err != nil {
			return err
		}
	}
}

// answer lets a call that is held up fail, or go on if errno is 0.
func answer(listener int, id uint64, errno unix.Errno) error {
	v := verdict{ID: id}
	if errno != 0 {
		v.Error = -int32(errno)
	} else {
		v.Flags = unix.SECCOMP_USER_NOTIF_FLAG_CONTINUE
	}
	if errno := ioctl(listener, unix.SECCOMP_IOCTL_NOTIF_SEND, unsafe.Pointer(&v)); errno != 0 && errno != unix.ENOENT {
		return fmt.Errorf("answering a trapped call: %w", errno)
	}
	return nil
}

func ioctl(fd int, request uint, p unsafe.Pointer) unix.Errno {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(p))
	return errno
}

// takeFile gives a descriptor of what process pid, a child, has open as fd.
func takeFile(pid, fd int) (int, error) {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return 0, fmt.Errorf("pidfd_open: %w", err)
	}
	defer unix.Close(process)
	taken, err := unix.PidfdGetfd(process, fd, 0)
	if err != nil {
		return 0, fmt.Errorf("pidfd_getfd: %w", err)
	}
	return taken, nil
}

// trappable tries whether calls can be trapped here, on a thread that ends afterwards.
func trappable() error {
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked, so that the thread ends with the goroutine
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			failed <- err
			return
		}
		program := filter([]*call{{number: math.MaxUint32}})
		p := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
		const flags = unix.SECCOMP_FILTER_FLAG_NEW_LISTENER | unix.SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
		fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, flags, uintptr(unsafe.Pointer(&p)))
		runtime.KeepAlive(program)
		if errno != 0 {
			failed <- fmt.Errorf("seccomp with notifications (Linux 5.19): %w", errno)
			return
		}
		failed <- unix.Close(int(fd))
	}()
	select {
	case err := <-failed:
		return err
	case <-time.After(10 * time.Second):
		return errors.New("setting a seccomp filter takes longer than 10 s")
	}
}

// The requests to the kernel have these sizes in them.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(notification{})-80]
	_ = [1]struct{}{}[unsafe.Sizeof(verdict{})-24]
)
