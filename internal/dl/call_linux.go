//go:build amd64 || arm64

package dl

import (
	"sync"

	"github.com/ebitengine/purego"
)

// callArgs are the arguments of a call under way. They come from a pool because a slice that is passed to SyscallN escapes, and calls that are made
// again and again must not allocate.
type callArgs [7]uintptr

var callArgsPool = sync.Pool{New: func() any { return new(callArgs) }}

// Call calls the C function at fn, an address that [Library.Symbol] returned, with the first n of the arguments, which are integers and pointers, and
// returns its result. It takes a third of the time of a function that [Library.Bind] makes, and allocates nothing. What the arguments point to is
// kept alive, and is not moved, during the call.
//
//go:uintptrescapes
func Call(fn uintptr, n int, a, b, c, d, e, f, g uintptr) uintptr {
	args := callArgsPool.Get().(*callArgs)
	*args = callArgs{a, b, c, d, e, f, g}
	r, _, _ := purego.SyscallN(fn, args[:n]...)
	callArgsPool.Put(args)
	return r
}
