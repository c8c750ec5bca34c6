package ptxvm

// instr is an instruction as the machine executes it: operands are words of the frame. A register holds its value in the low bits, and zeros
// above; a predicate is 0 or 1.
type instr struct {
	op               uint16
	d, a, b, c, e, g uint16
	tgt              int32
	imm              int64
}

const (
	_ uint16 = iota // no instruction

	opMov
	opPack32   // d = a, b of 32 bits
	opPack16   // d = a, b of 16 bits
	opPack4    // d = a, b, c, e of 16 bits
	opUnpack32 // d, b = a
	opUnpack16
	opUnpack4 // d, b, c, e = a
	opSpecial
	opMapa // d = a, an address of shared memory, in the block of rank b
	opTimer
	opSelp // d = c != 0 ? a : b
	opMask // d = a & imm
	opSext // d = a from the bit 64-tgt, & imm
	opAnd
	opOr
	opXor
	opNot // d = ^a & imm

	opAdd16
	opAdd32
	opAdd64
	opSub16
	opSub32
	opSub64
	opMul16
	opMul32
	opMul64
	opMulHiU32
	opMulHiS32
	opMulHiU64
	opMulHiS64
	opMulWideU16
	opMulWideS16
	opMulWideU32
	opMulWideS32
	opMad16
	opMad32
	opMad64
	opMadWideU16
	opMadWideS16
	opMadWideU32
	opMadWideS32
	opDivU
	opDivS32
	opDivS64
	opRemU
	opRemS32
	opRemS64
	opMinU
	opMinS16
	opMinS32
	opMinS64
	opMaxU
	opMaxS16
	opMaxS32
	opMaxS64
	opNeg // d = -a & imm
	opAbs16
	opAbs32
	opAbs64
	opShl16
	opShl32
	opShl64
	opShrU // zeros come in; of any width
	opShrS16
	opShrS32
	opShrS64
	opBfi32
	opBfi64
	opBfe // imm 0 u32, 1 s32, 2 u64, 3 s64
	opPrmt
	opPopc
	opClz32
	opClz64
	opBrev32
	opBrev64

	opSetEq
	opSetNe
	opSetLtU
	opSetLeU
	opSetLtS16
	opSetLeS16
	opSetLtS32
	opSetLeS32
	opSetLtS64
	opSetLeS64
	opSetF32 // imm: what of less 1, equal 2, greater 4, unordered 8
	opSetF64

	opAddF32
	opSubF32
	opMulF32
	opDivF32
	opFmaF32
	opMinF32
	opMaxF32
	opMinNaNF32
	opMaxNaNF32
	opNegF32
	opAbsF32
	opAddF64
	opSubF64
	opMulF64
	opDivF64
	opFmaF64
	opMinF64
	opMaxF64
	opNegF64
	opAbsF64
	opSqrtF32
	opSqrtF64
	opApprox // imm: which

	opCvtF32F16
	opCvtF16F32
	opCvtBF16F32
	opCvtF16x2F32 // a in the upper half
	opCvtBF16x2F32
	opCvtF32U32
	opCvt // imm: a conversion

	opBra
	opBraIf
	opBraIfNot
	opCall
	opRet
	opExit
	opTrap

	opLdParam // of a kernel
	opLdFrame
	opStFrame

	// What others may see or order: with these, a turn of a thread may end.
	opVisible
	opLd8
	opLd16
	opLd32
	opLd64
	opLd2x32
	opLd2x64
	opLd4x32
	opLdStrong32
	opLdStrong64
	opLdStrong2x32
	opLdStrong2x64
	opLdStrong4x32
	opLdAny
	opSt8
	opSt16
	opSt32
	opSt64
	opSt2x32
	opSt2x64
	opSt4x32
	opStStrong32
	opStStrong64
	opStStrong4x32
	opStAny
	opAtom
	opLdReduce
	opStMulticast
	opRedMulticast
	opFence
	opBar
	opBarRed
	opClusterArrive // imm: 1 if it releases
	opClusterWait
	opShfl
	opGridWait
	opGridLaunch
	opSleep
)

// Semantics of an access or a fence.
const (
	strong uint8 = 1 << iota
	acquire
	release
	sequential // fence.sc
	alias      // fence.proxy.alias
)

// Scopes, from small to large.
const (
	scopeCTA uint8 = iota
	scopeCluster
	scopeGPU
	scopeSystem
	scopes
)

// access says what a memory instruction does.
type access struct {
	sem, scope uint8
	size, n    uint8 // bytes of an element, elements
	shared     bool
	cluster    bool  // the shared memory may be of any block of the cluster
	rmw        uint8 // for atomics and multimem: what to do
	typ        string
	wide       bool // multimem: sums in float32
}

// What an atomic does.
const (
	rmwAdd uint8 = iota
	rmwCas
	rmwExch
	rmwMin
	rmwMax
	rmwAnd
	rmwOr
	rmwXor
	rmwInc
	rmwDec
)

// call is one function that calls another: where parameters are copied from and to, in words of the frames from where their parameters
// begin.
type call struct {
	to   *Function
	args []move
	rets []move
}

type move struct{ here, there, words int }
