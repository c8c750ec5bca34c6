// symmem.cuh: what a CUDA kernel over symmetric memory needs, and nothing else: peers, epochs, bounded waits, put with signal, signals
// and waits, barriers of blocks across ranks.
//
// It needs no other header, C++17, and compute capability 8.0 or later; nvcc, NVRTC and clang compile it. A kernel takes a Comm, by value
// (const __grid_constant__ symmem::Comm c) or from memory of its device, and makes a Ranks of it in each thread:
//
//   extern "C" __global__ void sum(const __grid_constant__ symmem::Comm c, const float *x, float *y) {
//     symmem::Ranks<> ranks(c, symmem::kKindUser);
//     symmem::u32 epoch;
//     if (!ranks.begin(epoch)) return;                            // the job is over
//     ...                                                         // store to ranks.data(r) of peers
//     if (!ranks.barrier(0, epoch)) return;                       // all ranks' stores are visible, or a peer is lost
//     ...                                                         // load from ranks.data(ranks.rank())
//     ranks.close(epoch);
//   }
//
// examples/kernel/rmsnorm.cu is a whole one.
//
// Rules. The grid has one dimension, is the same on every rank and fits on the device at once, with room to spare for others: blocks
// wait for the blocks of the same number on all other ranks. Launches with one Comm run one after the other, in the same order on every
// rank, with the same grid. Where it says "block", all threads of the block call, from uniform control flow, as for __syncthreads.
//
// Waiting is bounded. It ends when what was waited for has come; or when a thread has waited Comm::timeout, when the host has set the stop
// word, or when another thread of this rank has given up, which the dead word tells. Then the thread that finds the dead word 0 sets it to
// 1 and writes the fault word, once; every wait of the launch says false, and later launches leave at once. A kernel that is told false returns
// without close. What it has written until then is in no defined state; the host tells the caller.
//
// Epochs count launches, in u32 modulo 2^32, and are compared in a circle: a is before b if (s32)(a - b) < 0. Nothing is ever reset, so a
// launch can be captured in a graph and replayed any number of times.
//
// Words of the memory model of PTX: "release" and "acquire" are at system scope, as are "relaxed" accesses; "weak" ones are plain. A store
// with release orders behind itself all that its thread has written, and all that other threads have written that its thread has synchronized with
// (by __syncthreads, say). An acquiring load that sees it, or what comes after it, orders all of that before what its thread does next.
//
// Addresses are u64, of global memory: (u64)pointer for memory of the device or of peers.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "symmem.cuh needs compute capability 8.0 or later"
#endif

#define SYMMEM_DEVICE __device__ __forceinline__

namespace symmem {

typedef unsigned int u32;
typedef unsigned long long u64;
typedef int s32;
static_assert(sizeof(u32) == 4 && sizeof(u64) == 8, "widths");

// kVersion is the version of Comm and of the layout of workspaces. It changes when either does.
enum : u32 { kVersion = 1 };

enum : u32 { kInline = 8 }; // ranks whose workspaces travel in Comm

// Comm is what the host tells a kernel of the ranks: 128 bytes, aligned to 8, little endian.
struct Comm {
  enum : u32 { kTableRow = 0 }; // where in the table the workspaces are: entries kTableRow * world and up

