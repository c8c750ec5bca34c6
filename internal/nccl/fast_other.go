//go:build !linux || !(amd64 || arm64)

package nccl

import "github.com/symmem/symmem/internal/dl"

// bindFast does nothing where no library can be loaded.
func bindFast(*dl.Library, *Functions) {}
