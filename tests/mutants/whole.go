package main

// Collectives other than all-reduce by the kernels for pieces of whole vectors.
func init() {
	wholeTests := []stage{{"kernels", "TestWhole", usual}}
	passTests := []stage{{"kernels", "TestBroadcastPassesOn", usual}}
	mutants = append(mutants,
		mutant{file: "kernels/table.go", why: "pieces of several lengths take the kernel for whole vectors", tests: wholeTests,
			old: "piece*size == message", new: "piece*size >= message"},
		mutant{file: "kernels/table.go", why: "pieces that are not aligned take the kernel for whole vectors", tests: wholeTests,
			old: "(uint64(m.in.Ptr())|uint64(m.out.Ptr())|uint64(piece))%16", new: "piece%16"},
		mutant{file: "kernels/table.go", why: "pieces that are no whole vectors take the kernel for such", tests: wholeTests,
			old: "|uint64(m.out.Ptr())|uint64(piece))%16", new: "|uint64(m.out.Ptr()))%16"},
		mutant{file: "kernels/moves_push.go", why: "an all-gather in place sends the first piece", tests: wholeTests,
			old: "in = in.Add(v.phases[0](at.Rank(), (at.Rank()+1)%at.WorldSize()).src)", new: "in = in.Add(0)"},
		mutant{file: "kernels/moves_push.go", why: "every broadcast of whole vectors is rank 0's", tests: wholeTests,
			old: "uint32(longest/16), uint32(v.root)", new: "uint32(longest/16), 0"},
		mutant{file: "kernels/moves_push.go", why: "the ranks do not compare whether pieces are whole vectors", tests: wholeTests,
			old: "\t\ts.Parameters += \", whole\"\n", new: ""},
		mutant{file: "kernels/moves_push.go", why: "slots of whole vectors have room for half of their lines", tests: wholeTests,
			old: "slot := ptx.LinesWholeSlotBytes(longest)", new: "slot := ptx.LinesWholeSlotBytes(longest / 2)"},
		mutant{file: "kernels/moves_push.go", why: "a broadcast that is passed on has one buffer", tests: passTests,
			old: "slots, sent = 2, ", new: "slots, sent = 1, "},
		mutant{file: "kernels/broadcast.go", why: "no broadcast is passed on in lines", tests: passTests,
			old: "v.inLines = v.passesOn && ", new: "v.inLines = false && v.passesOn && "},
		mutant{file: "kernels/broadcast.go", why: "every broadcast of whole vectors is passed on in lines", tests: passTests,
			old: "bytes <= passLinesBytes(size) && ", new: ""},
		mutant{file: "kernels/broadcast.go", why: "a broadcast that is no whole vectors is passed on in lines", tests: passTests,
			old: " && b.wholePieces()", new: ""},
		mutant{file: "kernels/reduce_push.go", why: "lines with flags take the kernel whose lines are sealed", tests: wholeTests,
			old: "whole = whole && form == ptx.OneShotPush && r.wholePieces()", new: "whole = whole && r.wholePieces()"},
		mutant{file: "kernels/reduce_push.go", why: "every reduce of whole vectors is to rank 0", tests: wholeTests,
			old: "uint32(vectors), uint32(root), uint32(r.op)", new: "uint32(vectors), 0*uint32(root), uint32(r.op)"},
		mutant{file: "kernels/reduce_push.go", why: "the ranks do not compare whether shares are whole vectors", tests: wholeTests,
			old: "\t\ts.Parameters += \", whole\"\n", new: ""},
		mutant{file: "kernels/ptx/moves.go", why: "a reduce takes the kernel of a reduce-scatter", tests: wholeTests,
			old: "\tif toRoot {\n", new: "\tif false {\n"},
	)
}
