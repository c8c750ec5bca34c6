package launch

import (
	"bytes"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// KeepsDescendants reports whether orphans can be handed to an ancestor that asks for them.
const KeepsDescendants = true

// adoptOrphans makes this process the parent of orphans among its descendants.
func adoptOrphans() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("asking for the orphans of ranks: %w", err)
	}
	return nil
}

// ownGroup makes a child the leader of a process group of its own, which signals to this process's group do not reach.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// keepWriting lets this process, which is in the background of every terminal, write to one that stops others for that (stty tostop). The ranks inherit it.
func keepWriting() { signal.Ignore(unix.SIGTTOU) }

// closeOnExec keeps the ranks from inheriting a descriptor.
func closeOnExec(fd int) error {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
		return fmt.Errorf("descriptor %d: %w", fd, err)
	}
	return nil
}

// child is a child of this process.
type child struct {
	pid    int
	zombie bool   // it has ended, and nobody has waited for it
	began  string // when it was started, in ticks since the system was: no two processes have that and the number
}

// known are processes that were there before a launcher was started.
type known map[child]bool

// has reports whether a child is one of them.
func (k known) has(c child) bool {
	c.zombie = false
	return k[c]
}

// knownChildren returns the children that this process has. It may have become the command by exec, as at the end of a shell script that had
// started others in the background.
func knownChildren() known {
	k := known{}
	for _, c := range childProcesses() {
		c.zombie = false
		k[c] = true
	}
	return k
}

// childProcesses lists the children of this process that /proc shows.
func childProcesses() []child {
	paths, _ := filepath.Glob("/proc/[0-9]*/stat")
	var all []child
	for _, path := range paths {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			continue
		}
		if state, parent, began, ok := readStat(path); ok && parent == os.Getpid() {
			all = append(all, child{pid: pid, zombie: state == "Z" || state == "X", began: began})
		}
	}
	return all
}

// readStat reads the state and the parent of a process, and when it began. ok is false if the process is gone.
func readStat(path string) (state string, parent int, began string, ok bool) {
	const startTime = 22 - 3 // of the fields in the manual, which counts from 1, without the number and the name
	text, err := os.ReadFile(path)
	if err != nil {
		return "", 0, "", false
	}
	// The name of the program, in parentheses, may contain anything.
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	if len(fields) <= startTime {
		return "", 0, "", false
	}
	parent, err = strconv.Atoi(fields[1])
	return fields[0], parent, fields[startTime], err == nil
}

// sweep kills all children of this process but those to be spared, and their children as it inherits them, until none is left. It reaps those that nobody
// else waits for. The caller holds the family's mutex.
func sweep(of *Family, spared known) {
	for deadline := time.Now().Add(sweepTime); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		left := 0
		for _, c := range childProcesses() {
			switch {
			case spared.has(c):
			case !c.zombie:
				left++
				killChild(c.pid)
			case !of.has(c.pid):
				left++ // its own children, if it had any, are listed the next time
				collect(c.pid)
			}
		}
		if left == 0 {
			return
		}
	}
}

// killChild kills a process if it is still a child of this one. It goes by a handle, which unlike a number is never reused.
func killChild(pid int) {
	p, err := os.FindProcess(pid)
	if err != nil {
		return // it has ended
	}
	if _, parent, _, ok := readStat(fmt.Sprintf("/proc/%d/stat", pid)); ok && parent == os.Getpid() {
		_ = p.Kill() // the next look tells whether it has ended
	}
	_ = p.Release()
}

// collect reaps a child that has ended.
func collect(pid int) {
	var status unix.WaitStatus
	_, _ = unix.Wait4(pid, &status, unix.WNOHANG, nil)
}

// reapEvery is the least time between two searches for orphans that have ended.
const reapEvery = time.Second

// reap reaps orphans that have ended, until stop is called.
func (f *Family) reap() (stop func()) {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, unix.SIGCHLD)
	done, gone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		for {
			select {
			case <-ended:
			case <-done:
				return
			}
			f.mu.Lock()
			for _, c := range childProcesses() {
				if c.zombie && !f.has(c.pid) {
					collect(c.pid)
				}
			}
			f.mu.Unlock()
			select {
			case <-time.After(reapEvery):
			case <-done:
				return
			}
		}
	}()
	return func() {
		signal.Stop(ended)
		close(done)
		<-gone
	}
}
