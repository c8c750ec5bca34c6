package ptxvm

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// room is memory of one rank at addresses of its own.
type room struct {
	tb     testing.TB
	memory *Memory
	next   uint64
}

// take maps zeroed memory, at an address that is a multiple of 128 and then so many bytes on, and guards it by gaps.
func (r *room) take(bytes, shift int) (at uint64, b []byte) {
	whole := aligned(bytes + shift + 16)
	r.next += 0x1000
	at = r.next
	require.NoError(r.tb, r.memory.Map(at, whole))
	r.next = (at + uint64(len(whole)) + 0xfff) &^ 0xfff
	return at + uint64(shift), whole[shift : shift+bytes]
}

// rooms are those of all ranks, with a workspace each.
type rooms struct {
	memory *Memory
	ranks  []*room
	comms  []ptx.Comm
	words  [][]byte
}

func newRooms(tb testing.TB, ranks, blocks int, data int64, first uint32) *rooms {
	return newRoomsIn(tb, NewMemory(), 0, ranks, blocks, data, first)
}

// newRoomsIn makes them in memory that others are in too, at base and beyond.
func newRoomsIn(tb testing.TB, memory *Memory, base uint64, ranks, blocks int, data int64, first uint32) *rooms {
	w := &rooms{memory: memory}
	var at []uint64
	for r := range ranks {
		w.ranks = append(w.ranks, &room{tb: tb, memory: w.memory, next: base + uint64(r+1)*rankAt})
		p, b := w.ranks[r].take(int(ptx.ControlBytes(blocks, ranks)+data), 0)
		for i := 0; i < int(ptx.ControlBytes(blocks, ranks)); i += 4 {
			binary.LittleEndian.PutUint32(b[i:], first)
		}
		at = append(at, p)
	}
	for r := range ranks {
		p, b := w.ranks[r].take(64, 0)
		c := ptx.Comm{Version: ptx.CommVersion, Rank: uint32(r), World: uint32(ranks), Timeout: math.MaxUint64 / 2, Dead: p, Fault: p + 16, Stop: p + 32}
		if ranks > ptx.Inline {
			table, words := w.ranks[r].take(8*ranks, 0)
			for i, x := range at {
				binary.LittleEndian.PutUint64(words[8*i:], x)
			}
			c.Table = table
		} else {
			copy(c.Workspace[:], at)
		}
		w.comms, w.words = append(w.comms, c), append(w.words, b)
	}
	return w
}

// timedOut says whether the ranks that came have given up as they should.
func (w *rooms) timedOut(here int, kernel uint8) error {
	for r := range here {
		fault := ptx.DecodeFault(binary.LittleEndian.Uint64(w.words[r][16:]))
		if fault.Why != ptx.FaultTimeout || fault.Kernel != kernel || int(fault.Peer) == r || int(fault.Peer) >= len(w.comms) {
			return fmt.Errorf("rank %d: fault %+v", r, fault)
		}
	}
	return nil
}

// structBytes is a parameter as a kernel takes it.
func structBytes(tb testing.TB, v any) []byte {
	b, err := binary.Append(nil, binary.LittleEndian, v)
	require.NoError(tb, err)
	return b
}

// normJob is an all-reduce with a norm: all ranks, several launches at once, each with rows of its own.
type normJob struct {
	form          ptx.Form
	dtype         string
	hopper        bool
	ranks         int
	rows, columns int
	blocks        int // or clusters
	threads       int // of the row's length
	clusters      bool
	inPlace       bool
	out, fp8      bool
	bias          float32
	missing       int
	launches      int

	replace func(*Module) *Module
}

func (j normJob) String() string {
	return fmt.Sprintf("%s/%s/ranks=%d/%dx%d/blocks=%d/clusters=%t/in_place=%t/fp8=%t/missing=%d/hopper=%t", j.form, j.dtype, j.ranks, j.rows, j.columns, j.blocks, j.clusters, j.inPlace, j.fp8, j.missing, j.hopper)
}

