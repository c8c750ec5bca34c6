// Package suggest finds what somebody who mistyped most likely meant.
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

// MaxTypos is how many letters may be wrong in a text for which another one is suggested.
const MaxTypos = 2

// nearest gives the allowed text that value was most likely meant to be, or "" if it is like none.
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

// DidYouMean gives the end of an error that refuses value: " (did you mean host?)", or "" if value is like none of those allowed.
func DidYouMean(value string, allowed []string) string {
	if meant := nearest(value, allowed); meant != "" && meant != value {
		return fmt.Sprintf(" (did you mean %s?)", meant)
	}
	return ""
}

// Flag adds to the error of a flag that does not exist the one that was most likely meant. Any other error comes back as it is.
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
