package ptxvm

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// casting is a collective by multicast addresses other than all-reduce, for several launches, with kernels of a user that write what goes in and look at what
// came of it around each: a broadcast or an all-gather by stores, or a reduce or a reduce-scatter by loads that add.
type casting struct {
	what        string
	dtype       string // of a reduction; else u8
	ranks       int
	count       int // elements: of the larger of input and output
	inAt, outAt int // elements that the tensors begin behind an aligned address
	inPlace     bool
	root        int
	epochs      int
	blocks      int
	threads     int
	first       uint32 // epoch
	missing     int    // so many of the last ranks do not launch
	began       bool   // but they have come to the barrier at the beginning
	stop        bool   // the host ends it, and not the time
	slow        int    // a rank, from 1 on, that comes late to every other launch
	version     uint32 // 0 is the right one
	overlap     bool   // launched so that it begins before what is in front of it has ended
	together    bool   // the devices hold the blocks of one launch only, and a rank that waits for ever is told

	replace func(*Module) *Module
}

const (
	castBroadcast = "broadcast"
	castGather    = "all_gather"
	castReduce    = "reduce"
	castScatter   = "reduce_scatter"
)

func (j casting) String() string {
	s := fmt.Sprintf("%s/%s/ranks=%d/count=%d/at=%d,%d/in_place=%t/root=%d", j.what, j.dtype, j.ranks, j.count, j.inAt, j.outAt, j.inPlace, j.root)
	if j.missing > 0 {
		s += fmt.Sprintf("/missing=%d,%t,%t", j.missing, j.began, j.stop)
	}
	if j.slow > 0 {
		s += fmt.Sprintf("/slow=%d", j.slow)
	}
	if j.version != 0 {
		s += fmt.Sprintf("/version=%d", j.version)
	}
	return s
}

func (j casting) adds() bool { return j.what == castReduce || j.what == castScatter }

func (j casting) share(rank int) (lo, hi int) {
	each := (j.count + j.ranks - 1) / j.ranks
	switch {
	case j.what == castGather || j.what == castScatter:
		return min(rank*each, j.count), min((rank+1)*each, j.count)
	case rank == j.root:
		return 0, j.count
	}
	return 0, 0
}

// elements is the size of input and output.
func (j casting) elements() (in, out int) {
	each := (j.count + j.ranks - 1) / j.ranks
	switch j.what {
	case castGather:
		return each, j.count
	case castScatter:
		return j.count, each
	}
	return j.count, j.count
}

// tensors is where the tensors of the ranks begin, and the bytes of the larger tensor of each.
type castTensors struct {
	in, out           []uint64
	multiIn, multiOut uint64
	memory            [][]byte // of the output, from an aligned address on
}

// allocate maps the tensors. In place there is one for each rank: the larger.
func (j casting) allocate(tb testing.TB, w *crew) (t castTensors) {
	width := widths[j.dtype]
	inN, outN := j.elements()
	one := func(n, at int) (where []uint64, multicast uint64, all [][]byte) {
		size := (n+at)*width/16*16 + 32
		for r := range j.ranks {
			b := aligned(size)
			for i := range b {
				b[i] = fillByte
			}
			where, all = append(where, w.mapped(r, b)), append(all, b)
		}
		multicast = multiIn + w.next
		require.NoError(tb, w.memory.Multicast(multicast, uint64(size), where...))
		w.next += uint64(size+255) / 256 * 256
		for r := range where {
			where[r] += uint64(at * width)
		}
		return where, multicast + uint64(at*width), all
	}
	switch {
	case j.what == castBroadcast, j.inPlace:
		t.in, t.multiIn, t.memory = one(max(inN, outN), j.inAt)
		t.out, t.multiOut = append([]uint64{}, t.in...), t.multiIn
		for r := range j.ranks { // the part that is this rank's share
			lo, _ := j.share(r)
			if j.what == castGather {
				t.in[r] += uint64(lo * width)
			} else if j.what == castScatter {
				t.out[r] += uint64(lo * width)
			}
		}
	default:
		t.in, t.multiIn, _ = one(inN, j.inAt)
		t.out, t.multiOut, t.memory = one(outN, j.outAt)
	}
	return t
}