func (j normJob) kernel(tb testing.TB) ptx.Kernel {
	k, ok := ptx.RMSNorm(j.form, j.dtype, j.ranks, j.hopper)
	if j.clusters {
		k, ok = ptx.RMSNormCluster(j.form, j.dtype, j.ranks, j.hopper)
	}
	require.True(tb, ok, "%s", j)
	return k
}

// each is how many blocks have a row together.
func (j normJob) each() int {
	if j.clusters {
		return ptx.NormCluster
	}
	return 1
}

// grid is the blocks of a launch.
func (j normJob) grid() int { return j.blocks * j.each() }

// scaleOfNorms is the scale of all of them.
const scaleOfNorms = float32(0.037)

// normRun is one launch of one rank.
type normRun struct {
	p                                          ptx.Norm
	in, residual, residualOut, out, fp8, input []byte
	residualIn                                 []byte
}

// normWorld is a job's memory: of what all its launches share, and of each launch.
type normWorld struct {
	*rooms
	job     normJob
	weights []byte
	runs    [][]normRun // of each launch, those of all ranks
}

func (j normJob) newWorld(tb testing.TB, memory *Memory, base, seed uint64) *normWorld {
	width := widths[j.dtype]
	rowBytes := int64(j.columns * width)
	w := newRoomsIn(tb, memory, base, j.ranks, j.grid(), ptx.NormDataBytes(j.form, j.ranks, int64(j.rows), rowBytes), 1<<32-2)
	rnd := rand.New(rand.NewPCG(seed, 11))
	all := int(rowBytes) * j.rows
	fill := func(b []byte) {
		for i := 0; i < len(b); i += width {
			put(b[i:], width, element(j.dtype, rnd, false))
		}
	}
	weights := make([]byte, rowBytes)
	fill(weights)
	runs := make([][]normRun, j.launches)
	for l := range runs {
		var ins []uint64
		for r := range j.ranks {
			room := w.ranks[r]
			var n normRun
			n.p = ptx.Norm{
				Rows: uint32(j.rows), Columns: uint32(j.columns), Shard: uint32(ptx.NormShard(j.ranks, rowBytes)), Span: uint64(ptx.NormSpan(j.form, j.ranks, int64(j.rows), rowBytes)),
				Epsilon: 1e-5, Bias: j.bias, Scale: ptx.NormScale(scaleOfNorms),
			}
			if (r+l)%2 == 1 { // read by the launch
				at, b := room.take(4, 0)
				put(b, 4, uint64(math.Float32bits(scaleOfNorms)))
				n.p.Scale = at
			}
			n.p.In, n.in = room.take(all, 0)
			n.p.Residual, n.residual = room.take(all, 0)
			fill(n.in)
			fill(n.residual)
			n.input, n.residualIn = append([]byte(nil), n.in...), append([]byte(nil), n.residual...)
			n.p.ResidualOut, n.residualOut = n.p.Residual, n.residual
			if !j.inPlace {
				n.p.ResidualOut, n.residualOut = room.take(all, 0)
			}
			weight, b := room.take(int(rowBytes), 0)
			copy(b, weights)
			n.p.Weight = weight
			if j.out {
				n.p.Out, n.out = n.p.In, n.in
				if !j.inPlace {
					n.p.Out, n.out = room.take(all, 0)
				}
			}
			if j.fp8 {
				n.p.Quantized, n.fp8 = room.take(all/width, 0)
			}
			ins = append(ins, n.p.In)
			runs[l] = append(runs[l], n)
		}
		for r := range runs[l] {
			table, words := w.ranks[r].take(8*j.ranks, 0)
			for i, x := range ins {
				binary.LittleEndian.PutUint64(words[8*i:], x)
			}
			runs[l][r].p.Inputs = table
		}
	}
	return &normWorld{w, j, weights, runs}
}

