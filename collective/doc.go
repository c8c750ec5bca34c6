// Package collective makes a kernel into a collective. Who writes one brings the kernel, for GPUs, for the CPU, or as puts and signals
// where ranks have no pointers to each other. The package does what every collective needs and none should write again.
//
//	plan, err := collective.New(ctx, t.Memory(), collective.Spec{
//		Name:      "broadcast",
//		Tensors:   []tensor.SymmetricTensor{t},
//		Workspace: t.Bytes(),
//		CUDA: &collective.Kernel{
//			Image: ptx, Function: "broadcast", Blocks: 32, Threads: 512,
//			Params: func(a *collective.Addresses) []any { return []any{a.Comm(), t.Ptr(), t.Bytes()} },
//		},
//	})
//	...
//	err = plan.Run(stream)
//
// [New] is collective. The ranks agree on everything in the [Spec], on the memory that the kernel works on, and on how large a grid is, or all
// get the same error. The plan has workspace of its own, at the same place on every rank and filled with zeros, and the kernel the addresses
// of all ranks' workspaces and tensors.
//
// [Plan.Run] enqueues one run, or records it in a graph, without allocating and without any exchange between the ranks. Runs of one plan
// follow each other; a second stream is ErrTwoStreams. Every wait in a kernel is bounded by the memory's kernel timeout, and ends when a rank
// is lost. The stream's Synchronize returns the error then, ErrPeerLost or os.ErrDeadlineExceeded, and so does every later Run. [Plan.Close]
// is collective: the workspace is given away only when no rank works with it any more.
//
// # Kernels
//
// A CUDA kernel is PTX, a cubin or a fat binary, from any compiler, with any number of parameters. The header symmem.cuh, in
// kernels/cuda, has what it needs to talk to its peers: epochs, bounded waits, puts, signals and barriers, on the parameter that
// [Addresses.Comm] returns. A kernel for the CPU is a Go function that has the same by [HostRun].
//
// A kernel that waits for its peers keeps its place on the device until they come. So a plan launches no more blocks than leave room for a
// second plan like it, and for signals and other work, on every rank's device; see [Kernel] and [RoomError].
//
// A [Program] is a run of several steps, which may put data to peers by transfers. It needs no pointers to peers, and so works on every
// backend.
//
// # Errors
//
// The conditions are those of the module's root package. Calls that are collective may return the errors of collective calls that package
// group lists; every rank gets the same conditions.
package collective
