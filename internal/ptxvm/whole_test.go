package ptxvm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// wholeJob is several launches of a collective other than all-reduce, by the kernel for pieces of whole vectors.
type wholeJob struct {
	what    string
	dtype   string // of those that reduce
	op      int
	ranks   int
	vectors int // of a piece
	root    int
	inPlace bool
	hopper  bool
	epochs  int
	blocks  int
	threads int
	slow    int  // 1 and up: a rank that comes late to every third launch, and its number more by 1
	user    bool // all launches have the same tensors, into which kernels on the stream copy, and out of them
	missing int  // 1 and up: a rank that does not come, likewise
	stop    bool // with missing: the host ends it, and not the time
	twice   bool // two plans at once, on devices that hold no more than both
	shared  bool // all ranks are on one device, which holds no more than one launch of each
	torn    bool // rank 0 gives up in its second launch while half of a block has not looked yet whether it has, and rank 1 is not done with the first
}

const wholeFirst = 1<<32 - 2 // epoch

func (j wholeJob) String() string {
	s := fmt.Sprintf("%s/ranks=%d/vectors=%d/root=%d/in_place=%t/slow=%d/hopper=%t", j.what, j.ranks, j.vectors, j.root, j.inPlace, j.slow, j.hopper)
	if j.reduces() {
		s = fmt.Sprintf("%s/%s/op=%d", s, j.dtype, j.op)
	}
	if j.user {
		s += "/user"
	}
	if j.missing > 0 {
		s += fmt.Sprintf("/missing=%d/stop=%t", j.missing, j.stop)
	}
	return s
}

// inChunks is a reduce-scatter by the kernel for long shares, and toRootInChunks a reduce by it.
const (
	inChunks       = "reduce_scatter_in_chunks"
	toRootInChunks = "reduce_in_chunks"
)

// passedOn is a broadcast whose lines ranks pass on.
const passedOn = "broadcast_passed_on"

var wholeCollectives = []string{"all_gather", "all_to_all", "broadcast", passedOn, "reduce_scatter", "reduce", inChunks, toRootInChunks}

// collectivesOf is the collectives that there are between so many ranks.
func collectivesOf(ranks int) []string {
	if ranks > 2 {
		return wholeCollectives
	}
	return slices.DeleteFunc(slices.Clone(wholeCollectives), func(what string) bool { return what == passedOn })
}

func broadcasts(what string) bool { return what == "broadcast" || what == passedOn }

// chunks says that the kernel is the one for long shares.
func (j wholeJob) chunks() bool { return j.what == inChunks || j.what == toRootInChunks }

// share is how many vectors a rank combines, at most.
func (j wholeJob) share() int {
	if j.what == toRootInChunks {
		return (j.vectors + j.ranks - 2) / (j.ranks - 1)
	}
	return j.vectors
}

// chunk is how many vectors a chunk has.
func (j wholeJob) chunk() int {
	n := 1
	for ptx.ScatterFlowChunks(int64(16*2*n), j.ranks, j.threads) == 1 {
		n *= 2
	}
	return n
}

// long is the job with more vectors, 64 for a chunk, and so many blocks where it is in chunks, and with so many for a shard where it has shards.
func (j wholeJob) long(blocks int) wholeJob {
	if j.chunks() {
		j.vectors, j.blocks = max(j.vectors*j.chunk()/64, 1), blocks
	}
	switch j.what {
	case toRootInChunks:
		j.vectors *= j.ranks - 1
	case passedOn:
		j.vectors = j.vectors*(j.ranks-1) - 1 // the last shard is shorter
	}
	return j
}

func (j wholeJob) reduces() bool { return strings.HasPrefix(j.what, "reduce") }

// oneWay says that nobody sends to whom gets something.
func (j wholeJob) oneWay() bool { return broadcasts(j.what) || j.what == "reduce" }

