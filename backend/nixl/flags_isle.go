package nixl

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
)

// isleFlags are words in memory of the host that the ranks of the island map and the others write through the library: a signal within the island is
// a store.
type isleFlags struct {
	*flags
	memory wordMemory
	near   map[int][]atomic.Uint64 // the words of the peers of the island, by rank
}

// wordMemory is memory of the host for words that the ranks of an island share.
type wordMemory interface {
	// make makes this rank's.
	make(ctx context.Context, bytes int64) (device.Ptr, error)
	// meet returns where that of each rank of the island is, in this process. Collective; a rank that has failed before brings its failure, and it fails
	// on all then. Otherwise an error is this rank's alone.
	meet(ctx context.Context, failure error) ([]device.Ptr, error)
	close(ctx context.Context) error
}

// newIsleFlags makes the words. Collective.
func (b *Backend) newIsleFlags(ctx context.Context, count int) (backend.Flags, error) {
	if b.device.Kind() == device.Host {
		return b.newIsleFlagsIn(ctx, count, &allocatedWords{isle: b.isle})
	}
	return b.newIsleFlagsIn(ctx, count, newFileWords(b.isle.group))
}

// newIsleFlagsIn makes them in that memory.
func (b *Backend) newIsleFlagsIn(ctx context.Context, count int, memory wordMemory) (backend.Flags, error) {
	f := &isleFlags{flags: &flags{backend: b}, memory: memory, near: map[int][]atomic.Uint64{}}
	told, err := f.flags.meet(ctx, f.make(ctx, count))
	if told {
		err = f.meet(ctx, count, err)
	}
	if voted := b.group.Vote(ctx, "flags", err); voted != nil {
		return nil, b.giveUpFlags(f, fmt.Errorf("making %d flags: %w", count, voted), err)
	}
	return f, nil
}

// make makes and registers the memory.
func (f *isleFlags) make(ctx context.Context, count int) error {
	p, err := f.memory.make(ctx, int64(2*count*wordBytes))
	if err != nil {
		return fmt.Errorf("memory for %d flags: %w", count, err)
	}
	return f.use(wordsAt(p, 2*count))
}

// meet maps the words of the island's ranks, unless this rank has failed before.
func (f *isleFlags) meet(ctx context.Context, count int, failure error) error {
	places, err := f.memory.meet(ctx, failure)
	if err != nil {
		return err
	}
	for at, rank := range f.backend.isle.ranks {
		f.near[rank] = wordsAt(places[at], count)
	}
	return nil
}

// wordsAt returns words of memory of the host, which is not the garbage collector's.
func wordsAt(p device.Ptr, count int) []atomic.Uint64 {
	at := uintptr(p)
	return unsafe.Slice(*(**atomic.Uint64)(unsafe.Pointer(&at)), count)
}

// PrepareStore finds the word of a peer of the island, and prepares writing that of another.
func (f *isleFlags) PrepareStore(peer, index int) (backend.FlagStore, error) {
	words, near := f.near[peer]
	if !near {
		return f.flags.PrepareStore(peer, index)
	}
	if index < 0 || index >= len(words) {
		return nil, errs.Invalid("PrepareStore", "index", index, fmt.Sprintf("0 to %d", len(words)-1))
	}
	return sharedFlag{&words[index]}, nil
}

// Close gives the memory back.
func (f *isleFlags) Close() error {
	f.near = nil
	return errors.Join(f.deregister(), f.free())
}

// free frees the memory, and unmaps that of the island's ranks.
func (f *isleFlags) free() error {
	return errors.Join(f.flags.free(), f.memory.close(context.Background()))
}

// allocatedWords are in memory of the island's backend: where the device is the CPU.
type allocatedWords struct {
	isle    *isle
	alloc   backend.Allocation
	mapping backend.Mapping // nil before the island has met
}

func (w *allocatedWords) make(ctx context.Context, bytes int64) (device.Ptr, error) {
	a, err := w.isle.near.Allocate(ctx, bytes)
	if err != nil {
		return 0, err
	}
	w.alloc = a
	return a.Ptr(), nil
}

func (w *allocatedWords) meet(ctx context.Context, failure error) ([]device.Ptr, error) {
	var err error
	if w.mapping, err = w.isle.meet(ctx, w.alloc, failure); err != nil {
		return nil, err
	}
	places := make([]device.Ptr, len(w.isle.ranks))
	for at := range places {
		if places[at], err = w.mapping.Peer(at); err != nil {
			return nil, err
		}
	}
	return places, nil
}

func (w *allocatedWords) close(ctx context.Context) error {
	var err error
	if w.mapping != nil {
		err = w.mapping.Unmap(ctx)
		w.mapping = nil
	}
	if w.alloc != nil {
		err = errors.Join(err, w.alloc.Release(ctx))
		w.alloc = nil
	}
	return err
}

// sharedFlag is a word of a peer.
type sharedFlag struct{ word *atomic.Uint64 }

// Post writes value, at once.
func (s sharedFlag) Post(value uint64) error {
	s.word.Store(value)
	return nil
}

func (s sharedFlag) Poll() (bool, error) { return true, nil }
func (s sharedFlag) Close() error        { return nil }
