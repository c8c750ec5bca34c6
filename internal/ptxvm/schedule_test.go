package ptxvm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
)

const seedVariable = "SYMMEM_PTX_SEED"

// again is the line that runs one seed of a test once more.
func again(test string, seed uint64) string {
	parts := strings.Split(test, "/")
	for i, p := range parts {
		parts[i] = "^" + regexp.QuoteMeta(p) + "$"
	}
	return fmt.Sprintf("%s=%d go test ./internal/ptxvm -count=1 -run '%s'", seedVariable, seed, strings.Join(parts, "/"))
}

// eachSeed calls do with so many seeds, or with the one that the environment asks for, and says of the first that fails how to run it again.
func eachSeed(t *testing.T, seeds uint64, do func(seed uint64) error) {
	t.Helper()
	first := uint64(0)
	if s := os.Getenv(seedVariable); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		require.NoError(t, err, seedVariable)
		first, seeds = n, 1
	}
	for seed := first; seed < first+seeds; seed++ {
		if err := do(seed); err != nil {
			t.Fatalf("seed %d: %v\nagain: %s", seed, err, again(t.Name(), seed))
		}
	}
}

// TestAgain: the line has the test's own name, whatever is in it, and the seed is taken.
func TestAgain(t *testing.T) {
	t.Run("a name (with things) in=it", func(t *testing.T) {
		line := again(t.Name(), 17)
		m := regexp.MustCompile(`^SYMMEM_PTX_SEED=(\d+) .* -run '(.*)'$`).FindStringSubmatch(line)
		require.Len(t, m, 3, line)
		patterns, names := strings.Split(m[2], "/"), strings.Split(t.Name(), "/")
		require.Len(t, patterns, len(names))
		for i := range names {
			require.Regexp(t, patterns[i], names[i])
		}
		t.Setenv(seedVariable, m[1])
		var seen []uint64
		eachSeed(t, 5, func(seed uint64) error { seen = append(seen, seed); return nil })
		require.Equal(t, []uint64{17}, seen)
	})
}

// schedules are those that every kernel must come through, made anew for each run.
var schedules = []struct {
	name string
	of   func(seed uint64) Schedule
}{
	{"chance", func(uint64) Schedule { return nil }},
	{"even chance", func(uint64) Schedule { return Even() }},
	{"pct/depth=1", func(seed uint64) Schedule { return PCT(seed, 1, 1) }},
	{"pct/depth=3", func(seed uint64) Schedule { return PCT(seed, 3, 4000) }},
	{"slow rank", func(seed uint64) Schedule { return Slow(20, func(t Thread) bool { return t.Device == int(seed%2) }) }},
	{"slow block", func(seed uint64) Schedule {
		return Slow(20, func(t Thread) bool { return t.Device == int(seed%2) && t.Block[0] == uint32(seed/2%2) })
	}},
}

// TestSchedules: all forms, the kernels of signals and the one that moves, under every schedule, strong and weak: they end, and with the right results.
func TestSchedules(t *testing.T) {
	for _, s := range schedules {
		t.Run(s.name, func(t *testing.T) {
			for _, form := range ptx.Forms() {
				j := job{form: form, dtype: "f32", op: ptx.Sum, ranks: 3, count: 130, epochs: 3, queued: true, blocks: 2, threads: 8, lap: 128, hopper: true, exact: form >= ptx.OneShotMultimem}
				t.Run(form.String(), func(t *testing.T) {
					eachSeed(t, seedsOr(2, 12), func(seed uint64) error {
						_, err := j.run(t, Config{Seed: seed, Weak: seed%2 == 0, Turn: int(8 + seed%2*100), Schedule: s.of(seed), Hangs: true, MaxSteps: 1 << 27})
						return err
					})
				})
			}
			t.Run("pull", func(t *testing.T) {
				v := movement{what: broadcastTwoShot, ranks: 3, bytes: 200, epochs: 2, blocks: 2, threads: 8}
				eachSeed(t, seedsOr(2, 12), func(seed uint64) error {
					return v.run(t, Config{Seed: seed, Weak: seed%2 == 0, Turn: int(8 + seed%2*100), Schedule: s.of(seed), Hangs: true, MaxSteps: 1 << 27})
				})
			})
			t.Run("signals", func(t *testing.T) {
				eachSeed(t, seedsOr(2, 12), func(seed uint64) error {
					return exchange(t, 3, uint32(seed/2%2)*ptx.Atomics, seed/4%2 == 1, Config{Seed: seed, Weak: seed%2 == 0, Turn: int(8 + seed%2*100), Schedule: s.of(seed), Hangs: true, MaxSteps: 1 << 27}, nil)
				})
			})
		})
	}
}

