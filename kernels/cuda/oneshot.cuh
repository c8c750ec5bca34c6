// All-reduce with one exchange: every rank computes everything.
#pragma once
#include "frame.cuh"

// oneshotLL pushes 8 bytes of data in a line of 16, each 4 bytes with a flag beside it in one access of 8, so that what has
// come is known without a barrier. Two buffers take turns: a line is written again two launches later, which a peer comes to only when it
// has this rank's lines of the launch between, and those are sent after this launch has read everything.
//
// The flag is an odd number made from the launch's, never 0, so memory that begins with zeros holds no flag.
template <class T, class Op, int W> SYMMEM_DEVICE void oneshotLL(const Params &p) {
  Frame<W> f(p, kKindOneshotLL);
  awaitPrevious();
  const u64 in = input(f, p.rank), out = output(f, p.rank);
  const Span<T, 2> s(in, out, p.count);
  const Op op{p.op};
  const u64 begin = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
  Words<2> own = {};
  if (begin < s.vectors) own = s.template load<false>(in, begin); // under way while the next loads are
  const bool alive = f.alive();
  const u32 epoch = f.open(), flag = epoch << 1 | 1;
  if (!alive) return;
  const u64 buffer = (epoch & 1) * f.world() * p.span, mine = f.data(p.rank) + buffer;
  for (u64 v = begin; v < s.vectors; v += step) {
    if (v != begin) own = s.template load<false>(in, v);
    const Halves line = {{(u64)flag << 32 | own.w[0], (u64)flag << 32 | own.w[1]}};
#pragma unroll
    for (u32 k = 1; k < f.world(); k++) storeHalves(f.data(f.peer(k)) + buffer + p.rank * p.span + v * 16, line);
  }
  for (u64 v = begin; v < s.vectors; v += step) {
    own = s.template load<false>(in, v);
    const Words<2> sum = reduce<T, Op, W, 2>(op, f.world(), [&](u32 first, auto &x) {
      constexpr u32 B = sizeof(x) / sizeof(x[0]);
      Halves line[B];
      u32 missing;
      do {
#pragma unroll
        for (u32 j = 0; j < B; j++) line[j] = loadHalves(mine + slot(f, first + j) * p.span + v * 16);
        missing = p.rank;
#pragma unroll
        for (u32 j = 0; j < B; j++)
          if (other(f, first + j) && ((u32)(line[j].h[0] >> 32) != flag || (u32)(line[j].h[1] >> 32) != flag)) missing = first + j;
      } while (missing != p.rank && f.again(missing));
#pragma unroll
      for (u32 j = 0; j < B; j++) x[j] = first + j == p.rank ? own : Words<2>{{(u32)line[j].h[0], (u32)line[j].h[1]}};
    });
    if (f.ok) s.store(out, v, sum);
  }
  f.close(epoch);
}

// oneshotPush is oneshotLL with lines that are all data: see seal. Two buffers take turns, and who reads a line empties it:
// a peer comes to write it again only after a launch whose lines this rank has sent after this one.
template <class T, class Op, int W> SYMMEM_DEVICE void oneshotPush(const Params &p) {
  Frame<W> f(p, kKindOneshotPush);
  awaitPrevious();
  const u64 in = input(f, p.rank), out = output(f, p.rank);
  const Span<T, 4> s(in, out, p.count);
  const Op op{p.op};
  const u64 begin = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
  Words<4> own = {};
  if (begin < s.vectors) own = s.template load<false>(in, begin); // under way while the next loads are
  const bool alive = f.alive();
  const u32 epoch = f.open();
  if (!alive) return;
  const u64 buffer = (epoch & 1) * f.world() * p.span, mine = f.data(p.rank) + buffer;
  for (u64 v = begin; v < s.vectors; v += step) {
    if (v != begin) own = s.template load<false>(in, v);
    const Words<4> line = seal(own);
#pragma unroll
    for (u32 k = 1; k < f.world(); k++) storeStrong(f.data(f.peer(k)) + buffer + p.rank * p.span + v * 16, line);
  }
  for (u64 v = begin; v < s.vectors; v += step) {
    own = s.template load<false>(in, v);
    const Words<4> sum =
        reduce<T, Op, W, 4>(op, f.world(), [&](u32 first, auto &x) { fetchSealed<T>(f, mine + v * 16, first, own, x); });
    if (f.ok) s.store(out, v, sum);
  }
  if (begin < s.vectors) startNext(); // who has had lines of all ranks knows that their blocks of this number are at work
  f.close(epoch);
}

// oneshotPull loads what it needs from every rank: from the inputs, or, staged, from copies in the workspace. The inputs must
// stay until all have read them, hence the second barrier; the copies take turns and need only one, as the lines of
// oneshotLL. With kNoBarrier it is a plain reduction of arrays that are ready.
template <class T, class Op, int W> SYMMEM_DEVICE void oneshotPull(const Params &p) {
  constexpr int U = W == 0 ? 1 : W <= 2 ? 4 : W <= 4 ? 2 : 1;
  Frame<W> f(p, kKindOneshotPull);
  awaitPrevious();
  if (!__syncthreads_and(f.alive())) return; // all or none: the barrier is of all threads
  const bool staged = p.flags & kStaged, barrier = !(p.flags & kNoBarrier);
  const u64 in = input(f, p.rank), out = output(f, p.rank);
  const Span<T, 4> s(in, out, p.count);
  const Op op{p.op};
  const u64 begin = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
  u32 epoch = 0;
  u64 copies = 0;
  if (barrier) epoch = f.open();
  if (barrier && staged) {
    copies = (epoch & 1) * p.span;
    for (u64 v = begin; v < s.vectors; v += step) storeWeak(f.data(p.rank) + copies + v * 16, s.template load<false>(in, v));
    if (!f.template barrier<true>(kFlagStart, epoch)) return;
  } else if (barrier && !f.template barrier<false>(kFlagStart, epoch)) {
    return;
  }
  const Words<4> none = {};
  for (u64 v = begin; v < s.vectors; v += U * step) {
#pragma unroll
    for (int u = 0; u < U; u++) {
      const u64 i = v + u * step;
      if (i >= s.vectors) continue;
      const Words<4> sum = reduce<T, Op, W, 4>(op, f.world(), [&](u32 first, auto &x) {
        constexpr u32 B = sizeof(x) / sizeof(x[0]);
#pragma unroll
        for (u32 j = 0; j < B; j++) {
          u32 r = first + j;
          x[j] = none;
          if (r >= f.world()) continue;
          x[j] = staged ? loadStrong(f.data(r) + copies + i * 16, none) : s.template load<true>(input(f, r), i);
        }
      });
      s.store(out, i, sum);
    }
  }
  if (!barrier) return;
  if (!staged && !f.template barrier<true>(kFlagEnd, epoch)) return;
  f.close(epoch);
}
