package kernels

import (
	"slices"
	"strings"

	"github.com/symmem/symmem/device"
)

// The most bytes of the whole message for which pushing in lines is the fastest form of a collective on CUDA devices, by world size (the last entry
// serves all above). Those of all-gather and reduce-scatter between 2 ranks were measured on H200 with NVLink. The others come from what was measured
// of all-reduce: lines without a barrier save some 4 us, and carry twice the bytes, or the bytes once if they are all data.
var (
	gatherLLBytes    = [...]int64{2: 3 << 19, 3: 1 << 20, 4: 1 << 20, 5: 768 << 10, 6: 768 << 10, 7: 512 << 10, 8: 512 << 10}
	allToAllLLBytes  = [...]int64{2: 1 << 20, 3: 1 << 20, 4: 1 << 20, 5: 768 << 10, 6: 768 << 10, 7: 512 << 10, 8: 512 << 10}
	broadcastLLBytes = [...]int64{2: 768 << 10, 3: 384 << 10, 4: 256 << 10, 5: 192 << 10, 6: 128 << 10, 7: 128 << 10, 8: 96 << 10}
	scatterLLBytes   = [...]int64{2: 640 << 10, 3: 1 << 20, 4: 1 << 20, 5: 768 << 10, 6: 768 << 10, 7: 512 << 10, 8: 512 << 10}
	scatterPushBytes = [...]int64{2: 7 << 19, 3: 2 << 20, 4: 2 << 20, 5: 3 << 19, 6: 3 << 19, 7: 1 << 20, 8: 1 << 20}
	reduceLLBytes    = [...]int64{2: 768 << 10, 3: 384 << 10, 4: 256 << 10, 5: 192 << 10, 6: 128 << 10, 7: 128 << 10, 8: 96 << 10}
	reducePushBytes  = [...]int64{2: 3 << 19, 3: 768 << 10, 4: 512 << 10, 5: 384 << 10, 6: 256 << 10, 7: 256 << 10, 8: 192 << 10}
)

// CollectiveAlgorithms lists the forms that a constructor of this package other than NewAllReduce, such as "NewBroadcast", has for a kind of device: by
// kernels, and Transfers. Some have a form for some dtypes and operations only, and OneShotMultimem needs multicast addresses. Nil for a constructor that there is not.
func CollectiveAlgorithms(constructor string, kind device.Kind) []Algorithm {
	if kind != device.CUDA {
		if !slices.Contains([]string{"NewBroadcast", "NewReduce", "NewAllGather", "NewReduceScatter", "NewAllToAll", "NewAllToAllV", "NewBarrier"}, constructor) {
			return nil
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
		return []Algorithm{OneShotPush}
	case "NewBarrier":
		return []Algorithm{OneShot, Transfers}
	}
	return nil
}

// pushOrPull is the forms of a collective that moves elements, the best first.
func pushOrPull(kind device.Kind, bytes int64, size int, table []int64) []Algorithm {
	switch {
	case kind != device.CUDA:
		return []Algorithm{OneShot}
	case size > 1 && bytes <= limit(table, size):
		return []Algorithm{OneShotLL, OneShotPull}
	}
	return []Algorithm{OneShotPull, OneShotLL}
}

// oneShotOf is the best of the family OneShot among forms.
func oneShotOf(forms []Algorithm) Algorithm {
	i := slices.IndexFunc(forms, func(a Algorithm) bool { return strings.HasPrefix(a.String(), OneShot.String()) })
	return forms[max(i, 0)]
}
