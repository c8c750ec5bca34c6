package ptxvm

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/kernels/ptx/images"
)

// excuse is instructions that no run executes.
type excuse struct {
	function, block string // expressions that are in the function's name, and in the text of the block of instructions
	most            int    // so many blocks of a function; 0: any number
	why             string
}

// excuses is all of them, in all files that TestCoverage looks at.
var excuses = []excuse{
	{`twoshot_flow`, `div\.u64 `, 2, "the compiler's path for dividends of 2^32 and more, which are messages of 64 GiB"},
	{`twoshot_flow`, `^((add|sub|shl|and)\.[^\n]*\n)*ld\.global\.v4\.u32 [^\n]*$`, 2, "the rank's own vector where it is not whole is loaded as a part; that it is not whole was just asked"},
	{`symmem_pull`, `\.u8 `, 64, "what is before and behind the elements of a piece is less than one: of two bytes no thread has a second, and of four none a fourth"},
	{`symmem_many_moves`, `\.u8 `, 16, "as in symmem_pull: of two bytes no thread has a second, and of four none a fourth"},
	{`symmem_put_signal`, `\.u8 `, 32, "as in symmem_pull: of two bytes no thread has a second"},
	{`multimem`, `st\.global\.v4\.u32 `, 1, "a vector that is whole and aligned on both sides goes by the multicast address; that this one is not was just asked"},
	{``, `^nanosleep\.u32 0;$`, 1, "one of the values that are to be there when a wait is over is not 0"},
	{`oneshot_ll_.64`, `(load|store)PartI\w+Li2E`, 0, "a line of 8 bytes is one element, so there are no parts"},
	{`symmem_many_(oneshot|scatter)_.64`, `(load|store)PartI\w+Li2E`, 3, "a line of 8 bytes is one element, so there are no parts"},
	{`(load|store)PartI(3F64|7IntegerI[xy]\w*)Li2E`, ``, 0, "a line of 8 bytes is one element, so there are no parts"},
}

var (
	label  = regexp.MustCompile(`^\$?\w+:`)
	leaves = regexp.MustCompile(`^(@!?%p\d+ )?(bra|ret|exit|trap)`)
	jumps  = regexp.MustCompile(`^bra\.uni (\S+);`)
)

// blockOf is the instructions around a line that are executed if it is.
func blockOf(lines []string, line int) string {
	first := line - 1
	for first > 0 && !label.MatchString(lines[first-1]) && !leaves.MatchString(lines[first-1]) {
		first--
	}
	end := line - 1
	for !leaves.MatchString(lines[end]) && !label.MatchString(lines[end+1]) {
		end++
	}
	return strings.TrimSpace(strings.Join(lines[first:end+1], "\n"))
}

// variant is a kernel with what it can be used for.
type variant struct {
	form   ptx.Form
	dtype  string
	op     int
	ranks  int
	hopper bool
	again  bool // the kernel was there with another operation or world size
}

// variants are those of each kernel for all-reduce: each with every operation that it has, and those for any number of ranks with so many that the compiler's unrolled
// loops have everything left, with addresses that are inlined and that are in a table.
func variants() (out []variant) {
	seen := map[ptx.Kernel]bool{}
	for _, form := range ptx.Forms() {
		for _, dtype := range slices.Sorted(maps.Keys(widths)) {
			for _, ranks := range []int{2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 1} {
				for op := ptx.Sum; op <= ptx.Avg; op++ {
					for _, hopper := range []bool{true, false} {
						k, ok := ptx.AllReduce(form, dtype, op, ranks, hopper)
						if other, _ := ptx.AllReduce(form, dtype, op, ranks, true); !ok || !hopper && other == k {
							continue
						}
						whole := slices.Contains([]string{"f32", "f16", "bf16"}, dtype) && op == ptx.Prod // which has no kernels of its own
						if strings.HasSuffix(k.Name, "n") && (ranks > 5 && ranks < 9 || op != ptx.Sum && ranks != 5 && ranks != 9 && !whole) {
							continue
						}
						out = append(out, variant{form, dtype, op, ranks, hopper, seen[k]})
						seen[k] = true
					}
				}
			}
		}
	}
	return out
}

