// Package nccl calls NVIDIA's collective communication library, libnccl.so.2, which it finds and loads when [Load] is called:
// building needs no headers and no library. It has the few functions that this module uses, with the types, constants and
// layouts of nccl.h that go with them.
//
// # What a call needs
//
// NCCL takes the GPU from the context that is current on the calling OS thread. So the goroutine of every call except
// [Library.Version] must be locked to its thread, with the GPU's primary context current: (*cuda.Device).WithContext does both.
// A loop of calls may share one such section. Only a primary context will do, because NCCL saves and restores it by the number
// of the GPU.
//
// # Waits
//
// Making and destroying a communicator waits inside of NCCL until every rank has come, for ever if one never does, and a thread
// that is in there cannot be called back. [Bound] puts a bound on the caller's wait: the thread stays behind, and the process
// had better end. Collectives enqueue work and return at once, but for a full queue of the driver.
//
// # Multicast
//
// No argument of NCCL's functions switches its use of NVLink multicast off, only the variable NCCL_NVLS_ENABLE, which NCCL
// reads at its first use. Load sets it to 0 in the environment of this process unless [Options].Multicast is set.
//
// # What it may know
//
// This package knows the loader of native libraries and the shared errors. It knows nothing of devices, groups or backends.
package nccl
