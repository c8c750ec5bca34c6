package ptx

import (
	"math"
	"slices"
	"strings"
	"structs"
)

// FaultRMSNorm and FaultQuantized are the kernels of a Fault that are all-reduces with something more.
const (
	FaultRMSNorm   = 32
	FaultQuantized = 33
)

// Norm is the parameter of the kernels of RMSNorm beside Comm, by value: see kernels/cuda/rms_norm.cuh. Addresses are of this rank's
// memory.
type Norm struct {
	_ structs.HostLayout

	In          uint64
	Residual    uint64
	ResidualOut uint64
	Weight      uint64
	Out         uint64 // or 0
	Quantized   uint64 // or 0
	Inputs      uint64 // TwoShotPull: [World]uint64, every rank's In
	Span        uint64
	Rows        uint32
	Columns     uint32
	Shard       uint32 // two-shot: vectors of each row that a rank sums
	Epsilon     float32
	Bias        float32
	_           uint32
	Scale       uint64 // of Quantized: where a float32 is that each launch reads, or what NormScale gives
}

// NormScale is Norm.Scale of a scale that does not change.
func NormScale(scale float32) uint64 { return 1<<63 | uint64(math.Float32bits(1/scale)) }

// NormDataBytes is the size of the workspace behind the records of a form of it, and NormSpan that of a slot, for rows of so many bytes.
func NormDataBytes(form Form, world int, rows, rowBytes int64) int64 {
	switch form {
	case OneShotPush:
		return 2 * int64(world) * NormSpan(form, world, rows, rowBytes)
	case TwoShotPush:
		return 2 * 2 * int64(world) * NormSpan(form, world, rows, rowBytes)
	}
	return rows * rowBytes
}

// NormSpan is Norm.Span.
func NormSpan(form Form, world int, rows, rowBytes int64) int64 {
	if form == TwoShotPush {
		return roundUp(rows*NormShard(world, rowBytes)*vector, 128)
	}
	return roundUp(rows*rowBytes, 128)
}

// NormShard is Norm.Shard.
func NormShard(world int, rowBytes int64) int64 {
	return (rowBytes/vector + int64(world) - 1) / int64(world)
}

// RMSNorm finds the kernel for a form, OneShotPush, TwoShotPush or TwoShotPull, of rows of a dtype, between so many ranks. hopper is as for
// AllReduce.
func RMSNorm(form Form, dtype string, world int, hopper bool) (Kernel, bool) {
	if !slices.Contains(pushable, dtype) || world < 1 {
		return Kernel{}, false
	}
	special := hopper && (form == OneShotPush && (world == 2 || world == 4 || world == 8) || form == TwoShotPush && (world == 4 || world == 8))
	tail := "_wn"
	if special {
		tail = map[int]string{2: "_w2", 4: "_w4", 8: "_w8"}[world]
	}
	k := Kernel{File: "rms_norm_" + dtype + ".ptx", Name: "symmem_rms_norm_" + form.String() + "_" + dtype + tail, Overlap: hopper}
	if hopper {
		k.File = "rms_norm_" + dtype + "_sm90.ptx"
	}
	return k, form == OneShotPush || form == TwoShotPush || form == TwoShotPull
}

// NormCluster is how many blocks, which are a cluster, have a row of RMSNormCluster's kernel.
const NormCluster = 8

// RMSNormCluster finds the kernel that takes the place of RMSNorm's for few rows in the form OneShotPush, on devices of compute capability 9.0 or later, and whether there is one: NormCluster blocks have a row, of whose
// threads each has an equal part.
func RMSNormCluster(form Form, dtype string, world int, hopper bool) (Kernel, bool) {
	k, ok := RMSNorm(form, dtype, world, hopper)
	k.Name = strings.Replace(k.Name, "_push_", "_push_cluster_", 1)
	return k, ok && hopper && form == OneShotPush && (world == 2 || world == 4 || world == 8)
}

// LocalRMSNorm finds the kernel that takes Norm alone: what is behind the sum.
func LocalRMSNorm(dtype string, hopper bool) (Kernel, bool) {
	k, ok := RMSNorm(TwoShotPull, dtype, 1, hopper)
	k.Name = "symmem_rms_norm_" + dtype
	return k, ok
}
