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

// Algorithm is the form of an all-reduce.
type Algorithm int

// The forms. The host device has OneShot and TwoShot; on CUDA these stand for the best of their family at the size, and the
// members can be asked for by themselves.
const (
	Auto            Algorithm = iota // by size and world size, from one table
	OneShot                          // every rank computes everything
	TwoShot                          // every rank computes one part for all
	OneShotLL                        // CUDA: push lines that carry data and flags, without a barrier
	OneShotPush                      // CUDA: push lines that are all data, without a barrier; f32, f16, bf16
	OneShotPull                      // CUDA: load every input, between barriers
	TwoShotPush                      // CUDA: push parts to their owners and results to all, without a barrier; f32, f16, bf16
	TwoShotPull                      // CUDA: load the own part of every input, store to every output, between barriers
	TwoShotFlow                      // CUDA: push parts to their owners in laps, store results to every output
	OneShotMultimem                  // CUDA: the NVLink switch adds; sums of f32, f16, bf16
	TwoShotMultimem                  // CUDA: the NVLink switch adds and spreads; sums of f32, f16, bf16
	algorithms
)

var algorithmNames = [...]string{
	Auto: "auto", OneShot: "one_shot", TwoShot: "two_shot", OneShotLL: "one_shot_ll", OneShotPush: "one_shot_push",
	OneShotPull: "one_shot_pull", TwoShotPush: "two_shot_push", TwoShotPull: "two_shot_pull", TwoShotFlow: "two_shot_flow",
	OneShotMultimem: "one_shot_multimem", TwoShotMultimem: "two_shot_multimem",
}

// ptxForms gives the compiled form of each algorithm that is one.
var ptxForms = map[Algorithm]ptx.Form{
	OneShotLL: ptx.OneShotLL, OneShotPush: ptx.OneShotPush, OneShotPull: ptx.OneShotPull, TwoShotPush: ptx.TwoShotPush,
	TwoShotPull: ptx.TwoShotPull, TwoShotFlow: ptx.TwoShotFlow, OneShotMultimem: ptx.OneShotMultimem, TwoShotMultimem: ptx.TwoShotMultimem,
}

// Algorithms lists the forms that a kind of device has, Auto excluded, families excluded where their members are listed.
func Algorithms(kind device.Kind) []Algorithm {
	if kind != device.CUDA {
		return []Algorithm{OneShot, TwoShot}
	}
	var all []Algorithm
	for a := OneShotLL; a < algorithms; a++ {
		all = append(all, a)
	}
	return all
}

// NeedsMulticast reports whether the form needs tensors that have a multicast address.
func (a Algorithm) NeedsMulticast() bool { return a == OneShotMultimem || a == TwoShotMultimem }

// Supported reports whether a kind of device has a kernel of the form for elements of dtype, op and world size.
func Supported(kind device.Kind, a Algorithm, dtype tensor.DType, op Op, worldSize int) bool {
	if !dtype.Valid() || !op.Valid() {
		return false
	}
	if kind != device.CUDA {
		return slices.Contains(Algorithms(kind), a)
	}
	form, ok := ptxForms[a]
	if !ok {
		return false
	}
	_, ok = ptx.AllReduce(form, dtype.String(), int(op), worldSize, true)
	return ok
}

// String gives the name: "one_shot".
func (a Algorithm) String() string {
	if a < Auto || a >= algorithms {
		return fmt.Sprintf("Algorithm(%d)", int(a))
	}
	return algorithmNames[a]
}

// ParseAlgorithm gives the form of a name.
func ParseAlgorithm(name string) (Algorithm, error) {
	for a := Auto; a < algorithms; a++ {
		if a.String() == name {
			return a, nil
		}
	}
	return 0, errs.Invalid("ParseAlgorithm", "name", fmt.Sprintf("%q", name), strings.Join(algorithmNames[:], ", "))
}
