package errs

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Ranks returns ranks as "rank 7" or "ranks 0-3, 7": runs of three or more are folded, so that a thousand ranks stay readable.
func Ranks(ranks []int) string {
	if len(ranks) == 1 {
		return "rank " + strconv.Itoa(ranks[0])
	}
	return "ranks " + FoldRanks(ranks, ", ")
}

// FoldRanks returns the numbers alone, ascending, with a separator of the caller's.
func FoldRanks(ranks []int, separator string) string {
	if !slices.IsSorted(ranks) {
		ranks = slices.Sorted(slices.Values(ranks))
	}
	var b strings.Builder
	for i := 0; i < len(ranks); {
		j := i
		for j+1 < len(ranks) && ranks[j+1] == ranks[j]+1 {
			j++
		}
		if j-i < 2 { // a run of two is shorter as a list
			j = i
		}
		if b.Len() > 0 {
			b.WriteString(separator)
		}
		b.WriteString(strconv.Itoa(ranks[i]))
		if j > i {
			b.WriteString("-" + strconv.Itoa(ranks[j]))
		}
		i = j + 1
	}
	return b.String()
}

// Reasons collects the reasons of ranks, and lists a reason that many ranks have once. The zero Reasons is empty.
type Reasons struct {
	order []reason // by the first rank that had it
	ranks map[reason][]int
}

type reason struct{ of, text string }

// Add adds a rank's reason. of, which may be empty, is what the reason is about, and stands before the ranks: "native on ".
func (r *Reasons) Add(of string, rank int, text string) {
	if r.ranks == nil {
		r.ranks = make(map[reason][]int)
	}
	key := reason{of, text}
	if r.ranks[key] == nil {
		r.order = append(r.order, key)
	}
	r.ranks[key] = append(r.ranks[key], rank)
}

// oneLine makes one line of the text of an error that has several.
var oneLine = strings.NewReplacer(":\n\t", ": ", "\n\t", "; ", "\n", "; ")

// Text returns the reasons behind a head, each once with the ranks that had it: "head: ranks 0-2, 5: reason". If there are several, each is on a line
// of its own.
func (r *Reasons) Text(head string) string {
	const most = 16 // a thousand ranks may fail each in its own way; the fields of the errors have them all
	lines := make([]string, 0, most+1)
	left := 0
	for i, key := range r.order {
		if i < most {
			lines = append(lines, key.of+Ranks(r.ranks[key])+": "+oneLine.Replace(key.text))
		} else {
			left += len(r.ranks[key])
		}
	}
	if left > 0 {
		lines = append(lines, fmt.Sprintf("and %d more", left))
	}
	if len(lines) == 1 {
		return head + ": " + lines[0]
	}
	return head + ":\n\t" + strings.Join(lines, "\n\t")
}
