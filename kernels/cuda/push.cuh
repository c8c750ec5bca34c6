// All-reduces that push lines, for messages that are whole vectors of 16 bytes: the forms oneshot_push and twoshot_push, with fewer
// registers, and a parameter that is in one or two lines of the constant bank where Params is in six, each of which is fetched when a launch
// begins. That is a tenth of what a small message takes. Blocks are whole warps, and twoshot_push_whole has at least as many warps as peers.
#pragma once
#include "frame.cuh"
#include "stretch.cuh"

// PushParams is the parameter, by value. Every rank's message begins at a multiple of 16.
template <int W> struct PushParams {
  u64 in, out;  // this rank's
  u64 data[W];  // every rank's message buffers, as Layout has them for the form: this rank's, and then those of the ranks behind it
  u64 records;  // this rank's records, one a block. See symmem.cuh
  u64 dead;     // as in Params
  u32 vectors;  // of 16 bytes, below 2^30
  u32 shard;    // two-shot: vectors that one rank reduces; broadcast and reduce: the root
  u32 slot;     // vectors in one rank's slot of a buffer
  u32 rank;
  u32 op;       // sum or average
  u32 index;    // for the fault word
  u64 fault, stop, timeout; // as in Params; for the rare part of waiting
};

// SYMMEM_PUSH_AT says where a field is: base bytes and 8 for each rank.
#define SYMMEM_PUSH_AT(field, base, ranks)                                                                                 \
  SYMMEM_AT(PushParams<2>, field, base + 8 * 2 * ranks);                                                                   \
  SYMMEM_AT(PushParams<7>, field, base + 8 * 7 * ranks)
SYMMEM_PUSH_AT(in, 0, 0);
SYMMEM_PUSH_AT(out, 8, 0);
SYMMEM_PUSH_AT(data, 16, 0);
SYMMEM_PUSH_AT(records, 16, 1);
SYMMEM_PUSH_AT(dead, 24, 1);
SYMMEM_PUSH_AT(vectors, 32, 1);
SYMMEM_PUSH_AT(shard, 36, 1);
SYMMEM_PUSH_AT(slot, 40, 1);
SYMMEM_PUSH_AT(rank, 44, 1);
SYMMEM_PUSH_AT(op, 48, 1);
SYMMEM_PUSH_AT(index, 52, 1);
SYMMEM_PUSH_AT(fault, 56, 1);
SYMMEM_PUSH_AT(stop, 64, 1);
SYMMEM_PUSH_AT(timeout, 72, 1);
static_assert(sizeof(PushParams<2>) == 80 + 8 * 2, "PushParams");

// Push is one thread's view of a launch: what Ranks is for the other kernels.
template <int W> struct Push {
  const PushParams<W> &p;
  u32 kind;
  u32 polls = 0;
  u64 since = 0;
  bool ok = true; // false: this thread has given up

  SYMMEM_DEVICE Push(const PushParams<W> &params, u32 k) : p(params), kind(k) {}

  SYMMEM_DEVICE u64 record() const { return p.records + blockIdx.x * recordBytes(W); }
  SYMMEM_DEVICE u32 peer(u32 k) const {
    const u32 r = p.rank + k;
    return r >= W ? r - W : r;
  }
  // data is where rank r's buffers are. Those of the k-th rank behind this one are p.data[k]: an address that is known when compiling.
  SYMMEM_DEVICE u64 data(u32 r) const { return p.data[r < p.rank ? r + W - p.rank : r - p.rank]; }
  // again is as in Ranks.
  SYMMEM_DEVICE bool again(u32 peer) {
    if (++polls % kPollsPerCheck == 0) {
      const u64 fault = (u64)kind << 48 | (u64)(peer & 0xffff) << 32 | (u64)(p.index & 0xffff) << 16 | (blockIdx.x & 0xffff);
      since = keepWaiting(since, p.timeout, polls % kPollsPerStop == 0 ? p.stop : 0, p.dead, p.fault, fault);
      ok = since != 0;
    }
    return ok;
  }
  // close keeps the epoch for the next launch, as soon as all threads of the block know it, while lines are on their way: at the end it
  // would be what the next launch waits for. Whoever gives up later leaves a plan that is dead, whatever its epoch.
  SYMMEM_DEVICE void close(u32 epoch) {
    __syncthreads();
    if (threadIdx.x == 0) storeRelaxed(record(), epoch);
  }
};

