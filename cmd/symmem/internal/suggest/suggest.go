// Package suggest finds what was most likely meant by a mistyped flag or value.
package suggest

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/agnivade/levenshtein"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// MaxTypos is how many letters may be wrong for a suggestion to be made.
const MaxTypos = 2

// nearest returns the allowed text that value was most likely meant to be, or "" if value is like none of them.
func nearest(value string, allowed []string) string {
	value = strings.ToLower(value)
	best, fewest := "", MaxTypos+1
	for _, a := range allowed {
		n := levenshtein.ComputeDistance(value, strings.ToLower(a))
		if n >= len(value) && n > 0 {
			continue // nothing of it would be left
		}
		if n < fewest || n == fewest && strings.HasPrefix(a, value) {
			best, fewest = a, n
		}
	}
	if best != "" || value == "" {
		return best
	}
	// Somebody may have written only the beginning of it.
	if i := slices.IndexFunc(allowed, func(a string) bool { return strings.HasPrefix(a, value) }); i >= 0 {
		return allowed[i]
	}
	return ""
}

// DidYouMean returns what to append to an error that refuses value: " (did you mean host?)", or "" if value is like nothing that is
// allowed.
func DidYouMean(value string, allowed []string) string {
	if meant := nearest(value, allowed); meant != "" && meant != value {
		return fmt.Sprintf(" (did you mean %s?)", meant)
	}
	return ""
}

// Flag adds a suggestion to the error of an unknown flag. It returns any other error unchanged.
func Flag(cmd *cobra.Command, err error) error {
	unknown, ok := errors.AsType[*pflag.NotExistError](err)
	if !ok {
		return err
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden {
			names = append(names, f.Name)
		}
	})
	if meant := nearest(unknown.GetSpecifiedName(), names); meant != "" && len(unknown.GetSpecifiedName()) > 1 {
		return fmt.Errorf("%w (did you mean --%s?)", err, meant)
	}
	return err
}
