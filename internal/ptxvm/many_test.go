package ptxvm

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// manyJob is one all-reduce of a list of tensors: all ranks, several launches, each with tensors of its own.
type manyJob struct {
	pull    bool
	whole   bool // the kernel for whole vectors, with tensors that are such
	dtype   string
	op      int
	ranks   int
	counts  []int // elements of each tensor; with whole, of which a last vector is filled up
	hopper  bool
	epochs  int
	blocks  int
	threads int
	most    int  // vectors of a stretch
	shift   int  // with whole: 1 << shift threads do a stretch together; 0 is all of a block
	queued  bool // all launches are enqueued at once
	user    bool // all launches have the tensors of the first, into which kernels on the stream copy those of the others, and back
	missing int  // so many of the last ranks do not launch
	began   bool // but they have come to where the last wait of the others begins
	stop    bool // with missing: the host ends it, and not the time
	twice   bool // two plans at once, on devices that hold no more than both
	first   uint32
	small   bool // whole numbers near 0

	replace func(*Module) *Module
}

func (j manyJob) String() string {
	kernel := "oneshot"
	switch {
	case j.whole:
		kernel = "whole"
	case j.pull:
		kernel = "pull"
	}
	return fmt.Sprintf("%s/%s/op=%d/ranks=%d/tensors=%d/most=%d/shift=%d/hopper=%t/queued=%t/user=%t/missing=%d", kernel, j.dtype, j.op, j.ranks, len(j.counts), j.most, j.shift, j.hopper, j.queued, j.user, j.missing)
}

func (j manyJob) kernel(tb testing.TB) ptx.Kernel {
	k, ok := ptx.ManyOneShot(j.dtype, j.hopper)
	switch {
	case j.whole:
		k, ok = ptx.ManyPushWhole(j.dtype, j.op, j.ranks, j.hopper)
	case j.pull:
		k, ok = ptx.ManyPull(j.dtype)
	}
	require.True(tb, ok)
	return k
}

// unit is how many elements are between tensors: one, or a vector of them.
func (j manyJob) unit() int {
	if j.whole {
		return 16 / widths[j.dtype]
	}
	return 1
}

// manyWorld is the memory of the ranks of a job.
type manyWorld struct {
	job      manyJob
	memory   *Memory
	above    uint64 // of all addresses
	channels [][]byte
	words    [][]byte
	span     int
	lines    int
	launches []manyLaunch
}

// manyLaunch is what one launch works on, by rank. A tensor that is in place has its result in the inputs' memory.
type manyLaunch struct {
	ins, outs, list [][]byte // memory of all tensors
	inAt, outAt     []int    // where each tensor begins in it, in bytes
	values          [][][]uint64
	params          [][][]byte
}

const listAt = 0x500000000

// cut makes the stretches of all tensors, whose memory begins at base; the rows of tensor i are 2i and 2i+1.
func (w *manyWorld) cut(in, out uint64, l *manyLaunch) (all []ptx.Stretch) {
	width, vector := widths[w.job.dtype], 16
	if !w.job.pull {
		vector = int(ptx.ManyLine(w.job.dtype))
	}
	line := 0
	for i, n := range w.job.counts {
		from := int(in) + l.inAt[i]
		to := int(out) + l.outAt[i]
		if w.inPlace(i) {
			to = from
		}
		vectors := (from%vector + n*width + vector - 1) / vector
		if n == 0 {
			continue
		}
		for at := 0; at < vectors; at += w.job.most {
			all = append(all, ptx.Stretch{
				In: uint64(from), Out: uint64(to), Count: uint64(n), First: uint64(at), Vectors: uint64(min(w.job.most, vectors-at)), Line: uint64(line + at),
				Row: uint64(2 * i), OutRow: uint64(2*i + 1),
			})
		}
		line += vectors
	}
	w.lines = line
	return all
}

func (w *manyWorld) inPlace(tensor int) bool { return tensor%2 == 0 }

func newManyWorld(tb testing.TB, j manyJob) *manyWorld { return newManyWorldIn(tb, NewMemory(), 0, j) }