// underSome runs a job under one of the schedules, which the seed chooses.
func (j job) underSome(tb testing.TB, seed uint64) error {
	s := schedules[seed%uint64(len(schedules))]
	_, err := j.run(tb, Config{Seed: seed, Turn: int(8 + seed%2*100), Schedule: s.of(seed), MaxSteps: 1 << 27})
	return err
}

// TestStartsNext: two plans end whichever comes first where, on devices that hold no more than both: the next launch of one takes room only when this one waits for nobody any more, or
// for blocks that are at work.
func TestStartsNext(t *testing.T) {
	// Kernels for messages that are no whole vectors: threads without any know of nobody.
	for _, form := range []ptx.Form{ptx.OneShotPush, ptx.TwoShotPush} {
		for _, ranks := range []int{2, 3} {
			j := job{form: form, dtype: "f32", op: ptx.Sum, ranks: ranks, count: 41, hopper: true, epochs: 4, blocks: 1, threads: 64, twice: true, exact: true}
			t.Run(j.String(), func(t *testing.T) {
				_, whole := j.whole()
				require.False(t, whole)
				eachSeed(t, seedsOr(30, 60), func(seed uint64) error { return j.underSome(t, seed) })
			})
		}
	}
	// Two shots between three ranks, whose blocks get lines from blocks of other numbers: the next launch takes room when all threads have had theirs. If it did when the first
	// have, it would now and then have room that others wait for.
	for _, c := range []struct{ vectors, blocks int }{{17, 2}, {192, 4}, {24, 4}} {
		t.Run(fmt.Sprintf("vectors=%d/blocks=%d", c.vectors, c.blocks), func(t *testing.T) {
			j := job{form: ptx.TwoShotPush, dtype: "f32", op: ptx.Sum, ranks: 3, count: 4 * c.vectors, hopper: true, epochs: 3, blocks: c.blocks, threads: 64, twice: true, exact: true}
			k, whole := j.whole()
			require.True(t, whole)
			eachSeed(t, seedsOr(10, 30), func(seed uint64) error { return j.underSome(t, seed) })
			if c.vectors != 17 {
				return
			}
			j.replace = withoutBarrier(t, k)
			var err error
			for seed := uint64(0); err == nil && seed < 200; seed++ {
				err = j.underSome(t, seed)
			}
			hangOf(t, err)
		})
	}
}

// changed gives the module of a kernel, of which change has changed lines from the kernel's first on.
func changed(t *testing.T, k ptx.Kernel, change func(lines []string)) func(*Module) *Module {
	lines := slices.Clone(moduleOf(t, k.File).lines)
	first := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, ".visible .entry "+k.Name+"(") })
	require.GreaterOrEqual(t, first, 0)
	change(lines[first:])
	module := parse(t, k.File, strings.Join(lines, "\n"))
	return func(*Module) *Module { return module }
}

// withoutBarrier gives a kernel's module without the last barrier in front of where the next launch may begin.
func withoutBarrier(t *testing.T, k ptx.Kernel) func(*Module) *Module {
	return changed(t, k, func(lines []string) {
		at := slices.IndexFunc(lines, func(l string) bool { return strings.HasPrefix(l, "griddepcontrol.launch_dependents") })
		require.GreaterOrEqual(t, at, 0)
		for !strings.HasPrefix(lines[at], "bar.sync 0;") {
			at--
			require.Greater(t, at, 0, "%s has no barrier there", k.Name)
		}
		lines[at] = ""
	})
}

