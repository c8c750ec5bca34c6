package group

import (
	"fmt"
	"slices"
	"sync"

	"github.com/symmem/symmem/group/durable"
	"github.com/symmem/symmem/group/internal/pb"
	"github.com/symmem/symmem/internal/errs"
)

// kind is what a collective call does.
type kind int

const (
	kindBarrier   kind = iota + 1 // nobody gets data
	kindAllGather                 // everybody gets everybody's data
	kindBroadcast                 // everybody gets the root's data
	kindVote                      // a barrier that fails when a rank says so
	kindJoin                      // the all-gather that opens the world group
	kindSub                       // the barrier that opens a sub-group
)

// String returns the word that errors use.
func (k kind) String() string {
	switch k {
	case kindBarrier:
		return "barrier"
	case kindAllGather:
		return "all-gather"
	case kindBroadcast:
		return "broadcast"
	case kindVote:
		return "vote"
	case kindJoin:
		return "join"
	case kindSub:
		return "sub-group"
	}
	return fmt.Sprintf("kind(%d)", int(k))
}

// label names a collective call in errors: `all-gather "rendezvous 3"`.
func label(k kind, op string) string { return fmt.Sprintf("%v %q", k, op) }

// maxTombstones is how many failed rounds of one group the hub remembers one by one for ranks that come late.
const maxTombstones = 64

const worldName = "world"

// hub is where the ranks of a job meet: a state machine in memory, without network, clock or goroutines. Each method takes the lock, changes the
// state and hands out the answers that follow from it, in order, to receivers that must not block and must not call the hub.
type hub struct {
	limits  *limits
	mu      sync.Mutex
	ranks   []hubRank
	present int // ranks that are attached now
	groups  map[string]*hubGroup
	idle    []chan struct{} // closed when no rank is attached any more

	keys       int   // in the stores of all groups
	storeBytes int64 // of keys and values there

	keeper    *keeper     // nil unless what the hub knows outlives it
	lossCount uint64      // ranks that were lost
	woken     []getWaiter // Gets that the request under way has answered
}

// rankState is the state of a rank: absent, present, and then left or lost, which are final.
type rankState int

const (
	rankAbsent rankState = iota
	rankPresent
	rankLeft
	rankLost
)

type hubRank struct {
	state  rankState
	member Member
	events eventReceiver

	calls     int      // arrivals that wait for other ranks
	callBytes int64    // what the hub keeps for them
	gets      int      // Gets that wait
	opened    int      // groups that this rank was the first to come to
	unopened  []string // those of them whose opening failed and that some rank has yet to come to, oldest first

	// Only in a hub that is kept:
	session    string                 // which join of the rank it is
	loss       *loss                  // set once the rank is lost
	order      uint64                 // of the loss among the losses, from 1
	replies    map[uint64]*storeReply // that the rank may not have yet
	replyBytes int64                  // of the values in them
}

// loss says which rank was lost, to whom it matters and what was seen.
type loss struct {
	worldRank int
	host      string
	pid       int
	reason    string
	groups    []string // the groups that it was in

	frame frameCache // its form on the wire, made at most once for all ranks
}

// eventReceiver takes news that no request asked for.
type eventReceiver interface {
	receiveLoss(l *loss)
}

// outcomeReceiver takes the outcome of a collective call, exactly once.
type outcomeReceiver interface {
	receiveOutcome(group string, seq uint64, o *outcome)
}

// rankReceiver takes both for a rank elsewhere, which drops outcomes that it has.
type rankReceiver interface {
	eventReceiver
	outcomeReceiver
}

// arrival is one rank's part of a collective call.
type arrival struct {
	kind    kind
	op      string
	root    int
	data    []byte // not changed any more
	refused bool   // this rank failed; the call fails everywhere when all have come
	refusal string
	excuse  string // why this rank may have come to another call than the others; "" if it does not know
	members []int  // only for kindSub: the world ranks of the group to be opened
	to      outcomeReceiver
	heard   bool // this rank waits for the outcome after it has given up too, for as long as for a call

	conditions       []uint32 // what the refusal is, in the codes of package errs
	excuseConditions []uint32 // what the excuse is

	cost int64 // what the hub keeps for it, in bytes
}