// newManyWorldIn is newManyWorld in memory that may have other worlds, with all addresses higher by above.
func newManyWorldIn(tb testing.TB, memory *Memory, above uint64, j manyJob) *manyWorld {
	width, unit := widths[j.dtype], j.unit()
	counts := make([]int, len(j.counts))
	for i, n := range j.counts {
		counts[i] = (n + unit - 1) / unit * unit
	}
	j.counts = counts
	w := &manyWorld{job: j, memory: memory, above: above}
	rnd := rand.New(rand.NewPCG(3, 4))
	control := int(ptx.ControlBytes(j.blocks, j.ranks))
	for e := range max(j.epochs, 1) {
		l := manyLaunch{}
		gap := unit * width
		at := gap
		for i, n := range j.counts { // one element apart, so that neighbours share vectors; every third output is not aligned as its input is
			l.inAt, l.outAt = append(l.inAt, at), append(l.outAt, at+i%3*gap)
			at += n*width + gap
		}
		size := (at + 4*gap + 31) / 16 * 16
		var stretches [][]ptx.Stretch
		tables := aligned(16 * len(j.counts) * j.ranks)
		for r := range j.ranks {
			base := above + uint64(r+1)*rankAt + uint64(e)*epochAt
			in, out := bytes.Repeat([]byte{fillByte}, size), bytes.Repeat([]byte{fillByte}, size)
			l.ins, l.outs = append(l.ins, append(aligned(size)[:0], in...)), append(l.outs, append(aligned(size)[:0], out...))
			require.NoError(tb, w.memory.Map(base+inAt, l.ins[r]))
			require.NoError(tb, w.memory.Map(base+outAt, l.outs[r]))
			stretches = append(stretches, w.cut(base+inAt, base+outAt, &l))
			var values [][]uint64
			for i, n := range j.counts {
				var v []uint64
				for k := range n {
					x := element(j.dtype, rnd, j.small)
					v = append(v, x)
					put(l.ins[r][l.inAt[i]+k*width:], width, x)
				}
				values = append(values, v)
				row := tables[16*i*j.ranks:]
				to := base + outAt + uint64(l.outAt[i])
				if w.inPlace(i) {
					to = base + inAt + uint64(l.inAt[i])
				}
				binary.LittleEndian.PutUint64(row[8*r:], base+inAt+uint64(l.inAt[i]))
				binary.LittleEndian.PutUint64(row[8*(j.ranks+r):], to)
			}
			l.values = append(l.values, values)
		}
		w.span = (w.lines*16 + 127) / 128 * 128
		for r := range j.ranks {
			if e == 0 {
				at := above + uint64(r+1)*rankAt
				channel := aligned(control + 2*j.ranks*w.span)
				for i := 0; i < control; i += 4 {
					binary.LittleEndian.PutUint32(channel[i:], j.first)
				}
				words := aligned(64)
				require.NoError(tb, w.memory.Map(at+channelAt, channel))
				require.NoError(tb, w.memory.Map(at+wordsAt, words))
				w.channels, w.words = append(w.channels, channel), append(w.words, words)
			}
			own := stretches[r]
			if j.pull {
				own = nil
				for i := r; i < len(stretches[r]); i += j.ranks {
					own = append(own, stretches[r][i])
				}
			}
			var list bytes.Buffer
			var whole []ptx.WholeStretch
			for _, s := range own {
				whole = append(whole, s.Whole())
			}
			if j.whole {
				require.NoError(tb, binary.Write(&list, binary.LittleEndian, whole))
			} else {
				require.NoError(tb, binary.Write(&list, binary.LittleEndian, own))
			}
			list.Write(tables)
			inMemory := append(aligned(list.Len() + 16)[:0], list.Bytes()...)
			l.list = append(l.list, inMemory)
			at := above + uint64(r+1)*rankAt + uint64(e)*epochAt + listAt
			require.NoError(tb, w.memory.Map(at, inMemory))
			words := above + uint64(r+1)*rankAt + wordsAt
			p := ptx.Params{
				Timeout: math.MaxUint64 / 2, Span: uint64(w.span), Rank: uint32(r), World: uint32(j.ranks), Op: uint32(j.op), Dead: words, Fault: words + 16, Stop: words + 32,
			}
			switch {
			case j.stop:
				p.Timeout = 1 << 62
				binary.LittleEndian.PutUint32(w.words[r][32:], 1)
			case j.missing > 0:
				p.Timeout = 20_000
			}
			table := make([]byte, 3*8*j.ranks)
			for q := range j.ranks {
				channel := above + uint64(q+1)*rankAt + channelAt
				if q < ptx.Inline {
					p.Workspace[q] = channel
				}
				binary.LittleEndian.PutUint64(table[8*(2*j.ranks+q):], channel)
			}
			if j.ranks > ptx.Inline {
				p.Table = at + tableAt*16
				require.NoError(tb, w.memory.Map(p.Table, append(aligned(len(table))[:0], table...)))
			}
			m := make([]byte, 24)
			binary.LittleEndian.PutUint64(m, at)
			binary.LittleEndian.PutUint64(m[8:], at+uint64(64*len(own)))
			binary.LittleEndian.PutUint32(m[16:], uint32(len(own)))
			first := p.Bytes()
			if j.whole {
				push := ptx.PushParams{
					Records: p.Workspace[r], Dead: p.Dead, Slot: uint32(w.span / 16), Rank: p.Rank, Op: p.Op, Fault: p.Fault, Stop: p.Stop, Timeout: p.Timeout,
				}
				for k := range j.ranks {
					push.Data = append(push.Data, p.Workspace[(r+k)%j.ranks]+uint64(control))
				}
				first = push.Bytes()
				together := j.threads
				if j.shift > 0 {
					together = 1 << j.shift
				}
				list := ptx.WholeMany{Stretches: at, Count: uint32(len(whole)), Shift: uint32(bits.TrailingZeros(uint(together)))}
				copy(list.Inlined[:], whole)
				var b bytes.Buffer
				require.NoError(tb, binary.Write(&b, binary.LittleEndian, &list))
				m = b.Bytes()
			}
			l.params = append(l.params, [][]byte{first, m})
		}
		w.launches = append(w.launches, l)
	}
	return w
}

