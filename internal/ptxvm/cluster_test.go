package ptxvm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// clusterSum adds 512 floats in a cluster of four blocks: each warp adds its own and sends the sum to every block. It is what the compiler makes of such a source.
const clusterSum = header + `
.visible .entry k(
	.param .u64 k_param_0,
	.param .u64 k_param_1
)
.maxntid 128, 1, 1
.explicitcluster
.reqnctapercluster 4, 1, 1
{
	.reg .pred 	%p<7>;
	.reg .f32 	%f<60>;
	.reg .b32 	%r<33>;
	.reg .b64 	%rd<13>;
	.shared .align 16 .b8 _ZZ1kE1t[128];

	ld.param.u64 	%rd3, [k_param_0];
	ld.param.u64 	%rd2, [k_param_1];
	cvta.to.global.u64 	%rd4, %rd3;
	barrier.cluster.arrive.relaxed.aligned;
	mov.u32 	%r4, %ctaid.x;
	shl.b32 	%r5, %r4, 7;
	mov.u32 	%r1, %tid.x;
	add.s32 	%r6, %r5, %r1;
	cvt.u64.u32 	%rd1, %r6;
	mul.wide.u32 	%rd5, %r6, 4;
	add.s64 	%rd6, %rd4, %rd5;
	ld.global.f32 	%f2, [%rd6];
	mov.u32 %r3, %cluster_ctarank;
	mov.b32 	%r7, %f2;
	mov.u32 	%r8, 31;
	mov.u32 	%r9, 16;
	mov.u32 	%r10, -1;
	shfl.sync.bfly.b32 	%r11|%p1, %r7, %r9, %r8, %r10;
	mov.b32 	%f3, %r11;
	add.rn.f32 	%f4, %f2, %f3;
	mov.b32 	%r12, %f4;
	mov.u32 	%r13, 8;
	shfl.sync.bfly.b32 	%r14|%p2, %r12, %r13, %r8, %r10;
	mov.b32 	%f5, %r14;
	add.rn.f32 	%f6, %f4, %f5;
	mov.b32 	%r15, %f6;
	mov.u32 	%r16, 4;
	shfl.sync.bfly.b32 	%r17|%p3, %r15, %r16, %r8, %r10;
	mov.b32 	%f7, %r17;
	add.rn.f32 	%f8, %f6, %f7;
	mov.b32 	%r18, %f8;
	mov.u32 	%r19, 2;
	shfl.sync.bfly.b32 	%r20|%p4, %r18, %r19, %r8, %r10;
	mov.b32 	%f9, %r20;
	add.rn.f32 	%f10, %f8, %f9;
	mov.b32 	%r21, %f10;
	mov.u32 	%r22, 1;
	shfl.sync.bfly.b32 	%r23|%p5, %r21, %r22, %r8, %r10;
	mov.b32 	%f11, %r23;
	add.rn.f32 	%f1, %f10, %f11;
	barrier.cluster.wait.acquire.aligned;
	and.b32  	%r24, %r1, 28;
	setp.ne.s32 	%p6, %r24, 0;
	@%p6 bra 	$L__BB0_2;

	shl.b32 	%r29, %r3, 2;
	shr.u32 	%r30, %r1, 5;
	add.s32 	%r31, %r29, %r30;
	shl.b32 	%r32, %r31, 2;
	cvt.u64.u32 	%rd7, %r32;
	mov.u64 	%rd8, _ZZ1kE1t;
	add.s64 	%rd9, %rd8, %rd7;
	cvt.u32.u64 	%r26, %rd9;
	and.b32  	%r27, %r1, 31;
	mapa.shared::cluster.u32 %r25, %r26, %r27;
	st.shared::cluster.f32 [%r25], %f1;

$L__BB0_2:
	barrier.cluster.arrive.release.aligned;
	barrier.cluster.wait.acquire.aligned;
	ld.shared.v4.f32 	{%f13, %f14, %f15, %f16}, [_ZZ1kE1t];
	add.rn.f32 	%f21, %f13, %f14;
	add.rn.f32 	%f22, %f21, %f15;
	add.rn.f32 	%f23, %f22, %f16;
	ld.shared.v4.f32 	{%f24, %f25, %f26, %f27}, [_ZZ1kE1t+16];
	add.rn.f32 	%f32, %f23, %f24;
	add.rn.f32 	%f33, %f32, %f25;
	add.rn.f32 	%f34, %f33, %f26;
	add.rn.f32 	%f35, %f34, %f27;
	ld.shared.v4.f32 	{%f36, %f37, %f38, %f39}, [_ZZ1kE1t+32];
	add.rn.f32 	%f44, %f35, %f36;
	add.rn.f32 	%f45, %f44, %f37;
	add.rn.f32 	%f46, %f45, %f38;
	add.rn.f32 	%f47, %f46, %f39;
	ld.shared.v4.f32 	{%f48, %f49, %f50, %f51}, [_ZZ1kE1t+48];
	add.rn.f32 	%f56, %f47, %f48;
	add.rn.f32 	%f57, %f56, %f49;
	add.rn.f32 	%f58, %f57, %f50;
	add.rn.f32 	%f59, %f58, %f51;
	cvta.to.global.u64 	%rd10, %rd2;
	shl.b64 	%rd11, %rd1, 2;
	add.s64 	%rd12, %rd10, %rd11;
	st.global.f32 	[%rd12], %f59;
	ret;
}
`

