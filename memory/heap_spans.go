package memory

import (
	"cmp"
	"slices"
)

// spans are the free pieces of a heap. The same calls give the same pieces on every rank: that of the best fit, which is the smallest that is large
// enough, and of these the first. Pieces that touch are one.
type spans struct {
	byStart []span // sorted by start
	bySize  []span // sorted by size, and by start where that is the same
	free    int64  // bytes in all
}

func compareStart(a, b span) int { return cmp.Compare(a.start, b.start) }

func compareSize(a, b span) int {
	return cmp.Or(cmp.Compare(a.bytes, b.bytes), cmp.Compare(a.start, b.start))
}

// largest is the size of the largest piece.
func (f *spans) largest() int64 {
	if len(f.bySize) == 0 {
		return 0
	}
	return f.bySize[len(f.bySize)-1].bytes
}

// take cuts bytes from the front of the piece that fits best. No bytes are there always.
func (f *spans) take(bytes int64) (span, bool) {
	if bytes == 0 {
		return span{}, true
	}
	i, _ := slices.BinarySearchFunc(f.bySize, span{bytes: bytes}, compareSize)
	if i == len(f.bySize) {
		return span{}, false
	}
	s := f.bySize[i]
	f.bySize = slices.Delete(f.bySize, i, i+1)
	j, _ := slices.BinarySearchFunc(f.byStart, s, compareStart)
	f.free -= bytes
	if s.bytes == bytes {
		f.byStart = slices.Delete(f.byStart, j, j+1)
		return s, true
	}
	left := span{s.start + bytes, s.bytes - bytes}
	f.byStart[j] = left
	f.addSize(left)
	return span{s.start, bytes}, true
}

// give puts a piece back, joined with its neighbours.
func (f *spans) give(s span) {
	if s.bytes == 0 {
		return
	}
	f.free += s.bytes
	i, _ := slices.BinarySearchFunc(f.byStart, s, compareStart)
	from, to := i, i // the neighbours that s is joined with
	if i < len(f.byStart) && s.start+s.bytes == f.byStart[i].start {
		s.bytes += f.byStart[i].bytes
		f.dropSize(f.byStart[i])
		to++
	}
	if i > 0 && f.byStart[i-1].start+f.byStart[i-1].bytes == s.start {
		s = span{f.byStart[i-1].start, f.byStart[i-1].bytes + s.bytes}
		f.dropSize(f.byStart[i-1])
		from--
	}
	f.byStart = slices.Replace(f.byStart, from, to, s)
	f.addSize(s)
}

func (f *spans) addSize(s span) {
	i, _ := slices.BinarySearchFunc(f.bySize, s, compareSize)
	f.bySize = slices.Insert(f.bySize, i, s)
}

func (f *spans) dropSize(s span) {
	if i, ok := slices.BinarySearchFunc(f.bySize, s, compareSize); ok {
		f.bySize = slices.Delete(f.bySize, i, i+1)
	}
}