// TestNormStartsNext: plans for norms end where the next launches of two of three have begun, and the last blocks of the third wait for room: on each rank another one. So far they come if a
// launch begins before threads of the launch before have had lines.
func TestNormStartsNext(t *testing.T) {
	for i, form := range []ptx.Form{ptx.OneShotPush, ptx.TwoShotPush, ptx.OneShotPush, ptx.OneShotPush, ptx.TwoShotPush} {
		j := normJob{form: form, dtype: "f32", ranks: 3, rows: 2, columns: 4 * 4, blocks: 2, threads: 32, out: true, launches: 3, hopper: true}
		seeds := seedsOr(10, 60)
		if i == 2 {
			j.ranks, j.clusters, j.threads, seeds = 4, true, 256, seedsOr(2, 8)
		}
		if i > 2 { // several rows a block
			j.rows = 5
		}
		t.Run(j.String(), func(t *testing.T) {
			eachSeed(t, seeds, func(seed uint64) error { return j.runForEach(t, seed) })
			j.replace = startingAtOnce(t, j.kernel(t))
			var err error
			for seed := uint64(0); err == nil && seed < 200; seed++ {
				err = j.runForEach(t, seed)
			}
			hangOf(t, err)
		})
	}
}

// startingAtOnce gives a kernel's module that lets the next launch begin as soon as the one before has ended.
func startingAtOnce(t *testing.T, k ptx.Kernel) func(*Module) *Module {
	const wait = "griddepcontrol.wait;"
	return changed(t, k, func(lines []string) {
		at := slices.Index(lines, wait)
		require.GreaterOrEqual(t, at, 0)
		lines[at] = wait + " griddepcontrol.launch_dependents;"
	})
}

// TestApart: ranks that come seconds apart, of the machine's time, wait for each other; and who does not want to wait so long says so.
func TestApart(t *testing.T) {
	const second = 1_000_000_000
	for _, form := range ptx.Forms() {
		j := job{form: form, dtype: "f32", op: ptx.Sum, ranks: 3, count: 100, blocks: 2, threads: 8, lap: 128, hopper: true, exact: true}
		for _, timeout := range []uint64{10 * second, 2 * second} {
			t.Run(fmt.Sprintf("%s/timeout=%ds", form, timeout/second), func(t *testing.T) {
				w := newWorld(t, j)
				m := New(w.memory, Config{StepTime: 2000, MaxSteps: 1 << 27})
				var streams []*Stream
				for r := range j.ranks {
					s := m.NewStream(r)
					s.Pause(uint64(r) * 3 * second)
					streams = append(streams, s)
					w.params[0][r].Timeout = timeout
				}
				w.fill(0)
				w.launch(t, streams, 0)
				require.NoError(t, m.Run())
				if timeout > 6*second {
					require.NoError(t, w.wrong(0))
					return
				}
				fault := ptx.DecodeFault(binary.LittleEndian.Uint64(w.words[0][16:]))
				require.Equal(t, uint8(ptx.FaultTimeout), fault.Why)
				require.NotZero(t, fault.Peer)
			})
		}
	}
}

// TestPause: time passes at once when nobody has anything to do, and only then.
func TestPause(t *testing.T) {
	memory, b := NewMemory(), aligned(64)
	require.NoError(t, memory.Map(0x1000, b))
	m := New(memory, Config{StepTime: 10})
	f := parse(t, "clock.ptx", header+`.visible .entry clock(.param .u64 a) { .reg .b64 %rd<3>; ld.param.u64 %rd1, [a]; mov.u64 %rd2, %globaltimer; st.global.u64 [%rd1], %rd2; ret; }`).Function("clock")
	s, other := m.NewStream(0), m.NewStream(1)
	s.Pause(5000)
	require.False(t, s.Idle())
	require.NoError(t, s.Launch(Launch{Function: f, Params: [][]byte{u64(0x1000)}}))
	other.Pause(9000)
	other.Pause(0)
	require.NoError(t, other.Launch(Launch{Function: f, Params: [][]byte{u64(0x1008)}}))
	require.NoError(t, m.Run())
	require.InDelta(t, 5000, binary.LittleEndian.Uint64(b), 100)
	require.InDelta(t, 9000, binary.LittleEndian.Uint64(b[8:]), 100)
}

