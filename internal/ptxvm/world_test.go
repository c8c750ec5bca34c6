package ptxvm

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
	_ "github.com/symmem/symmem/kernels/ptx/images"
)

// aligned is bytes whose address is a multiple of 16.
func aligned(n int) []byte {
	w := make([][2]uint64, (n+15)/16+1)
	b := unsafe.Slice((*byte)(unsafe.Pointer(&w[0])), len(w)*16)
	for uintptr(unsafe.Pointer(&b[0]))%16 != 0 {
		b = b[8:]
	}
	return b[:n:n]
}

var modules sync.Map

// moduleOf parses a file of the archive once.
func moduleOf(tb testing.TB, file string) *Module {
	if m, ok := modules.Load(file); ok {
		return m.(*Module)
	}
	text, err := ptx.Image(file)
	require.NoError(tb, err)
	m, err := Parse(file, text)
	require.NoError(tb, err)
	modules.Store(file, m)
	return m
}

// dtypes of the all-reduce kernels.
var widths = map[string]int{"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u8": 1, "u16": 2, "u32": 4, "u64": 8}

// job is one all-reduce: all ranks, several launches.
type job struct {
	form    ptx.Form
	dtype   string
	op      int
	ranks   int
	count   int
	offset  int // elements that the tensors begin behind an aligned address
	shift   int // elements that the output begins later than that
	inPlace bool
	hopper  bool
	epochs  int
	blocks  int
	threads int
	lap     int64
	first   uint32 // epoch
	queued  bool   // all launches are enqueued at once, each with tensors of its own
	user    bool   // as queued, but with the same tensors, which kernels on the stream write before and read behind each launch
	missing int    // so many of the last ranks do not launch
	overlap bool   // launched so whatever the plan would do
	began   bool   // but they have come to where the last wait of the others begins
	stop    bool   // with missing: the host ends it, and not the time
	exact   bool   // only whole numbers, whose sum does not depend on the order
	twice   bool   // two plans at once, on devices that hold no more than both
	long    bool   // by the kernel for long messages of whole vectors
	longer  bool   // by that for messages of which a thread has several

	replace func(*Module) *Module
}

func (j job) String() string {
	s := fmt.Sprintf("%s/%s/op=%d/ranks=%d/count=%d+%d", j.form, j.dtype, j.op, j.ranks, j.count, j.offset)
	if j.inPlace {
		s += "/in-place"
	}
	if j.queued {
		s += "/queued"
	}
	if j.user {
		s += "/user"
	}
	if j.missing > 0 {
		s += fmt.Sprintf("/missing=%d", j.missing)
	}
	if j.long {
		s += "/long"
	}
	if j.longer {
		s += "/longer"
	}
	if j.hopper {
		s += "/hopper"
	}
	return s
}

// world is the memory of the ranks of a job.
type world struct {
	job           job
	memory        *Memory
	above         uint64
	layout        ptx.Layout
	kernel        ptx.Kernel
	in, out       [][][]byte // of each launch and rank, the elements
	channel       [][]byte
	words         [][]byte       // dead, fault, stop
	channels      []uint64       // addresses
	inPtr, outPtr []uint64       // of the last launch's tensors
	params        [][]ptx.Params // of each launch and rank
	inputs        [][][]uint64
	sinks         [][][]byte // with user: where the results of a launch go
}

const (
	inAt      = 0x100000000
	outAt     = 0x200000000
	channelAt = 0x300000000
	wordsAt   = 0x400000000
	multiIn   = 0x500000000
	multiOut  = 0x600000000
	rankAt    = 0x1000000000
	epochAt   = 0x4000000
	tableAt   = 0x1000
	fillByte  = 0xa5
)

func newWorld(tb testing.TB, j job) *world { return newWorldIn(tb, NewMemory(), 0, j) }

