package nixl

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nixl"
)

// wordBytes is the size of a flag.
const wordBytes = 8

// NewFlags makes words of the host's memory: in memory that the ranks share if they can, otherwise in memory that the library writes. Collective.
func (b *Backend) NewFlags(ctx context.Context, count int) (backend.Flags, error) {
	switch {
	case b.sharing:
		return newSharedFlags(ctx, b, count)
	case b.isle != nil: // the ranks of an island agree, and the others make words for the library as these do
		return b.newIsleFlags(ctx, count)
	}
	return b.newFlags(ctx, count)
}

// tryShareFlags finds out whether this group's ranks can share memory of the host: whether they run on one, and can pass files to each other, which
// those in several containers may not. It is for ranks with GPUs. Ranks with memory of the CPU can share all of it with the backend host; with this
// one their goroutines compete with the library's threads, and waiting without the library would make that worse. Collective; all ranks get the same
// result. A rank whose context has ended goes on to the next step all the same, and tells the others there.
func (b *Backend) tryShareFlags(ctx context.Context) error {
	f, err := newSharedFlags(ctx, b, 1)
	if err == nil {
		b.sharing = true
		return f.Close()
	}
	if lost := b.group.Err(); lost != nil {
		return lost
	}
	b.log.Debug("the library writes flags, because the ranks cannot share them", "error", err)
	return nil
}

// flags are words of this rank that peers write through the library, followed by as many words that are the sources of this rank's writes to the
// peers.
type flags struct {
	backend *Backend
	mem     []byte
	words   []atomic.Uint64
	sources []atomic.Uint64
	region  nixl.Block
	peers   []nixl.Block // by rank

	mu   sync.Mutex
	used int // of sources
}

// newFlags makes the words. Collective.
func (b *Backend) newFlags(ctx context.Context, count int) (*flags, error) {
	f := &flags{backend: b}
	_, err := f.meet(ctx, f.make(count))
	if voted := b.group.Vote(ctx, "flags", err); voted != nil {
		return nil, b.giveUpFlags(f, fmt.Errorf("making %d flags: %w", count, voted), err)
	}
	return f, nil
}

// words is memory that peers write through the library.
type words interface {
	deregister() error
	free() error
}

// giveUpFlags gives words back after a vote that has failed, to which this rank brought mine. It returns the vote's error.
func (b *Backend) giveUpFlags(w words, voted, mine error) error {
	if _, agreed := errors.AsType[*group.VoteError](voted); !agreed && mine == nil {
		b.node.keep(w) // the others may have been told that all have theirs, and write to it
		return voted
	}
	return errors.Join(voted, w.deregister(), w.free())
}

// meet tells the peers where the words are. Collective; a rank that has none says why. told says that all have: then an error is this rank's alone.
func (f *flags) meet(ctx context.Context, failure error) (told bool, err error) {
	offers, err := f.backend.share(ctx, "flags", nixl.DRAM, offer{Block: f.region}, failure)
	f.peers = blocksOf(offers)
	return offers != nil, err
}

// make makes and registers the memory.
func (f *flags) make(count int) error {
	mem, err := obtain(2 * count * wordBytes)
	if err != nil {
		return fmt.Errorf("memory for %d flags: %w", count, err)
	}
	f.mem = mem
	return f.use(unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(mem))), 2*count))
}

// use registers memory for words, and as many sources behind them.
func (f *flags) use(all []atomic.Uint64) error {
	count := len(all) / 2
	f.words, f.sources = all[:count:count], all[count:]
	var err error
	f.region, err = f.backend.node.register(nixl.DRAM, device.Ptr(uintptr(unsafe.Pointer(unsafe.SliceData(all)))), int64(len(all)*wordBytes))
	return err
}

// Words returns this rank's words.
func (f *flags) Words() []atomic.Uint64 { return f.words }

// Progress lets the agent handle what has arrived, where no thread of the library does. It is work of the device that waits for a flag, and it has
// the device's context current.
func (f *flags) Progress() { f.backend.node.progress() }

// PrepareStore prepares writing a word of a peer, from a source of its own.
func (f *flags) PrepareStore(peer, index int) (backend.FlagStore, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := f.used
	if i == len(f.sources) || index < 0 || index >= len(f.words) {
		return nil, errs.Invalid("PrepareStore", "index", index, fmt.Sprintf("0 to %d, and each word of a peer once", len(f.words)-1))
	}
	behind := uint64(wordBytes * (len(f.words) + i))
	there := f.peers[peer]
	t := &transfer{
		backend: f.backend, op: nixl.Write, memory: nixl.DRAM, peer: peer,
		local:  []nixl.Block{{Addr: f.region.Addr + behind, Bytes: wordBytes, Device: f.region.Device}},
		remote: []nixl.Block{{Addr: there.Addr + uint64(wordBytes*index), Bytes: wordBytes, Device: there.Device}},
	}
	if err := t.prepare(); err != nil {
		return nil, err
	}
	f.used++
	return &flagStore{transfer: t, source: &f.sources[i]}, nil
}

// Close deregisters and frees the memory. Nothing may be written to it or from it any more.
func (f *flags) Close() error { return errors.Join(f.deregister(), f.free()) }

// deregister deregisters the memory.
func (f *flags) deregister() error {
	if f.region.Bytes == 0 {
		return nil
	}
	region := f.region
	f.region = nixl.Block{}
	return f.backend.node.deregister(nixl.DRAM, region)
}

// free frees the memory.
func (f *flags) free() error {
	mem := f.mem
	f.mem, f.words, f.sources = nil, nil, nil
	if mem == nil {
		return nil
	}
	return giveBack(mem)
}

// flagStore writes one word of a peer.
type flagStore struct {
	*transfer
	source *atomic.Uint64
}

// Post begins to write value. Where it is refused the word stays as it was.
func (s *flagStore) Post(value uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.ready(); err != nil {
		return err
	}
	s.source.Store(value)
	s.start()
	return nil
}