// TestSameRun: the same seed and schedule give the same run, access by access; another seed another one.
func TestSameRun(t *testing.T) {
	for _, s := range schedules {
		for _, weak := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/weak=%v", s.name, weak), func(t *testing.T) {
				run := func(seed uint64) (uint64, int) {
					h, n := fnv.New64a(), 0
					w := newWorld(t, job{form: ptx.TwoShotFlow, dtype: "f32", op: ptx.Sum, ranks: 2, count: 60, blocks: 4, threads: 4, lap: 128})
					c := Config{Seed: seed, Weak: weak, Turn: 50, Schedule: s.of(seed), Trace: func(t Thread, p Place) { fmt.Fprintln(h, t, p); n++ }}
					m := New(w.memory, c)
					var streams []*Stream
					for r := range 2 {
						m.Limit(r, Limits{Multiprocessors: 2, Blocks: 3}) // what begins when is chosen too
						streams = append(streams, m.NewStream(r))
					}
					w.fill(0)
					w.launch(t, streams, 0)
					require.NoError(t, m.Run())
					return h.Sum64(), n
				}
				all := map[uint64]bool{}
				for seed := range uint64(3) {
					a, n := run(seed)
					b, again := run(seed)
					require.Equal(t, a, b, "seed %d", seed)
					require.Equal(t, n, again)
					require.Greater(t, n, 100)
					all[a] = true
				}
				require.Greater(t, len(all), 1)
			})
		}
	}
}

// newest chooses the last, which for a load is the newest message.
type newest struct{}

func (newest) Choose(n int) int { return n - 1 }

// TestPCT: a bug of depth d in a program of n threads and k steps is found with a probability of at least 1/(n*k^(d-1)), and one of a greater depth is not found
// without its changes of priority.
func TestPCT(t *testing.T) {
	// To go wrong, the second thread must run whole between two accesses of the first.
	f := parse(t, "pct.ptx", header+`
.visible .entry k(.param .u64 a) {
	.reg .b64 %rd<2>; .reg .b32 %r<6>; .reg .pred %p<3>;
	ld.param.u64 %rd1, [a];
	mov.u32 %r1, %ctaid.x;
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra Second;
	ld.relaxed.sys.global.u32 %r2, [%rd1];
	ld.relaxed.sys.global.u32 %r4, [%rd1+4];
	ld.relaxed.sys.global.u32 %r4, [%rd1+8];
	ld.relaxed.sys.global.u32 %r3, [%rd1];
	setp.eq.u32 %p2, %r2, %r3;
	@%p2 bra End;
	st.relaxed.sys.global.u32 [%rd1+16], 1;
	ret;
Second:
	st.relaxed.sys.global.u32 [%rd1], 1;
End:
	ret;
}
`).Function("k")
	found := func(depth int, seed uint64) bool {
		memory, b := NewMemory(), aligned(64)
		require.NoError(t, memory.Map(0x1000, b))
		m := New(memory, Config{Chooser: newest{}, Weak: true, Schedule: PCT(seed, depth, 6)})
		require.NoError(t, m.NewStream(0).Launch(Launch{Function: f, Grid: [3]uint32{2}, Params: [][]byte{u64(0x1000)}}))
		require.NoError(t, m.Run())
		return b[16] != 0
	}
	const runs = 400
	one, two := 0, 0
	for seed := range uint64(runs) {
		if found(1, seed) {
			one++
		}
		if found(2, seed) {
			two++
		}
	}
	require.Zero(t, one, "of depth 1 there are only the orders of whole threads")
	require.GreaterOrEqual(t, two, runs/(2*6), "at least 1/(n*k)")
}

// hangOf is the Hang that an error is.
func hangOf(t *testing.T, err error) *Hang {
	require.ErrorIs(t, err, ErrDeadlock)
	h, ok := errors.AsType[*Hang](err)
	require.True(t, ok, "%v", err)
	return h
}

