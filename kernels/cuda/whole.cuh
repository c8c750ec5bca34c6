// Collectives other than all-reduces that push lines, for messages whose pieces are whole vectors of 16 bytes and all of one length: the kernels of
// lines.cu and scatter.cu with PushParams, which is short, and without their lists of pieces.
//
// Where every rank sends to every other, a line is free when it is written again, two launches later, as lines.cuh says. Where one rank sends to all,
// or all send to one, those that get lines and send none tell the others when a launch begins: kFlagBegun. What they have had in the launches before was
// read by then, since a launch begins when the one before has ended, and so a sender waits until those that it sends to have begun the launch before
// its own. Hence it is at most one launch ahead of them, and in the other buffer. Who passes lines on has them from such a sender.
#pragma once
#include "lines.cuh"
#include "push.cuh"

// kFlagBegun is the flag by which a rank that sends nothing tells a sender which launch it has begun: it needs no release, since it is about launches
// that have ended.
enum : u32 { kFlagBegun = 0 };

// begun is the address of that flag, of reader's block of this number, which writer sets.
template <int W> SYMMEM_DEVICE u64 begun(const Push<W> &f, u32 reader, u32 writer, u32 block = blockIdx.x) {
  return f.data(reader) - (gridDim.x - block) * recordBytes(W) + kStateBytes + (kFlagBegun * writers(W) + writer) * 4;
}

// first is the first vector that this thread does, and every step behind it another: warps are dealt to the blocks in turn.
SYMMEM_DEVICE u32 firstVector() { return (blockIdx.x + gridDim.x * (threadIdx.x / 32)) * 32 + threadIdx.x % 32; }
SYMMEM_DEVICE u32 vectorStep() { return gridDim.x * blockDim.x; }

// behind is how many ranks are between one and another behind it: of what all others have of a rank, in the order behind it, the place.
template <int W> SYMMEM_DEVICE u32 behind(u32 one, u32 another) { return (another > one ? another : another + W) - one - 1; }

// closeTaken is for ranks that get lines and send none: it keeps the epoch when all threads of the block have had theirs. Not
// early, as Push::close does: the host takes it that a launch has ended which is counted in all records, and may run the plan in another stream then, whose
// launch would tell by kFlagBegun that lines were read which this one still waits for. Block.
template <int W> SYMMEM_DEVICE void closeTaken(Push<W> &f, u32 epoch) {
  if (__syncthreads_and(f.ok) && threadIdx.x == 0) storeRelaxed(f.record(), epoch);
}

// mayPush is for ranks that send and get nothing: it waits until the receivers have begun the launch before this one, thread r for rank r if `waits`
// says so, keeps the epoch, and says whether all went well, to all threads of the block alike. Block, of at least W threads.
template <int W> SYMMEM_DEVICE bool mayPush(Push<W> &f, bool waits, u32 epoch, u32 dead) {
  if (waits && dead == 0) {
    const u64 at = begun(f, f.p.rank, threadIdx.x);
    while (late(loadAcquire(at), epoch - 1))
      if (!f.again(threadIdx.x)) break;
  }
  if (!__syncthreads_and(f.ok && dead == 0)) return false;
  if (threadIdx.x == 0) storeRelaxed(f.record(), epoch);
  return true;
}

// A vector is two lines, the second half a slot behind the first: so that what a warp stores of each is one long run.
SYMMEM_DEVICE void storeLines(u64 to, u64 slot, u32 flag, const Words<4> &x) {
  storeHalves(to, lineOf(flag, x.w[0], x.w[1]));
  storeHalves(to + slot / 2, lineOf(flag, x.w[2], x.w[3]));
}
SYMMEM_DEVICE void loadLines(u64 at, u64 slot, Halves (&x)[2]) {
  x[0] = loadHalves(at);
  x[1] = loadHalves(at + slot / 2);
}
SYMMEM_DEVICE bool linesHave(const Halves (&x)[2], u32 flag) { return lineHas(x[0], flag) && lineHas(x[1], flag); }
SYMMEM_DEVICE Words<4> vectorOf(const Halves (&x)[2]) { return {{(u32)x[0].h[0], (u32)x[0].h[1], (u32)x[1].h[0], (u32)x[1].h[1]}}; }