// params are a rank's parameters.
func (j casting) params(w *crew, t castTensors, rank int, comm ptx.Comm) [][]byte {
	width := uint64(widths[j.dtype])
	lo, hi := j.share(rank)
	if !j.adds() {
		p := ptx.CastParams{From: t.in[rank], To: t.multiOut + uint64(lo)*width, Bytes: uint64(hi-lo) * width}
		var table []byte
		for r := range j.ranks {
			own := t.out[r] + uint64(lo)*width
			if r < ptx.Inline {
				p.Own[r] = own
			}
			table = binary.LittleEndian.AppendUint64(table, own)
		}
		if j.ranks > ptx.Inline {
			p.Own = [ptx.Inline]uint64{}
			p.Table = w.put(rank, table)
		}
		return [][]byte{comm.Bytes(), binaryOf(p)}
	}
	p := ptx.Params{Workspace: comm.Workspace, Count: uint64(hi - lo), Fault: comm.Fault, Dead: comm.Dead, Stop: comm.Stop, Timeout: comm.Timeout,
		MulticastIn: t.multiIn + uint64(lo)*width, Rank: comm.Rank, World: comm.World, Op: ptx.Sum, Index: comm.Index}
	if j.inPlace {
		p.Flags = ptx.Staged
	}
	table := make([]byte, 16*j.ranks, 24*j.ranks)
	for r := range j.ranks {
		at := t.in[r] + uint64(lo)*width
		if r < ptx.Inline {
			p.In[r] = at
		}
		binary.LittleEndian.PutUint64(table[8*r:], at)
	}
	p.Out[rank%ptx.Inline] = t.out[rank]
	if j.ranks > ptx.Inline {
		p.In, p.Out = [ptx.Inline]uint64{}, [ptx.Inline]uint64{}
		binary.LittleEndian.PutUint64(table[8*(j.ranks+rank):], t.out[rank])
		p.Table = w.put(rank, append(table, w.workspaces()...))
	}
	return [][]byte{p.Bytes()}
}

// want is the output of a rank, which had before in it.
func (j casting) want(rank int, values [][]uint64, before []uint64) []uint64 {
	out := append([]uint64{}, before...)
	switch j.what {
	case castBroadcast:
		return values[j.root]
	case castGather:
		for r := range j.ranks {
			lo, hi := j.share(r)
			copy(out[lo:hi], values[r])
		}
		return out
	}
	lo, hi := j.share(rank)
	for i := lo; i < hi; i++ {
		var of []uint64
		for r := range j.ranks {
			of = append(of, values[r][i])
		}
		out[i-lo] = combine(j.dtype, ptx.Sum, of)
	}
	return out
}

func (j casting) kernel() ptx.Kernel {
	if !j.adds() {
		return ptx.Cast
	}
	k, _ := ptx.AllReduce(ptx.OneShotMultimem, j.dtype, ptx.Sum, j.ranks, true)
	return k
}