// TestClusterSum: the compiler's kernel has the right bits, whatever is chosen, and whatever room there is for clusters.
func TestClusterSum(t *testing.T) {
	const blocks, threads = 8, 128
	f := parse(t, "sum.ptx", clusterSum).Function("k")
	require.Equal(t, 4, f.Cluster)
	rnd := rand.New(rand.NewPCG(1, 2))
	in, want := aligned(4*blocks*threads), aligned(4*blocks*threads)
	var warps []float32
	for w := range blocks * threads / 32 {
		var lanes [32]float32
		for i := range lanes {
			lanes[i] = float32(rnd.NormFloat64())
			binary.LittleEndian.PutUint32(in[4*(32*w+i):], math.Float32bits(lanes[i]))
		}
		for d := 16; d > 0; d /= 2 {
			old := lanes
			for i := range lanes {
				lanes[i] = old[i] + old[i^d]
			}
		}
		warps = append(warps, lanes[0])
	}
	for i := range blocks * threads {
		of := warps[i/512*16:][:16]
		sum := of[0]
		for _, v := range of[1:] {
			sum += v
		}
		binary.LittleEndian.PutUint32(want[4*i:], math.Float32bits(sum))
	}
	for _, s := range schedules {
		t.Run(s.name, func(t *testing.T) {
			eachSeed(t, seedsOr(4, 40), func(seed uint64) error {
				memory, out := NewMemory(), aligned(len(want))
				require.NoError(t, memory.Map(0x10000, in))
				require.NoError(t, memory.Map(0x20000, out))
				machine := New(memory, Config{Seed: seed, Weak: seed%2 == 0, Turn: int(seed % 3 * 50), Schedule: s.of(seed), Hangs: true, MaxSteps: 1 << 24})
				if seed/2%2 == 1 {
					machine.Limit(0, Limits{Multiprocessors: 3, Threads: 256})
				}
				require.NoError(t, machine.NewStream(0).Launch(Launch{Function: f, Grid: [3]uint32{blocks}, Block: [3]uint32{threads}, Params: [][]byte{u64(0x10000), u64(0x20000)}}))
				if err := machine.Run(); err != nil {
					return err
				}
				require.Equal(t, want, out)
				return nil
			})
		})
	}
}

// clusterRing is a kernel in clusters of three blocks: the first thread of each sends its rank to the next block, by shared memory, and writes what it has got. Tests
// change lines of it.
const clusterRing = header + `
.visible .entry k(.param .u64 out) .explicitcluster .reqnctapercluster 3 {
	.reg .b64 %rd<4>; .reg .b32 %r<12>; .reg .pred %p<4>;
	.shared .align 8 .b8 box[16];
	ld.param.u64 %rd1, [out];
	mov.u32 %r1, %cluster_ctarank;
	mov.u32 %r2, %tid.x;
	mov.u32 %r3, %ctaid.x;
	mul.wide.u32 %rd2, %r3, 4;
	add.u64 %rd1, %rd1, %rd2;
	setp.ne.u32 %p1, %r2, 0;
	add.u32 %r4, %r1, 1;
	rem.u32 %r5, %r4, 3;
	mov.u32 %r6, box;
	barrier.cluster.arrive.relaxed.aligned;
	barrier.cluster.wait.acquire.aligned; // first
	mapa.shared::cluster.u32 %r7, %r6, %r5;
	@%p1 bra Sent;
	st.shared::cluster.u32 [%r7], %r4;
Sent:
	barrier.cluster.arrive.release.aligned; // second
	barrier.cluster.wait.acquire.aligned; // wait
	@%p1 bra End;
	ld.shared.u32 %r8, [box];
	st.global.u32 [%rd1], %r8;
End:
	ret;
}
`

const (
	firstLines  = "	barrier.cluster.arrive.relaxed.aligned;\n	barrier.cluster.wait.acquire.aligned; // first\n"
	secondLines = "	barrier.cluster.arrive.release.aligned; // second\n	barrier.cluster.wait.acquire.aligned; // wait\n"
)

// flagged makes the kernel send a flag behind the rank, and wait for it where tests say how, instead of the second barrier.
var flagged = []string{
	"st.shared::cluster.u32 [%r7], %r4;", "st.shared::cluster.u32 [%r7], %r4;\n	st.release.cluster.shared::cluster.u32 [%r7+4], 1;",
	"	mapa.", "	@!%p1 st.shared.u32 [box+4], 0;\n	barrier.cluster.arrive;\n	barrier.cluster.wait;\n	mapa.",
	secondLines, "	@%p1 bra End;\nAgain:\n	setp.eq.u32 %p2, %r9, 0;\n	@%p2 bra Again;\n",
}

// ring runs the kernel with lines that are others: old and new, in turn.
func ring(t *testing.T, c Config, change ...string) (out []byte, err error) {
	t.Helper()
	text := clusterRing
	for i := 0; i < len(change); i += 2 {
		require.Equal(t, 1, strings.Count(text, change[i]), change[i])
		text = strings.Replace(text, change[i], change[i+1], 1)
	}
	return clusterRun(t, text, 6, 2, c)
}