// wrong says what is not as it should be after a launch.
func (w *manyWorld) wrong(epoch int) error {
	j, l, width := w.job, w.launches[epoch], widths[w.job.dtype]
	for r := range j.ranks {
		wantIn, wantOut := bytes.Repeat([]byte{fillByte}, len(l.ins[r])), bytes.Repeat([]byte{fillByte}, len(l.outs[r]))
		for i, n := range j.counts {
			for k := range n {
				var all []uint64
				for q := range j.ranks {
					all = append(all, l.values[q][i][k])
				}
				sum := combine(j.dtype, j.op, all)
				put(wantIn[l.inAt[i]+k*width:], width, l.values[r][i][k])
				if w.inPlace(i) {
					put(wantIn[l.inAt[i]+k*width:], width, sum)
				} else {
					put(wantOut[l.outAt[i]+k*width:], width, sum)
				}
			}
		}
		if !bytes.Equal(l.ins[r], wantIn) || !bytes.Equal(l.outs[r], wantOut) {
			return fmt.Errorf("rank %d: %x and %x, not %x and %x", r, l.ins[r], l.outs[r], wantIn, wantOut)
		}
		for _, x := range w.words[r] {
			if x != 0 {
				return fmt.Errorf("rank %d: dead word, fault or stop word: %x", r, w.words[r])
			}
		}
	}
	return nil
}

// launch puts one launch of every rank that comes on its stream.
func (w *manyWorld) launch(tb testing.TB, streams []*Stream, epoch int) {
	j, k := w.job, w.job.kernel(tb)
	module := moduleOf(tb, k.File)
	if j.replace != nil {
		module = j.replace(module)
	}
	f := module.Function(k.Name)
	for r := range j.ranks - j.missing {
		require.NoError(tb, streams[r].Launch(Launch{
			Function: f, Grid: [3]uint32{uint32(j.blocks)}, Block: [3]uint32{uint32(j.threads)}, Params: w.launches[epoch].params[r], Overlap: k.Overlap,
		}))
	}
}

func (j manyJob) run(tb testing.TB, c Config) error {
	if j.twice {
		return j.runTwice(tb, c)
	}
	w := newManyWorld(tb, j)
	m := New(w.memory, c)
	var streams []*Stream
	for r := range j.ranks {
		streams = append(streams, m.NewStream(r))
	}
	if j.began {
		for r := range j.ranks - j.missing {
			for q := j.ranks - j.missing; q < j.ranks; q++ {
				binary.LittleEndian.PutUint32(w.channels[r][32+4*q:], j.first+1)
			}
		}
	}
	if j.user {
		return w.runUser(tb, m, streams, func() { w.launch(tb, streams, 0) })
	}
	for e := range w.launches {
		w.launch(tb, streams, e)
		if j.queued && e+1 < len(w.launches) {
			continue
		}
		if err := m.Run(); err != nil {
			return err
		}
		if j.missing > 0 {
			return w.gaveUp()
		}
		for k := range e + 1 {
			if err := w.wrong(k); err != nil {
				return fmt.Errorf("launch %d: %w", k, err)
			}
		}
	}
	return nil
}