// cover runs a kernel in every way that it has.
func (v variant) cover(tb testing.TB, c *Coverage) {
	config := Config{Seed: 1, MaxSteps: 1 << 30, Coverage: c}
	width := widths[v.dtype]
	j := job{form: v.form, dtype: v.dtype, op: v.op, ranks: v.ranks, hopper: v.hopper, blocks: 2, threads: 8, lap: 128, epochs: 2, exact: v.form >= ptx.OneShotMultimem}
	run := func(j job) {
		_, err := j.run(tb, config)
		require.NoError(tb, err, "%s", j)
	}
	// So many vectors that the loops that do several at a time have some to do, and some left; and so many laps that one has to wait for room.
	vectors, step := 9*16*2+5, 0
	switch v.form {
	case ptx.OneShotPull:
		vectors, step = 5*16+1, 16
	case ptx.TwoShotPull, ptx.TwoShotMultimem:
		vectors, step = v.ranks*(8*16+8)-30, 8
	case ptx.TwoShotFlow:
		vectors, step = v.ranks*8*16-7, 2
		j.threads = 2
	case ptx.OneShotLL, ptx.OneShotPush:
		vectors = 70
	case ptx.TwoShotPush:
		vectors = v.ranks*24 - 3
	}
	j.count = vectors * 16 / width
	run(j)
	slow := func(j job) { // who waits for the second rank waits long, but not for ever
		config.Schedule, config.Turn = Slow(50, func(t Thread) bool { return t.Device == 1 }), 20
		run(j)
		config.Schedule, config.Turn = nil, 0
	}
	j.epochs = 1
	if v.form == ptx.TwoShotPush { // whole vectors, so many that its kernel for those takes several at a time
		large := j
		large.count, large.threads = (v.ranks*336-3)*16/width, 32
		run(large)
		if !v.again {
			slow(large)
			slow(j)
			large.missing = 1
			run(large)
		}
	}
	if _, ok := ptx.PushLong(v.form, v.dtype, v.op, v.ranks, v.hopper); ok {
		long := j
		long.threads, long.blocks = 32, 1
		for i, vectors := range []int{28, 60, 60} { // one for a thread, and two
			long.count, long.missing, long.long, long.longer = vectors*16/width, 0, i < 2, i == 2
			run(long)
			if !v.again {
				slow(long)
				long.missing = 1
				run(long)
			}
		}
	}
	j.offset, j.shift = 1, 1
	run(j)
	j.shift = 0
	run(j)
	j.inPlace = true
	run(j)
	if !j.exact && v.op == ptx.Avg { // small numbers, which are divided otherwise
		j.exact = true
		run(j)
		j.exact = false
	}
	if v.again {
		return
	}
	j.inPlace = false
	for k := 1; k < 4 && step > 0; k++ { // where the last vector, which is not whole, is among those at a time
		j.count += step * 16 / width
		run(j)
	}
	slow(j)
	j.count, j.offset = 20*16/width, 0
	j.missing = 1
	run(j)
	j.inPlace = true
	run(j)
	j.inPlace = false
	j.stop = true
	run(j)
	j.stop, j.began, j.blocks = false, true, 1
	run(j)
	j.count++
	j.offset = 1
	run(j)
}

