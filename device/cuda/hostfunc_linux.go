//go:build amd64 || arm64

package cuda

import (
	"sync"

	"github.com/ebitengine/purego"
)

// hostFuncAddress returns the C function that the driver calls back: void (*)(void *data). It is made at first need, and the only
// one of the process.
var hostFuncAddress = sync.OnceValue(func() uintptr {
	return purego.NewCallback(func(data uintptr) { RunHostFunc(data) })
})
