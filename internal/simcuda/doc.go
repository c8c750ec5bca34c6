// Package simcuda simulates the GPUs of a host and their driver: it fills the driver's table of internal/cuda, so that device/cuda, a backend and all
// kernels run where there is no GPU. Kernels run as they are in the module's PTX, by package ptxvm.
//
//	machine, err := simcuda.New(simcuda.Config{GPUs: 4, Multicast: true, Seed: 1})
//	backend := &native.Options{Driver: machine.Driver(), Multicast: "on"}
//
// Package simlib has libraries on it, for backends that need one. It is a tool for tests and for teaching. No backend chooses it by itself, and only the command symmem carries it.
//
// # What it models
//
// Memory of cuMemCreate with its handles, reserved addresses, mappings and rights of access, exported as descriptors of files; memory of cuMemAlloc,
// with IPC handles; memory of the host; primary contexts and what is current on a thread; streams, events, captures, graphs with kernels, copies,
// memory operations, host functions and graphs in them; modules and their kernels; peer access; multicast objects. Streams run beside the
// program, all of them and all GPUs interleaved by one goroutine, which pauses while all kernels only wait.
//
// An access of a kernel goes through the mappings of its context. One without right, to what is no longer mapped, or by an ordinary instruction to a
// multicast address ends the context with CUDA_ERROR_ILLEGAL_ADDRESS, and every later call says so.
//
// A multiprocessor has room for so many blocks and threads, at 64 registers a thread, and a block begins when there is room for it. Blocks that wait for
// others keep their place.
//
// Calls that free memory, and load and unload modules, wait for what the GPU has under way, as the driver's may.
//
// With Config.Weak memory is as weak as PTX's memory consistency model has it, and what the driver's calls order is ordered, and nothing else: a race is a failure of the
// kernel or the copy that came second. Without it an access takes place when its instruction is executed.
//
// Wrong use that a real driver does not survive, or whose outcome it does not define, is noted: see [Machine.Violations].
//
// # What it does not model
//
// Time; fabric handles; memory pools, managed memory, textures, cubins; legacy default streams.
//
// With several processes, each has a machine of its own with the same Config. Memory that they pass to each other, as descriptors or IPC handles, is
// shared, and strong accesses to it are atomic. So are multicast objects: what others add and bind, kernels find without a call of the driver.
//
// The comments name the source of each rule: the CUDA driver API documentation by section, the CUDA C++ programming guide, or what was seen on hardware.
package simcuda

// Stats is what a machine has run.
type Stats struct {
	Launches     map[string]int // of kernels, by name
	Instructions uint64         // that their threads executed
	Copies       int            // copies and fills
}
