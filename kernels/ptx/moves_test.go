package ptx

import (
	"reflect"
	"regexp"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestMoves compares the parameters of the kernels that push with the structs that these take, and the numbers that both sides know.
func TestMoves(t *testing.T) {
	lines, lists := header(t, "lines.cu"), header(t, "alltoallv.cu")
	sameLayout(t, lines, "Lines", reflect.TypeFor[Lines]())
	sameLayout(t, lists, "AllToAllV", reflect.TypeFor[AllToAllV]())
	sameLayout(t, header(t, "multimem.cu"), "Cast", reflect.TypeFor[CastParams]())
	assert.Equal(t, uintptr(40), reflect.TypeFor[LinePiece]().Size())
	text := lines + lists + header(t, "params.cuh") + header(t, "lines.cuh") + header(t, "told.cu")
	for name, want := range map[string]int{
		"kInlineLines": InlineLines, "kToRoot": ToRoot, "kFaultCount": FaultCount, "kFaultRoom": FaultRoom, "kCountNegative": CountNegative, "kCountBeyond": CountBeyond,
		"kKindLines": FaultLines, "kKindMeet": FaultMeet, "kKindScatter": FaultScatter, "kKindAllToAllV": FaultAllToAllV, "kKindCast": FaultCast, "kFaultTold": FaultTold, "kKindTold": FaultTeller,
	} {
		m := regexp.MustCompile(`\b` + name + ` = (\d+)`).FindStringSubmatch(text)
		require.NotNil(t, m, name)
		got, err := strconv.Atoi(m[1])
		require.NoError(t, err)
		assert.Equal(t, want, got, name)
	}
	assert.Less(t, FaultAllToAllV, FaultUser)
	assert.Equal(t, uint32(0x12345678), DecodeFault(0x111b000312345678).Number())
}

func TestPushScatter(t *testing.T) {
	k, ok := PushScatter(OneShotPush, "bf16", true)
	require.True(t, ok)
	assert.Equal(t, Kernel{File: "scatter_bf16_sm90.ptx", Name: "symmem_scatter_push_bf16", Overlap: true}, k)
	k, ok = PushScatter(OneShotLL, "i8", true)
	require.True(t, ok)
	assert.Equal(t, Kernel{File: "scatter_i8.ptx", Name: "symmem_scatter_ll_i8"}, k)
	for _, c := range []struct {
		form  Form
		dtype string
	}{{OneShotPush, "i32"}, {OneShotPush, "f64"}, {OneShotPull, "f32"}, {OneShotLL, "f8"}} {
		_, ok := PushScatter(c.form, c.dtype, true)
		assert.False(t, ok, "%+v", c)
	}
}

// TestLinesWhole: every pattern has a kernel for 2 to 8 ranks.
func TestLinesWhole(t *testing.T) {
	k, ok := LinesWhole(Exchange, 4, true)
	require.True(t, ok)
	assert.Equal(t, Kernel{File: "lines_w4_sm90.ptx", Name: "symmem_lines_exchange_w4", Overlap: true}, k)
	k, ok = LinesWhole(Broadcast, 8, false)
	require.True(t, ok)
	assert.Equal(t, Kernel{File: "lines_w8.ptx", Name: "symmem_lines_broadcast_w8"}, k)
	for pattern := range Broadcast + 2 {
		for world := range 12 {
			_, ok := LinesWhole(pattern, world, true)
			assert.Equal(t, pattern >= Gather && pattern <= Broadcast && world >= 2 && world <= 8, ok, "pattern %d of %d ranks", pattern, world)
		}
	}
}

// TestScatterWhole: reduce-scatter and reduce have a kernel for whole vectors where an all-reduce has one.
func TestScatterWhole(t *testing.T) {
	k, ok := ScatterWhole("bf16", Avg, 4, false, true)
	require.True(t, ok)
	assert.Equal(t, Kernel{File: "scatter_bf16_w4_sm90.ptx", Name: "symmem_scatter_whole_bf16_sum_w4", Overlap: true}, k)
	k, ok = ScatterWhole("f32", Sum, 2, true, false)
	require.True(t, ok)
	assert.Equal(t, Kernel{File: "scatter_f32_w2.ptx", Name: "symmem_scatter_root_f32_sum_w2"}, k)
	for _, dtype := range dtypes {
		for op := Sum; op <= Avg; op++ {
			for world := 1; world <= 16; world++ {
				_, want := PushWhole(OneShotPush, dtype, op, world, true)
				_, ok := ScatterWhole(dtype, op, world, op%2 == 0, true)
				assert.Equal(t, want, ok, "%s, op %d, %d ranks", dtype, op, world)
				_, ok = ScatterFlow(dtype, op, world)
				assert.Equal(t, want, ok, "%s, op %d, %d ranks", dtype, op, world)
			}
		}
	}
}

// TestScatterFlow: the kernel is beside those for short shares, the same for all devices, and chunks and workspaces are as long as it takes them to be.
func TestScatterFlow(t *testing.T) {
	k, ok := ScatterFlow("f16", Sum, 8)
	require.True(t, ok)
	assert.Equal(t, Kernel{File: "scatter_f16_w8.ptx", Name: "symmem_scatter_flow_f16_sum_w8"}, k)
	assert.Equal(t, int64(1), ScatterFlowChunks(16, 2, 256))
	for world, chunk := range map[int]int64{2: 32 << 10, 3: 16 << 10, 4: 16 << 10, 5: 8 << 10, 8: 8 << 10} {
		assert.Equal(t, int64(1), ScatterFlowChunks(chunk, world, 256), "%d ranks", world)
		assert.Equal(t, int64(2), ScatterFlowChunks(chunk+16, world, 256), "%d ranks", world)
	}
	assert.Equal(t, 3*ScatterSpan(OneShotPush, 64<<10), ScatterFlowBytes(64<<10, 4))
}

// TestMoveSlots: a slot holds every line of what is put there, wherever that begins.
func TestMoveSlots(t *testing.T) {
	for bytes := int64(1); bytes < 300; bytes++ {
		for lead := range uint32(16) {
			assert.LessOrEqual(t, LinesOf(bytes, lead%8)*16, LinesSlotBytes(bytes))
			assert.LessOrEqual(t, (bytes+int64(lead%8)+7)/8*16, ScatterSpan(OneShotLL, bytes))
			assert.LessOrEqual(t, (bytes+int64(lead)+15)/16*16, ScatterSpan(OneShotPush, bytes))
		}
		assert.Zero(t, LinesSlotBytes(bytes)%128)
		assert.LessOrEqual(t, 2*bytes, LinesWholeSlotBytes(bytes))
		assert.Zero(t, LinesWholeSlotBytes(bytes)/2%128, "the second half is aligned too")
	}
	assert.Equal(t, int64(1152), AllToAllVBlockBytes(8))
}

// TestTogetherFlags: pieces are stored together if all are whole vectors that an index of 32 bits counts, and are loaded once if they are the same bytes.
func TestTogetherFlags(t *testing.T) {
	const base = 1 << 30
	pieces := func(n int, change func(*Piece)) []Piece {
		var out []Piece
		for i := range n {
			out = append(out, Piece{From: base, To: base * uint64(i+2), Bytes: 4096})
		}
		if change != nil {
			change(&out[n-1])
		}
		return out
	}
	for _, c := range []struct {
		what   string
		change func(*Piece)
		want   uint32
	}{
		{"the same bytes", nil, StoredTogether | AlikePieces},
		{"other bytes", func(c *Piece) { c.From += 4096 }, StoredTogether},
		{"fewer bytes", func(c *Piece) { c.Bytes = 16 }, StoredTogether},
		{"a byte too many", func(c *Piece) { c.Bytes++ }, 0},
		{"not aligned where they come from", func(c *Piece) { c.From += 8 }, 0},
		{"not aligned where they go", func(c *Piece) { c.To += 4 }, 0},
		{"the most vectors", func(c *Piece) { c.Bytes = 16 * (1<<31 - 1) }, StoredTogether},
		{"one more", func(c *Piece) { c.Bytes = 16 << 31 }, 0},
	} {
		assert.Equal(t, c.want, TogetherFlags(pieces(3, c.change)), c.what)
	}
	assert.Equal(t, uint32(StoredTogether|AlikePieces), TogetherFlags(pieces(1, nil)))
}
