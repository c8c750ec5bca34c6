package group

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/symmem/symmem/group/durable"
	"github.com/symmem/symmem/group/internal/pb"
)

// A hub that is kept has a keeper. What it changes is noted with the keeper, and what it hands out goes through the keeper too, which passes it on when
// the changes before it are in the store. So no rank ever learns what a service that comes after this one would not know. A change that
// has not reached the store is one that nobody was told of: its rank asks for it again.
//
// Kept are ranks, groups, keys with their values, the outcomes of collective calls that some member may not have yet, and the replies to requests
// that have changed something. Calls that still wait are not kept: the ranks bring them again. The keys of the store, with names in hexadecimal:
//
//	rank/R                 a KeptRank
//	group/G                a KeptGroup
//	of/G/away/R            member R has left the group
//	of/G/call/SEQ          an Outcome
//	of/G/key/K             a value
//	reply/R/ID             a StoreReply

// keeper takes changes and what depends on them, in order. A nil keeper passes everything on at once.
type keeper struct {
	store  durable.Store
	bound  time.Duration // of one commit
	logger *slog.Logger
	wake   chan struct{}
	failed chan struct{} // closed when the store has failed; err says how
	err    error
	quit   chan struct{}
	ended  chan struct{}
	life   context.Context // of all commits
	cancel context.CancelFunc

	restored bool // there was a service before

	mu      sync.Mutex
	changes [][]durable.Change
	news    []keptNews
	taken   uint64        // changes that were taken from there
	waiting int64         // about how many bytes were noted, and are not kept and told yet
	room    chan struct{} // closed when these are no longer too many; nil if nobody waits for it
	busy    bool
	idle    []chan struct{}
}

// keptNews is what is told when so many changes are kept.
type keptNews struct {
	after uint64
	tell  func()
}

// How many changes, and about how many bytes of them, are kept at a time. A commit has one bound, whatever is in it: all that a thousand ranks ask for at
// once would take a slow store longer.
const (
	commitChanges = 64
	commitBytes   = 16 << 20
)

// waitingBytes is about how much may be noted that is not kept yet, before no more is read from the ranks: what they ask for may come faster than a store takes it. Committing
// waits for no rank, so there is room again when the store has taken some of it, or it fails.
const waitingBytes = 4 * commitBytes

// About what a change, and what is told, take besides keys and values.
const (
	changeCost = 128
	newsCost   = 512
)

// cost is about how many bytes changes that belong together take.
func cost(changes []durable.Change) int64 {
	n := int64(0)
	for _, c := range changes {
		n += int64(changeCost + len(c.Key) + len(c.Value))
	}
	return n
}

// newKeeper starts keeping; stop ends it.
func newKeeper(store durable.Store, bound time.Duration, logger *slog.Logger) *keeper {
	k := &keeper{store: store, bound: bound, logger: logger, wake: make(chan struct{}, 1), failed: make(chan struct{}), quit: make(chan struct{}), ended: make(chan struct{})}
	k.life, k.cancel = context.WithCancel(context.Background())
	go k.run()
	return k
}

// keep notes changes that belong together.
func (k *keeper) keep(changes ...durable.Change) {
	if k == nil {
		return
	}
	k.mu.Lock()
	k.changes = append(k.changes, changes)
	k.waiting += cost(changes)
	k.mu.Unlock()
	signal(k.wake)
}

// tell calls f when all changes before are kept.
func (k *keeper) tell(f func()) {
	if k == nil {
		f()
		return
	}
	k.mu.Lock()
	k.news = append(k.news, keptNews{k.taken + uint64(len(k.changes)), f})
	k.waiting += newsCost
	k.mu.Unlock()
	signal(k.wake)
}

// full returns a channel that is closed when no longer too much waits to be kept, or nil if that is so now.
func (k *keeper) full() <-chan struct{} {
	if k == nil {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.waiting <= waitingBytes {
		return nil
	}
	if k.room == nil {
		k.room = make(chan struct{})
	}
	return k.room
}

// done notes that changes were kept and news told.
func (k *keeper) done(changes [][]durable.Change, news []keptNews) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range changes {
		k.waiting -= cost(c)
	}
	k.waiting -= int64(len(news)) * newsCost
	if k.room != nil && k.waiting <= waitingBytes {
		close(k.room)
		k.room = nil
	}
}