  u32 version;            // 0    kVersion
  u32 index;              // 4    a number of the host's, whose low 16 bits go into the fault word
  u32 rank;               // 8    of this device
  u32 world;              // 12   ranks, at least 1
  u64 timeout;            // 16   nanoseconds that a thread may wait
  u64 stop;               // 24   address of a u32 that the host makes other than 0 to end all waiting; 0: there is none
  u64 dead;               // 32   address of a u32 in memory of this device, 0 at first
  u64 fault;              // 40   address of a u64 that this device and the host can access, 0 at first; belongs to one dead word
  u64 table;              // 48   world > kInline: address of u64[world] in memory of this device, in the place of workspace; else unused
  u64 reserved;           // 56   0
  u64 workspace[kInline]; // 64   every rank's workspace as this device reaches it, by rank; aligned to 128
};

#ifdef __CUDACC_RTC__ // has no offsetof
#define SYMMEM_AT(type, field, offset) static_assert(__INTADDR__(&((type *)0)->field) == offset, #field)
#else
#define SYMMEM_AT(type, field, offset) static_assert(__builtin_offsetof(type, field) == offset, #field)
#endif
SYMMEM_AT(Comm, version, 0);
SYMMEM_AT(Comm, index, 4);
SYMMEM_AT(Comm, rank, 8);
SYMMEM_AT(Comm, world, 12);
SYMMEM_AT(Comm, timeout, 16);
SYMMEM_AT(Comm, stop, 24);
SYMMEM_AT(Comm, dead, 32);
SYMMEM_AT(Comm, fault, 40);
SYMMEM_AT(Comm, table, 48);
SYMMEM_AT(Comm, reserved, 56);
SYMMEM_AT(Comm, workspace, 64);
static_assert(sizeof(Comm) == 128, "Comm");

// Layout of a workspace, alike on every rank:
//
//   records  [block of the grid] of recordBytes(world) each
//   data     the kernel's own, from dataOffset(blocks, world) on, a multiple of 128
//
// A record is what one block keeps between launches, which only this rank touches, and for each kind of flag one word a writer, set by that
// rank:
//
//   u32 epoch     launches so far that have ended
//   u32 state[7]  the kernel's own
//   u32 flag[kFlagKinds][writers(world)]
//
// Every word of the records begins with the first epoch, which the host chooses; the data begins with 0.
enum : u32 { kStateBytes = 32, kFlagKinds = 3 };

__host__ __device__ constexpr u32 writers(u32 world) { return (world + 7) / 8 * 8; }
__host__ __device__ constexpr u32 recordBytes(u32 world) {
  return (kStateBytes + kFlagKinds * writers(world) * 4 + 127) / 128 * 128;
}
__host__ __device__ constexpr u64 dataOffset(u32 blocks, u32 world) { return (u64)blocks * recordBytes(world); }
static_assert(recordBytes(8) == 128 && recordBytes(9) == 256, "records");

// A fault word says what went wrong first:
//
//   bits 56-63  why          48-55  which kernel     32-47  the peer waited for
//   bits 16-31  Comm::index                 0-15  the block
enum : u32 {
  kFaultTimeout = 1, // a peer did not come in Comm::timeout
  kFaultStopped = 2, // the host set the stop word
  kFaultVersion = 3, // Comm::version is not kVersion; the peer is this rank
};

// Which kernel: numbers below are this module's, others are free.
enum : u32 { kKindUser = 64 };

// ---- Accesses, as the memory model names them ----

// loadRelaxed is a u32 that others may write meanwhile. It orders nothing.
static SYMMEM_DEVICE u32 loadRelaxed(u64 at) {
  u32 x;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
// loadAcquire orders what the writer did before its release before what this thread does next, if it sees that or a later write.
static SYMMEM_DEVICE u32 loadAcquire(u64 at) {
  u32 x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
// storeRelaxed orders nothing: what this launch wrote before may be seen after it.
static SYMMEM_DEVICE void storeRelaxed(u64 at, u32 x) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
// storeRelease orders behind itself what this thread wrote, and knows to be written.
static SYMMEM_DEVICE void storeRelease(u64 at, u32 x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
// countRelease adds 1, with release, atomically among all who do. The link to the memory must carry atomics: NVLink does, PCIe often does not.
static SYMMEM_DEVICE void countRelease(u64 at) { asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(at) : "memory"); }
// countDevice adds x and gives what was there, relaxed, atomically among threads of this device.
static SYMMEM_DEVICE u32 countDevice(u64 at, u32 x) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(at), "r"(x) : "memory");
  return old;
}
// fenceSystem orders all accesses of this thread before it, and what they have seen, before all behind it, for everybody: with it in
// front, relaxed stores release, and behind it relaxed loads have acquired.
static SYMMEM_DEVICE void fenceSystem() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Words is a vector of N 32-bit words: 2 or 4. Addresses of vectors are multiples of their size.
template <int N> struct Words { u32 w[N]; };

// loadWeak and storeWeak are plain accesses: what they touch, nobody else touches but in order with this thread.
static SYMMEM_DEVICE Words<4> loadWeak(u64 at, Words<4>) {
  Words<4> x;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(at) : "memory");
  return x;
}
static SYMMEM_DEVICE Words<2> loadWeak(u64 at, Words<2>) {
  Words<2> x;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(x.w[0]), "=r"(x.w[1]) : "l"(at) : "memory");
  return x;
}
static SYMMEM_DEVICE void storeWeak(u64 at, Words<4> x) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3]) : "memory");
}
static SYMMEM_DEVICE void storeWeak(u64 at, Words<2> x) {
  asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(at), "r"(x.w[0]), "r"(x.w[1]) : "memory");
}
// loadStrong and storeStrong are relaxed: they go past the first level cache and order nothing. The words of a vector are accesses of
// their own, in no order: only each of them arrives whole.
static SYMMEM_DEVICE Words<4> loadStrong(u64 at, Words<4>) {
  Words<4> x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(at) : "memory");
  return x;
}
static SYMMEM_DEVICE Words<2> loadStrong(u64 at, Words<2>) {
  Words<2> x;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0,%1}, [%2];" : "=r"(x.w[0]), "=r"(x.w[1]) : "l"(at) : "memory");
  return x;
}
static SYMMEM_DEVICE void storeStrong(u64 at, Words<4> x) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3])
               : "memory");
}