func (j wholeJob) kernel(tb testing.TB) ptx.Kernel {
	k, ok := ptx.ScatterWhole(j.dtype, j.op, j.ranks, j.what == "reduce", j.hopper)
	if j.chunks() {
		k, ok = ptx.ScatterFlow(j.dtype, j.op, j.ranks)
	}
	switch {
	case j.what == passedOn:
		k, ok = ptx.LinesPass(j.ranks, j.hopper)
	case !j.reduces():
		pattern := map[string]ptx.Pattern{"all_gather": ptx.Gather, "all_to_all": ptx.Exchange, "broadcast": ptx.Broadcast}[j.what]
		k, ok = ptx.LinesWhole(pattern, j.ranks, j.hopper)
	}
	require.True(tb, ok, "%s", j)
	return k
}

// slot is that of a writer in bytes.
func (j wholeJob) slot() int64 {
	if j.reduces() {
		return ptx.ScatterSpan(ptx.OneShotPush, int64(j.share()*16))
	}
	return ptx.LinesWholeSlotBytes(int64(j.vectors * 16))
}

// bytes are the sizes of input and output, and where the smaller one is in the larger one if they are one tensor.
func (j wholeJob) bytes(rank int) (in, out, offset int) {
	piece := j.vectors * 16
	switch j.what {
	case "all_gather":
		return piece, j.ranks * piece, rank * piece
	case "all_to_all":
		return j.ranks * piece, j.ranks * piece, 0
	case "reduce_scatter", inChunks:
		return j.ranks * piece, piece, rank * piece
	}
	return piece, piece, 0
}

// input is any bits, words of ones and of zeros among them, or numbers.
func (j wholeJob) input(rnd *rand.Rand, n int) []byte {
	b := aligned(n)
	if j.reduces() {
		for i := 0; i < n; i += widths[j.dtype] {
			put(b[i:], widths[j.dtype], element(j.dtype, rnd, false))
		}
		return b
	}
	for i := 0; i < n; i += 4 {
		binary.LittleEndian.PutUint32(b[i:], []uint32{rnd.Uint32(), 0, 1<<32 - 1, rnd.Uint32()}[rnd.IntN(4)])
	}
	return b
}

// want is a rank's output, or nil if it has none.
func (j wholeJob) want(rank int, ins [][]byte) []byte {
	piece := j.vectors * 16
	var parts [][]byte // to be combined
	var out []byte
	for _, in := range ins {
		switch j.what {
		case "all_gather":
			out = append(out, in...)
		case "all_to_all":
			out = append(out, in[rank*piece:][:piece]...)
		case "reduce_scatter", inChunks:
			parts = append(parts, in[rank*piece:][:piece])
		case "reduce", toRootInChunks:
			parts = append(parts, in)
		}
	}
	switch {
	case broadcasts(j.what):
		return ins[j.root]
	case !j.reduces():
		return out
	case (j.what == "reduce" || j.what == toRootInChunks) && rank != j.root:
		return nil
	}
	width := widths[j.dtype]
	out = make([]byte, piece)
	for i := 0; i < piece; i += width {
		var values []uint64
		for _, p := range parts {
			values = append(values, get(p[i:], width))
		}
		put(out[i:], width, combine(j.dtype, j.op, values))
	}
	return out
}

// tensors is memory of a rank with an input and an output, with room behind each that must not be touched.
type tensors struct {
	in, out       []byte // of which the first bytes are the tensors
	inPtr, outPtr uint64
}

func (j wholeJob) tensors(w *crew, rank int) tensors {
	inBytes, outBytes, offset := j.bytes(rank)
	filled := func(n int) []byte {
		b := aligned(n + 64)
		for i := range b {
			b[i] = fillByte
		}
		return b
	}
	if !j.inPlace {
		t := tensors{in: filled(inBytes), out: filled(outBytes)}
		t.inPtr, t.outPtr = w.mapped(rank, t.in), w.mapped(rank, t.out)
		return t
	}
	whole := filled(max(inBytes, outBytes))
	t := tensors{in: whole, out: whole, inPtr: w.mapped(rank, whole)}
	if t.outPtr = t.inPtr; inBytes < outBytes {
		t.in, t.inPtr = whole[offset:], t.inPtr+uint64(offset)
	} else {
		t.out, t.outPtr = whole[offset:], t.outPtr+uint64(offset)
	}
	return t
}