func (j casting) run(tb testing.TB, c Config) error {
	if j.together {
		c.Hangs = true
	}
	width := widths[j.dtype]
	most := 0
	for r := range j.ranks {
		lo, hi := j.share(r)
		most = max(most, hi-lo)
	}
	layout := ptx.Layout{Form: ptx.OneShotMultimem, World: j.ranks, Bytes: int64(most * width), Blocks: j.blocks, Staged: j.inPlace && j.adds()}
	w := newCrew(tb, j.ranks, j.blocks, j.threads, layout.DataBytes(), j.first, c)
	kernel, here := j.kernel(), j.ranks-j.missing
	kernel.Overlap = kernel.Overlap || j.overlap
	w.replace = j.replace
	if j.together {
		for r := range j.ranks {
			w.m.Limit(r, Limits{Multiprocessors: 1, Blocks: j.blocks})
		}
	}
	t := j.allocate(tb, w)
	copies, err := copier()
	require.NoError(tb, err)
	rnd := rand.New(rand.NewPCG(c.Seed, 11))
	inN, outN := j.elements()
	type result struct {
		rank int
		sink []byte
		want []uint64
	}
	var results []result
	for e := range max(j.epochs, 1) {
		var values [][]uint64
		var ins []uint64
		for r := range j.ranks {
			var mine []uint64
			source := aligned((inN*width + 15) / 16 * 16)
			for i := range inN {
				v := uint64(byte(rnd.Uint32()))
				if j.adds() {
					v = element(j.dtype, rnd, true)
				}
				mine = append(mine, v)
				put(source[i*width:], width, v)
			}
			values, ins = append(values, mine), append(ins, w.mapped(r, source))
		}
		for r := range here {
			move := func(to, from uint64, n int) {
				if n == 0 {
					return
				}
				require.NoError(tb, w.streams[r].Launch(Launch{Function: copies.Function(fmt.Sprintf("copy%d", width)), Block: [3]uint32{8}, Params: [][]byte{u64(to), u64(from), u32(uint32(n))}}))
			}
			n := inN
			if lo, hi := j.share(r); j.inPlace && j.what == castGather {
				n = hi - lo // the rest is others'
			}
			move(t.in[r], ins[r], n)
			if j.slow == r+1 && e%2 == 0 {
				w.late(r, 3000)
			}
			comm := w.comm(r)
			comm.Index = 7
			if j.version != 0 {
				comm.Version = j.version
			}
			if j.missing > 0 {
				if comm.Timeout = 20_000; j.stop {
					comm.Timeout = 1 << 62
					binary.LittleEndian.PutUint32(w.words[r][32:], 1)
				}
				for q := here; j.began && q < j.ranks; q++ {
					for b := range j.blocks {
						binary.LittleEndian.PutUint32(w.spaces[r][int64(b)*ptx.ControlBytes(1, j.ranks)+32+int64(4*q):], j.first+1)
					}
				}
			}
			w.launch(r, kernel, j.params(w, t, r, comm)...)
			if j.version != 0 || j.missing > 0 {
				continue
			}
			lo, hi := j.share(r)
			n = outN
			before := make([]uint64, outN)
			switch {
			case j.what == castReduce && r != j.root && !j.inPlace, j.adds() && lo == hi:
				n = 0 // nothing is written
			case j.what == castScatter:
				n = hi - lo
			}
			sink := aligned((outN*width + 16) / 16 * 16)
			move(w.mapped(r, sink), t.out[r], n)
			results = append(results, result{r, sink, j.want(r, values, before)[:n]})
		}
	}
	if err := w.m.Run(); err != nil {
		return err
	}
	if j.version != 0 || j.missing > 0 {
		return j.gaveUp(w, here)
	}
	for i, x := range results {
		for at, want := range x.want {
			if got := get(x.sink[at*width:], width); got != want {
				return fmt.Errorf("launch %d, rank %d: element %d is %#x, not %#x", i/here, x.rank, at, got, want)
			}
		}
	}
	if err := j.around(t); err != nil {
		return err
	}
	for r, b := range w.spaces {
		if e := binary.LittleEndian.Uint32(b); e != j.first+uint32(max(j.epochs, 1)) {
			return fmt.Errorf("rank %d is in epoch %d", r, e)
		}
	}
	return w.whole()
}

// around says whether a byte outside of the tensors has changed, or one of an output that a rank has not.
func (j casting) around(t castTensors) error {
	width := widths[j.dtype]
	inN, outN := j.elements()
	for r, b := range t.memory {
		begin, n := j.outAt, outN
		if j.inPlace || j.what == castBroadcast {
			begin, n = j.inAt, max(inN, outN)
		} else if j.adds() {
			lo, hi := j.share(r)
			n = hi - lo
		}
		if want := bytes.Repeat([]byte{fillByte}, begin*width); !bytes.Equal(b[:begin*width], want) {
			return fmt.Errorf("rank %d: bytes before the output have changed: %x", r, b[:begin*width])
		}
		for i := (begin + n) * width; i < len(b); i++ {
			if b[i] != fillByte {
				return fmt.Errorf("rank %d: byte %d behind the output has changed", r, i-(begin+n)*width)
			}
		}
	}
	return nil
}