// clusterRun runs k, which has 4 bytes of output for each block.
func clusterRun(t *testing.T, text string, blocks, threads uint32, c Config) (out []byte, err error) {
	t.Helper()
	memory := NewMemory()
	out = aligned(256)
	require.NoError(t, memory.Map(0x10000, out))
	c.MaxSteps = 1 << 20
	machine := New(memory, c)
	require.NoError(t, machine.NewStream(0).Launch(Launch{
		Function: parse(t, "ring.ptx", text).Function("k"), Grid: [3]uint32{blocks}, Block: [3]uint32{threads}, Params: [][]byte{u64(0x10000)},
	}))
	return out, machine.Run()
}

// ringSent is what the blocks of the ring have got.
func ringSent(t *testing.T, out []byte) {
	t.Helper()
	for i, want := range []uint32{3, 1, 2, 3, 1, 2} {
		require.Equal(t, want, binary.LittleEndian.Uint32(out[4*i:]), "block %d", i)
	}
}

// TestCluster: what kernels in clusters may do, under every schedule.
func TestCluster(t *testing.T) {
	for _, c := range []struct {
		name   string
		change []string
	}{
		{"as it is", nil},
		{"the defaults are release and acquire", []string{"arrive.release.aligned; // second", "arrive;", "wait.acquire.aligned; // wait", "wait;"}},
		{"own addresses are of the cluster too", []string{"ld.shared.u32 %r8, [box]", "ld.shared::cluster.u32 %r8, [%r6]"}},
		{"mapa of the own rank", []string{"ld.shared.u32 %r8, [box]", "mapa.shared::cluster.u32 %r9, %r7, %r1; ld.shared.u32 %r8, [%r9]"}},
		{"addresses of 64 bits", []string{"mapa.shared::cluster.u32 %r7, %r6, %r5;", "mapa.shared::cluster.u64 %rd2, box, %r5;", "[%r7]", "[%rd2]"}},
		{"a rank by number", []string{"st.global", "mapa.shared::cluster.u32 %r9, %r6, 1; sub.u32 %r8, %r8, %r5; st.global", "mov.u32 %r6, box;", "mov.u32 %r6, box;"}},
		{"a thread that has ended", []string{"	barrier.cluster.arrive.relaxed", "	@%p1 exit;\n	barrier.cluster.arrive.relaxed"}},
		{"a thread that ends between arriving and waiting", []string{"; // second", ";\n	@%p1 exit;"}},
		{"a block of threads that have ended", []string{"	barrier.cluster.arrive.relaxed", "	setp.eq.u32 %p2, %r1, 2;\n	setp.eq.u32 %p3, %r1, 1;\n	@%p2 exit;\n	barrier.cluster.arrive.relaxed",
			"	@%p1 bra Sent;", "	@%p1 bra Sent;\n	@%p3 bra Sent;"}},
		{"atomics", []string{"st.shared::cluster.u32 [%r7], %r4;", "atom.cluster.shared::cluster.exch.b32 %r9, [%r7], %r4;"}},
		{"a flag instead of the second barrier", []string{
			"st.shared::cluster.u32 [%r7], %r4;", "st.shared::cluster.u32 [%r7], %r4;\n	st.release.cluster.shared::cluster.u32 [%r7+4], 1;",
			"	mapa.", "	@!%p1 st.shared.u32 [box+4], 0;\n	barrier.cluster.arrive;\n	barrier.cluster.wait;\n	mapa.",
			"	ld.shared.u32", "Again:\n	ld.acquire.cluster.shared.u32 %r9, [box+4];\n	setp.eq.u32 %p2, %r9, 0;\n	@%p2 bra Again;\n	ld.shared.u32",
			secondLines, "", "	ret;\n", "	barrier.cluster.arrive;\n	barrier.cluster.wait;\n	ret;\n"}},
		{"a flag instead of a barrier at the end", append(slices.Clone(flagged), "Again:\n", "Again:\n	ld.acquire.cluster.shared.u32 %r9, [box+4];\n")},
		{"a flag that the end of the block is behind", append(slices.Clone(flagged), "Again:\n", "Again:\n	ld.relaxed.cluster.shared.u32 %r9, [box+4];\n",
			"	ld.shared.u32 %r8, [box];\n", "	setp.eq.u32 %p3, %r1, 0;\n	selp.u32 %r8, 3, %r1, %p3;\n")},
		{"what another thread of the block has stored", []string{"	@%p1 bra Sent;\n	st.shared", "	@!%p1 bra Sent;\n	st.shared", "Sent:\n", "Sent:\n	bar.sync 0;\n",
			"	barrier.cluster.arrive.release.aligned; // second\n", "	@%p1 barrier.cluster.arrive.relaxed;\n	@!%p1 barrier.cluster.arrive.release;\n"}},
		{"fences", []string{
			"st.shared::cluster.u32 [%r7], %r4;", "st.shared::cluster.u32 [%r7], %r4;\n	fence.acq_rel.cluster;\n	st.relaxed.cluster.shared::cluster.u32 [%r7+4], 1;",
			"	mapa.", "	@!%p1 st.shared.u32 [box+4], 0;\n	barrier.cluster.arrive;\n	barrier.cluster.wait;\n	mapa.",
			"	ld.shared.u32", "Again:\n	ld.relaxed.cluster.shared.u32 %r9, [box+4];\n	setp.eq.u32 %p2, %r9, 0;\n	@%p2 bra Again;\n	fence.acq_rel.cluster;\n	ld.shared.u32",
			secondLines, "", "	ret;\n", "	barrier.cluster.arrive;\n	barrier.cluster.wait;\n	ret;\n"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, s := range schedules {
				t.Run(s.name, func(t *testing.T) {
					eachSeed(t, seedsOr(10, 100), func(seed uint64) error {
						out, err := ring(t, Config{Seed: seed, Weak: seed%2 == 0, Turn: int(seed % 4 * 20), Schedule: s.of(seed), Hangs: true}, c.change...)
						if err != nil || strings.HasPrefix(c.name, "a rank") || strings.HasPrefix(c.name, "a block") {
							return err
						}
						ringSent(t, out)
						return nil
					})
				})
			}
		})
	}
}