// take returns what is to be committed next, and what is told then. The caller holds the lock.
func (k *keeper) take() (changes [][]durable.Change, news []keptNews) {
	n := 0
	for size := 0; n < min(len(k.changes), commitChanges) && (n == 0 || size < commitBytes); n++ {
		for _, c := range k.changes[n] {
			size += len(c.Value)
		}
	}
	k.taken += uint64(n)
	told := 0
	for told < len(k.news) && k.news[told].after <= k.taken {
		told++
	}
	return first(&k.changes, n), first(&k.news, told)
}

// first takes the first n of a queue. What is left does not hold on to them.
func first[T any](queue *[]T, n int) []T {
	taken := slices.Clone((*queue)[:n])
	clear((*queue)[:n])
	*queue = (*queue)[n:]
	return taken
}

// run commits what has been noted, much of it at a time, until stop is called or the store fails.
func (k *keeper) run() {
	defer close(k.ended)
	look := time.NewTicker(ownedLook)
	defer look.Stop()
	fail := func(err error) {
		k.err = err
		k.logger.Error("keeping the state of the job", "error", err)
		close(k.failed)
	}
	for {
		select { // also where the ranks ask for one change after the other
		case <-k.quit:
			return
		default:
		}
		k.mu.Lock()
		changes, news := k.take()
		k.busy = len(changes) > 0 || len(news) > 0
		if !k.busy {
			for _, c := range k.idle {
				close(c)
			}
			k.idle = nil
		}
		busy := k.busy
		k.mu.Unlock()
		if !busy {
			select {
			case <-k.wake:
				continue
			case <-look.C:
				if err := k.gone(); err != nil {
					fail(err)
					return
				}
				continue
			case <-k.quit:
				return
			}
		}
		if len(changes) > 0 {
			ctx, cancel := context.WithTimeout(k.life, k.bound)
			err := k.store.Commit(ctx, changes)
			cancel()
			if err != nil {
				fail(err)
				return
			}
		}
		for _, n := range news {
			n.tell()
		}
		k.done(changes, news)
	}
}

// ownedLook is the pause between two looks whether the store is still this service's, where there is nothing to keep.
const ownedLook = time.Second

// gone returns an error if another service has the store, or the store has forgotten the job. A service whose ranks ask for nothing would not notice otherwise, and would
// hold the ranks until the other one takes them for dead. That the store does not answer now is no reason to end.
func (k *keeper) gone() error {
	ctx, cancel := context.WithTimeout(k.life, ownedLook)
	defer cancel()
	err := k.store.Commit(ctx, nil)
	if failed, ok := errors.AsType[*durable.StoreError](err); ok && (failed.Condition == durable.Replaced || failed.Condition == durable.Forgotten) {
		return err
	}
	return nil
}

