package ptxvm

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// sharedJob is one collective of a list of tensors that have shares or a root: all ranks, several launches, each with tensors of its own.
type sharedJob struct {
	what    string // as moving has it, but for all_to_all, or "reduce_scatter"
	pull    bool   // loads between two barriers, and no lines
	dtype   string // of a reduce-scatter
	op      int
	ranks   int
	counts  []int // of the larger tensors: bytes, or elements of a reduce-scatter
	root    int
	epochs  int
	blocks  int
	threads int // of a stretch, and of a block with loads or shares
	most    int // vectors of a stretch
	hopper  bool
	slow    int  // a rank that comes late to every third launch, or -1
	free    bool // nobody waits for those that send nothing back, which is wrong
	user    bool // all launches have the tensors of the first: each rank writes to its input as soon as its launch has ended
	missing int  // so many of the last ranks do not launch
	began   bool // but they have come to the first barrier
	after   int  // with missing: so many launches end all the same, since the others send to them and get nothing back
	stop    bool // with missing: the host ends it, and not the time
	small   bool // whole numbers near 0

	replace func(*Module) *Module
}

func (j sharedJob) String() string {
	return fmt.Sprintf("%s/pull=%t/%s/op=%d/ranks=%d/tensors=%d/most=%d/hopper=%t/slow=%d/user=%t/missing=%d", j.what, j.pull, j.dtype, j.op, j.ranks, len(j.counts), j.most, j.hopper, j.slow, j.user, j.missing)
}

func (j sharedJob) scatters() bool { return j.what == "reduce_scatter" }

func (j sharedJob) width() int {
	if j.scatters() {
		return widths[j.dtype]
	}
	return 1
}

func (j sharedJob) kernel(tb testing.TB) ptx.Kernel {
	k, ok := ptx.ManyLines(j.hopper), true
	switch {
	case j.scatters() && j.pull:
		k, ok = ptx.ManyPull(j.dtype)
	case j.scatters():
		k, ok = ptx.ManyScatter(j.dtype, j.hopper)
	case j.pull:
		k = ptx.ManyMoves
	}
	require.True(tb, ok)
	return k
}

// share is what of a tensor a rank has in the beginning, or of a reduce-scatter in the end.
func (j sharedJob) share(n, rank int) (lo, hi int) {
	if j.what == "broadcast" {
		if rank == j.root {
			return 0, n
		}
		return 0, 0
	}
	each := (n + j.ranks - 1) / j.ranks
	return min(rank*each, n), min((rank+1)*each, n)
}

// inPlace says of a tensor whether its share is a part of the whole.
func (j sharedJob) inPlace(i int) bool { return j.what == "broadcast" || i%2 == 0 }

// sharedLaunch is the memory of one launch, by rank: of the inputs and the outputs, and what is to be there in the end.
type sharedLaunch struct {
	ins, outs         [][]byte
	wantIns, wantOuts [][]byte
	inPtr, outPtr     []uint64
	params            [][][]byte
}

const sharedFirst = 1<<32 - 2 // epoch

