#include "textflag.h"

// Element-wise loops over blocks of 128 bytes, with AVX2 and F16C. Wide loads keep many cache lines on their way at once, which
// is what decides when the lines are another core's. What is left over after the last whole block is done in Go.

// COMBINE(op) is func(dst, x, y unsafe.Pointer, blocks int): dst = x op y for blocks * 128 bytes. dst may be x or y.
#define COMBINE(op) \
	MOVQ	dst+0(FP), DI \
	MOVQ	x+8(FP), SI \
	MOVQ	y+16(FP), DX \
	MOVQ	blocks+24(FP), CX \
loop: \
	VMOVDQU	(SI), Y0 \
	VMOVDQU	32(SI), Y1 \
	VMOVDQU	64(SI), Y2 \
	VMOVDQU	96(SI), Y3 \
	op	(DX), Y0, Y0 \
	op	32(DX), Y1, Y1 \
	op	64(DX), Y2, Y2 \
	op	96(DX), Y3, Y3 \
	VMOVDQU	Y0, (DI) \
	VMOVDQU	Y1, 32(DI) \
	VMOVDQU	Y2, 64(DI) \
	VMOVDQU	Y3, 96(DI) \
	ADDQ	$128, SI \
	ADDQ	$128, DX \
	ADDQ	$128, DI \
	DECQ	CX \
	JNE	loop \
	VZEROUPPER \
	RET

TEXT ·addF32(SB), NOSPLIT, $0-32
	COMBINE(VADDPS)

TEXT ·addF64(SB), NOSPLIT, $0-32
	COMBINE(VADDPD)

TEXT ·mulF32(SB), NOSPLIT, $0-32
	COMBINE(VMULPS)

TEXT ·mulF64(SB), NOSPLIT, $0-32
	COMBINE(VMULPD)

TEXT ·addI8(SB), NOSPLIT, $0-32
	COMBINE(VPADDB)

TEXT ·addI16(SB), NOSPLIT, $0-32
	COMBINE(VPADDW)

TEXT ·addI32(SB), NOSPLIT, $0-32
	COMBINE(VPADDD)

TEXT ·addI64(SB), NOSPLIT, $0-32
	COMBINE(VPADDQ)


// func loadBF16(dst *float32, src *uint16, blocks int): 32 elements a block.
TEXT ·loadBF16(SB), NOSPLIT, $0-24
	MOVQ	dst+0(FP), DI
	MOVQ	src+8(FP), SI
	MOVQ	blocks+16(FP), CX
loop:
	VPMOVZXWD	(SI), Y0
	VPMOVZXWD	16(SI), Y1
	VPMOVZXWD	32(SI), Y2
	VPMOVZXWD	48(SI), Y3
	VPSLLD	$16, Y0, Y0
	VPSLLD	$16, Y1, Y1
	VPSLLD	$16, Y2, Y2
	VPSLLD	$16, Y3, Y3
	VMOVDQU	Y0, (DI)
	VMOVDQU	Y1, 32(DI)
	VMOVDQU	Y2, 64(DI)
	VMOVDQU	Y3, 96(DI)
	ADDQ	$64, SI
	ADDQ	$128, DI
	DECQ	CX
	JNE	loop
	VZEROUPPER
	RET

// func loadF16(dst *float32, src *uint16, blocks int): 32 elements a block.
TEXT ·loadF16(SB), NOSPLIT, $0-24
	MOVQ	dst+0(FP), DI
	MOVQ	src+8(FP), SI
	MOVQ	blocks+16(FP), CX
loop:
	VCVTPH2PS	(SI), Y0
	VCVTPH2PS	16(SI), Y1
	VCVTPH2PS	32(SI), Y2
	VCVTPH2PS	48(SI), Y3
	VMOVDQU	Y0, (DI)
	VMOVDQU	Y1, 32(DI)
	VMOVDQU	Y2, 64(DI)
	VMOVDQU	Y3, 96(DI)
	ADDQ	$64, SI
	ADDQ	$128, DI
	DECQ	CX
	JNE	loop
	VZEROUPPER
	RET

// func storeF16(dst *uint16, src *float32, blocks int): 32 elements a block, rounded to the nearest, ties to even.
TEXT ·storeF16(SB), NOSPLIT, $0-24
	MOVQ	dst+0(FP), DI
	MOVQ	src+8(FP), SI
	MOVQ	blocks+16(FP), CX
loop:
	VMOVDQU	(SI), Y0
	VMOVDQU	32(SI), Y1
	VMOVDQU	64(SI), Y2
	VMOVDQU	96(SI), Y3
	VCVTPS2PH	$0, Y0, (DI)
	VCVTPS2PH	$0, Y1, 16(DI)
	VCVTPS2PH	$0, Y2, 32(DI)
	VCVTPS2PH	$0, Y3, 48(DI)
	ADDQ	$128, SI
	ADDQ	$64, DI
	DECQ	CX
	JNE	loop
	VZEROUPPER
	RET

// ROUND(r, t): the 8 float32 of r become their bfloat16 bits in the low half of each: b + 0x7fff + (b>>16 & 1), shifted, and
// for a NaN b>>16 | 0x40. Y12 is 1, Y13 0x7fff, Y14 0x40 in each; t and Y15 are scratch.
#define ROUND(r, t) \
	VPSRLD	$16, r, t \
	VPAND	Y12, t, Y15 \
	VPADDD	Y13, Y15, Y15 \
	VPADDD	r, Y15, Y15 \
	VPSRLD	$16, Y15, Y15 \
	VPOR	Y14, t, t \
	VCMPPS	$3, r, r, r \
	VPBLENDVB	r, t, Y15, r

// func storeBF16(dst *uint16, src *float32, blocks int): 32 elements a block, rounded to the nearest, ties to even.
TEXT ·storeBF16(SB), NOSPLIT, $0-24
	MOVQ	dst+0(FP), DI
	MOVQ	src+8(FP), SI
	MOVQ	blocks+16(FP), CX
	MOVL	$1, AX
	VMOVD	AX, X12
	VPBROADCASTD	X12, Y12
	MOVL	$0x7fff, AX
	VMOVD	AX, X13
	VPBROADCASTD	X13, Y13
	MOVL	$0x40, AX
	VMOVD	AX, X14
	VPBROADCASTD	X14, Y14
loop:
	VMOVDQU	(SI), Y0
	VMOVDQU	32(SI), Y1
	VMOVDQU	64(SI), Y2
	VMOVDQU	96(SI), Y3
	ROUND(Y0, Y4)
	ROUND(Y1, Y5)
	ROUND(Y2, Y6)
	ROUND(Y3, Y7)
	// Packing works within 128-bit lanes, so the quarters come out as 0 2 1 3 and are put in order.
	VPACKUSDW	Y1, Y0, Y0
	VPACKUSDW	Y3, Y2, Y2
	VPERMQ	$0xd8, Y0, Y0
	VPERMQ	$0xd8, Y2, Y2
	VMOVDQU	Y0, (DI)
	VMOVDQU	Y2, 32(DI)
	ADDQ	$128, SI
	ADDQ	$64, DI
	DECQ	CX
	JNE	loop
	VZEROUPPER
	RET
