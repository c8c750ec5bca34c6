// All-reduce in two halves: every rank reduces one shard of all inputs and gives it to everybody. Shard q is the vectors from
// q * Params::shard on.
#pragma once
#include "frame.cuh"

// twoshotPush sends each shard to its owner's buffer, and the owner sends its result to everybody's, in lines as oneshotPush
// has them: no barrier, and each half of it is under way as soon as a line has come.
template <class T, class Op, int W> SYMMEM_DEVICE void twoshotPush(const Params &p) {
  Frame<W> f(p, kKindTwoshotPush);
  awaitPrevious();
  if (!f.alive()) return;
  const u32 epoch = f.open(), world = f.world();
  const u64 in = input(f, p.rank), out = output(f, p.rank);
  const u64 inputs = (epoch & 1) * 2 * world * p.span, results = inputs + world * p.span;
  const u64 mine = f.data(p.rank);
  const Span<T, 4> s(in, out, p.count);
  const Op op{p.op};
  const u64 begin = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
  for (u64 i = begin; i < p.shard; i += step) {
    Words<4> x[W];
#pragma unroll
    for (u32 k = 1; k < W; k++) {
      const u64 v = f.peer(k) * p.shard + i;
      if (v < s.vectors) x[k] = s.template load<false>(in, v);
    }
#pragma unroll
    for (u32 k = 1; k < W; k++) {
      const u32 q = f.peer(k);
      if (q * p.shard + i < s.vectors) storeStrong(f.data(q) + inputs + p.rank * p.span + i * 16, seal(x[k]));
    }
  }
  for (u64 i = begin; i < p.shard; i += step) {
    const u64 v = p.rank * p.shard + i;
    if (v >= s.vectors) break;
    const Words<4> own = s.template load<false>(in, v);
    const Words<4> sum = reduce<T, Op, W, 4>(
        op, world, [&](u32 first, auto &x) { fetchSealed<T>(f, mine + inputs + i * 16, first, own, x); });
    if (!f.ok) break;
    const Words<4> line = seal(sum);
#pragma unroll
    for (u32 k = 1; k < W; k++) storeStrong(f.data(f.peer(k)) + results + p.rank * p.span + i * 16, line);
    s.store(out, v, unseal(line));
  }
  for (u64 i = begin; i < p.shard; i += step) {
    Words<4> line[W];
    u32 missing;
    do {
#pragma unroll
      for (u32 q = 0; q < W; q++) line[q] = loadStrong(mine + results + q * p.span + i * 16, Words<4>());
      missing = p.rank;
#pragma unroll
      for (u32 q = 0; q < W; q++)
        if (q != p.rank && q * p.shard + i < s.vectors && !come(line[q])) missing = q;
    } while (missing != p.rank && f.again(missing));
    if (!f.ok) break;
#pragma unroll
    for (u32 q = 0; q < W; q++) {
      const u64 v = q * p.shard + i;
      if (q == p.rank || v >= s.vectors) continue;
      storeStrong(mine + results + q * p.span + i * 16, Words<4>{});
      s.store(out, v, unseal(line[q]));
    }
  }
  // Results of the first shard, or what it is made of, are from the blocks of this number on all ranks: who has had some knows that those are at work.
  if (begin < p.shard && begin < s.vectors) startNext();
  f.close(epoch);
}

// turn moves x[k] to x[(k + by) % W], by below 8. Indexes are constants, so that x stays in registers.
template <int W, int U> SYMMEM_DEVICE void turn(Words<4> (&x)[W][U], u32 by) {
#pragma unroll
  for (u32 bit = 1; bit < W; bit *= 2) {
    if ((by & bit) == 0) continue;
    Words<4> y[W][U];
#pragma unroll
    for (u32 k = 0; k < W; k++)
#pragma unroll
      for (int u = 0; u < U; u++) y[(k + bit) % W][u] = x[k][u];
#pragma unroll
    for (u32 k = 0; k < W; k++)
#pragma unroll
      for (int u = 0; u < U; u++) x[k][u] = y[k][u];
  }
}

