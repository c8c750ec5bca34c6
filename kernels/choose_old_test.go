package kernels

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/device"
	"github.com/symmem/symmem/kernels/tuning"
	"github.com/symmem/symmem/tensor"
)

// What the code had before there were tables.
var (
	oldOneShotPushBytes = [...]int64{2: 2 << 20, 3: 384 << 10, 4: 320 << 10, 5: 160 << 10, 6: 128 << 10, 7: 96 << 10, 8: 64 << 10}
	oldTwoShotPushBytes = int64(12 << 20)
	// The same for messages of whole vectors.
	oldTwoShotPushWholeBytes = [...]int64{2: 32 << 20, 3: 16 << 20, 4: 16 << 20, 5: 12 << 20}

	oldOneShotLLBytes   = [...]int64{2: 768 << 10, 3: 512 << 10, 4: 512 << 10, 5: 256 << 10, 6: 192 << 10, 7: 128 << 10, 8: 96 << 10}
	oldTwoShotPullBytes = [...]int64{2: 8 << 20, 3: 4 << 20}
)

// oldChooseCUDA picked the form by size and world size.
func oldChooseCUDA(asked Algorithm, dtype tensor.DType, op Op, bytes int64, size int, whole bool) Algorithm {
	if asked != Auto && asked != OneShot && asked != TwoShot {
		return asked
	}
	if size == 1 {
		return OneShotPull // a copy, or the rounding of an average
	}
	if Supported(device.CUDA, OneShotPush, dtype, op, size) {
		switch {
		case asked == OneShot, asked == Auto && bytes <= limit(oldOneShotPushBytes[:], size):
			return OneShotPush
		case bytes <= oldTwoShotPushBytes, whole && bytes <= limit(oldTwoShotPushWholeBytes[:], size):
			return TwoShotPush
		}
		return TwoShotFlow
	}
	switch {
	case asked == OneShot, asked == Auto && bytes <= limit(oldOneShotLLBytes[:], size):
		return OneShotLL
	case bytes <= limit(oldTwoShotPullBytes[:], size):
		return TwoShotPull
	}
	return TwoShotFlow
}

// TestTablesChooseAsTheCode: on the GPUs that tables come with, auto and the families take what the code took before there were tables, or what was found to be faster since: for every dtype, operation, world and size.
func TestTablesChooseAsTheCode(t *testing.T) {
	for _, name := range []string{"NVIDIA H200", "NVIDIA H100 80GB HBM3", "Simulated GPU"} {
		set := &tuning.Set{Tables: []*tuning.Table{tuning.Shipped(name, "")}}
		for size := 1; size <= 10; size++ {
			for _, dtype := range []tensor.DType{tensor.BFloat16, tensor.Float32, tensor.Float64, tensor.Int32, tensor.Uint8} {
				for _, op := range Ops() {
					for n := int64(16); n < 1<<30; n *= 2 {
						for _, bytes := range []int64{n, n + 1, n / 4 * 3, n/4*3 + 1, n / 8 * 5, n/8*5 + 1, n / 8 * 7, n/8*7 + 1} {
							for _, asked := range []Algorithm{Auto, OneShot, TwoShot, OneShotPull, TwoShotFlow, Transfers} {
								for _, whole := range []bool{false, true} {
									want := oldChooseCUDA(asked, dtype, op, bytes, size, whole)
									if name == "NVIDIA H100 80GB HBM3" && size == 2 && want == TwoShotPush && asked != TwoShotPush && bytes > 24<<20 {
										want = TwoShotFlow // which was measured since
									}
									if name != "NVIDIA H100 80GB HBM3" && size == 2 && want == TwoShotPush && asked == Auto && whole && bytes <= 4<<20 {
										want = OneShotPush
									}
									if size == 4 && want == OneShotPush && asked == Auto && whole && bytes > 192<<10 {
										want = TwoShotPush // likewise
									}
									if name != "NVIDIA H100 80GB HBM3" && size == 3 && dtype == tensor.Int32 && want == OneShotLL && asked == Auto && bytes > 384<<10 {
										want = TwoShotPull
									}
									blocks := 0
									switch words := dtype == tensor.Int32 && want == TwoShotPull && asked != TwoShotPull; {
									case name == "NVIDIA H100 80GB HBM3":
									case size == 2 && want == TwoShotFlow && asked == Auto && bytes > 384<<20:
										want = Transfers
									case words && size == 2 && bytes > 1536<<10 && bytes <= 3<<20, words && size == 3 && bytes <= 768<<10:
										blocks = 128
									case words && size == 3 && bytes > 3<<20:
										blocks = 64
									}
									c := chooseAllReduce(nil, set, asked, device.CUDA, dtype, op, bytes, size, whole, func(Algorithm) bool { return false })
									require.Equal(t, want.String(), c.algorithm.String(), "%s: %s %s of %d bytes of %s between %d ranks, whole %t", name, asked, op, bytes, dtype, size, whole)
									require.Equal(t, blocks, c.blocks, "%s: %s %s of %d bytes of %s between %d ranks", name, asked, op, bytes, dtype, size)
									if want == TwoShotFlow {
										lap := int64(16 << 10)
										if bytes >= 64<<20 && size > 1 {
											lap = 32 << 10
										}
										require.Equal(t, lap, c.lap, "%d bytes between %d ranks", bytes, size)
									}
								}
							}
						}
					}
				}
			}
		}
	}
}