// launch launches all runs of a rank.
func (w *normWorld) launch(tb testing.TB, s *Stream, rank int) {
	kernel := w.job.kernel(tb)
	module := moduleOf(tb, kernel.File)
	if w.job.replace != nil {
		module = w.job.replace(module)
	}
	comm := w.comms[rank]
	if w.job.missing > 0 {
		comm.Timeout = 20_000
	}
	for _, l := range w.runs {
		require.NoError(tb, s.Launch(Launch{
			Function: module.Function(kernel.Name), Grid: [3]uint32{uint32(w.job.grid())}, Block: [3]uint32{uint32(w.job.threads / w.job.each())},
			Params: [][]byte{comm.Bytes(), structBytes(tb, l[rank].p)}, Overlap: kernel.Overlap,
		}))
	}
}

func (j normJob) run(tb testing.TB, c Config) error {
	w := j.newWorld(tb, NewMemory(), 0, c.Seed)
	m := New(w.memory, c)
	here := j.ranks - j.missing
	for r := range here {
		w.launch(tb, m.NewStream(r), r)
	}
	if err := m.Run(); err != nil {
		return err
	}
	if j.missing > 0 {
		return w.timedOut(here, ptx.FaultRMSNorm)
	}
	return w.wrong()
}

// runForEach runs a plan for each rank on streams of their own, each of several launches, on devices that hold no more than the blocks of all plans. On rank r plan r comes late, is slow,
// and its last block begins where nobody else wants the room: all end, whatever begins early.
func (j normJob) runForEach(tb testing.TB, seed uint64) error {
	const late = 500
	slow := func(t Thread) bool {
		return t.Stream >= j.ranks && (t.Stream-j.ranks)/j.ranks == t.Device && t.Launch == 0
	} // the first are those of other kernels
	memory := NewMemory()
	m := New(memory, Config{Seed: seed, Turn: int(8 + seed%2*100), Schedule: Slow(3, slow), Hangs: true, MaxSteps: 1 << 27})
	for r := range j.ranks {
		m.Limit(r, Limits{Multiprocessors: 1, Blocks: j.ranks * j.grid(), Last: func(t Thread) bool { return slow(t) && int(t.Block[0]) == j.grid()-1 }})
		idle(tb, m.NewStream(r), (j.ranks-2)*j.grid()+j.each(), 20_000)
	}
	var plans []*normWorld
	for i := range j.ranks {
		w := j.newWorld(tb, memory, uint64(i)<<44, seed+uint64(i))
		plans = append(plans, w)
		for r := range j.ranks {
			s := m.NewStream(r)
			if r == i {
				s.Pause(late)
			}
			w.launch(tb, s, r)
		}
	}
	if err := m.Run(); err != nil {
		return err
	}
	for i, w := range plans {
		if err := w.wrong(); err != nil {
			return fmt.Errorf("plan %d: %w", i, err)
		}
	}
	return nil
}

// wrong says what is not as it should be after all launches.
func (w *normWorld) wrong() error {
	for l, runs := range w.runs {
		if err := w.job.check(runs, w.weights); err != nil {
			return fmt.Errorf("launch %d: %w", l, err)
		}
	}
	for r, b := range w.words {
		for _, x := range b {
			if x != 0 {
				return fmt.Errorf("rank %d: dead word, fault or stop word: %x", r, b)
			}
		}
	}
	return nil
}

