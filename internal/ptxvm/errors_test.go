package ptxvm

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/symmem/symmem/kernels/ptx"
	"github.com/symmem/symmem/kernels/ptx/images"
)

const entry = ".visible .entry k(.param .u64 a) {\n.reg .b64 %rd<4>;\n.reg .b32 %r<4>;\n.reg .f32 %f<4>;\n.reg .pred %p<4>;\n"

// TestRefused: what the machine does not know is an error that names file, line and instruction.
func TestRefused(t *testing.T) {
	for _, c := range []struct {
		line string
		want error
	}{
		{"frobnicate.b32 %r1, %r2;", ErrUnsupported},
		{"add.rz.f32 %f1, %f2, %f3;", ErrUnsupported},
		{"add.ftz.f32 %f1, %f2, %f3;", ErrUnsupported},
		{"fma.f32 %f1, %f2, %f3, %f1;", ErrUnsupported},
		{"add.b32 %r1, %r2, %r3;", ErrUnsupported},
		{"add.s32.wrong %r1, %r2, %r3;", ErrUnsupported},
		{"ld.relaxed.global.u32 %r1, [%rd1];", ErrUnsupported},
		{"ld.release.sys.global.u32 %r1, [%rd1];", ErrUnsupported},
		{"st.acquire.sys.global.u32 [%rd1], %r1;", ErrUnsupported},
		{"ld.local.u32 %r1, [%rd1];", ErrUnsupported},
		{"ld.global.v4.u64 {%rd0, %rd1, %rd2, %rd3}, [%rd1];", ErrUnsupported},
		{"fence.proxy.async;", ErrUnsupported},
		{"bar.sync %r1;", ErrUnsupported},
		{"bar.sync 0, 64;", ErrSyntax},
		{"mov.u32 %r1, %smid;", ErrUnsupported},
		{"mov.u64 %rd1, elsewhere;", ErrUnsupported},
		{"call.uni elsewhere;", ErrUnsupported},
		{"cvt.f16.f32 %r1, %f1;", ErrUnsupported},
		{"atom.global.add.b32 %r1, [%rd1], 1;", ErrUnsupported},
		{"shfl.up.b32 %r1, %r2, 1, 0;", ErrUnsupported},
		{"add.s32 %r1, %r2;", ErrSyntax},
		{"add.s32 %r1, %r2, %r9;", ErrSyntax},
		{"add.s32 %rd1, %r2, %r3;", ErrSyntax},
		{"add.s32 7, %r2, %r3;", ErrSyntax},
		{"add.f32 %f1, %f2, 7;", ErrSyntax},
		{"ld.global.u32 %r1, [%r1];", ErrSyntax},
		{"ld.global.u64 %r1, [%rd1];", ErrSyntax},
		{"ld.param.u64 %rd1, [a+4];", ErrSyntax},
		{"ld.param.u64 %rd1, [b];", ErrSyntax},
		{"bra Nowhere;", ErrSyntax},
		{"add.s32 %r1 %r2;", ErrSyntax},
		{"mov.u32 %r1, 0x1g;", ErrSyntax},
		{"mov.f32 %f1, 0f12;", ErrSyntax},
		{".reg .b32 %r<9999999>;", ErrUnsupported},
		{".local .b8 x[4];", ErrUnsupported},
		{"\\", ErrSyntax},
	} {
		t.Run(c.line, func(t *testing.T) {
			_, err := Parse("some.ptx", []byte(header+entry+"  "+c.line+"\nret;\n}\n"))
			e, ok := errors.AsType[*Error](err)
			require.True(t, ok, "%v", err)
			require.ErrorIs(t, err, c.want)
			require.Equal(t, Place{File: "some.ptx", Line: 9, Instruction: c.line}, e.Place)
			require.Contains(t, err.Error(), "some.ptx:9: "+c.line)
			require.Nil(t, e.Thread)
		})
	}
	for _, text := range []string{"", header, header + ".visible .entry k()", header + entry, header + "/* ", header + ".pragma \"x", header + ".address_size 32"} {
		if m, err := Parse("some.ptx", []byte(text)); err == nil {
			require.Empty(t, m.Functions())
		}
	}
	_, err := Parse("loop.ptx", []byte(header+".func f() ;\n.func f() {\ncall.uni f;\nret;\n}\n.visible .entry k() {\ncall.uni f;\nret;\n}\n"))
	require.ErrorIs(t, err, ErrUnsupported, "a function that calls itself")
}