// enqueue puts all launches on the streams of a crew, and gives what says afterwards what is not as it should be.
func (j wholeJob) enqueue(w *crew, seed uint64) (check func() error) {
	rnd := rand.New(rand.NewPCG(seed, 9))
	k := j.kernel(w.tb)
	copier, err := copier()
	require.NoError(w.tb, err)
	var checks []func() error
	var all []tensors
	for e := range j.epochs {
		var ins [][]byte
		for r := range j.ranks {
			if e == 0 || !j.user {
				all = append(all, j.tensors(w, r))
			}
			n, _, _ := j.bytes(r)
			ins = append(ins, j.input(rnd, n))
		}
		for r := range j.ranks {
			t := all[len(all)-j.ranks+r]
			inBytes, outBytes, _ := j.bytes(r)
			move := func(to, from uint64, n int) {
				require.NoError(w.tb, w.streams[r].Launch(Launch{Function: copier.Function("copy4"), Block: [3]uint32{8}, Params: [][]byte{u64(to), u64(from), u32(uint32(n / 4))}}))
			}
			want := j.want(r, ins)
			if j.user {
				move(t.inPtr, w.put(r, ins[r]), inBytes)
			} else {
				copy(t.in, ins[r])
			}
			whole := bytes.Clone(t.out)
			copy(whole, want)
			input := bytes.Clone(t.in)
			if r+1 == j.missing {
				continue
			}
			p := w.push(r, j.slot())
			p.In, p.Out, p.Vectors, p.Op, p.Shard = t.inPtr, t.outPtr, uint32(j.vectors), uint32(j.op), uint32(j.root)
			switch j.what {
			case inChunks:
				p.Shard = uint32(j.ranks)
			case toRootInChunks:
				p.Out = all[len(all)-j.ranks+j.root].outPtr
			}
			switch {
			case j.stop:
				p.Timeout = 1 << 62
				binary.LittleEndian.PutUint32(w.words[r][32:], 1)
			case j.missing > 0:
				p.Timeout = 20_000 * uint64(j.ranks) // in which all others have come, who take turns
				if j.chunks() {
					p.Timeout *= 20 // and their other blocks have stored, which come to several barriers
				}
			}
			if j.torn {
				p.Timeout = 20_000
			}
			if r+1 == j.slow && e%3 == 0 {
				w.late(r, 3000)
			}
			w.launch(r, k, p.Bytes())
			if j.user {
				sink := aligned(outBytes)
				move(w.mapped(r, sink), t.outPtr, outBytes)
				checks = append(checks, func() error { return j.differs(e, r, sink[:len(want)], want) })
				continue
			}
			checks = append(checks, func() error {
				if err := j.differs(e, r, t.out, whole); err != nil || j.inPlace {
					return err
				}
				return j.differs(e, r, t.in, input)
			})
		}
	}
	return func() error {
		if j.missing > 0 {
			return j.gaveUp(w)
		}
		if j.torn {
			if binary.LittleEndian.Uint32(w.words[0]) != 1 {
				return errors.New("rank 0 has not given up")
			}
			return checks[1]() // of rank 1's first launch
		}
		for _, c := range checks {
			if err := c(); err != nil {
				return err
			}
		}
		for r, b := range w.spaces {
			if e := binary.LittleEndian.Uint32(b); e != uint32(int64(wholeFirst)+int64(j.epochs)) {
				return fmt.Errorf("rank %d is in epoch %d", r, e)
			}
		}
		return w.whole()
	}
}

// passes says that a rank has lines of a broadcast to pass on: the last ranks behind root may have none.
func (j wholeJob) passes(rank int) bool {
	length := (j.vectors + j.ranks - 2) / (j.ranks - 1)
	return rank != j.root && (rank-j.root-1+j.ranks)%j.ranks*length < j.vectors
}

