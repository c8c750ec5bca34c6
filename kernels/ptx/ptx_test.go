package ptx

import (
	"encoding/binary"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/internal/errs"
)

func header(t *testing.T, file string) string {
	t.Helper()
	b, err := os.ReadFile("../cuda/" + file)
	require.NoError(t, err)
	return string(b)
}

// sameLayout compares a struct with the offsets and the size that a header asserts.
func sameLayout(t *testing.T, text, name string, typ reflect.Type) {
	t.Helper()
	offsets := regexp.MustCompile(`(?m)^SYMMEM_AT\(`+name+`, (\w+), (\d+)\);`).FindAllStringSubmatch(text, -1)
	require.Equal(t, typ.NumField()-1, len(offsets), "fields")
	for i, o := range offsets {
		f := typ.Field(i + 1)
		if f.Name != "_" {
			assert.Equal(t, strings.ToLower(o[1]), strings.ToLower(f.Name))
		} else {
			assert.Equal(t, "reserved", o[1])
		}
		assert.Equal(t, o[2], fmt.Sprint(f.Offset), o[1])
	}
	size := regexp.MustCompile(`sizeof\(` + name + `\) == (\d+)`).FindStringSubmatch(text)
	require.NotNil(t, size)
	assert.Equal(t, size[1], fmt.Sprint(typ.Size()))
	assert.Zero(t, typ.Size()%8)
}

// TestParams compares Params with the struct that the kernels take.
func TestParams(t *testing.T) {
	sameLayout(t, header(t, "params.cuh"), "Params", reflect.TypeFor[Params]())
	p := Params{Count: 5, Channels: 7}
	b := p.Bytes()
	require.Len(t, b, 304)
	assert.Equal(t, byte(5), b[200])
	assert.Equal(t, byte(7), b[296])
}

// TestPieces compares Pieces with the struct that the kernel takes.
func TestPieces(t *testing.T) {
	text := header(t, "pull.cu")
	sameLayout(t, text, "Pieces", reflect.TypeFor[Pieces]())
	assert.Contains(t, text, fmt.Sprintf("kInlinePieces = %d ", InlinePieces))
	assert.Contains(t, header(t, "copy.cuh"), fmt.Sprintf("kChunkBytes = %d ", ChunkBytes))
	assert.Contains(t, text, "u64 from;")
	assert.Equal(t, uintptr(32), reflect.TypeFor[Piece]().Size())
}

// TestMany compares the parameter of the kernels of lists, and a stretch, with the structs that they take.
func TestMany(t *testing.T) {
	text := header(t, "stretch.cuh")
	sameLayout(t, text, "Many", reflect.TypeFor[Many]())
	typ := reflect.TypeFor[Stretch]()
	fields := strings.NewReplacer(" ", "", "\n", "").Replace(regexp.MustCompile(`//.*`).ReplaceAllString(regexp.MustCompile(`(?s)struct Stretch \{(.*?)\};`).FindStringSubmatch(text)[1], ""))
	var names []string
	for f := range typ.Fields() {
		names = append(names, strings.ToLower(f.Name))
		assert.Equal(t, uintptr(8), f.Type.Size())
	}
	assert.Equal(t, names, strings.FieldsFunc(strings.ToLower(strings.ReplaceAll(fields, "u64", "")), func(r rune) bool { return r == ',' || r == ';' }))
	assert.Contains(t, text, fmt.Sprintf("sizeof(Stretch) == %d", typ.Size()))
	sameLayout(t, text, "WholeMany", reflect.TypeFor[WholeMany]())
	assert.Contains(t, text, fmt.Sprintf("kInlineStretches = %d ", InlineStretches))
	assert.Contains(t, text, "struct WholeStretch {\n  u64 in, out; ")
	assert.Contains(t, text, "\n  u32 vectors;\n  u32 line; ")
	assert.Equal(t, uintptr(24), reflect.TypeFor[WholeStretch]().Size())
	for dtype, line := range map[string]int64{"f32": 16, "bf16": 16, "f64": 8, "i8": 8} {
		assert.Equal(t, line, ManyLine(dtype))
	}
	_, oneShot := ManyOneShot("f8", true)
	_, pull := ManyPull("f8")
	_, scatter := ManyScatter("f8", true)
	assert.False(t, oneShot || pull || scatter)
}