// coverLists runs the other kernels for lists in every way that they have: those of float32, with full() of every dtype.
func coverLists(tb testing.TB, config Config) {
	for _, width := range []int{1, 2, 4, 8} {
		copyMany(tb, width, config)
	}
	slow := func(rank int) Config { // who waits for the rank waits long, but not for ever
		c := config
		c.Schedule, c.Turn = Slow(50, func(t Thread) bool { return t.Device == rank }), 20
		return c
	}
	many := func(j manyJob, c Config) { require.NoError(tb, j.run(tb, c), "%s", j) }
	shared := func(j sharedJob, c Config) { require.NoError(tb, j.run(tb, c), "%s", j) }
	counts := []int{1, 37, 0, 64, 5, 80, 3}
	dtypes := []string{"f32"}
	if full() {
		dtypes = slices.Sorted(maps.Keys(widths))
	}
	for _, dtype := range dtypes {
		for _, kernel := range []struct{ pull, hopper bool }{{false, false}, {false, true}, {true, false}} {
			if k, _ := ptx.ManyOneShot(dtype, true); kernel.hopper && !k.Overlap {
				continue // the same kernel
			}
			m := manyJob{pull: kernel.pull, hopper: kernel.hopper, dtype: dtype, counts: counts, epochs: 1, blocks: 2, threads: 8, most: 3, first: 1<<32 - 2}
			s := sharedJob{what: "reduce_scatter", pull: kernel.pull, hopper: kernel.hopper, dtype: dtype, counts: counts, epochs: 1, blocks: 2, threads: 8, most: 3, slow: -1}
			for m.op = ptx.Sum; m.op <= ptx.Avg; m.op++ {
				s.op = m.op
				for _, ranks := range []int{4, 5, 12} { // of groups of four and what is left, with addresses that are inlined and that are in a table
					if ranks == 5 || m.op == ptx.Sum {
						m.ranks, s.ranks = ranks, ranks
						many(m, config)
						shared(s, config)
					}
				}
				if m.op == ptx.Avg { // which are divided otherwise
					m.small, s.small = true, true
					many(m, config)
					shared(s, config)
					m.small, s.small = false, false
				}
			}
			// Fewer stretches than blocks; a rank that is slow, that does not come, and that comes to the first barrier only; ranks that the host stops.
			m.op, m.ranks, m.counts = ptx.Sum, 2, []int{3}
			s.op, s.ranks, s.counts = m.op, m.ranks, m.counts
			many(m, slow(1))
			shared(s, slow(1))
			m.missing, s.missing = 1, 1
			many(m, config)
			shared(s, config)
			if kernel.pull {
				m.began, s.began = true, true
				many(m, config)
				shared(s, config)
				m.began, s.began = false, false
			}
			m.stop, m.blocks, m.threads = true, 1, 1
			s.stop, s.blocks, s.threads = true, 1, 1
			many(m, config)
			shared(s, config)
			for _, ranks := range []int{2, 9} { // which wait before they overwrite what the first, which sends nothing back, has not taken
				if !kernel.pull {
					s := sharedJob{what: "reduce_scatter", hopper: kernel.hopper, dtype: dtype, op: ptx.Sum, counts: []int{1, 1}, ranks: ranks, epochs: 4, blocks: 1, threads: 8, most: 16, slow: -1}
					shared(s, slow(0))
				}
			}
		}
	}
	for _, hopper := range []bool{false, true} {
		for _, ranks := range []int{2, 5, 9} {
			for _, what := range []string{"all_gather", "broadcast"} {
				shared(sharedJob{what: what, hopper: hopper, ranks: ranks, counts: counts, root: ranks - 1, epochs: 1, blocks: 2, threads: 8, most: 3, slow: -1}, config)
			}
			// As above: more blocks than stretches, and a root that waits before it overwrites.
			shared(sharedJob{what: "broadcast", hopper: hopper, ranks: ranks, counts: []int{5, 64}, epochs: 4, blocks: 3, threads: 8, most: 16, slow: -1}, slow(1))
		}
		j := sharedJob{what: "broadcast", hopper: hopper, ranks: 3, counts: []int{5}, epochs: 3, blocks: 1, threads: 32, most: 16, slow: -1, missing: 1, after: 2} // in vain
		shared(j, config)
		j.stop = true
		shared(j, config)
	}
	// Copies between all alignments, with heads and tails of several bytes.
	for _, share := range []int{80, 72, 68, 66, 65} {
		for _, lead := range []int{11, 13} {
			shared(sharedJob{what: "all_gather", pull: true, ranks: 2, counts: []int{lead, 0, 0, 2 * share}, epochs: 1, blocks: 2, threads: 1, most: 1 << 10, slow: -1}, config)
		}
	}
	shared(sharedJob{what: "all_gather", pull: true, ranks: 9, counts: counts, epochs: 2, blocks: 2, threads: 8, most: 3, slow: -1}, slow(1))
	j := sharedJob{what: "all_gather", pull: true, ranks: 2, counts: counts, epochs: 1, blocks: 1, threads: 8, most: 3, slow: -1, missing: 1}
	shared(j, config)
	j.began = true
	shared(j, config)
}

// coverWholeLists runs the kernel for lists of whole vectors in every way that it has.
func coverWholeLists(tb testing.TB, config Config) {
	for _, dtype := range []string{"f32", "f16", "bf16"} {
		for ranks := 2; ranks <= 8; ranks++ {
			if !full() && (dtype != "f32" || ranks != 2) {
				continue
			}
			for _, j := range wholeJobs(ranks, []string{dtype}) {
				require.NoError(tb, j.run(tb, config), "%s", j)
			}
		}
	}
}