// TestClusterWrong: what kernels in clusters must not do is found: under every seed, or under some where it depends on who comes first.
func TestClusterWrong(t *testing.T) {
	race := errors.New("a race")
	second := []string{secondLines, ""}
	for _, c := range []struct {
		name   string
		change []string
		strong []error // one of them with every seed, or with some
		weak   []error
		some   bool
		says   string // in one at least
	}{
		{"no first barrier", []string{firstLines, ""}, []error{ErrAddress}, []error{ErrAddress}, true, "has not begun"},
		{"no second barrier", second, nil, []error{race, ErrAddress}, false, "race at shared address 0x0 of block "},
		{"no second barrier, and a block that ends before the store", []string{secondLines, "", "	ld.shared.u32 %r8, [box];\n", ""}, []error{ErrAddress}, []error{ErrAddress}, true, "has ended"},
		{"no second barrier, and a block that ends behind the store", []string{secondLines, "", "	ld.shared.u32 %r8, [box];\n", ""}, nil, []error{race, ErrAddress}, false, "ret;: race at shared address 0x0 of block "},
		{"an arrival that releases nothing", []string{"arrive.release.aligned; // second", "arrive.relaxed;"}, nil, []error{race}, false, "race at shared address 0x0 of block "},
		{"a load before the wait", []string{firstLines, "	barrier.cluster.arrive;\n	barrier.cluster.wait;\n", "	barrier.cluster.wait.acquire.aligned; // wait\n", "",
			"	@%p1 bra Sent;\n", "	setp.ne.u32 %p2, %r3, 0;\n	@%p1 bra Sent;\n	@%p2 bra Sent; // one block sends, so that in some runs the next one loads late\n", "	ret;\n", "	barrier.cluster.wait;\n	ret;\n"}, nil, []error{race}, false, "race at shared address 0x0 of block "},
		{"a block that ends while others may load", []string{"ld.shared.u32 %r8, [box]", "ld.shared::cluster.u32 %r8, [%r7]"}, nil, []error{race, ErrAddress}, false, "ret;: race at shared address 0x0 of block "},
		{"an arrival before the store", []string{"	@%p1 bra Sent;", "	barrier.cluster.arrive;\n	@%p1 bra Sent;", "	barrier.cluster.arrive.release.aligned; // second\n", ""}, nil, []error{race, ErrAddress}, false, "race"},
		{"two blocks that store to the same", []string{"[%r7], %r4", "[%r7], %r4;\n	mapa.shared::cluster.u32 %r9, %r6, %r1;\n	st.shared::cluster.u32 [%r9], %r4"}, nil, []error{race}, false, "race"},
		{"an arrival for the second time", []string{"; // second", ";\n	barrier.cluster.arrive.aligned;"}, []error{ErrBarrier}, []error{ErrBarrier}, false, "it arrives for the second time"},
		{"a wait without an arrival", []string{"; // wait", ";\n	barrier.cluster.wait;"}, []error{ErrBarrier}, []error{ErrBarrier}, false, "it waits and has not arrived"},
		{"a rank that is none", []string{"%r6, %r5;", "%r6, 3;"}, []error{ErrAddress}, []error{ErrAddress}, false, "rank 3 in a cluster of 3"},
		{"an address that is of no rank", []string{"[%r7]", "[%r7+0x8000000]"}, []error{ErrAddress}, []error{ErrAddress}, false, ""},
		{"mapa of an address that is of no rank", []string{"%r6, %r5;", "0x8000000, %r5;"}, []error{ErrAddress}, []error{ErrAddress}, false, ""},
		{"beyond the end", []string{"[%r7]", "[%r7+16]"}, []error{ErrAddress}, []error{ErrAddress}, false, ""},
		{"misaligned", []string{"[%r7]", "[%r7+2]"}, []error{ErrAlignment}, []error{ErrAlignment}, false, ""},
		{"another block's, without ::cluster", []string{"st.shared::cluster", "st.shared"}, []error{ErrAddress}, []error{ErrAddress}, false, ""},
		{"another block's, with ::cta", []string{"st.shared::cluster", "st.shared::cta"}, []error{ErrAddress}, []error{ErrAddress}, false, ""},
		{"a thread that waits for its block", []string{"Sent:\n", "Sent:\n	@%p1 bar.sync 1;\n"}, []error{ErrDeadlock}, []error{ErrDeadlock}, false, "waits at the cluster barrier for the other threads of its cluster"},
		{"a thread that polls", []string{"; // second", ";", "Sent:\n", "Sent:\n	@%p1 ld.relaxed.gpu.global.u32 %r9, [%rd1];\n	@%p1 bra Sent;\n"}, []error{ErrDeadlock}, []error{ErrDeadlock}, false,
			"waits at the cluster barrier for the other threads of its cluster"},
	} {
		for weak, want := range map[bool][]error{false: c.strong, true: c.weak} {
			if want == nil { // only weak memory finds it
				continue
			}
			t.Run(fmt.Sprintf("%s/weak=%v", c.name, weak), func(t *testing.T) {
				found, said := 0, false
				const seeds = 40
				for seed := range uint64(seeds) {
					_, err := ring(t, Config{Seed: seed, Weak: weak, Turn: int(1 + seed%3*4), Hangs: true, Patience: 64}, c.change...)
					r, races := errors.AsType[*Race](err)
					if races { // the first and the second are of the blocks that they are of, and the memory is of that behind the one that stores
						for _, a := range []Access{r.First, r.Second} {
							if b := a.Thread.Block[0]; strings.HasPrefix(a.Instruction, "st.shared::cluster.u32 [%r7], %r4") {
								require.Equal(t, [3]uint32{b/3*3 + (b+1)%3}, r.Block)
							}
						}
						require.True(t, r.Shared)
					}
					if slices.ContainsFunc(want, func(w error) bool { return races && w == race || errors.Is(err, w) }) {
						found++
						said = said || strings.Contains(err.Error(), c.says)
						e, ok := errors.AsType[*Error](err)
						require.True(t, ok)
						require.NotNil(t, e.Thread)
						continue
					}
					if !c.some {
						t.Fatalf("seed %d: %v", seed, err)
					}
				}
				require.Positive(t, found)
				require.True(t, said)
			})
		}
	}
}