// check compares with a plain loop.
func (j normJob) check(runs []normRun, weights []byte) error {
	width := widths[j.dtype]
	decode := func(b []byte) float32 {
		if width == 4 {
			return math.Float32frombits(uint32(get(b, 4)))
		}
		return widen(j.dtype, get(b, width))
	}
	encode := func(x float32) uint64 {
		if width == 4 {
			return uint64(math.Float32bits(x))
		}
		return narrow(j.dtype, x)
	}
	round := func(x float32) float32 {
		b := make([]byte, width)
		put(b, width, encode(x))
		return decode(b)
	}
	for row := range j.rows {
		for r, n := range runs {
			x := make([]float32, j.columns)
			for i := range x {
				at := (row*j.columns + i) * width
				var values []uint64
				for _, o := range runs {
					values = append(values, get(o.input[at:], width))
				}
				b := make([]byte, width)
				put(b, width, combine(j.dtype, ptx.Sum, values))
				x[i] = round(decode(b) + decode(n.residualIn[at:]))
				if got := decode(n.residualOut[at:]); got != x[i] {
					return fmt.Errorf("rank %d, row %d: residual %d is %v, not %v", r, row, i, got, x[i])
				}
			}
			scale := 1 / float32(math.Sqrt(float64(squaresOf(x, 16/width, j.threads)/float32(j.columns)+n.p.Epsilon)))
			for i := range x {
				at := row*j.columns + i
				y := round(float32(x[i]*scale) * float32(n.p.Bias+decode(weights[i*width:])))
				if j.out && decode(n.out[at*width:]) != y {
					return fmt.Errorf("rank %d, row %d: element %d is %v, not %v", r, row, i, decode(n.out[at*width:]), y)
				}
				if want := nearestE4M3(y * (1 / scaleOfNorms)); j.fp8 && n.fp8[at] != want {
					return fmt.Errorf("rank %d, row %d: fp8 %d of %v is %#x, not %#x", r, row, i, y*(1/scaleOfNorms), n.fp8[at], want)
				}
			}
		}
	}
	return nil
}

// squaresOf adds squares in the order that the kernels promise.
func squaresOf(x []float32, perLine, threads int) float32 {
	var tree func(from, to []float32) float32
	tree = func(a, b []float32) float32 { // pairs 16 apart first, then 8, and so on
		if len(a) == 1 {
			return a[0] + b[0]
		}
		sum := make([]float32, len(a))
		for i := range a {
			sum[i] = a[i] + b[i]
		}
		return tree(sum[:len(sum)/2], sum[len(sum)/2:])
	}
	var total float32
	for w := 0; w < threads; w += 32 {
		lanes := make([]float32, 32)
		for l := range lanes {
			for at := (w + l) * perLine; at < len(x); at += threads * perLine {
				sum := x[at] * x[at]
				for _, e := range x[at+1 : at+perLine] {
					sum = sum + float32(e*e)
				}
				lanes[l] = lanes[l] + sum
			}
		}
		total = total + tree(lanes[:16], lanes[16:])
	}
	return total
}

// nearestE4M3 looks for the nearest of all 8-bit floats, the even one of two.
func nearestE4M3(x float32) byte {
	if x != x {
		return 0x7f
	}
	sign := byte(0)
	if math.Signbit(float64(x)) {
		sign = 0x80
	}
	best, off := byte(0), math.Inf(1)
	for b := range byte(0x7f) {
		v := math.Ldexp(8+float64(b&7), int(b>>3)-10)
		if b < 8 {
			v = math.Ldexp(float64(b), -9)
		}
		if d := math.Abs(math.Min(math.Abs(float64(x)), 448) - v); d < off || d == off && b%2 == 0 {
			best, off = b, d
		}
	}
	return sign | best
}

func normJobs(full bool) (all []normJob) {
	for _, form := range []ptx.Form{ptx.OneShotPush, ptx.TwoShotPush, ptx.TwoShotPull} {
		for i, ranks := range []int{2, 3, 4, 8, 9} {
			for k, dtype := range []string{"bf16", "f16", "f32"} {
				if ranks > 4 && k > 0 {
					continue
				}
				whole := 16 / widths[dtype]
				j := normJob{form: form, dtype: dtype, ranks: ranks, rows: 3, columns: 37 * whole, blocks: 2, threads: 32, out: true, launches: 3, hopper: true, bias: float32(i % 2)}
				if ranks == 3 { // longer than what is kept in registers, in several warps
					j.columns, j.threads, j.rows, j.launches = 147*whole, 64, 2, 2
				}
				if ranks > 4 {
					j.columns, j.rows, j.launches = 5*whole, 2, 3
				}
				if ranks == 2 { // many rows, several a block and in several warps
					j.rows, j.columns, j.threads = 9, 65*whole, 64
				}
				j.inPlace, j.fp8 = k%2 == 0, (i+k)%2 == 0
				all = append(all, j)
				if j.inPlace, j.fp8, j.hopper, j.out = !j.inPlace, !j.fp8, false, j.fp8; ranks < 4 || full {
					all = append(all, j)
				}
			}
		}
	}
	for i, ranks := range []int{2, 4, 8} { // in clusters: of several rows, and of blocks with one warp and two
		for k, dtype := range []string{"bf16", "f16", "f32"} {
			j := normJob{form: ptx.OneShotPush, dtype: dtype, ranks: ranks, rows: 3, columns: 300 * 16 / widths[dtype], blocks: 2, threads: 256, clusters: true, out: true, launches: 3, hopper: true, bias: float32(i % 2)}
			if ranks > 2 {
				j.columns, j.launches = 70*16/widths[dtype], 2
			}
			if k == i {
				j.threads, j.rows, j.columns = 512, 2, j.columns*4
			}
			j.inPlace, j.fp8 = k%2 == 0, (i+k)%2 == 0
			if ranks == 2 || k == i || full {
				all = append(all, j)
			}
		}
	}
	return all
}

