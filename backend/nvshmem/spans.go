package nvshmem

import "slices"

// span is bytes of memory from a place on.
type span struct{ start, bytes int64 }

// spans is free memory: sorted, never adjacent.
type spans []span

// fits reports whether one of the spans has so many bytes.
func (s spans) fits(bytes int64) bool {
	return slices.ContainsFunc(s, func(f span) bool { return f.bytes >= bytes })
}

// take cuts bytes from the first span that has them and gives their place; it reports whether there was one.
func (s *spans) take(bytes int64) (start int64, ok bool) {
	i := slices.IndexFunc(*s, func(f span) bool { return f.bytes >= bytes })
	if i < 0 {
		return 0, false
	}
	f := (*s)[i]
	s.remove(span{f.start, bytes})
	return f.start, true
}

// remove takes what is free of the bytes of r out.
func (s *spans) remove(r span) {
	var kept spans
	for _, f := range *s {
		if before := min(r.start, f.start+f.bytes) - f.start; before > 0 {
			kept = append(kept, span{f.start, before})
		}
		if from := max(r.start+r.bytes, f.start); from < f.start+f.bytes {
			kept = append(kept, span{from, f.start + f.bytes - from})
		}
	}
	*s = kept
}

// give puts bytes back. Spans that lie no more than slack bytes apart become one.
func (s *spans) give(g span, slack int64) {
	i, _ := slices.BinarySearchFunc(*s, g.start, func(f span, start int64) int { return int(max(min(f.start-start, 1), -1)) })
	*s = slices.Insert(*s, i, g)
	if i+1 < len(*s) && (*s)[i+1].start-((*s)[i].start+(*s)[i].bytes) <= slack {
		(*s)[i].bytes = (*s)[i+1].start + (*s)[i+1].bytes - (*s)[i].start
		*s = slices.Delete(*s, i+1, i+2)
	}
	if i > 0 && (*s)[i].start-((*s)[i-1].start+(*s)[i-1].bytes) <= slack {
		(*s)[i-1].bytes = (*s)[i].start + (*s)[i].bytes - (*s)[i-1].start
		*s = slices.Delete(*s, i, i+1)
	}
}