// ---- Epochs, time and launches ----

// late says whether a counter has not come to want yet. Both count modulo 2^32 and are less than 2^31 apart.
static SYMMEM_DEVICE bool late(u32 counter, u32 want) { return (s32)(counter - want) < 0; }

// globalTimer is the device's clock, in nanoseconds. It may stand still for a microsecond.
static SYMMEM_DEVICE u64 globalTimer() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// awaitPrevious waits for the work before this launch in its stream, whose writes are then visible. startNext lets the launch after it
// begin to start, when all blocks have called it or ended: call it when the block waits for nobody any more, since what has begun takes room
// on the device. Without programmatic stream serialization, and below compute capability 9.0, neither does anything.
//
// early are values that are to be there when the wait is over, if you like: addresses of what is loaded first, and a field of each 64 bytes of the kernel's
// parameters. A launch fetches such a line from memory, some 50 ns, where a field of it is first used, and compilers put that and what is computed from it behind the wait;
// but what is looked at in front of it is there while others still work.
template <class... Early> static SYMMEM_DEVICE void awaitPrevious(Early... early) {
#if __CUDA_ARCH__ >= 900
  if constexpr (sizeof...(early) > 0)
    if (((u32)(u64)early | ...) == 0) asm volatile("nanosleep.u32 0;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
static SYMMEM_DEVICE void startNext() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- Bounded waits ----

// Pollers look at the clock and the dead word once in so many polls, about a quarter of a millisecond, and at the stop word,
// which may be across a slow bus and has very many readers, a good deal less often.
enum : u32 { kPollsPerCheck = 256, kPollsPerStop = 4096 };

// giveUp sets the dead word, and writes the fault word if nobody has given up before: so it is written once, without atomics on
// memory of the host, which few links have. Relaxed both.
static SYMMEM_DEVICE void giveUp(u64 dead, u64 at, u64 fault) {
  u32 before;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(before) : "l"(dead) : "memory");
  if (before == 0) asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(fault) : "memory");
}

// keepWaiting is the rare part of waiting, and gives the time since when it waits, or 0 to give up. fault is the fault word but for why.
// It is no part of its callers, and takes values only, so that they keep everything in registers.
static __device__ __noinline__ u64 keepWaiting(u64 since, u64 timeout, u64 stop, u64 dead, u64 at, u64 fault) {
  const u64 now = globalTimer();
  if (loadRelaxed(dead) != 0) return 0;
  u64 why = 0;
  if (since == 0) since = now;
  if (now - since >= timeout) why = kFaultTimeout;
  if (stop != 0 && loadRelaxed(stop) != 0) why = kFaultStopped;
  if (why == 0) return since;
  giveUp(dead, at, fault | why << 56);
  return 0;
}

