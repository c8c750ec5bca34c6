package ptxvm

//go:generate python3 ../../kernels/gen/gen.py --compile testdata/waits.cu

import (
	"encoding/binary"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// twoWaits runs a kernel that waits twice for its peer, which is slow, with a bound of so many nanoseconds of the machine's time, and gives rank 0's fault word.
func twoWaits(t *testing.T, timeout uint64, seed uint64) uint64 {
	text, err := os.ReadFile("testdata/waits.ptx")
	require.NoError(t, err)
	f := parse(t, "waits.ptx", string(text)).Function("two_waits")
	const ranks = 2
	memory := NewMemory()
	comm := ptx.Comm{Version: ptx.CommVersion, World: ranks, Timeout: timeout}
	var words [ranks][]byte
	for r := range ranks {
		at := uint64(r+1) * rankAt
		words[r] = aligned(64)
		require.NoError(t, memory.Map(at+channelAt, aligned(int(ptx.ControlBytes(1, ranks)))))
		require.NoError(t, memory.Map(at+wordsAt, words[r]))
		comm.Workspace[r] = at + channelAt
	}
	m := New(memory, Config{Seed: seed, Turn: 20, MaxSteps: 1 << 26, Schedule: Slow(300, func(t Thread) bool { return t.Device == 1 })})
	for r := range ranks {
		own := comm
		at := uint64(r+1) * rankAt
		own.Rank, own.Dead, own.Fault = uint32(r), at+wordsAt, at+wordsAt+16
		require.NoError(t, m.NewStream(r).Launch(Launch{Function: f, Grid: [3]uint32{1}, Block: [3]uint32{32}, Params: [][]byte{own.Bytes()}}))
	}
	require.NoError(t, m.Run())
	return binary.LittleEndian.Uint64(words[0][16:])
}

// TestWaitsOfAUser: each of the two waits takes less than the bound, and both together take more.
func TestWaitsOfAUser(t *testing.T) {
	for seed := range uint64(2) {
		require.Zero(t, twoWaits(t, 100e3, seed), "with seed %d", seed)
		require.NotZero(t, twoWaits(t, 30e3, seed), "each is bounded")
	}
}
