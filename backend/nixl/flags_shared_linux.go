package nixl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/memfd"
)

// sharedFlags are words in memory that the ranks of one host share, so that writing a peer's word is a store, not a call of the library that takes
// ten microseconds. What the library has put has arrived when it says so, and a store that follows is seen after it.
type sharedFlags struct {
	backend *Backend
	mapped  [][]byte          // by rank
	words   [][]atomic.Uint64 // by rank
}

// newSharedFlags makes the words. Collective; it fails on all ranks or on none, and at once where they are on several hosts.
func newSharedFlags(ctx context.Context, b *Backend, count int) (backend.Flags, error) {
	page := int64(os.Getpagesize())
	bytes := (int64(count)*wordBytes + page - 1) / page * page
	own, err := memfd.New(bytes)
	if err != nil {
		own = nil // and the others are told
	} else {
		defer func() { _ = own.Close() }()
	}
	files, passed := b.group.ExchangeFile(ctx, "flags", own)
	if passed != nil {
		return nil, errors.Join(err, passed)
	}
	files[b.group.Rank()] = own
	f := &sharedFlags{backend: b, mapped: make([][]byte, len(files)), words: make([][]atomic.Uint64, len(files))}
	for r, file := range files {
		err = errors.Join(err, f.add(r, file, bytes, count))
		if file != own {
			err = errors.Join(err, file.Close())
		}
	}
	if voted := b.group.Vote(ctx, "flags", err); voted != nil {
		return nil, errors.Join(fmt.Errorf("sharing %d flags: %w", count, voted), f.Close())
	}
	return f, nil
}

// add maps the words of one rank.
func (f *sharedFlags) add(rank int, file *os.File, bytes int64, count int) error {
	if err := memfd.Check(file, bytes); err != nil {
		return fmt.Errorf("flags of rank %d: %w", rank, err)
	}
	mem, err := memfd.Map(file, bytes)
	if err != nil {
		return err
	}
	f.mapped[rank] = mem
	f.words[rank] = unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(mem))), count)
	return nil
}

// Words returns this rank's words.
func (f *sharedFlags) Words() []atomic.Uint64 { return f.words[f.backend.group.Rank()] }

// Progress lets the agent handle what has arrived: a peer's put, whose signal is waited for, may need that.
func (f *sharedFlags) Progress() { f.backend.node.progress() }

// PrepareStore finds the peer's word.
func (f *sharedFlags) PrepareStore(peer, index int) (backend.FlagStore, error) {
	if words := f.words[peer]; index >= 0 && index < len(words) {
		return sharedFlag{&words[index]}, nil
	}
	return nil, errs.Invalid("PrepareStore", "index", index, fmt.Sprintf("0 to %d", len(f.words[peer])-1))
}

// Close unmaps the memory.
func (f *sharedFlags) Close() error {
	var err error
	for _, mem := range f.mapped {
		if mem != nil {
			err = errors.Join(err, unix.Munmap(mem))
		}
	}
	f.mapped, f.words = nil, nil
	return err
}
