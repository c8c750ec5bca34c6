package survey

import (
	"errors"
	"strings"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/internal/dl"
)

// Failed is the answer for a library of that name that could not be loaded or used because of err. fix is what to do about it
// where the error does not say it itself.
func Failed(name string, err error, fix string) backend.Library {
	l := backend.Library{Name: name, State: backend.LibraryUnusable, Reason: err.Error(), Fix: fix}
	hint := ""
	if load, ok := errors.AsType[*dl.LoadError](err); ok {
		hint = load.Hint
		if found, ok := load.Found(); ok {
			l.Path, l.Reason = found.Path, found.Reason()
		} else {
			l.State, l.Reason = backend.LibraryMissing, ""
		}
		for _, a := range load.Attempts {
			l.Tried = append(l.Tried, a.String())
		}
	} else if lacking, ok := errors.AsType[*dl.SymbolError](err); ok {
		hint = lacking.Hint
	} else if call, ok := errors.AsType[*dl.Error](err); ok {
		hint = call.Hint
	}
	if hint != "" {
		l.Fix = hint
		l.Reason = strings.ReplaceAll(l.Reason, "; "+hint, "")
	}
	return l
}