// flush waits until everything that was noted is kept, or the store has failed, or ctx ends.
func (k *keeper) flush(ctx context.Context) error {
	if k == nil {
		return nil
	}
	done := make(chan struct{})
	k.mu.Lock()
	k.idle = append(k.idle, done)
	k.mu.Unlock()
	signal(k.wake)
	select {
	case <-done:
		return nil
	case <-k.failed:
		return k.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// broken returns a channel that is closed when the store has failed.
func (k *keeper) broken() <-chan struct{} {
	if k == nil {
		return nil
	}
	return k.failed
}

// end lets go of the store, without what is not kept yet; where the job is over, nothing is kept any more. Ending takes some seconds at most, whether ctx
// has ended or not.
func (k *keeper) end(ctx context.Context, over bool) error {
	if k == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTime)
	defer cancel()
	close(k.quit)
	stop := context.AfterFunc(ctx, k.cancel) // a store that does not answer holds up nobody for as long as a commit may take
	<-k.ended
	stop()
	k.cancel()
	var err error
	if over {
		err = k.store.Clear(ctx)
	}
	return errors.Join(err, k.store.Close())
}

func rankKey(rank int) string      { return "rank/" + strconv.Itoa(rank) }
func groupKey(group string) string { return "group/" + hex.EncodeToString([]byte(group)) }
func ofKey(group string) string    { return "of/" + hex.EncodeToString([]byte(group)) + "/" }
func awayKey(group string, worldRank int) string {
	return ofKey(group) + "away/" + strconv.Itoa(worldRank)
}
func callKey(group string, seq uint64) string {
	return ofKey(group) + "call/" + strconv.FormatUint(seq, 10)
}
func valueKey(group, key string) string {
	return ofKey(group) + "key/" + hex.EncodeToString([]byte(key))
}
func replyKey(rank int, id uint64) string {
	return repliesKey(rank) + strconv.FormatUint(id, 10)
}
func repliesKey(rank int) string { return fmt.Sprintf("reply/%d/", rank) }

// put is the change that puts a message under a key.
func put(key string, m proto.Message) durable.Change {
	value, err := proto.Marshal(m)
	if err != nil { // texts were made valid where they came from; what cannot be kept is better not there than half there
		value = nil
	}
	if value == nil {
		value = []byte{}
	}
	return durable.Change{Key: key, Value: value}
}

func remove(key string) durable.Change { return durable.Change{Key: key} }

// keptCall is the outcome of a collective call, kept until every member has it.
type keptCall struct {
	outcome *outcome
	taken   []bool // by rank in the group
}

// toWire is the whole outcome in one message.
func (o *outcome) toWire(group string, seq uint64) *pb.Outcome {
	m := &pb.Outcome{Group: group, Sequence: seq, Failure: o.failure.toWire()}
	for _, blob := range o.blobs {
		m.Data, m.Sizes = append(m.Data, blob...), append(m.Sizes, uint32(len(blob)))
	}
	return m
}

// cameChanges keeps a rank that has come, and with the first one how many there are: whoever comes first to the next service has no say in that.
func (h *hub) cameChanges(rank int) []durable.Change {
	return append(groupChanges(h.groups[worldName]), h.rankChange(rank, rankPresent))
}

// rankChange keeps a rank in a state.
func (h *hub) rankChange(rank int, state rankState) durable.Change {
	r := &h.ranks[rank]
	return put(rankKey(rank), &pb.KeptRank{Member: r.member.toWire(), State: uint32(state), Session: r.session, Loss: r.loss.toWire(), Order: r.order})
}

// groupChanges keeps a group as it is, if it is not.
func groupChanges(g *hubGroup) []durable.Change {
	if g.recorded {
		return nil
	}
	g.recorded = true
	return []durable.Change{groupChange(g)}
}

func groupChange(g *hubGroup) durable.Change {
	return put(groupKey(g.name), &pb.KeptGroup{Name: g.name, Opener: int64(g.opener), Members: toInt64s(g.members), Opened: g.opened, Buried: g.buried})
}

// keepCall keeps the outcome of a call before any member has it. The world, and a group that was opened, is kept already.
func (h *hub) keepCall(g *hubGroup, seq uint64, o *outcome) {
	if h.keeper == nil || h.groups[g.name] != g {
		return
	}
	g.kept[seq] = &keptCall{outcome: o, taken: make([]bool, len(g.members))}
	h.keeper.keep(append(groupChanges(g), put(callKey(g.name, seq), o.toWire(g.name, seq)))...)
	if o.failure == nil {
		return
	}
	if g.failed = append(g.failed, seq); len(g.failed) > maxTombstones {
		oldest := g.failed[0]
		g.buried = max(g.buried, oldest+1)
		h.keeper.keep(groupChange(g))
		h.dropCall(g, oldest)
	}
}

// dropCall forgets an outcome that all members have, or that is too old.
func (h *hub) dropCall(g *hubGroup, seq uint64) {
	delete(g.kept, seq)
	if i := slices.Index(g.failed, seq); i >= 0 {
		g.failed = slices.Delete(g.failed, i, i+1)
	}
	h.keeper.keep(remove(callKey(g.name, seq)))
}

// taken notes that a rank has what was kept for it: the outcome of a call or, if request is not 0, a reply.
func (h *hub) taken(worldRank int, group string, seq, request uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.keeper == nil {
		return
	}
	if request != 0 {
		h.dropReply(worldRank, request)
		return
	}
	if g := h.groups[group]; g != nil {
		h.takenLocked(g, g.rankOf(worldRank), seq)
	}
}

func (h *hub) takenLocked(g *hubGroup, rank int, seq uint64) {
	c := g.kept[seq]
	if c == nil || rank < 0 {
		return
	}
	c.taken[rank] = true
	h.settleCall(g, seq, c)
}

// settleCall forgets an outcome if every member has it or needs none any more.
func (h *hub) settleCall(g *hubGroup, seq uint64, c *keptCall) {
	for i, has := range c.taken {
		if !has && !g.away[i] {
			return
		}
	}
	h.dropCall(g, seq)
	if !g.opened && g.name != worldName && len(g.kept) == 0 && len(g.rounds) == 0 {
		h.drop(g)
	}
}

// settleKept does that for all outcomes of a group, of which a member has gone.
func (h *hub) settleKept(g *hubGroup) {
	if h.keeper == nil || h.groups[g.name] != g {
		return
	}
	for _, seq := range g.keptCalls() {
		h.settleCall(g, seq, g.kept[seq])
	}
}

// keepGone keeps that a rank has gone. It needs no reply any more.
func (h *hub) keepGone(rank int, state rankState) {
	if h.keeper == nil {
		return
	}
	changes := []durable.Change{h.rankChange(rank, state)}
	if len(h.ranks[rank].replies) > 0 { // each change of all keys is a step of its own for the store, and a thousand ranks leave at once
		changes = append(changes, durable.Change{Key: repliesKey(rank), All: true})
	}
	h.ranks[rank].replies, h.ranks[rank].replyBytes = nil, 0
	h.keeper.keep(changes...)
}

// back is a rank that was admitted by an earlier service coming to this one. What is kept for it and that it does not wait for, it has.
func (h *hub) back(worldRank int, session string, waits []*pb.Taken, events rankReceiver, welcome func()) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	r := &h.ranks[worldRank]
	if r.state != rankPresent || r.events != nil || r.session != session {
		return false
	}
	r.events = events
	h.keeper.tell(welcome)
	calls, requests := waited(waits)
	for _, g := range h.groupsOf(worldRank) {
		for _, seq := range g.keptCalls() {
			if g.kept[seq].outcome.failure == nil && !calls[roundKey{g.name, seq}] {
				h.takenLocked(g, g.rankOf(worldRank), seq)
			}
		}
	}
	for id := range r.replies {
		if !requests[id] {
			h.dropReply(worldRank, id)
		}
	}
	h.tellAgain(worldRank, calls, events)
	return true
}

