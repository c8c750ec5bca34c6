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

// isleFlags are words in memory that the ranks of the island map and the others write through the library: a signal within the island is a store.
type isleFlags struct {
	*flags
	alloc   backend.Allocation
	mapping backend.Mapping         // nil before the island has met
	near    map[int][]atomic.Uint64 // the words of the peers of the island, by rank
}

// newIsleFlags makes the words. Collective.
func (b *Backend) newIsleFlags(ctx context.Context, count int) (backend.Flags, error) {
	f := &isleFlags{flags: &flags{backend: b}, near: map[int][]atomic.Uint64{}}
	told, err := f.flags.meet(ctx, f.make(ctx, count))
	if told {
		err = f.meet(ctx, count, err)
	}
	if voted := b.group.Vote(ctx, "flags", err); voted != nil {
		return nil, errors.Join(fmt.Errorf("making %d flags: %w", count, voted), f.Close())
	}
	return f, nil
}

// make makes and registers the memory.
func (f *isleFlags) make(ctx context.Context, count int) error {
	var err error
	if f.alloc, err = f.backend.isle.near.Allocate(ctx, int64(2*count*wordBytes)); err != nil {
		return fmt.Errorf("memory for %d flags: %w", count, err)
	}
	all, err := f.wordsAt(f.alloc.Ptr(), 2*count)
	if err != nil {
		return err
	}
	return f.use(all)
}

// meet maps the words of the island's ranks, unless this rank has failed before.
func (f *isleFlags) meet(ctx context.Context, count int, failure error) error {
	i := f.backend.isle
	var err error
	if f.mapping, err = i.meet(ctx, f.alloc, failure); err != nil {
		return err
	}
	for at, rank := range i.ranks {
		p, err := f.mapping.Peer(at)
		if err != nil {
			return err
		}
		if f.near[rank], err = f.wordsAt(p, count); err != nil {
			return err
		}
	}
	return nil
}

// wordsAt returns words of the host device's memory.
func (f *isleFlags) wordsAt(p device.Ptr, count int) ([]atomic.Uint64, error) {
	mem, err := f.backend.device.(device.HostMemory).Bytes(p, int64(count*wordBytes))
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(mem))), count), nil
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
	ctx := context.Background()
	f.near = nil
	var err error
	if f.mapping != nil {
		err = f.mapping.Unmap(ctx)
		f.mapping = nil
	}
	err = errors.Join(err, f.flags.Close())
	if f.alloc != nil {
		err = errors.Join(err, f.alloc.Release(ctx))
		f.alloc = nil
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