// Ranks is one thread's view of a launch. W is the world size if that is known when compiling, at most kInline, else 0. C is Comm, or a
// struct that has all its fields but version and reserved, and kTableRow.
template <int W = 0, class C = Comm> struct Ranks {
  static_assert(W >= 0 && W <= (int)kInline, "a world size that is known when compiling is at most kInline");

  const C &comm;
  u32 kind;        // for the fault word
  u64 record = 0;  // address of this block's record, on this rank; set by open
  u32 polls = 0;   // of this thread
  u64 since = 0;   // when this thread first looked at the clock
  bool ok = true;  // false: this thread has given up

  // kind says in the fault word which kernel it was: kKindUser to 255.
  SYMMEM_DEVICE Ranks(const C &c, u32 k) : comm(c), kind(k) {}

  SYMMEM_DEVICE u32 rank() const { return comm.rank; }
  SYMMEM_DEVICE u32 world() const { return W != 0 ? (u32)W : comm.world; }

  // peer is the k-th rank after this one, k at most world(): who goes through peers by it does not turn to the same one as all others.
  SYMMEM_DEVICE u32 peer(u32 k) const {
    u32 r = comm.rank + k;
    return r >= world() ? r - world() : r;
  }

  // address is entry r of row `row` of addresses, which are inlined or, for large worlds, in the table.
  SYMMEM_DEVICE u64 address(const u64 (&inlined)[kInline], u32 row, u32 r) const {
    if (W != 0 || comm.world <= kInline) return inlined[r];
    u64 x, at = comm.table + ((u64)row * comm.world + r) * 8;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(x) : "l"(at));
    return x;
  }
  // workspace is where rank r's begins, and data where the kernel's own part of it does.
  SYMMEM_DEVICE u64 workspace(u32 r) const { return address(comm.workspace, C::kTableRow, r); }
  SYMMEM_DEVICE u64 data(u32 r) const { return workspace(r) + (u64)gridDim.x * recordBytes(world()); }

  // begin is alive and open, after the work before this launch in its stream: it gives the epoch, and says whether to run at all, to all
  // threads of the block alike. If not, return at once. A Comm of another version is told in the fault word. It waits for no peer. Block.
  // early is as in awaitPrevious, of the parameters besides Comm, of which fields are looked at in front of the wait: one that is in memory is older than the launch before.
  template <class... Early> SYMMEM_DEVICE bool begin(u32 &epoch, Early... early) {
    awaitPrevious(comm.rank, comm.workspace[0], comm.workspace[kInline - 1], early...);
    if (comm.version != kVersion) {
      giveUp(comm.dead, comm.fault, (u64)kFaultVersion << 56 | faultWord(comm.rank));
      return ok = false;
    }
    if (!__syncthreads_and(alive())) return ok = false;
    epoch = open();
    return true;
  }
  // alive says whether to run at all: the dead word is 0. Relaxed.
  SYMMEM_DEVICE bool alive() const { return loadRelaxed(comm.dead) == 0; }
  // open finds the record and gives the epoch of this launch: one more than that of the last that this block has closed.
  SYMMEM_DEVICE u32 open() {
    record = workspace(comm.rank) + (u64)blockIdx.x * recordBytes(world());
    return loadRelaxed(record) + 1;
  }
  // close keeps the epoch for the next launch, if no thread of the block has given up. Block.
  SYMMEM_DEVICE void close(u32 epoch) {
    if (__syncthreads_and(ok) && threadIdx.x == 0) storeRelaxed(record, epoch);
  }

  // faultWord is a fault word but for why.
  SYMMEM_DEVICE u64 faultWord(u32 peer) const {
    return (u64)kind << 48 | (u64)(peer & 0xffff) << 32 | (u64)(comm.index & 0xffff) << 16 | (blockIdx.x & 0xffff);
  }
  // again is called by a thread after each poll that found nothing of peer: it says whether to poll again. Every 256th time it looks at the
  // clock and the dead word, every 4096th at the stop word. When it says false it has given up, as the rules at the top say. It orders nothing.
  // Waits of your own that call it have the time together, from the first look at the clock; a kernel that works for long between them sets since to 0 before each.
  SYMMEM_DEVICE bool again(u32 peer) {
    if (!ok) return false;
    if (++polls % kPollsPerCheck == 0) {
      const u64 fault = faultWord(peer);
      since = keepWaiting(since, comm.timeout, polls % kPollsPerStop == 0 ? comm.stop : 0, comm.dead, comm.fault, fault);
      ok = since != 0;
    }
    return ok;
  }

  // flag is the address of flag `which`, below kFlagKinds, that writer sets for reader's block of this number. Only writer writes it.
  SYMMEM_DEVICE u64 flag(u32 reader, u32 which, u32 writer) const {
    return workspace(reader) + (u64)blockIdx.x * recordBytes(world()) + kStateBytes + (which * writers(world()) + writer) * 4;
  }
  // signal sets flag `which` for reader to value, with release. Values of a flag only grow, counting in a circle. One thread calls.
  SYMMEM_DEVICE void signal(u32 reader, u32 which, u32 value) const { storeRelease(flag(reader, which, comm.rank), value); }
  // await waits until writer's flag here has come to value, with acquire, for the calling thread; ok says whether it has. One thread calls, or
  // several for several writers.
  SYMMEM_DEVICE void await(u32 which, u32 writer, u32 value) {
    u64 at = flag(comm.rank, which, writer);
    while (late(loadAcquire(at), value))
      if (!again(writer)) return;
    if (kind >= kKindUser) since = 0; // a kernel that works for long between two waits has the whole time for each; those of this module do not
  }
  // wait is await for the block: what writer had written when it signalled is visible to all its threads. It says whether that came. Block.
  SYMMEM_DEVICE bool wait(u32 which, u32 writer, u32 value) {
    if (threadIdx.x == 0) await(which, writer, value);
    return __syncthreads_and(ok);
  }

  // put stores bytes from `from`, memory of this rank, to `offset` in the data of rank r. Both addresses and bytes are multiples of 16. The
  // stores are weak: signal or a barrier with release makes them visible, after __syncthreads, as putSignal does. It returns when they are
  // issued. The threads of the block share the work, but none waits for another.
  SYMMEM_DEVICE void put(u32 r, u64 offset, u64 from, u64 bytes) const {
    const u64 to = data(r) + offset;
    for (u64 i = threadIdx.x * 16ull; i < bytes; i += blockDim.x * 16ull) storeWeak(to + i, loadWeak(from + i, Words<4>()));
  }
  // putSignal is put, and then signal: who has seen the value sees the bytes, and all that the block has written before. Block.
  SYMMEM_DEVICE void putSignal(u32 r, u64 offset, u64 from, u64 bytes, u32 which, u32 value) const {
    put(r, offset, from, bytes);
    __syncthreads();
    if (threadIdx.x == 0) signal(r, which, value);
  }

  // barrier is a barrier of the blocks of this number on all ranks, by flag `which`; it says whether all came, to all threads of the block
  // alike. Each barrier of a launch has a flag of its own or a value that is later than the last, the same on every rank: the epoch, if
  // there is one a flag.
  //
  // With release, what the block wrote before is visible to these blocks after. Without, only what earlier launches and other work before
  // this launch wrote is, since that was complete when this one began: enough to tell that inputs are ready and outputs free. Either way it
  // acquires: the threads wait with acquiring loads, which the barrier of the block behind them passes on to all. Block.
  template <bool release = true> SYMMEM_DEVICE bool barrier(u32 which, u32 epoch) {
    if (release) __syncthreads();
    for (u32 r = threadIdx.x; r < world(); r += blockDim.x) {
      if (r == comm.rank) continue;
      if (release)
        storeRelease(flag(r, which, comm.rank), epoch);
      else
        storeRelaxed(flag(r, which, comm.rank), epoch);
    }
    for (u32 r = threadIdx.x; r < world(); r += blockDim.x)
      if (r != comm.rank) await(which, r, epoch);
    return __syncthreads_and(ok);
  }
};

} // namespace symmem
