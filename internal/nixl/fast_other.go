//go:build !linux || !(amd64 || arm64)

package nixl

import "github.com/symmem/symmem/internal/dl"

// bindFast does nothing where no library can be loaded.
func bindFast(*dl.Library, *functions) {}