// tellAgain tells a rank that has come over another connection what it may not have heard. The outcomes that it waits for come before the losses: a rank that hears first that
// a member was lost gives up a call that has ended well for the others.
func (h *hub) tellAgain(worldRank int, calls map[roundKey]bool, to rankReceiver) {
	for _, g := range h.groupsOf(worldRank) {
		for _, seq := range g.keptCalls() {
			if calls[roundKey{g.name, seq}] {
				h.answer(&arrival{to: to}, g.name, seq, g.kept[seq].outcome)
			}
		}
	}
	for _, l := range h.losses() {
		h.tellLoss(to, l)
	}
}

// waited returns the calls and the requests that a rank says that it waits for.
func waited(waits []*pb.Taken) (calls map[roundKey]bool, requests map[uint64]bool) {
	calls, requests = map[roundKey]bool{}, map[uint64]bool{}
	for _, w := range waits {
		if w.GetRequest() != 0 {
			requests[w.GetRequest()] = true
		} else {
			calls[roundKey{w.GetGroup(), w.GetSequence()}] = true
		}
	}
	return calls, requests
}

// losses returns the losses of the job, the first first.
func (h *hub) losses() []*loss {
	var lost []int
	for rank := range h.ranks {
		if h.ranks[rank].loss != nil {
			lost = append(lost, rank)
		}
	}
	slices.SortFunc(lost, func(a, b int) int { return int(h.ranks[a].order) - int(h.ranks[b].order) })
	all := make([]*loss, len(lost))
	for i, rank := range lost {
		all[i] = h.ranks[rank].loss
	}
	return all
}

func (g *hubGroup) keptCalls() []uint64 {
	var all []uint64
	for seq := range g.kept {
		all = append(all, seq)
	}
	slices.Sort(all)
	return all
}