func (j wholeJob) differs(launch, rank int, got, want []byte) error {
	for i := range want {
		if got[i] != want[i] {
			return fmt.Errorf("launch %d, rank %d: byte %d is %#x, not %#x", launch, rank, i, got[i], want[i])
		}
	}
	return nil
}

// gaveUp: who waited for the rank that did not come names it. Where lines go one way, those that the one in the middle has left name that one.
func (j wholeJob) gaveUp(w *crew) error {
	why, kernel := uint8(ptx.FaultTimeout), uint8(ptx.FaultLines)
	if j.stop {
		why = ptx.FaultStopped
	}
	if j.reduces() {
		kernel = ptx.FaultScatter
	}
	for r := range j.ranks {
		if r+1 == j.missing {
			continue
		}
		peer := j.missing - 1
		f := ptx.DecodeFault(binary.LittleEndian.Uint64(w.words[r][16:]))
		switch {
		case r == j.root || !j.oneWay():
		case j.what != passedOn:
			peer = j.root
		// Who has had its own lines waits for those that the missing one was to pass on, if there are any, and else for root in the next launch. Who has no lines of its own names one of those
		// that pass lines on.
		case !j.passes(r):
			peer = int(f.Peer)
		case !j.passes(peer) || j.stop && int(f.Peer) == j.root:
			peer = j.root
		}
		// Root waits for all that combine for it, and who has no share finds only in the next launch that others have given up.
		indirect := j.what == toRootInChunks && (r == j.root || (r-j.root-1+j.ranks)%j.ranks*j.share() >= j.vectors)
		if j.chunks() && (j.stop || indirect) && int(f.Peer) != r && int(f.Peer) < j.ranks {
			peer = int(f.Peer) // which has not stored yet when the host ends it
		}
		if f.Why != why || f.Kernel != kernel || int(f.Peer) != peer || binary.LittleEndian.Uint32(w.words[r]) != 1 {
			return fmt.Errorf("rank %d: fault %+v, not of peer %d", r, f, peer)
		}
		if e := binary.LittleEndian.Uint32(w.spaces[r]); j.what == toRootInChunks && r == j.root && e != wholeFirst {
			return fmt.Errorf("root, which waits for others, counts launch %d as over", e)
		}
	}
	return nil
}

// push is the parameter of a kernel for whole vectors, without the message.
func (w *crew) push(rank int, slot int64) ptx.PushParams {
	c := w.comm(rank)
	p := ptx.PushParams{Records: c.Workspace[rank], Dead: c.Dead, Slot: uint32(slot / 16), Rank: c.Rank, Fault: c.Fault, Stop: c.Stop, Timeout: c.Timeout}
	for k := range w.ranks {
		p.Data = append(p.Data, c.Workspace[(rank+k)%w.ranks]+uint64(ptx.ControlBytes(w.blocks, w.ranks)))
	}
	return p
}

// run carries out all launches at once, each with tensors of its own unless a user has the same.
func (j wholeJob) run(tb testing.TB, c Config, replace func(*Module) *Module) error {
	workspace := 2 * int64(j.ranks) * j.slot()
	switch {
	case j.what == passedOn:
		workspace = 2 * j.slot()
	case j.chunks():
		workspace = ptx.ScatterFlowBytes(int64(j.share()*16), j.ranks)
	}
	if !j.twice {
		w := newCrew(tb, j.ranks, j.blocks, j.threads, workspace, wholeFirst, c)
		w.replace = replace
		if j.shared {
			w.m.Limit(0, Limits{Multiprocessors: 1, Blocks: j.ranks * j.blocks})
			for r := range w.streams {
				w.streams[r] = w.m.NewStream(0)
			}
		}
		check := j.enqueue(w, c.Seed)
		if err := w.m.Run(); err != nil {
			return err
		}
		return check()
	}
	c.Hangs = true
	memory := NewMemory()
	m, streams := forTwo(tb, memory, c, j.ranks, j.blocks)
	var checks []func() error
	for i, streams := range streams {
		w := newCrewIn(tb, memory, uint64(i)<<44, j.ranks, j.blocks, j.threads, workspace, wholeFirst)
		w.m, w.streams, w.replace = m, streams, replace
		checks = append(checks, j.enqueue(w, c.Seed))
	}
	if err := m.Run(); err != nil {
		return err
	}
	for i, check := range checks {
		if err := check(); err != nil {
			return fmt.Errorf("plan %d: %w", i, err)
		}
	}
	return nil
}

