package ptxvm

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

// weaker is what takes the order out of an instruction, and leaves all else.
var weaker = []struct {
	from *regexp.Regexp
	to   string
}{
	{regexp.MustCompile(`^fence\.[a-z_.]+;`), ""},
	{regexp.MustCompile(`^bar\.sync 0;`), ""},
	{regexp.MustCompile(`^bar\.red\.(?:and|or)\.pred (%p\d+), 0, (%p\d+);`), "mov.pred $1, $2;"},
	{regexp.MustCompile(`^ld\.acquire\.`), "ld.relaxed."},
	{regexp.MustCompile(`^st\.release\.`), "st.relaxed."},
	{regexp.MustCompile(`^red\.release\.`), "red.relaxed."},
	{regexp.MustCompile(`^barrier\.cluster\.arrive\.release\.`), "barrier.cluster.arrive.relaxed."},
	{regexp.MustCompile(`^griddepcontrol\.wait;`), ""},
}

// mutant is a kernel without the order that one instruction gives.
type mutant struct {
	kernel ptx.Kernel
	line   int
	what   string // the instruction
	nth    int    // of those like it in the kernel, from 0
	module *Module
}

func (m mutant) String() string {
	return fmt.Sprintf("%s without %s (%d)", m.kernel.Name, m.what, m.nth)
}

// mutants are all of a kernel.
func mutants(tb testing.TB, k ptx.Kernel) (out []mutant) {
	lines := moduleOf(tb, k.File).lines
	first := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, ".visible .entry "+k.Name+"(") })
	require.GreaterOrEqual(tb, first, 0)
	count := map[string]int{}
	depth, begun := 0, false
	for i := first; !begun || depth > 0; i++ {
		depth += strings.Count(lines[i], "{") - strings.Count(lines[i], "}")
		begun = begun || depth > 0
		for _, w := range weaker {
			if !w.from.MatchString(lines[i]) {
				continue
			}
			changed := slices.Clone(lines)
			changed[i] = w.from.ReplaceAllString(lines[i], w.to)
			what := strings.TrimSuffix(strings.Fields(lines[i])[0], ";")
			out = append(out, mutant{k, i + 1, what, count[what], parse(tb, k.File, strings.Join(changed, "\n"))})
			count[what]++
		}
	}
	return out
}

// attempt is one run that may notice.
type attempt func(tb testing.TB, replace func(*Module) *Module, seed uint64) error

// noticed says how: the first error of the attempts.
func (m mutant) noticed(tb testing.TB, attempts []attempt, seeds int) error {
	replace := func(old *Module) *Module {
		if old.file == m.module.file {
			return m.module
		}
		return old
	}
	for seed := range seeds {
		for _, a := range attempts {
			if err := a(tb, replace, uint64(seed)); err != nil {
				return err
			}
		}
	}
	return nil
}

const biteSteps = 1 << 23

// subject is a kernel, and what may notice that its order has gone.
type subject struct {
	kernel   ptx.Kernel
	name     string // in the list of what nothing notices
	attempts []attempt
}

// bite takes the order out of kernels, one instruction at a time: each time an attempt notices with one of so many seeds, or known says why none does, by the subject's name, the instruction and
// which of those it is. As they are, the kernels pass all attempts.
func bite(t *testing.T, subjects []subject, seeds int, known map[string]string) {
	t.Helper()
	left, ran := maps.Clone(known), 0
	for _, s := range subjects {
		t.Run(s.kernel.Name, func(t *testing.T) {
			ran++
			for _, a := range s.attempts {
				for seed := range max(seeds/16, 2) {
					require.NoError(t, a(t, func(m *Module) *Module { return m }, uint64(seed)), "seed %d, as it is", seed)
				}
			}
			for _, m := range mutants(t, s.kernel) {
				key := fmt.Sprintf("%s: %s (%d)", s.name, m.what, m.nth)
				why, unnoticed := known[key]
				n := seeds
				if unnoticed {
					n = max(seeds/16, 2)
				}
				err := m.noticed(t, s.attempts, n)
				t.Logf("line %d: without %s: %v", m.line, key, err)
				if unnoticed {
					assert.NoError(t, err, "%s is noticed, though: %s", key, why)
				} else {
					assert.Error(t, err, "nothing notices that line %d has gone: %s", m.line, key)
				}
				delete(left, key)
			}
		})
	}
	if ran == len(subjects) { // and not only those that -run names
		assert.Empty(t, left, "no kernel has these")
	}
}

