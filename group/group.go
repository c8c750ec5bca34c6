package group

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/symmem/symmem/internal/errs"
)

// MaxBlob is the most bytes that one rank may bring to a collective call or store under one key: 16 MiB.
const MaxBlob = 16 << 20

// maxText bounds op texts, keys and the text of a failure, in bytes, so that one rank cannot flood the others' errors.
const maxText = 4 << 10

// Group is one rank's membership of a group of ranks. All methods may be called from several goroutines at once; see the
// package documentation for the order of collective calls.
type Group struct {
	session *session
	name    string
	rank    int
	roster  *roster
	members []Member // the roster's
	world   []int    // the members' world ranks, ascending

	seq atomic.Uint64 // the next collective call

	islands atomic.Pointer[Islands] // nil until they are known
	asked   atomic.Uint64           // 1 more than the number of the call that looked for islands and whose end this rank has not heard; 0 for none

	state   atomic.Pointer[groupState]
	lost    chan struct{} // closed when a member is lost
	stopped chan struct{} // closed when a member is lost or the group is closed
	over    chan struct{} // closed when the group is closed

	mu     sync.Mutex
	failed error          // see Excuse
	noted  uint64         // how often that was set
	ended  bool           // closed on this rank
	dead   bool           // a member is lost
	opened map[string]int // how often a sub-group of these ranks was opened
}

// groupState is why a group no longer works.
type groupState struct{ err error }

func newGroup(s *session, name string, rank int, r *roster) *Group {
	return &Group{
		session: s,
		name:    name,
		rank:    rank,
		roster:  r,
		members: r.members,
		world:   r.world,
		lost:    make(chan struct{}),
		stopped: make(chan struct{}),
		over:    make(chan struct{}),
		opened:  make(map[string]int),
	}
}

// made refuses a group that was not made by this package.
func (g *Group) made(call string) error {
	if g == nil || g.session == nil {
		return invalid(call, "group", "the zero Group", "one that Join, Local or Sub gave")
	}
	return nil
}

// orZero is the group, or a zero one for nil: what cannot fail says of both what there is, which is nothing.
func (g *Group) orZero() *Group {
	if g == nil {
		return new(Group)
	}
	return g
}

// Rank returns this rank's number in the group, from 0.
func (g *Group) Rank() int { return g.orZero().rank }

// Size returns the number of ranks in the group.
func (g *Group) Size() int { return len(g.orZero().world) }

// Name returns the group's name, the same on every rank and unique in the job: "world", or its parent's name, the ranks it was
// made of and how often, as in "world/0,2,5#1".
func (g *Group) Name() string { return g.orZero().name }

// Members returns a copy of what is known of each rank, by rank.
func (g *Group) Members() []Member { return slices.Clone(g.orZero().members) }

// Lost returns a channel that is closed when a member of the group is lost, or the service that the group depends on. Neither Close nor a
// member that leaves closes it.
func (g *Group) Lost() <-chan struct{} { return g.orZero().lost }

// Err returns nil while the group works, a [*PeerLostError] after a member was lost, and ErrClosed after Close. It costs one atomic load, so a kernel
// may call it while it spins.
func (g *Group) Err() error {
	if err := g.made("Err"); err != nil {
		return err
	}
	if s := g.state.Load(); s != nil {
		return s.err
	}
	return nil
}

// fail marks the group as having lost a member. Only the first loss counts.
func (g *Group) fail(err *PeerLostError) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended || g.dead {
		return
	}
	g.dead = true
	g.state.Store(&groupState{err: err})
	close(g.lost)
	close(g.stopped)
}

// end marks the group as closed on this rank, and reports whether it was not.
func (g *Group) end() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ended {
		return false
	}
	g.ended = true
	g.state.Store(&groupState{err: fmt.Errorf("group %s: %w", g.name, ErrClosed)})
	if !g.dead {
		close(g.stopped)
	}
	close(g.over)
	return true
}

func (g *Group) isEnded() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.ended
}