// TestHang: a rank that does not come, and nobody gives up: who waits for what is told, with names of addresses.
func TestHang(t *testing.T) {
	for _, weak := range []bool{false, true} {
		for _, form := range ptx.Forms() {
			t.Run(fmt.Sprintf("%s/weak=%v", form, weak), func(t *testing.T) {
				w := newWorld(t, job{form: form, dtype: "f32", op: ptx.Sum, ranks: 2, count: 101, blocks: 2, threads: 4, lap: 128, hopper: true, exact: true}) // no whole vectors: of those one line is the own input
				w.fill(0)
				name := func(at uint64) string { return fmt.Sprintf("workspace of rank %d", at/rankAt-1) }
				m := New(w.memory, Config{Seed: 1, Weak: weak, Hangs: true, MaxSteps: 1 << 26, Name: name})
				streams := []*Stream{m.NewStream(0), m.NewStream(1)}
				w.launch(t, streams[:1], 0)
				w.launch(t, streams[:1], 0)
				err := m.Run()
				h := hangOf(t, err)
				polls, barriers, launches := 0, 0, 0
				for _, x := range h.Waits {
					require.Equal(t, 0, x.Thread.Device)
					switch {
					case x.What == "polls":
						polls++
						require.Positive(t, x.Threads)
						require.Equal(t, w.kernel.File, x.Place.File)
						require.Contains(t, x.Place.Instruction, "ld.")
						require.GreaterOrEqual(t, x.Address, w.channels[0])
						require.Less(t, x.Address, w.channels[0]+uint64(len(w.channel[0])))
						require.Equal(t, "workspace of rank 0", x.Name)
					case strings.Contains(x.What, "barrier"):
						barriers++
					case x.Threads == 0:
						launches++
					}
				}
				require.Positive(t, polls, "%v", err)
				require.Equal(t, 1, launches, "%v", err)
				if form == ptx.TwoShotPull {
					require.Positive(t, barriers)
				}
				require.Contains(t, err.Error(), "workspace of rank 0")
				require.Contains(t, err.Error(), "launch 1")
				t.Log(err)
			})
		}
	}
}

// TestNoHang: who is only slow is none, nor who waits for what a stream does later.
func TestNoHang(t *testing.T) {
	m := parse(t, "slow.ptx", header+`
.visible .entry wait(.param .u64 a) {
	.reg .b64 %rd; .reg .b32 %r; .reg .pred %p;
	ld.param.u64 %rd, [a];
Again:
	ld.acquire.sys.global.u32 %r, [%rd];
	setp.eq.u32 %p, %r, 0;
	@%p bra Again;
	ret;
}
.visible .entry slow(.param .u64 a) {
	.reg .b64 %rd; .reg .b32 %r; .reg .pred %p;
	ld.param.u64 %rd, [a];
	mov.u32 %r, 0;
Again:
	add.u32 %r, %r, 1;
	setp.lt.u32 %p, %r, 3000000;
	@%p bra Again;
	st.release.sys.global.u32 [%rd], 1;
	ret;
}
`)
	for _, weak := range []bool{false, true} {
		for _, schedule := range []Schedule{nil, PCT(1, 2, 100), PCT(2, 1, 100), PCT(3, 1, 100)} {
			memory, b := NewMemory(), aligned(64)
			require.NoError(t, memory.Map(0x1000, b))
			machine := New(memory, Config{Weak: weak, Hangs: true, Patience: 100, Schedule: schedule, MaxSteps: 1 << 27})
			require.NoError(t, machine.NewStream(0).Launch(Launch{Function: m.Function("wait"), Params: [][]byte{u64(0x1000)}}))
			require.NoError(t, machine.NewStream(1).Launch(Launch{Function: m.Function("slow"), Params: [][]byte{u64(0x1000)}}))
			require.NoError(t, machine.Run())
		}
		memory, b := NewMemory(), aligned(64)
		require.NoError(t, memory.Map(0x1000, b))
		machine := New(memory, Config{Weak: weak, Hangs: true, Patience: 100, MaxSteps: 1 << 27})
		s := machine.NewStream(1)
		s.Pause(2_000_000)
		require.NoError(t, s.Launch(Launch{Function: m.Function("slow"), Params: [][]byte{u64(0x1000)}}))
		require.NoError(t, machine.NewStream(0).Launch(Launch{Function: m.Function("wait"), Params: [][]byte{u64(0x1000)}}))
		require.NoError(t, machine.Run())
	}
}

