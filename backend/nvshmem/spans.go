package nvshmem

import "slices"

// span is a range of memory.
type span struct{ start, bytes int64 }

// spans is free memory: sorted, never adjacent.
type spans []span

// take cuts bytes from the first span that has them and returns their place; it reports whether there was one.
func (s *spans) take(bytes int64) (start int64, ok bool) {
	i := slices.IndexFunc(*s, func(f span) bool { return f.bytes >= bytes })
	if i < 0 {
		return 0, false
	}
	f := &(*s)[i]
	start = f.start
	f.start, f.bytes = f.start+bytes, f.bytes-bytes
	if f.bytes == 0 {
		*s = slices.Delete(*s, i, i+1)
	}
	return start, true
}

// give puts bytes back, joining them with their neighbours.
func (s *spans) give(g span) {
	i, _ := slices.BinarySearchFunc(*s, g.start, func(f span, start int64) int { return int(max(min(f.start-start, 1), -1)) })
	*s = slices.Insert(*s, i, g)
	if i+1 < len(*s) && (*s)[i].start+(*s)[i].bytes == (*s)[i+1].start {
		(*s)[i].bytes += (*s)[i+1].bytes
		*s = slices.Delete(*s, i+1, i+2)
	}
	if i > 0 && (*s)[i-1].start+(*s)[i-1].bytes == (*s)[i].start {
		(*s)[i-1].bytes += (*s)[i].bytes
		*s = slices.Delete(*s, i, i+1)
	}
}
