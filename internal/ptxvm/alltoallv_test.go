package ptxvm

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// dispatch is an all-to-all with counts on the device, for several launches. What goes where is chosen anew for each.
type dispatch struct {
	ranks     int
	rowBytes  int
	rows      int // of the input, and of the output
	room      int
	displaced bool
	epochs    int
	slow      int
	spoil     func(counts, places [][]int64) // of the last launch
}

// run carries out all launches at once, into the same outputs, which a kernel behind each launch copies.
func (j dispatch) run(tb testing.TB, c Config, replace func(*Module) *Module) (*crew, error) {
	block := ptx.AllToAllVBlockBytes(j.ranks)
	w := newCrew(tb, j.ranks, 2, 16, 2*block, 1<<32-2, c)
	w.replace = replace
	rnd := rand.New(rand.NewPCG(c.Seed, 9))
	type result struct{ out, want, received, told []byte }
	var results []result
	var outs, wants [][]byte
	var outPtr []uint64
	for r := range j.ranks {
		out := aligned(j.room*j.rowBytes + 16)
		for i := range out {
			out[i] = fillByte
		}
		outs, wants, outPtr = append(outs, out), append(wants, bytes.Clone(out)), append(outPtr, w.mapped(r, out))
	}
	copies, err := copier()
	require.NoError(tb, err)
	for e := range j.epochs {
		counts, places := make([][]int64, j.ranks), make([][]int64, j.ranks)
		for r := range j.ranks {
			left, at := int64(min(j.rows, j.room/j.ranks)), int64(0)
			for range j.ranks {
				n := rnd.Int64N(left + 1)
				left -= n
				counts[r] = append(counts[r], n)
				if j.displaced {
					at = rnd.Int64N(int64(j.rows) - n + 1)
				}
				places[r] = append(places[r], at)
				at += n
			}
		}
		last := e+1 == j.epochs
		if last && j.spoil != nil {
			j.spoil(counts, places)
		}
		var ins, received [][]byte
		var inPtr, countPtr, receivedPtr []uint64
		for r := range j.ranks {
			in, got := aligned(j.rows*j.rowBytes+16), aligned(16*j.ranks)
			for i := range in {
				in[i] = byte(rnd.Uint32())
			}
			for i := range got {
				got[i] = fillByte
			}
			words := append([]int64{}, counts[r]...)
			if j.displaced {
				words = append(words, places[r]...)
			}
			ins, received, inPtr = append(ins, in), append(received, got), append(inPtr, w.mapped(r, in))
			countPtr, receivedPtr = append(countPtr, w.put(r, binaryOf(words))), append(receivedPtr, w.mapped(r, got))
		}
		for r := range j.ranks {
			want, told := bytes.Clone(wants[r]), make([]int64, 2*j.ranks)
			if wants[r] = want; last && j.spoil != nil {
				told = nil
			}
			at := int64(0)
			for from := range len(told) / 2 {
				n := counts[from][r]
				copy(want[at*int64(j.rowBytes):][:n*int64(j.rowBytes)], ins[from][places[from][r]*int64(j.rowBytes):])
				told[from], told[j.ranks+from] = n, at
				at += n
			}
			wanted := binaryOf(told)
			if told == nil {
				wanted = bytes.Repeat([]byte{fillByte}, 16*j.ranks)
			}
			sink := aligned(len(outs[r]))
			results = append(results, result{sink, want, received[r], wanted})
			p := ptx.AllToAllV{In: inPtr[r], Counts: countPtr[r], Received: receivedPtr[r], Rows: uint64(j.rows), Room: uint64(j.room), RowBytes: uint64(j.rowBytes), BlockBytes: uint64(block)}
			if j.displaced {
				p.Displaced = 1
			}
			if copy(p.Out[:], outPtr) < j.ranks {
				p.Outputs = w.put(r, binaryOf(outPtr))
			}
			if r == j.slow && e%2 == 0 {
				w.late(r, 2000)
			}
			comm := w.comm(r)
			w.launch(r, ptx.PushAllToAllV, comm.Bytes(), binaryOf(p))
			require.NoError(tb, w.streams[r].Launch(Launch{Function: copies.Function("copy1"), Block: [3]uint32{8}, Params: [][]byte{u64(w.mapped(r, sink)), u64(outPtr[r]), u32(uint32(len(sink)))}}))
		}
	}
	if err := w.m.Run(); err != nil {
		return w, err
	}
	for i, x := range results {
		if !bytes.Equal(x.out, x.want) || !bytes.Equal(x.received, x.told) {
			return w, fmt.Errorf("launch %d, rank %d: %x and %x, not %x and %x", i/j.ranks, i%j.ranks, x.out, x.received, x.want, x.told)
		}
	}
	if j.spoil != nil {
		return w, nil
	}
	return w, w.whole()
}

