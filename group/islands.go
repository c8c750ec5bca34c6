package group

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/symmem/symmem/internal/errs"
)

// Islands says which ranks of a group can share memory. An island is ranks of one machine that can pass each other open files and map what is
// in them; each rank is in one. All ranks know the same islands. It does not change, and may be used by several goroutines.
type Islands struct {
	of  []int // by rank: the lowest rank of its island
	why string
}

// Count returns the number of islands.
func (i *Islands) Count() int {
	n := 0
	for rank, first := range i.of {
		if rank == first {
			n++
		}
	}
	return n
}

// Of returns the ranks of the island that rank is in, ascending; nil for a rank that does not exist.
func (i *Islands) Of(rank int) []int {
	if rank < 0 || rank >= len(i.of) {
		return nil
	}
	var ranks []int
	for r, first := range i.of {
		if first == i.of[rank] {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// Same reports whether both ranks are in one island.
func (i *Islands) Same(a, b int) bool {
	return a >= 0 && a < len(i.of) && b >= 0 && b < len(i.of) && i.of[a] == i.of[b]
}

// Why says in one line why ranks of one machine are in different islands, and what to do; "" if none are.
func (i *Islands) Why() string { return i.why }

// String lists the islands: "0-1; 2,5".
func (i *Islands) String() string {
	var all []string
	for rank, first := range i.of {
		if rank == first {
			all = append(all, errs.FoldRanks(i.Of(rank), ","))
		}
	}
	return strings.Join(all, "; ")
}

// among returns the islands of a group of some of the ranks.
func (i *Islands) among(ranks []int) *Islands {
	sub := &Islands{of: make([]int, len(ranks)), why: i.why}
	for at, r := range ranks {
		sub.of[at] = slices.IndexFunc(ranks, func(other int) bool { return i.of[other] == i.of[r] })
	}
	if sub.Count() == 1 {
		sub.why = ""
	}
	return sub
}

// islandsVersion is the version of what ranks tell each other when they look for islands. Ranks of different versions are not in one island.
const islandsVersion = 1

// islandsTimeout bounds how long a rank tries in vain to pass files, and waits in vain for those that others have passed.
var islandsTimeout = 10 * time.Second

// vain is the time that may still be spent in vain. What works takes none of it: on a busy host with very many ranks, all of which share memory, passing
// the files takes long in all.
type vain struct{ left time.Duration }

// try calls f, whose context ends when the time that is left has passed.
func (v *vain) try(ctx context.Context, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, v.left)
	defer cancel()
	began := time.Now()
	err := f(ctx)
	if err != nil {
		v.left -= time.Since(began)
	}
	return err
}

// islandsRounds is the number of rounds that looking for islands takes.
const islandsRounds = 4

// islandsOp names a round of them.
func islandsOp(round uint64) string {
	return "islands: " + [islandsRounds]string{"tickets", "passing files", "writing", "reading"}[round]
}

// islandsWord is what a rank brings to each round of looking for islands.
type islandsWord struct {
	Version int
	Ticket  []byte         `json:",omitempty"` // where this rank is to be reached
	Ranks   []int          `json:",omitempty"` // those that the last step has worked with
	Why     map[int]string `json:",omitempty"` // why it has not, by rank
}

// Islands finds out which ranks can share memory, by trying: each rank passes the others of its machine a file of memory, and they write into it what
// it then reads. Two ranks are in one island only if that works in both directions, between them and all others of the island. A rank that cannot
// be reached is no error: it is in another island.
//
// It is found once, on every rank or on none: what some ranks have heard and others have not is settled in the group's [Store]. A group that was made by [Group.Sub] knows the islands of its ranks if this group had found them by then, also where one of those ranks has not heard the answer;
// otherwise the first call is collective and blocks until all ranks have come. Its errors are those of collective calls.
func (g *Group) Islands(ctx context.Context) (*Islands, error) {
	if err := g.made("Islands"); err != nil {
		return nil, err
	}
	if known := g.islands.Load(); known != nil {
		return known, nil
	}
	if err := errs.Given("Islands", "ctx", ctx, "a context"); err != nil {
		return nil, err
	}
	found, err := g.findIslands(ctx)
	if err != nil {
		return nil, fmt.Errorf("finding out which ranks share memory: %w", err)
	}
	g.islands.CompareAndSwap(nil, found)
	return g.islands.Load(), nil
}

func (g *Group) findIslands(ctx context.Context) (*Islands, error) {
	if !g.severalProcesses() {
		return g.islandsOf(make([]islandsWord, g.Size())), nil
	}
	if asked := g.asked.Load(); asked != 0 {
		if found, err := g.settleIslands(ctx, asked-1, nil); found != nil || err != nil {
			return found, err
		}
	}
	seq := g.take(islandsRounds)
	words, err := g.tryIslands(ctx, seq)
	missing, gaveUp := errors.AsType[*MissingRanksError](err)
	switch {
	case gaveUp && missing.Missing == nil: // the others may have the answer
		g.asked.Store(seq + 1)
		return nil, err
	case err != nil:
		return nil, err // every rank's
	}
	found, err := g.settleIslands(ctx, seq, g.islandsOf(words))
	if found == nil && err == nil {
		err = &AbandonedError{Op: label(kindAllGather, islandsOp(islandsRounds-1)), Rank: -1, Reason: "some rank has not heard what the ranks have found; call again on every rank"}
	}
	return found, err
}

// hearIslands asks which islands the others have found where this rank has looked for them and has not heard: a sub-group knows them on all of its ranks or on none.
func (g *Group) hearIslands(ctx context.Context) error {
	asked := g.asked.Load()
	if asked == 0 || g.islands.Load() != nil || errs.IsNil(ctx) {
		return nil
	}
	found, err := g.settleIslands(ctx, asked-1, nil)
	if err != nil {
		return fmt.Errorf("hearing which ranks of group %s share memory: %w", g.name, err)
	}
	if found != nil {
		g.islands.CompareAndSwap(nil, found)
	}
	return nil
}

// settledIslands is what is kept of a call that has looked for islands. None were found if some rank had not heard the last answer, and asked before any that had.
type settledIslands struct {
	Of  []int  `json:",omitempty"`
	Why string `json:",omitempty"`
}

// settleIslands makes sure that a call of this number has found islands on all ranks or on none: the first rank that comes decides for all. found is nil where this rank has
// not heard the answer. It returns what was decided, nil for none. Not collective. After an error nothing is known, and the next call asks again.
func (g *Group) settleIslands(ctx context.Context, seq uint64, found *Islands) (*Islands, error) {
	var mine settledIslands
	if found != nil {
		mine = settledIslands{found.of, found.why}
		ctx = context.WithoutCancel(ctx) // a rank that has come so far is in step with the others, and fails for nothing that they do not
	}
	text, err := json.Marshal(mine)
	if err != nil {
		return nil, err
	}
	var settled settledIslands
	current, _, err := g.Store().CompareAndSwap(ctx, fmt.Sprintf("symmem: islands of call %d", seq), nil, text)
	if err == nil {
		if err = json.Unmarshal(current, &settled); err != nil {
			err = fmt.Errorf("reading which islands were found: %w", err)
		}
	}
	if err != nil {
		g.asked.Store(seq + 1) // not before: a Sub at the same time would settle it for this rank, which has heard the answer
		return nil, err
	}
	g.asked.Store(0)
	switch {
	case settled.Of == nil:
		return nil, nil
	case found != nil && !slices.Equal(settled.Of, found.of), found == nil && !g.canBe(settled.Of):
		// All decide from the same words, so this is no rank's finding.
		return nil, fmt.Errorf("some rank says of call %d of group %s that it has found islands that the others have not: %w", seq, g.name, ErrMismatch)
	case found != nil:
		return found, nil
	}
	return &Islands{of: settled.Of, why: clip(settled.Why)}, nil
}

// canBe reports whether islands of these ranks are some of this group: each rank by the lowest of its island, which is on its machine.
func (g *Group) canBe(of []int) bool {
	if len(of) != g.Size() {
		return false
	}
	for r, first := range of {
		if first < 0 || first > r || of[first] != first || !g.members[r].sameMachine(g.members[first]) {
			return false
		}
	}
	return true
}

// pretend makes ranks of one machine share memory only with those of the same name, unless there are no names.
func (g *Group) pretend(names []string) {
	if names == nil {
		return
	}
	words := make([]islandsWord, len(names))
	for a := range names {
		words[a].Why = map[int]string{}
		for b := range names {
			if names[a] == names[b] {
				words[a].Ranks = append(words[a].Ranks, b)
			} else {
				words[a].Why[b] = "a test pretends that it is elsewhere"
			}
		}
	}
	g.islands.Store(g.islandsOf(words))
}

// severalProcesses reports whether a machine has ranks in several processes, and so whether there is anything to try.
func (g *Group) severalProcesses() bool {
	for a, m := range g.members {
		for _, other := range g.members[:a] {
			if m.sameMachine(other) && m.Process != other.Process {
				return true
			}
		}
	}
	return false
}

// tryIslands returns, by rank, which ranks each has reached. What one rank cannot do is no error of the call: all ranks take all rounds.
func (g *Group) tryIslands(ctx context.Context, seq uint64) ([]islandsWord, error) {
	ctx, cancel := context.WithTimeout(ctx, g.session.timeout)
	defer cancel()
	mine := islandsWord{Version: islandsVersion, Why: map[int]string{}}
	t := newIslandTrial(g, seq, mine.Why)
	defer t.end()

	round := func(n uint64) ([]islandsWord, error) {
		data, err := json.Marshal(mine)
		if err != nil {
			return nil, err
		}
		o, err := g.call(ctx, seq+n, &arrival{kind: kindAllGather, op: islandsOp(n), data: data}, nil)
		if err != nil {
			if unheard(err) {
				for later := n + 1; later < islandsRounds; later++ { // the others may have gone on to the next one
					g.decline(seq+later, kindAllGather, islandsOp(later), err)
				}
			}
			return nil, err
		}
		return readIslands(o.blobs), nil
	}
	// told returns the ranks that say that their last step has worked with this one.
	told := func(words []islandsWord) []int {
		var ranks []int
		for r, w := range words {
			if r != g.rank && slices.Contains(w.Ranks, g.rank) {
				ranks = append(ranks, r)
			}
		}
		return ranks
	}

	mine.Ticket = t.ticket()
	words, err := round(0)
	if err != nil {
		return nil, err
	}
	mine.Ticket = nil
	for r, w := range words {
		if w.Version != islandsVersion && r != g.rank {
			mine.Why[r] = fmt.Sprintf("rank %d looks for those that share its memory in another way; run the same version of symmem everywhere", r)
		}
	}
	mine.Ranks = t.send(ctx, words)
	if words, err = round(1); err != nil {
		return nil, err
	}
	mine.Ranks = t.write(ctx, told(words))
	if words, err = round(2); err != nil {
		return nil, err
	}
	mine.Ranks = t.read(told(words))
	return round(3)
}

// readIslands reads what the ranks brought to a round. What cannot be read is of another version.
func readIslands(blobs [][]byte) []islandsWord {
	words := make([]islandsWord, len(blobs))
	for r, blob := range blobs {
		if err := json.Unmarshal(blob, &words[r]); err != nil || words[r].Version != islandsVersion {
			words[r] = islandsWord{}
		}
	}
	return words
}

// islandsOf puts the ranks into islands, by which ranks each has reached. Every rank decides from the same words. A rank joins the first island
// all of whose ranks it shares memory with.
func (g *Group) islandsOf(words []islandsWord) *Islands {
	shares := func(a, b int) bool {
		if !g.members[a].sameMachine(g.members[b]) {
			return false
		}
		// Ranks of one process share its memory, unless a test says otherwise.
		return g.members[a].Process == g.members[b].Process && words[a].Why[b] == "" || slices.Contains(words[a].Ranks, b) && slices.Contains(words[b].Ranks, a)
	}
	found := &Islands{of: make([]int, g.Size())}
	var whys []string
	for r := range found.of {
		found.of[r] = r
		for first := range r {
			if found.of[first] != first || !g.members[r].sameMachine(g.members[first]) {
				continue
			}
			apart := slices.IndexFunc(found.of[:r], func(of int) bool { return of == first })
			for apart < r && (found.of[apart] != first || shares(apart, r)) {
				apart++
			}
			if apart == r {
				found.of[r] = first
				break
			}
			if why := whyApart(words, apart, r); !slices.Contains(whys, why) {
				whys = append(whys, why)
			}
		}
	}
	const most = 2
	if len(whys) > most {
		whys = append(whys[:most], fmt.Sprintf("and %d more", len(whys)-most))
	}
	found.why = clip(strings.Join(whys, "; "))
	return found
}

// whyApart says why two ranks of one machine do not share memory: what each of them says. That the other has told no place is said only if it says
// nothing itself.
func whyApart(words []islandsWord, a, b int) string {
	var whys []string
	noticed := ""
	for _, pair := range [][2]int{{a, b}, {b, a}} {
		why := words[pair[0]].Why[pair[1]]
		text := fmt.Sprintf("rank %d cannot pass memory to rank %d: %s", pair[0], pair[1], clip(why))
		switch why {
		case "":
		case noPlace(pair[1]):
			noticed = text
		default:
			whys = append(whys, text)
		}
	}
	if len(whys) == 0 {
		return cmp.Or(noticed, fmt.Sprintf("ranks %d and %d do not reach each other's memory", a, b))
	}
	return strings.Join(whys, ", and ")
}

// noPlace is what a rank says of one that has told no place to receive files, and may say itself why.
func noPlace(rank int) string { return fmt.Sprintf("rank %d has no place to receive files", rank) }
