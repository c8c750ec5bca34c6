package tuning

import "iter"

// Set is the tables that a rank goes by, the one that is asked first in front. All ranks of a group have the same.
//
// A Set is not changed once it is in use, and may be used by several goroutines at once.
type Set struct {
	Tables    []*Table
	Link      string // that joins the devices, of Links; "" where it is not known
	Multicast bool   // every rank's memory can have multicast addresses, so that rules for such count
}

// Rules yields the rules for a collective between ranks of a dtype, in the order in which they are asked.
func (s *Set) Rules(collective string, ranks int, dtype string) iter.Seq[*Rule] {
	return func(yield func(*Rule) bool) {
		for _, t := range s.Tables {
			for _, multicast := range []bool{true, false} {
				if multicast && !s.Multicast {
					continue
				}
				if r := t.Find(collective, ranks, dtype, multicast); r != nil && !yield(r) {
					return
				}
			}
		}
	}
}

// Choose returns the step that a message goes by: of the first rule that has one, the first whose size, vectors and form fit. If no rule has any for the size,
// it is the last step of a rule whose form fits. usable reports whether the form of a step can be taken at all. ok is false if no rule has any that can.
func (s *Set) Choose(collective string, ranks int, dtype string, bytes int64, whole bool, usable func(*Step) bool) (found Step, ok bool) {
	var last *Step
	for r := range s.Rules(collective, ranks, dtype) {
		var mine *Step
		for i := range r.Steps {
			step := &r.Steps[i]
			if step.WholeVectors && !whole || !usable(step) {
				continue
			}
			if mine = step; step.UpTo == 0 || bytes <= int64(step.UpTo) {
				return *step, true
			}
		}
		if last == nil {
			last = mine
		}
	}
	if last == nil {
		return Step{}, false
	}
	return *last, true
}

// Names says which tables are in use, in one line.
func (s *Set) Names() string {
	text := ""
	for i, t := range s.Tables {
		if i > 0 {
			text += ", else "
		}
		text += t.Name
	}
	return text
}