// value returns what a MismatchError lists.
func (a *arrival) value() string {
	if a.kind == kindBroadcast {
		return fmt.Sprintf("%s from root %d", label(a.kind, a.op), a.root)
	}
	return label(a.kind, a.op)
}

func (a *arrival) matches(b *arrival) bool {
	return a.kind == b.kind && a.op == b.op && a.root == b.root
}

// outcome is the end of a collective call, the same for every rank. It is not changed once handed out.
type outcome struct {
	blobs   [][]byte // by rank for an all-gather, the root's alone for a broadcast
	failure *failure
	own     bool // made for one rank: the blobs are nobody else's

	frames frameCache // its form on the wire, made at most once for all ranks
}

// failureKind says why a call failed.
type failureKind int

const (
	failGaveUp   failureKind = iota + 1 // rank gave up; missing had not come
	failMismatch                        // values by rank
	failRefused                         // failures by rank
	failLost                            // lost
	failLeft                            // rank left the group
	failClosed                          // the asking rank has left the group itself
	failInvalid                         // text
	failQuota                           // more than limit of text
)

type failure struct {
	kind     failureKind
	rank     int // in the group
	text     string
	missing  []int
	values   []string
	failures []rankFailure
	lost     *loss
	limit    int64
}

// rankFailure is one rank's reason to fail, as the ranks tell each other of it.
type rankFailure struct {
	rank       int
	text       string
	conditions []uint32 // codes of package errs, and of newer releases of it
}

// told returns failures as users get them.
func told(failures []rankFailure) []RankFailure {
	all := make([]RankFailure, len(failures))
	for i, f := range failures {
		all[i] = RankFailure{Rank: f.rank, Text: f.text, Conditions: errs.Conditions(f.conditions)}
	}
	return all
}

// hubGroup is the state of one group.
type hubGroup struct {
	name    string
	opener  int   // the world rank that came to it first, -1 for the world
	members []int // world ranks, ascending
	away    []bool
	nAway   int
	opened  bool  // its first round has completed
	lost    *loss // the first member that was lost
	rounds  map[uint64]*round
	failed  []uint64 // failed rounds that some rank has yet to come to, oldest first
	buried  uint64   // failed rounds below this number are no longer kept one by one
	store   map[string][]byte
	waiting map[string][]getWaiter

	// Only in a hub that is kept:
	kept     map[uint64]*keptCall // outcomes that some member may not have yet
	recorded bool                 // as it is now, the group is kept
}

// round is one collective call under way, or one that failed and that some ranks have yet to come to.
type round struct {
	arrivals []*arrival // by rank; nil once failed
	came     int
	first    *arrival
	mismatch bool
	failed   *outcome
}

// newHub makes a hub for size ranks, none attached, with the world group of all of them.
func newHub(size int, l *limits) *hub {
	h := &hub{limits: l, ranks: make([]hubRank, size), groups: make(map[string]*hubGroup)}
	world := make([]int, size)
	for i := range world {
		world[i] = i
	}
	h.groups[worldName] = newHubGroup(worldName, -1, world)
	return h
}

func newHubGroup(name string, opener int, members []int) *hubGroup {
	return &hubGroup{
		name:    name,
		opener:  opener,
		members: members,
		away:    make([]bool, len(members)),
		rounds:  make(map[uint64]*round),
		store:   make(map[string][]byte),
		waiting: make(map[string][]getWaiter),
		kept:    make(map[uint64]*keptCall),
	}
}

// answer hands out the outcome of a call to one rank.
func (h *hub) answer(a *arrival, group string, seq uint64, o *outcome) {
	if h.keeper == nil {
		a.to.receiveOutcome(group, seq, o)
		return
	}
	h.keeper.tell(func() { a.to.receiveOutcome(group, seq, o) })
}

