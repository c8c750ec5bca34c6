package kernels

import (
	"slices"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/memory"
	"github.com/symmem/symmem/tensor"
)

// islandPlace is where a rank is among islands, and whom it exchanges with: the other ranks of its island by addresses, and some of each other island by puts. What a rank on one island
// has for another island goes to the rank there that carries it: the one with the same place, counted anew where the other island has fewer ranks.
type islandPlace struct {
	islands [][]int // ranks, by island
	island  int     // of this rank
	local   int     // its place there
	rails   int     // the first so many ranks of an island bring or get something, or all that there are if it has fewer
}

// islandRanks returns the ranks of each island, in the order of their lowest ranks, of what [github.com/symmem/symmem/memory.Memory.Islands] gives.
func islandRanks(of []int) [][]int {
	var all [][]int
	for first := range of {
		if of[first] != first {
			continue
		}
		var ranks []int
		for r, f := range of {
			if f == first {
				ranks = append(ranks, r)
			}
		}
		all = append(all, ranks)
	}
	return all
}

// newIslandPlace says where a rank is. Even is for what is cut into as many shards as the smallest island has ranks.
func newIslandPlace(rank int, islands [][]int, even bool) islandPlace {
	p := islandPlace{islands: islands, rails: len(islands[0])}
	for i, ranks := range islands {
		if even {
			p.rails = min(p.rails, len(ranks))
		} else {
			p.rails = max(p.rails, len(ranks))
		}
		if at := slices.Index(ranks, rank); at >= 0 {
			p.island, p.local = i, at
		}
	}
	return p
}

// crosses reports whether there is more than one island.
func (p islandPlace) crosses() bool { return len(p.islands) > 1 }

// owns reports whether this rank brings or gets something.
func (p islandPlace) owns() bool { return p.local < p.rails }

// greetings is how often the ranks of an island tell each other, before anything leaves it, that they have come to a run: once, or, where some have no rail, twice. A rank that has given up waiting for
// another of its island says it once only, and writes to its input again. What the late one then takes of that must not leave the island. A rank on a rail, which brings nothing then, is missed on each other
// island; one that is on none is not.
func (p islandPlace) greetings() int {
	if slices.ContainsFunc(p.islands, func(ranks []int) bool { return len(ranks) > p.rails }) {
		return 2
	}
	return 1
}

// near is the other ranks of the island, from the next one on.
func (p islandPlace) near() []int {
	ranks := p.islands[p.island]
	return append(slices.Clone(ranks[p.local+1:]), ranks[:p.local]...)
}

// otherIslands is the numbers of the other islands, from the next one on.
func (p islandPlace) otherIslands() []int {
	var all []int
	for k := 1; k < len(p.islands); k++ {
		all = append(all, (p.island+k)%len(p.islands))
	}
	return all
}

// carrier is the rank of another island that has to do with what this one brings or gets.
func (p islandPlace) carrier(island int) int {
	ranks := p.islands[island]
	return ranks[p.local%len(ranks)]
}

// carried is the ranks of another island whose carrier this one is.
func (p islandPlace) carried(island int) []int {
	var all []int
	for place, r := range p.islands[island] {
		if place < p.rails && place%len(p.islands[p.island]) == p.local {
			all = append(all, r)
		}
	}
	return all
}

// links is the ranks of other islands that this one exchanges with, not nil. Each of them has this one.
func (p islandPlace) links() []int {
	all := []int{}
	for _, i := range p.otherIslands() {
		if p.owns() {
			all = append(all, p.carrier(i))
		}
		for _, r := range p.carried(i) {
			if !slices.Contains(all, r) {
				all = append(all, r)
			}
		}
	}
	return all
}

// islandTarget is a rank that another carries for, and its island.
type islandTarget struct{ rank, island int }

// carriesFor is the ranks of other islands whose carrier this rank is, from the next island on.
func (p islandPlace) carriesFor() []islandTarget {
	var all []islandTarget
	for _, i := range p.otherIslands() {
		for _, r := range p.carried(i) {
			all = append(all, islandTarget{r, i})
		}
	}
	return all
}

// severalIslands reports whether there is more than one island, and one in which there is more than one rank.
func severalIslands(islands [][]int) bool {
	return len(islands) > 1 && slices.ContainsFunc(islands, func(ranks []int) bool { return len(ranks) > 1 })
}

// hierarchicalBytes is the size of a message from which on Auto takes Hierarchical where it can be had.
const hierarchicalBytes = 64 << 10

// takesIslands reports whether Auto takes Hierarchical for a message of bytes where not all peers have addresses: for one that is not small, where it can be had. It is the same on
// every rank.
func takesIslands(m *memory.Memory, bytes int64, tensors ...tensor.SymmetricTensor) bool {
	return bytes >= hierarchicalBytes && hasIslands(m, tensors...)
}

// hasIslands reports whether Hierarchical is of use, and can be had: if there are several islands, one of more than one rank, and all tensors have addresses on theirs. It is the same on every
// rank: what was adopted has addresses on none, also where a rank is alone and looks for none.
func hasIslands(m *memory.Memory, tensors ...tensor.SymmetricTensor) bool {
	if m.Device().Kind() != device.Host || !severalIslands(islandRanks(m.Islands())) {
		return false
	}
	for _, t := range tensors {
		if t.Bytes() == 0 {
			continue // it may have had no rendezvous, on this rank or on another
		}
		if w, _, err := t.Window(); err != nil || w.Adopted() {
			return false
		}
	}
	return true
}

// reachesIsland returns an error unless every copy of t on this rank's island of m has an address.
func reachesIsland(t tensor.SymmetricTensor, m *memory.Memory) error {
	of, rank := m.Islands(), m.Group().Rank()
	for r := range min(len(of), t.WorldSize()) { // t may be of another group, which is refused elsewhere
		if _, err := t.Remote(r); err != nil && of[r] == of[rank] {
			return err
		}
	}
	return nil
}