func dispatches(ranks int) []dispatch {
	return []dispatch{
		{ranks: ranks, rowBytes: 6, rows: 20, room: 20, epochs: 4, slow: 0},
		{ranks: ranks, rowBytes: 16, rows: 9, room: 31, displaced: true, epochs: 4, slow: ranks - 1},
		{ranks: ranks, rowBytes: 1, rows: 50, room: 40, displaced: true, epochs: 3, slow: -1},
	}
}

// TestAllToAllV: rows go where the counts of all ranks say, whatever these are in each launch, and everybody is told what it has got.
func TestAllToAllV(t *testing.T) {
	worlds, seeds := []int{2, 3, 9}, uint64(1)
	if os.Getenv("SYMMEM_TEST_MATRIX") == "full" {
		worlds, seeds = []int{1, 2, 3, 4, 5, 8, 9}, 6
	}
	for _, ranks := range worlds {
		for i, j := range dispatches(ranks) {
			t.Run(fmt.Sprintf("ranks=%d/%d", ranks, i), func(t *testing.T) {
				for seed := range seeds {
					_, err := j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 26}, nil)
					require.NoError(t, err)
				}
			})
		}
	}
}

// TestAllToAllVRefuses: a count that is none, and rows that do not fit, are the same fault on every rank, and nothing is written anywhere.
func TestAllToAllVRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		spoil     func(counts, places [][]int64)
		displaced bool
		why       uint8
		peer      uint16
		number    uint32
	}{
		"negative":    {spoil: func(n, _ [][]int64) { n[2][1] = -1 }, why: ptx.FaultCount, peer: 2, number: ptx.CountNegative<<16 | 1},
		"beyond":      {spoil: func(n, _ [][]int64) { n[1][0] = 21 }, why: ptx.FaultCount, peer: 1, number: ptx.CountBeyond << 16},
		"huge":        {spoil: func(n, _ [][]int64) { n[0][2] = 1<<40 + 1 }, why: ptx.FaultCount, number: ptx.CountBeyond<<16 | 2},
		"least":       {spoil: func(n, _ [][]int64) { n[1][2] = math.MinInt64 }, why: ptx.FaultCount, peer: 1, number: ptx.CountNegative<<16 | 2},
		"most":        {spoil: func(n, _ [][]int64) { n[1][1] = math.MaxInt64 }, why: ptx.FaultCount, peer: 1, number: ptx.CountBeyond<<16 | 1},
		"all of them": {spoil: func(n, _ [][]int64) { n[1] = []int64{10, 10, 1} }, why: ptx.FaultCount, peer: 1, number: ptx.CountBeyond<<16 | 2},
		"the first":   {spoil: func(n, _ [][]int64) { n[1][1], n[1][0], n[2][0] = -5, 21, -1 }, why: ptx.FaultCount, peer: 1, number: ptx.CountBeyond << 16},
		"in front":    {spoil: func(n, at [][]int64) { n[2][0], at[2][0] = 1, -1 }, displaced: true, why: ptx.FaultCount, peer: 2, number: ptx.CountNegative << 16},
		"too many": {spoil: func(n, _ [][]int64) {
			n[0], n[1], n[2] = []int64{0, 11, 0}, []int64{0, 9, 0}, []int64{0, 1, 19}
		}, why: ptx.FaultRoom, peer: 1, number: 21},
		"displaced": {spoil: func(n, at [][]int64) { n[0][1], at[0][1] = 15, 6 }, displaced: true, why: ptx.FaultCount, number: ptx.CountBeyond<<16 | 1},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := range uint64(3) {
				j := dispatch{ranks: 3, rowBytes: 4, rows: 20, room: 20, epochs: 3, slow: 1, spoil: c.spoil, displaced: c.displaced}
				w, err := j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 24}, nil)
				require.NoError(t, err)
				for r, b := range w.words {
					f := ptx.DecodeFault(binary.LittleEndian.Uint64(b[16:]))
					require.Equal(t, c.why, f.Why, "rank %d", r)
					require.Equal(t, uint8(ptx.FaultAllToAllV), f.Kernel)
					require.Equal(t, c.peer, f.Peer, "rank %d", r)
					require.Equal(t, c.number, f.Number(), "rank %d", r)
					require.Equal(t, uint32(1), binary.LittleEndian.Uint32(b))
				}
			}
		})
	}
}

