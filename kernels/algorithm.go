package kernels

import (
	"fmt"
	"slices"
	"strings"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/internal/errs"
	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/tensor"
)

// Algorithm is the form of an all-reduce. The numbers of forms that were registered, by RegisterAllReduce, are the process's own.
type Algorithm int

// The forms. The host device has OneShot and TwoShot; on CUDA these stand for the best of their family at the size, and the
// members can be asked for by themselves.
const (
	Auto            Algorithm = iota // by size, world size and dtype, from tables: package tuning
	OneShot                          // every rank computes everything
	TwoShot                          // every rank computes one part for all
	OneShotLL                        // CUDA: push lines that carry data and flags, without a barrier
	OneShotPush                      // CUDA: push lines that are all data, without a barrier, or long shares of a reduce-scatter, and long reduces between more than two ranks, in chunks; f32, f16, bf16. What only moves is stored to every output, between barriers; every dtype
	OneShotPull                      // CUDA: load every input, between barriers
	TwoShotPush                      // CUDA: push parts to their owners and results to all, without a barrier; f32, f16, bf16. Of a broadcast, parts are stored to the other ranks, which pass each chunk on as it comes, or each line where the message is whole vectors of 16 bytes and not long; every dtype
	TwoShotPull                      // CUDA: load the own part of every input, store to every output, between barriers
	TwoShotFlow                      // CUDA: push parts to their owners in laps, store results to every output
	OneShotMultimem                  // CUDA: the NVLink switch adds, for each rank by itself: the bits may differ from rank to rank; sums of f32, f16, bf16. In broadcast and all-gather it spreads; every dtype
	TwoShotMultimem                  // CUDA: the NVLink switch adds and spreads; sums of f32, f16, bf16
	Transfers                        // put parts to their owners and results to all; the form for peers without pointers
	NCCL                             // NCCL's own all-reduce, on memory of backend nccl
	NCCLSymmetric                    // NCCL's own over symmetric windows, on memory of backend nccl
	NVSHMEM                          // NVSHMEM's own reduction, on memory of backend nvshmem
	QuantizedInt8                    // lossy: parts and results go as 8-bit integers with scales; see AllReduceOptions.Algorithm
	Hierarchical                     // by addresses inside islands, and between them by puts or NCCL: each byte, or sum, once for an island; of short blocks, one transfer for a rank
	algorithms
)

var algorithmNames = [...]string{
	Auto: "auto", OneShot: "one_shot", TwoShot: "two_shot", OneShotLL: "one_shot_ll", OneShotPush: "one_shot_push",
	OneShotPull: "one_shot_pull", TwoShotPush: "two_shot_push", TwoShotPull: "two_shot_pull", TwoShotFlow: "two_shot_flow",
	OneShotMultimem: "one_shot_multimem", TwoShotMultimem: "two_shot_multimem", Transfers: "transfers", NCCL: "nccl", NCCLSymmetric: "nccl_symmetric",
	NVSHMEM: "nvshmem", QuantizedInt8: "quantized_int8", Hierarchical: "hierarchical",
}

// ptxForms gives the compiled form of each algorithm that is one.
var ptxForms = map[Algorithm]ptx.Form{
	OneShotLL: ptx.OneShotLL, OneShotPush: ptx.OneShotPush, OneShotPull: ptx.OneShotPull, TwoShotPush: ptx.TwoShotPush,
	TwoShotPull: ptx.TwoShotPull, TwoShotFlow: ptx.TwoShotFlow, OneShotMultimem: ptx.OneShotMultimem, TwoShotMultimem: ptx.TwoShotMultimem,
}

// Algorithms lists the forms that this package has for a kind of device, Auto excluded, families excluded where their members
// are listed, QuantizedInt8 excluded, which is lossy, and after them those that were registered.
func Algorithms(kind device.Kind) []Algorithm {
	if kind != device.CUDA {
		return append([]Algorithm{OneShot, TwoShot, Transfers, Hierarchical}, others()...)
	}
	var all []Algorithm
	for a := OneShotLL; a < algorithms; a++ {
		if a.Backend() == "" && a != QuantizedInt8 && a != Hierarchical {
			all = append(all, a)
		}
	}
	return append(all, others()...)
}

