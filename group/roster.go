package group

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"runtime"
	"sync"
	"weak"

	"google.golang.org/protobuf/proto"

	"github.com/symmem/symmem/group/internal/pb"
)

// roster is the ranks of a group. All ranks of a process that know the same share one, or a process with all ranks of a large world would have its
// square. Nothing in it changes.
type roster struct {
	members []Member
	world   []int // the members' world ranks, ascending

	subs rosters // of groups that were made of this one, by their ranks in it
}

// rosters finds what is in use, by what it was made of.
type rosters struct {
	mu    sync.Mutex
	known map[string]weak.Pointer[roster]
}

// worlds are the rosters of worlds that this process has joined.
var worlds rosters

// get returns the roster that was made of what key stands for, or makes it.
func (t *rosters) get(key string, build func() (*roster, error)) (*roster, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r := t.known[key].Value(); r != nil {
		return r, nil
	}
	r, err := build()
	if err != nil {
		return nil, err
	}
	if t.known == nil {
		t.known = map[string]weak.Pointer[roster]{}
	}
	t.known[key] = weak.Make(r)
	runtime.AddCleanup(r, t.drop, key)
	return r, nil
}

// drop forgets a roster that nobody has any more, unless it was made again meanwhile.
func (t *rosters) drop(key string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.known[key].Value() == nil {
		delete(t.known, key)
	}
}

// worldOf returns the roster of a world whose ranks, by rank, have told these members.
func worldOf(blobs [][]byte) (*roster, error) {
	sum := sha256.New()
	for _, blob := range blobs {
		sum.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(blob))))
		sum.Write(blob)
	}
	return worlds.get(string(sum.Sum(nil)), func() (*roster, error) {
		r := &roster{members: make([]Member, len(blobs)), world: make([]int, len(blobs))}
		for rank, blob := range blobs {
			var w pb.Member
			if err := proto.Unmarshal(blob, &w); err != nil {
				return nil, fmt.Errorf("decoding rank %d: %w", rank, err)
			}
			r.members[rank], r.world[rank] = memberFromWire(&w), rank
			r.members[rank].WorldRank = rank
		}
		return r, nil
	})
}

// of returns the roster of a group of some of the ranks; key stands for them.
func (r *roster) of(key string, ranks []int) *roster {
	sub, _ := r.subs.get(key, func() (*roster, error) { // never an error
		s := &roster{members: make([]Member, len(ranks)), world: make([]int, len(ranks))}
		for i, rank := range ranks {
			s.members[i], s.world[i] = r.members[rank], r.world[rank]
		}
		return s, nil
	})
	return sub
}