// runTwice is as that of a job of one tensor.
func (j manyJob) runTwice(tb testing.TB, c Config) error {
	c.Hangs = true
	memory := NewMemory()
	worlds := []*manyWorld{newManyWorldIn(tb, memory, 0, j), newManyWorldIn(tb, memory, 1<<44, j)}
	m, streams := forTwo(tb, memory, c, j.ranks, j.blocks)
	for i, w := range worlds {
		for e := range w.launches {
			w.launch(tb, streams[i], e)
		}
	}
	if err := m.Run(); err != nil {
		return err
	}
	for i, w := range worlds {
		for e := range w.launches {
			if err := w.wrong(e); err != nil {
				return fmt.Errorf("plan %d, launch %d: %w", i, e, err)
			}
		}
	}
	return nil
}

// runUser runs a launch for each but the first, on the first's tensors.
func (w *manyWorld) runUser(tb testing.TB, m *Machine, streams []*Stream, launch func()) error {
	copier, err := copier()
	require.NoError(tb, err)
	width := widths[w.job.dtype]
	move := func(r int, to, from uint64, bytes int) {
		at := uint64(r+1) * rankAt
		require.NoError(tb, streams[r].Launch(Launch{Function: copier.Function(fmt.Sprintf("copy%d", width)), Block: [3]uint32{8}, Params: [][]byte{u64(at + to), u64(at + from), u32(uint32(bytes / width))}}))
	}
	for e := uint64(1); e < uint64(len(w.launches)); e++ {
		for r, in := range w.launches[e].ins {
			move(r, inAt, e*epochAt+inAt, len(in))
		}
		launch()
		for r, in := range w.launches[e].ins {
			move(r, e*epochAt+inAt, inAt, len(in))
			move(r, e*epochAt+outAt, outAt, len(in))
		}
	}
	if err := m.Run(); err != nil {
		return err
	}
	for e := 1; e < len(w.launches); e++ {
		if err := w.wrong(e); err != nil {
			return fmt.Errorf("launch %d: %w", e, err)
		}
	}
	return nil
}

// gaveUp: who waited for a rank that did not come has told which, closed nothing, and written no output. The kernel for whole vectors has closed by
// then.
func (w *manyWorld) gaveUp() error {
	why, closed := uint8(ptx.FaultTimeout), w.job.first
	if w.job.stop {
		why = ptx.FaultStopped
	}
	least := 0 // of the ranks that it can have waited for
	if w.job.whole {
		closed++
		least = w.job.ranks - w.job.missing // since all that came have sent before they wait
	}
	for r := range w.job.ranks - w.job.missing {
		fault := ptx.DecodeFault(binary.LittleEndian.Uint64(w.words[r][16:]))
		if fault.Why != why || fault.Kernel != ptx.FaultMany || int(fault.Peer) >= w.job.ranks || int(fault.Peer) < least || int(fault.Peer) == r {
			return fmt.Errorf("rank %d: fault %+v", r, fault)
		}
		if dead := binary.LittleEndian.Uint32(w.words[r]); dead != 1 {
			return fmt.Errorf("rank %d: dead word %d", r, dead)
		}
		if e := binary.LittleEndian.Uint32(w.channels[r]); e != closed {
			return fmt.Errorf("rank %d: block 0 has closed epoch %d", r, e)
		}
		if !w.job.began && !bytes.Equal(w.launches[0].outs[r], bytes.Repeat([]byte{fillByte}, len(w.launches[0].outs[r]))) {
			return fmt.Errorf("rank %d: outputs were written: %x", r, w.launches[0].outs[r])
		}
	}
	return nil
}

func manyJobs(ranks int, dtypes []string) (out []manyJob) {
	for _, dtype := range dtypes {
		for _, pull := range []bool{false, true} {
			for op := ptx.Sum; op <= ptx.Avg; op++ {
				j := manyJob{pull: pull, dtype: dtype, op: op, ranks: ranks, counts: []int{1, 37, 0, 16, 5, 80, 3}, epochs: 3, blocks: 2, threads: 8, most: 3, first: 1<<32 - 2}
				if op == ptx.Sum || op == ptx.Avg {
					j.hopper, j.queued = op == ptx.Avg, true
					out = append(out, j)
					j.queued, j.user = false, true
					out = append(out, j)
					j.user = false
				}
				if op == ptx.Sum {
					j.missing = 1
					out = append(out, j)
					j.missing = 0
				}
				out = append(out, j)
			}
		}
	}
	return out
}