// wholes are jobs of every collective: one vector and a few, more vectors than threads, in place and not, as a user would have them.
func wholes(ranks int, dtypes ...string) (all []wholeJob) {
	i := 0
	for _, what := range collectivesOf(ranks) {
		for _, dtype := range dtypes {
			if dtype != dtypes[0] && !strings.HasPrefix(what, "reduce") {
				continue
			}
			for _, hopper := range []bool{false, true} {
				for _, vectors := range []int{1, 37, 150} {
					i++
					all = append(all, wholeJob{
						what: what, dtype: dtype, op: []int{ptx.Sum, ptx.Avg}[i%2], ranks: ranks, vectors: vectors, root: i % ranks, inPlace: broadcasts(what) || what != "all_to_all" && i/2%2 == 0,
						hopper: hopper, epochs: 4, blocks: 2, threads: 32, slow: i % (ranks + 1), user: i%3 == 0,
					}.long(1+i%5))
				}
			}
		}
	}
	return all
}

// TestWhole: the kernels for whole vectors give everybody the right bits, at every world size, with memory as weak as it may be, whoever is late, and
// touch nothing else. SYMMEM_TEST_MATRIX=full tries more seeds, and all dtypes between up to three ranks.
func TestWhole(t *testing.T) {
	for ranks := 2; ranks <= 8; ranks++ {
		seeds := seedsOr(1, 2)
		dtypes := []string{"f32", "f16", "bf16"}
		if ranks <= 3 {
			seeds = seedsOr(1, 3)
		}
		if ranks > 3 || ranks == 3 && !full() {
			dtypes = dtypes[ranks%3:][:1]
		}
		for i, j := range wholes(ranks, dtypes...) {
			if ranks > 4 && (i%2 == 0 || !full() && i%4 == 1) || j.chunks() && j.share() < j.chunk() && i%5 > 0 {
				continue
			}
			t.Run(j.String(), func(t *testing.T) {
				eachSeed(t, seeds, func(seed uint64) error { return j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 27}, nil) })
			})
		}
	}
}

// TestWholeSchedules: so they do under every schedule, with ranks and blocks that are late, strong and weak, and they end; two plans at once, too, in
// opposite order, on devices that hold no more than both, and ranks that share a device which holds one launch of each.
func TestWholeSchedules(t *testing.T) {
	for _, s := range schedules {
		for _, what := range wholeCollectives {
			for _, where := range []string{"apart", "twice", "shared"} {
				t.Run(fmt.Sprintf("%s/%s/%s", s.name, what, where), func(t *testing.T) {
					j := wholeJob{what: what, dtype: "f32", op: ptx.Sum, ranks: 3, vectors: 70, root: 1, hopper: true, epochs: 4, blocks: 2, threads: 32, inPlace: broadcasts(what), twice: where == "twice", shared: where == "shared"}.long(2)
					eachSeed(t, seedsOr(2, 4), func(seed uint64) error {
						return j.run(t, Config{Seed: seed, Weak: seed%2 == 0, Turn: int(8 + seed%2*100), Schedule: s.of(seed), Hangs: true, MaxSteps: 1 << 27}, nil)
					})
				})
			}
		}
	}
}

// TestWholeGivesUp: if a rank does not come, or the host ends it, all others give up, and say whom they have waited for.
func TestWholeGivesUp(t *testing.T) {
	for _, ranks := range []int{2, 3} {
		for _, what := range collectivesOf(ranks) {
			for missing := 1; missing <= ranks; missing++ {
				j := wholeJob{what: what, dtype: "bf16", op: ptx.Sum, ranks: ranks, vectors: 20, inPlace: broadcasts(what), hopper: ranks == 3, epochs: 3, blocks: 2, threads: 32, missing: missing}.long(4)
				for _, j.stop = range []bool{false, true} {
					t.Run(j.String(), func(t *testing.T) {
						require.NoError(t, j.run(t, Config{Seed: 1, Weak: true, MaxSteps: 1 << 27}, nil))
					})
				}
			}
		}
	}
}

