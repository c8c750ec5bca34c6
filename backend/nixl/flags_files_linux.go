package nixl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/memfd"
)

// fileWords are words in files of memory that the ranks of an island pass to each other: where the device is a GPU.
type fileWords struct {
	group  *group.Group
	bytes  int64
	file   *os.File // this rank's, until the island has met
	mapped [][]byte // by rank
}

func newFileWords(g *group.Group) wordMemory {
	return &fileWords{group: g, mapped: make([][]byte, g.Size())}
}

func (w *fileWords) make(_ context.Context, bytes int64) (device.Ptr, error) {
	page := int64(os.Getpagesize())
	w.bytes = roundUp(bytes, page)
	var err error
	if w.file, err = memfd.New(w.bytes); err != nil {
		w.file = nil
		return 0, err
	}
	return w.add(w.group.Rank(), w.file)
}

// add maps the words of one rank.
func (w *fileWords) add(rank int, file *os.File) (device.Ptr, error) {
	if err := memfd.Check(file, w.bytes); err != nil {
		return 0, err
	}
	mem, err := memfd.Map(file, w.bytes)
	if err != nil {
		return 0, err
	}
	w.mapped[rank] = mem
	return device.Ptr(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))), nil
}

func (w *fileWords) meet(ctx context.Context, failure error) ([]device.Ptr, error) {
	own := w.file
	if failure != nil {
		own = nil // and the others are told
	}
	files, err := w.group.ExchangeFile(ctx, "flags", own)
	err = errors.Join(failure, err, w.closeFile())
	places := make([]device.Ptr, len(w.mapped))
	for r, file := range files {
		if r == w.group.Rank() {
			if err == nil {
				places[r] = device.Ptr(uintptr(unsafe.Pointer(unsafe.SliceData(w.mapped[r]))))
			}
			continue
		}
		var failed error
		if err == nil {
			if places[r], failed = w.add(r, file); failed != nil {
				failed = fmt.Errorf("flags of rank %d of the island: %w", r, failed)
			}
		}
		err = errors.Join(err, failed, file.Close())
	}
	if err != nil {
		return nil, err
	}
	return places, nil
}

func (w *fileWords) closeFile() error {
	if w.file == nil {
		return nil
	}
	f := w.file
	w.file = nil
	return f.Close()
}

// close unmaps the memory.
func (w *fileWords) close(context.Context) error {
	err := w.closeFile()
	for r, mem := range w.mapped {
		if mem != nil {
			err = errors.Join(err, unix.Munmap(mem))
			w.mapped[r] = nil
		}
	}
	return err
}
