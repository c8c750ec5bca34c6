// What every kernel that waits for peers needs: the peers' addresses, bounded waiting, and where the elements lie.
#pragma once
#include "numbers.cuh"

// Pollers look at the clock and the dead word once in so many polls, about a quarter of a millisecond, and at the stop word,
// which may be across a slow bus and has very many readers, a good deal less often.
enum : u32 { kPollsPerCheck = 256, kPollsPerStop = 4096 };

// keepWaiting is the rare part of waiting, and gives the time since when it waits, or 0 to give up. Who sets the dead word
// writes the fault word, too: so it is written once, without atomics on memory of the host, which few links have. fault is
// the word but for why. The function takes values only, so that its callers keep everything in registers.
static __device__ __noinline__ u64 keepWaiting(u64 since, u64 timeout, u64 stop, u64 dead, u64 at, u64 fault) {
  const u64 now = globalTimer();
  if (loadRelaxed(dead) != 0) return 0;
  u64 why = 0;
  if (since == 0) since = now;
  if (now - since >= timeout) why = kFaultTimeout;
  if (stop != 0 && loadRelaxed(stop) != 0) why = kFaultStopped;
  if (why == 0) return since;
  u32 before;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, 1;" : "=r"(before) : "l"(dead) : "memory");
  if (before == 0) asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(fault | why << 56) : "memory");
  return 0;
}

// Frame is one thread's view of a launch. W is the world size if that is known when compiling, else 0.
template <int W> struct Frame {
  const Params &p;
  u32 kind;
  u64 record = 0;  // of this block, on this rank
  u32 polls = 0;   // of this thread
  u64 since = 0;   // when this thread first looked at the clock
  bool ok = true;  // false: this thread has given up

  SYMMEM_DEVICE Frame(const Params &params, u32 k) : p(params), kind(k) {}

  SYMMEM_DEVICE u32 world() const { return W != 0 ? (u32)W : p.world; }
  SYMMEM_DEVICE u64 pointer(const u64 (&inlined)[kInline], u32 row, u32 r) const {
    if (W != 0 || p.world <= kInline) return inlined[r];
    u64 x, at = p.table + ((u64)row * p.world + r) * 8;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(x) : "l"(at));
    return x;
  }
  SYMMEM_DEVICE u64 in(u32 r) const { return pointer(p.in, 0, r); }
  SYMMEM_DEVICE u64 out(u32 r) const { return pointer(p.out, 1, r); }
  SYMMEM_DEVICE u64 channel(u32 r) const { return pointer(p.channel, 2, r); }
  SYMMEM_DEVICE u64 buffers(u32 r) const { return channel(r) + (u64)gridDim.x * recordBytes(world()); }

  // peer is the k-th rank after this one, so that not all ranks turn to the same one first.
  SYMMEM_DEVICE u32 peer(u32 k) const {
    u32 r = p.rank + k;
    return r >= world() ? r - world() : r;
  }

  // slot is which slot of a buffer to load from for rank r: its own, or this rank's for one beyond the last. This rank's holds
  // nothing and may be read.
  SYMMEM_DEVICE u32 slot(u32 r) const { return W != 0 || r < world() ? r : p.rank; }
  // other says whether r is another rank.
  SYMMEM_DEVICE bool other(u32 r) const { return r != p.rank && (W != 0 || r < world()); }

  // start waits for the work before this launch. With kEarly the launch after it may take its place on the device at once, beside
  // this one's; else only when this one leaves.
  SYMMEM_DEVICE void start() const {
    awaitPrevious();
    if (p.flags & kEarly) startNext();
  }

  // alive says whether to run at all.
  SYMMEM_DEVICE bool alive() const { return loadRelaxed(p.dead) == 0; }
  // open finds the record and gives the number of this launch.
  SYMMEM_DEVICE u32 open() {
    record = channel(p.rank) + (u64)blockIdx.x * recordBytes(world());
    return loadRelaxed(record) + 1;
  }
  // close keeps the number of this launch for the next. Every thread of the block comes here, if it has not given up.
  SYMMEM_DEVICE void close(u32 epoch) {
    if (__syncthreads_and(ok) && threadIdx.x == 0) storeRelaxed(record, epoch);
  }

  // again is called after a poll that found nothing: it says whether to poll again.
  SYMMEM_DEVICE bool again(u32 peer) {
    if (!ok) return false;
    if (++polls % kPollsPerCheck == 0) {
      const u64 fault = (u64)kind << 48 | (u64)(peer & 0xffff) << 32 | (u64)(p.index & 0xffff) << 16 | (blockIdx.x & 0xffff);
      since = keepWaiting(since, p.timeout, polls % kPollsPerStop == 0 ? p.stop : 0, p.dead, p.fault, fault);
      ok = since != 0;
    }
    return ok;
  }

  // flag is where writer tells reader's block of the same number.
  SYMMEM_DEVICE u64 flag(u32 reader, u32 which, u32 writer) const {
    return channel(reader) + (u64)blockIdx.x * recordBytes(world()) + kStateBytes + (which * writers(world()) + writer) * 4;
  }
  // await waits until writer's flag here has come to value.
  SYMMEM_DEVICE void await(u32 which, u32 writer, u32 value) {
    u64 at = flag(p.rank, which, writer);
    while (late(loadAcquire(at), value))
      if (!again(writer)) return;
  }
  // exchange is a barrier of the blocks of this number on all ranks; it says whether all came. With release, what the
  // block wrote before is visible to all after. What earlier launches wrote is visible in any case.
  template <bool release> SYMMEM_DEVICE bool exchange(u32 which, u32 epoch) {
    if (release) __syncthreads();
    for (u32 r = threadIdx.x; r < world(); r += blockDim.x) {
      if (r == p.rank) continue;
      if (release)
        storeRelease(flag(r, which, p.rank), epoch);
      else
        storeRelaxed(flag(r, which, p.rank), epoch);
    }
    for (u32 r = threadIdx.x; r < world(); r += blockDim.x)
      if (r != p.rank) await(which, r, epoch);
    return __syncthreads_and(ok);
  }
};

