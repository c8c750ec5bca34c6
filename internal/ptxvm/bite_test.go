package ptxvm

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

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
	lines := withFence(tb, moduleOf(tb, k.File)).lines
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

func attemptsOf(j job) (out []attempt) {
	add := func(j job) {
		out = append(out, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
			j.replace = replace
			_, err := j.run(tb, Config{Seed: seed, Weak: true, MaxSteps: biteSteps})
			return err
		})
	}
	j.epochs, j.blocks, j.threads, j.lap = 4, 1, 32, 128
	width := widths[j.dtype]
	j.exact = j.form >= ptx.OneShotMultimem
	j.queued = true
	// Many vectors for few threads, so that those of a block work for each other; a message that is not aligned; in place.
	j.count = 1600 / width
	if j.form == ptx.TwoShotFlow {
		j.count = 6400 / width
		j.threads = 8
	}
	add(j)
	j.offset, j.count = 1, 400/width
	add(j)
	j.inPlace, j.queued, j.user = true, false, true
	add(j)
	j.inPlace = false
	add(j)
	j.user, j.missing, j.threads = false, 1, 8
	add(j)
	j.began = true
	add(j)
	return out
}

// bitten is what nothing notices, by the kernel's form and the instruction, and why that is right.
var bitten = map[string]string{}

// TestBite takes the order out of the kernels, one instruction at a time: each time something notices, or the reason why not is known.
// SYMMEM_TEST_MATRIX=full does it to more kernels, and with more seeds.
func TestBite(t *testing.T) {
	full := os.Getenv("SYMMEM_TEST_MATRIX") == "full"
	seeds := 12
	if full {
		seeds = 60
	}
	type subject struct {
		kernel   ptx.Kernel
		name     string
		attempts []attempt
	}
	var subjects []subject
	for _, ranks := range []int{2, 4} {
		for _, form := range ptx.Forms() {
			for _, dtype := range []string{"f32", "i8"} {
				for _, hopper := range []bool{true, false} {
					j := job{form: form, dtype: dtype, op: ptx.Sum, ranks: ranks, hopper: hopper, early: hopper}
					k, ok := ptx.AllReduce(form, dtype, ptx.Sum, ranks, hopper)
					if !ok || !full && (ranks != 2 || !hopper || dtype != "f32") {
						continue
					}
					if plain, _ := ptx.AllReduce(form, dtype, ptx.Sum, ranks, !hopper); !hopper && plain.File == k.File {
						continue // the same kernel
					}
					subjects = append(subjects, subject{k, form.String(), attemptsOf(j)})
				}
			}
		}
	}
	for _, k := range []ptx.Kernel{ptx.Barrier, ptx.Signal, ptx.SignalAll, ptx.Wait, ptx.WaitAll} {
		var list []attempt
		for _, flags := range []uint32{0, ptx.Atomics} {
			list = append(list, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
				return exchange(tb, 3, flags, Config{Seed: seed, Weak: true, MaxSteps: biteSteps}, replace)
			})
		}
		for _, flags := range []uint32{0, ptx.Atomics} {
			if k == ptx.Signal || k == ptx.SignalAll {
				list = append(list, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
					return twoStreams(tb, k, flags, Config{Seed: seed, Weak: true, MaxSteps: biteSteps}, replace)
				})
			}
		}
		list = append(list, func(tb testing.TB, replace func(*Module) *Module, seed uint64) error {
			return givesUp(tb, k, 1, Config{Seed: seed, Weak: true, MaxSteps: biteSteps}, replace)
		})
		subjects = append(subjects, subject{k, strings.TrimPrefix(k.Name, "symmem_"), list})
	}
	for _, s := range subjects {
		t.Run(s.kernel.Name, func(t *testing.T) {
			for _, m := range mutants(t, s.kernel) {
				err := m.noticed(t, s.attempts, seeds)
				t.Logf("line %d: %s: %v", m.line, m, err)
			}
		})
	}
}