// awaitLines loads the lines of all ranks at `at` in their slots until they have come, or this thread has given up.
template <int W> SYMMEM_DEVICE void awaitLines(Push<W> &f, u64 at, u64 slot, Words<4> (&x)[W]) {
  u32 missing;
  do {
#pragma unroll
    for (u32 r = 0; r < W; r++) x[r] = loadStrong(at + r * slot, Words<4>());
    missing = W;
#pragma unroll
    for (u32 r = 0; r < W; r++)
      if (!come(x[r])) missing = r;
  } while (missing != W && f.again(missing));
}

// sumLines stores what lines that have come make, and empties them.
template <class T, class Op, int W> SYMMEM_DEVICE void sumLines(const Op &op, const Words<4> (&x)[W], u64 at, u64 slot, u64 out) {
  Accumulator<T, Op, 4> a;
  a.first(unseal(x[0]));
#pragma unroll
  for (u32 r = 1; r < W; r++) a.add(op, unseal(x[r]));
  storeWeak(out, a.template result<W>(op, W));
#pragma unroll
  for (u32 r = 0; r < W; r++) storeWeak(at + r * slot, Words<4>{});
}

// takeSums stores what the lines of all ranks in the slots at `mine` make, of the vectors from begin on. A thread that has had lines of all ranks lets the next
// launch begin: before it stores the last of what it makes, since what stands behind that is what the launch after waits for. Not before: while there is much
// left to do, a launch that has begun costs more than it saves.
template <class T, class Op, int W> SYMMEM_DEVICE void takeSums(Push<W> &f, const Op &op, u32 begin, u32 step, u64 slot, u64 mine) {
  for (u32 v = begin; v < f.p.vectors; v += step) {
    const u64 at = mine + v * 16ull;
    Words<4> x[W];
    awaitLines(f, at, slot, x);
    if (!f.ok) break;
    if (v + step >= f.p.vectors) startNext();
    sumLines<T>(op, x, at, slot, f.p.out + v * 16ull);
  }
}

// oneshotPushWhole is oneshotPush. The rank's own lines go through its own slot, so that all are alike and the input is read once. Warps are
// dealt to the blocks in turn, so that none has nothing to do. A thread that has had lines of all ranks lets the next launch begin: every
// rank's block of its number is at work then, so that the other threads' lines come, whatever room the next launch takes.
template <class T, class Op, int W> SYMMEM_DEVICE void oneshotPushWhole(const PushParams<W> &p) {
  Push<W> f(p, kKindOneshotPush);
  const u32 begin = (blockIdx.x + gridDim.x * (threadIdx.x / 32)) * 32 + threadIdx.x % 32, step = gridDim.x * blockDim.x;
  const Op op{p.op};
  const u64 slot = p.slot * 16ull, odd = W * slot, place = p.rank * slot, record = f.record(), from = p.in + begin * 16ull;
  awaitPrevious(p.vectors, p.op, record, from, odd, place);
  const u32 epoch = loadRelaxed(record) + 1;
  const u32 dead = loadRelaxed(p.dead);
  Words<4> own = {};
  if (begin < p.vectors) own = loadWeak(from, Words<4>()); // all three are under way at once
  if (dead != 0) return;
  const u64 buffer = epoch & 1 ? odd : 0, to = buffer + place;
  for (u32 v = begin; v < p.vectors; v += step) {
    if (v != begin) own = loadWeak(p.in + v * 16ull, Words<4>());
    const Words<4> line = seal(own);
#pragma unroll
    for (u32 k = 1; k <= W; k++) storeStrong(p.data[k % W] + to + v * 16ull, line);
  }
  f.close(epoch);
  takeSums<T>(f, op, begin, step, slot, p.data[0] + buffer);
}