// reply hands out the reply to a request.
func (h *hub) reply(to storeReceiver, r *storeReply) {
	if h.keeper == nil {
		to.receiveReply(r)
		return
	}
	h.keeper.tell(func() { to.receiveReply(r) })
}

// rankOf returns the rank in the group, or -1.
func (g *hubGroup) rankOf(worldRank int) int {
	if i, ok := slices.BinarySearch(g.members, worldRank); ok {
		return i
	}
	return -1
}

// attach makes a rank present. It returns rankPresent, or the state that forbids it.
func (h *hub) attach(m Member, events eventReceiver) (before rankState, ok bool) {
	return h.attachAs(m, "", events, func() {})
}

// knows reports whether a rank is, or was, in the job.
func (h *hub) knows(worldRank int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ranks[worldRank].state != rankAbsent
}

// isPresent reports whether a rank is there: it has come, and has not left nor been lost.
func (h *hub) isPresent(worldRank int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ranks[worldRank].state == rankPresent
}

// ending reports whether all ranks have come, and some have left: no call of all of them is to be expected any more.
func (h *hub) ending() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	left := false
	for i := range h.ranks {
		if h.ranks[i].state == rankAbsent {
			return false
		}
		left = left || h.ranks[i].state == rankLeft
	}
	return left
}

// attachAs is attach with what is unique to this join of the rank. welcome is called when the rank is kept, and before it is told anything: a rank that was
// welcomed is known to every later service.
func (h *hub) attachAs(m Member, session string, events eventReceiver, welcome func()) (before rankState, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := &h.ranks[m.WorldRank]
	if r.state != rankAbsent {
		return r.state, false
	}
	*r = hubRank{state: rankPresent, member: m, events: events, session: session}
	h.present++
	if h.keeper != nil {
		h.keeper.keep(h.cameChanges(m.WorldRank)...)
	}
	h.keeper.tell(welcome)
	return rankAbsent, true
}

// redirect sends a present rank's news to another receiver, after its welcome. What the one before was told may be gone with its connection, so it is told again.
func (h *hub) redirect(worldRank int, waits []*pb.Taken, events rankReceiver, welcome func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := &h.ranks[worldRank]
	if r.state != rankPresent {
		return
	}
	r.events = events
	h.keeper.tell(welcome)
	calls, _ := waited(waits)
	h.tellAgain(worldRank, calls, events)
}

// arrive is one rank's coming to collective call seq of a group.
func (h *hub) arrive(worldRank int, group string, seq uint64, a *arrival) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.groups[group]
	if g != nil && g.rankOf(worldRank) >= 0 && g.kept[seq] != nil {
		h.answer(a, group, seq, g.kept[seq].outcome)
		return
	}
	var f *failure
	if g == nil && a.kind == kindSub {
		g, f = h.open(group, worldRank, a.members)
	}
	if f == nil {
		f = h.refuse(g, worldRank, a)
	}
	if f == nil && seq < g.buried && g.rounds[seq] == nil {
		f = &failure{kind: failGaveUp, rank: -1,
			text: fmt.Sprintf("collective call %d of this group failed long ago, before this rank came to it", seq)}
	}
	if f != nil {
		h.answer(a, group, seq, &outcome{failure: f})
		return
	}
	rank := g.rankOf(worldRank)
	r := g.rounds[seq]
	if r == nil || r.failed == nil {
		if f := h.charge(worldRank, a, g, r == nil); f != nil {
			h.answer(a, group, seq, &outcome{failure: f})
			if r == nil && len(g.rounds) == 0 && !g.opened && g.name != worldName {
				h.drop(g)
			}
			return
		}
	}
	if r == nil {
		r = &round{arrivals: make([]*arrival, len(g.members)), first: a}
		g.rounds[seq] = r
	}
	if r.failed != nil {
		r.came++
		h.answer(a, group, seq, r.failed)
		if r.came == len(g.members) {
			h.forget(g, seq)
		}
		return
	}
	if r.arrivals[rank] != nil {
		h.discharge(worldRank, a)
		h.answer(a, group, seq, &outcome{failure: &failure{kind: failInvalid,
			text: fmt.Sprintf("rank %d came twice to collective call %d of group %s", rank, seq, group)}})
		return
	}
	r.arrivals[rank] = a
	r.came++
	if !a.matches(r.first) {
		r.mismatch = true
	}
	if r.came == len(g.members) {
		h.finish(g, seq, r)
		return
	}
	if left := g.leftBehind(r); left >= 0 {
		h.fail(g, seq, r, &failure{kind: failLeft, rank: left})
	}
}