// exchangeWhole gives every rank a piece of every other: `same` the same to all of them, as an all-gather, or else the piece that is at its place, as an
// all-to-all. `vectors` are those of a piece. A thread that has had its last lines lets the next launch begin, as in oneshotPushWhole.
template <bool same, int W> SYMMEM_DEVICE void exchangeWhole(const PushParams<W> &p) {
  constexpr u32 N = same ? 1 : W; // pieces of the input: this rank's own, and those of the ranks behind it
  Push<W> f(p, kKindLines);
  const u32 begin = firstVector(), step = vectorStep();
  const u64 slot = p.slot * 16ull, piece = p.vectors * 16ull;
  const u64 own = p.out + p.rank * piece;
  Words<4> x[N] = {};
  auto load = [&](u32 v) {
#pragma unroll
    for (u32 k = 0; k < N; k++) x[k] = loadWeak(p.in + (same ? 0 : f.peer(k) * piece) + v * 16ull, Words<4>());
  };
  awaitPrevious(p.in, p.vectors, p.op);
  const u32 epoch = loadRelaxed(f.record()) + 1;
  const u32 dead = loadRelaxed(p.dead);
  if (begin < p.vectors) load(begin); // all are under way at once
  if (dead != 0) return;
  const u32 flag = lineFlag(epoch);
  const u64 buffer = epoch & 1 ? W * slot : 0, to = buffer + p.rank * slot;
  for (u32 v = begin; v < p.vectors; v += step) {
    if (v != begin) load(v);
#pragma unroll
    for (u32 k = 1; k < W; k++) storeLines(p.data[k] + to + v * 16ull, slot, flag, x[same ? 0 : k]);
    if (!same || own != p.in) storeWeak(own + v * 16ull, x[0]); // else in place
  }
  f.close(epoch);
  const u64 mine = p.data[0] + buffer;
  for (u32 v = begin; v < p.vectors; v += step) {
    Halves y[W][2];
    u32 missing;
    do {
#pragma unroll
      for (u32 k = 1; k < W; k++) loadLines(mine + f.peer(k) * slot + v * 16ull, slot, y[k]);
      missing = p.rank;
#pragma unroll
      for (u32 k = 1; k < W; k++)
        if (!linesHave(y[k], flag)) missing = f.peer(k);
    } while (missing != p.rank && f.again(missing));
    if (!f.ok) break;
    if (v + step >= p.vectors) startNext();
#pragma unroll
    for (u32 k = 1; k < W; k++) storeWeak(p.out + f.peer(k) * piece + v * 16ull, vectorOf(y[k]));
  }
}

// broadcastWhole gives every rank what the rank p.shard has. Root waits for nobody when it has sent, and lets the next launch begin: that one's blocks
// wait until all ranks' blocks of this launch are at work.
template <int W> SYMMEM_DEVICE void broadcastWhole(const PushParams<W> &p) {
  Push<W> f(p, kKindLines);
  const u32 begin = firstVector(), step = vectorStep(), root = p.shard;
  const u64 slot = p.slot * 16ull;
  awaitPrevious();
  const u32 epoch = loadRelaxed(f.record()) + 1;
  const u32 dead = loadRelaxed(p.dead);
  const u32 flag = lineFlag(epoch);
  const u64 buffer = (epoch & 1) * W * slot + root * slot;
  if (p.rank == root) {
    Words<4> x = {};
    if (begin < p.vectors) x = loadWeak(p.in + begin * 16ull, Words<4>()); // all are under way at once
    if (!mayPush(f, threadIdx.x < W && threadIdx.x != root, epoch, dead)) return;
    for (u32 v = begin; v < p.vectors; v += step) {
      if (v != begin) x = loadWeak(p.in + v * 16ull, Words<4>());
#pragma unroll
      for (u32 k = 1; k < W; k++) storeLines(p.data[k] + buffer + v * 16ull, slot, flag, x);
    }
    startNext();
    return;
  }
  if (dead != 0) return;
  if (threadIdx.x == 0) storeRelaxed(begun(f, root, p.rank), epoch);
  const u64 mine = p.data[0] + buffer;
  for (u32 v = begin; v < p.vectors; v += step) {
    Halves y[2];
    do loadLines(mine + v * 16ull, slot, y);
    while (!linesHave(y, flag) && f.again(root));
    if (!f.ok) break;
    storeWeak(p.out + v * 16ull, vectorOf(y));
  }
  if (begin < p.vectors) startNext();
  closeTaken(f, epoch);
}

