package symmem

// KeepPlans makes the rank keep at most so many plans for its collectives.
func (r *Rank) KeepPlans(most int) { r.calls.most = most }

// KeptPlans is how many plans the rank keeps, and how many it has made.
func (r *Rank) KeptPlans() (kept, made int) { return r.calls.recent.Len(), int(r.calls.next) }
