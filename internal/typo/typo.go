// Package typo tells what may be a typing error of a name from what is another word.
package typo

import (
	"slices"

	"github.com/agnivade/levenshtein"
)

// Slips returns how many slips make given of name: letters that are wrong, missing or too many, or two that have changed places. like is false if
// given is another word: there are more slips than a third of the longer one has letters. Where letters are only missing, or only too many, as in
// abbreviations, a half may be.
func Slips(given, name string) (n int, like bool) {
	longer := max(len(given), len(name))
	apart := longer - min(len(given), len(name))
	if 2*apart > longer {
		return longer, false // names of any length come from outside; comparing these would take long
	}
	n = levenshtein.ComputeDistance(given, name)
	if n == 2 && swapped(given, name) {
		n = 1
	}
	return n, n <= max(1, longer/3) || n == apart
}

// swapped reports whether both have the same letters, two of them in each other's places.
func swapped(a, b string) bool {
	one, two := []byte(a), []byte(b)
	slices.Sort(one)
	slices.Sort(two)
	return slices.Equal(one, two)
}