// newWorldIn is newWorld in memory that may have other worlds, with all addresses higher by above.
func newWorldIn(tb testing.TB, memory *Memory, above uint64, j job) *world {
	w := &world{job: j, memory: memory, above: above}
	width := widths[j.dtype]
	bytes := j.count * width
	var ok bool
	w.kernel, ok = ptx.AllReduce(j.form, j.dtype, j.op, j.ranks, j.hopper)
	require.True(tb, ok, "%s", j)
	if k, ok := j.whole(); ok {
		w.kernel = k
		w.job.threads = (j.threads + 31) / 32 * 32
		if j.form == ptx.TwoShotPush { // which has a warp for every peer
			w.job.threads = max(w.job.threads, (j.ranks-2+j.blocks)/j.blocks*32)
		}
	}
	staged := j.inPlace && (j.form == ptx.OneShotPull || j.form == ptx.OneShotMultimem)
	w.layout = ptx.Layout{Form: j.form, World: j.ranks, Bytes: int64(bytes), Blocks: j.blocks, LapBytes: j.lap, Staged: staged, Whole: j.wholeVectors()}
	base := ptx.Params{
		Count: uint64(j.count), Timeout: math.MaxUint64 / 2, Shard: uint64(w.layout.Shard()), Span: uint64(w.layout.Span()), World: uint32(j.ranks), Op: uint32(j.op),
	}
	if staged {
		base.Flags |= ptx.Staged
	}
	for r := range j.ranks {
		at := above + uint64(r+1)*rankAt
		channel := aligned(int(w.layout.WorkspaceBytes()))
		for i := 0; i < int(w.layout.ControlBytes()); i += 4 {
			binary.LittleEndian.PutUint32(channel[i:], j.first)
		}
		require.NoError(tb, w.memory.Map(at+channelAt, channel))
		words := aligned(64)
		require.NoError(tb, w.memory.Map(at+wordsAt, words))
		w.channel, w.words = append(w.channel, channel), append(w.words, words)
		w.channels = append(w.channels, at+channelAt)
	}
	copy(base.Workspace[:], w.channels)
	for e := range max(j.epochs, 1) {
		if j.user && e > 0 {
			w.in, w.out, w.params = append(w.in, w.in[0]), append(w.out, w.out[0]), append(w.params, w.params[0])
			continue
		}
		w.tensors(tb, base, above+uint64(e)*epochAt)
	}
	return w
}

// tensors makes the inputs and outputs of a launch.
func (w *world) tensors(tb testing.TB, base ptx.Params, epoch uint64) {
	j := w.job
	width := widths[j.dtype]
	bytes := j.count * width
	var ins, outs [][]byte
	var copiesIn, copiesOut, inPtr, outPtr []uint64
	for r := range j.ranks {
		at := uint64(r+1)*rankAt + epoch
		size := (bytes + j.offset*width + 31) / 16 * 16
		in := aligned(size)
		out := in
		outShift := j.offset
		require.NoError(tb, w.memory.Map(at+inAt, in))
		outBase := at + inAt
		if !j.inPlace {
			outShift += j.shift
			out = aligned(size + j.shift*width + 16)
			outBase = at + outAt
			require.NoError(tb, w.memory.Map(outBase, out))
		}
		for i := range out {
			out[i] = fillByte
		}
		ins, outs = append(ins, in[j.offset*width:][:bytes]), append(outs, out[outShift*width:][:bytes])
		inPtr, outPtr = append(inPtr, at+inAt+uint64(j.offset*width)), append(outPtr, outBase+uint64(outShift*width))
		copiesIn, copiesOut = append(copiesIn, at+inAt), append(copiesOut, outBase)
	}
	if j.form == ptx.OneShotMultimem || j.form == ptx.TwoShotMultimem {
		size := uint64((bytes + j.offset*width + 15) / 16 * 16)
		require.NoError(tb, w.memory.Multicast(multiIn+epoch, size, copiesIn...))
		require.NoError(tb, w.memory.Multicast(multiOut+epoch, size, copiesOut...))
		base.MulticastIn, base.MulticastOut = multiIn+epoch+uint64(j.offset*width), multiOut+epoch+uint64(j.offset*width)
	}
	w.inPtr, w.outPtr = inPtr, outPtr
	copy(base.In[:], inPtr)
	copy(base.Out[:], outPtr)
	var params []ptx.Params
	for r := range j.ranks {
		p := base
		at := w.above + uint64(r+1)*rankAt + wordsAt
		if j.ranks > ptx.Inline {
			table := aligned(3 * 8 * j.ranks)
			for i, x := range slices.Concat(inPtr, outPtr, w.channels) {
				binary.LittleEndian.PutUint64(table[8*i:], x)
			}
			p.Table = at - w.above + epoch + tableAt
			require.NoError(tb, w.memory.Map(p.Table, table))
		}
		p.Rank, p.Dead, p.Fault, p.Stop = uint32(r), at, at+16, at+32
		params = append(params, p)
	}
	w.in, w.out, w.params = append(w.in, ins), append(w.out, outs), append(w.params, params)
}

