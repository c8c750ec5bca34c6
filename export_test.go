package symmem

// KeepPlans makes the rank keep at most so many plans for its collectives.
func (r *Rank) KeepPlans(most int) { r.calls.most = most }

// KeptPlans is how many plans the rank keeps, and how many it has made.
func (r *Rank) KeptPlans() (kept, made int) { return r.calls.recent.Len(), int(r.calls.next) }

// MakesPlan reports whether a collective of the rank is making its plan, or waits for a turn to do so.
func (r *Rank) MakesPlan() bool {
	r.calls.mu.Lock()
	defer r.calls.mu.Unlock()
	return r.calls.making > 0
}

// Open reports whether no Close of the rank is under way or has ended.
func (r *Rank) Open() bool { return r.open() }
