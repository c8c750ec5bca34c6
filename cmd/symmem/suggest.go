package main

import (
	"fmt"
	"strings"

	"github.com/agnivade/levenshtein"
)

// maxTypos is how many letters may be wrong in a text for which another one is suggested.
const maxTypos = 2

// nearest gives the allowed text that value was most likely meant to be, or "" if it is like none.
func nearest(value string, allowed []string) string {
	value = strings.ToLower(value)
	best, fewest := "", maxTypos+1
	for _, a := range allowed {
		n := levenshtein.ComputeDistance(value, strings.ToLower(a))
		if n >= len(value) && n > 0 {
			continue // nothing of it would be left
		}
		if n < fewest {
			best, fewest = a, n
		}
	}
	if best != "" || value == "" {
		return best
	}
	for _, a := range allowed {
		if strings.HasPrefix(a, value) {
			return a
		}
	}
	return ""
}

// didYouMean is what an error that refuses value ends with: a suggestion, or nothing.
func didYouMean(value string, allowed []string) string {
	if meant := nearest(value, allowed); meant != "" && meant != value {
		return fmt.Sprintf(" (did you mean %s?)", meant)
	}
	return ""
}

// jsonUsage is what --json says on every command that has it: it means the same on all.
const jsonUsage = "print the results as JSON on the standard output, instead of text"