// TestRMSNorm: an all-reduce with residual, norm and fp8 gives the bits of a plain loop in every form, with memory as weak as it may be.
func TestRMSNorm(t *testing.T) {
	seeds := uint64(1)
	if os.Getenv("SYMMEM_TEST_MATRIX") == "full" {
		seeds = 5
	}
	for _, j := range normJobs(seeds > 1) {
		t.Run(j.String(), func(t *testing.T) {
			for seed := range seeds {
				require.NoError(t, j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 28}))
			}
		})
	}
	for _, form := range []ptx.Form{ptx.OneShotPush, ptx.TwoShotPush, ptx.TwoShotPull} {
		j := normJob{form: form, dtype: "bf16", ranks: 3, rows: 2, columns: 64, blocks: 2, threads: 32, out: true, launches: 2, missing: 1, hopper: true}
		t.Run(j.String(), func(t *testing.T) { require.NoError(t, j.run(t, Config{Seed: 1, Weak: true, MaxSteps: 1 << 26})) })
	}
}

// TestRMSNormBites takes the order out of the kernels, one instruction at a time: each time something notices, or the reason why not is known.
// SYMMEM_TEST_MATRIX=full does it to all forms.
func TestRMSNormBites(t *testing.T) {
	const notSoon = "it keeps the next launch from beginning before all threads of a block have had lines, which is faster; when the first have, it may: see TestNormStartsNext"
	const closesAlone = "thread 0 gives up where others do, and only later launches read the record that it closes"
	known := map[string]string{
		"oneshot_push: bar.red.and.pred (0)": deadLater,
		"oneshot_push: bar.sync (0)":         notSoon,
		"clusters: bar.sync (0)":             notSoon,
		"clusters: bar.red.and.pred (0)":     deadLater,
		"clusters: bar.red.and.pred (1)":     closesAlone,
		"twoshot_push: bar.sync (0)":         notSoon,
		"twoshot_push: bar.red.and.pred (0)": deadLater,
		"twoshot_pull: bar.red.and.pred (0)": deadLater,
		"oneshot_push: bar.red.and.pred (1)": closesAlone,
		"twoshot_push: bar.red.and.pred (1)": closesAlone,
		"twoshot_pull: bar.red.and.pred (3)": closesAlone,
	}
	var subjects []subject
	for _, form := range []ptx.Form{ptx.TwoShotPush, ptx.TwoShotPull, ptx.OneShotPush} {
		if form == ptx.OneShotPush && os.Getenv("SYMMEM_TEST_MATRIX") != "full" {
			maps.DeleteFunc(known, func(key, _ string) bool { return strings.HasPrefix(key, form.String()) })
			break // it has no instruction that two-shot push has not
		}
		j := normJob{form: form, dtype: "f32", ranks: 2, rows: 2, columns: 1040, blocks: 1, threads: 64, out: true, inPlace: true, launches: 4, hopper: true}
		few := j
		few.missing, few.launches = 1, 1
		k, _ := ptx.RMSNorm(form, j.dtype, j.ranks, true)
		var attempts []attempt
		rows := j // so many that all threads of a block have had lines when the next launch begins, and that what is shared is used again
		rows.rows, rows.columns, rows.launches = 9, 260, 2
		fewRows := rows
		fewRows.missing, fewRows.launches = 1, 1
		for _, a := range []normJob{j, few, rows, fewRows} {
			attempts = append(attempts, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
				a.replace = replace
				return a.run(tb, Config{Seed: seed, Weak: true, MaxSteps: 1 << 22})
			})
		}
		subjects = append(subjects, subject{k, form.String(), attempts})
	}
	j := normJob{form: ptx.OneShotPush, dtype: "f32", ranks: 2, rows: 3, columns: 600, blocks: 1, threads: 256, clusters: true, out: true, launches: 3, hopper: true}
	few := j
	few.missing, few.launches = 1, 1
	var attempts []attempt
	for _, a := range []normJob{j, few} {
		attempts = append(attempts, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
			a.replace = replace
			return a.run(tb, Config{Seed: seed, Weak: true, MaxSteps: 1 << 22})
		})
	}
	subjects = append(subjects, subject{j.kernel(t), "clusters", attempts})
	bite(t, subjects, 12, known)
}