// fill gives every rank an input for a launch.
func (w *world) fill(epoch int) {
	rnd := rand.New(rand.NewPCG(uint64(epoch), 7))
	var inputs [][]uint64
	width := widths[w.job.dtype]
	for r := range w.job.ranks {
		var values []uint64
		for i := range w.job.count {
			v := element(w.job.dtype, rnd, w.job.exact)
			values = append(values, v)
			put(w.in[epoch][r][i*width:], width, v)
		}
		inputs = append(inputs, values)
	}
	w.inputs = append(w.inputs, inputs)
}

func put(b []byte, width int, v uint64) {
	for i := range width {
		b[i] = byte(v >> (8 * i))
	}
}

func get(b []byte, width int) (v uint64) {
	for i := range width {
		v |= uint64(b[i]) << (8 * i)
	}
	return v
}

func element(dtype string, rnd *rand.Rand, exact bool) uint64 {
	if exact || dtype[0] != 'f' && dtype[0] != 'b' {
		n := rnd.Uint64()
		if exact {
			if n = uint64(rnd.IntN(9)); dtype[0] == 'f' || dtype[0] == 'b' {
				n -= 4
			}
		}
		switch dtype {
		case "f32":
			return uint64(math.Float32bits(float32(int64(n))))
		case "f64":
			return math.Float64bits(float64(int64(n)))
		case "f16", "bf16":
			return narrow(dtype, float32(int64(n)))
		}
		return n & mask(widths[dtype])
	}
	x := (rnd.Float64() - 0.5) * math.Ldexp(1, rnd.IntN(12))
	switch dtype {
	case "f32":
		return uint64(math.Float32bits(float32(x)))
	case "f64":
		return math.Float64bits(x)
	}
	return narrow(dtype, float32(x))
}

// narrowing and widening are the slow conversions from and to f32, which the machine does not use for these.
var narrowing, widening = map[string]int64{}, map[string]int64{}

func init() {
	for _, dtype := range []string{"f16", "bf16", "f32"} {
		c, _ := newConversion(dtype, "f32", "rn", false)
		narrowing[dtype] = c.encode()
		c, _ = newConversion("f32", dtype, "", false)
		widening[dtype] = c.encode()
	}
}

func narrow(dtype string, x float32) uint64 {
	return convert(narrowing[dtype], uint64(math.Float32bits(x)))
}

func widen(dtype string, v uint64) float32 { return f32(convert(widening[dtype], v)) }

// combine is what an all-reduce gives for the values of one element, in rank order.
func combine(dtype string, op int, values []uint64) uint64 {
	n := len(values)
	switch dtype {
	case "f32", "f16", "bf16":
		x := make([]float32, n)
		for i, v := range values {
			if dtype == "f32" {
				x[i] = f32(v)
			} else {
				x[i] = widen(dtype, v)
			}
		}
		a := x[0]
		for _, y := range x[1:] {
			switch op {
			case ptx.Prod:
				a = float32(a * y)
			case ptx.Min:
				a = min(a, y)
			case ptx.Max:
				a = max(a, y)
			default:
				a = float32(a + y)
			}
		}
		if op == ptx.Avg {
			a /= float32(n)
		}
		if dtype == "f32" {
			return uint64(math.Float32bits(a))
		}
		return narrow(dtype, a)
	case "f64":
		a := f64(values[0])
		for _, v := range values[1:] {
			switch y := f64(v); op {
			case ptx.Prod:
				a *= y
			case ptx.Min:
				a = min(a, y)
			case ptx.Max:
				a = max(a, y)
			default:
				a += y
			}
		}
		if op == ptx.Avg {
			a /= float64(n)
		}
		return math.Float64bits(a)
	}
	width := widths[dtype]
	shift := 64 - 8*width
	wide := func(v uint64) int64 { return int64(v) << shift >> shift }
	a := values[0]
	for _, y := range values[1:] {
		less := y < a
		if dtype[0] == 'i' {
			less = wide(y) < wide(a)
		}
		switch op {
		case ptx.Prod:
			a *= y
		case ptx.Min, ptx.Max:
			if less == (op == ptx.Min) {
				a = y
			}
		default:
			a += y
		}
		a &= mask(width)
	}
	if op == ptx.Avg {
		if dtype[0] == 'i' {
			a = uint64(wide(a)/int64(n)) & mask(width)
		} else {
			a /= uint64(n)
		}
	}
	return a
}