// charge counts what the hub keeps for an arrival against the quotas of its rank, or returns a failure that names the quota it exceeds. The first
// arrival of a round pays for the round.
func (h *hub) charge(worldRank int, a *arrival, g *hubGroup, first bool) *failure {
	const fixed = 512 // about what an arrival takes besides its texts and data
	a.cost = fixed + int64(len(a.op)+len(a.refusal)+len(a.excuse)+len(a.data)+4*len(a.conditions)+4*len(a.excuseConditions))
	if first {
		a.cost += 16 * int64(len(g.members))
	}
	r := &h.ranks[worldRank]
	switch {
	case r.calls >= 2*h.limits.calls:
		return &failure{kind: failQuota, text: quotaCalls, limit: int64(2 * h.limits.calls)}
	case r.callBytes+a.cost > 2*h.limits.callBytes:
		return &failure{kind: failQuota, text: quotaCallBytes, limit: 2 * h.limits.callBytes}
	}
	r.calls++
	r.callBytes += a.cost
	return nil
}

func (h *hub) discharge(worldRank int, a *arrival) {
	r := &h.ranks[worldRank]
	r.calls--
	r.callBytes -= a.cost
}

// settle releases the quotas that the ranks of a finished round held.
func (h *hub) settle(g *hubGroup, r *round) {
	for rank, a := range r.arrivals {
		if a != nil {
			h.discharge(g.members[rank], a)
		}
	}
}

// drop forgets a group.
func (h *hub) drop(g *hubGroup) {
	if h.groups[g.name] != g {
		return
	}
	delete(h.groups, g.name)
	if g.opener >= 0 {
		h.ranks[g.opener].opened--
	}
	for key, value := range g.store {
		h.keys--
		h.storeBytes -= int64(len(key) + len(value))
	}
	if h.keeper != nil {
		h.keeper.keep(remove(groupKey(g.name)), durable.Change{Key: ofKey(g.name), All: true})
	}
}

// open makes a sub-group at the first arrival, or says why not; both are nil if members cannot be one.
func (h *hub) open(name string, opener int, members []int) (*hubGroup, *failure) {
	for i, m := range members {
		if m < 0 || m >= len(h.ranks) || i > 0 && members[i-1] >= m {
			return nil, nil
		}
	}
	if _, ok := slices.BinarySearch(members, opener); !ok || h.ranks[opener].state == rankLeft {
		return nil, nil
	}
	if h.ranks[opener].opened >= 2*h.limits.groups {
		return nil, &failure{kind: failQuota, text: quotaGroups, limit: int64(2 * h.limits.groups)}
	}
	g := newHubGroup(name, opener, members)
	for i, m := range members {
		switch r := &h.ranks[m]; r.state {
		case rankLost:
			g.markAway(i)
			if g.lost == nil {
				g.lost = &loss{worldRank: m, host: r.member.Host, pid: r.member.PID, reason: "it was lost before the group was opened"}
			}
		case rankLeft:
			g.markAway(i)
		case rankAbsent, rankPresent:
		}
	}
	if g.lost == nil { // a group that can never be opened is not worth keeping
		h.groups[name] = g
		h.ranks[opener].opened++
	}
	return g, nil
}

// refuse says why a rank may not take part in the group, or nil.
func (h *hub) refuse(g *hubGroup, worldRank int, a *arrival) *failure {
	switch {
	case g == nil:
		return &failure{kind: failClosed}
	case g.rankOf(worldRank) < 0:
		return &failure{kind: failInvalid, text: fmt.Sprintf("world rank %d is no member of group %s", worldRank, g.name)}
	case a.kind == kindSub && !slices.Equal(g.members, a.members):
		return &failure{kind: failInvalid, text: fmt.Sprintf("group %s has other members", g.name)}
	case g.lost != nil:
		return &failure{kind: failLost, lost: g.lost}
	case g.away[g.rankOf(worldRank)]:
		return &failure{kind: failClosed}
	}
	return nil
}