// TestCoverage: each line of each kernel for all-reduces, for pieces of whole vectors, for lists, for signals, and for pieces that are loaded is executed. With
// SYMMEM_TEST_MATRIX=full that is said of all of these; else of those of float32 and of no dtype, at two ranks where they are of one world size, but not of all-reduces at any
// world size or by multicast. The other kernels are run by tests of their own, which do not count.
func TestCoverage(t *testing.T) {
	c := &Coverage{}
	for _, v := range variants() {
		if full() || v.dtype == "f32" && v.ranks == 2 && v.form != ptx.OneShotLL && v.form < ptx.OneShotMultimem && (v.op == ptx.Sum || v.op == ptx.Avg) {
			v.cover(t, c)
		}
	}
	config := Config{Seed: 1, MaxSteps: 1 << 28, Coverage: c}
	for _, v := range movements() {
		require.NoError(t, v.run(t, config))
	}
	for i := range 4 {
		hopper, stores := i%2 == 1, i >= 2
		for _, skew := range []int{0, 1, 2, 4, 8} { // so that each way of copying is in both phases, with heads and tails of several elements a thread
			for bytes := 1000; bytes < 1016; bytes += 3 {
				require.NoError(t, movement{what: broadcastTwoShot, ranks: 3, bytes: bytes, in: 1, skew: skew, blocks: 2, threads: 1, stores: stores, hopper: hopper}.run(t, config))
			}
		}
		require.NoError(t, movement{what: broadcastTwoShot, ranks: 11, bytes: 1275, blocks: 2, threads: 8, stores: stores, hopper: hopper}.run(t, config))
		for _, ranks := range []int{2, 4, 6, 8, 9} { // of whole vectors, of which a thread has several, of four pieces and fewer at a time
			for _, what := range []string{allGather, allToAll, broadcast, broadcastTwoShot} {
				vectors := 90
				if what == broadcastTwoShot { // of a rank
					vectors *= ranks
				}
				for bytes := 16 * vectors; bytes < 16*(vectors+4); bytes += 16 {
					require.NoError(t, movement{what: what, ranks: ranks, bytes: bytes, blocks: 2, threads: 8, stores: stores, hopper: hopper}.run(t, config))
				}
			}
		}
	}
	if full() {
		coverCasts(t, config)
	}
	coverWholeLists(t, config)
	coverLists(t, config)
	for _, dtype := range []string{"f32", "f16", "bf16"} {
		for ranks := 2; ranks <= 8; ranks++ {
			if full() || dtype == "f32" && ranks == 2 {
				coverWhole(t, config, dtype, ranks)
			}
		}
	}
	for _, flags := range []uint32{0, ptx.Atomics} {
		for _, ranks := range []int{2, 3, 9} {
			for _, hopper := range []bool{false, true} {
				require.NoError(t, exchange(t, ranks, flags, hopper, config, nil))
			}
		}
		for k := range signalKinds {
			if signalKinds[k] == ptx.FaultSignal {
				require.NoError(t, twoStreams(t, k, flags, config, nil))
			}
		}
	}
	for _, hopper := range []bool{false, true} {
		for _, waits := range []bool{false, true} {
			putSignals(t, hopper, waits, 32, config)
			putSignals(t, hopper, waits, 1, config) // who has all heads and tails
			require.NoError(t, stepInVain(t, hopper, waits, config))
		}
	}
	for k := range signalKinds {
		for _, missing := range []int{1, 2} {
			require.NoError(t, givesUp(t, k, missing, config, nil))
		}
		require.NoError(t, stopped(t, k, config))
	}

	files, err := images.Files()
	require.NoError(t, err)
	files = slices.DeleteFunc(files, func(file string) bool {
		return !regexp.MustCompile(`^(signals|signals_sm90|pull|pull_sm90|multimem)\.ptx$|^(any|pull|push|many)_|^(lines|scatter_\w+)_w\d`).MatchString(file)
	})
	if !full() {
		files = []string{ptx.Pull(false).File, ptx.Pull(true).File, ptx.Barrier.File, "pull_f32_w2.ptx", "push_f32_w2.ptx", "push_f32_w2_sm90.ptx", "lines_w2.ptx", "lines_w2_sm90.ptx", "scatter_f32_w2.ptx", "scatter_f32_w2_sm90.ptx", "many_copy.ptx", "many_moves.ptx", "many_moves_sm90.ptx", "many_f32.ptx", "many_f32_sm90.ptx"}
	}
	all, ran, excused := 0, 0, map[string]int{}
	for _, file := range files {
		m := moduleOf(t, file)
		for _, f := range m.funcs {
			missing, of := c.Missing(m, f)
			all, ran = all+of, ran+of-len(missing)
			blocks := map[string]map[string]bool{}
			for _, p := range missing {
				text := blockOf(m.lines, p.Line)
				if j := jumps.FindStringSubmatch(text); j != nil { // only what is there decides
					if to := slices.Index(m.lines, j[1]+":"); to > 0 {
						text = blockOf(m.lines, to+2)
					}
				}
				k := slices.IndexFunc(excuses, func(e excuse) bool {
					return regexp.MustCompile(e.function).MatchString(f.Name) && regexp.MustCompile(e.block).MatchString(text)
				})
				if k < 0 {
					t.Errorf("%s: never executed, in %s", p, f.Name)
					continue
				}
				e := excuses[k]
				if blocks[e.why] == nil {
					blocks[e.why] = map[string]bool{}
				}
				blocks[e.why][text] = true
				excused[e.why]++
				require.True(t, e.most == 0 || len(blocks[e.why]) <= e.most, "%s: never executed, in %s: of %d blocks it is not so that %s", p, f.Name, e.most, e.why)
			}
		}
	}
	t.Logf("%d of %d instructions were executed; of the others: %v", ran, all, excused)
}