// wholeVectors reports whether the tensors of the job are vectors of 16 bytes.
func (j job) wholeVectors() bool {
	width := widths[j.dtype]
	return (j.count*width|j.offset*width|j.shift*width)%16 == 0
}

// whole finds the kernel for whole vectors, if the tensors of the job are such.
func (j job) whole() (ptx.Kernel, bool) {
	if !j.wholeVectors() {
		return ptx.Kernel{}, false
	}
	if j.longer {
		return ptx.PushLonger(j.form, j.dtype, j.op, j.ranks, j.hopper)
	}
	if j.long {
		return ptx.PushLong(j.form, j.dtype, j.op, j.ranks, j.hopper)
	}
	return ptx.PushWhole(j.form, j.dtype, j.op, j.ranks, j.hopper)
}

// bytes is the parameter of a launch of a rank.
func (w *world) bytes(epoch, rank int) []byte {
	p := &w.params[epoch][rank]
	if _, ok := w.job.whole(); !ok {
		return p.Bytes()
	}
	push := ptx.PushParams{
		In: p.In[rank], Out: p.Out[rank], Records: p.Workspace[rank], Dead: p.Dead, Vectors: uint32(w.job.count * widths[w.job.dtype] / 16), Shard: uint32(p.Shard),
		Slot: uint32(p.Span / 16), Rank: p.Rank, Op: p.Op, Fault: p.Fault, Stop: p.Stop, Timeout: p.Timeout,
	}
	for k := range w.channels {
		push.Data = append(push.Data, w.channels[(rank+k)%len(w.channels)]+uint64(w.layout.ControlBytes()))
	}
	return push.Bytes()
}

// launch puts one launch of every rank on its stream.
func (w *world) launch(tb testing.TB, streams []*Stream, epoch int) {
	module := moduleOf(tb, w.kernel.File)
	if w.job.replace != nil {
		module = w.job.replace(module)
	}
	f := module.Function(w.kernel.Name)
	for r, s := range streams {
		require.NoError(tb, s.Launch(Launch{
			Function: f, Grid: [3]uint32{uint32(w.job.blocks)}, Block: [3]uint32{uint32(w.job.threads)}, Params: [][]byte{w.bytes(epoch, r)},
			Overlap: w.kernel.Overlap || w.job.overlap,
		}))
	}
}