// run carries out all launches at once.
func (j sharedJob) run(tb testing.TB, c Config) error {
	width, vector := j.width(), 16
	if !j.pull {
		if vector = ptx.LineBytes; j.scatters() {
			vector = int(ptx.ManyLine(j.dtype))
		}
	}
	// Where the larger tensor of each pair is, and the smaller one: the latter in the other memory unless it is in place.
	var at, to []int
	size := width
	for i, n := range j.counts {
		at, to = append(at, size), append(to, size+i%3*width)
		size += n*width + width
	}
	size = (size + 4*width + 31) / 16 * 16
	span := 0
	for _, n := range j.counts {
		span += (n*width+2*vector)/vector*16 + 16
	}
	span = (span + 127) / 128 * 128
	together := 0
	if !j.scatters() && !j.pull {
		together = max(j.threads, 32)
		j.threads = together * max(min(j.ranks-1, 2), 1)
	}
	w := newCrew(tb, j.ranks, j.blocks, j.threads, 2*int64(j.ranks)*int64(span), sharedFirst, c)
	w.replace = j.replace
	rnd := rand.New(rand.NewPCG(c.Seed, 3))
	var launches []*sharedLaunch
	for e := range j.epochs {
		l := j.prepare(tb, w, rnd, at, to, size)
		for r := range j.ranks {
			l.params = append(l.params, j.params(w, l, r, at, to, vector, span, together))
		}
		launches = append(launches, l)
		if j.user {
			continue
		}
		for r := range j.ranks - j.missing {
			if r == j.slow && e%3 == 0 {
				w.late(r, 3000)
			}
			w.launch(r, j.kernel(tb), l.params[r]...)
		}
	}
	if j.user {
		j.enqueueUser(tb, w, launches)
	}
	for r := range j.ranks - j.missing {
		for q := j.ranks - j.missing; j.began && q < j.ranks; q++ {
			binary.LittleEndian.PutUint32(w.spaces[r][32+4*q:], sharedFirst+1)
		}
		if j.stop {
			binary.LittleEndian.PutUint32(w.words[r][32:], 1)
		}
	}
	if err := w.m.Run(); err != nil {
		return err
	}
	if j.missing > 0 {
		return j.gaveUp(w)
	}
	for e, l := range launches {
		if j.user && e == 0 {
			continue
		}
		for r := range j.ranks {
			if !bytes.Equal(l.ins[r], l.wantIns[r]) || !bytes.Equal(l.outs[r], l.wantOuts[r]) {
				return fmt.Errorf("launch %d, rank %d: %x and %x, not %x and %x", e, r, l.ins[r], l.outs[r], l.wantIns[r], l.wantOuts[r])
			}
		}
	}
	return w.whole()
}

// prepare makes the tensors of a launch.
func (j sharedJob) prepare(tb testing.TB, w *crew, rnd *rand.Rand, at, to []int, size int) *sharedLaunch {
	width := j.width()
	l := &sharedLaunch{}
	for r := range j.ranks {
		in, out := aligned(size), aligned(size)
		for i := range in {
			in[i], out[i] = byte(rnd.Uint32()), fillByte
		}
		if j.scatters() {
			for i, n := range j.counts {
				for k := range n {
					put(in[at[i]+k*width:], width, element(j.dtype, rnd, j.small))
				}
			}
		}
		l.inPtr, l.outPtr = append(l.inPtr, w.mapped(r, in)), append(l.outPtr, w.mapped(r, out))
		l.ins, l.outs = append(l.ins, in), append(l.outs, out)
		l.wantIns, l.wantOuts = append(l.wantIns, bytes.Clone(in)), append(l.wantOuts, bytes.Clone(out))
	}
	for r := range j.ranks {
		for i, n := range j.counts {
			if j.scatters() {
				lo, hi := j.share(n, r)
				dst, from := l.wantOuts[r], to[i]
				if j.inPlace(i) {
					dst, from = l.wantIns[r], at[i]+lo*width
				}
				for k := lo; k < hi; k++ {
					var all []uint64
					for q := range j.ranks {
						all = append(all, get(l.ins[q][at[i]+k*width:], width))
					}
					put(dst[from+(k-lo)*width:], width, combine(j.dtype, j.op, all))
				}
				continue
			}
			for q := range j.ranks {
				lo, hi := j.share(n, q)
				if j.inPlace(i) {
					copy(l.wantIns[r][at[i]+lo:], l.ins[q][at[i]+lo:at[i]+hi])
				} else {
					copy(l.wantOuts[r][to[i]+lo:], l.ins[q][at[i]:at[i]+hi-lo])
				}
			}
		}
	}
	return l
}

