// Package nvshmem calls NVIDIA's OpenSHMEM, libnvshmem_host.so.3, which it finds and loads when [Load] is called: building
// needs no headers and no library. It has the few functions that this module uses, with the structs and constants of the
// headers of NVSHMEM 3.4.5 that go with them. Only the host library is used, never the device library.
//
// # It can end the process
//
// NVSHMEM answers many errors with exit(-1), which no deferred function and no recover sees: an error of the CUDA runtime inside it, a call before
// the library is started, an unexpected argument, a failure in [Library.Finalize]. So the methods check their arguments, and their callers must make
// sure that the library is started and that what they name exists. A program that must not end tries the start in another process first.
//
// # What a call needs
//
// NVSHMEM takes the GPU from the context that is current on the calling OS thread. So the goroutine of every call except
// [Library.Version] must be locked to its thread, with the GPU's primary context current: (*cuda.Device).WithContext does
// both. The library has one state for the whole process, which is one processing element (PE), and does one call at a time.
//
// # Waits
//
// Starting, [Library.Align], registering, splitting teams and finalizing wait inside NVSHMEM until every PE has come, for ever if one never does, and
// a thread that waits there cannot be stopped. [Bound] bounds the caller's wait.
//
// # Environment
//
// Settings for which no function has an argument are in the environment, which NVSHMEM reads once, at its first start: see [Environment]. Load sets
// them.
//
// # What it may know
//
// This package imports the loader of native libraries and the shared errors, but no devices, groups or backends.
package nvshmem