// twoshotPull loads the own shard from every input and stores the result to every output. The first barrier tells that
// inputs are ready and outputs free, the second that everything is written. In place is safe: a vector is read and written
// by the same thread of the same rank.
template <class T, class Op, int W> SYMMEM_DEVICE void twoshotPull(const Params &p) {
  constexpr int U = W == 0 ? 2 : W <= 2 ? 8 : W <= 4 ? 4 : 2;
  Frame<W> f(p, kKindTwoshotPull);
  awaitPrevious();
  if (!__syncthreads_and(f.alive())) return;
  const u32 epoch = f.open(), world = f.world();
  const Span<T, 4> s(input(f, p.rank), output(f, p.rank), p.count);
  const Op op{p.op};
  const u64 low = p.rank * p.shard, high = low + p.shard < s.vectors ? low + p.shard : s.vectors;
  const u64 step = gridDim.x * (u64)blockDim.x;
  if (!f.template barrier<false>(kFlagStart, epoch)) return;
  for (u64 v = low + blockIdx.x * (u64)blockDim.x + threadIdx.x; v < high; v += U * step) {
    if (v + (U - 1) * step < high && s.whole(v) && s.whole(v + (U - 1) * step) && s.alike) {
      Accumulator<T, Op, 4> a[U];
      if constexpr (W != 0) {
        Words<4> x[W][U];
        // Peers in turn from the next rank on, so that not all ranks load from the same one; then into rank order.
#pragma unroll
        for (u32 k = 0; k < W; k++) {
          const u64 from = s.at(input(f, f.peer(k)), v);
#pragma unroll
          for (int u = 0; u < U; u++) x[k][u] = loadStrong(from + u * step * 16, Words<4>());
        }
        turn(x, p.rank);
#pragma unroll
        for (int u = 0; u < U; u++) {
          a[u].first(x[0][u]);
#pragma unroll
          for (u32 r = 1; r < W; r++) a[u].add(op, x[r][u]);
        }
      } else {
#pragma unroll 1
        for (u32 r = 0; r < world; r++) {
          Words<4> x[U];
          const u64 from = s.at(input(f, r), v);
#pragma unroll
          for (int u = 0; u < U; u++) x[u] = loadStrong(from + u * step * 16, Words<4>());
#pragma unroll
          for (int u = 0; u < U; u++) {
            if (r == 0)
              a[u].first(x[u]);
            else
              a[u].add(op, x[u]);
          }
        }
      }
      Words<4> sum[U];
#pragma unroll
      for (int u = 0; u < U; u++) sum[u] = a[u].result(op, world);
#pragma unroll
      for (u32 k = 0; k < world; k++) {
        const u64 to = s.at(output(f, f.peer(k)), v);
#pragma unroll
        for (int u = 0; u < U; u++) storeWeak(to + u * step * 16, sum[u]);
      }
      continue;
    }
#pragma unroll 1
    for (int u = 0; u < U; u++) {
      const u64 i = v + u * step;
      if (i >= high) break;
      Accumulator<T, Op, 4> a;
#pragma unroll 1
      for (u32 r = 0; r < world; r++) {
        const Words<4> x = s.template load<true>(input(f, r), i);
        if (r == 0)
          a.first(x);
        else
          a.add(op, x);
      }
      const Words<4> sum = a.result(op, world);
#pragma unroll 1
      for (u32 k = 0; k < world; k++) s.store(output(f, f.peer(k)), i, sum);
    }
  }
  if (f.template barrier<true>(kFlagEnd, epoch)) f.close(epoch);
}