// oneshotPushLonger is oneshotPushWhole between two ranks, for messages of which a thread has several vectors: it takes the rank's own ones from the input again. What goes through its own slot is
// stored, loaded and emptied in this rank's memory beside what comes from the peer. Where a thread has one, that is the faster way.
template <class T, class Op> SYMMEM_DEVICE void oneshotPushLonger(const PushParams<2> &p) {
  Push<2> f(p, kKindOneshotPush);
  const u32 begin = (blockIdx.x + gridDim.x * (threadIdx.x / 32)) * 32 + threadIdx.x % 32, step = gridDim.x * blockDim.x;
  const Op op{p.op};
  const u64 slot = p.slot * 16ull, record = f.record(), from = p.in + begin * 16ull;
  awaitPrevious(p.vectors, p.op, record, from, slot);
  const u32 epoch = loadRelaxed(record) + 1;
  const u32 dead = loadRelaxed(p.dead);
  Words<4> own = {};
  if (begin < p.vectors) own = loadWeak(from, Words<4>()); // all three are under way at once
  if (dead != 0) return;
  const u64 buffer = epoch & 1 ? 2 * slot : 0, to = p.data[1] + buffer + p.rank * slot, mine = p.data[0] + buffer + (1 - p.rank) * slot;
#pragma unroll 1
  for (u32 v = begin; v < p.vectors; v += step) {
    if (v != begin) own = loadWeak(p.in + v * 16ull, Words<4>());
    storeStrong(to + v * 16ull, seal(own));
  }
  f.close(epoch);
#pragma unroll 1
  for (u32 v = begin; v < p.vectors; v += step) {
    const u64 at = mine + v * 16ull;
    own = loadWeak(p.in + v * 16ull, Words<4>());
    Words<4> x;
    do
      x = loadStrong(at, Words<4>());
    while (!come(x) && f.again(1 - p.rank));
    if (!f.ok) break;
    if (v + step >= p.vectors) startNext();
    Accumulator<T, Op, 4> a; // of two, the order changes nothing
    a.first(own);
    a.add(op, unseal(x));
    storeWeak(p.out + v * 16ull, a.template result<2>(op, 2));
    storeWeak(at, Words<4>{});
  }
}

// manyPushWhole is oneshotPushWhole over a list of tensors that are all whole vectors; of PushParams, in, out and vectors are not used. So many threads as
// do a stretch together take every so many-th, dealt to the blocks in turn, and their first before the work in front of the launch is awaited: the list is as
// old as the plan.
template <class T, class Op, int W> SYMMEM_DEVICE void manyPushWhole(const PushParams<W> &p, const WholeMany &m) {
  const u32 together = 1u << m.shift, thread = threadIdx.x & (together - 1);
  const u32 first = blockIdx.x + gridDim.x * (threadIdx.x >> m.shift), step = gridDim.x * (blockDim.x >> m.shift);
  const WholeStretch begin = firstWholeStretch(m, first);
  Push<W> f(p, kKindMany);
  const Op op{p.op};
  const u64 slot = p.slot * 16ull;
  awaitPrevious(p.in, p.vectors, p.op);
  const u32 epoch = loadRelaxed(f.record()) + 1;
  const u32 dead = loadRelaxed(p.dead);
  Words<4> own = {};
  if (thread < begin.vectors) own = loadWeak(begin.in + thread * 16ull, Words<4>()); // all three are under way at once
  if (dead != 0) return;
  const u64 buffer = epoch & 1 ? W * slot : 0, to = buffer + p.rank * slot;
  for (u32 i = first; i < m.count; i += step) {
    const WholeStretch t = i == first ? begin : wholeStretchAt(m, i);
    for (u32 v = thread; v < t.vectors; v += together) {
      if (i != first || v != thread) own = loadWeak(t.in + v * 16ull, Words<4>());
      const Words<4> line = seal(own);
#pragma unroll
      for (u32 k = 1; k <= W; k++) storeStrong(p.data[k % W] + to + (t.line + v) * 16ull, line);
    }
  }
  f.close(epoch);
  const u64 mine = p.data[0] + buffer;
  bool had = false; // a line from every rank, whose blocks of this number are at work then
  for (u32 i = first; i < m.count && f.ok; i += step) {
    const WholeStretch t = i == first ? begin : wholeStretchAt(m, i);
    for (u32 v = thread; v < t.vectors; v += together) {
      const u64 at = mine + (t.line + v) * 16ull;
      Words<4> x[W];
      awaitLines(f, at, slot, x);
      if (!f.ok) break;
      if (!had) startNext();
      had = true;
      sumLines<T>(op, x, at, slot, t.out + v * 16ull);
    }
  }
}

