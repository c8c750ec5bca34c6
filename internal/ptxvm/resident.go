package ptxvm

import (
	"fmt"
	"slices"
)

// Limits is what a device has room for at the same time. The zero value is room for everything.
type Limits struct {
	Multiprocessors int // 0: there are no limits
	Blocks          int // of one multiprocessor, whatever launches they are of; 0: as many as there are threads for
	Threads         int // of one multiprocessor; 0: as many as there are blocks for
	Shared          int // bytes of one multiprocessor; 0: enough

	Last func(Thread) bool // whether a block begins only where there is room and no other block waits for it, by its first thread; nil: none does. A cluster is last if a block of it is
}

func (l Limits) holds(blocks, threads, shared int) bool {
	return (l.Blocks == 0 || blocks <= l.Blocks) && (l.Threads == 0 || threads <= l.Threads) && (l.Shared == 0 || shared <= l.Shared)
}

// Limit gives a device limits, before anything is launched on it. A block begins only when a multiprocessor has room for it, and keeps its place until all
// of its threads have ended: nothing takes it away. Which block begins where there is room for one, of all launches that have begun on the device and of all of
// their blocks, is chosen, but that those of Limits.Last come last.
func (m *Machine) Limit(device int, l Limits) {
	d := &floor{limits: l}
	for range l.Multiprocessors {
		d.processors = append(d.processors, processor{})
	}
	if m.floors == nil {
		m.floors = map[int]*floor{}
	}
	delete(m.floors, device)
	if l.Multiprocessors > 0 {
		m.floors[device] = d
	}
}

// floor is the room of a device.
type floor struct {
	limits     Limits
	processors []processor
	waiting    []*launch // with blocks that have not begun
}

type processor struct{ blocks, threads, shared int }

// place gives a processor to each of so many blocks of a launch, breadth first; nil if there is no room for all. The processors become as if these had begun.
func (d *floor) place(processors []processor, l *launch, n int) (where []int) {
	for range n {
		best := -1
		for i, p := range processors {
			if d.limits.holds(p.blocks+1, p.threads+l.threads(), p.shared+l.f.module.bytes) && (best < 0 || p.threads < processors[best].threads) {
				best = i
			}
		}
		if best < 0 {
			return nil
		}
		p := &processors[best]
		p.blocks++
		p.threads += l.threads()
		p.shared += l.f.module.bytes
		where = append(where, best)
	}
	return where
}

// fits fails if not even one block of a launch has room, or one cluster.
func (m *Machine) fits(l *launch) error {
	d := m.floors[l.stream.device]
	if d == nil || d.place(make([]processor, len(d.processors)), l, l.f.Cluster) != nil {
		return nil
	}
	if n := l.f.Cluster; n > 1 && d.limits.holds(1, l.threads(), l.f.module.bytes) {
		return fmt.Errorf("launching %s: device %d has no room for a cluster of %d blocks of %d threads and %d bytes of shared memory: %w",
			l.f.Name, l.stream.device, n, l.threads(), l.f.module.bytes, ErrUnsupported)
	}
	return fmt.Errorf("launching %s: no multiprocessor of device %d has room for a block of %d threads and %d bytes of shared memory: %w",
		l.f.Name, l.stream.device, l.threads(), l.f.module.bytes, ErrUnsupported)
}

func (l *launch) threads() int { return int(l.dim[0] * l.dim[1] * l.dim[2]) }

// waits says whether a block has not begun.
func (b *block) waits() bool { return b.live > 0 && b.threads[0].status == atRoom }

// admit lets blocks begin for which there is room. Those of a cluster begin together.
func (m *Machine) admit(d *floor) {
	for len(d.waiting) > 0 {
		// Those that fit somewhere: of one launch all blocks are alike.
		var able []*launch
		var where [][]int
		waiting := d.waiting
		if d.limits.Last != nil {
			if first := slices.DeleteFunc(slices.Clone(waiting), func(l *launch) bool { return len(m.notLast(d, l)) == 0 }); len(first) > 0 {
				waiting = first
			}
		}
		for _, l := range waiting {
			if all := d.place(slices.Clone(d.processors), l, l.f.Cluster); all != nil {
				able, where = append(able, l), append(where, all)
			}
		}
		if len(able) == 0 {
			return
		}
		k := 0
		if len(able) > 1 {
			k = m.choose.Choose(len(able))
		}
		l := able[k]
		among := m.notLast(d, l)
		if len(among) == 0 {
			among = l.outside
		}
		b := among[0]
		if n := len(among); n > 1 {
			b = among[m.choose.Choose(n)]
		}
		l.outside = slices.DeleteFunc(l.outside, func(o *block) bool { return o == b })
		if len(l.outside) == 0 {
			d.waiting = slices.DeleteFunc(d.waiting, func(o *launch) bool { return o == l })
		}
		for i, o := range b.group() {
			o.on = where[k][i]
			p := &d.processors[o.on]
			p.blocks++
			p.threads += l.threads()
			p.shared += l.f.module.bytes
			for j := range o.threads {
				m.wake(&o.threads[j])
			}
		}
	}
}

// notLast are the blocks of a launch that have not begun, but for those that begin last; of clusters the first blocks.
func (m *Machine) notLast(d *floor, l *launch) []*block {
	if d.limits.Last == nil {
		return l.outside
	}
	return slices.DeleteFunc(slices.Clone(l.outside), func(b *block) bool {
		return slices.ContainsFunc(b.group(), func(o *block) bool { return d.limits.Last(m.who(&o.threads[0])) })
	})
}

// vacate is a block that has ended.
func (m *Machine) vacate(b *block) {
	d := m.floors[b.launch.stream.device]
	if d == nil {
		return
	}
	p := &d.processors[b.on]
	p.blocks--
	p.threads -= b.launch.threads()
	p.shared -= b.launch.f.module.bytes
	m.admit(d)
}