// Close leaves the group. Calls that are under way on this rank end with ErrClosed. Calls of other ranks that need this one end with a
// [*PeerLostError] that says that it has left; Lost and Err do not count it as lost. Close is not collective. A second Close is ErrClosed.
//
// Closing the world group leaves the job and closes every group of the rank. On rank 0, where it serves the rendezvous for all, it then blocks
// until every other rank has left or is lost. If ctx ends first, it ends the service for those that remain and returns a
// [*MissingRanksError] that names them. On other ranks it waits until the service has heard of it, for the LivenessTimeout at most, and for a second at most from when ctx
// has ended.
func (g *Group) Close(ctx context.Context) error {
	if err := cmp.Or(g.made("Close"), errs.Given("Close", "ctx", ctx, "a context")); err != nil {
		return err
	}
	if !g.end() {
		return fmt.Errorf("closing group %s: %w", g.name, ErrClosed)
	}
	s := g.session
	if g.name != worldName {
		s.remove(g)
		s.transport.leaveGroup(g.name)
		return nil
	}
	s.close()
	err := s.transport.goodbye(ctx)
	if filesErr := s.files.close(); err == nil {
		err = filesErr
	}
	if err != nil {
		return fmt.Errorf("closing group %s: %w", g.name, err)
	}
	return nil
}

// Abort declares this rank lost at once. Pending and later collective calls in all of its groups end with a [*PeerLostError] that carries reason, on
// this rank too. It is for a rank that its peers must not wait for. The groups must still be closed. Abort is not collective and does not block.
func (g *Group) Abort(reason string) {
	if g.made("Abort") != nil {
		return
	}
	s := g.session
	s.mu.Lock()
	closed := s.closed
	l := &loss{worldRank: s.worldRank, reason: "this rank aborted: " + clip(reason)}
	if !closed {
		for _, own := range s.groups {
			own.fail(own.peerLost(l))
		}
	}
	s.mu.Unlock()
	if !closed {
		s.transport.abort("it aborted: " + clip(reason))
	}
}

// AllGather sends data to every rank and returns every rank's data, by rank, this rank's own included. The ranks may bring
// different sizes, up to [MaxBlob] bytes each. The result is the caller's. op names the call in errors and must be the same on
// every rank. It is collective and blocks until all ranks have come. Its errors are those of collective calls; more than MaxBlob bytes
// are ErrInvalid, which every rank gets in a [*VoteError].
func (g *Group) AllGather(ctx context.Context, op string, data []byte) ([][]byte, error) {
	if err := g.made("AllGather"); err != nil {
		return nil, err
	}
	a := &arrival{kind: kindAllGather, op: clip(op)}
	err := g.setData(a, data)
	o, err := g.call(ctx, g.take(1), a, err)
	if err != nil {
		return nil, err
	}
	return o.copyBlobs(), nil
}

// Broadcast sends root's data to every rank and returns it, on root too. Other ranks' data is ignored. The result is the caller's. op and
// root must be the same on every rank. It is collective and blocks until all ranks have come. Its errors are those of collective calls; a
// root outside of the group, or more than [MaxBlob] bytes of root's, are ErrInvalid, which every rank gets in a [*VoteError].
func (g *Group) Broadcast(ctx context.Context, op string, root int, data []byte) ([]byte, error) {
	if err := g.made("Broadcast"); err != nil {
		return nil, err
	}
	if root < 0 || root >= g.Size() {
		// The call is matched as any other, so that ranks that ask for a root inside the group learn of the mismatch.
		bad := invalid(label(kindBroadcast, op), "root", root, fmt.Sprintf("0 to %d", g.Size()-1))
		_, err := g.call(ctx, g.take(1), &arrival{kind: kindBroadcast, op: clip(op), root: root}, bad)
		return nil, err
	}
	a := &arrival{kind: kindBroadcast, op: clip(op), root: root}
	var err error
	if g.rank == root {
		err = g.setData(a, data)
	}
	o, err := g.call(ctx, g.take(1), a, err)
	if err != nil {
		return nil, err
	}
	return o.copyBlobs()[0], nil
}

// Barrier returns when every rank has called it with the same op. It is collective and blocks. Its errors are those of collective calls.
func (g *Group) Barrier(ctx context.Context, op string) error {
	if err := g.made("Barrier"); err != nil {
		return err
	}
	_, err := g.call(ctx, g.take(1), &arrival{kind: kindBarrier, op: clip(op)}, nil)
	return err
}