// passWhole is a broadcast between more than two ranks, of which root sends each of the others a shard of the message, and each of those passes the lines of its shard on to the rest as they come: so
// what leaves root is the message once. The shards are in the order of the ranks behind root, and the last ones may be shorter. `vectors` are the message's, whose lines every rank but root has in two
// buffers, and the slot is one. A block does the same vectors of every shard on all ranks, so that its lines come from blocks of its own number.
//
// Root waits until the others have begun the launch before this one, and what they pass on they have from root: so nobody stores to a place that may still be read.
template <int W> SYMMEM_DEVICE void passWhole(const PushParams<W> &p) {
  constexpr u32 S = W - 1; // shards
  Push<W> f(p, kKindLines);
  const u32 begin = firstVector(), step = vectorStep(), root = p.shard, length = (p.vectors + S - 1) / S;
  const u64 slot = p.slot * 16ull;
  awaitPrevious();
  const u32 epoch = loadRelaxed(f.record()) + 1;
  const u32 dead = loadRelaxed(p.dead);
  const u32 flag = lineFlag(epoch);
  const u64 buffer = epoch & 1 ? slot : 0;
  if (p.rank == root) {
    Words<4> x[S] = {};
    auto load = [&](u32 i) {
#pragma unroll
      for (u32 s = 0; s < S; s++)
        if (s * length + i < p.vectors) x[s] = loadWeak(p.in + (s * length + i) * 16ull, Words<4>());
    };
    if (begin < length) load(begin); // all are under way at once
    if (!mayPush(f, threadIdx.x < W && threadIdx.x != root, epoch, dead)) return;
    for (u32 i = begin; i < length; i += step) {
      if (i != begin) load(i);
#pragma unroll
      for (u32 s = 0; s < S; s++)
        if (s * length + i < p.vectors) storeLines(p.data[s + 1] + buffer + (s * length + i) * 16ull, slot, flag, x[s]);
    }
    startNext();
    return;
  }
  if (dead != 0) return;
  if (threadIdx.x == 0) storeRelaxed(begun(f, root, p.rank), epoch);
  const u64 mine = p.data[0] + buffer;
  const u32 own = behind<W>(root, p.rank);
  for (u32 i = begin; i < length && own * length + i < p.vectors; i += step) {
    const u64 at = (own * length + i) * 16ull;
    Halves y[2];
    do loadLines(mine + at, slot, y);
    while (!linesHave(y, flag) && f.again(root));
    if (!f.ok) break;
    const Words<4> x = vectorOf(y);
#pragma unroll
    for (u32 k = 1; k < W; k++)
      if (f.peer(k) != root) storeLines(p.data[k] + buffer + at, slot, flag, x);
    storeWeak(p.out + at, x);
  }
  for (u32 i = begin; i < length && f.ok; i += step) {
    Halves y[W][2];
    u32 missing;
    auto wanted = [&](u32 k, u64 &at) { // of the shard of the k-th rank behind this one
      const u32 q = f.peer(k), v = behind<W>(root, q) * length + i;
      at = v * 16ull;
      return q != root && v < p.vectors;
    };
    do {
      missing = p.rank;
      u64 at;
#pragma unroll
      for (u32 k = 1; k < W; k++)
        if (wanted(k, at)) loadLines(mine + at, slot, y[k]);
#pragma unroll
      for (u32 k = 1; k < W; k++)
        if (wanted(k, at) && !linesHave(y[k], flag)) missing = f.peer(k);
    } while (missing != p.rank && f.again(missing));
    if (!f.ok) break;
    u64 at;
#pragma unroll
    for (u32 k = 1; k < W; k++)
      if (wanted(k, at)) storeWeak(p.out + at, vectorOf(y[k]));
  }
  // A thread that has had a line of every rank knows that their blocks of this number are at work.
  if ((S - 1) * length + begin < p.vectors) startNext();
  closeTaken(f, epoch);
}

// takeAll is takeSums of a launch's buffer in this rank's own slots.
template <class T, class Op, int W> SYMMEM_DEVICE void takeAll(Push<W> &f, u32 epoch) {
  const u32 begin = firstVector(), step = vectorStep();
  const Op op{f.p.op};
  const u64 slot = f.p.slot * 16ull, mine = f.p.data[0] + (epoch & 1 ? W * slot : 0);
  takeSums<T>(f, op, begin, step, slot, mine);
}