// TestForms: every form of a constructor is listed once, whatever lists it, and Hierarchical on GPUs where the memory of a backend has it between islands.
func TestForms(t *testing.T) {
	all := append([]string{"NewAllReduce", "NewAllReduceMany", "NewAllGatherMany", "NewReduceScatterMany", "NewBroadcastMany", "NewAllReduceRMSNorm", "NewAllToAllV", "NewBarrier", "NewNothing"}, islandCollectives...)
	for _, constructor := range all {
		for _, kind := range []device.Kind{device.Host, device.CUDA} {
			for _, backend := range []string{"host", "native", "nccl", "nvshmem", "nixl"} {
				forms := Forms(constructor, kind, backend)
				once := slices.Clone(forms)
				slices.Sort(once)
				require.Len(t, slices.Compact(once), len(forms), "%s on %s, backend %s: %v", constructor, kind, backend, forms)
				own, library := CollectiveAlgorithms(constructor, kind), LibraryCollectives(constructor, backend)
				if constructor == "NewAllReduce" {
					own, library = Algorithms(kind), LibraryAlgorithms(backend)
				}
				require.Subset(t, forms, append(own, library...))
				require.Equal(t, constructor == "NewNothing", len(own) == 0, "%s on %s", constructor, kind)
				rails := constructor == "NewAllReduce" || slices.Contains(islandCollectives, constructor)
				if kind == device.CUDA {
					want := rails && (backend == "nixl" || backend == "nccl")
					require.Equal(t, want, slices.Contains(forms, Hierarchical), "%s, backend %s", constructor, backend)
				}
			}
		}
	}
}

// TestFormsOfTables: every form that a rule may take is one that the collective has, by that name, and none is missing but what a table must not take.
func TestFormsOfTables(t *testing.T) {
	for kind, link := range map[device.Kind]string{device.CUDA: tuning.LinkNVLink, device.Host: tuning.LinkHost} {
		names := func(all []Algorithm, without ...Algorithm) (names []string) {
			for _, a := range all {
				skip := a.form() != nil
				for _, w := range without {
					skip = skip || a == w
				}
				if !skip {
					names = append(names, a.String())
				}
			}
			return names
		}
		require.ElementsMatch(t, names(Algorithms(kind), OneShotMultimem), tuning.Forms(tuning.AllReduce, link)) // with which the ranks may differ
		for call, collective := range collectiveNames {
			var without []Algorithm
			if collective == tuning.Reduce || collective == tuning.ReduceScatter {
				without = append(without, OneShotMultimem) // which has to be asked for
			}
			require.ElementsMatch(t, names(CollectiveAlgorithms(call, kind), without...), tuning.Forms(collective, link), collective)
		}
		require.Subset(t, tuning.Forms(tuning.AllReduceMany, link), append(names(manyAlgorithms(kind, tensor.Float32)), names(manyAlgorithms(kind, tensor.Int8))...))
		require.ElementsMatch(t, names(CollectiveAlgorithms("NewAllReduceMany", kind)), tuning.Forms(tuning.AllReduceMany, link))
		require.ElementsMatch(t, names(CollectiveAlgorithms("NewAllReduceRMSNorm", kind)), tuning.Forms(tuning.AllReduceRMSNorm, link))
		for _, form := range tuning.Forms(tuning.AllReduce, link) {
			a, err := ParseAlgorithm(form)
			require.NoError(t, err)
			require.Equal(t, a.NeedsMulticast(), tuning.NeedsMulticast(form), form)
		}
	}
	var dtypes []string
	for _, d := range tensor.DTypes() {
		dtypes = append(dtypes, d.String())
	}
	require.ElementsMatch(t, dtypes, tuning.DTypes())
	require.Nil(t, tuning.Forms("none", tuning.LinkNVLink))
	require.Nil(t, tuning.Forms(tuning.AllReduce, "none"))
}
