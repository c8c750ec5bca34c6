// Package nccl calls NVIDIA's collective communication library, libnccl.so.2, which it finds and loads when [Load] is called:
// building needs no headers and no library. It has the functions that this module uses, with the types, constants and layouts
// of nccl.h that go with them, and on top of them communicators ([Comm]), windows ([Window]) and device communicators.
//
// # Versions
//
// Every function is looked up separately. Those that every version since 2.23.4 has are required; any other is a capability, and [Library.Require]
// says which version has it. Structures whose layout depends on the version are decoded for known versions, and are ErrUnsupported for others.
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
// A communicator that does not block ([Config].NonBlocking) is polled until what was begun is done. When the context ends first, the error is a
// [*StuckError], and the communicator can only be aborted, which ends its work and waits for its threads. With one that blocks, a thread that waits
// inside NCCL cannot be stopped: [Bound] bounds the caller's wait, the thread stays behind, and the process should end. Collectives enqueue work and
// return at once, unless the driver's queue is full or NCCL has to make its connections first. For each collective of a communicator that does not
// block, NCCL starts a thread.
//
// # The library's log
//
// NCCL writes its log where its own variables say. If somebody has set them, it is left alone. Otherwise, for a logger that takes warnings, it goes
// to a file in memory, and [Library.Log] passes what is new to the logger.
//
// # Multicast
//
// Before NCCL 2.32, no argument of NCCL's functions switches its use of NVLink multicast off, only the variable NCCL_NVLS_ENABLE, which NCCL
// reads at its first use. Load sets it to 0 in the environment of this process unless [Options].Multicast is set. A communicator of
// 2.32 is told by [Config].NoMulticast too, which counts even if NCCL was used in the process before.
//
// # What it may know
//
// This package imports the loader of native libraries and the shared errors, but no devices, groups or backends.
package nccl