// TestLimits: blocks begin when there is room, all of them in the end, never more at a time; a launch of which not even one block fits is refused.
func TestLimits(t *testing.T) {
	m := parse(t, "count.ptx", header+`
.shared .align 4 .b8 some[1024];
.visible .entry count(.param .u64 a) {
	.reg .b64 %rd; .reg .b32 %r<3>;
	ld.param.u64 %rd, [a];
	atom.relaxed.gpu.global.add.u32 %r1, [%rd], 1;
	atom.relaxed.gpu.global.max.u32 %r2, [%rd+4], %r1;
	bar.sync 0;
	atom.relaxed.gpu.global.add.u32 %r1, [%rd], -1;
	atom.relaxed.gpu.global.add.u32 %r1, [%rd+8], 1;
	ret;
}
`)
	for _, weak := range []bool{false, true} {
		for _, c := range []struct {
			limits Limits
			most   uint32 // threads at a time
		}{
			{Limits{Multiprocessors: 2, Threads: 8}, 16}, {Limits{Multiprocessors: 3, Blocks: 1}, 12}, {Limits{Multiprocessors: 1, Shared: 2047}, 4}, {Limits{}, 80},
		} {
			for seed := range uint64(5) {
				memory, b := NewMemory(), aligned(64)
				require.NoError(t, memory.Map(0x1000, b))
				machine := New(memory, Config{Seed: seed, Weak: weak, Hangs: true})
				machine.Limit(0, c.limits)
				for range 2 {
					require.NoError(t, machine.NewStream(0).Launch(Launch{Function: m.Function("count"), Grid: [3]uint32{5, 2}, Block: [3]uint32{4}, Params: [][]byte{u64(0x1000)}}))
				}
				require.NoError(t, machine.Run())
				require.Zero(t, binary.LittleEndian.Uint32(b))
				require.LessOrEqual(t, binary.LittleEndian.Uint32(b[4:]), c.most)
				require.Equal(t, uint32(80), binary.LittleEndian.Uint32(b[8:]))
			}
		}
	}
	machine := New(NewMemory(), Config{})
	machine.Limit(0, Limits{Multiprocessors: 4, Threads: 3})
	err := machine.NewStream(0).Launch(Launch{Function: m.Function("count"), Block: [3]uint32{4}, Params: [][]byte{u64(0)}})
	require.ErrorIs(t, err, ErrUnsupported)
	require.ErrorContains(t, err, "no multiprocessor of device 0")
	require.NoError(t, machine.NewStream(1).Launch(Launch{Function: m.Function("count"), Block: [3]uint32{4}, Params: [][]byte{u64(0)}}))
}

// TestTooLarge: a grid whose blocks wait for those of other ranks, on a device that does not hold all of them, hangs under some schedule, and what is printed says for which room.
func TestTooLarge(t *testing.T) {
	hung := 0
	for seed := range uint64(10) {
		w := newWorld(t, job{form: ptx.TwoShotPull, dtype: "f32", op: ptx.Sum, ranks: 2, count: 1500, blocks: 12, threads: 8})
		w.fill(0)
		m := New(w.memory, Config{Seed: seed, Hangs: true, MaxSteps: 1 << 26})
		var streams []*Stream
		for r := range 2 {
			m.Limit(r, Limits{Multiprocessors: 2, Blocks: 2})
			streams = append(streams, m.NewStream(r))
		}
		w.launch(t, streams, 0)
		err := m.Run()
		if err == nil {
			require.NoError(t, w.wrong(0))
			continue
		}
		hung++
		h := hangOf(t, err)
		room := 0
		for _, x := range h.Waits {
			room += x.Blocks
		}
		require.Positive(t, room)
		require.Contains(t, err.Error(), "wait for room on the device")
	}
	require.Positive(t, hung)
}

// waiting is a kernel of one thread a block, of which the first stores so many words and then sets a flag, for which the others wait.
const waiting = header + `.visible .entry waiting(.param .u64 a, .param .u32 n) {
	.reg .b64 %rd<2>;
	.reg .b32 %r<4>;
	.reg .pred %p<2>;
	ld.param.u64 %rd1, [a];
	ld.param.u32 %r2, [n];
	mov.u32 %r1, %ctaid.x;
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra Wait;
Store:
	st.relaxed.gpu.global.u32 [%rd1+4], %r2;
	add.u32 %r2, %r2, -1;
	setp.ne.u32 %p1, %r2, 0;
	@%p1 bra Store;
	st.release.gpu.global.u32 [%rd1], 1;
	ret;
Wait:
	ld.acquire.gpu.global.u32 %r1, [%rd1];
	setp.eq.u32 %p1, %r1, 0;
	@%p1 bra Wait;
	ret;
}
`

