package ptxvm

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// crew is ranks with a workspace each, whose kernels take Comm or Params, and the launches of a plan on their streams.
type crew struct {
	tb      testing.TB
	ranks   int
	blocks  int
	threads int
	memory  *Memory
	above   uint64 // of all addresses
	m       *Machine
	streams []*Stream
	spaces  [][]byte
	words   [][]byte // dead, fault, stop
	next    uint64   // where the next tensor goes
	replace func(*Module) *Module
}

// newCrew makes ranks whose plan has so many bytes of workspace, and begins at an epoch.
func newCrew(tb testing.TB, ranks, blocks, threads int, workspace int64, first uint32, c Config) *crew {
	w := newCrewIn(tb, NewMemory(), 0, ranks, blocks, threads, workspace, first)
	w.m = New(w.memory, c)
	for r := range ranks {
		w.streams = append(w.streams, w.m.NewStream(r))
	}
	return w
}

// newCrewIn is newCrew without a machine, in memory that may have other crews, with all addresses higher by above.
func newCrewIn(tb testing.TB, memory *Memory, above uint64, ranks, blocks, threads int, workspace int64, first uint32) *crew {
	w := &crew{tb: tb, ranks: ranks, blocks: blocks, threads: threads, memory: memory, above: above}
	control := ptx.ControlBytes(blocks, ranks)
	for r := range ranks {
		at := above + uint64(r+1)*rankAt
		space, words := aligned(int(control+workspace)), aligned(64)
		for i := int64(0); i < control; i += 4 {
			binary.LittleEndian.PutUint32(space[i:], first)
		}
		require.NoError(tb, w.memory.Map(at+channelAt, space))
		require.NoError(tb, w.memory.Map(at+wordsAt, words))
		w.spaces, w.words = append(w.spaces, space), append(w.words, words)
	}
	if ranks > ptx.Inline {
		table := w.put(0, w.workspaces())
		require.Equal(tb, above+rankAt+inAt, table)
	}
	return w
}

func (w *crew) workspaces() (table []byte) {
	for r := range w.ranks {
		table = binary.LittleEndian.AppendUint64(table, w.above+uint64(r+1)*rankAt+channelAt)
	}
	return table
}

// put maps bytes in a rank's memory, and returns the address.
func (w *crew) put(rank int, b []byte) uint64 {
	to := aligned((len(b) + 15) / 16 * 16)
	copy(to, b)
	return w.mapped(rank, to)
}

// mapped maps bytes that are aligned.
func (w *crew) mapped(rank int, b []byte) uint64 {
	at := w.above + uint64(rank+1)*rankAt + inAt + w.next
	if len(b) > 0 {
		require.NoError(w.tb, w.memory.Map(at, b))
	}
	w.next += uint64(len(b)+255) / 256 * 256
	return at
}

// comm is a rank's.
func (w *crew) comm(rank int) ptx.Comm {
	at := w.above + uint64(rank+1)*rankAt + wordsAt
	c := ptx.Comm{Version: ptx.CommVersion, Rank: uint32(rank), World: uint32(w.ranks), Timeout: 1 << 62, Dead: at, Fault: at + 16, Stop: at + 32}
	for r := range min(w.ranks, ptx.Inline) {
		c.Workspace[r] = w.above + uint64(r+1)*rankAt + channelAt
	}
	if w.ranks > ptx.Inline {
		c.Table = w.above + rankAt + inAt
	}
	return c
}

// launch puts a launch on a rank's stream.
func (w *crew) launch(rank int, k ptx.Kernel, params ...[]byte) {
	m := moduleOf(w.tb, k.File)
	if w.replace != nil {
		m = w.replace(m)
	}
	require.NoError(w.tb, w.streams[rank].Launch(Launch{
		Function: m.Function(k.Name), Grid: [3]uint32{uint32(w.blocks)}, Block: [3]uint32{uint32(w.threads)}, Params: params, Overlap: k.Overlap,
	}))
}

// late keeps a rank's stream back until the machine has done so many steps more.
func (w *crew) late(rank int, steps uint64) {
	var until uint64
	w.streams[rank].Do(func() bool {
		if until == 0 {
			until = w.m.Steps() + steps
		}
		return w.m.Steps() >= until || w.others(rank)
	})
}

// others says whether all other streams are done: then nothing goes on by waiting.
func (w *crew) others(rank int) bool {
	for r, s := range w.streams {
		if r != rank && !s.Idle() {
			return false
		}
	}
	return true
}