// params is what a rank's kernel of a launch takes.
func (j sharedJob) params(w *crew, l *sharedLaunch, r int, at, to []int, vector, span, together int) [][]byte {
	width := uint64(j.width())
	// of is where tensor i's share of rank q is on this one, or where it comes from, and where it goes.
	of := func(i, n, q int) (in, out uint64, count int) {
		lo, hi := j.share(n, q)
		in, out = l.inPtr[r]+uint64(at[i]), l.outPtr[r]+uint64(to[i])
		begin := uint64(lo) * width
		switch {
		case j.scatters() && j.inPlace(i):
			return in + begin, in + begin, hi - lo
		case j.scatters():
			return in + begin, out, hi - lo
		case j.inPlace(i):
			return in + begin, in + begin, hi - lo
		}
		return in, out + begin, hi - lo
	}
	c := w.comm(r)
	p := ptx.Params{Workspace: c.Workspace, Timeout: c.Timeout, Span: uint64(span), Rank: uint32(r), World: uint32(j.ranks), Op: uint32(j.op), Dead: c.Dead, Fault: c.Fault, Stop: c.Stop}
	if j.missing > 0 && !j.stop {
		p.Timeout = 20_000
	}
	if j.ranks > ptx.Inline {
		p.Table = c.Table - uint64(2*8*j.ranks)
	}
	var m ptx.Many
	var list []ptx.Stretch
	switch {
	case j.pull && j.scatters():
		var rows []byte
		for i, n := range j.counts {
			in, out, count := of(i, n, r)
			for q := range j.ranks {
				rows = binary.LittleEndian.AppendUint64(rows, in-l.inPtr[r]+l.inPtr[q])
			}
			vectors := vectorsOf(in, count*int(width), vector)
			for first := 0; first < vectors; first += j.most {
				list = append(list, ptx.Stretch{In: in, Out: out, Count: uint64(count), First: uint64(first), Vectors: uint64(min(j.most, vectors-first)), Row: uint64(i), OutRow: ptx.OwnOnly})
			}
		}
		m.Table, m.Count = w.put(r, rows), uint32(len(list))
	case j.pull:
		for k := range j.ranks {
			q := (r + 1 + k) % j.ranks
			for i, n := range j.counts {
				in, out, count := of(i, n, q)
				if in == out && q == r {
					continue
				}
				for first := 0; first < count; first += j.most {
					list = append(list, ptx.Stretch{In: in - l.inPtr[r] + l.inPtr[q] + uint64(first), Out: out + uint64(first), Count: uint64(min(j.most, count-first))})
				}
			}
		}
		m.Count = uint32(len(list))
	default:
		lists := make([][]ptx.Stretch, j.ranks)
		line := 0
		for i, n := range j.counts {
			all := 0
			for q := range j.ranks {
				in, _, count := of(i, n, q)
				all = max(all, vectorsOf(in, count*int(width), vector))
			}
			for first := 0; first < all; first += j.most {
				for q := range j.ranks {
					in, out, count := of(i, n, q)
					own := vectorsOf(in, count*int(width), vector)
					lists[q] = append(lists[q], ptx.Stretch{In: in, Out: out, Count: uint64(count), First: uint64(first), Vectors: uint64(max(min(j.most, own-first), 0)), Line: uint64(line + first)})
				}
			}
			line += all
		}
		for _, part := range lists {
			list = append(list, part...)
		}
		m.Count = uint32(len(lists[0]))
		if roles := j.roles(r); roles != nil && !j.free {
			m.Table = w.put(r, roles)
		}
		if together > 0 {
			m.Shift = uint32(bits.TrailingZeros(uint(together)))
		}
	}
	m.Stretches = w.put(r, binaryOf(list))
	return [][]byte{p.Bytes(), binaryOf(m)}
}

// vectorsOf is how many vectors, of so many bytes, hold what begins at an address.
func vectorsOf(at uint64, bytes, vector int) int {
	if bytes == 0 {
		return 0
	}
	return (int(at)%vector + bytes + vector - 1) / vector
}

// roles is a rank's row of ptx.ManyAwaits and ptx.ManyTells, or nil.
func (j sharedJob) roles(rank int) (table []byte) {
	has := func(r int) bool {
		for _, n := range j.counts {
			if lo, hi := j.share(n, r); hi > lo {
				return true
			}
		}
		return false
	}
	some := false
	for r := range j.ranks {
		sender, getter := rank, r // of what rank may have to wait with
		if j.scatters() {
			sender, getter = r, rank
		}
		word := uint64(0)
		if has(sender) && !has(getter) {
			word |= ptx.ManyAwaits
		}
		if has(getter) && !has(sender) {
			word |= ptx.ManyTells
		}
		some = some || word != 0
		table = binary.LittleEndian.AppendUint64(table, word)
	}
	if !some {
		return nil
	}
	return table
}

