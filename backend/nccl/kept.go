package nccl

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/device/cuda"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/internal/nccl"
)

// NCCL does not free all of a communicator's memory when it is destroyed: some MB stay in the process. So the communicators of a closed sub-group are
// kept, and the next sub-group of the same ranks uses them again.
//
// They belong to the backend that was opened without a parent, on each of its ranks, and end with it. Ranks of different processes can end a
// communicator only together: the threads of one that is destroyed wait until its peers have closed their connections (ncclProxyService in proxy.cc).
// So every decision about a communicator is made by all its ranks, in a call in which all of them take part, and what they end in such a call they
// end in the same order:
//
//   - Opening a group, its ranks tell each other which communicators of these ranks they have, and take the first that all have and that
//     is sound on all. One that some rank does not have any more is ended by those that do.
//   - Closing it, they keep its communicators if these are sound on all ranks. A rank that keeps as many as it may needs the oldest ended
//     that can be: one of ranks that are all in the group being closed. If there is none, it is the group's own that are ended.
//
// A communicator that such a call considers belongs to that call meanwhile, so that two groups that are opened or closed at the same time do not
// decide about the same one.

// mostKept is how many sub-groups' communicators a rank keeps.
const mostKept = 8

// link is what connects the ranks of a group: their communicator, and those of the library's own all-reduces that were split from it.
type link struct {
	id     string // the same on all ranks
	ranks  []int  // in the world, in the communicator's order
	comm   *nccl.Comm
	near   *nccl.Comm            // that of the windows: comm, unless the ranks are on several hosts
	isle   *isle                 // whose near is
	split  bool                  // it was split from the parent's
	noCast bool                  // it was made without multicast
	forms  map[string]*nccl.Comm // by form; complete only while no backend uses the link

	state linkState // under the shelf's mu
}

// linkState says what a link is used for.
type linkState int

const (
	used   linkState = iota // by a backend that is open
	free                    // kept
	pended                  // kept, and a call is deciding about it
)

// sound returns nil if nothing has ever failed on the link's communicators.
func (l *link) sound() error {
	err := l.comm.Sound()
	if l.near != l.comm {
		err = cmp.Or(err, l.near.Sound())
	}
	for _, form := range slices.Sorted(maps.Keys(l.forms)) {
		err = cmp.Or(err, l.forms[form].Sound())
	}
	return err
}

// shelf holds the links of all sub-groups of a backend that has no parent, and of their sub-groups.
type shelf struct {
	device *cuda.Device // of the backend that owns it

	mu      sync.Mutex
	closed  bool
	links   []*link // those that are kept stand in the order in which they came
	claimed int     // places that groups being closed have taken
}

// open returns ErrClosed if the shelf keeps nothing any more.
func (s *shelf) open() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("the backend that the communicators belong to is %w", errs.ErrClosed)
	}
	return nil
}

// add notes a link that a backend uses.
func (s *shelf) add(l *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.links = append(s.links, l)
}

// remove forgets a link.
func (s *shelf) remove(l *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.links = slices.DeleteFunc(s.links, func(o *link) bool { return o == l })
}

// pend takes the free links for which which returns true, for a call that decides about them. give must follow.
func (s *shelf) pend(which func(*link) bool) (taken []*link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.links {
		if l.state == free && which(l) {
			l.state = pended
			taken = append(taken, l)
		}
	}
	return taken
}

// give puts back what pend took. If the shelf was closed meanwhile, the caller has to end the links.
func (s *shelf) give(l *link) (taken bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	l.state = free
	return true
}

// busy returns the ids of the links of these ranks that are neither free nor in mine.
func (s *shelf) busy(ranks []int, mine []*link) (ids []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.links {
		if l.state != free && slices.Equal(l.ranks, ranks) && !slices.Contains(mine, l) {
			ids = append(ids, l.id)
		}
	}
	return ids
}

// claim takes a place for one more link, if there is one.
func (s *shelf) claim() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	kept := 0
	for _, l := range s.links {
		if l.state != used {
			kept++
		}
	}
	if kept+s.claimed >= mostKept {
		return false
	}
	s.claimed++
	return true
}

// trade claims the place of a link that is to be ended, before anybody else can.
func (s *shelf) trade(l *link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.links = slices.DeleteFunc(s.links, func(o *link) bool { return o == l })
	s.claimed++
}

// unclaim frees the place.
func (s *shelf) unclaim() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.claimed--
}

// keep makes a used link the latest of those that are kept.
func (s *shelf) keep(l *link) (kept bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.links = slices.DeleteFunc(s.links, func(o *link) bool { return o == l })
	if s.closed {
		return false
	}
	l.state = free
	s.links = append(s.links, l)
	return true
}

