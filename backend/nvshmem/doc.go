// Package nvshmem is the backend for GPUs through NVIDIA's OpenSHMEM: memory of its symmetric heap, of which every rank has
// addresses for all ranks' copies.
//
// # It can end the process
//
// NVSHMEM answers many errors by ending the process, which no Go code can prevent: an error of the GPU that it meets in one of its calls, a failure
// in the middle of starting or finalizing, a rank that dies while the others are in one of its collective calls. This backend checks all arguments
// and asks all ranks before each of those calls, so that mistakes become errors and only the rest can end the process. [Preflight] tries the start in
// a process of its own; symmem doctor and symmem verify do so.
//
// # One rank a process
//
// The library has one state for a whole process, which is one processing element (PE): ranks that share a process are refused before it is loaded.
// The first group that is opened, usually the world, starts it, and its ranks are the PEs. Sub-groups share it. Closing the first group finalizes it,
// and it can be opened again. A second group that is not part of the first is refused while the first is open.
//
// # Memory
//
// All calls that change the heap are collective over all PEs, and NVSHMEM checks nothing. So a group of all PEs agrees before each of
// them: on what is done, on the order in which the groups of all PEs do it (PE 0 deals out turns), and on what goes back to the heap.
// Memory that was released is kept until all PEs have released it, and goes back at the next agreement. A group of only some PEs takes its memory from an arena, a piece of the heap that is allocated when the library
// is started ([Options].Arena, SYMMEM_NVSHMEM_ARENA); it goes on working when other PEs have died.
//
// The heap grows in chunks and never shrinks. NVSHMEM tears it down when it cannot grow. So every rank tells the others how much memory its GPU has
// left, and what might not fit is ErrNoMemory on every rank before NVSHMEM is called.
//
// Register adopts memory of cuMemCreate, in groups of all PEs. NVSHMEM maps it a second time, inside the heap: peers use that address, and the owner
// the original one. Memory of cuMemAlloc (cudaMalloc) cannot be adopted.
//
// # Waits and lost ranks
//
// NVSHMEM's own waits are not bounded. So no call that waits is made before all ranks have said that they take part, and each has a bound here. When
// the bound is reached, or a rank dies meanwhile, the library is given up: its thread stays in the call, and every later use returns an error that
// says why. When a rank has died, no collective call of NVSHMEM is made any more: memory stays allocated until the process ends, with a warning,
// Close returns, and the survivors go on in groups of their own over the arena.
//
// # What is not NVSHMEM's
//
// Put, get, signal, wait and barrier are those of package memory, over peer pointers. NVSHMEM's own put on a stream is the same copy of the driver's
// and costs more to enqueue. Its wait is a kernel without a bound. Its barrier is faster, but a lost rank would block it for ever. Its reductions are
// an algorithm of package kernels ("nvshmem"), for comparison: they are not bounded either, so a stream on which one waits for a lost rank never
// ends.
//
// The package imports the CUDA device and the group. It loads the driver and the library when a backend is probed or opened, and
// not before.
package nvshmem
