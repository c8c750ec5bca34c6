// Package processors says what a process may use of its machine's processors, and whether the ranks of a machine have one each. What waits for
// another rank may keep looking then, and must sleep otherwise.
//
// It knows nothing of groups: what processes tell each other of their shares is for others to carry.
package processors

import (
	"math/bits"
	"runtime"
)

// Most is the most processors of one machine that are told apart: the most that Linux can be built for.
const Most = 8192

// Set is a set of processors, by the numbers that their machine's kernel has given them: bit n%8 of byte n/8 is processor n. Sets can be compared.
type Set string

// setOf makes a set of bits as they are, in words from the lowest processors on, without empty bytes at its end.
func setOf(words []uintptr) Set {
	const size = bits.UintSize / 8
	b := make([]byte, 0, len(words)*size)
	for _, w := range words {
		for i := range size {
			b = append(b, byte(w>>(8*i)))
		}
	}
	for len(b) > 0 && b[len(b)-1] == 0 {
		b = b[:len(b)-1]
	}
	return Set(b)
}

// first returns the first n processors.
func first(n int) Set {
	words := make([]uintptr, (min(n, Most)+bits.UintSize-1)/bits.UintSize)
	for i := range min(n, Most) {
		words[i/bits.UintSize] |= 1 << (i % bits.UintSize)
	}
	return setOf(words)
}

// all yields the processors in s, ascending.
func (s Set) all(yield func(int) bool) {
	for i := range len(s) {
		for b := s[i]; b != 0; b &= b - 1 {
			if !yield(8*i + bits.TrailingZeros8(b)) {
				return
			}
		}
	}
}

// Share is what one process may use of its machine's processors. The zero Share is not known.
type Share struct {
	Set     Set    // those that it may run on
	AtOnce  int    // on how many of them its goroutines run at once
	Quota   int64  // how many its control group may use, in thousandths of a processor; 0 is no quota
	QuotaOf uint64 // the control group whose quota it is: a number that is unique on its machine
}

// Here returns the share of this process as it is now.
func Here() Share {
	s := Share{Set: allowed(), AtOnce: runtime.GOMAXPROCS(0)}
	s.Quota, s.QuotaOf = quota()
	return s
}

// Checked returns a share that another process has told, or the zero Share if it cannot be one.
func (s Share) Checked() Share {
	if len(s.Set) == 0 || len(s.Set) > Most/8 || s.Set[len(s.Set)-1] == 0 || s.AtOnce < 1 || s.Quota < 0 {
		return Share{}
	}
	return s
}

// Rank is one rank of a machine: its process, and what that may use.
type Rank struct {
	Process string
	Share
}

// Enough reports whether all these ranks of one machine can run at once: whether each can have a processor that it may run on, which no other has, a
// thread of its process to run on it, and a whole processor's part of the quota of its control group. It is false if that is not known of some rank. The
// order of the ranks does not matter.
func Enough(ranks []Rank) bool {
	inProcess, inGroup := map[string]int{}, map[uint64]int64{}
	for _, r := range ranks {
		inProcess[r.Process]++
		if r.Quota > 0 {
			inGroup[r.QuotaOf]++
		}
	}
	for _, r := range ranks {
		if inProcess[r.Process] > r.AtOnce || r.Quota > 0 && 1000*inGroup[r.QuotaOf] > r.Quota {
			return false
		}
	}
	s := &seats{ranks: ranks}
	for i := range ranks {
		if !s.place(i, new([Most]bool)) {
			return false
		}
	}
	return true
}

// seats gives each rank a processor of its own. A rank that finds those that it may run on taken moves another away, which may move others in turn, so
// that one goes without only if there are too few.
type seats struct {
	ranks []Rank
	taken [Most]int // by processor: who has it, from 1; 0 is nobody
}

// place gives rank i a processor, and reports whether there is one. Those that were asked before are left alone.
func (s *seats) place(i int, asked *[Most]bool) bool {
	for p := range s.ranks[i].Set.all {
		if s.taken[p] == 0 {
			s.taken[p] = i + 1
			return true
		}
	}
	for p := range s.ranks[i].Set.all {
		if asked[p] {
			continue
		}
		asked[p] = true
		if s.place(s.taken[p]-1, asked) {
			s.taken[p] = i + 1
			return true
		}
	}
	return false
}