// TestFaults: what goes wrong when an instruction is executed names the instruction and the thread, and ends the machine.
func TestFaults(t *testing.T) {
	for _, c := range []struct {
		name, body string
		want       error
		line       int
	}{
		{"no memory", "ld.param.u64 %rd1, [a];\nld.global.u32 %r1, [%rd1+4096];", ErrAddress, 10},
		{"beyond the end", "ld.param.u64 %rd1, [a];\nst.global.u64 [%rd1+64], %rd1;", ErrAddress, 10},
		{"nil", "mov.u64 %rd1, 0;\nld.relaxed.sys.global.v4.u32 {%r0, %r1, %r2, %r3}, [%rd1];", ErrAddress, 10},
		{"misaligned", "ld.param.u64 %rd1, [a];\nld.global.u32 %r1, [%rd1+2];", ErrAlignment, 10},
		{"misaligned vector", "ld.param.u64 %rd1, [a];\nst.global.v4.u32 [%rd1+8], {%r0, %r1, %r2, %r3};", ErrAlignment, 10},
		{"parameter", "mov.u64 %rd1, 8;\nld.param.u64 %rd1, [%rd1];", ErrAddress, 10},
		{"parameter, far away", "mov.u64 %rd1, -8;\nld.param.u64 %rd1, [%rd1];", ErrAddress, 10},
		{"shared", "mov.u64 %rd1, 0;\nld.shared.u32 %r1, [%rd1];", ErrAddress, 10},
		{"no multicast address", "ld.param.u64 %rd1, [a];\nmultimem.ld_reduce.relaxed.sys.global.add.u32 %r1, [%rd1];", ErrAddress, 10},
		{"a multicast address", "mov.u64 %rd1, 0x8000;\nld.global.u32 %r1, [%rd1];", ErrAddress, 10},
		{"trap", "\ntrap;", ErrTrap, 10},
		{"for ever", "\nAgain: bra Again;", ErrSteps, 10},
		{"a barrier that nobody else comes to", "mov.u32 %r1, %tid.x;\nsetp.eq.u32 %p1, %r1, 0; @%p1 bar.sync 1; @!%p1 bar.sync 2;", ErrDeadlock, 10},
	} {
		for _, weak := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/weak=%v", c.name, weak), func(t *testing.T) {
				m := parse(t, "some.ptx", header+entry+c.body+"\nret;\n}\n")
				memory := NewMemory()
				require.NoError(t, memory.Map(0x1000, aligned(64)))
				require.NoError(t, memory.Multicast(0x8000, 64, 0x1000))
				machine := New(memory, Config{Weak: weak, MaxSteps: 10_000})
				s := machine.NewStream(3)
				require.NoError(t, s.Launch(Launch{Function: m.Function("k"), Block: [3]uint32{2}, Params: [][]byte{u64(0x1000)}}))
				err := machine.Run()
				e, ok := errors.AsType[*Error](err)
				require.True(t, ok, "%v", err)
				require.ErrorIs(t, err, c.want)
				require.Equal(t, c.line, e.Line)
				require.NotNil(t, e.Thread)
				require.Equal(t, 3, e.Thread.Device)
				require.Equal(t, "k", e.Thread.Function)
				require.Contains(t, err.Error(), fmt.Sprintf("some.ptx:%d: ", c.line))
				require.Equal(t, err, machine.Run())
				require.False(t, s.Idle())
			})
		}
	}
}

