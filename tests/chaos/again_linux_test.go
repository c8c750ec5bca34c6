package chaos

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
)

// place is that of a rank when the job is done once more.
type place struct {
	Rank, Size int
	Addr       string
	FD         int // of the socket that the first rank listens on; -1 on others
}

// second is how the ranks that are left do the job once more. A nil one is none.
type second struct {
	size     int
	victim   int // that does not come; -1 if all do
	listener net.Listener
	socket   *os.File
}

// second prepares it; nil if the fault asks for none.
func (f *fault) second(size int) (*second, error) {
	if !f.again {
		return nil, nil
	}
	s := &second{size: size, victim: -1}
	if f.kill {
		s.size, s.victim = size-1, f.victim
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	if s.socket, err = l.(*net.TCPListener).File(); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	s.listener = l
	return s, nil
}

// rank is that of the worker in the second job; -1 if it has none.
func (s *second) rank(worker int) int {
	switch {
	case s == nil || worker == s.victim:
		return -1
	case s.victim >= 0 && worker > s.victim:
		return worker - 1
	}
	return worker
}

// serves reports whether the worker is the one that the others of the second job meet at.
func (s *second) serves(worker int) bool { return s.rank(worker) == 0 }

// prepare tells a worker, which is not started yet, its place.
func (s *second) prepare(cmd *exec.Cmd, worker int) {
	if s.rank(worker) < 0 {
		return
	}
	p := place{Rank: s.rank(worker), Size: s.size, Addr: s.listener.Addr().String(), FD: -1}
	if p.Rank == 0 {
		p.FD = 3 + len(cmd.ExtraFiles)
		cmd.ExtraFiles = append(cmd.ExtraFiles, s.socket)
	}
	text, _ := json.Marshal(p) // a struct of this kind always can be
	cmd.Env = append(cmd.Env, againVariable+"="+string(text))
}

// close closes this process's side of the socket. Closing it again is nothing.
func (s *second) close() error {
	if s == nil || s.listener == nil {
		return nil
	}
	err := errors.Join(s.listener.Close(), s.socket.Close())
	s.listener = nil
	return err
}
