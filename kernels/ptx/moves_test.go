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

// TestMoveSlots: a slot holds every line of what is put there, wherever that begins.
func TestMoveSlots(t *testing.T) {
	for bytes := int64(1); bytes < 300; bytes++ {
		for lead := range uint32(16) {
			assert.LessOrEqual(t, LinesOf(bytes, lead%8)*16, LinesSlotBytes(bytes))
			assert.LessOrEqual(t, (bytes+int64(lead%8)+7)/8*16, ScatterSpan(OneShotLL, bytes))
			assert.LessOrEqual(t, (bytes+int64(lead)+15)/16*16, ScatterSpan(OneShotPush, bytes))
		}
		assert.Zero(t, LinesSlotBytes(bytes)%128)
	}
	assert.Equal(t, int64(1152), AllToAllVBlockBytes(8))
}