// TestClusterRegisters: the special registers of a launch with blocks along x, y and z.
func TestClusterRegisters(t *testing.T) {
	names := []string{
		"%cluster_ctarank", "%cluster_nctarank", "%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_ctaid.z", "%cluster_nctaid.x", "%cluster_nctaid.y", "%cluster_nctaid.z",
		"%clusterid.x", "%clusterid.y", "%clusterid.z", "%nclusterid.x", "%nclusterid.y", "%nclusterid.z",
	}
	for _, c := range []struct {
		directive string
		n         uint32
		explicit  uint32
	}{{".explicitcluster .reqnctapercluster 3, 1, 1", 3, 1}, {".reqnctapercluster 1", 1, 1}, {".maxclusterrank 8", 1, 0}, {"", 1, 0}} {
		t.Run(c.directive, func(t *testing.T) {
			var b strings.Builder
			b.WriteString(header + ".visible .entry k(.param .u64 out) " + c.directive + " {\n.reg .b64 %rd<3>; .reg .b32 %r<4>; .reg .pred %p;\nld.param.u64 %rd1, [out];\n")
			b.WriteString("mov.u32 %r1, %ctaid.z; mov.u32 %r2, %nctaid.y; mov.u32 %r3, %ctaid.y; mad.lo.u32 %r1, %r1, %r2, %r3;\n")
			b.WriteString("mov.u32 %r2, %nctaid.x; mov.u32 %r3, %ctaid.x; mad.lo.u32 %r1, %r1, %r2, %r3; mul.wide.u32 %rd2, %r1, 64; add.u64 %rd1, %rd1, %rd2;\n")
			for i, n := range names {
				fmt.Fprintf(&b, "mov.u32 %%r1, %s; st.global.u32 [%%rd1+%d], %%r1;\n", n, 4*i)
			}
			fmt.Fprintf(&b, "mov.pred %%p, %%is_explicit_cluster; selp.u32 %%r1, 1, 0, %%p; st.global.u32 [%%rd1+%d], %%r1;\nret;\n}\n", 4*len(names))
			f := parse(t, "registers.ptx", b.String()).Function("k")
			require.Equal(t, int(c.n), f.Cluster)
			memory, out := NewMemory(), aligned(64*6*2*2)
			require.NoError(t, memory.Map(0x10000, out))
			machine := New(memory, Config{})
			require.NoError(t, machine.NewStream(0).Launch(Launch{Function: f, Grid: [3]uint32{6, 2, 2}, Params: [][]byte{u64(0x10000)}}))
			require.NoError(t, machine.Run())
			for i := range uint32(24) {
				x, y, z := i%6, i/6%2, i/12
				for k, want := range []uint32{x % c.n, c.n, x % c.n, 0, 0, c.n, 1, 1, x / c.n, y, z, 6 / c.n, 2, 2, c.explicit} {
					require.Equal(t, want, binary.LittleEndian.Uint32(out[64*i+4*uint32(k):]), "block %d, register %d", i, k)
				}
			}
		})
	}
}