// whole says whether no rank has given up.
func (w *crew) whole() error {
	for r, b := range w.words {
		if !bytes.Equal(b, make([]byte, len(b))) {
			return fmt.Errorf("rank %d: dead word, fault or stop word: %x", r, b)
		}
	}
	return nil
}

func binaryOf(v any) []byte {
	b, err := binary.Append(nil, binary.LittleEndian, v)
	if err != nil {
		panic(err)
	}
	return b
}

// moving is a collective that moves bytes, for several launches.
type moving struct {
	what        string
	ranks       int
	bytes       int // of the message
	inAt, outAt int // where input and output begin behind an aligned address
	inPlace     bool
	root        int
	epochs      int
	hopper      bool
	slow        int  // a rank that comes late to every third launch, or -1
	free        bool // nobody waits for those that send nothing back, which is wrong
}

func (j moving) String() string {
	return fmt.Sprintf("%s/ranks=%d/bytes=%d/at=%d,%d/in_place=%t/slow=%d/hopper=%t", j.what, j.ranks, j.bytes, j.inAt, j.outAt, j.inPlace, j.slow, j.hopper)
}

type movedPiece struct{ src, dst, bytes int }

// piece is what rank to has from rank from.
func (j moving) piece(from, to int) movedPiece {
	share := (j.bytes + j.ranks - 1) / j.ranks
	lo, hi := min(from*share, j.bytes), min((from+1)*share, j.bytes)
	switch j.what {
	case "broadcast":
		if from == j.root && to != j.root {
			return movedPiece{bytes: j.bytes}
		}
	case "all_gather":
		if !j.inPlace {
			return movedPiece{dst: lo, bytes: hi - lo}
		}
		if from != to {
			return movedPiece{src: lo, dst: lo, bytes: hi - lo}
		}
	case "all_to_all":
		return movedPiece{src: to * share, dst: from * share, bytes: share}
	}
	return movedPiece{}
}

// run carries out all launches at once, each with tensors of its own.
func (j moving) run(tb testing.TB, c Config, replace func(*Module) *Module) error {
	longest := 0
	for from := range j.ranks {
		for to := range j.ranks {
			if from != to {
				longest = max(longest, j.piece(from, to).bytes)
			}
		}
	}
	slot := ptx.LinesSlotBytes(int64(longest))
	w := newCrew(tb, j.ranks, 2, 16, 2*int64(j.ranks)*slot, 1<<32-2, c)
	w.replace = replace
	rnd := rand.New(rand.NewPCG(c.Seed, 3))
	size := (j.bytes + j.ranks*16 + 64) / 16 * 16
	var outs, wants [][]byte
	for e := range j.epochs {
		var ins [][]byte
		var inPtr, outPtr []uint64
		for r := range j.ranks {
			in, out := aligned(size), aligned(size)
			for i := range in {
				in[i], out[i] = byte(rnd.Uint32()), fillByte
			}
			at := w.mapped(r, in) + uint64(j.inAt)
			to := at
			if !j.inPlace {
				to = w.mapped(r, out) + uint64(j.outAt)
				outs = append(outs, out)
			} else {
				outs = append(outs, in)
			}
			ins, inPtr, outPtr = append(ins, bytes.Clone(in)), append(inPtr, at), append(outPtr, to)
		}
		for r := range j.ranks {
			want := bytes.Repeat([]byte{fillByte}, size)
			begin := j.outAt
			if j.inPlace {
				want, begin = bytes.Clone(ins[r]), j.inAt
			}
			for from := range j.ranks {
				p := j.piece(from, r)
				copy(want[begin+p.dst:][:p.bytes], ins[from][j.inAt+p.src:])
			}
			wants = append(wants, want)
			l := ptx.Lines{Span: uint64(j.ranks) * uint64(slot), Longest: uint64(ptx.LinesOf(int64(longest), 7))}
			var pieces []ptx.LinePiece
			add := func(from, to int, at uint64, count *uint32, one *uint32) {
				p := j.piece(from, to)
				if p.bytes == 0 {
					return
				}
				n := ptx.LinePiece{At: at, Bytes: uint64(p.bytes), Slot: uint64(from) * uint64(slot), Lead: uint32(inPtr[from]+uint64(p.src)) % 8,
					Peer: uint32(from + to - r), Turn: uint32((to-from+j.ranks)%j.ranks - 1)}
				if j.piece(to, from).bytes == 0 {
					n.OneWay = 1
					if !j.free {
						*one = 1
					}
				}
				*count++
				pieces = append(pieces, n)
			}
			for k := 1; k < j.ranks; k++ {
				to := (r + k) % j.ranks
				add(r, to, inPtr[r]+uint64(j.piece(r, to).src), &l.Sends, &l.Awaits)
			}
			for k := 1; k < j.ranks; k++ {
				from := (r + k) % j.ranks
				add(from, r, outPtr[r]+uint64(j.piece(from, r).dst), &l.Receives, &l.Tells)
			}
			if p := j.piece(r, r); p.bytes > 0 {
				l.From, l.To, l.Bytes = inPtr[r]+uint64(p.src), outPtr[r]+uint64(p.dst), uint64(p.bytes)
			}
			if copy(l.Inlined[:], pieces) < len(pieces) {
				l.Inlined = [ptx.InlineLines]ptx.LinePiece{}
				l.Table = w.put(r, binaryOf(pieces))
			}
			if r == j.slow && e%3 == 0 {
				w.late(r, 3000)
			}
			comm := w.comm(r)
			w.launch(r, ptx.PushLines(j.hopper), comm.Bytes(), binaryOf(l))
		}
	}
	if err := w.m.Run(); err != nil {
		return err
	}
	for i, want := range wants {
		if !bytes.Equal(want, outs[i]) {
			at := 0
			for want[at] == outs[i][at] {
				at++
			}
			return fmt.Errorf("launch %d, rank %d: byte %d is %#x, not %#x", i/j.ranks, i%j.ranks, at, outs[i][at], want[at])
		}
	}
	return w.whole()
}