// TestNormClusterBegins: no block stores into the shared memory of one of its cluster that has not begun. Without the barrier in front of the first store it does.
func TestNormClusterBegins(t *testing.T) {
	j := normJob{form: ptx.OneShotPush, dtype: "bf16", ranks: 2, rows: 1, columns: 8, blocks: 1, threads: 256, clusters: true, out: true, launches: 2, hopper: true}
	late := func(th Thread) bool { return th.Block[0] == 3 }
	run := func(seed uint64) error {
		return j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 24, Schedule: Slow(300, late)})
	}
	eachSeed(t, seedsOr(4, 16), run)
	j.replace = changed(t, j.kernel(t), func(lines []string) {
		for _, what := range []string{"barrier.cluster.arrive.relaxed.aligned;", "barrier.cluster.wait.aligned;"} {
			at := slices.Index(lines, what)
			require.GreaterOrEqual(t, at, 0, what)
			lines[at] = ""
		}
	})
	var err error
	for seed := uint64(0); seed < 16 && err == nil; seed++ {
		err = run(seed)
	}
	require.ErrorIs(t, err, ErrAddress)
}

// TestNormClusterGivesUp: where one block of a cluster finds the plan dead, and another one has not looked yet, both come to their barriers and end.
func TestNormClusterGivesUp(t *testing.T) {
	j := normJob{form: ptx.OneShotPush, dtype: "bf16", ranks: 2, rows: 3, columns: 8, blocks: 1, threads: 256, clusters: true, out: true, launches: 2, hopper: true, missing: 1}
	for block := range uint32(2) { // a block that sends, and one that has nothing to send
		late := func(th Thread) bool { return th.Block[0] == block }
		eachSeed(t, seedsOr(4, 16), func(seed uint64) error {
			return j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 26, Schedule: Slow(5000, late), Turn: 20})
		})
	}
}

// TestE4M3Kernel: every bf16 there is as fp8. Rows of ones are as long as there are numbers in them, so that the weights come out.
func TestE4M3Kernel(t *testing.T) {
	for _, hopper := range []bool{false, true} {
		const columns = 1 << 16
		w := newRooms(t, 1, 1, 0, 0)
		p := ptx.Norm{Rows: 1, Columns: columns, Scale: ptx.NormScale(1)}
		var residual, weight, out, fp8 []byte
		p.In, _ = w.ranks[0].take(columns*2, 0)
		p.Residual, residual = w.ranks[0].take(columns*2, 0)
		p.ResidualOut, _ = w.ranks[0].take(columns*2, 0)
		p.Weight, weight = w.ranks[0].take(columns*2, 0)
		p.Out, out = w.ranks[0].take(columns*2, 0)
		p.Quantized, fp8 = w.ranks[0].take(columns, 0)
		for i := range columns {
			put(residual[2*i:], 2, 0x3f80)
			put(weight[2*i:], 2, uint64(i))
		}
		k, ok := ptx.LocalRMSNorm("bf16", hopper)
		require.True(t, ok)
		m := New(w.memory, Config{Seed: 1, MaxSteps: 1 << 28})
		require.NoError(t, m.NewStream(0).Launch(Launch{Function: moduleOf(t, k.File).Function(k.Name), Block: [3]uint32{512}, Params: [][]byte{structBytes(t, p)}}))
		require.NoError(t, m.Run())
		for i, got := range fp8 {
			y := widen("bf16", uint64(i))
			if have := get(out[2*i:], 2); y == y && have != uint64(i) && y != 0 {
				t.Fatalf("%v came out as %#x", y, have)
			}
			want := nearestE4M3(y)
			if y == 0 {
				want, got = 0, got&0x7f // 0 + -0 is 0
			}
			require.Equal(t, want, got, "%v", y)
		}
	}
}