// wholeJobs are those of the kernel for whole vectors: more stretches than blocks, more vectors than threads, and several stretches a block.
func wholeJobs(ranks int, dtypes []string) (out []manyJob) {
	for _, dtype := range dtypes {
		for _, op := range []int{ptx.Sum, ptx.Avg} {
			unit := 16 / widths[dtype]
			for _, hopper := range []bool{false, true} {
				j := manyJob{
					whole: true, dtype: dtype, op: op, ranks: ranks, counts: []int{unit, 10 * unit, 0, 4 * unit, 2 * unit, 25 * unit, 1}, hopper: hopper, epochs: 3, blocks: 2, threads: 8, most: 3, first: 1<<32 - 2,
				}
				out = append(out, j)
				j.most, j.queued = 20, true
				out = append(out, j)
				j.queued, j.user = false, true
				out = append(out, j)
				j.user, j.blocks = false, 20
				out = append(out, j)
				j.blocks, j.shift, j.most = 2, 1, 3
				out = append(out, j)
				j.blocks, j.most = 20, 1 // more stretches at a time than travel in the parameter
				j.counts = append(slices.Clone(j.counts), 60*unit)
				out = append(out, j)
				j.blocks, j.shift, j.most, j.counts = 2, 0, 20, j.counts[:len(j.counts)-1]
				for _, j.missing = range []int{1, ranks - 1} {
					out = append(out, j)
					j.stop = !j.stop
				}
			}
		}
	}
	return out
}

// TestManyWhole: the kernel for lists of whole vectors gives the exact results of every dtype and operation that it has, at every world size, and
// touches nothing between the tensors.
func TestManyWhole(t *testing.T) {
	for ranks := 2; ranks <= 8; ranks++ {
		dtypes := []string{"f32", "f16", "bf16"}
		if ranks != 2 && !full() {
			dtypes = dtypes[ranks%3:][:1]
		}
		for _, j := range wholeJobs(ranks, dtypes) {
			t.Run(j.String(), func(t *testing.T) { require.NoError(t, j.run(t, Config{Seed: 1, MaxSteps: 1 << 28})) })
		}
	}
}

// TestManyWholeSchedules: so it does under every schedule, with ranks and blocks that are late, strong and weak, and it ends; two plans at once, too, on
// devices that hold no more than both.
func TestManyWholeSchedules(t *testing.T) {
	for _, s := range schedules {
		for _, twice := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/twice=%t", s.name, twice), func(t *testing.T) {
				j := manyJob{whole: true, dtype: "f32", op: ptx.Sum, ranks: 3, counts: []int{4, 40, 0, 16}, hopper: true, epochs: 3, blocks: 2, threads: 8, most: 3, queued: true, twice: twice}
				if twice {
					j.shift = 1
				}
				eachSeed(t, seedsOr(3, 12), func(seed uint64) error {
					return j.run(t, Config{Seed: seed, Weak: seed%2 == 0, Turn: int(8 + seed%2*100), Schedule: s.of(seed), Hangs: true, MaxSteps: 1 << 27})
				})
			})
		}
	}
}

// TestMany: the kernels of lists give the exact results of every dtype and operation, and touch nothing between the tensors.
func TestMany(t *testing.T) {
	for _, ranks := range []int{1, 2, 4, 9} {
		dtypes := []string{"f32", "f16", "bf16", "f64", "i8", "u16", "i32", "u64"}
		if ranks != 2 {
			dtypes = dtypes[2:5]
		}
		for _, j := range manyJobs(ranks, dtypes) {
			if j.missing > 0 && ranks == 1 || j.op != ptx.Sum && ranks != 2 {
				continue
			}
			t.Run(j.String(), func(t *testing.T) { require.NoError(t, j.run(t, Config{Seed: 1, MaxSteps: 1 << 28})) })
		}
	}
}