// close makes the shelf keep nothing any more, and returns what it held, in an order that is the same on all ranks.
func (s *shelf) close() (kept []*link) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, l := range s.links {
		if l.state == free {
			kept = append(kept, l)
		}
	}
	s.links = slices.DeleteFunc(s.links, func(l *link) bool { return l.state == free })
	return inOrder(kept)
}

// inOrder sorts links as all ranks sort them.
func inOrder(links []*link) []*link {
	slices.SortFunc(links, func(a, b *link) int { return cmp.Compare(a.id, b.id) })
	return links
}

// keptOffer is what a rank that opens a group tells the others about the communicators that it has kept.
type keptOffer struct {
	Keeps bool     // it can keep what the group has when it is closed
	NewID string   // rank 0's is the id of the group's communicator if it is made anew
	Have  []string // those of the group's ranks that it has kept and that are sound, the oldest first
	Busy  []string // those of them that another group uses, or is deciding about
}

// worldRanks returns the group's ranks as they are numbered in the world.
func (b *Backend) worldRanks() (ranks []int) {
	for _, m := range b.group.Members() {
		ranks = append(ranks, m.WorldRank)
	}
	return ranks
}

// offerKept takes what is kept of the group's ranks. takeKept must follow.
func (b *Backend) offerKept(o *Options) (offer keptOffer) {
	if o.Parent == nil || o.Comm != 0 || b.shelf.device != b.device {
		return offer
	}
	offer.Keeps, offer.NewID = true, rand.Text()
	ranks := b.worldRanks()
	b.pending = b.shelf.pend(func(l *link) bool { return slices.Equal(l.ranks, ranks) })
	offer.Busy = b.shelf.busy(ranks, b.pending)
	for _, l := range b.pending {
		if l.sound() == nil {
			offer.Have = append(offer.Have, l.id)
		}
	}
	return offer
}

// choose says which of the communicators that were offered all ranks have, in an order that is the same on all.
func choose(offers []keptOffer) (common []string) {
	for _, id := range offers[0].Have {
		if !slices.ContainsFunc(offers, func(o keptOffer) bool { return !slices.Contains(o.Have, id) }) {
			common = append(common, id)
		}
	}
	return common
}

// gone reports whether a communicator of this rank is to be ended, because some rank no longer has it or has found that it is not sound. While
// another group of some rank uses it, it is not ended: that rank could not end it together with the others.
func gone(offers []keptOffer, id string) bool {
	return slices.ContainsFunc(offers, func(o keptOffer) bool { return !slices.Contains(o.Have, id) }) &&
		!slices.ContainsFunc(offers, func(o keptOffer) bool { return slices.Contains(o.Busy, id) })
}

// takeKept returns the link that all ranks have, or nil, ends those that some rank no longer has, and puts the others back. With a failure, which all
// ranks have, it puts all back. Collective.
func (b *Backend) takeKept(ctx context.Context, peers []member, failure error) *link {
	pending := b.pending
	b.pending = nil
	var chosen *link
	var ended []*link
	if failure == nil {
		var offers []keptOffer
		for _, p := range peers {
			offers = append(offers, p.Kept)
		}
		b.keeps = !slices.ContainsFunc(offers, func(o keptOffer) bool { return !o.Keeps })
		for _, id := range choose(offers) {
			i := slices.IndexFunc(pending, func(l *link) bool { return l.id == id })
			if b.keeps && pending[i].noCast == (b.noCast != "") {
				chosen = pending[i]
				break
			}
		}
		for _, l := range pending {
			if gone(offers, l.id) {
				ended = append(ended, l)
			}
		}
	}
	for _, l := range pending {
		if l != chosen && !slices.Contains(ended, l) && !b.shelf.give(l) {
			ended = append(ended, l)
		}
	}
	b.endLinks(ctx, ended)
	return chosen
}

// use makes the link's communicators the backend's.
func (b *Backend) use(l *link) {
	b.shelf.mu.Lock()
	l.state = used
	b.shelf.mu.Unlock()
	b.link, b.comm, b.near, b.isle, b.split, b.spare = l, l.comm, l.near, l.isle, l.split, l.forms
	l.forms = nil
	b.reused = true
}

// endLinks ends links that were kept. Errors are only logged, since nobody needs the links any more.
func (b *Backend) endLinks(ctx context.Context, links []*link) {
	if len(links) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.timeout)
	defer cancel()
	for _, l := range inOrder(links) {
		b.shelf.remove(l)
		if err := b.endLink(ctx, l); err != nil {
			b.log.Warn("ending an NCCL communicator that was kept failed", "ranks", l.ranks, "error", err)
		}
	}
}