// TestClusterAccesses: every type and vector that shared memory has, at another block and back.
func TestClusterAccesses(t *testing.T) {
	for _, c := range []struct{ typ, class string }{
		{"u8", "b16"}, {"s8", "b16"}, {"b16", "b16"}, {"u16", "b16"}, {"b32", "b32"}, {"u32", "b32"}, {"f32", "f32"}, {"u64", "b64"}, {"f64", "f64"},
		{"v2.u8", "b16"}, {"v4.u8", "b16"}, {"v2.u16", "b16"}, {"v4.b16", "b16"}, {"v2.f32", "f32"}, {"v4.f32", "f32"}, {"v4.u32", "b32"}, {"v2.u64", "b64"}, {"v2.f64", "f64"},
	} {
		t.Run(c.typ, func(t *testing.T) {
			n, list := 1, "%x0"
			if c.typ[0] == 'v' {
				n = int(c.typ[1] - '0')
				list = "{" + strings.Join([]string{"%x0", "%x1", "%x2", "%x3"}[:n], ", ") + "}"
			}
			text := header + `
.visible .entry k(.param .u64 out) .reqnctapercluster 2 {
	.reg .b64 %rd<4>; .reg .b32 %r<8>; .reg .` + c.class + ` %x<4>; .reg .pred %p;
	.shared .align 16 .b8 box[32];
	ld.param.u64 %rd1, [out];
	mov.u32 %r1, %cluster_ctarank;
	xor.b32 %r2, %r1, 1;
	mapa.shared::cluster.u32 %r3, box, %r2;
	setp.ne.u32 %p, %r1, 0;
	barrier.cluster.arrive.relaxed;
	barrier.cluster.wait;
	@%p bra Wait;
	ld.global.` + c.typ + " " + list + `, [%rd1];
	st.shared::cluster.` + c.typ + " [%r3+16], " + list + `;
	ld.shared::cluster.` + c.typ + " " + list + `, [%r3+16];
	st.global.` + c.typ + " [%rd1+16], " + list + `;
Wait:
	barrier.cluster.arrive;
	barrier.cluster.wait;
	@!%p bra End;
	ld.shared.` + c.typ + " " + list + `, [box+16];
	st.global.` + c.typ + " [%rd1+32], " + list + `;
End:
	ret;
}
`
			for _, weak := range []bool{false, true} {
				memory, out := NewMemory(), aligned(48)
				for i := range 16 {
					out[i] = byte(0x81 + 7*i)
				}
				require.NoError(t, memory.Map(0x10000, out))
				machine := New(memory, Config{Weak: weak})
				require.NoError(t, machine.NewStream(0).Launch(Launch{Function: parse(t, "accesses.ptx", text).Function("k"), Grid: [3]uint32{2}, Params: [][]byte{u64(0x10000)}}))
				require.NoError(t, machine.Run())
				bytes := n * sizes[c.typ[strings.LastIndexByte(c.typ, '.')+1:]]
				require.Equal(t, out[:bytes], out[16:16+bytes])
				require.Equal(t, out[:bytes], out[32:32+bytes])
				require.Equal(t, make([]byte, 16-bytes), out[32+bytes:48])
			}
		})
	}
}

// TestClusterScope: .cluster is the blocks of a cluster and no others. Two blocks pass a message in global memory.
func TestClusterScope(t *testing.T) {
	const text = header + `
.visible .entry k(.param .u64 out) .reqnctapercluster SIZE {
	.reg .b64 %rd<4>; .reg .b32 %r<8>; .reg .pred %p<3>;
	ld.param.u64 %rd1, [out];
	mov.u32 %r1, %ctaid.x;
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra Receive;
	st.global.u32 [%rd1], 7;
	SEND
	ret;
Receive:
	RECEIVE
	setp.eq.u32 %p2, %r2, 0;
	@%p2 bra Receive;
	ld.global.u32 %r3, [%rd1];
	st.global.u32 [%rd1+8], %r3;
	ret;
}
`
	for _, c := range []struct{ send, receive string }{
		{"st.release.SCOPE.global.u32 [%rd1+4], 1;", "ld.acquire.SCOPE.global.u32 %r2, [%rd1+4];"},
		{"fence.acq_rel.SCOPE; st.relaxed.SCOPE.global.u32 [%rd1+4], 1;", "ld.relaxed.SCOPE.global.u32 %r2, [%rd1+4]; fence.acq_rel.SCOPE;"},
		{"fence.sc.SCOPE; st.relaxed.SCOPE.global.u32 [%rd1+4], 1;", "ld.relaxed.SCOPE.global.u32 %r2, [%rd1+4]; fence.sc.SCOPE;"},
		{"red.release.SCOPE.global.add.u32 [%rd1+4], 1;", "atom.acquire.SCOPE.global.add.u32 %r2, [%rd1+4], 0;"},
	} {
		for _, size := range []string{"1", "2"} {
			for _, scope := range []string{"cta", "cluster", "gpu"} {
				t.Run(fmt.Sprintf("%s/size=%s/scope=%s", c.send[:strings.IndexByte(c.send, '.')], size, scope), func(t *testing.T) {
					kernel := strings.NewReplacer("SEND", c.send, "RECEIVE", c.receive, "SIZE", size).Replace(text)
					kernel = strings.ReplaceAll(kernel, "SCOPE", scope)
					for seed := range uint64(20) {
						out, err := clusterRun(t, kernel, 2, 1, Config{Seed: seed, Weak: true})
						if scope == "cta" || scope == "cluster" && size == "1" {
							_, races := errors.AsType[*Race](err)
							require.True(t, races, "%v", err)
							continue
						}
						require.NoError(t, err)
						require.Equal(t, byte(7), out[8])
					}
				})
			}
		}
	}
}

