// Package simlib simulates the libraries that backends work with, on the simulated GPUs of package simcuda: NCCL and NVSHMEM, as far as backends nccl
// and nvshmem call them. All ranks are in one process. Windows and heaps are memory of the simulated driver, mapped for each rank at addresses of
// its own, so that the module's kernels run on them as on a real GPU.
//
//	machine, err := simcuda.New(simcuda.Config{GPUs: 4, Multicast: true, Seed: 1})
//	library := simlib.NewNCCL(machine)
//	backend := &nccl.Options{Driver: machine.Driver(), Functions: library.Functions(), Multicast: "on"}
//
// What ranks of NCCL send each other in one group goes on together when the group ends; its collectives go before. A message ends when it was received.
//
// What a library does on a stream by kernels of its own, such as ncclAllReduce, is work that begins when its turn on the stream has come, waits for the
// other ranks', and combines what they bring. It takes no room on a multiprocessor, and adds with one rounding.
//
// Wrong use that a real library does not survive, or answers with memory that is gone, is noted with the machine: see [simcuda.Machine.Violations].
//
// It does not have: device communicators of NCCL, several ranks on one GPU, failures of the library's own; what NVSHMEM has for
// networks, and its put and get. NCCL makes one multicast object for all windows of a communicator; here each window has its own.
package simlib