// launched is a machine with a launch and 64 bytes at 0x1000.
func launched(t *testing.T, c Config, l Launch) *Machine {
	memory, b := NewMemory(), aligned(64)
	require.NoError(t, memory.Map(0x1000, b))
	m := New(memory, c)
	require.NoError(t, m.NewStream(0).Launch(l))
	return m
}

// TestPollsLessOften: with weak memory, threads that only poll do not keep a machine from the one that they wait for, but for a schedule that is even.
func TestPollsLessOften(t *testing.T) {
	f := parse(t, "waiting.ptx", waiting).Function("waiting")
	run := func(seed uint64, schedule Schedule) uint64 {
		m := launched(t, Config{Seed: seed, Weak: true, Schedule: schedule, MaxSteps: 1 << 24}, Launch{Function: f, Grid: [3]uint32{100}, Params: [][]byte{u64(0x1000), {0xd0, 7, 0, 0}}})
		require.NoError(t, m.Run())
		return m.Steps()
	}
	for seed := range uint64(2) {
		require.Less(t, 4*run(seed, nil), run(seed, Even()), "seed %d", seed)
	}
}

// TestPollsAllTheSame: a thread that polls goes on while another one stores again and again, which waits for it.
func TestPollsAllTheSame(t *testing.T) {
	const text = header + `.visible .entry k(.param .u64 a) {
	.reg .b64 %rd<2>;
	.reg .b32 %r<3>;
	.reg .pred %p<2>;
	ld.param.u64 %rd1, [a];
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, 0;
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra Poll;
Store:
	add.u32 %r2, %r2, 1;
	st.relaxed.gpu.global.u32 [%rd1+4], %r2;
	ld.relaxed.gpu.global.u32 %r1, [%rd1];
	setp.eq.u32 %p1, %r1, 0;
	@%p1 bra Store;
	ret;
Poll:
	ld.relaxed.gpu.global.u32 %r1, [%rd1+8];
	add.u32 %r2, %r2, 1;
	setp.ne.u32 %p1, %r2, 500;
	@%p1 bra Poll;
	st.relaxed.gpu.global.u32 [%rd1], 1;
	ret;
}
`
	f := parse(t, "k.ptx", text).Function("k")
	for seed := range uint64(20) {
		m := launched(t, Config{Seed: seed, Weak: true, MaxSteps: 1 << 20}, Launch{Function: f, Grid: [3]uint32{2}, Params: [][]byte{u64(0x1000)}})
		require.NoError(t, m.Run(), "seed %d", seed)
	}
}

// TestAllAlike: where loads are not followed, and where the schedule is even, no thread is passed over.
func TestAllAlike(t *testing.T) {
	const text = header + `.visible .entry k(.param .u64 a) {
	.reg .b64 %rd<2>;
	.reg .b32 %r<3>;
	.reg .pred %p<2>;
	ld.param.u64 %rd1, [a];
	mov.u32 %r1, 0;
Loop:
	bar.sync 0;
	add.u32 %r1, %r1, 1;
	setp.ne.u32 %p1, %r1, 100;
	@%p1 bra Loop;
	ret;
}
`
	f := parse(t, "k.ptx", text).Function("k")
	for _, c := range []Config{{Turn: 1}, {Turn: 1, Schedule: PCT(1, 3, 100)}, {Turn: 1, Weak: true, Schedule: Even()}} {
		m := launched(t, c, Launch{Function: f, Grid: [3]uint32{4}, Block: [3]uint32{32}, Params: [][]byte{u64(0x1000)}})
		for idle := false; !idle; {
			var err error
			idle, err = m.Step(1)
			require.NoError(t, err)
			require.Equal(t, len(m.ready), m.eager)
		}
	}
}