// quantJob is an all-reduce of int8 blocks.
type quantJob struct {
	dtype         string
	op            int
	ranks, count  int
	offset, shift int // bytes: of the input behind a multiple of 16, and of the output
	inPlace       bool
	blocks        int
	missing       int
	launches      int
	extreme       bool

	replace func(*Module) *Module
}

func (j quantJob) String() string {
	return fmt.Sprintf("%s/op=%d/ranks=%d/count=%d+%d/in_place=%t/missing=%d/extreme=%t", j.dtype, j.op, j.ranks, j.count, j.offset, j.inPlace, j.missing, j.extreme)
}

// quantValue is an element of a message: of all sizes, and none at all.
func (j quantJob) value(rnd *rand.Rand, i int) uint64 {
	width := widths[j.dtype]
	x := element(j.dtype, rnd, false)
	if !j.extreme {
		return x
	}
	switch i / 64 % 5 {
	case 0:
		return 0
	case 1: // subnormal
		return x & (1<<(map[string]int{"f32": 23, "f16": 10, "bf16": 7}[j.dtype]) - 1)
	case 2: // infinities and NaN among others
		if i%29 == 0 {
			return []uint64{0x7f800000, 0x7fc00000}[i/29%2] >> (32 - 8*width)
		}
	case 3: // anything
		return rnd.Uint64() & mask(width)
	}
	return x
}

func (j quantJob) run(tb testing.TB, c Config) error {
	width := widths[j.dtype]
	shard := ptx.QuantizedShard(int64(j.count), j.ranks)
	span := ptx.QuantizedSpan(shard)
	w := newRooms(tb, j.ranks, j.blocks, 4*int64(j.ranks)*span, 1<<32-2)
	rnd := rand.New(rand.NewPCG(c.Seed, 12))
	type one struct {
		p       ptx.Quantized
		in, out []byte
		values  []uint64
	}
	runs := make([][]one, j.launches)
	for l := range runs {
		for r := range j.ranks {
			o := one{p: ptx.Quantized{Count: uint64(j.count), Shard: uint64(shard), Span: uint64(span), Op: uint32(j.op), World: uint32(j.ranks)}}
			o.p.In, o.in = w.ranks[r].take(j.count*width, j.offset)
			o.p.Out, o.out = o.p.In, o.in
			if !j.inPlace {
				o.p.Out, o.out = w.ranks[r].take(j.count*width, j.shift)
			}
			for i := range j.count {
				v := j.value(rnd, i)
				o.values = append(o.values, v)
				put(o.in[i*width:], width, v)
			}
			runs[l] = append(runs[l], o)
		}
	}
	kernel, ok := ptx.QuantizedAllReduce(j.dtype)
	require.True(tb, ok)
	module := moduleOf(tb, kernel.File)
	if j.replace != nil {
		module = j.replace(module)
	}
	m := New(w.memory, c)
	here := j.ranks - j.missing
	for r := range here {
		s := m.NewStream(r)
		for l := range runs {
			comm := w.comms[r]
			if j.missing > 0 {
				comm.Timeout = 20_000
			}
			require.NoError(tb, s.Launch(Launch{
				Function: module.Function(kernel.Name), Grid: [3]uint32{uint32(j.blocks)}, Block: [3]uint32{32}, Params: [][]byte{comm.Bytes(), structBytes(tb, runs[l][r].p)},
			}))
		}
	}
	if err := m.Run(); err != nil {
		return err
	}
	if j.missing > 0 {
		return w.timedOut(here, ptx.FaultQuantized)
	}
	for l := range runs {
		var inputs [][]uint64
		for _, o := range runs[l] {
			inputs = append(inputs, o.values)
		}
		want := quantizedSum(j.dtype, j.op, inputs)
		for r, o := range runs[l] {
			for i, v := range want {
				if got := get(o.out[i*width:], width); got != v {
					return fmt.Errorf("launch %d, rank %d: element %d is %#x, not %#x", l, r, i, got, v)
				}
			}
		}
	}
	return nil
}

