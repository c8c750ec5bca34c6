package main

// The all-reduce with RMSNorm and the one of int8 blocks: in the suite, and their kernels as plans launch them.
var (
	fusedLaunches = stage{"kernels", "RMSNorm|Quantiz|E4M3", usual}
	normSuite     = stage{"tests", "TestMatrix/backend=(host|far)/world=(2|3|5)/goroutines/all_reduce_rms_norm", usual}
	int8Suite     = stage{"tests", "TestMatrix/backend=(host|far)/world=(2|3|5)/goroutines/all_reduce/quantized_int8", usual}

	inNorm = []stage{normSuite, fusedLaunches}
	inInt8 = []stage{int8Suite, fusedLaunches}
)

func init() {
	mutants = append(mutants,
		mutant{file: "kernels/rms_norm_transfers.go", why: "who sends does not wait until the peer is done with the last run", tests: inNorm,
			old: "\t\tb.Wait(signalNormRoom)\n", new: ""},
		mutant{file: "kernels/rms_norm_transfers.go", why: "slots of two writers are one", tests: inNorm,
			old: "int64((writer-owner+size)%size-1)", new: "0*int64((writer-owner+size)%size-1)"},
		mutant{file: "kernels/rms_norm_host.go", why: "epsilon is left out", tests: inNorm,
			old: "float64(mean+k.epsilon)", new: "float64(mean)"},
		mutant{file: "kernels/rms_norm_host.go", why: "the norm takes what was not rounded yet", tests: inNorm,
			old: "\tk.load(x, k.residualOut[lo:hi])\n", new: ""},
		mutant{file: "kernels/rms_norm_host.go", why: "squares are added one after the other", tests: inNorm,
			old: "k.lanes[v%threads] += sum", new: "k.lanes[0] += sum"},
		mutant{file: "kernels/rms_norm_host.go", why: "fp8 is made of what was not rounded yet", tests: inNorm,
			old: "\tk.load(y, row)\n", new: ""},
		mutant{file: "kernels/rms_norm_host.go", why: "fp8 wraps around in place of its largest number", tests: inNorm,
			old: "case m >= 0x43e00000:", new: "case m >= 0x7f800000:"},
		mutant{file: "kernels/rms_norm_host.go", why: "one-shot has one buffer", tests: inNorm,
			old: "int64(1+parity)*buffer", new: "int64(1+0*parity)*buffer"},
		mutant{file: "kernels/rms_norm.go", why: "no norm without room for clusters", tests: inNorm,
			old: "ok && n.inClusters && (", new: "ok && false && ("},
		mutant{file: "kernels/rms_norm.go", why: "clusters have several rows", tests: inNorm,
			old: "k, n.clusters, int(n.rows)*ptx.NormCluster", new: "k, n.clusters, 0"},
		mutant{file: "kernels/rms_norm.go", why: "clusters where a bound leaves fewer blocks", tests: inNorm,
			old: " && (n.maxBlocks == 0 || int64(n.maxBlocks) >= n.rows*ptx.NormCluster)", new: ""},
		mutant{file: "kernels/rms_norm.go", why: "clusters of rows that are shorter than their threads", tests: inNorm,
			old: " && normThreads(n.rowBytes()) >= 32*ptx.NormCluster", new: ""},
		mutant{file: "collective/kernel.go", why: "a part of a cluster", tests: []stage{{"collective", "Settle", usual}},
			old: "f.blocks -= f.blocks % clusterBlocks(f.function)", new: "_ = f"},
		mutant{file: "device/cuda/launch.go", why: "a grid of parts of clusters", tests: []stage{{"device/cuda", "TestClusters", usual}},
			old: "l.Grid[i]%n != 0", new: "false"},
		mutant{file: "kernels/rms_norm.go", why: "overlaps are not looked for", tests: inNorm,
			old: "return errors.Join(n.checkLocals(hidden), n.checkOverlaps())", new: "return n.checkLocals(hidden)"},
		mutant{file: "kernels/rms_norm.go", why: "ranks need not agree on epsilon", tests: inNorm,
			old: "n.maxBlocks, n.Epsilon, n.WeightBias", new: "n.maxBlocks, 0, n.WeightBias"},
		mutant{file: "kernels/rms_norm.go", why: "kernels get the scale in place of its reciprocal", tests: inNorm,
			old: "p.Scale = ptx.NormScale(n.Scale)", new: "p.Scale = ptx.NormScale(1 / n.Scale)"},
		mutant{file: "kernels/rms_norm.go", why: "kernels do not read the scale", tests: inNorm,
			old: "p.Scale = uint64(n.ScaleAt.Ptr)", new: "p.Scale = ptx.NormScale(1)"},
		mutant{file: "kernels/rms_norm_host.go", why: "the scale is read once", tests: inNorm,
			old: "\tif k.scale != nil {\n", new: "\tif k.scale != nil && k.inverse == 0 {\n"},
		mutant{file: "kernels/quantized.go", why: "sums are taken before everybody has made them", tests: inInt8,
			old: "\t\t\tif err := r.Barrier(flagEnd); err != nil {\n\t\t\t\treturn err\n\t\t\t}\n\t\t\tk.dequantize()", new: "\t\t\tk.dequantize()"},
		mutant{file: "kernels/quantized.go", why: "the rest of a block keeps what was there", tests: inInt8,
			old: "\t\t\tclear(k.x[n:])\n", new: ""},
		mutant{file: "kernels/quantized.go", why: "an average is a sum", tests: inInt8,
			old: "\t\tif k.op == Avg {", new: "\t\tif false {"},
		mutant{file: "kernels/quantize_block.go", why: "what is no number counts as one", tests: inInt8,
			old: "if most >= 0x7f800000 {", new: "if false {"},
		mutant{file: "kernels/quantize_block.go", why: "the scale is as small as it comes", tests: inInt8,
			old: "max(math.Float32frombits(most)/127, smallestScale)", new: "math.Float32frombits(most) / 127"},
		mutant{file: "kernels/algorithm.go", why: "the lossy all-reduce is among the others", tests: []stage{{"kernels", "^TestForms", usual}},
			old: "a.Backend() == \"\" && a != QuantizedInt8 && a != Hierarchical {", new: "a.Backend() == \"\" && a != Hierarchical {"},
	)
}