// endLink ends a link's communicators. All its ranks do.
func (b *Backend) endLink(ctx context.Context, l *link) error {
	var err error
	for _, form := range slices.Sorted(maps.Keys(l.forms)) {
		err = errors.Join(err, b.endComm(ctx, l.forms[form]))
	}
	if l.near != l.comm {
		err = errors.Join(err, b.endComm(ctx, l.near))
	}
	return errors.Join(err, b.endComm(ctx, l.comm))
}

// leaving is what a rank that closes a group tells the others about the group's communicators and about the others that it has kept.
type leaving struct {
	Sound bool   // the group's communicators can be kept here
	Full  bool   // if another one is ended
	Kept  []note // those whose ranks are all in the group, the oldest first
}

// note is a communicator that a rank has kept.
type note struct {
	ID    string
	Ranks []int // in the world
}

// decide returns whether the ranks keep the communicators of the group that they close, and which kept ones they end to make room. ranks are the
// group's ranks, as numbered in the world.
func decide(ranks []int, all []leaving) (keep bool, ended []string) {
	if slices.ContainsFunc(all, func(l leaving) bool { return !l.Sound }) {
		return false, nil
	}
	// A communicator is ended only if all its ranks take part.
	endable := func(n note) bool {
		return !slices.ContainsFunc(n.Ranks, func(r int) bool {
			i := slices.Index(ranks, r)
			return i < 0 || !slices.ContainsFunc(all[i].Kept, func(o note) bool { return o.ID == n.ID })
		})
	}
	for _, l := range all {
		if !l.Full || slices.ContainsFunc(l.Kept, func(n note) bool { return slices.Contains(ended, n.ID) }) {
			continue
		}
		oldest := slices.IndexFunc(l.Kept, endable)
		if oldest < 0 {
			return false, nil
		}
		ended = append(ended, l.Kept[oldest].ID)
	}
	return true, ended
}

// keep keeps the communicators for the next group of the same ranks, if all ranks can, and reports whether they do. Nothing is
// registered with them any more. Collective, unless it is clear on all ranks that there is nothing to keep.
func (b *Backend) keep(ctx context.Context) bool {
	if b.link == nil || !b.keeps || !b.opened || b.group.Err() != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(b.timeout, awaitTime))
	defer cancel()
	l, ranks := b.link, b.worldRanks()
	l.forms = b.takeForms()
	sound := cmp.Or(l.sound(), b.shelf.open())
	if sound == nil && b.handed.Load() {
		sound = errors.New("the caller has used it")
	}
	mine := leaving{Sound: sound == nil, Full: !b.shelf.claim()}
	if !mine.Full {
		defer b.shelf.unclaim()
	}
	inside := func(r int) bool { return slices.Contains(ranks, r) }
	pending := b.shelf.pend(func(o *link) bool {
		return !slices.ContainsFunc(o.ranks, func(r int) bool { return !inside(r) })
	})
	for _, o := range pending {
		mine.Kept = append(mine.Kept, note{o.id, o.ranks})
	}
	all, err := backend.Tell(ctx, b.group, "closing backend "+Name+": keeping the communicator", mine, nil)
	var kept bool
	var ids []string
	if err == nil {
		kept, ids = decide(ranks, all)
	}
	var ended []*link
	for _, o := range pending {
		if slices.Contains(ids, o.id) || !b.shelf.give(o) {
			ended = append(ended, o)
		}
	}
	if mine.Full && kept { // and so one of its own is among those that are ended
		b.shelf.trade(ended[0])
		defer b.shelf.unclaim()
	}
	b.endLinks(ctx, ended)
	if kept && b.shelf.keep(l) {
		b.link = nil
		b.log.Debug("NCCL communicator kept", "ranks", ranks, "communicator", fmt.Sprintf("%#x", uintptr(l.comm.Handle())))
		return true
	}
	b.log.Debug("NCCL communicator not kept", "ranks", ranks, "error", cmp.Or(sound, err))
	b.spare, l.forms = l.forms, nil
	return false
}

// takeForms returns the communicators of all forms, which the backend does not use any more.
func (b *Backend) takeForms() map[string]*nccl.Comm {
	b.mu.Lock()
	defer b.mu.Unlock()
	forms := b.spare
	if forms == nil {
		forms = map[string]*nccl.Comm{}
	}
	for form, red := range b.reducers {
		forms[form] = red.comm
	}
	clear(b.reducers)
	b.spare = nil
	return forms
}

// endKept ends what was kept of the sub-groups, when the backend that owns it is closed. All ranks do.
func (b *Backend) endKept(ctx context.Context) error {
	if b.shelf == nil || b.inherited {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.timeout)
	defer cancel()
	var err error
	for _, l := range b.shelf.close() {
		if e := b.endLink(ctx, l); e != nil && !errors.Is(e, errs.ErrClosed) {
			err = errors.Join(err, fmt.Errorf("the communicator of ranks %v, which was kept: %w", l.ranks, e))
		}
	}
	return err
}
