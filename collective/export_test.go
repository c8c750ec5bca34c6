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