// leftBehind returns a rank that has left the group and will never come to the round, or -1.
func (g *hubGroup) leftBehind(r *round) int {
	if g.nAway == 0 {
		return -1
	}
	for rank, away := range g.away {
		if away && r.arrivals[rank] == nil {
			return rank
		}
	}
	return -1
}

func (g *hubGroup) markAway(rank int) {
	if !g.away[rank] {
		g.away[rank] = true
		g.nAway++
	}
}

// finish ends a round that everybody has come to.
func (h *hub) finish(g *hubGroup, seq uint64, r *round) {
	o := &outcome{}
	switch {
	case r.mismatch:
		if o.failure = r.excuses(); o.failure == nil {
			o.failure = r.mismatchFailure()
		}
	case slices.ContainsFunc(r.arrivals, func(a *arrival) bool { return a.refused }):
		o.failure = &failure{kind: failRefused}
		for rank, a := range r.arrivals {
			if a.refused {
				o.failure.failures = append(o.failure.failures, rankFailure{rank, a.refusal, a.conditions})
			}
		}
	case r.first.kind == kindAllGather || r.first.kind == kindJoin:
		o.blobs = make([][]byte, len(r.arrivals))
		for rank, a := range r.arrivals {
			o.blobs[rank] = a.data
		}
	case r.first.kind == kindBroadcast && (r.first.root < 0 || r.first.root >= len(r.arrivals)):
		o.failure = &failure{kind: failInvalid, text: fmt.Sprintf("root %d is not in a group of %d", r.first.root, len(r.arrivals))}
	case r.first.kind == kindBroadcast:
		o.blobs = [][]byte{r.arrivals[r.first.root].data}
	}
	if !g.opened && o.failure == nil {
		g.opened, g.recorded = true, false
	}
	delete(g.rounds, seq)
	h.settle(g, r)
	h.keepCall(g, seq, o)
	if !g.opened && g.name != worldName {
		if h.keeper != nil {
			h.keepUnopened(g) // until all have been told
		} else {
			h.drop(g) // nobody got this group
		}
	}
	for _, a := range r.arrivals {
		h.answer(a, g.name, seq, o)
	}
}

// fail ends a round that some ranks have not come to, and keeps the failure for them.
func (h *hub) fail(g *hubGroup, seq uint64, r *round, f *failure) {
	if r.mismatch && f.kind == failGaveUp {
		if f = r.excuses(); f == nil {
			f = r.mismatchFailure()
		}
	}
	o := &outcome{failure: f}
	h.keepCall(g, seq, o)
	for _, a := range r.arrivals {
		if a != nil {
			h.answer(a, g.name, seq, o)
		}
	}
	h.settle(g, r)
	if h.keeper != nil {
		delete(g.rounds, seq)
		if !g.opened && g.opener >= 0 {
			h.keepUnopened(g)
		}
		return
	}
	*r = round{came: r.came, failed: o}
	g.failed = append(g.failed, seq)
	if !g.opened && g.opener >= 0 {
		h.keepUnopened(g)
	}
	if len(g.failed) > maxTombstones {
		oldest := g.failed[0]
		g.failed = slices.Delete(g.failed, 0, 1)
		delete(g.rounds, oldest)
		g.buried = max(g.buried, oldest+1)
	}
}

