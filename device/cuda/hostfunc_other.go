//go:build !linux || !(amd64 || arm64)

package cuda

// hostFuncAddress is 0 where there is no driver: a simulator calls RunHostFunc by itself.
func hostFuncAddress() uintptr { return 0 }
