// Package nixl is the backend that moves data by one-sided transfers of NVIDIA's inference transfer library, over UCX:
// between hosts through network cards or TCP, on one host through NVLink or the kernel. What other backends do by load and store, this one does
// by transfers: put and get, prepared transfers, and signals, waits and barriers. Only ranks that can share memory have pointers to each other.
//
// # Devices
//
// On a machine with NVIDIA GPUs the memory is a GPU's. Without a driver, or with the device "host", it is the CPU's. All ranks must have the same
// kind. Whether UCX can reach the memory of GPUs is tried once in a process with one byte, because a UCX without CUDA would take it for memory of the
// host.
//
// # Memory
//
// An allocation is registered with the rank's agent when it is made, so that it can be the local side of transfers, and stays so until it is
// released. At rendezvous the ranks exchange, in one all-gather, what they need to reach it. An agent cannot forget a part of what it knows about
// another. So each registration has a number of its own, and stale knowledge about memory that is gone is never found.
//
// Memory of a GPU that is shared with no other is allocated in whole blocks of 2 MiB, and memory that is adopted must be in an allocation of at least one: UCX
// maps pieces of one block badly. Each rank moves some bytes of each allocation when it meets, so that UCX has mapped it before a
// stream waits for a transfer; but not to and from ranks that have mapped it themselves.
//
// # Islands
//
// Ranks on one island ([group.Islands]) map each other's memory: that of the CPU as those of backend host do, and that of GPUs as those of backend
// native do, which serve them. Puts, gets and signals between them are copies and stores, and where all ranks are on one island so is everything, in
// kernels too. The library moves what leaves the island, and memory that some rank has adopted and cannot share.
//
// Whether GPUs share memory is found by trying when the backend is opened. If one rank of an island cannot map another's memory, none does, and the
// capabilities of all ranks say why. From then on memory that cannot be mapped is an error of the rendezvous, on all ranks.
//
// # Network
//
// UCX neither authenticates nor encrypts. The ranks of one host use no network: they reach each other by memory of the host, by the kernel's copies
// between processes and by CUDA IPC. Where that is not enough for UCX, as between containers, they use loopback. Between hosts a rank opens the
// interface that leads to the rendezvous service and the RDMA adapter behind it, or the devices that are named; a warning in the log says who can
// reach them, or the backend refuses, as [Options] says.
//
// # Transfers
//
// A transfer is one request of the library for all its blocks, prepared once. It is work of the CPU that a stream waits for ([device.HostWork]): when
// the stream comes to it, the request is posted, and the stream goes on when it has ended, which means on the peer too. No goroutine blocks
// meanwhile. A run is bounded by KernelTimeout and ends when the peer is lost. A request that was given up while the library still works on it is
// remembered, and no memory is released before it has ended.
//
// # Flags
//
// The words that signals are made of are memory of the host, on whichever device. Ranks with GPUs on one host share it, where they can
// pass files to each other, and store there; the others register it, and the library writes eight bytes in some microseconds.
//
// # Imports
//
// The package imports backends host and native, both devices, the group, and the binding of the library, which is loaded when a backend is probed or opened.
package nixl
