// Package nccl is the backend over NVIDIA's collective communication library: memory becomes symmetric as windows of an NCCL
// communicator, and NCCL's own collectives work on it.
//
// # The communicator
//
// The ranks of the group make one communicator, whose unique id travels through the group. It does not block: every call is begun and then polled,
// until it ends, the context ends, a member of the group is lost, or Options.KernelTimeout has passed. A rank on which a call has failed tells the others
// through the group's store, where they look after a tenth of a second, so that they give the call up too. A communicator with a call that did not end
// can only be aborted, which happens when nothing uses its windows any more. What such a call makes late, a communicator or a window, is ended. Memory
// that it was given is kept when it is released, and freed when the call has ended or the communicator was aborted. Close waits for that for at most 5
// seconds; if a call has still not ended, that is an error, and what it was given stays. Memory with a window that could not be removed is kept until its
// communicator is no more, which is aborted then and not destroyed. A sub-group that has all of its parent's ranks splits the parent's communicator, unless
// some rank is in another call of it, which another rank may make on the other side of the split; any other makes one of its own. A communicator that the caller made (Options.Comm) is used and never ended.
//
// NCCL does not release all memory of a communicator that is destroyed. So a sub-group on its parent's device that is closed leaves its
// communicators to the next one of the same ranks, those of NCCL's own all-reduce among them, with no window. The ranks agree before one is
// kept, used again or ended. It must be sound on all of them: nothing has failed on it, nobody has aborted it, no rank is lost, NCCL
// reports no error, and the caller has not taken its handle (Backend.Comm). If its trial fails all the same, another one is made.
//
// A rank keeps those of at most 8 groups, with the memory, threads and descriptors that NCCL has for each. To keep one more, it destroys
// the oldest whose ranks all take part in the closing; if there is none, it destroys the new one. All end with the backend that has no
// parent.
//
// # Memory
//
// Allocate takes memory from ncclMemAlloc and fills it with zeros; Register adopts memory that was created by cuMemCreate. A
// window is registered at the first rendezvous, for the whole allocation, once however many parts of it are adopted: NCCL's
// address space is not released in parts. What NCCL would not survive, or would accept in silence, is checked before: alignment to 4096
// bytes, memory without a handle, sizes that differ between ranks. Afterwards it is checked that NCCL has made a window at all.
//
// # Peer pointers
//
// From NCCL 2.29 on, a function returns them. Before, they are computed from the window's structure, whose first 32 bytes have been the
// same since 2.28; the result is tried once when the backend is opened. All ranks' copies lie one stride apart in one range
// of addresses, which is the contiguous view. NCCL 2.27 has windows without addresses, and cannot serve.
//
// # Several hosts
//
// The addresses end at the host, as NCCL sees it (NCCL_HOSTID takes the place of its name), or at the LSA team that NCCL makes of it
// (NCCL_LSA_TEAM_SIZE). Windows of several teams are made by NCCL 2.28.7 and 2.28.9 without more, by 2.28.3 on one host only, and from 2.29.2 on where
// GPUs send over the network of themselves. So addresses come from none of these: where there are several teams, windows are registered with a communicator of
// each team, split from that of all ranks. Hosts that are one team, as in a domain of NVLink, have windows of all ranks, from 2.28.7 on.
//
// Capabilities says how many peers have addresses (PointerPeers). What needs the address of another rank is ErrNotReachable.
//
// Puts, signals, waits and barriers reach ranks without addresses by NCCL's call ncclPutSignal, from 2.29.2 on, where NCCL says that it can between them: it
// needs GIN, GPUs that send over the network of themselves, and from 2.32 on sockets do (NCCL_GIN_TYPE=2), where the
// host has GDRCopy (seen with 2.32.3: "rma_socket requires GDRCopy"). Memory is then registered once more, with a
// communicator of all ranks. A put is made when the backend is opened, to try it. Where NCCL cannot, these operations are ErrNotReachable between hosts, with what is missing and
// what to do. Gets always are, as NCCL has no call for them. A put ends when its data has arrived; one that does not ends with an error after
// Options.KernelTimeout, or when a rank is lost. After a put that NCCL has refused, or an error that NCCL reports, the puts' communicator is given up on all
// ranks that hear of it: puts and signals between hosts are errors from then on, and waits for signals that have not come end, until the rank is opened again.
//
// The algorithm "nccl" of all-reduce and of other collectives reaches all ranks, and is what [github.com/symmem/symmem/kernels.Auto] takes there. Of an
// all-to-all with counts on the device NCCL has none: between hosts it is made of puts ("transfers"). "hierarchical" is
// kernels inside the teams and NCCL's collectives between them, on communicators of the ranks that have the same shard (ncclCommSplit): an all-reduce, broadcast, reduce, all-gather or
// reduce-scatter, by its name, and what Auto takes of large all-reduces, and of the last two for shares that are not of one length. An all-to-all has it by its name too: NCCL's sends and receives (ncclSend, ncclRecv), in groups,
// between ranks that exchange blocks for their teams, or, of long blocks, between all of different teams. "nccl_symmetric"
// and multicast are for one team. A communicator that the caller gives must have all ranks, and is split too.
//
// All plans of one of these algorithms have one communicator (of "hierarchical", one for each shard, and one for the long blocks of all-to-alls), on which NCCL tells what the ranks enqueue apart by its order alone. So their runs come in
// the same order on every rank, whatever streams they are on. NCCL does not notice if they do not, unless lengths or kinds differ.
//
// # Multicast
//
// Where the policy is off, NCCL_NVLS_ENABLE is set to 0 in this process before the library is loaded. Before 2.32 NCCL has no other switch for NVLink
// multicast; from 2.32 on it is also switched off for each communicator. The function that returns multicast addresses is not looked up. Where
// multicast may be used, NCCL says whether it has it, and makes one multicast object for all windows of the communicator when the ranks first enable
// it for one. If NCCL fails in that on one rank, the others give up the communicator.
//
// # NCCL's own all-reduce
//
// The algorithms "nccl" and "nccl_symmetric" run ncclAllReduce on the plan's stream, each on a communicator of its own that is
// split from the first when it is first asked for. They differ in what NCCL knows of the memory: on the second, the tensors'
// allocations are registered again, as symmetric windows. One communicator could not have both, because NCCL takes its symmetric kernels
// whenever it can, also where they are slower. These two block, because NCCL starts a thread for each collective of one that does not.
//
// When a member of the group is lost, or NCCL reports an error, they are aborted, so that their kernels end. Then every stream that has a run on such
// a communicator, and was not synchronized after it, reports why, once; so does each on which a graph with one is launched. The next plan makes
// another communicator, if all ranks are there. Before 2.29.7 NCCL's symmetric kernels cannot be aborted and go on waiting: the work on the GPU then
// ends with the process.
//
// # Devices
//
// Every rank has a GPU of its own. From NCCL 2.30.3 on, ranks that all allow it (Options.ShareDevice) may share one;
// NCCL_MULTI_RANK_GPU_ENABLE is then set to 1 in this process, unless it is set. They have no multicast, and NCCL itself gives up
// what needs a GPU for each rank.
//
// The package imports the CUDA device and the group. It loads NCCL when a backend is probed or opened, and not before.
package nccl
