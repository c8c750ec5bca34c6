package survey

import (
	"errors"

	"github.com/symmem/symmem/backend"
	"github.com/symmem/symmem/internal/dl"
)

// Failed returns the answer for a library of that name that could not be loaded or used because of err. fix is what to do about it
// where the error does not say it itself.
func Failed(name string, err error, fix string) backend.Library {
	l := backend.Library{Name: name, State: "unusable", Reason: err.Error(), Fix: fix}
	if load, ok := errors.AsType[*dl.LoadError](err); ok {
		if found, ok := load.Found(); ok {
			l.Path, l.Reason = found.Path, found.Reason()
		} else {
			l.State, l.Reason = "missing", ""
		}
		for _, a := range load.Attempts {
			l.Tried = append(l.Tried, a.String())
		}
	}
	reason, advice := dl.Advice(err)
	if advice != "" {
		l.Fix = advice
	}
	if l.Reason == err.Error() {
		l.Reason = reason
	}
	return l
}