// TestClusterFenceSC: store buffering between blocks is excluded by fence.sc.cluster in a cluster, where other fences do not.
func TestClusterFenceSC(t *testing.T) {
	const text = header + `
.visible .entry k(.param .u64 out) .reqnctapercluster SIZE {
	.reg .b64 %rd<6>; .reg .b32 %r<8>; .reg .pred %p<2>;
	ld.param.u64 %rd1, [out];
	mov.u32 %r1, %ctaid.x;
	xor.b32 %r2, %r1, 1;
	mul.wide.u32 %rd2, %r1, 4;
	mul.wide.u32 %rd3, %r2, 4;
	add.u64 %rd2, %rd1, %rd2;
	add.u64 %rd3, %rd1, %rd3;
	st.relaxed.gpu.global.u32 [%rd2], 1;
	fence.sc.cluster;
	ld.relaxed.gpu.global.u32 %r3, [%rd3];
	st.global.u32 [%rd2+16], %r3;
	ret;
}
`
	for _, c := range []struct {
		size, fence string
		want        bool
	}{
		{"2", "fence.sc.cluster;", false}, {"2", "fence.sc.gpu;", false}, {"2", "fence.sc.cta;", true}, {"2", "fence.acq_rel.cluster;", true},
		{"2", "setp.eq.u32 %p1, %r1, 0; @%p1 fence.sc.cta; @!%p1 fence.sc.cluster;", true}, {"2", "setp.eq.u32 %p1, %r1, 0; @%p1 fence.sc.cluster; @!%p1 fence.sc.gpu;", false},
		{"1", "fence.sc.cluster;", true}, {"1", "fence.sc.gpu;", false},
	} {
		neither := false
		for seed := range uint64(400) {
			out, err := clusterRun(t, strings.NewReplacer("fence.sc.cluster;", c.fence, "SIZE", c.size).Replace(text), 2, 1, Config{Seed: seed, Weak: true})
			require.NoError(t, err)
			neither = neither || out[16] == 0 && out[20] == 0
		}
		require.Equal(t, c.want, neither, "%s in clusters of %s", c.fence, c.size)
	}
}

// TestClusterFences: a fence.sc of scope .cta is ordered with none of another block, so that who sees what comes behind it need not see what comes before.
func TestClusterFences(t *testing.T) {
	const text = header + `
.visible .entry k(.param .u64 out) .reqnctapercluster 2 {
	.reg .b64 %rd<2>; .reg .b32 %r<4>; .reg .pred %p<2>;
	ld.param.u64 %rd1, [out];
	mov.u32 %r1, %ctaid.x;
	setp.ne.u32 %p1, %r1, 0;
	@%p1 bra Receive;
	st.relaxed.gpu.global.u32 [%rd1], 1;
	SEND
	st.relaxed.gpu.global.u32 [%rd1+64], 1;
	ret;
Receive:
	ld.relaxed.gpu.global.u32 %r2, [%rd1+64];
	RECEIVE
	ld.relaxed.gpu.global.u32 %r3, [%rd1];
	st.global.v2.u32 [%rd1+128], {%r2, %r3};
	ret;
}
`
	for _, c := range []struct {
		send, receive string
		stale         bool
	}{
		{"fence.sc.cluster;", "fence.sc.cluster;", false}, {"fence.sc.gpu;", "fence.sc.cluster;", false}, {"fence.acq_rel.cluster;", "fence.acq_rel.cluster;", false},
		{"fence.sc.cta;", "fence.sc.cluster;", true}, {"fence.sc.cluster;", "fence.sc.cta;", true}, {"fence.acq_rel.cluster;", "fence.acq_rel.cta;", true},
	} {
		stale, seen := false, false
		for seed := range uint64(400) {
			out, err := clusterRun(t, strings.NewReplacer("SEND", c.send, "RECEIVE", c.receive).Replace(text), 2, 1, Config{Seed: seed, Weak: true})
			require.NoError(t, err)
			seen = seen || out[128] == 1
			stale = stale || out[128] == 1 && out[132] == 0
		}
		require.True(t, seen)
		require.Equal(t, c.stale, stale, "%s %s", c.send, c.receive)
	}
}

// TestClusterOfOne: a kernel that does not say is in clusters of a block.
func TestClusterOfOne(t *testing.T) {
	for _, weak := range []bool{false, true} {
		out, err := clusterRun(t, header+`
.visible .entry k(.param .u64 out) {
	.reg .b64 %rd<4>; .reg .b32 %r<8>; .reg .pred %p;
	.shared .align 4 .b8 box[4];
	ld.param.u64 %rd1, [out];
	mov.u32 %r1, %tid.x;
	setp.eq.u32 %p, %r1, 0;
	mov.u32 %r2, box;
	mapa.shared::cluster.u32 %r3, %r2, 0;
	@%p st.shared::cluster.u32 [%r3], 5;
	barrier.cluster.arrive;
	barrier.cluster.wait;
	ld.shared.u32 %r4, [box];
	@!%p st.global.u32 [%rd1], %r4;
	ret;
}
`, 1, 2, Config{Weak: weak})
		require.NoError(t, err)
		require.Equal(t, byte(5), out[0])
	}
}