// gaveUp says what is wrong with how the ranks that came gave up.
func (j casting) gaveUp(w *crew, here int) error {
	kind := uint8(ptx.FaultCast)
	if j.adds() {
		kind = uint8(ptx.OneShotMultimem)
	}
	for r := range here {
		fault, dead := ptx.DecodeFault(binary.LittleEndian.Uint64(w.words[r][16:])), binary.LittleEndian.Uint32(w.words[r])
		epoch := binary.LittleEndian.Uint32(w.spaces[r])
		why := uint8(ptx.FaultTimeout)
		switch {
		case j.version != 0:
			why = ptx.FaultVersion
		case j.stop:
			why = ptx.FaultStopped
		}
		self := int(fault.Peer) == r
		if fault.Why != why || fault.Kernel != kind || int(fault.Peer) >= j.ranks || self != (j.version != 0) || fault.Index != 7 || dead != 1 || epoch != j.first {
			return fmt.Errorf("rank %d: fault %+v, dead word %d, epoch %d", r, fault, dead, epoch)
		}
	}
	return nil
}

// castings are those that TestCast runs: every alignment that the two sides may have to each other, heads and tails, nothing but these, several vectors a thread,
// shares of nothing, any root, in place and not, more ranks than are inlined, ranks that are late or do not come.
func castings(ranks int) (all []casting) {
	for _, what := range []string{castBroadcast, castGather, castReduce, castScatter} {
		dtypes := []string{"u8"}
		if what == castReduce || what == castScatter {
			dtypes = []string{"f32", "bf16", "f16"}
		}
		i := 0
		for _, dtype := range dtypes {
			unit := 16 / widths[dtype]
			for _, count := range []int{1, 5 * unit, 20*unit + 3, ranks * 24 * unit} {
				for _, apart := range []int{0, 1, 2, 4, 8} {
					i++
					if len(dtypes) > 1 && i%2 == 1 || ranks > 3 && i%4 != 0 {
						continue
					}
					j := casting{what: what, dtype: dtype, ranks: ranks, count: count, inAt: i % unit, root: i % ranks, epochs: 3, blocks: 1 + i%2, threads: 8, first: 1<<32 - 2}
					if i%3 == 0 {
						j.slow = 1 + i%ranks
					}
					if count == ranks*24*unit {
						j.inAt = 0
					}
					j.outAt = (j.inAt + apart) % unit
					if j.inPlace = apart == 0 || what == castBroadcast; what == castBroadcast && apart > 2 {
						continue
					}
					all = append(all, j)
				}
			}
		}
		j := casting{what: what, dtype: dtypes[0], ranks: ranks, count: 40, inAt: 1, outAt: 1, blocks: 1, threads: 8, first: 5, root: ranks - 1}
		if ranks > 1 {
			j.missing, j.root = 1, 0
			all = append(all, j)
			j.began = true
			all = append(all, j)
			j.began, j.stop = false, true
			all = append(all, j)
		}
		if j.missing, j.stop, j.version = 0, false, 2; !j.adds() {
			all = append(all, j)
		}
	}
	return all
}

// TestCast: the forms by multicast addresses of the collectives beside all-reduce, strong and weak.
func TestCast(t *testing.T) {
	worlds := []int{1, 3} // and 9 in coverCasts
	if full() {
		worlds = []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	}
	for _, ranks := range worlds {
		for _, j := range castings(ranks) {
			t.Run(j.String(), func(t *testing.T) {
				require.NoError(t, j.run(t, Config{Seed: 1, MaxSteps: 1 << 28}))
				if j.stop {
					return // which takes long
				}
				seeds := seedsOr(1, 8)
				if ranks > 4 {
					seeds = seedsOr(1, 2)
				}
				for seed := range seeds {
					require.NoError(t, j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 28}), "seed %d", seed)
				}
			})
		}
	}
}

