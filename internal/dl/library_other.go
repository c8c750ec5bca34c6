//go:build !linux || !(amd64 || arm64)

package dl

import (
	"errors"
	"fmt"
	"runtime"
)

func open(string, bool) (uintptr, error)      { return 0, errors.New(unsupportedHere()) }
func symbol(uintptr, string) (uintptr, error) { return 0, errors.New(unsupportedHere()) }
func register(any, uintptr, string) error     { return errors.New(unsupportedHere()) }
func mappedFile(uintptr) (string, error)      { return "", errors.New(unsupportedHere()) }
func signalHandlers() []handler               { return nil }
func changedHandlers(_, _ []handler) []change { return nil }

// unsupportedHere says that this system cannot load libraries.
func unsupportedHere() string {
	return fmt.Sprintf("loading native libraries is supported on linux/amd64 and linux/arm64, this is %s/%s",
		runtime.GOOS, runtime.GOARCH)
}