// TestComm compares Comm with the struct of the public header. Kernels that others have compiled rely on every number here: where one
// changes, so does CommVersion.
func TestComm(t *testing.T) {
	text := header(t, "symmem.cuh")
	sameLayout(t, text, "Comm", reflect.TypeFor[Comm]())
	assert.Contains(t, text, fmt.Sprintf("kVersion = %d ", CommVersion))
	c := Comm{
		Version: 1, Index: 2, Rank: 3, World: 4, Timeout: 5, Stop: 6, Dead: 7, Fault: 8, Table: 9,
		Workspace: [Inline]uint64{11, 12, 13, 14, 15, 16, 17, 18},
	}
	var want []byte
	for _, word := range []uint32{1, 2, 3, 4} {
		want = binary.LittleEndian.AppendUint32(want, word)
	}
	for _, word := range []uint64{5, 6, 7, 8, 9, 0, 11, 12, 13, 14, 15, 16, 17, 18} {
		want = binary.LittleEndian.AppendUint64(want, word)
	}
	assert.Equal(t, want, c.Bytes())
	assert.Equal(t, int64(3*128), ControlBytes(3, 8))
	assert.Equal(t, int64(3*256), ControlBytes(3, 9))
}

// TestHeaderAlone: the public header needs no other, and every function of it is said what it does.
func TestHeaderAlone(t *testing.T) {
	text := header(t, "symmem.cuh")
	assert.NotContains(t, text, "#include \"")
	assert.NotRegexp(t, `(?m)^#include <`, text)
	lines := strings.Split(text, "\n")
	functions := 0
	for i, line := range lines {
		name := regexp.MustCompile(`^ *(?:template <[^>]*> )?(?:static )?SYMMEM_DEVICE (?:[\w<>]+ )?(\w+)\(`).FindStringSubmatch(line)
		if name == nil {
			continue
		}
		functions++
		// Its comment is above it, or above the functions that stand together with it.
		assert.Regexp(t, `// .*\b`+name[1]+`\b`, strings.Join(lines[max(i-20, 0):i], "\n"), name[1])
	}
	assert.Greater(t, functions, 25)
}

// TestConstants compares the numbers that both sides know.
func TestConstants(t *testing.T) {
	text := header(t, "params.cuh") + header(t, "symmem.cuh")
	for name, want := range map[string]int{
		"kSum": Sum, "kProd": Prod, "kMin": Min, "kMax": Max, "kAvg": Avg, "kInline": Inline,
		"kStaged": Staged, "kNoBarrier": NoBarrier, "kAtomics": Atomics,
		"kKindOneshotLL": int(OneShotLL), "kKindOneshotPush": int(OneShotPush), "kKindOneshotPull": int(OneShotPull),
		"kKindTwoshotPush": int(TwoShotPush), "kKindTwoshotPull": int(TwoShotPull), "kKindTwoshotFlow": int(TwoShotFlow),
		"kKindOneshotMultimem": int(OneShotMultimem), "kKindTwoshotMultimem": int(TwoShotMultimem),
		"kKindMany": FaultMany, "kKindBarrier": FaultBarrier, "kKindWait": FaultWait, "kKindSignal": FaultSignal, "kFaultTimeout": FaultTimeout, "kFaultStopped": FaultStopped,
		"kFaultVersion": FaultVersion, "kKindUser": FaultUser, "kVersion": CommVersion,
		"kStateBytes": stateBytes, "kFlagKinds": flagKinds, "kFlowSlots": flowSlots, "kPadStride": padStride, "kPadKinds": padKinds,
	} {
		m := regexp.MustCompile(`\b` + name + ` = (\d+)`).FindStringSubmatch(text)
		if assert.NotNil(t, m, name) {
			got, err := strconv.Atoi(m[1])
			require.NoError(t, err)
			assert.Equal(t, want, got, name)
		}
	}
}

func TestAllReduce(t *testing.T) {
	k, ok := AllReduce(OneShotPush, "bf16", Sum, 4, true)
	require.True(t, ok)
	assert.Equal(t, Kernel{File: "push_bf16_w4_sm90.ptx", Name: "symmem_allreduce_oneshot_push_bf16_sum_w4", Overlap: true}, k)
	for _, c := range []struct {
		form      Form
		dtype     string
		op, world int
	}{
		{OneShotPush, "i32", Sum, 4},         // only floats have a spare value
		{OneShotPush, "f32", Max, 4},         // only sums are special
		{TwoShotPush, "f32", Sum, 9},         // only up to 8 ranks
		{TwoShotPush, "f32", Sum, 1},         // nobody to push to
		{OneShotMultimem, "bf16", Avg, 4},    // would be rounded twice
		{TwoShotPull, "f8", Sum, 4},          // no such dtype
		{TwoShotPull, "f32", 0, 4},           // no such operation
		{TwoShotPull, "f32", Avg + 1, 4},     // no such operation
		{TwoShotPull, "f32", Sum, 0},         // nobody at all
		{0, "f32", Sum, 4},                   // no such form
		{TwoShotMultimem + 1, "f32", Sum, 4}, // no such form
	} {
		_, ok := AllReduce(c.form, c.dtype, c.op, c.world, true)
		assert.False(t, ok, "%+v", c)
	}
}