// TestWholeWaitsForTheSlow: over hundreds of launches with one rank that is late again and again every line is free when it is written; and where lines
// go one way only, it would not be if the senders did not wait for the receivers.
func TestWholeWaitsForTheSlow(t *testing.T) {
	for _, what := range wholeCollectives {
		j := wholeJob{what: what, dtype: "f32", op: ptx.Sum, ranks: 3, vectors: 3, inPlace: broadcasts(what), epochs: 200, blocks: 1, threads: 32, slow: 3, hopper: true}.long(2)
		if what == "reduce" {
			j.slow = 1 // root
		}
		require.NoError(t, j.run(t, Config{Seed: 1, Weak: true, MaxSteps: 1 << 27}, nil), "%s", j)
		if !j.oneWay() {
			continue
		}
		j.epochs = 12
		k := j.kernel(t)
		module := moduleOf(t, k.File)
		lines := slices.Clone(module.lines)
		waits := regexp.MustCompile(`^ld\.acquire\.sys\.global\.u32 (%r\d+), .*;`)
		for i := range lines {
			lines[i] = waits.ReplaceAllString(lines[i], "mov.u32 $1, 1000;") // which is later than all
		}
		require.NotEqual(t, module.lines, lines)
		free := parse(t, k.File, strings.Join(lines, "\n"))
		var err error
		for seed := uint64(0); seed < 8 && err == nil; seed++ {
			err = j.run(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 21}, func(*Module) *Module { return free })
		}
		require.Error(t, err, "%s: nothing notices that nobody waits", j)
	}
}

// tornWhole runs a job that gives up in the middle of a block.
func tornWhole(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
	j := wholeJob{what: inChunks, dtype: "f32", op: ptx.Sum, ranks: 3, vectors: 520, hopper: true, epochs: 2, blocks: 2, threads: 64, torn: true}
	behind := func(t Thread) bool {
		return t.Device == 1 && t.Launch == 0 && t.Block[0] == 1 || t.Device == 0 && t.Launch == 1 && t.Block[0] == 0 && t.Thread[0] < 32
	}
	return j.run(tb, Config{Seed: seed, Weak: true, MaxSteps: 8 * biteSteps, Schedule: Slow(300, behind), Turn: 20}, replace) // in which each thread looks so often that it gives up
}

// TestGivesUpAsAWhole: a block whose threads find out at different times that the plan has failed stores nothing into places that a peer still reads.
func TestGivesUpAsAWhole(t *testing.T) {
	eachSeed(t, seedsOr(4, 16), func(seed uint64) error { return tornWhole(t, func(m *Module) *Module { return m }, seed) })
}