// awaited returns the ranks that are present and have not come back from an earlier service.
func (h *hub) awaited() []int {
	h.mu.Lock()
	defer h.mu.Unlock()
	var ranks []int
	for i := range h.ranks {
		if h.ranks[i].state == rankPresent && h.ranks[i].events == nil {
			ranks = append(ranks, i)
		}
	}
	return ranks
}

// restore makes the hub what an earlier service has kept. Nothing was asked of the hub before.
func (h *hub) restore(kept map[string][]byte) error {
	bad := func(key string, err error) error { return fmt.Errorf("key %q: %w", key, err) }
	var orphans []string
	if key := groupKey(worldName); kept[key] != nil { // first: in another world nothing else fits either
		if err := h.restoreGroup(kept[key]); err != nil {
			return bad(key, err)
		}
	}
	for key, value := range kept {
		if strings.HasPrefix(key, "group/") && key != groupKey(worldName) {
			if err := h.restoreGroup(value); err != nil {
				return bad(key, err)
			}
		}
	}
	for key, value := range kept {
		kind, rest, _ := strings.Cut(key, "/")
		var err error
		switch kind {
		case "group":
		case "rank":
			err = h.restoreRank(rest, value)
		case "reply":
			err = h.restoreReply(rest, value)
		case "of":
			name, what, _ := strings.Cut(rest, "/")
			text, hexErr := hex.DecodeString(name)
			g := h.groups[string(text)]
			if hexErr == nil && g == nil {
				orphans = append(orphans, key) // a service ended while it dropped the group
				continue
			}
			if err = hexErr; err == nil {
				err = h.restoreOf(g, what, value)
			}
		default:
			err = errors.New("this version does not know it; use one release of symmem")
		}
		if err != nil {
			return bad(key, err)
		}
	}
	for _, g := range h.groups {
		slices.Sort(g.failed)
		for i, m := range g.members {
			if s := h.ranks[m].state; s == rankLeft || s == rankLost {
				g.markAway(i)
			}
		}
	}
	for _, l := range h.losses() {
		for _, name := range l.groups {
			if g := h.groups[name]; g != nil && g.lost == nil {
				g.lost = l
			}
		}
	}
	for _, g := range h.groups {
		if g.nAway == len(g.members) {
			h.drop(g)
		}
	}
	for _, key := range orphans {
		h.keeper.keep(remove(key))
	}
	return nil
}

func (h *hub) restoreGroup(value []byte) error {
	var w pb.KeptGroup
	if err := proto.Unmarshal(value, &w); err != nil {
		return err
	}
	g := newHubGroup(w.GetName(), int(w.GetOpener()), toInts(w.GetMembers()))
	if err := h.fits(g); err != nil {
		return err
	}
	g.opened, g.buried = w.GetOpened(), w.GetBuried()
	g.recorded = true
	h.groups[g.name] = g
	if g.opener >= 0 {
		h.ranks[g.opener].opened++
	}
	return nil
}

// otherWorldError says that a job was kept with another number of ranks than those have who ask for it now.
type otherWorldError struct{ kept, asked int }

// Error says both numbers.
func (e *otherWorldError) Error() string {
	return fmt.Sprintf("the attempt was kept with another world size: %d, not %d", e.kept, e.asked)
}

// fits says what is wrong with a group that was kept.
func (h *hub) fits(g *hubGroup) error {
	if g.name == worldName && len(g.members) != len(h.ranks) {
		return &otherWorldError{kept: len(g.members), asked: len(h.ranks)}
	}
	if g.opener >= len(h.ranks) || len(g.members) == 0 {
		return fmt.Errorf("a group of another world")
	}
	for i, m := range g.members {
		if m < 0 || m >= len(h.ranks) || i > 0 && g.members[i-1] >= m {
			return fmt.Errorf("members %v in a world of %d", g.members, len(h.ranks))
		}
	}
	return nil
}