// Vote tells every rank whether all ranks succeeded. It returns nil if every rank passed nil. Otherwise it returns, on every rank, a [*VoteError]
// that names each rank that failed, with the text of its failure; errors.Is finds the conditions of all failures in it. On a rank that failed,
// errors.Is and errors.As reach its own failure too. It is collective and blocks until all ranks have come. Its other errors are those of collective
// calls.
func (g *Group) Vote(ctx context.Context, op string, failure error) error {
	if err := g.made("Vote"); err != nil {
		return err
	}
	_, err := g.call(ctx, g.take(1), &arrival{kind: kindVote, op: clip(op)}, failure)
	return err
}

// Excuse notes that this rank has failed outside of any collective call, while the others may be waiting in the next one. If the ranks'
// calls then do not match, they get the failure, in a [*VoteError], instead of a [*MismatchError]. The note is dropped when a call
// that began after it succeeds, and replaced by a later one. Excuse does not block.
func (g *Group) Excuse(failure error) {
	if g.made("Excuse") != nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.failed = failure
	g.noted++
}

// excuse returns the note, and which one it is.
func (g *Group) excuse() (which uint64, failure error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.noted, g.failed
}

// dropExcuse drops the note that a call has brought. A later one stays, of which the others do not know yet.
func (g *Group) dropExcuse(which uint64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.noted == which {
		g.failed = nil
	}
}