// twoshotFlow sends shards to their owners' buffers in laps, and the owners store results to every output: only stores cross
// the links, which carry more that way than with loads. A block's lap is Params::span bytes of every shard. Flags count
// laps: Full tells an owner that a lap is in its buffer; Free tells that an owner is done with a lap, which makes its
// place free, and, for the last one, says that its results are in the outputs.
template <class T, class Op, int W> SYMMEM_DEVICE void twoshotFlow(const Params &p) {
  constexpr u32 B = W == 0 ? 3 : W <= 4 ? W - 1 : 4; // peers to send to at a time: the links like it best when all are busy
  constexpr u32 U = W == 2 ? 4 : W == 3 ? 2 : 1; // vectors to send at a time
  constexpr u32 V = W == 0 || W > 4 ? 1 : 2; // vectors to reduce at a time
  Frame<W> f(p, kKindTwoshotFlow);
  awaitPrevious();
  if (!__syncthreads_and(f.alive())) return;
  const u32 epoch = f.open();
  const u32 world = f.world(), tid = threadIdx.x, threads = blockDim.x, blocks = gridDim.x;
  const u32 base = loadRelaxed(f.record + 4);
  const u64 in = input(f, p.rank), mine = f.data(p.rank);
  const Span<T, 4> s(in, output(f, p.rank), p.count);
  const Op op{p.op};
  const u32 lap = (u32)(p.span / 16); // vectors
  const u64 chunks = (p.shard + lap - 1) / lap;
  const u32 laps = chunks > blockIdx.x ? (u32)((chunks - blockIdx.x + blocks - 1) / blocks) : 0;
  // Where the lap that is counted n lies in its owner's buffer.
  auto place = [&](u32 writer, u32 n) { return (((u64)writer * blocks + blockIdx.x) * kFlowSlots + n % kFlowSlots) * p.span; };

#pragma unroll 1
  for (u32 l = 0; laps != 0 && l < laps + kFlowDelay; l++) {
    const bool push = l < laps, pull = l >= kFlowDelay;
    const u32 m = l - kFlowDelay;
    for (u32 r = tid; r < world; r += threads) {
      if (r == p.rank) continue;
      if (push) f.await(kFlagFree, r, base + l + 1 - kFlowSlots);
      if (pull) f.await(kFlagFull, r, base + m + 1);
    }
    if (!__syncthreads_and(f.ok)) return;
    if (push) {
      const u64 first = ((u64)l * blocks + blockIdx.x) * lap;
      const u32 n = p.shard - first < lap ? (u32)(p.shard - first) : lap;
      const u64 slot = place(p.rank, base + l);
#pragma unroll 1
      for (u32 j = tid; j < n; j += U * threads) {
#pragma unroll
        for (u32 k = 1; k < world; k += B) {
          Words<4> x[B][U];
#pragma unroll
          for (u32 b = 0; b < B; b++) {
            if (k + b >= world) break;
            const u64 v = f.peer(k + b) * p.shard + first + j;
#pragma unroll
            for (u32 u = 0; u < U; u++)
              if (j + u * threads < n && v + u * threads < s.vectors) x[b][u] = s.template load<false>(in, v + u * threads);
          }
#pragma unroll
          for (u32 b = 0; b < B; b++) {
            if (k + b >= world) break;
            const u32 q = f.peer(k + b);
            const u64 v = q * p.shard + first + j, to = f.data(q) + slot + j * 16;
#pragma unroll
            for (u32 u = 0; u < U; u++)
              if (j + u * threads < n && v + u * threads < s.vectors) storeWeak(to + u * threads * 16, x[b][u]);
          }
        }
      }
    }
    if (pull) {
      const u64 first = ((u64)m * blocks + blockIdx.x) * lap, v = p.rank * p.shard + first;
      const u64 left = p.shard - first, here = s.vectors > v ? s.vectors - v : 0;
      const u32 n = (u32)(left < here ? left < lap ? left : lap : here < lap ? here : lap);
#pragma unroll 1
      for (u32 j = tid; j < n; j += V * threads) {
#pragma unroll
        for (u32 u = 0; u < V; u++) {
          const u32 i = j + u * threads;
          if (i >= n) continue;
          const bool whole = s.whole(v + i);
          const Words<4> sum = reduce<T, Op, W, 4>(op, world, [&](u32 from, auto &x) {
            constexpr u32 R = sizeof(x) / sizeof(x[0]);
#pragma unroll
            for (u32 b = 0; b < R; b++) {
              const u32 r = slot(f, from + b);
              x[b] = loadStrong(r == p.rank && whole ? s.at(in, v + i) : mine + place(r, base + m) + i * 16, Words<4>());
            }
            if (whole) return;
            const Words<4> own = s.template load<false>(in, v + i);
#pragma unroll
            for (u32 b = 0; b < R; b++)
              x[b] = from + b == p.rank ? own : x[b];
          });
#pragma unroll
          for (u32 k = 0; k < world; k++) s.store(output(f, f.peer(k)), v + i, sum);
        }
      }
    }
    __syncthreads();
    if (l == laps + kFlowDelay - 1 && tid == 0) storeRelaxed(f.record + 4, base + laps); // in front of a fence and of the epoch, which the host looks at
    if (tid < world) fenceSystem();
    for (u32 r = tid; r < world; r += threads) {
      if (r == p.rank) continue;
      if (push) storeRelaxed(f.flag(r, kFlagFull, p.rank), base + l + 1);
      if (pull) storeRelaxed(f.flag(r, kFlagFree, p.rank), base + m + 1);
    }
  }
  for (u32 r = tid; r < world; r += threads)
    if (r != p.rank) f.await(kFlagFree, r, base + laps);
  if (__syncthreads_and(f.ok) && tid == 0) storeRelaxed(f.record, epoch);
}
