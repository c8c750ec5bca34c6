package dl

import "github.com/symmem/symmem/internal/errs"

// The errors of native libraries. They are defined in package errs, so that programs without native libraries can name them too.
type (
	Attempt     = errs.Attempt     // one path or name at which a library was looked for
	LoadError   = errs.LoadError   // a library that could not be loaded
	SymbolError = errs.SymbolError // a function that a loaded library does not have
	Error       = errs.CallError   // a native call that failed
	StuckError  = errs.StuckError  // something that a library had not done in time
)