// LibraryAlgorithms lists the forms that the library below a backend has, for the memory of that backend. What they give is the
// same on every rank, but not the sum in the order of the ranks that this package's own forms give.
func LibraryAlgorithms(backend string) []Algorithm {
	var all []Algorithm
	for a := Auto; a < algorithms; a++ {
		if b := a.Backend(); b != "" && b == backend {
			all = append(all, a)
		}
	}
	return all
}

// Backend is the name of the backend whose library has the form, or "" if this package has it, for every backend.
func (a Algorithm) Backend() string {
	switch a {
	case NCCL, NCCLSymmetric:
		return "nccl"
	case NVSHMEM:
		return "nvshmem"
	}
	return ""
}

// NeedsPeerPointers reports whether the form needs tensors that every peer has an address of. Hierarchical needs those of its island only.
func (a Algorithm) NeedsPeerPointers() bool {
	if f := a.form(); f != nil {
		return f.NeedsPeerPointers
	}
	return a != Transfers && a != QuantizedInt8 && a != Hierarchical && a.Backend() == ""
}

// NeedsMulticast reports whether the form needs tensors that have a multicast address.
func (a Algorithm) NeedsMulticast() bool {
	if f := a.form(); f != nil {
		return f.NeedsMulticast
	}
	return a == OneShotMultimem || a == TwoShotMultimem
}

// RankOrder reports whether the form combines the ranks' elements in the order of the ranks, as they are, so that its result has the same
// bits as that of every other such form.
func (a Algorithm) RankOrder() bool {
	if f := a.form(); f != nil {
		return !f.AnyOrder
	}
	return !a.NeedsMulticast() && a.Backend() == "" && a != QuantizedInt8 && a != Hierarchical
}

// Supported reports whether a kind of device, or the library that has the form, has a kernel of the form for elements of dtype, op and world size.
func Supported(kind device.Kind, a Algorithm, dtype tensor.DType, op Op, worldSize int) bool {
	if !dtype.Valid() || !op.Valid() {
		return false
	}
	if f := a.form(); f != nil {
		return f.Supports(kind, dtype, op, worldSize)
	}
	if a == QuantizedInt8 {
		return dtype.IsFloat() && dtype != tensor.Float64 && (op == Sum || op == Avg)
	}
	if kind != device.CUDA {
		return slices.Contains(Algorithms(kind), a)
	}
	if a.Backend() != "" {
		return libraryHas(a, dtype, op)
	}
	if a == Hierarchical { // what NCCL has between islands, also where puts go there; an integer average of averages would be another number
		return libraryHas(NCCL, dtype, op) && (op != Avg || dtype.IsFloat())
	}
	form, ok := ptxForms[a]
	if a == Transfers {
		form, ok = ptx.OneShotPull, true // without its barriers, it reduces what has come
	}
	if !ok {
		return false
	}
	_, ok = ptx.AllReduce(form, dtype.String(), int(op), worldSize, true)
	return ok
}

// String gives the name: "one_shot".
func (a Algorithm) String() string {
	if f := a.form(); f != nil {
		return f.Name
	}
	if a < Auto || a >= algorithms {
		return fmt.Sprintf("Algorithm(%d)", int(a))
	}
	return algorithmNames[a]
}

// ParseAlgorithm returns the form of a name, which may be a registered one.
func ParseAlgorithm(name string) (Algorithm, error) {
	names := algorithmNames[:]
	for a := Auto; a.known(); a++ {
		if a.String() == name {
			return a, nil
		}
		if a >= algorithms {
			names = append(slices.Clip(names), a.String())
		}
	}
	return 0, errs.Invalid("ParseAlgorithm", "name", fmt.Sprintf("%q", name), strings.Join(names, ", "))
}