func attemptsOf(j job, k ptx.Kernel) (out []attempt) {
	add := func(j job) {
		out = append(out, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
			j.replace = replace
			_, err := j.run(tb, Config{Seed: seed, Weak: true, MaxSteps: biteSteps, Schedule: Even()})
			return err
		})
	}
	j.epochs, j.blocks, j.threads, j.lap = 4, 1, 32, 128
	width := widths[j.dtype]
	j.exact = j.form >= ptx.OneShotMultimem
	j.queued, j.overlap = true, j.hopper && strings.HasSuffix(strings.TrimSuffix(k.File, ".ptx"), "_sm90") || k.File == "multimem.ptx"
	// Many vectors for few threads, so that those of a block work for each other; a message that is not aligned; in place.
	j.count = 1600 / width
	_, pushes := ptx.PushWhole(j.form, j.dtype, j.op, j.ranks, j.hopper)
	j.long, j.longer = strings.Contains(k.Name, "_long_"), strings.Contains(k.Name, "_longer_")
	whole := j.long || j.longer || strings.Contains(k.Name, "_whole_")
	if pushes && !whole {
		j.offset = 1
	}
	if j.form == ptx.TwoShotFlow {
		j.count = 6400 / width
		j.threads = 8
	}
	add(j)
	if j.count = 400 / width; !whole {
		j.offset = 1
	}
	add(j)
	j.inPlace, j.queued, j.user = true, false, true
	add(j)
	j.inPlace = false
	add(j)
	j.user, j.missing, j.threads = false, 1, 8
	add(j)
	j.began = true
	add(j)
	if j.overlap {
		j.began, j.missing, j.twice, j.offset, j.blocks, j.epochs, j.count = false, 0, true, 0, 2, 3, 800/width
		add(j)
		if whole && j.form == ptx.TwoShotPush && j.ranks > 2 { // what is let begin too early; see TestStartsNext
			j.threads, j.count = 32*(j.ranks-1), 16*17/width
			out = append(out, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
				j.replace = replace
				for s := range 2 * uint64(len(schedules)) {
					if err := j.underSome(tb, seed*2*uint64(len(schedules))+s); err != nil {
						return err
					}
				}
				return nil
			})
		}
	}
	return out
}

// The reasons why nothing notices that an instruction has gone.
const (
	launchEnds  = "the end of the launch acquires as well, and only later launches need it"
	launchAlone = "the kernel is alone in its launch: the begin of the launch has released what was before it, and its end acquires"
	barrierTwin = "the barrier of the block at the end of the last barrier across ranks is just before it, and says the same"
	fullSays    = "the flag that a lap is full, which the same thread acquires next, was set behind the same fence as this one"
	deadLater   = "it is for a dead word that another launch, or another block, sets meanwhile: then nothing that comes of the launch counts"
)

// bitten is what nothing notices, by the form or the signal kernel, the instruction and which of those it is.
var bitten = map[string]string{
	"oneshot_pull: ld.acquire.sys.global.u32 (2)":     launchEnds,
	"oneshot_pull: bar.red.and.pred (0)":              deadLater,
	"oneshot_pull: bar.red.and.pred (4)":              barrierTwin,
	"twoshot_pull: ld.acquire.sys.global.u32 (1)":     launchEnds,
	"twoshot_pull: bar.red.and.pred (0)":              deadLater,
	"twoshot_pull: bar.red.and.pred (3)":              barrierTwin,
	"twoshot_flow: bar.red.and.pred (0)":              deadLater,
	"twoshot_flow: ld.acquire.sys.global.u32 (0)":     fullSays,
	"twoshot_flow: ld.acquire.sys.global.u32 (2)":     launchEnds,
	"oneshot_multimem: bar.red.and.pred (0)":          deadLater,
	"oneshot_multimem: bar.red.and.pred (3)":          barrierTwin,
	"twoshot_multimem: ld.acquire.sys.global.u32 (1)": launchEnds,
	"twoshot_multimem: bar.red.and.pred (0)":          deadLater,
	"twoshot_multimem: bar.red.and.pred (3)":          barrierTwin,
	"barrier: bar.red.and.pred (0)":                   deadLater,
	"barrier: st.release.sys.global.u32 (0)":          launchAlone,
	"barrier: ld.acquire.sys.global.u32 (0)":          launchAlone,
	"barrier: ld.acquire.sys.global.u32 (1)":          launchAlone,
	"put_signal_wait: ld.acquire.sys.global.u32 (1)":  launchAlone, // of the wait
	"put_signal_wait: ld.acquire.sys.global.u32 (2)":  launchAlone,
	"signal: red.release.sys.global.add.u32 (0)":      launchAlone,
	"signal_all: bar.red.and.pred (0)":                deadLater,
	"signal_all: red.release.sys.global.add.u32 (0)":  launchAlone,
	"wait: ld.acquire.sys.global.u32 (0)":             launchAlone,
	"wait: ld.acquire.sys.global.u32 (1)":             launchAlone,
	"wait_all: ld.acquire.sys.global.u32 (0)":         launchAlone,
	"wait_all: ld.acquire.sys.global.u32 (1)":         launchAlone,
	"pull: bar.red.and.pred (0)":                      deadLater,
	"pull: ld.acquire.sys.global.u32 (1)":             launchEnds,
	"pull: bar.red.and.pred (3)":                      barrierTwin,
	"cast: bar.red.and.pred (0)":                      deadLater,
	"cast: ld.acquire.sys.global.u32 (1)":             launchEnds,
	"cast: bar.red.and.pred (3)":                      barrierTwin,
}

