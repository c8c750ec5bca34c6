package ptxvm

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// TestTold: a plan gives up when the word is not 0, and writes the fault word, unless it had given up before.
func TestTold(t *testing.T) {
	const dead, word, fault = 0x1000, 0x1010, 0x1020
	for _, c := range []struct {
		dead, word, wantDead uint32
		want                 ptx.Fault
	}{
		{0, 0, 0, ptx.Fault{}},
		{0, 1, 1, ptx.Fault{Why: ptx.FaultTold, Kernel: ptx.FaultTeller, Peer: 3}},
		{1, 1, 1, ptx.Fault{}},
		{1, 0, 1, ptx.Fault{}},
	} {
		for seed := range uint64(4) {
			memory, b := NewMemory(), aligned(64)
			require.NoError(t, memory.Map(dead, b))
			binary.LittleEndian.PutUint32(b, c.dead)
			binary.LittleEndian.PutUint32(b[word-dead:], c.word)
			machine := New(memory, Config{Seed: seed, Weak: true, MaxSteps: 1 << 16})
			comm := ptx.Comm{Version: ptx.CommVersion, Rank: 3, World: 4, Dead: dead, Fault: fault}
			err := machine.NewStream(0).Launch(Launch{
				Function: moduleOf(t, ptx.Told.File).Function(ptx.Told.Name), Block: [3]uint32{32}, Params: [][]byte{comm.Bytes(), u64(word)},
			})
			require.NoError(t, err)
			require.NoError(t, machine.Run())
			require.Equal(t, c.wantDead, binary.LittleEndian.Uint32(b))
			require.Equal(t, c.want, ptx.DecodeFault(binary.LittleEndian.Uint64(b[fault-dead:])))
		}
	}
}
