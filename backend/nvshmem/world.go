package nvshmem

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/group"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nvshmem"
)

// library is what the backend calls of NVSHMEM.
type library = nvshmem.Calls

// grace is how long a call of NVSHMEM may go on after a rank is lost: one that every rank had entered still ends.
const grace = time.Second

// world is the library, started: what all groups over it share.
type world struct {
	lib     library
	device  *cuda.Device
	log     *slog.Logger
	lost    <-chan struct{} // of the group whose ranks are the PEs
	lostErr func() error
	timeout time.Duration // of each call of the library
	pe, pes int
	peOf    map[int]int // by rank in the job
	heap    heap
	arena   arena
	ref     device.Ptr      // a place in the heap, the beginning of the arena, and
	peers   []device.Ptr    // where it is of every PE, by PE
	scratch int64           // the place in the heap of a page for collectives that are thrown away
	warm    map[string]bool // the collectives that have run once; changed in turns only

	// issuing is held by PE 0 from when it deals out a turn until the turn is over. All ranks of the group have come by then: another group's turn must not wait
	// for what they have yet to do.
	issuing sync.Mutex

	mu       sync.Mutex
	turn     uint64               // the next to have its turn
	turned   chan struct{}        // closed when the turn changes
	broken   error                // why nothing collective is asked of the library any more; nil if it is
	stuck    bool                 // a call of the library has not returned
	torn     error                // why the heap is gone, with all memory in it; nil if it is there
	held     map[uint64]*resource // what goes back at an agreement, by the turn in which it was made
	released []uint64             // those of them that this rank has released, ascending
	groups   int                  // of only some PEs or all, that are open besides the first
}

// resource is something that only all PEs together can free: memory of the heap, the registration of memory, or a team.
type resource struct {
	ptr   uint64
	bytes int64
	alias bool         // it is registered memory's place
	team  nvshmem.Team // TeamWorld if it is no team
}

// ask is what a rank of a group of all PEs contributes to an agreement.
type ask struct {
	Released []uint64 `json:",omitempty"`
	Op       string   // what is done, the same on every rank
	Kind     kind     `json:",omitempty"`
	Bytes    int64    `json:",omitempty"`
	Offset   int64    `json:",omitempty"` // in the heap, from the world's ref
	Shares   uint64   `json:",omitempty"` // the turn, plus 1, that the allocation of registered memory was registered in
	Free     int64    `json:",omitempty"` // memory of the GPU in bytes

	need int64 // bytes that the heap must have in one piece for what is done; 0 for none
}

// usable returns an error if no collective call of the library can be made.
func (w *world) usable() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.broken
}

// breakUp notes that no collective call of the library can be made any more, and why. The first reason counts.
func (w *world) breakUp(why error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.broken == nil {
		w.broken = fmt.Errorf("NVSHMEM was given up in this process and gives no more memory; end the process: %w", why)
		w.log.Error("NVSHMEM was given up", "error", why)
	}
	var stuck *nvshmem.StuckError
	w.stuck = w.stuck || errors.As(why, &stuck)
	return why
}

// tear notes that NVSHMEM has torn its heap down: even the memory that it has allocated is gone.
func (w *world) tear(why error) error {
	w.mu.Lock()
	w.torn = why
	w.mu.Unlock()
	return w.breakUp(why)
}

// gone says why the memory of the heap is gone.
func (w *world) gone() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.torn
}

