package kernels

import (
	"slices"

	"github.com/symmem/symmem/device"
)

// islandCollectives are the constructors that have the form Hierarchical, on the host device.
var islandCollectives = []string{"NewAllGather", "NewAllToAll", "NewBroadcast", "NewReduce", "NewReduceScatter"}

// islandBackends are the backends of this module whose memory of GPUs has the form Hierarchical between islands: by NCCL's collectives and messages, or by puts.
var islandBackends = []string{NCCL.Backend(), "nixl"}

// Forms lists the forms that a constructor of this package, "NewAllReduce" or another, can be asked for on a kind of device, with memory of a backend, each once: those of
// [Algorithms] or [CollectiveAlgorithms], those of the library below the backend, of [LibraryAlgorithms] or [LibraryCollectives], and Hierarchical between islands of GPUs, which the
// backends nccl and nixl have. Some are for some dtypes and operations only, or need addresses of all peers, multicast addresses or several islands.
func Forms(constructor string, kind device.Kind, backend string) []Algorithm {
	all := append(CollectiveAlgorithms(constructor, kind), LibraryCollectives(constructor, backend)...)
	if constructor == "NewAllReduce" {
		all = append(Algorithms(kind), LibraryAlgorithms(backend)...)
	}
	if kind == device.CUDA && slices.Contains(islandBackends, backend) && hasRails(constructor) {
		all = append(all, Hierarchical)
	}
	return all
}

// hasRails reports whether a constructor has the form Hierarchical between islands of GPUs, on memory of a backend that has it at all.
func hasRails(constructor string) bool {
	return constructor == "NewAllReduce" || slices.Contains(islandCollectives, constructor)
}

// CollectiveAlgorithms lists the forms that a constructor of this package other than NewAllReduce, such as "NewBroadcast", has for a kind of device: by
// kernels, and Transfers. Some have a form for some dtypes and operations only, and OneShotMultimem needs multicast addresses. Nil for NewRMSNorm, which has one form, and for a constructor
// that there is not.
func CollectiveAlgorithms(constructor string, kind device.Kind) []Algorithm {
	if kind != device.CUDA {
		if constructor == manyCall || constructor == normCall {
			return []Algorithm{OneShot, TwoShot, Transfers}
		}
		if !slices.Contains([]string{"NewBroadcast", "NewReduce", "NewAllGather", "NewReduceScatter", "NewAllToAll", "NewAllToAllV", "NewBarrier", "NewAllGatherMany", "NewReduceScatterMany", "NewBroadcastMany"}, constructor) {
			return nil
		}
		if slices.Contains(islandCollectives, constructor) {
			return []Algorithm{OneShot, Transfers, Hierarchical}
		}
		return []Algorithm{OneShot, Transfers}
	}
	switch constructor {
	case "NewBroadcast":
		return []Algorithm{OneShotLL, OneShotPush, OneShotPull, TwoShotPush, TwoShotPull, OneShotMultimem, Transfers}
	case "NewAllGather":
		return []Algorithm{OneShotLL, OneShotPush, OneShotPull, OneShotMultimem, Transfers}
	case "NewAllToAll":
		return []Algorithm{OneShotLL, OneShotPush, OneShotPull, Transfers}
	case "NewReduce", "NewReduceScatter":
		return []Algorithm{OneShotLL, OneShotPush, OneShotPull, OneShotMultimem, Transfers}
	case manyCall:
		return []Algorithm{OneShotLL, OneShotPush, TwoShotPull, Transfers}
	case "NewAllGatherMany", "NewBroadcastMany":
		return []Algorithm{OneShotLL, OneShotPull, Transfers}
	case "NewReduceScatterMany":
		return []Algorithm{OneShotLL, OneShotPush, OneShotPull, Transfers}
	case normCall:
		return []Algorithm{OneShotPush, TwoShotPush, TwoShotPull, Transfers}
	case "NewAllToAllV":
		return []Algorithm{OneShotPush, Transfers}
	case "NewBarrier":
		return []Algorithm{OneShot, Transfers}
	}
	return nil
}
