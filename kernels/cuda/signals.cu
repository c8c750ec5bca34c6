// Barrier, signal and wait, with the counting of the host's: counters only grow and wrap around, signals may be several
// under way, what a waiter has consumed is its own. Params::workspace is every rank's signal pad, Params::index the channel in it.
// Each is one block.
#include "copy.cuh"
#include "frame.cuh"

struct Pad {
  const Params &p;
  SYMMEM_DEVICE u64 base(u32 r) const { return Ranks<0, Params>(p, 0).workspace(r); }
  // counter is where writer counts on owner's pad.
  SYMMEM_DEVICE u64 counter(u32 owner, u32 which, u32 writer) const {
    return base(owner) + (((u64)p.index * kPadKinds + which) * p.world + writer) * kPadStride;
  }
  SYMMEM_DEVICE u64 state() const {
    return base(p.rank) + (u64)p.channels * kPadKinds * p.world * kPadStride + (u64)p.index * padStateBytes(p.world);
  }
  SYMMEM_DEVICE u64 sent(u32 peer) const { return state() + 32 + peer * 4; }
  SYMMEM_DEVICE u64 consumed(u32 peer) const { return state() + 32 + (p.world + peer) * 4; }
  SYMMEM_DEVICE u64 stored(u32 peer) const { return state() + 32 + (2 * p.world + peer) * 4; }
};

// A launch tells that it gave up in its cell (Params::fault), which is in host memory and which no other launch writes at the same
// time:
//
//   u32 gaveUp   how many launches with this cell have given up; written last
//   u32 told     how many of those the host knows of; the host's
//   u64 fault    why the first did that the host does not know of
//
// So what was told does not hide what comes later. A plan has a dead word besides (Params::dead, else 0): when one of its launches
// gives up, all later ones do at once. The word is the upper half of that launch's fault, which the later ones pass on.
enum : u32 { kCellGaveUp = 0, kCellTold = 4, kCellFault = 8 };

SYMMEM_DEVICE void tell(const Params &p, u64 fault) {
  if (fault == 0) return;
  const u32 gaveUp = loadRelaxed(p.fault + kCellGaveUp);
  if (gaveUp == loadRelaxed(p.fault + kCellTold))
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p.fault + kCellFault), "l"(fault) : "memory");
  storeRelease(p.fault + kCellGaveUp, gaveUp + 1);
}

// Waiting is one thread's bounded waiting.
struct Waiting {
  const Params &p;
  u32 kind;
  u32 polls = 0;
  u64 since = 0; // when this thread first looked at the clock
  u64 fault = 0; // not 0: this thread has given up

  SYMMEM_DEVICE Waiting(const Params &params, u32 k) : p(params), kind(k) {}

  // alive says whether to run at all.
  SYMMEM_DEVICE bool alive() {
    fault = p.dead == 0 ? 0 : (u64)loadRelaxed(p.dead) << 32;
    return fault == 0;
  }

  // again is called after a poll that found nothing: it says whether to poll again.
  SYMMEM_DEVICE bool again(u32 peer) {
    if (++polls % kPollsPerCheck != 0) return true;
    const u64 now = globalTimer();
    if (since == 0) since = now;
    u64 why = 0;
    if (now - since >= p.timeout) why = kFaultTimeout;
    if (polls % kPollsPerStop == 0 && p.stop != 0 && loadRelaxed(p.stop) != 0) why = kFaultStopped;
    if (why != 0) fault = why << 56 | (u64)kind << 48 | (u64)(peer & 0xffff) << 32 | (u64)(p.index & 0xffff) << 16;
    if (p.dead == 0) return fault == 0;
    u32 first = loadRelaxed(p.dead);
    if (first == 0 && fault != 0)
      asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, %2;"
                   : "=r"(first) : "l"(p.dead), "r"((u32)(fault >> 32)) : "memory");
    if (first != 0) fault = (u64)first << 32;
    return fault == 0;
  }

  // leave ends a launch: one thread tells for all. Every thread of the block comes here.
  SYMMEM_DEVICE void leave() const {
    if (!__syncthreads_or(fault != 0)) return;
    __shared__ u64 any; // of several that gave up, whoever stores last; relaxed, so that they are no race
    if (fault != 0) asm volatile("st.relaxed.cta.shared.u64 [%0], %1;" ::"l"(__cvta_generic_to_shared(&any)), "l"(fault) : "memory");
    __syncthreads();
    if (threadIdx.x == 0) tell(p, any);
  }
};

