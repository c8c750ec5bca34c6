package ptxvm

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// rmsnorm runs the kernel of examples/kernel, launch after launch, and returns hidden and y after the last one of rank 0. It has what the
// module's own kernels have not: shared memory, shuffles and generic addresses.
func rmsnorm(t *testing.T, ranks int, c Config) (hidden, y []float32) {
	text, err := os.ReadFile("../../examples/kernel/rmsnorm.ptx")
	require.NoError(t, err)
	f := parse(t, "rmsnorm.ptx", string(text)).Function("allreduce_rmsnorm")
	const rows, columns, blocks, threads, launches, epsilon = 5, 96, 2, 64, 4, 1e-5
	const bytes = rows * columns * 4
	memory := NewMemory()
	comm := ptx.Comm{Version: ptx.CommVersion, World: uint32(ranks), Timeout: 1 << 62}
	rnd := rand.New(rand.NewPCG(1, 2))
	floats := func(at uint64, n int) ([]byte, []float32) {
		b := aligned(n * 4)
		require.NoError(t, memory.Map(at, b))
		v := make([]float32, n)
		for i := range v {
			v[i] = float32(rnd.NormFloat64())
			binary.LittleEndian.PutUint32(b[i*4:], math.Float32bits(v[i]))
		}
		return b, v
	}
	const xAt, hiddenAt, weightAt, yAt = inAt, outAt, sourceAt, sinkAt
	var xs, residuals, weights [][]float32
	var sums, ys [][]byte // hidden afterwards
	for r := range ranks {
		at := uint64(r+1) * rankAt
		_, x := floats(at+xAt, rows*columns)
		s, residual := floats(at+hiddenAt, rows*columns)
		_, weight := floats(at+weightAt, columns)
		o, _ := floats(at+yAt, rows*columns)
		xs, residuals, weights, sums, ys = append(xs, x), append(residuals, residual), append(weights, weight), append(sums, s), append(ys, o)
		require.NoError(t, memory.Map(at+channelAt, aligned(int(ptx.ControlBytes(blocks, ranks))+2*bytes)))
		require.NoError(t, memory.Map(at+wordsAt, aligned(64)))
		comm.Workspace[r] = at + channelAt
	}
	m := New(memory, c)
	for r := range ranks {
		own := comm
		at := uint64(r+1) * rankAt
		own.Rank, own.Dead, own.Fault = uint32(r), at+wordsAt, at+wordsAt+16
		s := m.NewStream(r)
		for range launches {
			require.NoError(t, s.Launch(Launch{Function: f, Grid: [3]uint32{blocks}, Block: [3]uint32{threads}, Params: [][]byte{
				own.Bytes(), u64(at + xAt), u64(at + hiddenAt), u64(at + weightAt), u64(at + yAt), u32(rows), u32(columns), u32(math.Float32bits(epsilon)),
			}}))
		}
	}
	require.NoError(t, m.Run())
	for r := range ranks {
		for row := range rows {
			squares := 0.0
			for i := row * columns; i < (row+1)*columns; i++ {
				want := residuals[r][i]
				for range launches {
					for q := range ranks {
						want += xs[q][i]
					}
				}
				got := math.Float32frombits(binary.LittleEndian.Uint32(sums[r][i*4:]))
				require.Equal(t, want, got)
				squares += float64(got) * float64(got)
			}
			for i := row * columns; i < (row+1)*columns; i++ {
				want := float64(math.Float32frombits(binary.LittleEndian.Uint32(sums[r][i*4:]))) / math.Sqrt(squares/columns+epsilon) * float64(weights[r][i%columns])
				got := float64(math.Float32frombits(binary.LittleEndian.Uint32(ys[r][i*4:])))
				require.InDelta(t, want, got, 1e-5*(1+math.Abs(want)))
			}
		}
	}
	for i := range rows * columns {
		hidden = append(hidden, math.Float32frombits(binary.LittleEndian.Uint32(sums[0][i*4:])))
		y = append(y, math.Float32frombits(binary.LittleEndian.Uint32(ys[0][i*4:])))
	}
	return hidden, y
}

func TestExampleRMSNorm(t *testing.T) {
	for _, ranks := range []int{1, 2, 3} {
		t.Run(fmt.Sprintf("ranks=%d", ranks), func(t *testing.T) {
			hidden, y := rmsnorm(t, ranks, Config{Seed: 1, MaxSteps: 1 << 26})
			for seed := range uint64(3) {
				weakHidden, weakY := rmsnorm(t, ranks, Config{Seed: seed, Weak: true, MaxSteps: 1 << 26})
				require.Equal(t, hidden, weakHidden)
				require.Equal(t, y, weakY)
			}
		})
	}
}