// wrong says what is not as it should be after a launch.
func (w *world) wrong(epoch int) error {
	width := widths[w.job.dtype]
	values := make([]uint64, w.job.ranks)
	for i := range w.job.count {
		for r := range values {
			values[r] = w.inputs[epoch][r][i]
		}
		want := combine(w.job.dtype, w.job.op, values)
		for r := range values {
			if got := get(w.out[epoch][r][i*width:], width); got != want {
				return fmt.Errorf("rank %d: element %d is %#x, not %#x, of %#x", r, i, got, want, values)
			}
			if !w.job.inPlace && get(w.in[epoch][r][i*width:], width) != values[r] {
				return fmt.Errorf("rank %d: element %d of the input has changed", r, i)
			}
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

// copier has kernels that copy elements, one for each width.
var copier = sync.OnceValues(func() (*Module, error) {
	text := header
	for _, width := range []int{1, 2, 4, 8} {
		text += fmt.Sprintf(`
.visible .entry copy%[1]d(.param .u64 to, .param .u64 from, .param .u32 count) {
	.reg .b64 %%rd<6>;
	.reg .b32 %%r<4>;
	.reg .b64 %%v;
	.reg .pred %%p;
	ld.param.u64 %%rd1, [to];
	ld.param.u64 %%rd2, [from];
	ld.param.u32 %%r1, [count];
	mov.u32 %%r2, %%tid.x;
	mov.u32 %%r3, %%ntid.x;
	bra Check;
Next:
	mul.wide.u32 %%rd3, %%r2, %[1]d;
	add.s64 %%rd4, %%rd2, %%rd3;
	add.s64 %%rd5, %%rd1, %%rd3;
	ld.global.u%[2]d %%v, [%%rd4];
	st.global.u%[2]d [%%rd5], %%v;
	add.s32 %%r2, %%r2, %%r3;
Check:
	setp.lt.u32 %%p, %%r2, %%r1;
	@%%p bra Next;
	ret;
}
`, width, width*8)
	}
	return Parse("copier.ptx", []byte(text))
})

const (
	sourceAt = 0x700000000
	sinkAt   = 0x800000000
)

// copies puts a kernel on a stream that copies a tensor.
func (w *world) copies(tb testing.TB, s *Stream, to, from uint64) {
	m, err := copier()
	require.NoError(tb, err)
	f := m.Function(fmt.Sprintf("copy%d", widths[w.job.dtype]))
	require.NoError(tb, s.Launch(Launch{Function: f, Block: [3]uint32{8}, Params: [][]byte{u64(to), u64(from), u32(uint32(w.job.count))}}))
}

// runUser is run with kernels of a user around each launch.
func (w *world) runUser(tb testing.TB, m *Machine, streams []*Stream) error {
	bytes := w.job.count * widths[w.job.dtype]
	for e := range max(w.job.epochs, 1) {
		w.fill(e)
		var sinks [][]byte
		for r := range streams {
			at := uint64(r+1)*rankAt + uint64(e)*epochAt
			source, sink := aligned(bytes), aligned(bytes)
			copy(source, w.in[0][r])
			require.NoError(tb, w.memory.Map(at+sourceAt, source))
			require.NoError(tb, w.memory.Map(at+sinkAt, sink))
			sinks = append(sinks, sink)
		}
		w.sinks = append(w.sinks, sinks)
	}
	for r := range streams { // nothing is there but for the first kernel
		clear(w.in[0][r])
	}
	for e := range w.sinks {
		for r, s := range streams {
			w.copies(tb, s, w.inPtr[r], uint64(r+1)*rankAt+uint64(e)*epochAt+sourceAt)
		}
		w.launch(tb, streams, 0)
		for r, s := range streams {
			w.copies(tb, s, uint64(r+1)*rankAt+uint64(e)*epochAt+sinkAt, w.outPtr[r])
		}
	}
	if err := m.Run(); err != nil {
		return err
	}
	w.job.inPlace = true // so that inputs are not looked at
	for e := range w.sinks {
		w.out[e] = w.sinks[e]
		if err := w.wrong(e); err != nil {
			return fmt.Errorf("launch %d: %w", e, err)
		}
	}
	return nil
}

// runMissing is a launch for which the last ranks do not come: the others give up, tell why, and close nothing.
func (w *world) runMissing(tb testing.TB, m *Machine, streams []*Stream) error {
	here := streams[:len(streams)-w.job.missing]
	w.fill(0)
	for r := range here {
		if w.params[0][r].Timeout = 20_000; w.job.stop {
			w.params[0][r].Timeout = 1 << 62
			binary.LittleEndian.PutUint32(w.words[r][32:], 1)
		}
		for q := len(here); w.job.began && q < len(streams); q++ {
			flag := func(kind int, value uint32) { // of the first block
				binary.LittleEndian.PutUint32(w.channel[r][32+4*((w.job.ranks+7)/8*8*kind+q):], w.job.first+value)
			}
			if flag(0, 1); w.job.form == ptx.TwoShotFlow { // all laps were sent, and all but the last reduced
				laps := uint32((w.layout.Shard()*16 + w.layout.LapBytes - 1) / w.layout.LapBytes)
				flag(0, laps)
				flag(2, laps-1)
			}
		}
	}
	w.launch(tb, here, 0)
	if err := m.Run(); err != nil {
		return err
	}
	why := uint8(ptx.FaultTimeout)
	if w.job.stop {
		why = ptx.FaultStopped
	}
	for r := range here {
		fault := ptx.DecodeFault(binary.LittleEndian.Uint64(w.words[r][16:]))
		if fault.Why != why || fault.Kernel != uint8(w.job.form) || int(fault.Peer) >= w.job.ranks || int(fault.Peer) == r {
			return fmt.Errorf("rank %d: fault %+v", r, fault)
		}
		if dead := binary.LittleEndian.Uint32(w.words[r]); dead != 1 {
			return fmt.Errorf("rank %d: dead word %d", r, dead)
		}
		// The first block has something to do in every form, and so to wait for. Kernels for whole vectors have closed by then.
		want := w.job.first
		if _, whole := w.job.whole(); whole {
			want++
		}
		if e := binary.LittleEndian.Uint32(w.channel[r]); e != want {
			return fmt.Errorf("rank %d: block 0 has closed epoch %d", r, e)
		}
	}
	return nil
}

// run carries out a job, each epoch with new inputs, and gives the first error.
func (j job) run(tb testing.TB, c Config) (uint64, error) {
	if j.twice {
		return j.runTwice(tb, c)
	}
	w := newWorld(tb, j)
	m := New(w.memory, c)
	var streams []*Stream
	for r := range j.ranks {
		streams = append(streams, m.NewStream(r))
	}
	switch {
	case j.user:
		err := w.runUser(tb, m, streams)
		return m.Steps(), err
	case j.missing > 0:
		err := w.runMissing(tb, m, streams)
		return m.Steps(), err
	}
	n := max(j.epochs, 1)
	for e := range n {
		w.fill(e)
		w.launch(tb, streams, e)
		if j.queued && e+1 < n {
			continue
		}
		if err := m.Run(); err != nil {
			return m.Steps(), err
		}
		for k := e; k >= 0 && (k == e || j.queued); k-- {
			if err := w.wrong(k); err != nil {
				return m.Steps(), fmt.Errorf("launch %d: %w", k, err)
			}
		}
	}
	return m.Steps(), nil
}

// idler is a kernel that keeps its place for so many turns of a loop.
var idler = sync.OnceValues(func() (*Module, error) {
	return Parse("idler.ptx", []byte(header+`.visible .entry idle(.param .u32 turns) {
	.reg .b32 %r<2>;
	.reg .pred %p;
	ld.param.u32 %r1, [turns];
Again:
	add.s32 %r1, %r1, -1;
	setp.ne.u32 %p, %r1, 0;
	@%p bra Again;
	ret;
}
`))
})

// forTwo makes devices for [job.runTwice]: with room for two plans of so many blocks, which one block of another kernel has in the beginning, and each plan's streams, of which one is
// late on each rank.
func forTwo(tb testing.TB, memory *Memory, c Config, ranks, blocks int) (m *Machine, streams [2][]*Stream) {
	m = New(memory, c)
	for r := range ranks {
		m.Limit(r, Limits{Multiprocessors: 1, Blocks: 2 * blocks})
		idle(tb, m.NewStream(r), 1, 1+rand.New(rand.NewPCG(c.Seed, uint64(r))).IntN(1000))
	}
	for i := range streams {
		for r := range ranks {
			s := m.NewStream(r)
			if (r+i)%2 == 1 {
				s.Pause(1 + rand.New(rand.NewPCG(c.Seed, uint64(r))).Uint64N(1000))
			}
			streams[i] = append(streams[i], s)
		}
	}
	return m, streams
}

// idle keeps so many places for so many turns of a loop.
func idle(tb testing.TB, s *Stream, blocks, turns int) {
	module, err := idler()
	require.NoError(tb, err)
	require.NoError(tb, s.Launch(Launch{Function: module.Function("idle"), Grid: [3]uint32{uint32(blocks)}, Block: [3]uint32{1}, Params: [][]byte{u32(uint32(turns))}}))
}

// runTwice runs two plans on two streams, each of several launches, on devices that hold no more than the blocks of both, and that have another kernel's block in
// the beginning: they must not wait for each other, whichever comes first on which rank, and whatever begins early.
func (j job) runTwice(tb testing.TB, c Config) (uint64, error) {
	c.Hangs = true
	memory := NewMemory()
	worlds := []*world{newWorldIn(tb, memory, 0, j), newWorldIn(tb, memory, 1<<44, j)}
	m, streams := forTwo(tb, memory, c, j.ranks, j.blocks)
	for i, w := range worlds {
		for e := range j.epochs {
			w.fill(e)
			w.launch(tb, streams[i], e)
		}
	}
	if err := m.Run(); err != nil {
		return m.Steps(), err
	}
	for i, w := range worlds {
		for e := range j.epochs {
			if err := w.wrong(e); err != nil {
				return m.Steps(), fmt.Errorf("plan %d, launch %d: %w", i, e, err)
			}
		}
	}
	return m.Steps(), nil
}