// TestNoImages: without the package that carries them there are none, and the error says which it is.
func TestNoImages(t *testing.T) {
	_, err := Image(Barrier.File)
	require.ErrorIs(t, err, errs.ErrUnsupported)
	assert.ErrorContains(t, err, "kernels/ptx/images")
	assert.ErrorContains(t, err, Barrier.File)
}

func TestLayout(t *testing.T) {
	// 1000 bytes may lie in 64 vectors of 16 if they begin in the middle of one; 4 ranks reduce 16 of them each.
	for _, c := range []struct {
		form                   Form
		shard, span, afterward int64
	}{
		{OneShotLL, 16, 2048, 8 * 2048},
		{OneShotPush, 16, 1024, 8 * 1024},
		{OneShotPull, 16, 1024, 0},
		{TwoShotPush, 16, 256, 16 * 256},
		{TwoShotPull, 16, 0, 0},
		{TwoShotFlow, 16, 512, 4 * 3 * 4 * 512},
	} {
		l := Layout{Form: c.form, World: 4, Bytes: 1000, Blocks: 3, LapBytes: 512}
		assert.Equal(t, c.shard, l.Shard(), c.form)
		assert.Equal(t, c.span, l.Span(), c.form)
		assert.Equal(t, int64(3*128), l.ControlBytes(), c.form)
		assert.Equal(t, l.ControlBytes()+c.afterward, l.WorkspaceBytes(), c.form)
	}
	assert.Equal(t, int64(256), Layout{Form: TwoShotPull, World: 9, Bytes: 1, Blocks: 1}.ControlBytes())
	assert.Equal(t, int64(128+2*1024), Layout{Form: OneShotPull, World: 4, Bytes: 1000, Blocks: 1, Staged: true}.WorkspaceBytes())
	assert.Equal(t, int64(128+1024), Layout{Form: OneShotMultimem, World: 4, Bytes: 1000, Blocks: 1, Staged: true}.WorkspaceBytes())
	assert.Equal(t, int64(128), Layout{Form: OneShotMultimem, World: 4, Bytes: 1000, Blocks: 1}.WorkspaceBytes())
	assert.Equal(t, int64(3*(2*4*128+128)), PadBytes(4, 3))
}

// TestLayoutCovers checks that every vector of a message is in one rank's shard, wherever the message begins.
func TestLayoutCovers(t *testing.T) {
	for world := 1; world <= 9; world++ {
		for bytes := int64(1); bytes < 700; bytes++ {
			l := Layout{Form: TwoShotPush, World: world, Bytes: bytes, Blocks: 1}
			assert.GreaterOrEqual(t, l.Shard()*int64(world)*vector, bytes+vector-1)
			assert.Zero(t, l.Shard()%8)
			if bytes%vector != 0 {
				continue
			}
			l.Whole = true
			assert.GreaterOrEqual(t, l.Shard()*int64(world)*vector, bytes)
			assert.Zero(t, l.Shard()%8)
		}
	}
	// A whole message is shared out evenly, in laps of which none is for what is not there.
	for _, l := range []Layout{{Form: TwoShotPush, World: 2, Bytes: 4 << 20, Whole: true}, {Form: TwoShotFlow, World: 4, Bytes: 64 << 20, LapBytes: 32 << 10, Whole: true}} {
		assert.Equal(t, l.Bytes, l.Shard()*int64(l.World)*vector)
		assert.Equal(t, l.Bytes, Layout{Form: OneShotPush, World: l.World, Bytes: l.Bytes, Whole: true}.Span())
		l.Whole = false
		assert.Greater(t, l.Shard()*int64(l.World)*vector, l.Bytes)
	}
}

func TestDecodeFault(t *testing.T) {
	want := Fault{Why: FaultTimeout, Kernel: uint8(OneShotPush), Peer: 3, Index: 9, Block: 12}
	assert.Equal(t, want, DecodeFault(0x010200030009000c))
	for _, f := range Forms() {
		assert.NotContains(t, f.String(), "Form(")
	}
	assert.Equal(t, "Form(0)", Form(0).String())
	assert.Equal(t, "Form(99)", Form(99).String())
}

// TestPadImage: every counter that a signal goes by begins where it should, and nothing else is touched.
func TestPadImage(t *testing.T) {
	const world, channels, first = 3, 2, uint32(0xfffffff0)
	begin := func(channel int) uint32 { return first + uint32(channel) }
	pad := PadImage(world, channels, first, begin)
	require.Len(t, pad, int(PadBytes(world, channels)))
	word := func(at int) uint32 { return binary.LittleEndian.Uint32(pad[at:]) }
	want := map[int]uint32{}
	states := channels * padKinds * world * padStride
	for c := range channels {
		state := states + c*int(padStateBytes(world))
		want[state] = first // the barrier's epoch
		for r := range world {
			want[((c*padKinds+0)*world+r)*padStride] = begin(c)
			want[((c*padKinds+1)*world+r)*padStride] = first
			want[state+32+4*r] = begin(c)           // sent
			want[state+32+4*(world+r)] = first      // consumed
			want[state+32+4*(2*world+r)] = begin(c) // stored
		}
	}
	for at := 0; at < len(pad); at += 4 {
		assert.Equalf(t, want[at], word(at), "word at %d", at)
	}
}

