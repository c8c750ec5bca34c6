package ptxvm

import (
	"fmt"
)

// cluster is blocks of a launch that may access each other's shared memory, and meet at a barrier.
//
// An address of shared memory that is of .shared::cluster has, above what it is in its block, the block's rank, exclusive or that of the block whose thread has it.
// So those of the own block are the same as in .shared::cta, and only the thread's own cluster can tell what the others are.
type cluster struct {
	blocks   []*block // by rank
	phase    uint32   // how often the barrier has opened
	arrived  int      // threads, since then, that have not ended
	vectors  *vector  // with weak memory: what those know that release
	lastSeen *vector
	passed   *vector // of the phase before
	waiting  []*thread
}

const rankShift = 24

// group is the block's cluster, or the block alone.
func (b *block) group() []*block {
	if b.cluster == nil {
		return []*block{b}
	}
	return b.cluster.blocks
}

// shares says whether other blocks may access its shared memory.
func (b *block) shares() bool { return b.cluster != nil && len(b.cluster.blocks) > 1 }

// special is the special registers of clusters.
func (b *block) special(which int64) uint32 {
	l := b.launch
	n := uint32(l.f.Cluster)
	switch which {
	case 14, 16:
		return uint32(b.rank)
	case 15, 19:
		return n
	case 20, 21:
		return 1
	case 22:
		return b.index[0] / n
	case 23, 24:
		return b.index[which-22]
	case 25:
		return l.grid[0] / n
	case 26, 27:
		return l.grid[which-25]
	case 28:
		return uint32(bit(l.f.clusters))
	}
	return 0
}

// peer is the block that an address of .shared::cluster is in; nil if the cluster has none there.
func (t *thread) peer(address uint64) *block {
	b := t.block
	by := address >> rankShift
	if by == 0 {
		return b
	}
	if rank := by ^ uint64(b.rank); b.cluster != nil && rank < uint64(len(b.cluster.blocks)) {
		return b.cluster.blocks[rank]
	}
	return nil
}

// mapa is the address in the block of this rank.
func (t *thread) mapa(address, rank uint64) (uint64, error) {
	b := t.block
	switch n := b.launch.f.Cluster; {
	case rank >= uint64(n):
		return 0, fmt.Errorf("rank %d in a cluster of %d: %w", rank, n, ErrAddress)
	case t.peer(address) == nil:
		return 0, fmt.Errorf("%#x of shared memory: %w", address, ErrAddress)
	}
	return (rank^uint64(b.rank))<<rankShift | address&(1<<rankShift-1), nil
}

// remote is the shared memory that an address of .shared::cluster is in, and where. A device makes sure of neither that the block has begun nor that it has not ended.
func (t *thread) remote(address uint64) (*region, uint64, error) {
	b := t.peer(address)
	switch {
	case b == nil:
		return nil, 0, ErrAddress
	case !b.began:
		return nil, 0, fmt.Errorf("block %s has not begun: %w", index(b.index), ErrAddress)
	case b.live == 0:
		return nil, 0, fmt.Errorf("block %s has ended: %w", index(b.index), ErrAddress)
	}
	return b.shared, address & (1<<rankShift - 1), nil
}

// live is how many threads have not ended.
func (c *cluster) live() (n int) {
	for _, b := range c.blocks {
		n += b.live
	}
	return n
}

// arriveCluster is barrier.cluster.arrive.
func (m *Machine) arriveCluster(t *thread, releases bool) error {
	b := t.block
	if b.cluster == nil { // a kernel without clusters: each block is one
		b.cluster = &cluster{blocks: []*block{b}}
	}
	c := b.cluster
	if t.came != 0 {
		return fmt.Errorf("it arrives for the second time and has not waited: %w", ErrBarrier)
	}
	t.came = c.phase + 1
	c.arrived++
	if m.weak && releases {
		if c.vectors == nil {
			c.vectors = t.vector.clone()
		} else if t.vector != c.lastSeen {
			c.vectors.add(t.vector)
		}
		c.lastSeen = t.vector
		set(&c.vectors.events, t.slot, t.clock)
		t.clock++ // what it does before it waits is not among that
	}
	if c.arrived == c.live() {
		m.openCluster(c)
	}
	return nil
}

// waitCluster is barrier.cluster.wait. The thread rests if not all have come.
func (m *Machine) waitCluster(t *thread) error {
	if t.came == 0 {
		return fmt.Errorf("it waits and has not arrived: %w", ErrBarrier)
	}
	c := t.block.cluster
	if t.came-1 == c.phase {
		m.rest(t, atCluster)
		c.waiting = append(c.waiting, t)
		return nil
	}
	m.passCluster(t)
	return nil
}

// passCluster is a thread behind the barrier.
func (m *Machine) passCluster(t *thread) {
	t.came = 0
	if m.weak {
		t.vector = merge(t.vector, t.block.cluster.passed)
	}
}

// openCluster lets those go on that wait. The next phase cannot end before all of this one have waited, so what it passes on stays until then.
func (m *Machine) openCluster(c *cluster) {
	c.phase++
	c.arrived = 0
	c.passed, c.vectors, c.lastSeen = c.vectors, nil, nil
	for _, t := range c.waiting {
		m.passCluster(t)
		m.wake(t)
	}
	c.waiting = c.waiting[:0]
}

// leaveCluster is a thread that has ended. The others wait for it no longer, so that it does not count as one that has arrived, either.
func (m *Machine) leaveCluster(t *thread) {
	c := t.block.cluster
	if t.came != 0 && t.came-1 == c.phase {
		c.arrived--
	}
	if c.arrived == c.live() {
		m.openCluster(c)
	}
}

// endsShared is the end of a block's shared memory, with its last thread. It races with accesses of other blocks that none of its threads are behind.
func (m *Machine) endsShared(t *thread) {
	b := t.block
	if b.shared == nil {
		return
	}
	m.site = site{b, t.number, t.pc - 1, t.f}
	check := func(off uint64, s *site, slot int32, clock uint32) {
		if slot < 0 || s.block == b || b.final != nil && at(b.final.events, slot) >= clock {
			return
		}
		m.fail(t, t.pc-1, m.race(&event{t: t, region: b.shared, off: off}, s))
	}
	for i, w := range b.shared.words {
		if w == nil {
			continue
		}
		for k := range w.locs {
			off := uint64(i*8 + k*int(w.size))
			for j := range w.locs[k].messages {
				x := &w.locs[k].messages[j]
				check(off, &x.site, x.slot, x.clock)
			}
			for j := range w.locs[k].reads {
				x := &w.locs[k].reads[j]
				check(off, &x.site, x.slot, x.last)
			}
		}
	}
}