// TestClusterRefused: what of clusters the machine has not, when it is parsed and when it is launched.
func TestClusterRefused(t *testing.T) {
	for directive, want := range map[string]error{
		".reqnctapercluster 2, 2": ErrUnsupported, ".reqnctapercluster 2, 1, 2": ErrUnsupported, ".reqnctapercluster 17": ErrUnsupported, ".reqnctapercluster 0": ErrSyntax,
		".reqnctapercluster": ErrSyntax, ".explicitcluster": ErrUnsupported, ".explicitcluster .maxclusterrank 8": ErrUnsupported,
	} {
		_, err := Parse("some.ptx", []byte(header+".visible .entry k()\n"+directive+"\n{ ret; }"))
		require.ErrorIs(t, err, want, directive)
		e, ok := errors.AsType[*Error](err)
		require.True(t, ok)
		if want == ErrUnsupported {
			require.Equal(t, 5, e.Line, directive)
		}
	}
	for _, line := range []string{
		"bar.cluster.arrive;", "barrier.cluster.sync;", "barrier.cluster.arrive.acquire;", "barrier.cluster.wait.release;", "barrier.cluster.wait.relaxed;",
		"mapa.u64 %rd1, %rd2, 1;", "mapa.shared::cluster.b32 %r1, %r2, 1;", "mov.pred %p1, %cluster_ctarank;", "mov.u32 %r1, %is_explicit_cluster;", "st.async.shared::cluster.u32 [%r1], %r2;",
	} {
		_, err := Parse("some.ptx", []byte(header+entry+"  "+line+"\nret;\n}\n"))
		require.ErrorIs(t, err, ErrUnsupported, line)
	}
	m := New(NewMemory(), Config{})
	m.Limit(1, Limits{Multiprocessors: 2, Blocks: 1})
	m.Limit(2, Limits{Multiprocessors: 2, Blocks: 2, Threads: 64, Shared: 64})
	free, two, four := m.NewStream(0), m.NewStream(1), m.NewStream(2)
	large := parse(t, "some.ptx", header+".shared .b8 x[16777216]; .shared .b8 y[1]; .visible .entry k() .reqnctapercluster 2 { ret; }").Function("k")
	require.ErrorContains(t, free.Launch(Launch{Function: large, Grid: [3]uint32{2}}), "blocks with 16777217 bytes of shared memory")
	launch := func(s *Stream, directive string, grid, threads uint32) error {
		f := parse(t, "some.ptx", header+".visible .entry k() "+directive+" { .shared .align 4 .b8 x[32]; ret; }").Function("k")
		return s.Launch(Launch{Function: f, Grid: [3]uint32{grid}, Block: [3]uint32{threads}})
	}
	require.NoError(t, launch(free, ".reqnctapercluster 4", 8, 1))
	require.ErrorIs(t, launch(free, ".reqnctapercluster 4", 6, 1), ErrUnsupported, "no whole clusters")
	require.ErrorIs(t, launch(free, ".reqnctapercluster 4", 0, 1), ErrUnsupported, "one block")
	require.NoError(t, launch(two, ".reqnctapercluster 2", 4, 1))
	require.ErrorContains(t, launch(two, ".reqnctapercluster 3", 3, 1), "no room for a cluster of 3 blocks")
	require.NoError(t, launch(four, ".reqnctapercluster 4", 4, 32))
	require.ErrorIs(t, launch(four, ".reqnctapercluster 4", 4, 33), ErrUnsupported)
	require.ErrorContains(t, launch(four, ".reqnctapercluster 4", 4, 65), "no multiprocessor of device 2 has room")
	require.NoError(t, m.Run())
}

// TestClusterRoom: the blocks of a cluster get room together, breadth first, or none of them does: else those of two clusters would wait for each other's.
func TestClusterRoom(t *testing.T) {
	f := parse(t, "ring.ptx", clusterRing).Function("k")
	for _, limits := range []Limits{{Multiprocessors: 3, Blocks: 1}, {Multiprocessors: 1, Blocks: 4}, {Multiprocessors: 2, Blocks: 2}, {Multiprocessors: 5, Blocks: 1, Last: func(t Thread) bool { return t.Block[0] == 1 }}} {
		t.Run(fmt.Sprintf("%d of %d", limits.Multiprocessors, limits.Blocks), func(t *testing.T) {
			eachSeed(t, seedsOr(20, 100), func(seed uint64) error {
				memory, out := NewMemory(), aligned(128)
				require.NoError(t, memory.Map(0x10000, out))
				var order []uint32 // of the clusters, as they begin
				m := New(memory, Config{Seed: seed, Weak: seed%2 == 0, MaxSteps: 1 << 20, Trace: func(t Thread, _ Place) {
					if c := t.Block[0] / 3; !slices.Contains(order, c) {
						order = append(order, c)
					}
				}})
				m.Limit(0, limits)
				s := m.NewStream(0)
				require.NoError(t, s.Launch(Launch{Function: f, Grid: [3]uint32{12}, Block: [3]uint32{2}, Params: [][]byte{u64(0x10000)}}))
				_, err := m.Step(1)
				require.NoError(t, err)
				begun := 0
				for i, b := range s.active[0].blocks() {
					if b.waits() {
						continue
					}
					begun++
					require.False(t, s.active[0].blocks()[i/3*3].waits())
					for _, o := range b.group() {
						require.False(t, o.waits())
						if limits.Multiprocessors > 1 && o.rank == b.rank+1 {
							require.NotEqual(t, b.on, o.on)
						}
					}
				}
				require.Equal(t, 3, begun)
				if err := m.Run(); err != nil {
					return err
				}
				for i := range 12 {
					require.Equal(t, byte([]int{3, 1, 2}[i%3]), out[4*i])
				}
				require.Len(t, order, 4)
				if limits.Last != nil {
					require.Equal(t, uint32(0), order[3])
				}
				require.Empty(t, m.floors[0].waiting)
				for _, p := range m.floors[0].processors {
					require.Zero(t, p)
				}
				return nil
			})
		})
	}
}