// enqueueUser puts a launch for each but the first, on the first's tensors, behind kernels that copy those of the others there, and in front of such that copy them back.
func (j sharedJob) enqueueUser(tb testing.TB, w *crew, launches []*sharedLaunch) {
	copier, err := copier()
	require.NoError(tb, err)
	first := launches[0]
	move := func(r int, to, from uint64, n int) {
		require.NoError(tb, w.streams[r].Launch(Launch{Function: copier.Function("copy1"), Block: [3]uint32{8}, Params: [][]byte{u64(to), u64(from), u32(uint32(n))}}))
	}
	for e, l := range launches[1:] {
		for r := range j.ranks {
			if r == j.slow && e%3 == 0 {
				w.late(r, 3000)
			}
			move(r, first.inPtr[r], l.inPtr[r], len(l.ins[r]))
			move(r, first.outPtr[r], l.outPtr[r], len(l.outs[r]))
			w.launch(r, j.kernel(tb), first.params[r]...)
			move(r, l.inPtr[r], first.inPtr[r], len(l.ins[r]))
			move(r, l.outPtr[r], first.outPtr[r], len(l.outs[r]))
		}
	}
}

// gaveUp: who waited for a rank that did not come has told which, and closed no launch from there on.
func (j sharedJob) gaveUp(w *crew) error {
	why, closed := uint8(ptx.FaultTimeout), uint32(sharedFirst)+uint32(j.after)
	if j.stop {
		why = ptx.FaultStopped
	}
	for r := range j.ranks - j.missing {
		fault := ptx.DecodeFault(binary.LittleEndian.Uint64(w.words[r][16:]))
		if fault.Why != why || fault.Kernel != ptx.FaultMany || int(fault.Peer) >= j.ranks || int(fault.Peer) == r {
			return fmt.Errorf("rank %d: fault %+v", r, fault)
		}
		if dead := binary.LittleEndian.Uint32(w.words[r]); dead != 1 {
			return fmt.Errorf("rank %d: dead word %d", r, dead)
		}
		if e := binary.LittleEndian.Uint32(w.spaces[r]); e != closed {
			return fmt.Errorf("rank %d: block 0 has closed epoch %d", r, e)
		}
	}
	return nil
}

// sharedJobs are lists with tensors of all sizes at odd places, in every form.
func sharedJobs(ranks int) (all []sharedJob) {
	for i, what := range []string{"all_gather", "broadcast", "reduce_scatter"} {
		for k, dtype := range []string{"f32", "u8", "f64", "bf16"} {
			for _, pull := range []bool{false, true} {
				if what != "reduce_scatter" && k > 0 {
					continue
				}
				j := sharedJob{what: what, pull: pull, dtype: dtype, op: ptx.Sum + (i+k)%ptx.Avg, ranks: ranks, counts: []int{1, 37, 0, 16, 5, 80, 3}, root: ranks - 1, epochs: 4, blocks: 2, threads: 8, most: 3, slow: ranks - 1}
				j.hopper = !pull && k%2 == 0
				all = append(all, j)
				j.user, j.slow, j.hopper = true, 0, false
				all = append(all, j)
				j.user, j.slow, j.counts = false, -1, []int{400, 0, 33}
				j.most = 64
				all = append(all, j)
			}
		}
	}
	return all
}

// TestManyShared: the kernels of lists that are shared out, or have a root, give everybody all of it and write nothing else, with memory as weak as it may be, whoever is late, and though no launch
// waits for those before it to have ended everywhere. SYMMEM_TEST_MATRIX=full tries more seeds and ranks.
func TestManyShared(t *testing.T) {
	worlds := []int{2, 3, 9}
	if full() {
		worlds = []int{1, 2, 3, 4, 5, 8, 9}
	}
	for _, ranks := range worlds {
		for _, j := range sharedJobs(ranks) {
			if ranks > ptx.Inline && j.dtype != "f32" {
				continue
			}
			t.Run(j.String(), func(t *testing.T) {
				for seed := range seedsOr(1, 6) {
					require.NoError(t, j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 27}), "seed %d", seed)
				}
			})
		}
	}
}