// quantizedSum is what an all-reduce of int8 blocks gives.
func quantizedSum(dtype string, op int, inputs [][]uint64) []uint64 {
	value := func(v uint64) float32 {
		if dtype == "f32" {
			return f32(v)
		}
		return widen(dtype, v)
	}
	rounded := func(x []float32) {
		most := 0.0
		for _, v := range x {
			most = max(most, math.Abs(float64(v))) // or NaN
		}
		scale := max(float32(most)/127, 0x1p-126)
		for i, v := range x {
			if !(most <= math.MaxFloat32) {
				x[i] = float32(math.NaN())
				continue
			}
			x[i] = float32(int(math.RoundToEven(float64(v*(1/scale))))) * scale // an integer has no -0
		}
	}
	var out []uint64
	for lo := 0; lo < len(inputs[0]); lo += 64 {
		hi := min(lo+64, len(inputs[0]))
		sum := make([]float32, hi-lo)
		for r, in := range inputs {
			x := make([]float32, hi-lo)
			for i := range x {
				x[i] = value(in[lo+i])
			}
			rounded(x)
			for i, v := range x {
				if r == 0 {
					sum[i] = v
				} else {
					sum[i] += v
				}
			}
		}
		if op == ptx.Avg {
			for i := range sum {
				sum[i] /= float32(len(inputs))
			}
		}
		rounded(sum)
		for _, v := range sum {
			switch {
			case v != v:
				out = append(out, map[string]uint64{"f32": nan32, "f16": nan16, "bf16": nan16}[dtype])
			case dtype == "f32":
				out = append(out, uint64(math.Float32bits(v)))
			default:
				out = append(out, narrow(dtype, v))
			}
		}
	}
	return out
}

func quantJobs() (all []quantJob) {
	for i, ranks := range []int{2, 3, 4, 9} {
		for k, dtype := range []string{"bf16", "f16", "f32"} {
			width := widths[dtype]
			j := quantJob{dtype: dtype, op: ptx.Sum, ranks: ranks, count: 64*11 + 13, blocks: 2, launches: 3, extreme: k == i%3, inPlace: (i+k)%2 == 0}
			if ranks > 4 {
				j.count, j.launches = 64*3+1, 3
			}
			all = append(all, j)
			j.op, j.offset, j.shift, j.inPlace, j.extreme = ptx.Avg, width, 3*width, !j.inPlace, !j.extreme
			all = append(all, j)
		}
	}
	return all
}

// TestQuantized: an all-reduce of int8 blocks gives the bits of a plain loop, on every rank, with memory as weak as it may be.
func TestQuantized(t *testing.T) {
	seeds := uint64(1)
	if os.Getenv("SYMMEM_TEST_MATRIX") == "full" {
		seeds = 10
	}
	for _, j := range append(quantJobs(), quantJob{dtype: "bf16", op: ptx.Sum, ranks: 3, count: 200, blocks: 2, launches: 2, missing: 1}) {
		t.Run(j.String(), func(t *testing.T) {
			for seed := range seeds {
				require.NoError(t, j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 28}))
			}
		})
	}
}
