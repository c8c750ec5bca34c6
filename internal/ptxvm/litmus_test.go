package ptxvm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// explorer chooses everything that can be chosen, one run after the other.
type explorer struct {
	path, of []int
	depth    int
}

func (e *explorer) Choose(n int) int {
	if n == 1 {
		return 0
	}
	if e.depth == len(e.path) {
		e.path, e.of = append(e.path, 0), append(e.of, n)
	}
	e.depth++
	return e.path[e.depth-1]
}

// next goes on to the next run; false if there is none.
func (e *explorer) next() bool {
	e.depth = 0
	for n := len(e.path); n > 0; n-- {
		if e.path[n-1]+1 < e.of[n-1] {
			e.path[n-1]++
			e.path, e.of = e.path[:n], e.of[:n]
			return true
		}
	}
	return false
}

// where is a thread: its device, and its block on that.
type where struct{ device, block int }

// litmus is threads that each execute a few instructions. [x], [y] and so on are words of memory, %r0 and more each thread's registers.
type litmus struct {
	name    string
	threads []string
	where   []where // nil: each on a device of its own
	out     string  // what makes an outcome: "0:r0 1:r1 x"
	want    string  // all outcomes, sorted: "0,0 0,1 1,1"; "race" is one
	setup   string  // words that are not 0 at first: "x=1"

	buffered  string // outcomes that PTX allows and the machine leaves out
	undecided string // what the published model does not have
}

const litmusWords = 8 // of each thread, private

var variables = "xyzuvw"

// build makes a kernel for each device.
func (l *litmus) build(tb testing.TB) (m *Module, devices map[int][]int) {
	devices = map[int][]int{}
	for i, w := range l.where {
		devices[w.device] = append(devices[w.device], i)
	}
	var b strings.Builder
	b.WriteString(header)
	for _, d := range slices.Sorted(maps.Keys(devices)) {
		fmt.Fprintf(&b, ".visible .entry device%d(.param .u64 at, .param .u64 own, .param .u64 multicast) {\n.reg .pred %%p<8>;\n.reg .b32 %%r<16>, %%s<4>;\n.reg .b64 %%rd<8>;\n", d)
		b.WriteString("ld.param.u64 %rd0, [at];\nld.param.u64 %rd1, [own];\nld.param.u64 %rd2, [multicast];\nmov.u32 %s0, %ctaid.x;\nmov.u32 %s1, %tid.x;\nmad.lo.u32 %s0, %s0, 8, %s1;\n")
		for k := range litmusWords {
			fmt.Fprintf(&b, "mov.u32 %%r%d, 9;\n", k)
		}
		seen := map[int]int{}
		for _, i := range devices[d] {
			w := l.where[i]
			fmt.Fprintf(&b, "setp.eq.u32 %%p7, %%s0, %d;\n@%%p7 bra T%d;\n", w.block*8+seen[w.block], i)
			seen[w.block]++
		}
		b.WriteString("ret;\n")
		for _, i := range devices[d] {
			fmt.Fprintf(&b, "T%d:\n", i)
			for line := range strings.SplitSeq(l.threads[i], ";") {
				if line = strings.TrimSpace(line); line == "" {
					continue
				}
				line = regexp.MustCompile(`\[([xyzuvw])\]`).ReplaceAllStringFunc(line, func(s string) string {
					return fmt.Sprintf("[%%rd0+%d]", 64*strings.IndexByte(variables, s[1]))
				})
				line = regexp.MustCompile(`\[m([xyzuvw])\]`).ReplaceAllStringFunc(line, func(s string) string {
					return fmt.Sprintf("[%%rd2+%d]", 64*strings.IndexByte(variables, s[2]))
				})
				if strings.HasSuffix(line, ":") {
					fmt.Fprintf(&b, "%s\n", line)
				} else {
					fmt.Fprintf(&b, "%s;\n", line)
				}
			}
			for k := range litmusWords {
				fmt.Fprintf(&b, "st.global.u32 [%%rd1+%d], %%r%d;\n", 4*(i*litmusWords+k), k)
			}
			b.WriteString("ret;\n")
		}
		b.WriteString("}\n")
	}
	return parse(tb, l.name+".ptx", b.String()), devices
}

// once runs it and gives the outcome.
func (l *litmus) once(tb testing.TB, m *Module, devices map[int][]int, c Config) string {
	memory := NewMemory()
	shared, own := aligned(64*len(variables)), aligned(4*litmusWords*len(l.threads))
	for s := range strings.FieldsSeq(l.setup) {
		shared[64*strings.IndexByte(variables, s[0])] = s[2] - '0'
	}
	require.NoError(tb, memory.Map(0x10000, shared))
	require.NoError(tb, memory.Map(0x20000, own))
	require.NoError(tb, memory.Multicast(0x30000, uint64(len(shared)), 0x10000))
	memory.find(0x20000).private = true
	machine := New(memory, c)
	machine.hidden = true
	for _, d := range slices.Sorted(maps.Keys(devices)) {
		blocks, threads := 0, map[int]int{}
		for _, i := range devices[d] {
			threads[l.where[i].block]++
			blocks = max(blocks, l.where[i].block+1)
		}
		require.NoError(tb, machine.NewStream(d).Launch(Launch{
			Function: m.Function(fmt.Sprintf("device%d", d)), Grid: [3]uint32{uint32(blocks)}, Block: [3]uint32{uint32(slices.Max(slices.Collect(maps.Values(threads))))},
			Params: [][]byte{u64(0x10000), u64(0x20000), u64(0x30000)},
		}))
	}
	if err := machine.Run(); err != nil {
		if _, ok := errors.AsType[*Race](err); ok {
			return "race"
		}
		require.NoError(tb, err)
	}
	var out []string
	for f := range strings.FieldsSeq(l.out) {
		if len(f) == 1 {
			out = append(out, fmt.Sprint(binary.LittleEndian.Uint32(shared[64*strings.IndexByte(variables, f[0]):])))
			continue
		}
		var i, k int
		_, err := fmt.Sscanf(f, "%d:r%d", &i, &k)
		require.NoError(tb, err)
		out = append(out, fmt.Sprint(binary.LittleEndian.Uint32(own[4*(i*litmusWords+k):])))
	}
	return strings.Join(out, ",")
}

