package dl

import (
	"errors"
	"fmt"
	"strings"
)

// Advice splits the text of err into what went wrong and what to do about it. fix is empty if no error of this package is in err, or
// none that knows what to do: then reason says all there is.
func Advice(err error) (reason, fix string) {
	hint := ""
	if load, ok := errors.AsType[*LoadError](err); ok {
		hint = load.Hint
		fix = hint
		if found, ok := load.Found(); ok {
			// The library is there: installing the same one again would change nothing.
			fix = repair(found)
			if hint != "" {
				fix += ", or " + hint
			}
		}
	} else if lacking, ok := errors.AsType[*SymbolError](err); ok {
		hint = lacking.Hint
		fix = hint
	} else if call, ok := errors.AsType[*Error](err); ok {
		hint = call.Hint
		fix = hint
	}
	if reason = err.Error(); hint != "" {
		reason = strings.ReplaceAll(reason, "; "+hint, "")
	}
	return reason, fix
}

// repair says what to do about a file that is there and cannot be loaded.
func repair(a Attempt) string {
	const lacking = ": cannot open shared object file: No such file or directory"
	if needed, ok := strings.CutSuffix(a.Text, lacking); ok && needed != a.Path {
		return fmt.Sprintf("install %s, which %s needs", needed, a.Path)
	}
	return fmt.Sprintf("replace or remove %s, which cannot be loaded", a.Path)
}
