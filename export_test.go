package symmem

import (
	"slices"

	"github.com/symmem/symmem/tensor"
)

// KeepPlans makes the rank keep at most so many plans for its collectives.
func (r *Rank) KeepPlans(most int) { r.calls.most = most }

// KeptPlans is how many plans the rank keeps, and how many it has made.
func (r *Rank) KeptPlans() (kept, made int) { return r.calls.recent.Len(), int(r.calls.next) }

// Open reports whether no Close of the rank is under way or has ended.
func (r *Rank) Open() bool { return r.open() }

// MakesSub reports whether a sub-group of the rank is being made.
func (r *Rank) MakesSub() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.making > 0
}

// ReverseSubs makes the rank's sub-groups as if each had been made before those that were there.
func ReverseSubs(r *Rank) {
	r.mu.Lock()
	defer r.mu.Unlock()
	slices.Reverse(r.subs)
}

// HoldCalls holds the rank's collectives up, as one does that enqueues its plan on a stream that is full, until the func that it gives is called.
func HoldCalls(r *Rank) (release func()) {
	r.calls.mu.Lock()
	return r.calls.mu.Unlock
}

// EndPlans makes the plans that the rank keeps such that a tensor of theirs was closed.
func EndPlans(r *Rank) {
	r.calls.mu.Lock()
	defer r.calls.mu.Unlock()
	for e := r.calls.recent.Front(); e != nil; e = e.Next() {
		e.Value.(*cachedPlan).tensors = []tensor.SymmetricTensor{&tensor.Tensor{}}
	}
}

// LogRefusals is logRefusals.
var LogRefusals = logRefusals