// keepUnopened remembers a group whose opening failed, for ranks that come late. Of the groups that one rank tried to open it keeps only the latest.
func (h *hub) keepUnopened(g *hubGroup) {
	r := &h.ranks[g.opener]
	if slices.Contains(r.unopened, g.name) {
		return
	}
	r.unopened = append(r.unopened, g.name)
	if len(r.unopened) <= maxTombstones {
		return
	}
	oldest := h.groups[r.unopened[0]]
	r.unopened = slices.Delete(r.unopened, 0, 1)
	if oldest == nil || oldest.opened || oldest == g {
		return
	}
	for _, seq := range oldest.liveRounds() {
		live := oldest.rounds[seq]
		h.settle(oldest, live)
		for _, a := range live.arrivals {
			if a != nil {
				h.answer(a, oldest.name, seq, &outcome{failure: &failure{kind: failClosed}})
			}
		}
	}
	h.drop(oldest)
}

// forget drops a failed round that every rank has come to.
func (h *hub) forget(g *hubGroup, seq uint64) {
	delete(g.rounds, seq)
	if i := slices.Index(g.failed, seq); i >= 0 {
		g.failed = slices.Delete(g.failed, i, i+1)
	}
	if !g.opened && g.name != worldName {
		h.drop(g)
	}
}

func (r *round) missing() []int {
	missing := make([]int, 0, len(r.arrivals)-r.came)
	for rank, a := range r.arrivals {
		if a == nil {
			missing = append(missing, rank)
		}
	}
	return missing
}

// excuses returns the failures that explain why the calls do not match, or nil if no rank has one.
func (r *round) excuses() *failure {
	f := &failure{kind: failRefused}
	for rank, a := range r.arrivals {
		if a != nil && a.excuse != "" {
			f.failures = append(f.failures, rankFailure{rank, a.excuse, a.excuseConditions})
		}
	}
	if len(f.failures) == 0 {
		return nil
	}
	return f
}

func (r *round) mismatchFailure() *failure {
	values := make([]string, len(r.arrivals))
	for rank, a := range r.arrivals {
		if a == nil {
			values[rank] = "has not come"
		} else {
			values[rank] = a.value()
		}
	}
	return &failure{kind: failMismatch, values: values}
}

// abandon makes a round fail because one rank no longer waits. It does nothing if the round has ended, since its outcome is then on the way.
func (h *hub) abandon(worldRank int, group string, seq uint64, reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.groups[group]
	if g == nil {
		return
	}
	r, rank := g.rounds[seq], g.rankOf(worldRank)
	if r == nil || r.failed != nil || rank < 0 || r.arrivals[rank] == nil {
		return
	}
	h.fail(g, seq, r, &failure{kind: failGaveUp, rank: rank, text: reason, missing: r.missing()})
}

// leaveGroup takes a rank out of one group. It is not lost, but calls that need it fail.
func (h *hub) leaveGroup(worldRank int, group string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.groups[group]; g != nil && g.rankOf(worldRank) >= 0 {
		if h.keeper != nil {
			h.keeper.keep(durable.Change{Key: awayKey(g.name, worldRank), Value: []byte{}})
		}
		h.partLocked(g, g.rankOf(worldRank))
	}
}

func (h *hub) partLocked(g *hubGroup, rank int) {
	if g.away[rank] {
		return
	}
	g.markAway(rank)
	h.dropWaiters(g, g.members[rank])
	if g.nAway == len(g.members) {
		h.drop(g)
	}
	for _, seq := range g.liveRounds() {
		if r := g.rounds[seq]; r.arrivals[rank] == nil {
			h.fail(g, seq, r, &failure{kind: failLeft, rank: rank})
		}
	}
	h.settleKept(g)
}

// liveRounds returns the rounds that have not failed, in order, so that answers go out in order too.
func (g *hubGroup) liveRounds() []uint64 {
	var live []uint64
	for seq, r := range g.rounds {
		if r.failed == nil {
			live = append(live, seq)
		}
	}
	slices.Sort(live)
	return live
}

// leave takes a rank out of the job.
func (h *hub) leave(worldRank int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ranks[worldRank].state != rankPresent {
		return
	}
	for _, g := range h.groupsOf(worldRank) {
		h.partLocked(g, g.rankOf(worldRank))
	}
	h.detach(worldRank, rankLeft)
	h.keepGone(worldRank, rankLeft)
}