// loadPart and storePart are the rare vectors that are not whole or not aligned: elements from i on, those below count only.
template <class T, int N> static __device__ __noinline__ Words<N> loadPart(u64 base, u64 i, u64 count) {
  Words<N> x = {};
#pragma unroll
  for (u32 e = 0; e < N * 4 / T::width; e++)
    if (i + e < count) setElement<T>(x, e, loadElement<T::width>(base + (i + e) * T::width));
  return x;
}
template <class T, int N> static __device__ __noinline__ void storePart(u64 base, u64 i, u64 count, Words<N> x) {
#pragma unroll
  for (u32 e = 0; e < N * 4 / T::width; e++)
    if (i + e < count) storeElement<T::width>(base + (i + e) * T::width, element<T>(x, e));
}

// Span is the message as vectors of N words, counted from the aligned address at or before the input's first element; so
// loads are aligned, and only the first and the last vector may be in part outside. Stores are whole vectors if the output
// is aligned as the input is.
template <class T, int N> struct Span {
  static constexpr u32 bytes = N * 4;
  static constexpr u32 E = bytes / T::width;
  u64 count;   // elements
  u64 vectors; // that hold any
  u32 lead;    // elements of the first vector that are before the message
  bool alike;  // the output is aligned as the input is

  SYMMEM_DEVICE Span(u64 in, u64 out, u64 n) : count(n) {
    lead = (u32)(in % bytes) / T::width;
    alike = (in - out) % bytes == 0;
    vectors = (n + lead + E - 1) / E;
  }
  SYMMEM_DEVICE bool whole(u64 v) const { return v * E >= lead && (v + 1) * E <= count + lead; }
  SYMMEM_DEVICE u64 at(u64 base, u64 v) const { return base - lead * T::width + v * bytes; }

  // first is the element that vector v begins with, below 0 by wrapping around.
  SYMMEM_DEVICE u64 first(u64 v) const { return v * E - lead; }

  // load is vector v of the elements at base, with 0 for what is outside. strong: a peer may have written it.
  template <bool strong> SYMMEM_DEVICE Words<N> load(u64 base, u64 v) const {
    if (whole(v)) return strong ? loadStrong(at(base, v), Words<N>()) : loadWeak(at(base, v), Words<N>());
    return loadPart<T, N>(base, first(v), count);
  }
  SYMMEM_DEVICE void store(u64 base, u64 v, const Words<N> &x) const {
    if (alike && whole(v))
      storeWeak(at(base, v), x);
    else
      storePart<T, N>(base, first(v), count, x);
  }
};