// TestLaunchRefused: a launch that does not fit the kernel.
func TestLaunchRefused(t *testing.T) {
	m := parse(t, "some.ptx", header+".visible .entry k(.param .u32 a, .param .align 8 .b8 b[12]) .maxntid 64, 1, 1 { ret; }\n.func f() { ret; }")
	require.Nil(t, m.Function("f"))
	require.Nil(t, m.Function("g"))
	require.Equal(t, []Param{{4, 4}, {12, 8}}, m.Function("k").Params)
	s := New(NewMemory(), Config{}).NewStream(0)
	good := Launch{Function: m.Function("k"), Block: [3]uint32{64}, Params: [][]byte{make([]byte, 4), make([]byte, 12)}}
	require.NoError(t, s.Launch(good))
	for _, change := range []func(*Launch){
		func(l *Launch) { l.Function = nil },
		func(l *Launch) { l.Block[1] = 2 },
		func(l *Launch) { l.Grid = [3]uint32{1 << 20, 1 << 20} },
		func(l *Launch) { l.Params = l.Params[:1] },
		func(l *Launch) { l.Params = [][]byte{make([]byte, 4), make([]byte, 16)} },
	} {
		l := good
		change(&l)
		require.ErrorIs(t, s.Launch(l), ErrUnsupported)
	}
	require.NoError(t, s.machine.Run())
}

// TestMemory: what can be mapped where.
func TestMemory(t *testing.T) {
	m := NewMemory()
	require.NoError(t, m.Map(0x1000, aligned(64)))
	require.NoError(t, m.Map(0x1040, aligned(16)))
	require.NoError(t, m.Map(0xff0, aligned(16)))
	for _, wrong := range []error{
		m.Map(0x1000, aligned(16)), m.Map(0xfe0, aligned(32)), m.Map(0x1008, aligned(16)), m.Map(0x2000, nil), m.Map(0x2000, aligned(32)[8:]),
		m.Map(1<<64-16, aligned(32)), m.Multicast(0x2000, 64), m.Multicast(0x2000, 128, 0x1000), m.Multicast(0x2000, 64, 0x3000), m.Multicast(0x1000, 16, 0x1040),
		m.Unmap(0x1010),
	} {
		require.ErrorIs(t, wrong, ErrAddress)
	}
	require.NoError(t, m.Multicast(0x2000, 64, 0x1000))
	require.ErrorIs(t, m.Multicast(0x3000, 64, 0x2000), ErrAddress, "of a multicast address")
	require.NoError(t, m.Unmap(0x1000))
	require.NoError(t, m.Map(0x1000, aligned(32)))
}

// TestStreams: functions on a stream come between launches, and launches of one stream one after the other.
func TestStreams(t *testing.T) {
	memory := NewMemory()
	b := aligned(64)
	require.NoError(t, memory.Map(0x1000, b))
	m := New(memory, Config{})
	f := parse(t, "copy.ptx", copyKernels).Function("put")
	s, other := m.NewStream(0), m.NewStream(0)
	var seen []byte
	asked := 0
	for i := range 3 {
		require.NoError(t, s.Launch(Launch{Function: f, Params: [][]byte{u64(0x1000), u32(uint32(i + 1))}}))
		s.Do(func() bool { seen = append(seen, b[0]); return true })
	}
	other.Do(func() bool { asked++; return len(seen) == 3 }) // as an event of another stream
	require.NoError(t, other.Launch(Launch{Function: f, Params: [][]byte{u64(0x1010), u32(9)}}))
	require.False(t, s.Idle())
	require.NoError(t, m.Run())
	require.True(t, s.Idle())
	require.Equal(t, []byte{1, 2, 3}, seen)
	require.Equal(t, byte(9), b[16])
	require.Positive(t, asked)

	// A step does not wait: it says that there is something to do.
	s.Do(func() bool { return false })
	idle, err := m.Step(100)
	require.NoError(t, err)
	require.False(t, idle)
}

// TestSeeds: a run is the same for the same seed, instruction by instruction, and another for another.
func TestSeeds(t *testing.T) {
	j := job{form: ptx.TwoShotFlow, dtype: "f32", op: ptx.Sum, ranks: 3, count: 500, epochs: 2, blocks: 2, threads: 32, lap: 256}
	for _, weak := range []bool{false, true} {
		steps := map[uint64]bool{}
		for seed := range uint64(4) {
			a, err := j.run(t, Config{Seed: seed, Weak: weak})
			require.NoError(t, err)
			b, err := j.run(t, Config{Seed: seed, Weak: weak})
			require.NoError(t, err)
			require.Equal(t, a, b)
			steps[a] = true
		}
		require.Greater(t, len(steps), 1)
	}
}