// scatterWhole is a reduce-scatter: `vectors` are those of a share. The rank's own lines go through its own slot, as in oneshotPushWhole.
template <class T, class Op, int W> SYMMEM_DEVICE void scatterWhole(const PushParams<W> &p) {
  Push<W> f(p, kKindScatter);
  const u32 begin = firstVector(), step = vectorStep();
  const u64 slot = p.slot * 16ull, share = p.vectors * 16ull;
  Words<4> x[W] = {};
  auto load = [&](u32 v) {
#pragma unroll
    for (u32 k = 0; k < W; k++) x[k] = loadWeak(p.in + f.peer(k) * share + v * 16ull, Words<4>());
  };
  awaitPrevious(p.in, p.vectors, p.op);
  const u32 epoch = loadRelaxed(f.record()) + 1;
  const u32 dead = loadRelaxed(p.dead);
  if (begin < p.vectors) load(begin); // all are under way at once
  if (dead != 0) return;
  const u64 to = (epoch & 1 ? W * slot : 0) + p.rank * slot;
  for (u32 v = begin; v < p.vectors; v += step) {
    if (v != begin) load(v);
#pragma unroll
    for (u32 k = 1; k <= W; k++) storeStrong(p.data[k % W] + to + v * 16ull, seal(x[k % W]));
  }
  f.close(epoch);
  takeAll<T, Op>(f, epoch);
}

// rootWhole is a reduce: all send to the rank p.shard, which combines. A sender that may send waits for nobody any more.
template <class T, class Op, int W> SYMMEM_DEVICE void rootWhole(const PushParams<W> &p) {
  Push<W> f(p, kKindScatter);
  const u32 begin = firstVector(), step = vectorStep(), root = p.shard;
  const u64 slot = p.slot * 16ull;
  awaitPrevious(p.in, p.vectors, p.op);
  const u32 epoch = loadRelaxed(f.record()) + 1;
  const u32 dead = loadRelaxed(p.dead);
  Words<4> x = {};
  if (begin < p.vectors) x = loadWeak(p.in + begin * 16ull, Words<4>()); // all are under way at once
  if (p.rank != root) {
    if (!mayPush(f, threadIdx.x == root, epoch, dead)) return;
    startNext();
  } else {
    if (dead != 0) return;
    if (threadIdx.x < W && threadIdx.x != root) storeRelaxed(begun(f, threadIdx.x, root), epoch);
  }
  const u64 to = f.data(root) + ((epoch & 1) * W + p.rank) * slot;
  for (u32 v = begin; v < p.vectors; v += step) {
    if (v != begin) x = loadWeak(p.in + v * 16ull, Words<4>());
    storeStrong(to + v * 16ull, seal(x));
  }
  if (p.rank != root) return;
  takeAll<T, Op>(f, epoch);
  closeTaken(f, epoch);
}

// flowVectors is how many vectors of a chunk each thread has.
SYMMEM_DEVICE constexpr u32 flowVectors(int world) { return world == 2 ? 8 : world <= 4 ? 4 : 2; }

