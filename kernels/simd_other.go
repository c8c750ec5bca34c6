//go:build !amd64

package kernels

import "unsafe"

// hasSIMD is false: on this processor all loops are in Go.
const hasSIMD = false

func wideCombine[T number](Op) func(dst, x, y unsafe.Pointer, blocks int) { return nil }

func loadBF16(*float32, *uint16, int)  {}
func loadF16(*float32, *uint16, int)   {}
func storeBF16(*uint16, *float32, int) {}
func storeF16(*uint16, *float32, int)  {}
