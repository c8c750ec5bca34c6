package collective

// Tenants is how many plans of this process count as waiting for peers.
func Tenants() int {
	tenants.Lock()
	defer tenants.Unlock()
	n := 0
	for _, of := range tenants.of {
		n += len(of)
	}
	return n
}

// Patient reports whether the kernel of a plan on the host device looks for its peers for long before it sleeps.
func (p *Plan) Patient() bool {
	w, ok := p.work.(*hostWork)
	return ok && w.run.patience != nil
}