// TestBite takes the order out of the kernels, one instruction at a time: each time something notices, or the reason why not is known.
// SYMMEM_TEST_MATRIX=full does it to more kernels, and with more seeds.
func TestBite(t *testing.T) {
	var subjects []subject
	for _, ranks := range []int{2, 4} {
		for _, form := range ptx.Forms() {
			for _, dtype := range []string{"f32", "i8"} {
				for _, hopper := range []bool{true, false} {
					j := job{form: form, dtype: dtype, op: ptx.Sum, ranks: ranks, hopper: hopper}
					k, ok := ptx.AllReduce(form, dtype, ptx.Sum, ranks, hopper)
					if !ok || !full() && (ranks != 2 || !hopper || dtype != "f32") {
						continue
					}
					if plain, _ := ptx.AllReduce(form, dtype, ptx.Sum, ranks, !hopper); !hopper && plain.File == k.File {
						continue // the same kernel
					}
					subjects = append(subjects, subject{k, form.String(), attemptsOf(j, k)})
					if k, ok := ptx.PushWhole(form, dtype, ptx.Sum, ranks, hopper); ok {
						subjects = append(subjects, subject{k, form.String() + "_whole", attemptsOf(j, k)})
					}
					if k, ok := ptx.PushLong(form, dtype, ptx.Sum, ranks, hopper); ok {
						subjects = append(subjects, subject{k, form.String() + "_long", attemptsOf(j, k)})
					}
					if k, ok := ptx.PushLonger(form, dtype, ptx.Sum, ranks, hopper); ok {
						subjects = append(subjects, subject{k, form.String() + "_longer", attemptsOf(j, k)})
					}
				}
			}
		}
	}
	for _, k := range []ptx.Kernel{ptx.Barrier, ptx.PutSignal, ptx.PutSignalWait, ptx.Signal, ptx.SignalAll, ptx.Wait, ptx.WaitAll} {
		for _, hopper := range []bool{false, true} {
			k, name := ptx.SignalOn(k, hopper), strings.TrimPrefix(k.Name, "symmem_")
			var list []attempt
			for _, flags := range []uint32{0, ptx.Atomics} {
				list = append(list, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
					return exchange(tb, 3, flags, hopper, Config{Seed: seed, Weak: true, MaxSteps: biteSteps, Schedule: Even()}, replace)
				})
			}
			for _, flags := range []uint32{0, ptx.Atomics} {
				if signalKinds[k] == ptx.FaultSignal {
					list = append(list, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
						return twoStreams(tb, k, flags, Config{Seed: seed, Weak: true, MaxSteps: biteSteps, Schedule: Even()}, replace)
					})
				}
			}
			list = append(list, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
				return givesUp(tb, k, 1, Config{Seed: seed, Weak: true, MaxSteps: biteSteps, Schedule: Even()}, replace)
			})
			subjects = append(subjects, subject{k, name, list})
		}
	}
	pulls := map[bool][]attempt{}
	for _, v := range []movement{
		{what: broadcastTwoShot, ranks: 3, bytes: 400, epochs: 4, blocks: 1, threads: 32},
		{what: broadcastTwoShot, ranks: 3, bytes: 400, epochs: 2, blocks: 2, threads: 8, in: 1, out: 1},
		{what: allGather, ranks: 2, bytes: 400, epochs: 4, blocks: 1, threads: 32},
		{what: allToAll, ranks: 2, bytes: 100, epochs: 4, blocks: 1, threads: 8, in: 1, out: 3},
		{what: broadcastTwoShot, ranks: 3, bytes: 400, blocks: 1, threads: 8, missing: 1},
		{what: broadcastTwoShot, ranks: 3, bytes: 400, blocks: 1, threads: 8, missing: 1, began: 1},
		{what: broadcastTwoShot, ranks: 3, bytes: 400, blocks: 1, threads: 8, missing: 1, began: 2},
		{what: broadcastTwoShot, ranks: 3, bytes: 400, epochs: 4, blocks: 1, threads: 32, stores: true},
		{what: allGather, ranks: 2, bytes: 400, epochs: 4, blocks: 1, threads: 32, stores: true},
		{what: allToAll, ranks: 2, bytes: 400, epochs: 4, blocks: 1, threads: 32, stores: true},
		{what: broadcast, ranks: 3, bytes: 400, epochs: 4, blocks: 1, threads: 32, stores: true},
		{what: allGather, ranks: 2, bytes: 400, blocks: 1, threads: 32, missing: 1, stores: true},
		{what: allToAll, ranks: 2, bytes: 400, blocks: 1, threads: 32, missing: 1, stores: true},
		{what: broadcast, ranks: 3, bytes: 400, blocks: 1, threads: 32, missing: 1, stores: true},
	} {
		for _, hopper := range []bool{false, true} {
			pulls[hopper] = append(pulls[hopper], func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
				v := v
				v.replace, v.hopper = replace, hopper
				return v.run(tb, Config{Seed: seed, Weak: true, MaxSteps: biteSteps, Schedule: Even()})
			})
		}
	}
	for _, hopper := range []bool{false, true} {
		subjects = append(subjects, subject{ptx.Pull(hopper), "pull", pulls[hopper]})
	}
	subjects = append(subjects, subject{ptx.Cast, "cast", castAttempts()})
	bite(t, subjects, int(seedsOr(32, 96)), bitten)
}
