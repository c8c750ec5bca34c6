// Package suggest finds what was most likely meant by a mistyped flag or value.
package suggest

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/symmem/symmem/internal/typo"
)

// maxTypos is how many letters may be wrong for a suggestion to be made.
const maxTypos = 2

// nearest returns the allowed text that value was most likely meant to be, or "" if value is like none of them.
func nearest(value string, allowed []string) string {
	value = strings.ToLower(value)
	best, fewest := "", maxTypos+1
	for _, a := range allowed {
		n, like := typo.Slips(value, strings.ToLower(a))
		if !like || n >= len(value) && n > 0 {
			continue // little or nothing of it would be left
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

// Flag adds a suggestion to the error of an unknown flag, and says what is allowed to that of a flag whose value cannot be read. It returns any other error
// unchanged.
func Flag(cmd *cobra.Command, err error) error {
	if wrong, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		return value(wrong)
	}
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

// forms are what the values of flags look like, by their types, whose own errors name functions of Go's library. Other types say it themselves.
var forms = map[string]string{
	"int": "a whole number", "uint64": "a whole number from 0", "bool": "true or false", "duration": "a duration with its unit, like 90s or 2m",
}

// value is the error of a flag whose value cannot be read, with what is allowed and what the flag means, where its bounds are.
func value(wrong *pflag.InvalidValueError) error {
	f := wrong.GetFlag()
	form, ok := forms[f.Value.Type()]
	if !ok {
		return wrong
	}
	name := "--" + f.Name
	if f.Shorthand != "" {
		name = "-" + f.Shorthand + ", " + name
	}
	given := wrong.GetValue()
	const most = 80
	if len(given) > most {
		return fmt.Errorf("invalid argument %q… (%d bytes) for %q: allowed is %s (%s)", given[:most], len(given), name, form, f.Usage)
	}
	return fmt.Errorf("invalid argument %q for %q: allowed is %s (%s)", given, name, form, f.Usage)
}