// coverWhole runs the kernels of one dtype in every way that they have, and with those of f32 those that have none.
func coverWhole(tb testing.TB, config Config, dtype string, ranks int) {
	for _, j := range wholes(ranks, dtype) {
		if dtype != "f32" && !j.reduces() || j.chunks() {
			continue
		}
		require.NoError(tb, j.run(tb, config, nil), "%s", j)
	}
	slow := config
	for _, what := range collectivesOf(ranks) {
		if dtype != "f32" && !strings.HasPrefix(what, "reduce") {
			continue
		}
		for _, hopper := range []bool{false, true} {
			j := wholeJob{what: what, dtype: dtype, op: ptx.Sum, ranks: ranks, vectors: 3, inPlace: broadcasts(what), hopper: hopper, epochs: 3, blocks: 1, threads: 32}
			if j.chunks() && hopper {
				continue // which has the same kernel
			}
			late := ranks
			if j.chunks() { // which are longer: two chunks and a bit, alone and in pairs
				for _, k := range []wholeJob{{blocks: 1, op: ptx.Avg}, {blocks: 2, op: ptx.Sum}} {
					k.what, k.dtype, k.ranks, k.hopper, k.epochs, k.threads = what, dtype, ranks, hopper, 2, 32
					if k.vectors = 2*k.chunk() + 4; what == toRootInChunks {
						k.vectors = k.vectors*(ranks-1) - 1 // the last share is shorter
					}
					require.NoError(tb, k.run(tb, config, nil), "%s", k)
					if what == toRootInChunks { // and so is a chunk of it, and that of no other
						k.vectors = 2*k.chunk()*(ranks-1) - 1
						require.NoError(tb, k.run(tb, config, nil), "%s", k)
					}
				}
				j.blocks, j.vectors = 2, 12
			}
			for rank := range late { // who waits for it waits long, but not for ever
				slow.Schedule, slow.Turn = Slow(50, func(t Thread) bool { return t.Device == rank }), 20
				if j.chunks() { // the block that combines: so the others wait for their places
					slow.Schedule = Slow(400, func(t Thread) bool { return t.Device == rank && t.Block[0] == 1 })
				}
				require.NoError(tb, j.run(tb, slow, nil), "%s", j)
				if j.chunks() { // the block that sends: so the others wait for lines, longer than they look at them without asking
					k := j
					k.epochs = 1
					if k.vectors = k.chunk() + 4; what == toRootInChunks {
						k.vectors *= ranks - 1
					}
					slow.Schedule = Slow(100, func(t Thread) bool { return t.Device == rank && t.Block[0] == 0 })
					require.NoError(tb, k.run(tb, slow, nil), "%s", k)
				}
				lost := j
				lost.missing = rank + 1
				require.NoError(tb, lost.run(tb, config, nil), "%s", lost)
				lost.stop = true
				require.NoError(tb, lost.run(tb, config, nil), "%s", lost)
			}
		}
	}
}

// bittenWhole is what nothing notices of these kernels, as bittenMoves says it of others.
var bittenWhole = map[string]string{
	"broadcast: ld.acquire.sys.global.u32 (0)":         loadedSooner,
	passedOn + ": ld.acquire.sys.global.u32 (0)":       loadedSooner,
	inChunks + ": ld.acquire.sys.global.u32 (1)":       ofReduces,
	inChunks + ": ld.acquire.sys.global.u32 (2)":       ofReduces,
	inChunks + ": bar.red.and.pred (2)":                ofReduces,
	inChunks + ": bar.red.and.pred (4)":                ofReduces,
	toRootInChunks + ": bar.red.and.pred (0)":          deadLater,
	toRootInChunks + ": ld.acquire.sys.global.u32 (2)": launchEnds,
}

const ofReduces = "it is of a reduce"

// TestBiteWhole is TestBite for the kernels for whole vectors.
func TestBiteWhole(t *testing.T) {
	var subjects []subject
	for _, what := range wholeCollectives {
		base := wholeJob{what: what, dtype: "f32", op: ptx.Sum, ranks: 3, vectors: 90, inPlace: broadcasts(what), hopper: true, epochs: 6, blocks: 1, threads: 32, slow: 3}.long(2)
		var attempts []attempt
		add := func(j wholeJob) {
			attempts = append(attempts, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
				return j.run(tb, Config{Seed: seed, Weak: true, MaxSteps: biteSteps, Schedule: Even()}, replace)
			})
		}
		add(base)
		base.slow = 1
		add(base)
		base.user, base.slow, base.vectors = true, 0, 30
		add(base)
		base.user, base.missing = false, 2
		add(base)
		base.missing, base.twice, base.blocks, base.epochs, base.vectors = 0, true, 2, 3, 70
		add(base)
		if what == inChunks {
			attempts = append(attempts, tornWhole)
		}
		subjects = append(subjects, subject{base.kernel(t), what, attempts})
	}
	bite(t, subjects, int(seedsOr(32, 96)), bittenWhole)
}
