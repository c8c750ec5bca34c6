package ptx

import (
	"slices"
	"structs"
)

// QuantizedBlock is how many elements have a scale together, and QuantizedBytes what they are with it.
const (
	QuantizedBlock = 64
	QuantizedBytes = 68
)

// Quantized is the parameter of the kernels of the all-reduce of int8 blocks, by value: see kernels/cuda/quantized.cu.
type Quantized struct {
	_ structs.HostLayout

	In     uint64
	Out    uint64
	Count  uint64 // elements
	Shard  uint64 // blocks that a rank sums
	Span   uint64 // bytes of an image
	Images uint64
	Sum    uint64
	Op     uint32
	World  uint32
}

// QuantizedShard is how many blocks of n elements each rank sums, and QuantizedSpan the size of the image of so many.
func QuantizedShard(n int64, world int) int64 {
	blocks := (n + QuantizedBlock - 1) / QuantizedBlock
	return (blocks + int64(world) - 1) / int64(world)
}

// QuantizedSpan is Quantized.Span.
func QuantizedSpan(shard int64) int64 { return roundUp(shard*QuantizedBytes, 128) }

// QuantizedAllReduce finds the kernel that takes Comm and Quantized.
func QuantizedAllReduce(dtype string) (Kernel, bool) {
	return quantizedKernel(dtype, "quantized_"+dtype+"_wn")
}

// Quantize, QuantizedSum and Dequantize find the kernels that take Quantized alone: elements to images, images to one of their sum, and
// images to elements.
func Quantize(dtype string) (Kernel, bool) { return quantizedKernel(dtype, "quantize_"+dtype) }

// QuantizedSum is the second.
func QuantizedSum(dtype string) (Kernel, bool) { return quantizedKernel(dtype, "quantized_sum") }

// Dequantize is the third.
func Dequantize(dtype string) (Kernel, bool) { return quantizedKernel(dtype, "dequantize_"+dtype) }

func quantizedKernel(dtype, name string) (Kernel, bool) {
	return Kernel{File: "quantized_" + dtype + ".ptx", Name: "symmem_" + name}, slices.Contains(pushable, dtype)
}