// TestManyWeak: so they do with memory as weak as it may be, and there is no race in them. SYMMEM_TEST_MATRIX=full tries more seeds.
func TestManyWeak(t *testing.T) {
	seeds := seedsOr(1, 10)
	for _, ranks := range []int{2, 3} {
		for _, j := range append(manyJobs(ranks, []string{"f32", "u8"}), wholeJobs(ranks, []string{"f32", "f16"})...) {
			if j.op != ptx.Sum && j.op != ptx.Avg {
				continue
			}
			t.Run(j.String(), func(t *testing.T) {
				for seed := range seeds {
					require.NoError(t, j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 28}), "seed %d", seed)
				}
			})
		}
	}
}

// TestManyCopy: the kernel that copies moves all tensors of a list, of every width, and nothing else.
func TestManyCopy(t *testing.T) {
	for _, width := range []int{1, 2, 4, 8} {
		copyMany(t, width, Config{Weak: true, MaxSteps: 1 << 24})
	}
}

// copyMany copies tensors with elements of so many bytes: short ones, and such that have whole vectors, where they go aligned as they are and not.
func copyMany(tb testing.TB, width int, c Config) {
	memory := NewMemory()
	size := 160 * width
	from, to := aligned(size), append(aligned(size)[:0], bytes.Repeat([]byte{fillByte}, size)...)
	for i := range from {
		from[i] = byte(i)
	}
	want := bytes.Clone(to)
	var list bytes.Buffer
	count := 0
	for i, n := range []int{1, 9, 38, 39} {
		at := (1 + 40*i) * width
		there := at
		if i == 2 {
			there += width
		}
		copy(want[there:], from[at:at+n*width])
		vectors := (at%16 + n*width + 15) / 16
		for first := 0; first < vectors; first += 2 {
			s := ptx.Stretch{In: uint64(inAt + at), Out: uint64(outAt + there), Count: uint64(n), First: uint64(first), Vectors: uint64(min(2, vectors-first))}
			require.NoError(tb, binary.Write(&list, binary.LittleEndian, s))
			count++
		}
	}
	inMemory := append(aligned(list.Len())[:0], list.Bytes()...)
	for at, b := range map[uint64][]byte{inAt: from, outAt: to, listAt: inMemory} {
		require.NoError(tb, memory.Map(at, b))
	}
	params := make([]byte, 24)
	binary.LittleEndian.PutUint64(params, listAt)
	binary.LittleEndian.PutUint32(params[16:], uint32(count))
	k := ptx.ManyCopy(int64(width))
	m := New(memory, c)
	require.NoError(tb, m.NewStream(0).Launch(Launch{Function: moduleOf(tb, k.File).Function(k.Name), Grid: [3]uint32{2}, Block: [3]uint32{4}, Params: [][]byte{params}}))
	require.NoError(tb, m.Run())
	require.Equal(tb, want, to, "width %d", width)
}

// manyBitten is what nothing notices, as bitten says it of other kernels.
var manyBitten = map[string]string{
	"pull: ld.acquire.sys.global.u32 (1)": launchEnds,
	"pull: bar.red.and.pred (3)":          barrierTwin,
}

// TestManyBite takes the order out of the kernels of lists, as TestBite does of others.
func TestManyBite(t *testing.T) {
	var subjects []subject
	for _, kind := range []string{"oneshot", "pull", "whole"} {
		base := manyJob{pull: kind == "pull", whole: kind == "whole", dtype: "f32", op: ptx.Sum, ranks: 2, hopper: true, epochs: 4, blocks: 1, most: 64, threads: 32, queued: true}
		var attempts []attempt
		add := func(j manyJob) {
			attempts = append(attempts, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
				j.replace = replace
				return j.run(tb, Config{Seed: seed, Weak: j.ranks == 2, MaxSteps: biteSteps, Schedule: Even()})
			})
		}
		base.counts = []int{7, 390, 1}
		add(base)
		base.user, base.queued = true, false
		add(base)
		base.counts = []int{80, 33}
		add(base)
		base.user, base.missing, base.threads = false, 1, 8
		add(base)
		base.began = true
		add(base)
		// Some threads of a block see that the rank has given up, and others do not.
		base.began, base.ranks, base.blocks, base.most, base.counts = false, 4, 2, 3, []int{1, 37, 0, 16, 5, 80, 3}
		if !base.whole { // whose kernels are of one world size each
			add(base)
		}
		base.ranks = 2
		if base.whole {
			base.missing, base.twice, base.epochs, base.queued = 0, true, 3, true
			add(base)
		}
		subjects = append(subjects, subject{base.kernel(t), kind, attempts})
	}
	bite(t, subjects, int(seedsOr(24, 48)), manyBitten)
}