const mostRuns = 400_000

// outcomes are all that there are.
func (l *litmus) outcomes(tb testing.TB, weak bool) (out []string, runs int) {
	if l.where == nil {
		for i := range l.threads {
			l.where = append(l.where, where{device: i})
		}
	}
	m, devices := l.build(tb)
	e := &explorer{}
	seen := map[string]bool{}
	for more := true; more; more = e.next() {
		seen[l.once(tb, m, devices, Config{Weak: weak, Chooser: e, Turn: 1, MaxSteps: 10_000})] = true
		if runs++; runs > mostRuns {
			tb.Fatalf("%s: more than %d runs", l.name, mostRuns)
		}
	}
	return slices.Sorted(maps.Keys(seen)), runs
}

var (
	sameBlock  = []where{{0, 0}, {0, 0}, {0, 0}, {0, 0}}
	sameDevice = []where{{0, 0}, {0, 1}, {0, 2}, {0, 3}}
)

// tests are the shapes that everybody knows, with exactly the outcomes that PTX allows (load buffering left out, see doc.go).
var tests = []litmus{
	// Message passing: data, then a flag.
	{name: "MP relaxed", threads: []string{"st.relaxed.sys.global.u32 [x], 1; st.relaxed.sys.global.u32 [y], 1", "ld.relaxed.sys.global.u32 %r0, [y]; ld.relaxed.sys.global.u32 %r1, [x]"},
		out: "1:r0 1:r1", want: "0,0 0,1 1,0 1,1"},
	{name: "MP release acquire", threads: []string{"st.relaxed.sys.global.u32 [x], 1; st.release.sys.global.u32 [y], 1", "ld.acquire.sys.global.u32 %r0, [y]; ld.relaxed.sys.global.u32 %r1, [x]"},
		out: "1:r0 1:r1", want: "0,0 0,1 1,1"},
	{name: "MP release relaxed", threads: []string{"st.relaxed.sys.global.u32 [x], 1; st.release.sys.global.u32 [y], 1", "ld.relaxed.sys.global.u32 %r0, [y]; ld.relaxed.sys.global.u32 %r1, [x]"},
		out: "1:r0 1:r1", want: "0,0 0,1 1,0 1,1"},
	{name: "MP relaxed acquire", threads: []string{"st.relaxed.sys.global.u32 [x], 1; st.relaxed.sys.global.u32 [y], 1", "ld.acquire.sys.global.u32 %r0, [y]; ld.relaxed.sys.global.u32 %r1, [x]"},
		out: "1:r0 1:r1", want: "0,0 0,1 1,0 1,1"},
	{name: "MP fences", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.acq_rel.sys; st.relaxed.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [y]; fence.acq_rel.sys; ld.relaxed.sys.global.u32 %r1, [x]"}, out: "1:r0 1:r1", want: "0,0 0,1 1,1"},
	{name: "MP fence in front only", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.acq_rel.sys; st.relaxed.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [y]; ld.relaxed.sys.global.u32 %r1, [x]"}, out: "1:r0 1:r1", want: "0,0 0,1 1,0 1,1"},
	{name: "MP fence of a device between devices", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.acq_rel.gpu; st.relaxed.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [y]; fence.acq_rel.sys; ld.relaxed.sys.global.u32 %r1, [x]"}, out: "1:r0 1:r1", want: "0,0 0,1 1,0 1,1"},
	{name: "MP fence of a device on one", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.acq_rel.gpu; st.relaxed.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [y]; fence.acq_rel.sys; ld.relaxed.sys.global.u32 %r1, [x]"}, where: sameDevice[:2], out: "1:r0 1:r1", want: "0,0 0,1 1,1"},
	{name: "MP fence of a block between blocks", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.acq_rel.cta; st.relaxed.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [y]; fence.acq_rel.cta; ld.relaxed.sys.global.u32 %r1, [x]"}, where: sameDevice[:2], out: "1:r0 1:r1", want: "0,0 0,1 1,0 1,1"},
	{name: "MP fence of a block in it", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.acq_rel.cta; st.relaxed.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [y]; fence.acq_rel.cta; ld.relaxed.sys.global.u32 %r1, [x]"}, where: sameBlock[:2], out: "1:r0 1:r1", want: "0,0 0,1 1,1"},
	{name: "MP scopes that do not meet", threads: []string{"st.release.gpu.global.u32 [y], 1", "ld.acquire.sys.global.u32 %r0, [y]"}, out: "1:r0", want: "race"},
	{name: "MP scopes that meet", threads: []string{"st.release.gpu.global.u32 [y], 1", "ld.acquire.sys.global.u32 %r0, [y]"}, where: sameDevice[:2], out: "1:r0", want: "0 1"},
	{name: "MP weak data", threads: []string{"st.global.u32 [x], 1; st.release.sys.global.u32 [y], 1",
		"ld.acquire.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; ld.global.u32 %r1, [x]; End1:"}, out: "1:r0 1:r1", want: "0,9 1,1"},
	{name: "MP weak data, no acquire", threads: []string{"st.global.u32 [x], 1; st.release.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; ld.global.u32 %r1, [x]; End1:"}, out: "1:r0 1:r1", want: "0,9 race"},
	{name: "MP weak data, no release", threads: []string{"st.global.u32 [x], 1; st.relaxed.sys.global.u32 [y], 1",
		"ld.acquire.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; ld.global.u32 %r1, [x]; End1:"}, out: "1:r0 1:r1", want: "0,9 race"},
	{name: "MP weak flag", threads: []string{"st.global.u32 [y], 1", "ld.relaxed.sys.global.u32 %r0, [y]"}, out: "1:r0", want: "race"},
	{name: "MP another store of the releasing thread", threads: []string{"st.relaxed.sys.global.u32 [x], 1; st.release.sys.global.u32 [y], 1; st.relaxed.sys.global.u32 [y], 2",
		"ld.acquire.sys.global.u32 %r0, [y]; ld.relaxed.sys.global.u32 %r1, [x]"}, out: "1:r0 1:r1", want: "0,0 0,1 1,1 2,1"},
	{name: "MP an acquiring load behind a relaxed one", threads: []string{"st.relaxed.sys.global.u32 [x], 1; st.release.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [y]; ld.acquire.sys.global.u32 %r2, [y]; ld.relaxed.sys.global.u32 %r1, [x]"}, out: "1:r0 1:r2 1:r1", want: "0,0,0 0,0,1 0,1,1 1,1,1"},
	{name: "MP an acquiring load of another store behind a relaxed one", threads: []string{"st.relaxed.sys.global.u32 [x], 1; st.release.sys.global.u32 [y], 1", "st.relaxed.sys.global.u32 [y], 2",
		"ld.relaxed.sys.global.u32 %r0, [y]; ld.acquire.sys.global.u32 %r2, [y]; ld.relaxed.sys.global.u32 %r1, [x]"},
		out: "2:r0 2:r2 2:r1", want: "0,0,0 0,0,1 0,1,1 0,2,0 0,2,1 1,1,1 1,2,1 2,1,1 2,2,0 2,2,1"},
	{name: "MP fence of a device behind, between devices", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.acq_rel.sys; st.relaxed.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [y]; fence.acq_rel.gpu; ld.relaxed.sys.global.u32 %r1, [x]"}, out: "1:r0 1:r1", want: "0,0 0,1 1,0 1,1"},
	{name: "weak load of what was seen", threads: []string{"st.relaxed.sys.global.u32 [x], 1",
		"ld.relaxed.sys.global.u32 %r0, [x]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; ld.global.u32 %r1, [x]; End1:"}, out: "1:r0 1:r1", want: "0,9 1,1"},
	{name: "weak store to what was seen, passed on", threads: []string{"st.relaxed.sys.global.u32 [x], 1",
		"ld.relaxed.sys.global.u32 %r0, [x]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; st.release.sys.global.u32 [y], 1; End1:",
		"ld.acquire.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End2; st.global.u32 [x], 2; End2:"}, out: "2:r0 x", want: "0,1 1,2"},
	{name: "MP atomic between", threads: []string{"st.relaxed.sys.global.u32 [x], 1; st.release.sys.global.u32 [y], 1", "atom.relaxed.sys.global.add.u32 %r0, [y], 4",
		"ld.acquire.sys.global.u32 %r0, [y]; ld.relaxed.sys.global.u32 %r1, [x]"}, out: "2:r0 2:r1", want: "0,0 0,1 1,1 4,0 4,1 5,1"},
	{name: "MP red", threads: []string{"st.global.u32 [x], 1; red.release.sys.global.add.u32 [y], 1", "st.global.u32 [z], 1; red.release.sys.global.add.u32 [y], 1",
		"ld.acquire.sys.global.u32 %r0, [y]; setp.ne.u32 %p0, %r0, 2; @%p0 bra End2; ld.global.u32 %r1, [x]; ld.global.u32 %r2, [z]; End2:"},
		out: "2:r0 2:r1 2:r2", want: "0,9,9 1,9,9 2,1,1"},

	// Store buffering: each stores, and then looks at the other's.
	{name: "SB relaxed", threads: []string{"st.relaxed.sys.global.u32 [x], 1; ld.relaxed.sys.global.u32 %r0, [y]", "st.relaxed.sys.global.u32 [y], 1; ld.relaxed.sys.global.u32 %r0, [x]"},
		out: "0:r0 1:r0", want: "0,0 0,1 1,0 1,1"},
	{name: "SB release acquire", threads: []string{"st.release.sys.global.u32 [x], 1; ld.acquire.sys.global.u32 %r0, [y]", "st.release.sys.global.u32 [y], 1; ld.acquire.sys.global.u32 %r0, [x]"},
		out: "0:r0 1:r0", want: "0,0 0,1 1,0 1,1"},
	{name: "SB acq_rel", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.acq_rel.sys; ld.relaxed.sys.global.u32 %r0, [y]",
		"st.relaxed.sys.global.u32 [y], 1; fence.acq_rel.sys; ld.relaxed.sys.global.u32 %r0, [x]"}, out: "0:r0 1:r0", want: "0,0 0,1 1,0 1,1"},
	{name: "SB sc", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.sc.sys; ld.relaxed.sys.global.u32 %r0, [y]",
		"st.relaxed.sys.global.u32 [y], 1; fence.sc.sys; ld.relaxed.sys.global.u32 %r0, [x]"}, out: "0:r0 1:r0", want: "0,1 1,0 1,1"},
	{name: "SB sc of a device between devices", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.sc.gpu; ld.relaxed.sys.global.u32 %r0, [y]",
		"st.relaxed.sys.global.u32 [y], 1; fence.sc.sys; ld.relaxed.sys.global.u32 %r0, [x]"}, out: "0:r0 1:r0", want: "0,0 0,1 1,0 1,1"},
	{name: "SB sc of a block between blocks", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.sc.cta; ld.relaxed.sys.global.u32 %r0, [y]",
		"st.relaxed.sys.global.u32 [y], 1; fence.sc.gpu; ld.relaxed.sys.global.u32 %r0, [x]"}, where: sameDevice[:2], out: "0:r0 1:r0", want: "0,0 0,1 1,0 1,1"},
	{name: "MP sc of a block between blocks", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.sc.cta; st.relaxed.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [y]; fence.sc.gpu; ld.relaxed.sys.global.u32 %r1, [x]"}, where: sameDevice[:2], out: "1:r0 1:r1", want: "0,0 0,1 1,0 1,1"},
	{name: "SB sc of a block in it", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.sc.cta; ld.relaxed.sys.global.u32 %r0, [y]",
		"st.relaxed.sys.global.u32 [y], 1; fence.sc.gpu; ld.relaxed.sys.global.u32 %r0, [x]"}, where: sameBlock[:2], out: "0:r0 1:r0", want: "0,1 1,0 1,1"},
	{name: "SB sc of a device on one", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.sc.gpu; ld.relaxed.sys.global.u32 %r0, [y]",
		"st.relaxed.sys.global.u32 [y], 1; membar.sys; ld.relaxed.sys.global.u32 %r0, [x]"}, where: sameDevice[:2], out: "0:r0 1:r0", want: "0,1 1,0 1,1"},

	// Independent reads of independent writes: do two see the same order?
	{name: "IRIW acquire", threads: []string{"st.relaxed.sys.global.u32 [x], 1", "st.relaxed.sys.global.u32 [y], 1",
		"ld.acquire.sys.global.u32 %r0, [x]; ld.acquire.sys.global.u32 %r1, [y]", "ld.acquire.sys.global.u32 %r0, [y]; ld.acquire.sys.global.u32 %r1, [x]"},
		out:  "2:r0 2:r1 3:r0 3:r1",
		want: "0,0,0,0 0,0,0,1 0,0,1,0 0,0,1,1 0,1,0,0 0,1,0,1 0,1,1,0 0,1,1,1 1,0,0,0 1,0,0,1 1,0,1,0 1,0,1,1 1,1,0,0 1,1,0,1 1,1,1,0 1,1,1,1"},
	{name: "IRIW sc", threads: []string{"st.relaxed.sys.global.u32 [x], 1", "st.relaxed.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [x]; fence.sc.sys; ld.relaxed.sys.global.u32 %r1, [y]", "ld.relaxed.sys.global.u32 %r0, [y]; fence.sc.sys; ld.relaxed.sys.global.u32 %r1, [x]"},
		out:  "2:r0 2:r1 3:r0 3:r1",
		want: "0,0,0,0 0,0,0,1 0,0,1,0 0,0,1,1 0,1,0,0 0,1,0,1 0,1,1,0 0,1,1,1 1,0,0,0 1,0,0,1 1,0,1,1 1,1,0,0 1,1,0,1 1,1,1,0 1,1,1,1"},

	// One location: its order is the same for everybody.
	{name: "CoRR", threads: []string{"st.relaxed.sys.global.u32 [x], 1", "ld.relaxed.sys.global.u32 %r0, [x]; ld.relaxed.sys.global.u32 %r1, [x]"},
		out: "1:r0 1:r1", want: "0,0 0,1 1,1"},
	{name: "CoRR of two", threads: []string{"st.relaxed.sys.global.u32 [x], 1", "st.relaxed.sys.global.u32 [x], 2",
		"ld.relaxed.sys.global.u32 %r0, [x]; ld.relaxed.sys.global.u32 %r1, [x]", "ld.relaxed.sys.global.u32 %r0, [x]; ld.relaxed.sys.global.u32 %r1, [x]"},
		out: "2:r0 2:r1 3:r0 3:r1", want: everythingBut("1,2,2,1", "2,1,1,2")},
	{name: "CoRW", threads: []string{"st.relaxed.sys.global.u32 [x], 1", "ld.relaxed.sys.global.u32 %r0, [x]; st.relaxed.sys.global.u32 [x], 2"}, out: "1:r0 x", want: "0,1 0,2 1,2"},
	{name: "CoWR", threads: []string{"st.relaxed.sys.global.u32 [x], 1", "st.relaxed.sys.global.u32 [x], 2; ld.relaxed.sys.global.u32 %r0, [x]"}, out: "1:r0 x", want: "1,1 2,1 2,2"},
	{name: "2+2W", threads: []string{"st.relaxed.sys.global.u32 [x], 1; st.relaxed.sys.global.u32 [y], 2", "st.relaxed.sys.global.u32 [y], 1; st.relaxed.sys.global.u32 [x], 2"},
		out: "x y", want: "1,1 1,2 2,1 2,2"},
	{name: "2+2W sc", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.sc.sys; st.relaxed.sys.global.u32 [y], 2",
		"st.relaxed.sys.global.u32 [y], 1; fence.sc.sys; st.relaxed.sys.global.u32 [x], 2"}, out: "x y", want: "1,2 2,1 2,2"},

	// Three threads: what one has seen, and passes on.
	{name: "WRC", threads: []string{"st.relaxed.sys.global.u32 [x], 1", "ld.relaxed.sys.global.u32 %r0, [x]; st.release.sys.global.u32 [y], 1",
		"ld.acquire.sys.global.u32 %r0, [y]; ld.relaxed.sys.global.u32 %r1, [x]"}, out: "1:r0 2:r0 2:r1", want: "0,0,0 0,0,1 0,1,0 0,1,1 1,0,0 1,0,1 1,1,1"},
	{name: "WRC relaxed", threads: []string{"st.relaxed.sys.global.u32 [x], 1", "ld.relaxed.sys.global.u32 %r0, [x]; st.relaxed.sys.global.u32 [y], 1",
		"ld.acquire.sys.global.u32 %r0, [y]; ld.relaxed.sys.global.u32 %r1, [x]"}, out: "1:r0 2:r0 2:r1", want: "0,0,0 0,0,1 0,1,0 0,1,1 1,0,0 1,0,1 1,1,0 1,1,1"},
	{name: "ISA2", threads: []string{"st.global.u32 [x], 1; st.release.sys.global.u32 [y], 1",
		"ld.acquire.sys.global.u32 %r0, [y]; st.release.sys.global.u32 [z], 1",
		"ld.acquire.sys.global.u32 %r0, [z]; ld.relaxed.sys.global.u32 %r1, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End2; setp.eq.u32 %p0, %r1, 0; @%p0 bra End2; End2:"},
		out: "1:r0 2:r0 2:r1", want: "0,0,0 0,0,1 0,1,0 0,1,1 1,0,0 1,0,1 1,1,1"},
	{name: "LB", threads: []string{"ld.relaxed.sys.global.u32 %r0, [x]; st.relaxed.sys.global.u32 [y], 1", "ld.relaxed.sys.global.u32 %r0, [y]; st.relaxed.sys.global.u32 [x], 1"},
		out: "0:r0 1:r0", want: "0,0 0,1 1,0", buffered: "1,1"},
	{name: "LB, one depends", threads: []string{"ld.relaxed.sys.global.u32 %r0, [x]; st.relaxed.sys.global.u32 [y], %r0", "ld.relaxed.sys.global.u32 %r0, [y]; st.relaxed.sys.global.u32 [x], 1"},
		out: "0:r0 1:r0", want: "0,0 1,0", buffered: "1,1"},
	{name: "LB, both depend", threads: []string{"ld.relaxed.sys.global.u32 %r0, [x]; st.relaxed.sys.global.u32 [y], %r0",
		"ld.relaxed.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; st.relaxed.sys.global.u32 [x], 1; End1:"}, out: "0:r0 1:r0", want: "0,0"},
	{name: "LB fences", threads: []string{"ld.relaxed.sys.global.u32 %r0, [x]; fence.acq_rel.sys; st.relaxed.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [y]; fence.acq_rel.sys; st.relaxed.sys.global.u32 [x], 1"}, out: "0:r0 1:r0", want: "0,0 0,1 1,0"},
	{name: "LB release", threads: []string{"ld.relaxed.sys.global.u32 %r0, [x]; st.release.sys.global.u32 [y], 1", "ld.acquire.sys.global.u32 %r0, [y]; st.relaxed.sys.global.u32 [x], 1"},
		out: "0:r0 1:r0", want: "0,0 0,1 1,0"},
	{name: "LB fences of a device between devices", threads: []string{"ld.relaxed.sys.global.u32 %r0, [x]; fence.acq_rel.gpu; st.relaxed.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [y]; fence.acq_rel.gpu; st.relaxed.sys.global.u32 [x], 1"}, out: "0:r0 1:r0", want: "0,0 0,1 1,0", buffered: "1,1"},

	// S and R: one location's order, told by another.
	{name: "S", threads: []string{"st.relaxed.sys.global.u32 [x], 2; st.release.sys.global.u32 [y], 1", "ld.acquire.sys.global.u32 %r0, [y]; st.relaxed.sys.global.u32 [x], 1"},
		out: "1:r0 x", want: "0,1 0,2 1,1"},
	{name: "S relaxed", threads: []string{"st.relaxed.sys.global.u32 [x], 2; st.relaxed.sys.global.u32 [y], 1", "ld.acquire.sys.global.u32 %r0, [y]; st.relaxed.sys.global.u32 [x], 1"},
		out: "1:r0 x", want: "0,1 0,2 1,1 1,2"},
	{name: "R sc", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.sc.sys; st.relaxed.sys.global.u32 [y], 1", "st.relaxed.sys.global.u32 [y], 2; fence.sc.sys; ld.relaxed.sys.global.u32 %r0, [x]"},
		out: "1:r0 y", want: "0,1 1,1 1,2"},
	{name: "R acq_rel", threads: []string{"st.relaxed.sys.global.u32 [x], 1; fence.acq_rel.sys; st.relaxed.sys.global.u32 [y], 1",
		"st.relaxed.sys.global.u32 [y], 2; fence.acq_rel.sys; ld.relaxed.sys.global.u32 %r0, [x]"}, out: "1:r0 y", want: "0,1 0,2 1,1 1,2"},
	{name: "RWC sc", threads: []string{"st.relaxed.sys.global.u32 [x], 1", "ld.relaxed.sys.global.u32 %r0, [x]; fence.sc.sys; ld.relaxed.sys.global.u32 %r1, [y]",
		"st.relaxed.sys.global.u32 [y], 1; fence.sc.sys; ld.relaxed.sys.global.u32 %r0, [x]"}, out: "1:r0 1:r1 2:r0", want: "0,0,0 0,0,1 0,1,0 0,1,1 1,0,1 1,1,0 1,1,1"},
	{name: "CoWW", threads: []string{"st.relaxed.sys.global.u32 [x], 1; st.relaxed.sys.global.u32 [x], 2", "ld.relaxed.sys.global.u32 %r0, [x]"}, out: "1:r0 x", want: "0,2 1,2 2,2"},

	// Scopes on two GPUs: who is on the same one, or in the same block, and who is not.
	{name: "IRIW sc of a device, readers apart", threads: []string{"st.relaxed.sys.global.u32 [x], 1", "st.relaxed.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [x]; fence.sc.gpu; ld.relaxed.sys.global.u32 %r1, [y]", "ld.relaxed.sys.global.u32 %r0, [y]; fence.sc.gpu; ld.relaxed.sys.global.u32 %r1, [x]"},
		where: []where{{0, 0}, {1, 0}, {0, 1}, {1, 1}}, out: "2:r0 2:r1 3:r0 3:r1",
		want: "0,0,0,0 0,0,0,1 0,0,1,0 0,0,1,1 0,1,0,0 0,1,0,1 0,1,1,0 0,1,1,1 1,0,0,0 1,0,0,1 1,0,1,0 1,0,1,1 1,1,0,0 1,1,0,1 1,1,1,0 1,1,1,1"},
	{name: "WRC, the device between is the writer's", threads: []string{"st.relaxed.sys.global.u32 [x], 1", "ld.relaxed.sys.global.u32 %r0, [x]; fence.acq_rel.gpu; st.relaxed.sys.global.u32 [y], 1",
		"ld.acquire.sys.global.u32 %r0, [y]; ld.relaxed.sys.global.u32 %r1, [x]"}, where: []where{{0, 0}, {0, 1}, {1, 0}}, out: "1:r0 2:r0 2:r1",
		want: "0,0,0 0,0,1 0,1,0 0,1,1 1,0,0 1,0,1 1,1,0 1,1,1"},
	{name: "store of a device's scope, seen from another", threads: []string{"st.relaxed.gpu.global.u32 [x], 1", "ld.relaxed.sys.global.u32 %r0, [x]"}, out: "1:r0", want: "race"},
	{name: "store of a block's scope, seen from another block", threads: []string{"st.relaxed.cta.global.u32 [x], 1", "ld.relaxed.gpu.global.u32 %r0, [x]"}, where: sameDevice[:2], out: "1:r0", want: "race"},
	{name: "store of a block's scope, seen in it", threads: []string{"st.relaxed.cta.global.u32 [x], 1", "ld.relaxed.sys.global.u32 %r0, [x]"}, where: sameBlock[:2], out: "1:r0", want: "0 1"},
	{name: "acquire of a device's behind a load of everybody's", threads: []string{"st.relaxed.sys.global.u32 [x], 1; st.release.sys.global.u32 [y], 1",
		"ld.relaxed.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; ld.acquire.gpu.global.u32 %r2, [y]; ld.relaxed.sys.global.u32 %r1, [x]; End1:"},
		out: "1:r0 1:r2 1:r1", want: "0,9,9 1,1,0 1,1,1"},
	{name: "release of everybody's, acquire of a device's, between devices", threads: []string{"st.global.u32 [x], 1; st.release.sys.global.u32 [y], 1",
		"ld.acquire.gpu.global.u32 %r0, [y]"}, out: "1:r0", want: "race"},

	// Flow's credits: a place is filled, told of, emptied and given back, and filled again. The flags are relaxed, behind fences, as the kernel has them.
	{name: "credits", threads: []string{
		"st.global.u32 [x], 1; fence.acq_rel.sys; st.relaxed.sys.global.u32 [y], 1; ld.acquire.sys.global.u32 %r0, [z]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End0; st.global.u32 [x], 2; End0:",
		"ld.acquire.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; ld.global.u32 %r1, [x]; fence.acq_rel.sys; st.relaxed.sys.global.u32 [z], 1; End1:"},
		out: "0:r0 1:r0 1:r1 x", want: "0,0,9,1 0,1,1,1 1,1,1,2"},
	{name: "credits, the fence in front of the full flag away", threads: []string{
		"st.global.u32 [x], 1; st.relaxed.sys.global.u32 [y], 1; ld.acquire.sys.global.u32 %r0, [z]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End0; st.global.u32 [x], 2; End0:",
		"ld.acquire.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; ld.global.u32 %r1, [x]; fence.acq_rel.sys; st.relaxed.sys.global.u32 [z], 1; End1:"},
		out: "0:r0 1:r0 1:r1 x", want: "0,0,9,1 race"},
	{name: "credits, taken without acquire", threads: []string{
		"st.global.u32 [x], 1; fence.acq_rel.sys; st.relaxed.sys.global.u32 [y], 1; ld.relaxed.sys.global.u32 %r0, [z]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End0; st.global.u32 [x], 2; End0:",
		"ld.acquire.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; ld.global.u32 %r1, [x]; fence.acq_rel.sys; st.relaxed.sys.global.u32 [z], 1; End1:"},
		out: "0:r0 1:r0 1:r1 x", want: "0,0,9,1 0,1,1,1 race"},
	{name: "credits, given back before the place is read", threads: []string{
		"st.global.u32 [x], 1; fence.acq_rel.sys; st.relaxed.sys.global.u32 [y], 1; ld.acquire.sys.global.u32 %r0, [z]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End0; st.global.u32 [x], 2; End0:",
		"ld.acquire.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; fence.acq_rel.sys; st.relaxed.sys.global.u32 [z], 1; ld.global.u32 %r1, [x]; End1:"},
		out: "0:r0 1:r0 1:r1 x", want: "0,0,9,1 0,1,1,1 race"},

	// Atomics.
	{name: "two atomics", threads: []string{"atom.relaxed.sys.global.add.u32 %r0, [x], 1", "atom.relaxed.sys.global.add.u32 %r0, [x], 1"}, out: "0:r0 1:r0 x", want: "0,1,2 1,0,2"},
	{name: "atomics of scopes that do not meet", threads: []string{"atom.cta.global.inc.u32 %r0, [x], 7", "atom.gpu.global.inc.u32 %r0, [x], 7"}, where: sameDevice[:2], out: "x", want: "race"},
	{name: "lock", threads: []string{
		"atom.acquire.sys.global.cas.b32 %r0, [y], 0, 1; setp.ne.u32 %p0, %r0, 0; @%p0 bra End0; ld.global.u32 %r1, [x]; add.u32 %r1, %r1, 1; st.global.u32 [x], %r1; st.release.sys.global.u32 [y], 0; End0:",
		"atom.acquire.sys.global.cas.b32 %r0, [y], 0, 1; setp.ne.u32 %p0, %r0, 0; @%p0 bra End1; ld.global.u32 %r1, [x]; add.u32 %r1, %r1, 1; st.global.u32 [x], %r1; st.release.sys.global.u32 [y], 0; End1:"},
		out: "0:r0 1:r0 x", want: "0,0,2 0,1,1 1,0,1"},

	// Vectors fall apart into their elements, which arrive whole.
	{name: "LL", threads: []string{"mov.b64 %rd5, {%r0, %r1}; st.relaxed.sys.global.u64 [x], %rd5",
		"ld.relaxed.sys.global.u64 %rd5, [x]; mov.b64 {%r0, %r1}, %rd5"}, out: "1:r0 1:r1", want: "0,0 9,9"},
	{name: "LL, two of them", threads: []string{"mov.b64 %rd5, {%r0, %r1}; st.relaxed.sys.global.v2.u64 [x], {%rd5, %rd5}",
		"ld.relaxed.sys.global.v2.u64 {%rd5, %rd6}, [x]; mov.b64 {%r0, %r1}, %rd5; mov.b64 {%r2, %r3}, %rd6"}, out: "1:r0 1:r1 1:r2 1:r3", want: "0,0,0,0 0,0,9,9 9,9,0,0 9,9,9,9"},
	{name: "LL128", threads: []string{"st.relaxed.sys.global.v2.u32 [x], {%r0, %r1}", "ld.relaxed.sys.global.v2.u32 {%r0, %r1}, [x]"}, out: "1:r0 1:r1", want: "0,0 0,9 9,0 9,9"},
	{name: "LL in halves", threads: []string{"mov.b64 %rd5, {%r0, %r1}; st.relaxed.sys.global.u64 [x], %rd5", "ld.relaxed.sys.global.v2.u32 {%r0, %r1}, [x]"}, out: "1:r0 1:r1", want: "race", undecided: "locations of several sizes"},

	// A line that is all data: what is not 0 has come. The reader empties it; only a launch, or what orders like it, lets the writer use it again.
	{name: "sealed line", threads: []string{"st.relaxed.sys.global.v2.u32 [x], {5, 6}",
		"ld.relaxed.sys.global.v2.u32 {%r0, %r1}, [x]; mul.lo.u32 %r2, %r0, %r1; setp.eq.u32 %p0, %r2, 0; @%p0 bra End1; st.relaxed.sys.global.v2.u32 [x], {0, 0}; End1:"},
		out: "1:r0 1:r1 x", want: "0,0,5 0,6,5 5,0,5 5,6,0"},
	{name: "sealed line, used again too early", threads: []string{"st.relaxed.sys.global.u32 [x], 5; ld.relaxed.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End0; st.relaxed.sys.global.u32 [x], 7; End0:",
		"ld.relaxed.sys.global.u32 %r0, [x]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; st.relaxed.sys.global.u32 [x], 0; st.relaxed.sys.global.u32 [y], 1; End1:"},
		out: "0:r0 1:r0 x", want: "0,0,5 0,5,0 1,5,0 1,5,7"},
	{name: "sealed line, used again in order", threads: []string{"st.relaxed.sys.global.u32 [x], 5; ld.acquire.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End0; st.relaxed.sys.global.u32 [x], 7; End0:",
		"ld.relaxed.sys.global.u32 %r0, [x]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End1; st.relaxed.sys.global.u32 [x], 0; st.release.sys.global.u32 [y], 1; End1:"},
		out: "0:r0 1:r0 x", want: "0,0,5 0,5,0 1,5,7"},

	// Barriers.
	{name: "bar.sync", threads: []string{"st.global.u32 [x], 1; bar.sync 0", "bar.sync 0; ld.global.u32 %r0, [x]"}, where: sameBlock[:2], out: "1:r0", want: "1"},
	{name: "no bar.sync", threads: []string{"st.global.u32 [x], 1", "ld.global.u32 %r0, [x]"}, where: sameBlock[:2], out: "1:r0", want: "race"},
	{name: "bar.red", threads: []string{"st.global.u32 [x], 1; setp.eq.u32 %p0, 0, 0; bar.red.and.pred %p1, 0, %p0; selp.u32 %r1, 1, 0, %p1",
		"setp.eq.u32 %p0, 0, 1; bar.red.or.pred %p1, 1, %p0; bar.red.and.pred %p1, 0, %p0"}, where: []where{{0, 0}, {0, 1}}, out: "0:r1 x", want: "1,1"},
	{name: "release behind bar.sync", threads: []string{"st.global.u32 [x], 1; bar.sync 0", "bar.sync 0; st.release.sys.global.u32 [y], 1",
		"ld.acquire.sys.global.u32 %r0, [y]; bar.sync 0", "bar.sync 0; ld.relaxed.sys.global.u32 %r0, [y]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End3; End3:"},
		where: []where{{0, 0}, {0, 0}, {1, 0}, {1, 0}}, out: "2:r0 3:r0", want: "0,0 0,1 1,1"},
	// Ours: all write, tell all others with release, wait for them with acquire, each by a thread, and go on behind bar.sync.
	{name: "barrier of ranks", threads: []string{
		"st.global.u32 [x], 1; bar.sync 0; st.release.sys.global.u32 [u], 1; ld.acquire.sys.global.u32 %r0, [v]; setp.ne.u32 %p0, %r0, 0; bar.red.and.pred %p1, 1, %p0; @!%p1 bra End0; ld.global.u32 %r1, [y]; End0:",
		"bar.sync 0; setp.eq.u32 %p0, 0, 0; bar.red.and.pred %p1, 1, %p0; @!%p1 bra End1; ld.global.u32 %r1, [y]; End1:",
		"st.global.u32 [y], 1; st.release.sys.global.u32 [v], 1; ld.acquire.sys.global.u32 %r0, [u]; setp.eq.u32 %p0, %r0, 0; @%p0 bra End2; ld.global.u32 %r1, [x]; End2:"},
		where: []where{{0, 0}, {0, 0}, {1, 0}}, out: "0:r1 1:r1 2:r1", want: "1,1,1 1,1,9 9,9,1 9,9,9"},
	{name: "barrier of ranks without bar.sync behind", threads: []string{
		"ld.acquire.sys.global.u32 %r0, [v]; setp.ne.u32 %p0, %r0, 0; selp.u32 %r1, 1, 0, %p0; st.relaxed.cta.global.u32 [z], %r1",
		"ld.relaxed.cta.global.u32 %r0, [z]; setp.eq.u32 %p1, %r0, 0; @%p1 bra End1; ld.global.u32 %r1, [y]; End1:",
		"st.global.u32 [y], 1; st.release.sys.global.u32 [v], 1"},
		where: []where{{0, 0}, {0, 0}, {1, 0}}, out: "1:r1", want: "9 race"},

	// A multicast address is another alias of the memory.
	{name: "alias", threads: []string{"st.global.u32 [x], 1; fence.proxy.alias; multimem.ld_reduce.relaxed.sys.global.add.u32 %r0, [mx]"}, out: "0:r0", want: "1", undecided: "aliases"},
	{name: "alias without a fence", threads: []string{"st.global.u32 [x], 1; multimem.ld_reduce.relaxed.sys.global.add.u32 %r0, [mx]"}, out: "0:r0", want: "race", undecided: "multimem.ld_reduce.relaxed.sys.global.add.u32"},
	{name: "alias, the fence where it is read", threads: []string{"st.global.u32 [x], 1; st.release.sys.global.u32 [y], 1",
		"ld.acquire.sys.global.u32 %r1, [y]; fence.proxy.alias; setp.eq.u32 %p0, %r1, 0; @%p0 bra End1; multimem.ld_reduce.relaxed.sys.global.add.u32 %r0, [mx]; End1:"},
		out: "1:r0", want: "1 9", undecided: "aliases"},
	{name: "alias, the fence where it is written", threads: []string{"st.global.u32 [x], 1; fence.proxy.alias; st.release.sys.global.u32 [y], 1",
		"ld.acquire.sys.global.u32 %r1, [y]; setp.eq.u32 %p0, %r1, 0; @%p0 bra End1; multimem.ld_reduce.relaxed.sys.global.add.u32 %r0, [mx]; End1:"},
		out: "1:r0", want: "1 9", undecided: "aliases"},
	{name: "alias, the fence too early", threads: []string{"fence.proxy.alias; st.global.u32 [x], 1; st.release.sys.global.u32 [y], 1",
		"ld.acquire.sys.global.u32 %r1, [y]; setp.eq.u32 %p0, %r1, 0; @%p0 bra End1; multimem.ld_reduce.relaxed.sys.global.add.u32 %r0, [mx]; End1:"},
		out: "1:r0", want: "9 race", undecided: "aliases"},
	{name: "alias, multimem.st", threads: []string{"multimem.st.relaxed.sys.global.u32 [mx], 1; fence.proxy.alias; ld.global.u32 %r0, [x]"}, out: "0:r0", want: "1", undecided: "multimem.st.relaxed.sys.global.u32"},
}

// everythingBut is the outcomes of two threads that each read a location twice, which two others write 1 and 2 to.
func everythingBut(wrong ...string) string {
	var pairs, out []string
	for a := range 3 {
		for b := range 3 {
			if a == 0 || b != 0 {
				pairs = append(pairs, fmt.Sprintf("%d,%d", a, b))
			}
		}
	}
	for _, a := range pairs {
		for _, b := range pairs {
			if o := a + "," + b; !slices.Contains(wrong, o) {
				out = append(out, o)
			}
		}
	}
	return strings.Join(out, " ")
}

// TestLitmus explores every execution.
func TestLitmus(t *testing.T) {
	for _, l := range tests {
		t.Run(l.name, func(t *testing.T) {
			got, runs := l.outcomes(t, true)
			require.Equal(t, l.want, strings.Join(got, " "), "%d runs", runs)
		})
	}
}

// TestLitmusStrong: in the fast mode memory is sequentially consistent, so that there is nothing that weak memory has not.
func TestLitmusStrong(t *testing.T) {
	for _, l := range tests {
		if strings.Contains(l.want, "race") {
			continue
		}
		t.Run(l.name, func(t *testing.T) {
			l.where = slices.Clone(l.where)
			if l.where == nil {
				for i := range l.threads {
					l.where = append(l.where, where{device: i})
				}
			}
			m, devices := l.build(t)
			for seed := range uint64(200) {
				got := l.once(t, m, devices, Config{Seed: seed, Turn: 1})
				require.Contains(t, strings.Fields(l.want), got)
			}
		})
	}
}

// TestLaunchesInOrder: a launch is behind the launch before it on its stream, and those that the stream has waited for, whatever alias of the memory
// they use, and behind no other.
func TestLaunchesInOrder(t *testing.T) {
	m := parse(t, "launches.ptx", header+`
.visible .entry plain(.param .u64 a) { .reg .b64 %rd; ld.param.u64 %rd, [a]; st.global.u32 [%rd], 7; ret; }
.visible .entry multi(.param .u64 a) { .reg .b64 %rd; .reg .b32 %r; ld.param.u64 %rd, [a]; multimem.st.relaxed.sys.global.u32 [%rd], 8; ret; }
.visible .entry look(.param .u64 a) { .reg .b64 %rd; .reg .b32 %r; ld.param.u64 %rd, [a]; ld.global.u32 %r, [%rd]; st.global.u32 [%rd+4], %r; ret; }
.visible .entry sum(.param .u64 a) { .reg .b64 %rd; .reg .b32 %r; ld.param.u64 %rd, [a]; multimem.ld_reduce.relaxed.sys.global.add.u32 %r, [%rd];
	add.u64 %rd, %rd, -4096; st.global.u32 [%rd+8], %r; ret; }
`)
	for _, c := range []struct {
		first, second string
		at            int
		want          byte
	}{{"plain", "look", 4, 7}, {"plain", "sum", 8, 7}, {"multi", "look", 4, 8}, {"multi", "sum", 8, 8}, {"plain", "multi", 0, 8}, {"multi", "plain", 0, 7}} {
		for _, how := range []string{"one stream", "event", "two streams"} {
			memory := NewMemory()
			b := aligned(64)
			require.NoError(t, memory.Map(0x1000, b))
			require.NoError(t, memory.Multicast(0x2000, 64, 0x1000))
			machine := New(memory, Config{Weak: true})
			s := machine.NewStream(0)
			other := s
			if how != "one stream" {
				other = machine.NewStream(1)
			}
			launch := func(s *Stream, name string) {
				at := uint64(0x1000)
				if name == "multi" || name == "sum" {
					at = 0x2000
				}
				require.NoError(t, s.Launch(Launch{Function: m.Function(name), Params: [][]byte{u64(at)}}))
			}
			launch(s, c.first)
			switch how {
			case "event":
				other.Wait(s)
			case "two streams": // later, but nothing says so
				other.Do(s.Idle)
			}
			launch(other, c.second)
			err := machine.Run()
			_, race := errors.AsType[*Race](err)
			strong := c.first == "multi" && c.second == "sum" // which are no race whatever their order
			if how == "two streams" && !strong {
				require.True(t, race, "%s, %s, %s: %v", c.first, c.second, how, err)
				continue
			}
			require.NoError(t, err, "%s, %s, %s", c.first, c.second, how)
			if how != "two streams" {
				require.Equal(t, c.want, b[c.at], "%s, %s, %s", c.first, c.second, how)
			}
		}
	}
}
