package ptxvm

import (
	"math"
	"slices"
)

// Schedule decides which thread goes on. A nil one in a [Config] is chance: any thread that can go on, each as likely as the others, but with
// weak memory some of them more often than others, and for most of the time those less often that only poll. A schedule has state, so each machine has its own.
type Schedule interface {
	// begun is told of each thread when it begins.
	begun(m *Machine, t *thread)
	// pick gives one of m.ready, which is not empty.
	pick(m *Machine) *thread
	// exact says that a turn is a single step.
	exact() bool
}

// anyone picks any thread. But with weak memory, most of the time, those whose last turn was in vain, since they have stored nothing and seen nothing new, have at most every fourth turn
// together where others have something to do: else a machine whose threads wait for one of them would do little but poll.
func (m *Machine) anyone() int {
	n := len(m.ready)
	if m.even || m.eager == 0 || m.eager == n {
		return m.choose.Choose(n)
	}
	k := m.choose.Choose(m.eager + min(n-m.eager, m.eager/3+1))
	if k >= m.eager {
		k = m.eager + m.choose.Choose(n-m.eager)
	}
	return k
}

// chance picks a thread.
func (m *Machine) chance() *thread {
	k := m.anyone()
	if m.weak && m.turn > 1 {
		// Some threads are slower than others, so that one may be far behind.
		for range m.choose.Choose(4) {
			if o := m.anyone(); m.ready[o].pace > m.ready[k].pace {
				k = o
			}
		}
	}
	return m.ready[k]
}

// Even is chance, but that threads that only poll always have as many turns as others. It takes longer, and shows sooner what a thread does that polls at the right time.
func Even() Schedule { return even{} }

type even struct{}

func (even) exact() bool { return false }

func (even) begun(*Machine, *thread) {}

func (even) pick(m *Machine) *thread { return m.chance() }

// Slow is chance, but that some threads have only one turn where others have so many: those of one device, say, or of one block. which is asked for each thread
// when it begins.
func Slow(times int, which func(Thread) bool) Schedule {
	return &slow{times: max(times, 1), which: which}
}

type slow struct {
	times int
	which func(Thread) bool
}

func (s *slow) exact() bool { return false }

func (s *slow) begun(m *Machine, t *thread) { t.slow = s.which(m.who(t)) }

func (s *slow) pick(m *Machine) *thread {
	for {
		if t := m.chance(); !t.slow || m.choose.Choose(s.times) == 0 {
			return t
		}
	}
}

// PCT is probabilistic concurrency testing: Burckhardt, Kothari, Musuvathi and Nagarakatti, "A Randomized Scheduler with Probabilistic Guarantees of Finding
// Bugs", ASPLOS 2010. Each thread has a priority by chance, all of them above depth; of those that can go on, the one with the highest always does, but that at
// depth-1 steps, chosen by chance from the first steps of the run, the thread that would go on gets a priority below all others: i at the i-th of them. A bug that
// needs depth orderings between steps of n threads is found with a probability of at least 1/(n * steps^(depth-1)), if a run takes no more steps than that.
//
// A step is a turn: with weak memory an access or the like, and Config.Turn does not matter; else the instructions up to a branch.
//
// The algorithm needs runs that end under every schedule. Kernels wait in loops, for ever if a thread that they wait for has a lower priority. So a thread that
// has gone round a loop twice and has seen nothing new there is one that cannot go on, until another one stores.
func PCT(seed uint64, depth int, steps uint64) Schedule {
	p := &pct{choose: Random(seed), depth: max(depth, 1)}
	for range p.depth - 1 {
		n := min(max(steps, 1), math.MaxInt)
		p.changes = append(p.changes, 1+uint64(p.choose.Choose(int(n))))
	}
	slices.Sort(p.changes)
	return p
}

type pct struct {
	choose  Chooser
	depth   int
	steps   uint64
	changes []uint64 // steps before which a priority changes, those to come
	changed int
	current *thread
}

func (p *pct) exact() bool { return true }

func (p *pct) begun(m *Machine, t *thread) {
	t.priority = uint64(p.depth + p.choose.Choose(math.MaxInt-p.depth))
	m.woken = true
}

func (p *pct) pick(m *Machine) *thread {
	p.steps++
	t := p.highest(m)
	for len(p.changes) > 0 && p.steps >= p.changes[0] {
		p.changes = p.changes[1:]
		p.changed++
		t.priority = uint64(p.changed)
		p.current = nil
		t = p.highest(m)
	}
	return t
}

func (p *pct) highest(m *Machine) *thread {
	if t := p.current; t != nil && !m.woken && t.status == running && !m.spinning(t) {
		return t
	}
	m.woken = false
	var best *thread
	for _, t := range m.ready {
		if (best == nil || t.priority > best.priority) && !m.spinning(t) {
			best = t
		}
	}
	if best == nil { // all wait for time, or have not seen what is there
		best = m.ready[p.choose.Choose(len(m.ready))]
		p.current = nil
		return best
	}
	p.current = best
	return best
}
