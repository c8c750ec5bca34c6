// Package ptxvm is a machine for NVIDIA's PTX in pure Go: it parses modules, and runs their kernels on a simulated GPU, or several that share
// an address space. It exists so that kernels can be run, and attacked, where there is no GPU.
//
//	module, err := ptxvm.Parse("signals.ptx", text)
//	memory := ptxvm.NewMemory()
//	err = memory.Map(0x100000000, bytes) // what kernels can reach
//	m := ptxvm.New(memory, ptxvm.Config{Seed: 1})
//	s := m.NewStream(0)                  // of device 0
//	err = s.Launch(ptxvm.Launch{Function: module.Function("symmem_barrier"), Grid: …, Block: …, Params: [][]byte{params}})
//	err = m.Run()                        // until every stream is empty
//
// # What runs
//
// A machine runs all threads of all launches that have begun, interleaved instruction by instruction as its [Chooser] decides. With the same
// seed and the same launches a run is the same, instruction by instruction. A [Schedule] decides which thread goes on in place of chance: [PCT], [Slow] for one
// rank or block, or [Even], for which threads that only poll are as good as others. Threads have no warps but for shfl.sync; nothing relies on them
// running in step. All blocks of a launch are resident at the same time, if [Machine.Limit] does not say that the device has less room. Launches of one stream run one after the other. One that has
// Overlap may begin when every block of the launch before it has executed griddepcontrol.launch_dependents or has ended, and waits by
// griddepcontrol.wait. %globaltimer is the machine's own time: see [Config].
//
// The instructions are those that this module's kernels use, and their close relatives; [Parse] refuses any other with file, line and
// instruction. There is no local memory, no arithmetic on 16-bit floats, no asynchronous copies and no textures; variables in
// global memory may be declared but not used; generic addresses are global ones. Arithmetic has the bits of the device: IEEE with the rounding that the instruction names, canonical NaNs for float32,
// PTX's rules for minimum and maximum, for shifts beyond the width and for conversions out of range. rsqrt.approx, rcp.approx, sqrt.approx,
// ex2.approx and lg2.approx are exact to the last bit or two, which a device need not be.
//
// # Clusters
//
// A kernel with .reqnctapercluster runs in clusters of so many blocks along x, which get room together, or none of them does. mapa gives addresses of another
// block's shared memory, and accesses of .shared::cluster go there. barrier.cluster waits for all threads of the cluster that have not ended; it orders as a
// barrier of a block does, but that an arrival that is relaxed passes nothing on. To arrive twice, or to wait without having arrived, is an [ErrBarrier].
// Shared memory of a block of which no thread has executed anything yet, or all have ended, is not there: an [ErrAddress]. With weak memory it is a [Race]
// too if another block's access is not ordered before the end of the block. That a block has begun can be found missing only by a run in which it has not. An
// address of another block's shared memory means something to the block that has made it alone: the machine does not notice if it is passed on to another
// block. There are no clusters along y and z, none whose size the launch gives, no mapa of generic addresses, no mbarrier and no asynchronous accesses to
// other blocks, and nothing is known of which multiprocessors are near enough to each other for a cluster.
//
// # Hangs
//
// Kernels wait in loops, which nothing ends but what they wait for and the clock. With [Config].Hangs it is an error if nobody goes on but by the clock: each
// thread that could executes loads that give it, again and again, what they have given it before, so often that all paths of its loop have been taken, and what it
// polls is still what it saw; all others wait for these, at a barrier, of the block or the cluster, for room on the device or for the launch before. Then whatever they execute next,
// they see nothing new and store nothing. The error is a [Hang]: who waits, where, what is at the address that he polls, what he saw there, and who stored there
// last. It supposes that a kernel polls no more than [Config].Patience times before it does something else, and that nobody else stores to the memory.
//
// # Memory
//
// Without [Config].Weak memory is sequentially consistent: an access takes place when its instruction is executed. That is the fast mode.
// Strong accesses are then atomic for other goroutines and processes that share the bytes.
//
// With it, memory is as weak as PTX's memory consistency model lets it be, with these differences:
//
//   - A load never sees a store that is later in the order of execution. So load buffering, two threads that each see what the other stores
//     only afterwards, does not happen, though PTX allows it. Nor do values out of thin air, which PTX forbids too. To have it, a load
//     would have to wait for a store to come, and a whole run be taken back where none does. What that hides is a kernel that sends with relaxed
//     stores what others wait for before it has loaded what they then overwrite, and orders the two by nothing, not even by what it stores.
//   - A race is an error, not a value: two accesses that overlap, one of them a store, unordered by causality, and not both strong with
//     scopes that include each other's thread and of the same bytes. The [Race] names both places. It is found in any execution that
//     has it, whatever is read.
//   - The constant bank and proxies other than aliases of memory by way of a multicast address do not exist.
//
// Each location has all its messages, in coherence order. A strong load may read any message that is not before one that it must have
// seen, and a strong store may come before others in coherence order, where nothing forbids it. What must have been seen is known
// from vector clocks: accesses and observations of other threads that happened before, by release and acquire patterns, fences,
// barriers, and launches. The elements of a vector are accesses of their own. A release pattern and an acquire pattern synchronize if their
// scopes include each other's thread. fence.sc is ordered with every other that it is morally strong with.
// An access by way of a multicast address and one by way of the memory's own are ordered only if a fence.proxy.alias is between them, on the
// way from the one to the other, or the end of the launch of the one and the begin of that of the other, on the same stream. That holds for a load and a store after
// it too.
//
// The tests compare the outcomes of some ninety litmus tests, each found by trying everything that there is to choose, with those that the axioms of NVIDIA's published
// model allow: Lustig, Sahasrabuddhe and Giroux, "A Formal Analysis of the NVIDIA PTX Memory Consistency Model", ASPLOS 2019. They are the same but for load
// buffering. The model has no aliases and no accesses of several sizes; there what the PTX document says decides.
//
// A launch that begins is ordered behind all launches of its stream that have ended, as if all threads of those had ended, and all of its
// own began, with fence.acq_rel.sys: the end of a launch makes all that it has written visible to everybody, and a store of the next launch, relaxed
// too, tells so. griddepcontrol.wait does the same for the launch before, and [Stream.Wait] for those of another stream. When [Machine.Run] returns,
// everything is ordered before what comes next.
package ptxvm