// TestPushParams compares the bytes of PushParams with where the kernels' header says that each field is.
func TestPushParams(t *testing.T) {
	for _, world := range []int{2, 8} {
		p := PushParams{In: 1, Out: 2, Records: 3, Dead: 4, Vectors: 5, Shard: 6, Slot: 7, Rank: 8, Op: 9, Index: 10, Fault: 11, Stop: 12, Timeout: 13}
		for r := range world {
			p.Data = append(p.Data, uint64(100+r))
		}
		b := p.Bytes()
		assert.Len(t, b, 80+8*world)
		fields := regexp.MustCompile(`(?m)^SYMMEM_PUSH_AT\((\w+), (\d+), (\d)\);`).FindAllStringSubmatch(header(t, "push.cuh"), -1)
		require.Len(t, fields, reflect.TypeFor[PushParams]().NumField())
		want := map[string]byte{"in": 1, "out": 2, "data": 100, "records": 3, "dead": 4, "vectors": 5, "shard": 6, "slot": 7, "rank": 8, "op": 9, "index": 10,
			"fault": 11, "stop": 12, "timeout": 13}
		for _, f := range fields {
			base, err := strconv.Atoi(f[2])
			require.NoError(t, err)
			if f[3] == "1" {
				base += 8 * world
			}
			assert.Equal(t, want[f[1]], b[base], "%s of %d ranks", f[1], world)
		}
	}
}

// TestPushWhole: only the forms that push have kernels for whole vectors.
func TestPushWhole(t *testing.T) {
	k, ok := PushWhole(TwoShotPush, "f32", Avg, 2, false)
	require.True(t, ok)
	assert.Equal(t, Kernel{File: "push_f32_w2.ptx", Name: "symmem_allreduce_twoshot_push_whole_f32_sum_w2"}, k)
	for _, form := range Forms() {
		_, ok := PushWhole(form, "f32", Sum, 4, true)
		assert.Equal(t, form == OneShotPush || form == TwoShotPush, ok, form)
	}
	_, ok = PushWhole(OneShotPush, "i32", Sum, 4, true)
	assert.False(t, ok)
}

// TestPushLong: between two ranks there are kernels for long messages wherever there is one for whole vectors in one shot.
func TestPushLong(t *testing.T) {
	k, ok := PushLong(OneShotPush, "f32", Avg, 2, false)
	assert.True(t, ok)
	assert.Equal(t, Kernel{File: "push_f32_w2.ptx", Name: "symmem_allreduce_oneshot_push_long_f32_sum_w2"}, k)
	k, ok = PushLonger(OneShotPush, "f32", Avg, 2, false)
	assert.True(t, ok)
	assert.Equal(t, Kernel{File: "push_f32_w2.ptx", Name: "symmem_allreduce_oneshot_push_longer_f32_sum_w2"}, k)
	for _, world := range []int{1, 2, 3, 8} {
		for _, form := range Forms() {
			_, whole := PushWhole(form, "bf16", Sum, world, true)
			_, long := PushLong(form, "bf16", Sum, world, true)
			_, longer := PushLonger(form, "bf16", Sum, world, true)
			assert.Equal(t, whole && form == OneShotPush && world == 2, long, "%s between %d", form, world)
			assert.Equal(t, long, longer, "%s between %d", form, world)
		}
	}
	_, ok = PushLong(OneShotPush, "i32", Sum, 2, true)
	assert.False(t, ok)
}

// TestManyPushWhole: lists have a kernel for whole vectors where messages have one.
func TestManyPushWhole(t *testing.T) {
	k, ok := ManyPushWhole("bf16", Avg, 8, true)
	require.True(t, ok)
	assert.Equal(t, Kernel{File: "push_bf16_w8_sm90.ptx", Name: "symmem_allreduce_many_push_whole_bf16_sum_w8", Overlap: true}, k)
	for _, dtype := range dtypes {
		for op := Sum; op <= Avg; op++ {
			for world := 1; world <= 16; world++ {
				for _, hopper := range []bool{false, true} {
					one, want := PushWhole(OneShotPush, dtype, op, world, hopper)
					k, ok := ManyPushWhole(dtype, op, world, hopper)
					assert.Equal(t, want, ok, "%s, op %d, %d ranks", dtype, op, world)
					assert.Equal(t, one.File, k.File)
					assert.Equal(t, one.Overlap, k.Overlap)
				}
			}
		}
	}
}
