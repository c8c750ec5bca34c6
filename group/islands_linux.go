package group

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/symmem/symmem/internal/memfd"
)

// islandTrial is one rank's part of trying which ranks share memory. Each rank makes a little memory of words: one for each rank to write, and
// a secret behind them, from which what they write is made. So a word that is right was written by who has the memory mapped.
type islandTrial struct {
	group *Group
	seq   uint64
	why   map[int]string // it did not work, by rank; "why not" for all ranks is under this rank
	x     *socketExchange
	file  *os.File
	mem   []byte
}

// newIslandTrial makes the memory. end gives it back, whatever has failed.
func newIslandTrial(g *Group, seq uint64, why map[int]string) *islandTrial {
	t := &islandTrial{group: g, seq: seq, why: why}
	if err := t.begin(); err != nil {
		t.failAll(err)
		t.end()
	}
	return t
}

// bytes is the size of the memory.
func (t *islandTrial) bytes() int64 {
	page := int64(os.Getpagesize())
	return (int64(t.group.Size()+1)*8 + page - 1) / page * page
}

func (t *islandTrial) begin() error {
	carrier, ok := t.group.session.files.(*socketCarrier)
	if !ok {
		return errors.New("the ranks of one process and others are in one group")
	}
	var secret [8]byte
	if _, err := rand.Read(secret[:]); err != nil {
		return err
	}
	var err error
	if t.file, err = memfd.New(t.bytes()); err != nil {
		return err
	}
	if t.mem, err = memfd.Map(t.file, t.bytes()); err != nil {
		return err
	}
	t.words(t.mem)[t.group.Size()].Store(binary.LittleEndian.Uint64(secret[:]))
	x, _, err := carrier.prepare(&parcel{group: t.group, seq: t.seq, send: t.file, senders: t.others()})
	if err != nil {
		return err
	}
	t.x = x.(*socketExchange)
	return nil
}

