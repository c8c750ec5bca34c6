package kernels

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// The loops of simd_amd64.s. A block is 128 bytes of the wider of the two sides; blocks is at least 1.

//go:noescape
func addF32(dst, x, y unsafe.Pointer, blocks int)

//go:noescape
func addF64(dst, x, y unsafe.Pointer, blocks int)

//go:noescape
func mulF32(dst, x, y unsafe.Pointer, blocks int)

//go:noescape
func mulF64(dst, x, y unsafe.Pointer, blocks int)

//go:noescape
func addI8(dst, x, y unsafe.Pointer, blocks int)

//go:noescape
func addI16(dst, x, y unsafe.Pointer, blocks int)

//go:noescape
func addI32(dst, x, y unsafe.Pointer, blocks int)

//go:noescape
func addI64(dst, x, y unsafe.Pointer, blocks int)

//go:noescape
func loadBF16(dst *float32, src *uint16, blocks int)

//go:noescape
func loadF16(dst *float32, src *uint16, blocks int)

//go:noescape
func storeBF16(dst *uint16, src *float32, blocks int)

//go:noescape
func storeF16(dst *uint16, src *float32, blocks int)

// hasSIMD: AVX2 came with processors that all have F16C (Intel Haswell, AMD Excavator).
var hasSIMD = cpu.X86.HasAVX2

// wideCombine gives the loop that combines whole blocks of elements of T, or nil if there is none.
func wideCombine[T number](op Op) func(dst, x, y unsafe.Pointer, blocks int) {
	if !hasSIMD {
		return nil
	}
	var zero T
	switch any(zero).(type) {
	case float32:
		switch op {
		case Sum, Avg:
			return addF32
		case Prod:
			return mulF32
		}
	case float64:
		switch op {
		case Sum, Avg:
			return addF64
		case Prod:
			return mulF64
		}
	default:
		if op != Sum && op != Avg {
			return nil
		}
		switch unsafe.Sizeof(zero) { // adding wraps around alike with and without sign
		case 1:
			return addI8
		case 2:
			return addI16
		case 4:
			return addI32
		case 8:
			return addI64
		}
	}
	return nil
}