// Some is a number that is known when compiling, for a parameter of a lambda.
template <u32 n> struct Some { static constexpr u32 value = n; };

// twoshotPushWhole is twoshotPush, but a warp sends to one peer, and takes results from one: so what it stores is one long run. Where a
// thread has many vectors it has several under way. Lines are emptied as in fetchSealed.
template <class T, class Op, int W> SYMMEM_DEVICE void twoshotPushWhole(const PushParams<W> &p) {
  constexpr u32 F = W - 1;                              // peers
  constexpr u32 U = W == 2 ? 2 : 4, V = W == 2 ? 2 : 1; // vectors to send at a time, and to reduce
  Push<W> f(p, kKindTwoshotPush);
  const Op op{p.op};
  const u32 warp = blockIdx.x + gridDim.x * (threadIdx.x / 32), warps = gridDim.x * (blockDim.x / 32), lane = threadIdx.x % 32;
  const u32 q = f.peer(1 + warp % F); // the peer of this warp, whose vectors the warps that have it share
  const u32 begin = warp / F * 32 + lane, step = (warps / F + (warp % F < warps % F)) * 32;
  const u32 theirs = q * p.shard < p.vectors ? min(p.vectors - q * p.shard, p.shard) : 0;
  const u32 ours = p.rank * p.shard < p.vectors ? min(p.vectors - p.rank * p.shard, p.shard) : 0;
  const u64 slot = p.slot * 16ull, source = p.in + q * p.shard * 16ull;
  awaitPrevious();
  const u32 epoch = loadRelaxed(f.record()) + 1;
  const u32 dead = loadRelaxed(p.dead);
  Words<4> own = {};
  if (begin < theirs) own = loadWeak(source + begin * 16ull, Words<4>()); // all three are under way at once
  if (dead != 0) return;
  const u64 inputs = (epoch & 1) * 2 * W * slot, results = inputs + W * slot, mine = p.data[0];

  const u64 to = f.data(q) + inputs + p.rank * slot;
  u32 i = begin;
  if (i < theirs) storeStrong(to + i * 16ull, seal(own)), i += step;
  for (; i + (U - 1) * step < theirs; i += U * step) {
    Words<4> x[U];
#pragma unroll
    for (u32 u = 0; u < U; u++) x[u] = loadWeak(source + (i + u * step) * 16ull, Words<4>());
#pragma unroll
    for (u32 u = 0; u < U; u++) storeStrong(to + (i + u * step) * 16ull, seal(x[u]));
  }
#pragma unroll 1
  for (; i < theirs; i += step) storeStrong(to + i * 16ull, seal(loadWeak(source + i * 16ull, Words<4>())));

  f.close(epoch);
  const u32 all = warps * 32;
  u64 from[W]; // each rank's part of the own shard
#pragma unroll
  for (u32 r = 0; r < W; r++) from[r] = r == p.rank ? p.in + p.rank * p.shard * 16ull : mine + inputs + r * slot;
  auto reduceSome = [&](auto some, u32 v) {
    constexpr u32 n = decltype(some)::value;
    Words<4> x[W][n];
    u32 missing;
    do {
#pragma unroll
      for (u32 u = 0; u < n; u++)
#pragma unroll
        for (u32 r = 0; r < W; r++) x[r][u] = loadStrong(from[r] + (v + u * all) * 16ull, Words<4>());
      missing = p.rank;
#pragma unroll
      for (u32 u = 0; u < n; u++)
#pragma unroll
        for (u32 r = 0; r < W; r++)
          if (r != p.rank && !come(x[r][u])) missing = r;
    } while (missing != p.rank && f.again(missing));
    if (!f.ok) return;
#pragma unroll
    for (u32 u = 0; u < n; u++) {
      const u64 at = (v + u * all) * 16ull;
      Accumulator<T, Op, 4> a;
#pragma unroll
      for (u32 r = 0; r < W; r++) {
        const u32 mask = r == p.rank ? 0 : ~0u; // the own vector is not sealed
#pragma unroll
        for (int k = 0; k < 4; k++) x[r][u].w[k] ^= mask;
        if (r == 0)
          a.first(x[r][u]);
        else
          a.add(op, x[r][u]);
      }
      const Words<4> line = seal(a.template result<W>(op, W));
#pragma unroll
      for (u32 k = 1; k < W; k++) storeStrong(p.data[k] + results + p.rank * slot + at, line);
      storeWeak(p.out + p.rank * p.shard * 16ull + at, unseal(line));
#pragma unroll
      for (u32 r = 0; r < W; r++)
        if (r != p.rank) storeStrong(from[r] + at, Words<4>{});
    }
  };
  // Several at a time wait for the last of them, which costs more than it brings where there are few.
  u32 v = warp * 32 + lane;
  if (V > 1 && ours > 4 * all)
    for (; v + (V - 1) * all < ours && f.ok; v += V * all) reduceSome(Some<V>(), v);
#pragma unroll 1
  for (; v < ours && f.ok; v += all) reduceSome(Some<1>(), v);

  const u64 line = mine + results + q * slot, target = p.out + q * p.shard * 16ull;
  auto takeSome = [&](auto some, u32 v) {
    constexpr u32 n = decltype(some)::value;
    Words<4> x[n];
    bool there;
    do {
#pragma unroll
      for (u32 u = 0; u < n; u++) x[u] = loadStrong(line + (v + u * step) * 16ull, Words<4>());
      there = true;
#pragma unroll
      for (u32 u = 0; u < n; u++) there = there && come(x[u]);
    } while (!there && f.again(q));
    if (!f.ok) return;
#pragma unroll
    for (u32 u = 0; u < n; u++) {
      storeWeak(target + (v + u * step) * 16ull, unseal(x[u]));
      storeStrong(line + (v + u * step) * 16ull, Words<4>{});
    }
  };
  i = begin;
  if (theirs > 4 * step)
    for (; i + step < theirs && f.ok; i += 2 * step) takeSome(Some<2>(), i);
#pragma unroll 1
  for (; i < theirs && f.ok; i += step) takeSome(Some<1>(), i);
  // The next launch takes room, which another rank's block may need that this one waits for; and the first thread that lets it begin counts for its block. Between two ranks a thread that
  // has had lines knows that the other's block of its number is at work, as in one-shot. Between more the lines of a block come from blocks of other numbers: so no
  // thread may wait any more.
  if constexpr (W == 2) {
    if (begin < theirs) startNext();
  } else {
#if __CUDA_ARCH__ >= 900 // below it does nothing
    __syncthreads();
    startNext();
#endif
  }
}