// reduce combines one vector of each rank, in rank order. fetch(first, v) fills v with those of ranks first, first+1, … A
// fetch loads without branches between the loads, or they would wait for each other; for a rank beyond the last it may give
// anything.
template <class T, class Op, int W, int N, class Fetch> SYMMEM_DEVICE Words<N> reduce(Op op, u32 world, Fetch fetch) {
  Accumulator<T, Op, N> a;
  if constexpr (W != 0) {
    Words<N> v[W];
    fetch(0, v);
    a.first(v[0]);
#pragma unroll
    for (int r = 1; r < W; r++) a.add(op, v[r]);
  } else {
#pragma unroll 1
    for (u32 first = 0; first < world; first += 4) {
      Words<N> v[4];
      fetch(first, v);
      if (first == 0)
        a.first(v[0]);
      else
        a.add(op, v[0]);
#pragma unroll
      for (u32 j = 1; j < 4; j++)
        if (first + j < world) a.add(op, v[j]);
    }
  }
  return a.result(op, world);
}

// A line that is all data and yet tells whether it has come: empty is 0, and what is sent is the complement of the data, in
// which a word of ones, a NaN, becomes another NaN. So channels that begin with zeros are ready, and readers write zeros back.
// Only for floats of 16 and 32 bits: for others a word of ones is a number.
SYMMEM_DEVICE Words<4> seal(Words<4> x) {
#pragma unroll
  for (int i = 0; i < 4; i++) x.w[i] = ~(x.w[i] == ~0u ? 0x7fffffffu : x.w[i]);
  return x;
}
SYMMEM_DEVICE Words<4> unseal(Words<4> x) {
#pragma unroll
  for (int i = 0; i < 4; i++) x.w[i] = ~x.w[i];
  return x;
}
SYMMEM_DEVICE bool come(const Words<4> &x) { return x.w[0] != 0 && x.w[1] != 0 && x.w[2] != 0 && x.w[3] != 0; }

// fetchSealed waits for the lines of ranks first, first+1, … at `at` in their slots, empties them, and gives their data; for
// this rank, own. Each word says by itself whether it has come. A line is emptied by a strong store, which the writer's next
// one, two launches later, comes after: between the two are this rank's lines of the launch between and the ends of launches.
template <class T, int W, u32 B>
SYMMEM_DEVICE void fetchSealed(Frame<W> &f, u64 at, u32 first, const Words<4> &own, Words<4> (&x)[B]) {
  u32 missing;
  do {
#pragma unroll
    for (u32 j = 0; j < B; j++) x[j] = loadStrong(at + f.slot(first + j) * f.p.span, Words<4>());
    missing = f.p.rank;
#pragma unroll
    for (u32 j = 0; j < B; j++)
      if (f.other(first + j) && !come(x[j])) missing = first + j;
  } while (missing != f.p.rank && f.again(missing));
#pragma unroll
  for (u32 j = 0; j < B; j++) {
    storeStrong(at + f.slot(first + j) * f.p.span, Words<4>{});
    x[j] = first + j == f.p.rank ? own : unseal(x[j]);
  }
}