// movings are collectives by lines, at odd and even places.
func movings(ranks, most int) (all []moving) {
	for _, what := range []string{"broadcast", "all_gather", "all_to_all"} {
		for i, n := range []int{1, 3, 8, 37, 150, 512} {
			if n > most {
				break
			}
			j := moving{what: what, ranks: ranks, bytes: n, inAt: i * 5 % 16, outAt: i * 3 % 16, root: i % ranks, epochs: 6, slow: i%(ranks+1) - 1, hopper: i%2 == 0}
			if i == 2 || i == 5 {
				j.inAt, j.outAt = 4, 8
			}
			if j.inPlace = what == "broadcast" || what == "all_gather" && i%2 == 1; what == "broadcast" {
				j.outAt = j.inAt
			}
			all = append(all, j)
		}
	}
	return all
}

// TestLines: the kernel that pushes pieces gives everybody the bytes, with memory as weak as it may be, whoever is late, and though no launch waits
// for those before it to have ended everywhere.
func TestLines(t *testing.T) {
	worlds, seeds, most := []int{2, 3, 9}, uint64(1), 150
	if os.Getenv("SYMMEM_TEST_MATRIX") == "full" {
		worlds, seeds, most = []int{1, 2, 3, 4, 5, 8, 9}, 6, 512
	}
	for _, ranks := range worlds {
		for _, j := range movings(ranks, most) {
			t.Run(j.String(), func(t *testing.T) {
				for seed := range seeds {
					require.NoError(t, j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 26}, nil))
				}
			})
		}
	}
}

// TestLinesWaitForTheSlow: where lines go one way only, the sender would be launches ahead of a rank that is late, and overwrite what it has not
// read, if it did not wait for that.
func TestLinesWaitForTheSlow(t *testing.T) {
	for _, j := range []moving{
		{what: "broadcast", ranks: 3, bytes: 64, inPlace: true, root: 0, epochs: 12, slow: 2},
		{what: "all_gather", ranks: 3, bytes: 32, epochs: 12, slow: 2}, // shares of 11, 11 and 10 bytes
		{what: "all_gather", ranks: 4, bytes: 5, epochs: 12, slow: 3},  // of which the last has none
	} {
		require.NoError(t, j.run(t, Config{Seed: 1, Weak: true, MaxSteps: 1 << 24}, nil), "%s", j)
		free := j
		free.free = true
		var err error
		for seed := uint64(0); seed < 8 && err == nil; seed++ {
			err = free.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 21}, nil)
		}
		if j.bytes == 32 {
			require.NoError(t, err, "%s: everybody hears from everybody", j)
		} else {
			require.Error(t, err, "%s: nothing notices that nobody waits", j)
		}
	}
}