// others returns the ranks of this machine in other processes.
func (t *islandTrial) others() []int {
	var ranks []int
	me := t.group.members[t.group.rank]
	for r, m := range t.group.members {
		if m.sameMachine(me) && m.Process != me.Process {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// failAll notes that nothing works with any rank.
func (t *islandTrial) failAll(err error) {
	for _, r := range t.others() {
		t.fail(r, err)
	}
}

// fail notes why it does not work with a rank, once.
func (t *islandTrial) fail(rank int, err error) {
	if t.why[rank] == "" {
		t.why[rank] = clip(err.Error())
	}
}

func (t *islandTrial) words(mem []byte) []atomic.Uint64 {
	return unsafe.Slice((*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(mem))), t.group.Size()+1)
}

// answer is what a rank writes into memory with that secret.
func answer(secret uint64, rank int) uint64 { return (secret ^ uint64(rank+1)) * 0x9e3779b97f4a7c15 }

// ticket says where this rank is to be reached; nil if it is not.
func (t *islandTrial) ticket() []byte {
	if t.x == nil {
		return nil
	}
	text, err := json.Marshal(t.x.ticket)
	if err != nil {
		return nil
	}
	return text
}

// inVain is the time for a step. Both steps in vain leave time for the rounds between them.
func (t *islandTrial) inVain() vain { return vain{min(islandsTimeout, t.group.session.timeout/4)} }

// send passes the file to the ranks whose tickets came, and returns those that it was passed to.
func (t *islandTrial) send(ctx context.Context, words []islandsWord) []int {
	if t.x == nil {
		return nil
	}
	inVain := t.inVain()
	t.x.tickets = make([]fileTicket, len(words))
	var sent []int
	for _, r := range t.others() {
		ticket := &t.x.tickets[r]
		if err := json.Unmarshal(words[r].Ticket, ticket); err != nil || ticket.Address == "" {
			*ticket = fileTicket{}
			t.fail(r, errors.New(noPlace(r)))
			continue
		}
		if err := inVain.try(ctx, func(ctx context.Context) error { return t.x.deliverTo(ctx, r, *ticket) }); err != nil {
			t.fail(r, t.explain(*ticket, err))
			continue
		}
		sent = append(sent, r)
	}
	return sent
}

// explain says what keeps files from a rank. Its namespace is looked at only now: whether a file can be passed is found by passing one.
func (t *islandTrial) explain(theirs fileTicket, err error) error {
	if theirs.NetNS == "" || t.x.ticket.NetNS == "" || theirs.NetNS == t.x.ticket.NetNS {
		return err
	}
	return fmt.Errorf("it runs in another network namespace (%s, not %s), which open files cannot be passed to; give the containers of one host one "+
		"network namespace (docker run --network=container:NAME, hostNetwork or one pod in Kubernetes), or take backend nixl", theirs.NetNS, t.x.ticket.NetNS)
}

// write writes into the memory of the ranks that have passed it, and returns those whose memory it has written.
func (t *islandTrial) write(ctx context.Context, from []int) []int {
	if t.x == nil {
		return nil
	}
	inVain := t.inVain()
	var wrote []int
	for _, r := range from {
		if !slices.Contains(t.x.parcel.senders, r) {
			continue // it is on another machine, whatever it says
		}
		if err := inVain.try(ctx, func(ctx context.Context) error { return t.writeTo(ctx, r) }); err != nil {
			t.fail(r, err)
			continue
		}
		wrote = append(wrote, r)
	}
	// Whoever could pass this rank nothing may have failed because this one did: then only this one knows why.
	if err := t.x.failed(); err != nil {
		for _, r := range t.x.parcel.senders {
			if !slices.Contains(from, r) {
				t.fail(r, err)
			}
		}
	}
	return wrote
}

// writeTo maps the memory that a rank has passed, and answers the secret there.
func (t *islandTrial) writeTo(ctx context.Context, rank int) error {
	f, err := t.x.collectFrom(ctx, rank)
	if err != nil {
		return err
	}
	err = memfd.Check(f, t.bytes())
	if err == nil {
		var mem []byte
		if mem, err = memfd.Map(f, t.bytes()); err == nil {
			words := t.words(mem)
			words[t.group.rank].Store(answer(words[t.group.Size()].Load(), t.group.rank))
			err = unix.Munmap(mem)
		}
	}
	return errors.Join(err, f.Close())
}

// read returns those of the ranks whose answers are in this rank's memory.
func (t *islandTrial) read(wrote []int) []int {
	if t.x == nil {
		return nil
	}
	words := t.words(t.mem)
	secret := words[t.group.Size()].Load()
	var right []int
	for _, r := range wrote {
		if words[r].Load() != answer(secret, r) {
			t.fail(r, fmt.Errorf("what rank %d has written is not in the memory of rank %d", r, t.group.rank))
			continue
		}
		right = append(right, r)
	}
	return right
}

// end gives everything back.
func (t *islandTrial) end() {
	if t.x != nil {
		t.x.end()
		t.x = nil
	}
	var err error
	if t.mem != nil {
		err = unix.Munmap(t.mem)
		t.mem = nil
	}
	if t.file != nil {
		err = errors.Join(err, t.file.Close())
		t.file = nil
	}
	if err != nil {
		t.group.session.logger.Warn("giving back the memory that was tried", "error", err)
	}
}

// deliverTo sends the file to one rank. A loss ends it.
func (x *socketExchange) deliverTo(ctx context.Context, rank int, ticket fileTicket) error {
	ctx, cancel := x.untilLost(ctx)
	defer cancel()
	return x.sendTo(ctx, rank, ticket)
}

// collectPause is the time between two looks for a file that is on its way within this machine.
const collectPause = 2 * time.Millisecond

// collectFrom returns the file of one sender that has sent it, waiting until it has gone through the socket.
func (x *socketExchange) collectFrom(ctx context.Context, rank int) (*os.File, error) {
	tick := time.NewTicker(collectPause)
	defer tick.Stop()
	for {
		x.mu.Lock()
		f, pid, failure := x.arrived[rank].file, x.arrived[rank].pid, x.failure
		x.arrived[rank].file = nil
		x.mu.Unlock()
		if f != nil {
			if err := x.checkProcess(rank, pid); err != nil {
				return nil, errors.Join(err, f.Close())
			}
			return f, nil
		}
		if failure != nil {
			return nil, failure
		}
		select {
		case <-tick.C:
		case <-x.parcel.group.stopped:
			return nil, x.parcel.group.Err()
		case <-ctx.Done():
			x.mu.Lock()
			refusal := x.refusal
			x.mu.Unlock()
			return nil, errors.Join(fmt.Errorf("the file of rank %d has not come: %w", rank, ctx.Err()), refusal)
		}
	}
}