// signal counts one up at the peer, after everything that this thread knows to be written. Without atomics over the link the
// count is this rank's own, and stored; of several streams that signal at once, each stores its count when that before it is.
SYMMEM_DEVICE void signal(Waiting &w, u32 peer) {
  const Params &p = w.p;
  Pad pad{p};
  u64 at = pad.counter(peer, kPadSignal, p.rank);
  if (p.flags & kAtomics) {
    countRelease(at);
    return;
  }
  const u32 before = countDevice(pad.sent(peer), 1);
  while (loadAcquire(pad.stored(peer)) != before) {
    if (w.again(peer)) continue;
    if (p.dead != 0) return; // what the peer waits for may not be there
    break; // the signals behind this one count on it
  }
  storeRelease(at, before + 1);
  storeRelease(pad.stored(peer), before + 1);
}

// startBesides lets the next launch begin while this one signals, if that waits for nobody.
SYMMEM_DEVICE void startBesides(const Params &p) {
  if (p.flags & kAtomics) startNext();
}

extern "C" __global__ void symmem_signal(const __grid_constant__ Params p) {
  Waiting w(p, kKindSignal);
  awaitPrevious(p.workspace[0], p.table, p.dead, p.rank);
  startBesides(p);
  if (threadIdx.x != 0 || !w.alive()) return;
  signal(w, p.peer);
  tell(p, w.fault);
}

// symmem_put_signal is symmem_signal behind a copy of Params::count bytes from Params::in[0], memory of this rank, to Params::out[0] at the
// peer. It is for few bytes: a copy of the device's and a launch behind it take longer to begin than these do to move.
extern "C" __global__ void __launch_bounds__(1024) symmem_put_signal(const __grid_constant__ Params p) {
  Waiting w(p, kKindSignal);
  awaitPrevious(p.workspace[0], p.table, p.dead, p.rank);
  startBesides(p);
  copyChunk(p.out[0], p.in[0], p.count);
  __syncthreads();
  if (threadIdx.x != 0) return;
  signal(w, p.peer);
  tell(p, w.fault);
}

// awaitSignal waits for one signal of peer more.
SYMMEM_DEVICE void awaitSignal(Waiting &w, u32 peer) {
  Pad pad{w.p};
  const u32 want = countDevice(pad.consumed(peer), 1) + 1;
  const u64 at = pad.counter(w.p.rank, kPadSignal, peer);
  while (late(loadAcquire(at), want))
    if (!w.again(peer)) break;
}

// symmem_put_signal_wait is symmem_put_signal with symmem_wait for the rank Params::shard behind it. Of the two that may give up, the first tells why.
extern "C" __global__ void __launch_bounds__(512) symmem_put_signal_wait(const __grid_constant__ Params p) {
  Waiting w(p, kKindSignal), then(p, kKindWait);
  awaitPrevious(p.workspace[0], p.table, p.dead, p.rank);
  copyChunk(p.out[0], p.in[0], p.count);
  __syncthreads();
  if (threadIdx.x != 0) return;
  signal(w, p.peer);
  awaitSignal(then, (u32)p.shard);
  startNext();
  tell(p, w.fault != 0 ? w.fault : then.fault);
}

// symmem_signal_all is symmem_signal to every peer at once, each by a thread.
extern "C" __global__ void symmem_signal_all(const __grid_constant__ Params p) {
  Waiting w(p, kKindSignal);
  awaitPrevious();
  startBesides(p);
  if (!__syncthreads_and(w.alive())) return;
  for (u32 r = threadIdx.x; r < p.world; r += blockDim.x)
    if (r != p.rank) signal(w, r);
  w.leave();
}

extern "C" __global__ void symmem_wait(const __grid_constant__ Params p) {
  Waiting w(p, kKindWait);
  awaitPrevious();
  if (threadIdx.x != 0) return;
  if (w.alive()) awaitSignal(w, p.peer);
  startNext();
  tell(p, w.fault);
}

// symmem_wait_all is symmem_wait for every peer at once, each by a thread.
extern "C" __global__ void symmem_wait_all(const __grid_constant__ Params p) {
  Waiting w(p, kKindWait);
  awaitPrevious();
  if (w.alive())
    for (u32 r = threadIdx.x; r < p.world; r += blockDim.x)
      if (r != p.rank) awaitSignal(w, r);
  startNext();
  w.leave();
}

extern "C" __global__ void symmem_barrier(const __grid_constant__ Params p) {
  Waiting w(p, kKindBarrier);
  awaitPrevious();
  if (__syncthreads_and(w.alive())) {
    Pad pad{p};
    const u32 epoch = loadRelaxed(pad.state()) + 1;
    for (u32 r = threadIdx.x; r < p.world; r += blockDim.x) storeRelease(pad.counter(r, kPadBarrier, p.rank), epoch);
    for (u32 r = threadIdx.x; r < p.world; r += blockDim.x) {
      const u64 at = pad.counter(p.rank, kPadBarrier, r);
      while (late(loadAcquire(at), epoch))
        if (!w.again(r)) break;
    }
    __syncthreads();
    if (threadIdx.x == 0) storeRelaxed(pad.state(), epoch);
  }
  startNext();
  w.leave();
}
