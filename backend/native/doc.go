// Package native is the backend for GPUs of one NVLink or PCIe domain, through the CUDA driver alone: memory is created with
// the driver's virtual memory management, passed to the peers as an open file, and mapped by all of them.
//
// # Memory
//
// Allocate creates physical memory that can be given to other processes, maps it at an address of its own and fills it with zeros before any peer can
// reach it. Sizes are rounded up to the granularity that the driver recommends, usually 2 MiB; all ranks use the largest that any of them needs.
// Register adopts memory that the caller allocated: memory of cuMemCreate, whose handle is retained, or memory of cuMemAlloc (cudaMalloc), through
// legacy IPC handles.
//
// # Rendezvous
//
// The ranks first tell each other what they bring; a rank that cannot export its memory says so there. Then every rank sends its file
// to the others, and maps all ranks' memory side by side in one range of addresses, which is also the contiguous view. Files and
// imported handles are closed at once: the mapping alone keeps the memory. Ranks may be processes, or goroutines
// of one process, or both. Between hosts the same is done with fabric handles, where creating memory with them really works.
//
// # Multicast
//
// The policy is "auto", "on" or "off". When it is off, or when it is "auto" and the environment switches multicast off for NCCL, NVSHMEM or PyTorch,
// the driver's multicast functions are not even looked up. Otherwise the ranks together make one multicast object for each window for which they
// enable multicast, and free it with the window. Steps that the driver refuses as not ready are tried again a few times. After any other failure all
// ranks lose the capability, with the reason. With "on", opening fails if a GPU or a rank cannot have multicast.
//
// # Devices
//
// A device is known by its UUID; ordinals mean nothing to another process. Two ranks on one device are an error on every
// rank, unless all of them allow it: kernels that wait for each other may then not run at the same time.
//
// The package imports the CUDA device and the group. It loads the driver when a backend is probed or opened, and not before.
package native