// scatterFlow is a reduce-scatter of long shares, or a reduce to the rank p.shard, if that is one: then all other ranks have shares, from the one behind it on, of which the
// last may be shorter, and store what they combine to its output (p.out). Of each two blocks the first sends chunks of the other ranks' shares to their workspaces, in lines as those of
// scatterWhole, and the second combines the chunks of this rank's share as their lines come: so the links always have something to carry, and nobody fences. A line has one place, which is
// free when its owner's second block has emptied it in the launch before: it tells the writers' first blocks by kFlagBegun, which here counts launches that were taken. Until they have sent, first blocks wait
// for nothing of their own launch, and second blocks of a reduce-scatter for first ones only, which have the lower number and so begin first where not all are at work at a time. It is launched
// behind the launch before: where it may begin early, all of them take longer. Of a reduce, root's second blocks have
// nothing to combine and tell the others at once, who wait for that before they store: root's output is free then, and in place a line of root's says that root has read what is stored
// in its place. Root's first blocks wait at the end until the others' second blocks have combined, and hence stored; so of each two both are to be at work, which the host sees to.
//
// The record is no sign for the host that lines are empty: only those that tell a peer fence. So a plan changes streams when its stream has come to its end.
//
// The workspace is, of each owner, [W-1] slots of p.slot vectors by writer, the one behind the owner first.
template <class T, class Op, int W> SYMMEM_DEVICE void scatterFlow(const PushParams<W> &p) {
  constexpr u32 F = flowVectors(W); // to send at a time, and to combine
  Push<W> f(p, kKindScatter);
  const u32 tid = threadIdx.x, threads = blockDim.x;
  // A block that is the only one does both, and the last one of an odd number nothing.
  const bool alone = gridDim.x == 1;
  const u32 pairs = alone ? 1 : gridDim.x / 2, pair = blockIdx.x / 2;
  const bool sends = alone || (blockIdx.x % 2 == 0 && pair < pairs), combines = alone || blockIdx.x % 2 == 1;
  const u32 root = p.shard;
  const bool toRoot = root < W;
  const u32 length = toRoot ? (p.vectors + W - 2) / (W - 1) : p.vectors; // of a share, in vectors
  const u32 chunk = F * threads, chunks = (length + chunk - 1) / chunk;
  const u64 slot = p.slot * 16ull, step = threads * 16ull;
  const Op op{p.op};
  // Where among the writers of owner's slots a rank is, and the peer that this thread waits for or tells, if it does.
  auto place = [](u32 owner, u32 writer) { return behind<W>(owner, writer); };
  // Where an owner's share begins in the inputs, in vectors, and how many of them a chunk has that begins at `first` of it. Root's is behind the end.
  auto begins = [&](u32 owner) { return (toRoot ? place(root, owner) : owner) * length; };
  auto vectorsOf = [&](u32 owner, u32 first) {
    const u32 all = toRoot ? p.vectors : W * length, at = begins(owner) + first;
    return first >= length || at >= all ? 0 : min(chunk, min(length - first, all - at));
  };
  const bool told = tid > 0 && tid < W;
  const u32 peer = f.peer(told ? tid : 0);
  const u32 epoch = loadRelaxed(f.record()) + 1;
  if (!__syncthreads_and(loadRelaxed(p.dead) == 0)) return; // all or none: one thread waits for what the others do
  if (sends) {
    // A chunk's vectors of this thread, loaded without a branch between the loads, or they would wait for each other. Where they go to one after the other, the first are on their way while the wait for their places is.
    Words<4> x[F];
    auto load = [&](u64 from) {
#pragma unroll
      for (u32 u = 0; u < F; u++) x[u] = loadStrong(from + tid * 16ull + u * step, Words<4>()); // which may be root's output
    };
    auto source = [&](u32 k, u32 first) { return p.in + (begins(f.peer(k)) + first) * 16ull; };
    constexpr bool together = W == 4; // a chunk to all at a time, so that all links are busy at all times: for others it was not faster, or not measured
    const bool early = !together && pair < chunks && vectorsOf(f.peer(1), pair * chunk) == chunk;
    if (early) load(source(1, pair * chunk));
    if (told) {
      const u64 taken = begun(f, p.rank, peer);
      while (late(loadAcquire(taken), epoch - 1))
        if (!f.again(peer)) break;
    }
    if (!__syncthreads_and(f.ok)) return;
#pragma unroll 1
    for (u32 c = pair; c < chunks; c += pairs) {
      const u32 first = c * chunk;
      if constexpr (together) {
        constexpr u32 G = 2; // vectors for each of them at a time
        bool whole = true;
        for (u32 k = 1; k < W; k++) whole = whole && (vectorsOf(f.peer(k), first) == chunk || toRoot && f.peer(k) == root);
        if (whole) {
          u64 from[W - 1], to[W - 1];
#pragma unroll
          for (u32 k = 1; k < W; k++) {
            const u32 q = f.peer(k);
            from[k - 1] = (toRoot && q == root ? p.in : source(k, first)) + tid * 16ull; // root has no share: it is sent nothing
            to[k - 1] = p.data[k] + place(q, p.rank) * slot + (first + tid) * 16ull;
          }
#pragma unroll 1
          for (u32 u = 0; u < F; u += G) {
            Words<4> y[W - 1][G];
#pragma unroll
            for (u32 k = 0; k < W - 1; k++)
#pragma unroll
              for (u32 g = 0; g < G; g++) y[k][g] = loadStrong(from[k] + (u + g) * step, Words<4>());
#pragma unroll
            for (u32 k = 0; k < W - 1; k++) {
              if (toRoot && f.peer(k + 1) == root) continue;
#pragma unroll
              for (u32 g = 0; g < G; g++) storeStrong(to[k] + (u + g) * step, seal(y[k][g]));
            }
          }
          continue;
        }
      }
#pragma unroll 1
      for (u32 k = 1; k < W; k++) {
        const u32 q = f.peer(k), n = vectorsOf(q, first);
        const u64 from = source(k, first), to = p.data[k] + place(q, p.rank) * slot + first * 16ull;
        if (n < chunk) { // the last one
          for (u32 i = tid; i < n; i += threads) storeStrong(to + i * 16ull, seal(loadStrong(from + i * 16ull, Words<4>())));
          continue;
        }
        if (!early || k != 1 || c != pair) load(from);
#pragma unroll
        for (u32 u = 0; u < F; u++) storeStrong(to + tid * 16ull + u * step, seal(x[u]));
      }
    }
  }
  if (combines) {
    const u64 mine = p.data[0], in = p.in + begins(p.rank) * 16ull, out = p.out + (toRoot ? begins(p.rank) * 16ull : 0);
    const u32 sender = alone ? 0 : blockIdx.x - 1; // the block before this one
    if (toRoot && p.rank != root) {
      if (told && peer == root)
        while (late(loadAcquire(begun(f, p.rank, root, sender)), epoch) && f.again(root)) {
        }
      if (!__syncthreads_and(f.ok)) return;
    }
    // combine does N vectors, so many bytes apart, from the one at `at` of the share on, when their lines have come, and empties those.
    auto combine = [&](u64 at, auto &x) {
      constexpr u32 N = sizeof(x) / sizeof(x[0]);
      auto load = [&](u32 r, u64 from) {
        from += at;
        if constexpr (W > 4) asm volatile("" : "+l"(from)); // or each vector's address would have a register while the thread waits
#pragma unroll
        for (u32 u = 0; u < N; u++) x[u][r] = loadStrong(from + u * step, Words<4>());
      };
#pragma unroll
      for (u32 r = 0; r < W; r++) load(r, r == p.rank ? in : mine + place(p.rank, r) * slot);
      for (;;) {
        u32 missing = p.rank;
#pragma unroll
        for (u32 u = 0; u < N; u++)
#pragma unroll
          for (u32 r = 0; r < W; r++)
            if (r != p.rank && !come(x[u][r])) missing = r;
        if (missing == p.rank || !f.again(missing)) break;
#pragma unroll
        for (u32 r = 0; r < W; r++)
          if (r != p.rank) load(r, mine + place(p.rank, r) * slot);
      }
      if (!f.ok) return;
#pragma unroll
      for (u32 u = 0; u < N; u++) {
        Accumulator<T, Op, 4> a;
#pragma unroll
        for (u32 r = 0; r < W; r++) {
          const u32 mask = r == p.rank ? 0 : ~0u; // the own vector is not sealed
#pragma unroll
          for (int i = 0; i < 4; i++) x[u][r].w[i] ^= mask;
          if (r == 0)
            a.first(x[u][r]);
          else
            a.add(op, x[u][r]);
        }
        storeStrong(out + at + u * step, a.template result<W>(op, W));
#pragma unroll
        for (u32 r = 0; r < W; r++)
          if (r != p.rank) storeWeak(mine + place(p.rank, r) * slot + at + u * step, Words<4>{});
      }
    };
#pragma unroll 1
    for (u32 c = pair; c < chunks && f.ok; c += pairs) {
      const u32 first = c * chunk, n = vectorsOf(p.rank, first);
      if (n == 0) break;
      if (n < chunk) { // the last one
        Words<4> x[1][W];
        for (u32 i = tid; i < n && f.ok; i += threads) combine((first + i) * 16ull, x);
        continue;
      }
      Words<4> x[F][W];
      combine((first + tid) * 16ull, x);
    }
    if (!__syncthreads_and(f.ok)) return;
    if (told) {
      fenceSystem(); // what was emptied was before the place is free, and what was stored to root is there
      storeRelaxed(begun(f, peer, p.rank, sender), epoch);
    }
  }
  if (sends && p.rank == root) {
    if (told) {
      const u64 taken = begun(f, root, peer);
      while (late(loadAcquire(taken), epoch))
        if (!f.again(peer)) break;
    }
    if (!__syncthreads_and(f.ok)) return;
  }
  if (tid == 0) storeRelaxed(f.record(), epoch);
}