func (h *hub) restoreRank(text string, value []byte) error {
	rank, err := strconv.Atoi(text)
	if err != nil || rank < 0 || rank >= len(h.ranks) {
		return fmt.Errorf("rank %q in a world of %d: the attempt was kept with another world size", text, len(h.ranks))
	}
	var w pb.KeptRank
	if err := proto.Unmarshal(value, &w); err != nil {
		return err
	}
	r := &h.ranks[rank]
	r.state, r.member, r.session, r.loss, r.order = rankState(w.GetState()), memberFromWire(w.GetMember()), w.GetSession(), lossFromWire(w.GetLoss()), w.GetOrder()
	if r.state < rankPresent || r.state > rankLost {
		return fmt.Errorf("state %d", r.state)
	}
	h.lossCount = max(h.lossCount, r.order)
	if r.state == rankPresent {
		h.present++
	}
	return nil
}

func (h *hub) restoreReply(text string, value []byte) error {
	rank, id := 0, uint64(0)
	if _, err := fmt.Sscanf(text, "%d/%d", &rank, &id); err != nil || rank < 0 || rank >= len(h.ranks) {
		return fmt.Errorf("a reply to %q", text)
	}
	var w pb.StoreReply
	if err := proto.Unmarshal(value, &w); err != nil {
		return err
	}
	h.ranks[rank].keepReply(replyFromWire(&w))
	return nil
}

func (h *hub) restoreOf(g *hubGroup, what string, value []byte) error {
	kind, name, _ := strings.Cut(what, "/")
	switch kind {
	case "away":
		rank, err := strconv.Atoi(name)
		if err != nil || g.rankOf(rank) < 0 {
			return fmt.Errorf("member %q", name)
		}
		g.markAway(g.rankOf(rank))
	case "key":
		key, err := hex.DecodeString(name)
		if err != nil {
			return err
		}
		g.store[string(key)] = value
		h.keys++
		h.storeBytes += int64(len(key) + len(value))
	case "call":
		seq, err := strconv.ParseUint(name, 10, 64)
		if err != nil {
			return err
		}
		var w pb.Outcome
		if err := proto.Unmarshal(value, &w); err != nil {
			return err
		}
		blobs, err := splitBlobs(&w)
		if err != nil {
			return err
		}
		if len(w.GetSizes()) == 0 {
			blobs = nil
		}
		o := &outcome{blobs: blobs, failure: failureFromWire(w.GetFailure())}
		g.kept[seq] = &keptCall{outcome: o, taken: make([]bool, len(g.members))}
		if o.failure != nil {
			g.failed = append(g.failed, seq)
		}
	default:
		return fmt.Errorf("this version does not know %q", what)
	}
	return nil
}

// keepReply notes the reply to a request that has changed something.
func (r *hubRank) keepReply(reply *storeReply) {
	if r.replies == nil {
		r.replies = make(map[uint64]*storeReply)
	}
	r.replies[reply.id] = reply
	r.replyBytes += int64(len(reply.value))
}

// dropReply forgets a reply that the rank has.
func (h *hub) dropReply(rank int, id uint64) {
	r := &h.ranks[rank]
	reply := r.replies[id]
	if reply == nil {
		return
	}
	delete(r.replies, id)
	r.replyBytes -= int64(len(reply.value))
	h.keeper.keep(remove(replyKey(rank, id)))
}

// untaken says that a rank may change nothing more before it has taken replies that are kept for it, or returns nil. One that waits for its requests never has as many.
func (h *hub) untaken(rank int, v verb) *failure {
	r := &h.ranks[rank]
	switch {
	case v == verbGet || v == verbTryGet: // nothing is kept of these
		return nil
	case len(r.replies) >= h.limits.replies:
		return &failure{kind: failQuota, text: quotaReplies, limit: int64(h.limits.replies)}
	case r.replyBytes >= h.limits.replyBytes:
		return &failure{kind: failQuota, text: quotaReplyBytes, limit: h.limits.replyBytes}
	}
	return nil
}

func replyToWire(r *storeReply) *pb.StoreReply {
	return &pb.StoreReply{Id: r.id, Value: r.value, Found: r.found, Swapped: r.swapped, Number: r.number, Failure: r.failure.toWire()}
}

func replyFromWire(m *pb.StoreReply) *storeReply {
	return &storeReply{
		id: m.GetId(), value: m.GetValue(), found: m.GetFound(), swapped: m.GetSwapped(), number: m.GetNumber(),
		failure: failureFromWire(m.GetFailure()),
	}
}
