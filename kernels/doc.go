// Package kernels does the work of collectives over symmetric tensors: all-reduce, in the forms that are fastest at each size, and
// broadcast, reduce, all-gather, reduce-scatter and all-to-all, each by kernels and as transfers.
//
// A [Plan] is made once, collectively, and run many times: [Plan.Run] is one launch on a stream, without allocation and
// without any exchange between hosts, and may be captured in a graph. What changes from run to run (the epoch that tells a
// run's flags from the last one's) is advanced by the kernel itself.
//
// Every rank gets the same bits: elements are combined in rank order, 0 first, by all forms of this package but the multimem ones and Hierarchical, and 16-bit floats are accumulated in float32
// and rounded once at the end. Only with OneShotMultimem, which Auto does not take for it, and where each rank loads sums from the switch by itself, in whatever order that adds, may the bits of an all-reduce differ from rank to rank. Which bits a NaN
// has each kind of device decides.
//
// # Forms
//
// One-shot: every rank copies its input to its own message buffer and tells the others; then each rank reads all buffers and
// computes the whole result. One exchange, and W times the data read. Two-shot: every rank computes one part of the result
// from all inputs and writes it to every output, between two exchanges, and 2/W of that data moved. [Auto] takes one-shot up
// to a size and two-shot above.
//
// Transfers: the same two ways without a pointer to a peer. What a rank has for another is put into that one's part of the
// workspace, lap by lap, by transfers that were prepared with the plan, and each rank reduces what has come. Auto takes it where a
// peer's memory has no address in this process, and for the largest messages between GPUs, which copy engines move faster than kernels do.
// A run of it is more than one launch: it enqueues some ten operations a lap. Between GPUs these cannot be held back: when a rank has waited in vain, what it has
// for a peer is still written to the peer's output, though that may not have come to the run, and what runs enqueued behind that one have is put into its workspace: when a plan has
// failed on one rank, use no result of runs that were under way on another. All other forms leave such a peer's tensors as they are.
//
// Hierarchical: where only ranks of one host, an island, have pointers to each other's memory. Each sums up a part of the inputs of its island by these, ranks of
// different islands exchange the sums by transfers, and each stores the result to the outputs of its island. Every rank gets the same bits, but the order is another one: the ranks of
// an island first, in their order, and then the islands, in that of their lowest ranks; what an island has summed up is rounded to the dtype, but for averages of f16. Auto takes it for
// messages of 64 KiB and more where there are several islands, and one of more than one rank, unless RankOrder is asked for. Islands need not be equal, but the smallest says how many
// ranks of each share the work.
//
// Between islands of GPUs this form goes by NCCL, on memory of backend nccl: a kernel sums up a shard on each rank of an island, or gets it from there, NCCL's all-reduce, broadcast, reduce or
// reduce-scatter carries it between the ranks that have it, and a kernel brings it to the island. Long shards go in laps: while NCCL carries one, kernels do the next and the one before. What an
// island has summed up is rounded to the dtype. The order is that of the islands, and reduce and reduce-scatter have the bits of the all-reduce: of two islands NCCL adds the sums up; of more it
// would do so in an order that it does not state, and only carries them, for kernels to combine. What becomes of a NaN in min and max is NCCL's between two islands. Averages are those of the
// islands' averages, of floats, each counted as often as its island has ranks. NCCL's own collectives know hosts and
// links too. Auto takes this form for an all-reduce between islands with as many ranks each, of 16 MiB and more for each rank of an island: over sockets, between pretended hosts, it took half the time. And it
// takes it for an all-gather and a reduce-scatter of shares that are not of one length, which NCCL has not, if Transfers cannot be had. All else is NCCL's own, and has this form by its name. An all-to-all has the form there too: what is for the own island a kernel loads, and what is for others goes as between islands of
// CPUs (below), by NCCL's sends and receives, all of a lap in one group; long blocks go straight beside that kernel. They end after the kernel timeout, also where a whole island does not come.
//
// NCCL tells what the ranks enqueue on a communicator apart by its order alone, and all plans of a form that it carries out, NCCL, NCCLSymmetric or this one between GPUs on memory of backend
// nccl, have one communicator. So every rank enqueues the runs of these plans, and launches the graphs that hold them, in the same order, on whatever streams and from whatever goroutines. In another
// order a run gets what belongs to another plan's, without an error, or waits until its kernel timeout. All other plans may be enqueued in another order on each rank.
//
// On memory of backend nixl puts go between islands of GPUs in NCCL's place, and a kernel combines what has come: the order is that of the islands for any number of them, alike in
// all-reduce, reduce and reduce-scatter. Dtypes, operations and averages are those that it has with NCCL, and an all-to-all goes likewise. Nobody has measured any of it, so that it comes by its name
// only, and Auto takes Transfers.
//
// Between islands of CPUs all-gather, broadcast, reduce and reduce-scatter have the form too. What a rank brings to all it stores to the outputs of its island, and puts to one rank of each other island, which
// stores it there; a broadcast is brought by the ranks of root's island, a shard each. What a rank gets reduced, one rank of each other island sums up there and puts to it. The bits are
// those of the all-reduce in this form. Auto takes them as it takes that, unless RankOrder is asked for.
//
// An all-to-all over islands: of blocks that are short, one rank of an island puts those together that are for one rank of another, which has them by one transfer. Longer ones go straight to where
// they are to be, as in Transfers, and of these Auto takes Transfers.
//
// The others than all-reduce, for small messages between GPUs: every rank pushes what others are to have to them, in lines that say by themselves
// whether they have come. Else a kernel waits until the inputs that it is to load are ready, loads them, and tells their ranks that it has, or waits until the outputs that it is to store to are
// free, and stores what its own rank has. That may be loaded before the others have begun: what another rank's work stores to an input is to be there, as after a signal that was waited for, when the run begins. By transfers, ranks put to each other's outputs once these may be written, and reductions get laps of the inputs
// put into the workspace, as all-reduce does. A large broadcast or reduce by transfers goes by way of all ranks, each of which has a part of it.
//
// On the host device, small messages go through slots of the workspace, so that a rank need not wait until others have loaded them. Of larger ones every rank does a part of the work, whoever is
// root: in a broadcast root stores one part of W to each other rank, which loads the rest, and in a reduce each rank combines a part of all inputs and stores it to root.
//
// [NewAllReduceRMSNorm] is an all-reduce with the residual and norm of a transformer behind it, in one kernel. [QuantizedInt8] is an all-reduce that
// is lossy, for who asks for it: see [QuantizedBytes].
//
// A list of tensors ([NewAllReduceMany], [NewAllGatherMany], [NewReduceScatterMany], [NewBroadcastMany]) is one message of all their vectors, in the same ways: one launch, and one exchange. What they do
// between GPUs they do by lines that are pushed, for small lists, or by loads between two barriers.
// On CUDA a list is fastest where every tensor begins at a multiple of 16 bytes and is a multiple of 16 long, for small all-reduces of f16, bf16 and f32. What only moves is fastest where inputs and outputs lie alike modulo 16.
//
// This package knows tensors, memory and devices: pointers, not backends. Every backend whose tensors have peer pointers runs every
// kernel, and every backend that has transfers runs Transfers.
package kernels