// collectively agrees with all ranks of g, which are all PEs, that op is done now, and calls do, which calls NVSHMEM, in the same turn on every PE.
// It first frees what all of them have released. If a rank brings a failure, no rank calls do. Collective: the caller knows that every rank is
// coming. With steps that are voted, the ranks vote after do and after each of them, and none goes on unless all do.
func (w *world) collectively(ctx context.Context, g *group.Group, mine ask, failure error, do step, voted ...step) error {
	if failure == nil {
		failure = w.usable()
	}
	var t *thread
	if failure == nil {
		if t, failure = w.thread(); failure == nil {
			defer t.Close()
		}
	}
	w.mu.Lock()
	mine.Released = slices.Clone(w.released)
	w.mu.Unlock()
	all, err := backend.Tell(group.Heard(ctx), g, "NVSHMEM: "+mine.Op, mine, failure)
	if err != nil {
		return err
	}
	// From here on every PE takes part, even if the caller's context ends.
	ctx = context.WithoutCancel(ctx)
	if w.pe == 0 {
		w.issuing.Lock()
		defer w.issuing.Unlock()
	}
	turn, err := w.deal(ctx, g, mine.Op, all)
	if err != nil {
		return err
	}
	if err = w.await(ctx, turn, mine.Op); err == nil {
		defer w.pass()
	}
	// Votes are outside of the library's calls, since one that is given up may end at any time.
	run := func(one step) {
		if err == nil {
			err = t.call(ctx, mine.Op, func() error { return one(turn, all) })
		}
	}
	if w.asks(all) {
		run(func(uint64, []ask) error { return w.giveBack(all) })
		// Those on which it went well would wait in the next call for the others.
		if err = g.Vote(ctx, "giving back", err); err != nil {
			return w.breakUp(&giveBackError{err})
		}
	} else if err == nil { // it is a matter of the book: neither the library nor the device is asked
		if err = w.giveBack(all); err != nil { // the book is not that of the others
			err = w.breakUp(err)
		}
	}
	if mine.need > 0 && err == nil {
		err = w.growFor(mine.need, all, func(grow step) error {
			run(grow)
			failed := err
			err = g.Vote(ctx, mine.Op+": growing the heap", failed)
			if _, voted := errors.AsType[*group.VoteError](err); err != nil && !voted { // which does not have what has failed here
				err = errors.Join(failed, err)
			}
			return err
		})
	}
	// Where the others vote, this rank does too, whatever has failed here.
	if run(do); len(voted) == 0 {
		return err
	}
	for _, next := range voted {
		if err = g.Vote(ctx, mine.Op, err); err != nil {
			return err
		}
		run(next)
	}
	return g.Vote(ctx, mine.Op, err)
}

// deal deals out the turn, and puts what PE 0 has released by now in place of what it has said: no other turn has given that back. Collective.
func (w *world) deal(ctx context.Context, g *group.Group, op string, all []ask) (turn uint64, err error) {
	type dealt struct {
		Turn     uint64
		Released []uint64 `json:",omitempty"`
	}
	var mine []byte
	if w.pe == 0 {
		w.mu.Lock()
		mine, err = json.Marshal(dealt{w.turn, w.released})
		w.mu.Unlock()
		if err != nil {
			return 0, err
		}
	}
	came, err := g.Broadcast(group.Heard(ctx), "NVSHMEM: the turn of "+op, 0, mine)
	if err != nil {
		return 0, err
	}
	var d dealt
	if err := json.Unmarshal(came, &d); err != nil {
		return 0, fmt.Errorf("reading the turn that PE 0 has dealt out: %w", err)
	}
	all[0].Released = d.Released
	return d.Turn, nil
}

// step is what is done in a turn; all is what the ranks have brought.
type step func(turn uint64, all []ask) error

// asks reports whether giveBack calls the library, as it does on every PE or on none.
func (w *world) asks(all []ask) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.ContainsFunc(all[0].Released, func(turn uint64) bool {
		r := w.held[turn]
		return r != nil && r.alias && !slices.ContainsFunc(all[1:], func(a ask) bool { return !slices.Contains(a.Released, turn) })
	})
}

// giveBackError says that the library, or the book that is kept of it, could not give back what all ranks have released.
type giveBackError struct{ err error }

func (e *giveBackError) Error() string {
	return fmt.Sprintf("giving back what was released: %v", e.err)
}
func (e *giveBackError) Unwrap() error { return e.err }

