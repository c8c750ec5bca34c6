package nvshmem

import (
	"context"
	"slices"
	"sync"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/group"
)

// parts are the pieces of the arena that a group of only some PEs has. A piece that peers have seen is freed when all of them have released theirs:
// until then one of them may still write to it. The pieces of one rendezvous have the same name on all ranks.
type parts struct {
	mu       sync.Mutex
	next     uint64           // the name that the next rendezvous gives, from 1
	kept     map[uint64]piece // that were released on this rank, by name
	released []uint64         // their names
}

type piece struct{ offset, bytes int64 }

func newParts() *parts { return &parts{next: 1, kept: map[uint64]piece{}} }

// among agrees with the ranks of the group, which are only some PEs, and frees what all of them have released. Collective.
func (b *Backend) among(ctx context.Context, mine ask, failure error) (name uint64, all []ask, err error) {
	if failure == nil {
		failure = b.world.gone()
	}
	p := b.parts
	p.mu.Lock()
	mine.Released = slices.Clone(p.released)
	p.mu.Unlock()
	all, err = backend.Tell(group.Heard(ctx), b.group, "NVSHMEM's arena: "+mine.Op, mine, failure)
	if err == nil {
		err = backend.Alike("size in bytes", all, func(a *ask) int64 { return a.Bytes })
	}
	if err != nil {
		return 0, nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, name := range all[0].Released {
		if slices.ContainsFunc(all[1:], func(a ask) bool { return !slices.Contains(a.Released, name) }) {
			continue
		}
		b.world.arena.give(p.kept[name].offset, p.kept[name].bytes)
		delete(p.kept, name)
		p.released = slices.DeleteFunc(p.released, func(n uint64) bool { return n == name })
	}
	name = p.next
	p.next++
	return name, all, nil
}

// releasePart frees a piece that nobody else has seen; any other is kept until all ranks have released theirs.
func (b *Backend) releasePart(a *allocation) {
	if a.part == 0 {
		b.world.arena.give(a.offset, a.rounded)
		return
	}
	p := b.parts
	p.mu.Lock()
	defer p.mu.Unlock()
	p.kept[a.part] = piece{a.offset, a.rounded}
	p.released = append(p.released, a.part)
}

// closeParts frees what all ranks of the group have released. What they have not released, because one is lost or busy, stays taken.
func (b *Backend) closeParts(ctx context.Context) {
	_, _, err := b.among(ctx, ask{Op: "closing"}, nil)
	p := b.parts
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.kept) > 0 {
		var bytes int64
		for _, k := range p.kept {
			bytes += k.bytes
		}
		b.log.Warn("memory of the arena stays taken, because another rank may still write to it", "bytes", bytes, "error", err)
	}
}