// What nothing notices of the kernels that push, by the kernel, the instruction and which of those it is.
var bittenMoves = map[string]string{
	"lines: bar.red.and.pred (0)":                       deadLater,
	"lines: ld.acquire.sys.global.u32 (0)":              loadedSooner,
	"lines: st.release.sys.global.u32 (0)":              loadedSooner,
	"scatter_oneshot_ll: bar.red.and.pred (0)":          deadLater,
	"scatter_oneshot_push: bar.red.and.pred (0)":        deadLater,
	"scatter_oneshot_ll: ld.acquire.sys.global.u32 (0)": loadedSooner,
	"scatter_oneshot_ll: st.release.sys.global.u32 (0)": loadedSooner,
	"alltoallv: bar.red.and.pred (0)":                   deadLater,
	"alltoallv: ld.acquire.sys.global.u32 (0)":          launchEnds,
	"alltoallv: bar.red.and.pred (2)":                   barrierTwin,
	"alltoallv: bar.red.and.pred (3)":                   barrierTwin,
}

// loadedSooner is why nothing notices that what tells that lines were taken has no order: the machine has no load that sees a store which comes later,
// and lines with flags are only loaded.
const loadedSooner = "the lines were loaded before it, and the machine has no load that sees a later store"

// TestBiteMoves is TestBite for the kernels that push.
func TestBiteMoves(t *testing.T) {
	of := func(run func(tb testing.TB, c Config, replace func(*Module) *Module) error) attempt {
		return func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
			return run(tb, Config{Seed: seed, Weak: true, MaxSteps: 1 << 21}, replace)
		}
	}
	var subjects []subject
	one := moving{what: "broadcast", ranks: 3, bytes: 200, inPlace: true, epochs: 6, slow: 2, hopper: true}
	both := moving{what: "all_to_all", ranks: 2, bytes: 400, epochs: 5, slow: 1, hopper: true}
	uneven := moving{what: "all_gather", ranks: 3, bytes: 4, inAt: 4, epochs: 6, slow: 2, hopper: true}
	subjects = append(subjects, subject{ptx.PushLines(true), "lines", []attempt{of(one.run), of(both.run), of(uneven.run)}})
	for _, form := range []ptx.Form{ptx.OneShotLL, ptx.OneShotPush} {
		k, _ := ptx.PushScatter(form, "f32", true)
		j := scattering{form: form, dtype: "f32", op: ptx.Sum, ranks: 3, count: 60, root: -1, epochs: 6, hopper: true, slow: 1}
		root := j
		root.root, root.count, root.slow = 0, 40, 0
		root.epochs = 8
		subjects = append(subjects, subject{k, "scatter_" + form.String(), []attempt{of(j.run), of(root.run)}})
	}
	var lists []attempt
	for _, j := range append(dispatches(2), dispatches(3)...) {
		lists = append(lists, of(func(tb testing.TB, c Config, replace func(*Module) *Module) error {
			_, err := j.run(tb, c, replace)
			return err
		}))
	}
	subjects = append(subjects, subject{ptx.PushAllToAllV, "alltoallv", lists})
	bite(t, subjects, int(seedsOr(32, 96)), bittenMoves)
}