// await waits until the turn may begin.
func (w *world) await(ctx context.Context, turn uint64, op string) error {
	ctx, cancel := context.WithTimeout(ctx, w.timeout)
	defer cancel()
	for {
		w.mu.Lock()
		now, turned, broken := w.turn, w.turned, w.broken
		w.mu.Unlock()
		switch {
		case broken != nil:
			return broken
		case now == turn:
			return nil
		case now > turn:
			return w.breakUp(fmt.Errorf("%s: PE 0 gave it turn %d, and turn %d is over here: %w", op, turn, now-1, errs.ErrMismatch))
		}
		select {
		case <-turned:
		case <-ctx.Done():
			return w.breakUp(fmt.Errorf("%s: its turn, %d, did not come: the one before has not ended: %w", op, turn, ctx.Err()))
		}
	}
}

// pass ends a turn.
func (w *world) pass() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.turn++
	close(w.turned)
	w.turned = make(chan struct{})
}

// thread is a thread with the device's context current, for calls of the library. A rank takes one before it agrees with the others on calls that take
// all PEs: if its context could not be made current afterwards, they would wait for it in the library.
type thread struct {
	*cuda.Thread
	world *world
}

// thread returns a thread; Close must follow unless there is an error.
func (w *world) thread() (*thread, error) {
	t, err := w.device.NewThread()
	if err != nil {
		return nil, err
	}
	return &thread{t, w}, nil
}

// call calls the library. It waits at most for the world's timeout, and only a little longer once a rank is lost; then the library is given up.
func (t *thread) call(ctx context.Context, what string, fn func() error) error {
	w := t.world
	if err := w.usable(); err != nil {
		return err
	}
	err := bounded(ctx, w.timeout, w.lost, w.lostErr, what, func() error { return t.Do(fn) })
	var stuck *nvshmem.StuckError
	if errors.As(err, &stuck) {
		return w.breakUp(err)
	}
	return err
}

// bounded is [nvshmem.Bound] by ctx, by a time, and by the loss of a rank.
func bounded(ctx context.Context, timeout time.Duration, lost <-chan struct{}, lostErr func() error, what string, fn func() error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	ctx, give := context.WithCancelCause(ctx)
	defer give(nil)
	go func() {
		select {
		case <-ctx.Done():
			return
		case <-lost:
		}
		select {
		case <-ctx.Done():
		case <-time.After(grace):
			give(lostErr())
		}
	}()
	return nvshmem.Bound(ctx, what, fn)
}

// hold notes a resource that only all PEs together can free; the turn is its name on every PE.
func (w *world) hold(turn uint64, r *resource) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.held[turn] = r
}

// release says that this rank no longer needs what was made in the turn.
func (w *world) release(turn uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if i, found := slices.BinarySearch(w.released, turn); !found && w.held[turn] != nil {
		w.released = slices.Insert(w.released, i, turn)
	}
}

// giveBack frees what all PEs have released. It is part of a turn.
func (w *world) giveBack(all []ask) (err error) {
	for _, turn := range all[0].Released {
		if slices.ContainsFunc(all[1:], func(a ask) bool { return !slices.Contains(a.Released, turn) }) {
			continue
		}
		w.mu.Lock()
		r := w.held[turn]
		delete(w.held, turn)
		w.released = slices.DeleteFunc(w.released, func(t uint64) bool { return t == turn })
		w.mu.Unlock()
		switch {
		case r == nil:
			err = errors.Join(err, fmt.Errorf("what was made in turn %d is not known here: %w", turn, errs.ErrMismatch))
		case r.team != nvshmem.TeamWorld:
			w.heap.teams = append(w.heap.teams, r.team)
		case r.alias:
			// It takes all PEs, so it is called for all that is released, whatever has failed before.
			err = errors.Join(err, w.lib.Unregister(r.ptr, r.bytes))
			w.heap.registered -= r.bytes
		default:
			w.heap.give(span{int64(r.ptr), r.bytes})
		}
	}
	return err
}

// offset returns the offset of an address in the heap from the world's ref.
func (w *world) offset(p device.Ptr) int64 { return int64(p - w.ref) }

// at returns the address in this process of an offset in the heap of a PE.
func (w *world) at(pe int, offset int64) device.Ptr { return w.peers[pe].Add(offset) }