// FuzzParse: whatever the text is, parsing gives a module or an error, and what it has parsed runs or fails.
func FuzzParse(f *testing.F) {
	f.Add(copyKernels)
	f.Add(listener)
	f.Add(strings.Replace(clusterRing, ".reqnctapercluster 3", ".reqnctapercluster 2", 1))
	for _, l := range tests {
		f.Add(header + entry + strings.NewReplacer("[x]", "[%rd0]", "[y]", "[%rd0+64]").Replace(l.threads[0]) + ";\nret;\n}\n")
	}
	text, err := images.Image("signals.ptx")
	require.NoError(f, err)
	f.Add(string(text))
	f.Fuzz(func(t *testing.T, text string) {
		m, err := Parse("fuzz.ptx", []byte(text))
		if err != nil {
			_, ok := errors.AsType[*Error](err)
			require.True(t, ok, "%v", err)
			return
		}
		for _, weak := range []bool{false, true} {
			memory := NewMemory()
			require.NoError(t, memory.Map(0x1000, aligned(4096)))
			machine := New(memory, Config{Weak: weak, MaxSteps: 2000})
			for i, f := range m.Functions() {
				l := Launch{Function: f, Block: [3]uint32{3}, Grid: [3]uint32{2}}
				for _, p := range f.Params {
					if p.Size > 1<<12 {
						return
					}
					l.Params = append(l.Params, append(u64(0x1000), make([]byte, p.Size)...)[:p.Size])
				}
				if machine.NewStream(i).Launch(l) != nil {
					return
				}
			}
			_ = machine.Run()
		}
	})
}

// TestOverlap: with programmatic stream serialization a launch begins when all blocks of the one before it say so, and griddepcontrol.wait
// waits for its end, behind which everything that it wrote is visible. The clock is the one that was given.
func TestOverlap(t *testing.T) {
	m := parse(t, "overlap.ptx", header+`
.visible .entry first(.param .u64 a) {
	.reg .b64 %rd<3>; .reg .b32 %r<3>; .reg .pred %p;
	ld.param.u64 %rd1, [a];
	griddepcontrol.launch_dependents;
Again:
	ld.acquire.sys.global.u32 %r1, [%rd1];
	setp.eq.u32 %p, %r1, 0;
	@%p bra Again;
	mov.u32 %r2, %ctaid.x;
	mul.wide.u32 %rd2, %r2, 4;
	add.u64 %rd2, %rd1, %rd2;
	st.global.u32 [%rd2+16], 5;
	ret;
}
.visible .entry second(.param .u64 a) {
	.reg .b64 %rd<3>; .reg .b32 %r<4>;
	ld.param.u64 %rd1, [a];
	st.release.sys.global.u32 [%rd1], 1;
	griddepcontrol.wait;
	ld.global.v2.u32 {%r1, %r2}, [%rd1+16];
	add.u32 %r3, %r1, %r2;
	st.global.u32 [%rd1+32], %r3;
	mov.u64 %rd2, %globaltimer;
	st.global.u64 [%rd1+40], %rd2;
	ret;
}
`)
	for _, weak := range []bool{false, true} {
		for seed := range uint64(20) {
			run := func(overlap bool) ([]byte, error) {
				memory, b := NewMemory(), aligned(64)
				require.NoError(t, memory.Map(0x1000, b))
				machine := New(memory, Config{Seed: seed, Weak: weak, MaxSteps: 1 << 18, Clock: func() uint64 { return 42 }})
				s := machine.NewStream(0)
				require.NoError(t, s.Launch(Launch{Function: m.Function("first"), Grid: [3]uint32{2}, Params: [][]byte{u64(0x1000)}}))
				require.NoError(t, s.Launch(Launch{Function: m.Function("second"), Params: [][]byte{u64(0x1000)}, Overlap: overlap}))
				return b, machine.Run()
			}
			b, err := run(true)
			require.NoError(t, err)
			require.Equal(t, byte(10), b[32])
			require.Equal(t, byte(42), b[40])
			if seed == 0 {
				_, err = run(false)
				require.ErrorIs(t, err, ErrSteps)
			}
		}
	}
}
