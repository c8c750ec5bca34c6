package kernels

import (
	"slices"

	"github.com/symmem/symmem/device"
)

// islandCollectives are the constructors that have the form Hierarchical, on the host device.
var islandCollectives = []string{"NewAllGather", "NewAllToAll", "NewBroadcast", "NewReduce", "NewReduceScatter"}

// CollectiveAlgorithms lists the forms that a constructor of this package other than NewAllReduce, such as "NewBroadcast", has for a kind of device: by
// kernels, and Transfers. Some have a form for some dtypes and operations only, and OneShotMultimem needs multicast addresses. Nil for a constructor that there is not.
func CollectiveAlgorithms(constructor string, kind device.Kind) []Algorithm {
	if kind != device.CUDA {
		if !slices.Contains([]string{"NewBroadcast", "NewReduce", "NewAllGather", "NewReduceScatter", "NewAllToAll", "NewAllToAllV", "NewBarrier"}, constructor) {
			return nil
		}
		if slices.Contains(islandCollectives, constructor) {
			return []Algorithm{OneShot, Transfers, Hierarchical}
		}
		return []Algorithm{OneShot, Transfers}
	}
	switch constructor {
	case "NewBroadcast":
		return []Algorithm{OneShotLL, OneShotPull, TwoShotPull, OneShotMultimem, Transfers}
	case "NewAllGather":
		return []Algorithm{OneShotLL, OneShotPull, OneShotMultimem, Transfers}
	case "NewAllToAll":
		return []Algorithm{OneShotLL, OneShotPull, Transfers}
	case "NewReduce", "NewReduceScatter":
		return []Algorithm{OneShotLL, OneShotPush, OneShotPull, OneShotMultimem, Transfers}
	case "NewAllToAllV":
		return []Algorithm{OneShotPush, Transfers}
	case "NewBarrier":
		return []Algorithm{OneShot, Transfers}
	}
	return nil
}
