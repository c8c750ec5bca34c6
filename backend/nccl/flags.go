package nccl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
)

// wordBytes is the size of a flag.
const wordBytes = 8

// unwritten is what a word of the GPU is before anybody has put it, and a value that nobody puts: of a counter both halves are alike. 0 is one that has wrapped around.
const unwritten = 0x756e777269747465 // "unwritte"

// flags are words of a window: NCCL does not put into memory of the host. The CPU sees a copy of them, which it brings up to date when it waits.
type flags struct {
	backend *Backend
	by      *puts
	alloc   backend.Allocation
	mapping *mapping
	words   []atomic.Uint64 // the copy

	mu   sync.Mutex
	used int    // of the words behind the flags, which are the sources of this rank's puts
	raw  []byte // what the GPU's words last were
	next []byte
}

// NewFlags makes the words in memory that is registered like any other. Collective.
func (b *Backend) NewFlags(ctx context.Context, count int) (backend.Flags, error) {
	var a backend.Allocation
	var err error
	if count < 1 {
		err = errs.Invalid("NewFlags", "count", count, "1 and more")
	} else if b.puts == nil {
		err = fmt.Errorf("%s: %w", b.noPuts, errs.ErrNotReachable)
	} else {
		a, err = b.Allocate(ctx, int64(2*count*wordBytes))
	}
	var raw []byte
	if err == nil {
		for range count {
			raw = binary.LittleEndian.AppendUint64(raw, unwritten)
		}
		if err = b.device.CopyFromHost(a.Ptr(), raw); err != nil {
			err = errors.Join(err, a.Release(context.WithoutCancel(ctx)))
		}
	}
	if voted := b.group.Vote(ctx, "flags", err); voted != nil {
		if err == nil {
			voted = errors.Join(voted, a.Release(context.WithoutCancel(ctx)))
		}
		return nil, fmt.Errorf("making %d flags: %w", count, voted)
	}
	m, err := b.Rendezvous(ctx, a)
	if err == nil && b.puts.window(b, a.Ptr(), 1) == nil { // on all ranks
		err = errors.Join(fmt.Errorf("the communicator of the puts was given up; close the rank and open it again: %w", errs.ErrClosed), m.Unmap(context.WithoutCancel(ctx)))
	}
	if err != nil {
		return nil, fmt.Errorf("making %d flags: %w", count, errors.Join(err, a.Release(context.WithoutCancel(ctx))))
	}
	return &flags{
		backend: b, by: b.puts, alloc: a, mapping: mappingOf(m), words: make([]atomic.Uint64, count), raw: raw, next: make([]byte, count*wordBytes),
	}, nil
}

// Words returns the CPU's copy of the words.
func (f *flags) Words() []atomic.Uint64 { return f.words }

// Progress brings the copy up to date, unless somebody is at it. A word that nobody has put stays what its owner has made it.
func (f *flags) Progress() {
	if !f.mu.TryLock() {
		return
	}
	defer f.mu.Unlock()
	if f.alloc == nil || f.backend.device.CopyToHost(f.next, f.alloc.Ptr()) != nil {
		return // of a device that has failed, which says so elsewhere
	}
	for i := range f.words {
		at := i * wordBytes
		if now := binary.LittleEndian.Uint64(f.next[at:]); now != binary.LittleEndian.Uint64(f.raw[at:]) {
			f.words[i].Store(now)
		}
	}
	f.raw, f.next = f.next, f.raw
}

// Err is why the communicator of the puts was given up: words between hosts do not come any more, and what a rank of the own host signals behind them may
// not either.
func (f *flags) Err() error { return f.by.red.given() }

// PrepareStore prepares writing a word of a peer: by its address, or by a put from a word of its own.
func (f *flags) PrepareStore(peer, index int) (backend.FlagStore, error) {
	b := f.backend
	if index < 0 || index >= len(f.words) {
		return nil, errs.Invalid("PrepareStore", "index", index, fmt.Sprintf("0 to %d", len(f.words)-1))
	}
	if p, err := f.mapping.Peer(peer); err == nil {
		return &nearStore{backend: b, at: p.Add(int64(index * wordBytes))}, nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.used == len(f.words) {
		return nil, errs.Invalid("PrepareStore", "index", index, "each word of a peer once")
	}
	source := f.alloc.Ptr().Add(int64((len(f.words) + f.used) * wordBytes))
	w := f.by.window(b, source, wordBytes)
	if w == nil {
		return nil, fmt.Errorf("preparing a flag: %w", errs.ErrClosed)
	}
	t := newTransfer(b, f.by, peer)
	t.add(nccl.Put{Peer: peer, Window: w, Offset: f.mapping.offsets[peer] + int64(index*wordBytes), Local: uint64(source), Bytes: wordBytes}, true)
	var err error
	if t.ended, err = b.device.NewEvent(); err != nil {
		return nil, err
	}
	f.used++
	return &farStore{transfer: t, source: source}, nil
}

// Close releases the memory.
func (f *flags) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.alloc == nil {
		return nil
	}
	ctx := context.Background()
	err := errors.Join(f.mapping.Unmap(ctx), f.alloc.Release(ctx))
	f.alloc = nil
	return err
}

// nearStore writes a word that has an address here.
type nearStore struct {
	backend *Backend
	at      device.Ptr
	word    [wordBytes]byte
}

// Post writes value.
func (s *nearStore) Post(value uint64) error {
	if lost := s.backend.group.Err(); lost != nil {
		return lost
	}
	binary.LittleEndian.PutUint64(s.word[:], value)
	return s.backend.device.CopyFromHost(s.at, s.word[:])
}

func (s *nearStore) Poll() (bool, error) { return true, nil }
func (s *nearStore) Close() error        { return nil }

// farStore puts a word.
type farStore struct {
	*transfer
	source device.Ptr
	word   [wordBytes]byte
}

// Post begins to put value. The one before, if that was given up and may still arrive, is to arrive as it was.
func (s *farStore) Post(value uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.ready(); err != nil {
		return err
	}
	binary.LittleEndian.PutUint64(s.word[:], value)
	if err := s.backend.device.CopyFromHost(s.source, s.word[:]); err != nil {
		return err
	}
	_, err := s.start()
	return err
}