// lose declares a present rank lost: every call that needs it ends, and all present ranks are told.
func (h *hub) lose(worldRank int, reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.loseLocked(worldRank, reason)
}

// loseAwaited declares a rank lost that has not come back from an earlier service. One that has come back since it was looked for stays.
func (h *hub) loseAwaited(worldRank int, reason string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ranks[worldRank].events == nil {
		h.loseLocked(worldRank, reason)
	}
}

func (h *hub) loseLocked(worldRank int, reason string) {
	r := &h.ranks[worldRank]
	if r.state != rankPresent {
		return
	}
	l := &loss{worldRank: worldRank, host: r.member.Host, pid: r.member.PID, reason: reason}
	h.lossCount++
	r.order = h.lossCount
	groups := slices.DeleteFunc(h.groupsOf(worldRank), func(g *hubGroup) bool { return g.away[g.rankOf(worldRank)] })
	for _, g := range groups { // all of them before the first answer goes out: from then on the loss is not changed
		l.groups = append(l.groups, g.name)
	}
	r.loss = l
	h.keepGone(worldRank, rankLost)
	for _, g := range groups {
		g.markAway(g.rankOf(worldRank))
		h.dropWaiters(g, worldRank)
		if g.lost == nil {
			g.lost = l
		}
		f := &failure{kind: failLost, lost: l}
		for _, seq := range g.liveRounds() {
			o := &outcome{failure: f}
			h.settle(g, g.rounds[seq])
			for _, a := range g.rounds[seq].arrivals {
				if a != nil {
					h.answer(a, g.name, seq, o)
				}
			}
		}
		g.rounds = make(map[uint64]*round) // every later arrival gets the loss instead
		for _, seq := range slices.Clone(g.failed) {
			if g.kept[seq] != nil {
				h.dropCall(g, seq)
			}
		}
		g.failed = nil
		h.settleKept(g)
		h.failWaiters(g, f)
		if g.nAway == len(g.members) || !g.opened && g.name != worldName {
			h.drop(g)
		}
	}
	h.detach(worldRank, rankLost)
	for i := range h.ranks {
		if events := h.ranks[i].events; h.ranks[i].state == rankPresent && events != nil {
			h.tellLoss(events, l)
		}
	}
}

// tellLoss hands out the news of a loss to one rank.
func (h *hub) tellLoss(to eventReceiver, l *loss) {
	if h.keeper == nil {
		to.receiveLoss(l)
		return
	}
	h.keeper.tell(func() { to.receiveLoss(l) })
}

// groupsOf returns the groups that a rank is a member of, by name, so that news goes out in the same order every time.
func (h *hub) groupsOf(worldRank int) []*hubGroup {
	var groups []*hubGroup
	for _, g := range h.groups {
		if g.rankOf(worldRank) >= 0 {
			groups = append(groups, g)
		}
	}
	slices.SortFunc(groups, func(a, b *hubGroup) int {
		if a.name < b.name {
			return -1
		}
		return 1
	})
	return groups
}

func (h *hub) detach(worldRank int, state rankState) {
	h.ranks[worldRank].state = state
	h.ranks[worldRank].events = nil
	h.present--
	if h.present == 0 {
		for _, c := range h.idle {
			close(c)
		}
		h.idle = nil
	}
}

// gone returns a channel that is closed when no rank is attached.
func (h *hub) gone() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := make(chan struct{})
	if h.present == 0 {
		close(c)
	} else {
		h.idle = append(h.idle, c)
	}
	return c
}

// attached returns the ranks that are present, ascending.
func (h *hub) attached() []int {
	present, _ := h.standing()
	return present
}

// standing returns the ranks that are present and those that have not come, each ascending, as they are at one moment: of two looks a rank that comes in
// between could be in neither.
func (h *hub) standing() (present, absent []int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	present, absent = []int{}, []int{}
	for i := range h.ranks {
		switch h.ranks[i].state {
		case rankPresent:
			present = append(present, i)
		case rankAbsent:
			absent = append(absent, i)
		case rankLeft, rankLost:
		}
	}
	return present, absent
}