// TestManySharedWaitForTheSlow: a rank that gets nothing back would be launches ahead of one that is late, and overwrite what that has not read, if it did not wait.
func TestManySharedWaitForTheSlow(t *testing.T) {
	for _, j := range []sharedJob{
		{what: "broadcast", counts: []int{5, 64}, ranks: 3, root: 0, slow: 2},
		{what: "all_gather", counts: []int{1, 1}, ranks: 3, slow: 2},
		{what: "reduce_scatter", dtype: "f32", op: ptx.Sum, counts: []int{1, 1}, ranks: 3, slow: 0},
		{what: "reduce_scatter", dtype: "u8", op: ptx.Sum, counts: []int{2, 1}, ranks: 3, slow: 0},
		{what: "all_gather", counts: []int{9, 9}, ranks: 3, slow: 2}, // of which everybody hears from everybody
	} {
		j.epochs, j.blocks, j.threads, j.most = 12, 2, 8, 16
		require.NoError(t, j.run(t, Config{Seed: 1, Weak: true, MaxSteps: 1 << 25}), "%s", j)
		free := j
		free.free = true
		var err error
		for seed := uint64(0); seed < 8 && err == nil; seed++ {
			err = free.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 22})
		}
		if j.counts[0] == 9 {
			require.NoError(t, err, "%s", j)
		} else {
			require.Error(t, err, "%s: nothing notices that nobody waits", j)
		}
	}
}

// TestManySharedGivesUp: ranks that wait for one which does not come say so, and end.
func TestManySharedGivesUp(t *testing.T) {
	for _, ranks := range []int{2, 3} {
		for _, j := range sharedJobs(ranks) {
			if j.user || j.dtype != "f32" {
				continue
			}
			j.missing, j.epochs, j.slow = 1, 1, -1 // of a broadcast, root
			require.NoError(t, j.run(t, Config{Seed: 1, Weak: true, MaxSteps: 1 << 25}), "%s", j)
		}
	}
}

// sharedBitten is what nothing notices, as bitten says it of other kernels.
var sharedBitten = map[string]string{
	"lines: bar.red.and.pred (0)":          deadLater,
	"lines: ld.acquire.sys.global.u32 (0)": loadedSooner,
	"lines: st.release.sys.global.u32 (0)": loadedSooner,
	"moves: bar.red.and.pred (0)":          deadLater,
	"moves: ld.acquire.sys.global.u32 (1)": launchEnds,
	"moves: bar.red.and.pred (3)":          barrierTwin,
	"shares: bar.red.and.pred (0)":         deadLater,
}

// TestManySharedBite takes the order out of these kernels, as TestBite does of others.
func TestManySharedBite(t *testing.T) {
	var subjects []subject
	for _, kind := range []string{"lines", "moves", "shares"} {
		base := sharedJob{what: "all_gather", pull: kind == "moves", dtype: "f32", op: ptx.Sum, ranks: 2, counts: []int{7, 390, 1}, epochs: 4, blocks: 1, most: 64, threads: 32, hopper: kind != "moves", slow: -1}
		if kind == "shares" {
			base.what = "reduce_scatter"
		}
		var attempts []attempt
		add := func(j sharedJob) {
			attempts = append(attempts, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
				j.replace = replace
				return j.run(tb, Config{Seed: seed, Weak: j.ranks == 2, MaxSteps: biteSteps, Schedule: Even()})
			})
		}
		add(base)
		base.user = true
		add(base)
		base.counts = []int{80, 33}
		add(base)
		// One way only, with several warps that have lines of their own.
		oneWay := base
		oneWay.counts, oneWay.epochs, oneWay.slow, oneWay.threads = []int{1, 1}, 8, 1, 64
		if kind == "shares" {
			oneWay.slow = 0
		} else {
			oneWay.what, oneWay.counts, oneWay.root = "broadcast", []int{390, 300}, 0
		}
		add(oneWay)
		oneWay.user = false
		add(oneWay)
		if kind == "shares" { // where another thread waits for a rank that is slow than sends to it
			slow := oneWay
			slow.ranks, slow.counts, slow.slow = 3, []int{2, 2}, -1
			attempts = append(attempts, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
				slow.replace = replace
				return slow.run(tb, Config{Seed: seed, MaxSteps: biteSteps, Schedule: Slow(50, func(t Thread) bool { return t.Device == 1 }), Turn: 20})
			})
		}
		base.user, base.missing, base.epochs, base.threads = false, 1, 1, 8
		add(base)
		if base.pull {
			base.began = true
			add(base)
			base.began = false
		}
		// Some threads of a block see that the rank has given up, and others do not.
		base.ranks, base.blocks, base.most, base.counts, base.epochs = 4, 2, 3, []int{1, 37, 0, 16, 5, 80, 3}, 3
		add(base)
		subjects = append(subjects, subject{base.kernel(t), kind, attempts})
	}
	bite(t, subjects, int(seedsOr(24, 48)), sharedBitten)
}
