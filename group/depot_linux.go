package group

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// depot is where the ranks of one process leave files for each other.
type depot struct {
	mu    sync.Mutex
	files map[depotKey]*os.File
}

// depotKey names the file that a rank brought to an exchange.
type depotKey struct {
	group string
	seq   uint64
	rank  int
}

func newDepot() *depot { return &depot{files: make(map[depotKey]*os.File)} }

// depotCarrier passes files between ranks of one process, by duplicating the descriptor.
type depotCarrier struct{ depot *depot }

func (c *depotCarrier) prepare(p *parcel) (exchange, []byte, error) {
	x := &depotExchange{depot: c.depot, parcel: p}
	if p.send != nil {
		// The depot has a descriptor of its own: the sender may give up and close its file while another rank takes it.
		f, err := duplicate(p.send)
		if err != nil {
			return nil, nil, err
		}
		c.depot.mu.Lock()
		c.depot.files[x.key(p.group.rank)] = f
		c.depot.mu.Unlock()
	}
	return x, nil, nil
}

func (c *depotCarrier) close() error { return nil }

type depotExchange struct {
	depot  *depot
	parcel *parcel
}

func (x *depotExchange) key(rank int) depotKey {
	return depotKey{group: x.parcel.group.name, seq: x.parcel.seq, rank: rank}
}

func (x *depotExchange) meet([][]byte) error { return nil }

func (x *depotExchange) deliver(context.Context) error { return nil }

func (x *depotExchange) failed() error { return nil }

func (x *depotExchange) collect(context.Context) ([]*os.File, error) {
	x.depot.mu.Lock()
	defer x.depot.mu.Unlock()
	files := make([]*os.File, x.parcel.group.Size())
	for _, rank := range x.parcel.senders {
		f := x.depot.files[x.key(rank)]
		if f == nil {
			return nil, errors.Join(fmt.Errorf("rank %d has taken its file back", rank), closeFiles(files))
		}
		var err error
		if files[rank], err = duplicate(f); err != nil {
			return nil, errors.Join(err, closeFiles(files))
		}
	}
	return files, nil
}

func (x *depotExchange) end() {
	x.depot.mu.Lock()
	defer x.depot.mu.Unlock()
	key := x.key(x.parcel.group.rank)
	if f := x.depot.files[key]; f != nil {
		delete(x.depot.files, key)
		if err := f.Close(); err != nil {
			x.parcel.group.session.logger.Warn("closing a passed file", "error", err)
		}
	}
}

// duplicate returns a new descriptor of the open file, closed on exec.
func duplicate(f *os.File) (*os.File, error) {
	var fd int
	var dupErr error
	if err := withDescriptor(f, func(own int) { fd, dupErr = unix.FcntlInt(uintptr(own), unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return nil, err
	}
	if dupErr != nil {
		return nil, fmt.Errorf("duplicating %s: %w", f.Name(), fileLimit(dupErr))
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// withDescriptor calls fn with the file's descriptor, which stays open meanwhile even if the file is closed. Unlike Fd it leaves
// a pipe or a socket in the mode that it is in.
func withDescriptor(f *os.File, fn func(fd int)) error {
	raw, err := f.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { fn(int(fd)) })
	}
	if err != nil { // the one way to fail, for which the os package has no exported error here
		return fmt.Errorf("passing the file %s: %w: %w", f.Name(), os.ErrClosed, err)
	}
	return nil
}