// Sub makes a group of some of this group's ranks. It is collective over those ranks only: each calls it with the same ranks, and it
// blocks until all of them have come. ranks are ranks of this group, ascending, without repetition, and contain the caller. A rank's
// number in the new group is its index in ranks. Groups may overlap, and may be made of the ranks that remain after a loss. Close the group
// when it is no longer needed.
//
// Ranks that are not allowed, or a name that becomes too long because groups are nested, are ErrInvalid on the rank that asks, which does not wait. A nil ctx is ErrInvalid,
// which every rank gets in a [*VoteError].
// Too many open groups of one rank are a [*QuotaError]. After Close of this group it is ErrClosed. Its other errors are those of collective calls.
func (g *Group) Sub(ctx context.Context, ranks []int) (*Group, error) {
	if err := g.made("Sub"); err != nil {
		return nil, err
	}
	rank := -1
	for i, r := range ranks {
		if r < 0 || r >= g.Size() {
			return nil, invalid("Sub", "ranks", r, fmt.Sprintf("ranks of group %s, 0 to %d", g.name, g.Size()-1))
		}
		if i > 0 && ranks[i-1] >= r {
			return nil, invalid("Sub", "ranks", ranks, "ascending ranks without repetition")
		}
		if r == g.rank {
			rank = i
		}
	}
	if rank < 0 {
		return nil, errs.Advised("Sub", "ranks", ranks, fmt.Sprintf("ranks that contain the caller, %d", g.rank), "other ranks do not call")
	}
	if err := g.Err(); errors.Is(err, ErrClosed) {
		return nil, err
	}
	key := subKey(ranks)
	g.mu.Lock()
	name := fmt.Sprintf("%s/%s#%d", g.name, key, g.opened[key]+1)
	if len(name) <= maxText {
		g.opened[key]++
	}
	g.mu.Unlock()
	if len(name) > maxText {
		return nil, errs.Advised("Sub", "len(name)", len(name), fmt.Sprintf("at most %d bytes", maxText), "make groups of the world, not of groups of groups")
	}

	sub := newGroup(g.session, name, rank, g.roster.of(errs.FoldRanks(ranks, ","), ranks))
	unsettled := g.hearIslands(ctx)
	if known := g.islands.Load(); known != nil {
		sub.islands.Store(known.among(ranks))
	}
	var quota *QuotaError
	err := g.session.add(sub)
	if errors.As(err, &quota) { // the other ranks come, and learn of it
		if err = g.session.addRefused(sub); err == nil {
			_, err = sub.call(ctx, sub.take(1), &arrival{kind: kindSub, op: name, members: sub.world}, quota)
			sub.end()
			g.session.remove(sub)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("opening group %s: %w", name, err)
	}
	if _, err := sub.call(ctx, sub.take(1), &arrival{kind: kindSub, op: name, members: sub.world}, unsettled); err != nil {
		sub.end()
		g.session.remove(sub)
		// Where the service has not answered in time, the group may be open for the others, who must not wait for this rank.
		g.session.transport.leaveGroup(name)
		return nil, fmt.Errorf("opening group %s: %w", name, err)
	}
	return sub, nil
}

// subKey returns the part of a sub-group's name that says which ranks it has. Long lists become a count and a hash.
func subKey(ranks []int) string {
	const longest = 80
	key := errs.FoldRanks(ranks, ",")
	if len(key) <= longest {
		return key
	}
	sum := sha256.Sum256([]byte(key))
	return fmt.Sprintf("%d-ranks-%s", len(ranks), hex.EncodeToString(sum[:8]))
}

// take returns the first of n sequence numbers for a call that is made of n rounds.
func (g *Group) take(n uint64) uint64 { return g.seq.Add(n) - n }

// setData sets the data of a rank's arrival, or records why it is refused. A refused rank still comes to the call, so that the
// others are not left waiting.
func (g *Group) setData(a *arrival, data []byte) error {
	if len(data) > MaxBlob {
		return errs.Advised(label(a.kind, a.op), "len(data)", len(data), fmt.Sprintf("at most %d bytes a rank", MaxBlob), "split larger data")
	}
	a.data = data
	return nil
}

// call takes part in round seq. A failure of this rank makes the round fail on all ranks when all have come.
func (g *Group) call(ctx context.Context, seq uint64, a *arrival, local error) (*outcome, error) {
	if err := g.Err(); err != nil {
		return nil, fmt.Errorf("%s: %w", label(a.kind, a.op), err)
	}
	if errs.IsNil(ctx) {
		ctx, local = errs.WithContext(label(a.kind, a.op), ctx, local)
	}
	a.heard = a.heard || hears(ctx)
	calls, bytes := g.session.begin(len(a.data))
	defer func() { g.session.finish(bytes) }()
	switch l := g.session.limits; {
	case calls > 2*l.calls: // the service would not have it
		return nil, &QuotaError{Op: label(a.kind, a.op), What: quotaCalls, Limit: int64(l.calls)}
	case calls > l.calls && local == nil:
		local = &QuotaError{Op: label(a.kind, a.op), What: quotaCalls, Limit: int64(l.calls)}
	case bytes < 0 && local == nil:
		local = &QuotaError{Op: label(a.kind, a.op), What: quotaCallBytes, Limit: l.callBytes}
	}
	if local != nil {
		a.refused, a.refusal, a.conditions, a.data = true, clip(errs.Text(local)), errs.Codes(local), nil
	}
	which, excuse := g.excuse()
	if excuse != nil {
		a.excuse, a.excuseConditions = clip(errs.Text(excuse)), errs.Codes(excuse)
	}
	callers := ctx
	ctx, cancel := context.WithTimeout(ctx, g.session.timeout)
	defer cancel()
	started := time.Now()
	result := make(outcomeChan, 1)
	a.to = result
	g.session.transport.arrive(g.name, seq, a)
	var o *outcome
	select {
	case o = <-result:
	case <-g.stopped:
		o = g.afterStop(result)
	case <-ctx.Done():
		reason := fmt.Sprintf("%v after %v", context.Cause(ctx), time.Since(started).Round(time.Millisecond))
		g.session.transport.abandon(g.name, seq, reason)
		o = g.afterAbandon(result, a.heard)
	}
	if o == nil {
		if err := g.Err(); err != nil {
			return nil, fmt.Errorf("%s: %w", label(a.kind, a.op), err)
		}
		return nil, &MissingRanksError{Op: label(a.kind, a.op), Size: g.Size(), Waited: time.Since(started), Err: ctx.Err()}
	}
	if o.failure != nil {
		// A program may exit as soon as it gets the error, which takes the service with it if this is rank 0.
		g.session.transport.flush()
		// The caller's context is looked at first: other calls may share it and have given up before this call noticed.
		return nil, g.errorOf(seq, a, o.failure, local, excuse, cmp.Or(callers.Err(), ctx.Err()), time.Since(started))
	}
	if excuse != nil {
		g.dropExcuse(which)
	}
	return o, nil
}

// afterStop prefers an outcome that has arrived to the news that the group no longer works.
func (g *Group) afterStop(result outcomeChan) *outcome {
	select {
	case o := <-result:
		return o
	default:
		return nil
	}
}

// afterAbandon waits for the hub's answer about a round that this rank gave up. The answer names the missing ranks, or is the outcome that was
// already on its way. Where it has to be heard, a slow service has more time for it.
func (g *Group) afterAbandon(result outcomeChan, heard bool) *outcome {
	patience := graceTimeout
	if heard {
		patience = max(patience, g.session.timeout)
	}
	grace := time.NewTimer(patience)
	defer grace.Stop()
	select {
	case o := <-result:
		return o
	case <-g.stopped:
		return g.afterStop(result)
	case <-grace.C:
		return nil
	}
}

// errorOf turns a round's failure into this rank's error.
func (g *Group) errorOf(seq uint64, a *arrival, f *failure, local, excuse, ctxErr error, waited time.Duration) error {
	op := label(a.kind, a.op)
	switch f.kind {
	case failGaveUp:
		if f.rank != g.rank {
			return &AbandonedError{Op: op, Rank: f.rank, Missing: f.missing, Reason: f.text, Err: ctxErr}
		}
		if ctxErr == nil { // it cannot be: only this call's context gives up for this rank
			ctxErr = context.Canceled
		}
		return &MissingRanksError{Op: op, Missing: f.missing, Size: g.Size(), Waited: waited, Err: ctxErr}
	case failMismatch:
		return &MismatchError{What: fmt.Sprintf("collective call %d of group %s", seq, g.name), Values: f.values}
	case failRefused:
		if local == nil && slices.ContainsFunc(f.failures, func(one rankFailure) bool { return one.rank == g.rank }) {
			local = excuse
		}
		return &VoteError{Op: op, Failures: told(f.failures), Local: local}
	case failQuota:
		return g.failureError(op, f)
	case failLost, failLeft, failClosed, failInvalid:
		return fmt.Errorf("%s: %w", op, g.failureError(op, f))
	}
	return fmt.Errorf("%s: the service failed in a way that this version does not know (%d)", op, f.kind)
}

// failureError turns failures that are not about a round into errors.
func (g *Group) failureError(op string, f *failure) error {
	switch f.kind {
	case failLost:
		return g.peerLost(f.lost)
	case failLeft:
		lost := &PeerLostError{Group: g.name, Rank: f.rank, Reason: "it has left the group"}
		if f.rank >= 0 && f.rank < len(g.members) {
			lost.Host, lost.PID = g.members[f.rank].Host, g.members[f.rank].PID
		}
		return lost
	case failClosed:
		return fmt.Errorf("group %s: %w", g.name, ErrClosed)
	case failInvalid:
		return fmt.Errorf("%w: %s", ErrInvalid, f.text)
	case failQuota:
		return &QuotaError{Op: op, What: f.text, Limit: f.limit}
	case failGaveUp, failMismatch, failRefused:
	}
	return fmt.Errorf("the service failed in a way that this version does not know (%d)", f.kind)
}

// peerLost names the lost rank by its number in this group.
func (g *Group) peerLost(l *loss) *PeerLostError {
	name, rank := g.name, slices.Index(g.world, l.worldRank)
	if rank < 0 { // the service's host
		name, rank = worldName, l.worldRank
	}
	return &PeerLostError{Group: name, Rank: rank, Host: l.host, PID: l.pid, Reason: l.reason}
}

func invalid(op, arg string, value any, allowed string) error {
	return errs.Invalid(op, arg, value, allowed)
}

// copyBlobs returns blobs that the caller may change: those of an outcome in this process are shared by all ranks.
func (o *outcome) copyBlobs() [][]byte {
	if o.own {
		return o.blobs
	}
	total := 0
	for _, b := range o.blobs {
		total += len(b)
	}
	all := make([]byte, 0, total)
	blobs := make([][]byte, len(o.blobs))
	for i, b := range o.blobs {
		all = append(all, b...)
		blobs[i] = all[len(all)-len(b) : len(all) : len(all)]
	}
	return blobs
}

// clip bounds a text that goes to other ranks, and makes it valid UTF-8.
func clip(text string) string {
	const more = "…"
	if len(text) > maxText {
		text = text[:maxText-len(more)] + more
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}
