package memory

import (
	"context"
	"fmt"
	"slices"

	"github.com/symmem/symmem/group"
)

// recentRequests is how many requests a heap remembers: so far back it can tell which one the ranks differ in.
const recentRequests = 16

// The kinds of request.
const (
	heapAllocate = byte(iota + 1)
	heapFree
	heapReclaim
	heapFailed // an allocation that ended on this rank with an error that need not be every rank's
)

// heapRequest is what a heap was asked for.
type heapRequest struct {
	kind  byte
	of    uint64 // the request that is freed, or has failed
	bytes int64
	dtype string
	shape []int64
	hash  uint64 // of this request and all before it
}

// String is the request as errors show it.
func (r *heapRequest) String() string {
	switch r.kind {
	case heapAllocate:
		return fmt.Sprintf("allocate %d bytes for %s%v", r.bytes, r.dtype, r.shape)
	case heapFree:
		return fmt.Sprintf("free the %d bytes of request %d", r.bytes, r.of)
	case heapReclaim:
		return fmt.Sprintf("%d bytes were reclaimed", r.bytes)
	}
	return fmt.Sprintf("request %d failed", r.of)
}

// heapLog is the requests of one rank.
type heapLog struct {
	count  uint64
	hash   uint64
	recent [recentRequests]heapRequest // request n, from 1, at n % recentRequests
}

// add notes a request and gives its number.
func (l *heapLog) add(r heapRequest) uint64 {
	l.mix(uint64(r.kind))
	l.mix(r.of)
	l.mix(uint64(r.bytes))
	for _, b := range []byte(r.dtype) {
		l.mix(uint64(b))
	}
	l.mix(uint64(len(r.shape)))
	for _, n := range r.shape {
		l.mix(uint64(n))
	}
	l.count++
	r.hash = l.hash
	l.recent[l.count%recentRequests] = r
	return l.count
}

// mix takes one more word into the hash: FNV-1a by words, with the high bits mixed into the low ones.
func (l *heapLog) mix(word uint64) {
	l.hash = (l.hash ^ word ^ 14695981039346656037) * 1099511628211
	l.hash ^= l.hash >> 29
}

// HeapState is what ranks tell each other of a heap: how many requests there were, and the last of them.
type HeapState struct {
	Number uint64        `json:"number"` // of the heap's rendezvous
	Count  uint64        `json:"count"`
	Exact  bool          `json:"exact,omitempty"` // no rank may be ahead
	Recent []HeapRequest `json:"recent,omitempty"`
}

// HeapRequest is one request in a [HeapState].
type HeapRequest struct {
	What string `json:"what"`
	Hash uint64 `json:"hash"` // of this request and all before it
}

// at gives request n, if it is remembered.
func (s *HeapState) at(n uint64) (HeapRequest, bool) {
	first := s.Count - uint64(len(s.Recent)) + 1
	if n < first || n > s.Count {
		return HeapRequest{}, false
	}
	return s.Recent[n-first], true
}

// state is what the others are told. The caller holds h.mu.
func (h *Heap) state() HeapState {
	s := HeapState{Number: h.number, Count: h.log.count}
	for n := h.log.count - min(h.log.count, recentRequests) + 1; n <= h.log.count; n++ {
		r := &h.log.recent[n%recentRequests]
		s.Recent = append(s.Recent, HeapRequest{What: r.String(), Hash: r.hash})
	}
	return s
}

// heapStates is what the others are told of all heaps that the ranks agree on. The caller holds m.collective.
func (m *Memory) heapStates() []HeapState {
	var all []HeapState
	for _, h := range m.heaps {
		h.mu.Lock()
		if h.broken == nil {
			all = append(all, h.state())
		}
		h.mu.Unlock()
	}
	return all
}

// compare compares the requests of all ranks, whose numbers must be the same, in a step in which all come. The caller holds h.order and the
// memory's collective.
func (h *Heap) compare(ctx context.Context, step string, state HeapState, failure error) error {
	r := h.memory.record("heap", fmt.Sprintf("%s of %s", step, h), &Record{})
	state.Exact = true
	if i := slices.IndexFunc(r.Heaps, func(s HeapState) bool { return s.Number == h.number }); i >= 0 {
		r.Heaps[i] = state
	}
	_, err := h.memory.exchange(ctx, r, failure)
	return err
}

// exchange is the exchange of records for this memory. A heap in which the ranks differ gives out nothing more.
func (m *Memory) exchange(ctx context.Context, mine *Record, failure error) ([]Record, error) {
	records, err := exchange(ctx, m.group, mine, failure)
	if err == nil {
		m.capability.Store(int64(slices.MinFunc(records, func(a, b Record) int { return a.Capability - b.Capability }).Capability))
	}
	if err == nil || records == nil {
		return records, err
	}
	number, _ := heapDifference(records)
	for _, h := range m.heaps {
		if h.number == number {
			h.mu.Lock()
			h.broken = err
			h.mu.Unlock()
		}
	}
	return nil, err
}

// heapDifference finds the first heap in which the ranks differ. Every rank finds the same.
func heapDifference(records []Record) (number uint64, differ *group.MismatchError) {
	for _, s := range records[0].Heaps {
		states := make([]*HeapState, 0, len(records))
		for r := range records {
			if i := slices.IndexFunc(records[r].Heaps, func(other HeapState) bool { return other.Number == s.Number }); i >= 0 {
				states = append(states, &records[r].Heaps[i])
			}
		}
		if len(states) < len(records) {
			continue // it is kept on a rank that could not close it
		}
		if differ := compareStates(states); differ != nil {
			return s.Number, differ
		}
	}
	return 0, nil
}

// compareStates gives the difference between the ranks' states of one heap, by rank; nil if there is none.
func compareStates(states []*HeapState) *group.MismatchError {
	least, most, exact := states[0].Count, states[0].Count, true
	oldest := uint64(1) // that all remember
	for _, s := range states {
		least, most, exact = min(least, s.Count), max(most, s.Count), exact && s.Exact
		oldest = max(oldest, s.Count-uint64(len(s.Recent))+1)
	}
	for n := oldest; n <= least; n++ {
		if same(states, n) {
			continue
		}
		what := fmt.Sprintf("request %d of heap %d", n, states[0].Number)
		if n == oldest && n > 1 {
			what = fmt.Sprintf("request %d of heap %d, or one before it", n, states[0].Number)
		}
		return disagree(what, states, n)
	}
	if exact && most > least {
		return disagree(fmt.Sprintf("request %d of heap %d", least+1, states[0].Number), states, least+1)
	}
	return nil
}

// same reports whether all ranks have asked for the same up to request n.
func same(states []*HeapState, n uint64) bool {
	first, _ := states[0].at(n)
	return !slices.ContainsFunc(states, func(s *HeapState) bool { r, _ := s.at(n); return r.Hash != first.Hash })
}

// disagree is the error of ranks that differ in request n.
func disagree(what string, states []*HeapState, n uint64) *group.MismatchError {
	differ := &group.MismatchError{What: what}
	for _, s := range states {
		text := fmt.Sprintf("no such request after %d", s.Count)
		if r, ok := s.at(n); ok {
			text = r.What
		} else if n < s.Count {
			text = fmt.Sprintf("%d requests", s.Count)
		}
		differ.Values = append(differ.Values, text)
	}
	return differ
}