// castAttempts are runs of the kernel that stores to all ranks, which may notice that it lacks some order: its threads load what others have written, and store
// what others read; in place and not, with edges and without, launched early, with a rank that is late, and with one that does not come.
func castAttempts() (out []attempt) {
	for _, j := range []casting{
		{what: castGather, ranks: 2, count: 800, epochs: 4, blocks: 1, threads: 32, overlap: true},
		{what: castBroadcast, ranks: 3, count: 400, epochs: 4, blocks: 1, threads: 8, inPlace: true, overlap: true},
		{what: castGather, ranks: 2, count: 401, inAt: 1, outAt: 2, epochs: 4, blocks: 2, threads: 8, slow: 1, overlap: true},
		{what: castGather, ranks: 3, count: 131, inAt: 3, inPlace: true, epochs: 3, blocks: 1, threads: 32, slow: 2},
		{what: castGather, ranks: 2, count: 60, blocks: 1, threads: 8, missing: 1},
		{what: castGather, ranks: 2, count: 60, blocks: 1, threads: 8, missing: 1, began: true},
	} {
		j.dtype = "u8"
		out = append(out, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
			j.replace = replace
			return j.run(tb, Config{Seed: seed, Weak: true, MaxSteps: biteSteps, Schedule: Even()})
		})
	}
	return out
}

// TestCastSchedules: they end, and with the right results, under every schedule, on devices that hold the blocks of one launch and no more.
func TestCastSchedules(t *testing.T) {
	for _, s := range schedules {
		t.Run(s.name, func(t *testing.T) {
			for _, what := range []string{castBroadcast, castGather, castReduce, castScatter} {
				t.Run(what, func(t *testing.T) {
					eachSeed(t, seedsOr(2, 12), func(seed uint64) error {
						j := casting{what: what, dtype: "f32", ranks: 3, count: 131, inAt: 1, outAt: 2, root: int(seed % 3), epochs: 3, blocks: 2, threads: 8, together: true}
						return j.run(t, Config{Seed: seed, Weak: seed%2 == 0, Turn: int(8 + seed%2*100), Schedule: s.of(seed), MaxSteps: 1 << 27})
					})
				})
			}
		})
	}
}

// TestCastCoverage: each line of the kernel that stores to all ranks is executed.
func TestCastCoverage(t *testing.T) {
	c := &Coverage{}
	coverCasts(t, Config{Seed: 1, MaxSteps: 1 << 28, Coverage: c})
	m := moduleOf(t, ptx.Cast.File)
	found := false
	for _, f := range m.funcs {
		if f.Name != ptx.Cast.Name {
			continue
		}
		found = true
		missing, of := c.Missing(m, f)
		for _, p := range missing {
			t.Errorf("%s: never executed: %s", p, m.lines[p.Line-1])
		}
		require.Greater(t, of, 100)
	}
	require.True(t, found)
}

// coverCasts runs every way that the kernels by multicast addresses have for the collectives beside all-reduce.
func coverCasts(t *testing.T, c Config) {
	worlds := []int{1, 2, 9}
	if full() {
		worlds = []int{1, 2, 3, 9, 12}
	}
	for _, ranks := range worlds {
		for _, j := range castings(ranks) {
			require.NoError(t, j.run(t, c), "%s", j)
		}
	}
	// So many vectors that each thread has some after the first few; a rank that is slow, but comes.
	for _, inPlace := range []bool{false, true} {
		j := casting{what: castGather, dtype: "u8", ranks: 2, count: 2 * 16 * 27, epochs: 1, blocks: 1, threads: 2, inPlace: inPlace}
		require.NoError(t, j.run(t, c))
		slow := c
		slow.Schedule, slow.Turn = Slow(1000, func(t Thread) bool { return t.Device == 1 }), 20
		require.NoError(t, j.run(t, slow))
	}
}
