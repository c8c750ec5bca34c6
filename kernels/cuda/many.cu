// Collectives of a list of tensors in one launch. The list is cut into stretches of vectors of one tensor each, and a block of the
// grid takes every so many-th of them. The generator compiles this file once for each dtype, once with SYMMEM_COPY for what only copies, and with SYMMEM_MOVES for
// what moves bytes between ranks. All-reduces of whole vectors have a kernel of their own: manyPushWhole in push.cuh.
//
//   symmem_many_oneshot_<dtype>  all-reduce: push lines, as oneshot_push for f32, f16 and bf16 and as oneshot_ll for others; no barrier
//   symmem_many_scatter_<dtype>  reduce-scatter: push each rank the lines of its shares, in the same way
//   symmem_many_pull_<dtype>     both: load the own stretches from every input, store the result to every output, or the own one, between two barriers
//   symmem_many_copy_<width>     copy, between this rank's own memory; waits for nobody
//   symmem_many_lines            all-gather and broadcast: push lines as lines.cu does; no barrier
//   symmem_many_moves            both: load what others have for this rank, store it to the own outputs, between two barriers
#include "copy.cuh"
#include "lines.cuh"
#include "stretch.cuh"

// The lists of symmem_many_lines and symmem_many_scatter are [world][count] stretches, of as many for each rank: those that this rank sends, and those that it gets. A stretch is done by
// blocks of one number on all ranks, and may be empty. Where every two ranks that send to each other do so in every launch, a line is free when it is written again, two launches
// later, as lines.cuh says: what counts is that a launch ends only when all its blocks have what they wait for, whichever of them it is. A rank that gets nothing from a
// rank that it sends to waits until that one has taken the launch two before. The table says of whom that is so: u64[world] of kAwaits and kTells, or 0 if of none.
enum : u32 { kAwaits = 1, kTells = 2 };

SYMMEM_DEVICE u32 roleOf(const Many &m, u32 r) { return (u32)((const u64 *)m.table)[r]; }

// mayWrite waits until the lines that this rank is going to write were taken. Block.
SYMMEM_DEVICE bool mayWrite(Frame<0> &f, const Many &m, u32 epoch) {
  if (m.table == 0) return true;
  for (u32 r = threadIdx.x; r < f.world(); r += blockDim.x)
    if (roleOf(m, r) & kAwaits) f.await(kFlagTaken, r, epoch - 2);
  return __syncthreads_and(f.ok);
}
// tellTaken says that this rank has taken the lines of a launch. Block.
SYMMEM_DEVICE void tellTaken(Frame<0> &f, const Many &m, u32 epoch) {
  if (m.table == 0 || !__syncthreads_and(f.ok)) return;
  for (u32 r = threadIdx.x; r < f.world(); r += blockDim.x)
    if (roleOf(m, r) & kTells) f.signal(r, kFlagTaken, epoch);
}

#ifdef SYMMEM_COPY

template <class T> SYMMEM_DEVICE void manyCopy(const Many &m) {
  awaitPrevious();
  for (u32 i = blockIdx.x; i < m.count; i += gridDim.x) {
    const Stretch t = stretchAt(m, i);
    const Span<T, 4> s(t.in, t.out, t.count);
    for (u64 v = t.first + threadIdx.x; v < t.first + t.vectors; v += blockDim.x) s.store(t.out, v, s.template load<true>(t.in, v));
  }
}

#define SYMMEM_COPY_OF(width, type)                                                                                        \
  extern "C" __global__ void __launch_bounds__(512) symmem_many_copy_##width(const __grid_constant__ Many m) { manyCopy<type>(m); }
SYMMEM_COPY_OF(1, U8)
SYMMEM_COPY_OF(2, U16)
SYMMEM_COPY_OF(4, U32)
SYMMEM_COPY_OF(8, U64)

#elif defined(SYMMEM_MOVES)

// storeMoved is a Span's store, by words where the output lies at another place of a vector than the input does, but at words.
SYMMEM_DEVICE void storeMoved(const Span<U8, 2> &s, u64 to, u64 v, const Words<2> &x) {
  const u64 at = s.at(to, v);
  if (!s.alike && at % 4 == 0 && s.whole(v)) {
    storeElement<4>(at, x.w[0]);
    storeElement<4>(at + 4, x.w[1]);
  } else {
    s.store(to, v, x);
  }
}

// symmem_many_lines: 1 << m.shift threads, whole warps, do a stretch of one peer together, and those behind them of the next one, so that what goes to several and comes from several is on its
// way at once. Of what a rank gets, a stretch's `in` is where the sender has it, modulo 8: it says where lines begin. The first stretches are loaded before the work in front of the
// launch is awaited: the list is as old as the plan. Kernels without lines of their own let the next launch begin only at the end, as in lines.cu.
extern "C" __global__ void __launch_bounds__(512) symmem_many_lines(const __grid_constant__ Params p, const __grid_constant__ Many m) {
  const u32 together = 1u << m.shift, thread = threadIdx.x & (together - 1), team = threadIdx.x >> m.shift, teams = blockDim.x >> m.shift;
  Frame<0> f(p, kKindMany);
  const Stretch begin = stretchOf(m, p.rank, blockIdx.x), theirs = stretchOf(m, f.peer(1 + team % f.world()), blockIdx.x);
  awaitPrevious();
  if (!__syncthreads_and(f.alive())) return;
  const u32 epoch = f.open(), flag = lineFlag(epoch);
  if (!mayWrite(f, m, epoch)) return;
  const u64 buffer = (epoch & 1) * f.world() * p.span;
  for (u32 i = blockIdx.x; i < m.count; i += gridDim.x) {
    const Stretch t = i == blockIdx.x ? begin : stretchOf(m, p.rank, i);
    const Span<U8, 2> s(t.in, t.out, t.count);
    for (u64 v = thread; v < t.vectors; v += together) {
      const Words<2> x = s.load<false>(t.in, t.first + v);
      const u64 at = buffer + p.rank * p.span + (t.line + v) * 16;
      for (u32 k = 1 + team; k < f.world(); k += teams) storeHalves(f.data(f.peer(k)) + at, lineOf(flag, x.w[0], x.w[1]));
      if (team == 0 && t.in != t.out) storeMoved(s, t.out, t.first + v, x);
    }
  }
  const u64 mine = f.data(p.rank) + buffer;
  for (u32 k = 1 + team; k < f.world(); k += teams) {
    const u32 r = f.peer(k);
    for (u32 i = blockIdx.x; i < m.count && f.ok; i += gridDim.x) {
      const Stretch t = k == 1 + team && i == blockIdx.x ? theirs : stretchOf(m, r, i);
      const Span<U8, 2> s(t.in, t.out, t.count);
      for (u64 v = thread; v < t.vectors; v += together) {
        const u64 at = mine + r * p.span + (t.line + v) * 16;
        Halves x;
        do x = loadHalves(at);
        while (!lineHas(x, flag) && f.again(r));
        if (!f.ok) break;
        storeMoved(s, t.out, t.first + v, {{(u32)x.h[0], (u32)x.h[1]}});
      }
    }
  }
  tellTaken(f, m, epoch);
  f.close(epoch);
  startNext();
}

#ifndef SYMMEM_ONESHOT_ONLY
// symmem_many_moves: of a stretch, in is where `count` bytes are, on any rank, and out where they go, on this one.
extern "C" __global__ void __launch_bounds__(512) symmem_many_moves(const __grid_constant__ Params p, const __grid_constant__ Many m) {
  Frame<0> f(p, kKindMany);
  awaitPrevious();
  if (!__syncthreads_and(f.alive())) return;
  const u32 epoch = f.open();
  if (!f.barrier<false>(kFlagStart, epoch)) return;
  for (u32 i = blockIdx.x; i < m.count; i += gridDim.x) {
    const Stretch t = stretchAt(m, i);
    copyChunk(t.out, t.in, t.count);
  }
  if (f.barrier<true>(kFlagEnd, epoch)) f.close(epoch);
}
#endif

#else

// Sealed says whether lines of T are all data.
template <class T> struct Sealed { enum : bool { value = false }; };
template <> struct Sealed<F32> { enum : bool { value = true }; };
template <> struct Sealed<F16> { enum : bool { value = true }; };
template <> struct Sealed<BF16> { enum : bool { value = true }; };

// sendLine stores a line of this launch.
template <class T, int N> SYMMEM_DEVICE void sendLine(u64 to, u32 flag, const Words<N> &x) {
  if constexpr (N == 4)
    storeStrong(to, seal(x));
  else
    storeHalves(to, lineOf(flag, x.w[0], x.w[1]));
}

// takeSums stores what the lines of all ranks in the buffer at `mine` make of the stretches that stretch(i) gives, and says whether this thread has had a line from every rank, whose blocks of this number are at work then.
template <class T, u32 N, class At> SYMMEM_DEVICE bool takeSums(Frame<0> &f, const Many &m, u64 mine, u32 flag, At stretch) {
  const Params &p = f.comm;
  const AnyOp op{p.op};
  bool had = false;
  for (u32 i = blockIdx.x; i < m.count; i += gridDim.x) {
    const Stretch t = stretch(i);
    const Span<T, N> s(t.in, t.out, t.count);
    for (u64 v = threadIdx.x; v < t.vectors; v += blockDim.x) {
      const Words<N> own = s.template load<false>(t.in, t.first + v);
      const u64 at = mine + (t.line + v) * 16;
      const Words<N> sum = reduce<T, AnyOp, 0, N>(op, f.world(), [&](u32 first, auto &x) {
        if constexpr (Sealed<T>::value) {
          fetchSealed<T>(f, at, first, own, x);
        } else {
          constexpr u32 B = sizeof(x) / sizeof(x[0]);
          Halves line[B];
          u32 missing;
          do {
#pragma unroll
            for (u32 j = 0; j < B; j++) line[j] = loadHalves(at + slot(f, first + j) * p.span);
            missing = p.rank;
#pragma unroll
            for (u32 j = 0; j < B; j++)
              if (other(f, first + j) && ((u32)(line[j].h[0] >> 32) != flag || (u32)(line[j].h[1] >> 32) != flag)) missing = first + j;
          } while (missing != p.rank && f.again(missing));
#pragma unroll
          for (u32 j = 0; j < B; j++) x[j] = first + j == p.rank ? own : Words<2>{{(u32)line[j].h[0], (u32)line[j].h[1]}};
        }
      });
      if (f.ok) s.store(t.out, t.first + v, sum);
      had = true;
    }
  }
  return had;
}

// manyOneshot is oneshotPush, or oneshotLL, over the list: two buffers take turns, and a slot has the lines of all tensors one after the other.
// The first stretch is loaded before the work in front of the launch is awaited: the list is as old as the plan.
template <class T> SYMMEM_DEVICE void manyOneshot(const Params &p, const Many &m) {
  constexpr u32 N = Sealed<T>::value ? 4 : 2;
  const Stretch begin = stretchAt(m, blockIdx.x);
  Frame<0> f(p, kKindMany);
  awaitPrevious();
  const bool alive = f.alive();
  const u32 epoch = f.open(), flag = epoch << 1 | 1;
  if (!alive) return;
  const u64 buffer = (epoch & 1) * f.world() * p.span, mine = f.data(p.rank) + buffer;
  for (u32 i = blockIdx.x; i < m.count; i += gridDim.x) {
    const Stretch t = i == blockIdx.x ? begin : stretchAt(m, i);
    const Span<T, N> s(t.in, t.out, t.count);
    for (u64 v = threadIdx.x; v < t.vectors; v += blockDim.x) {
      const Words<N> own = s.template load<false>(t.in, t.first + v);
      const u64 at = buffer + p.rank * p.span + (t.line + v) * 16;
      for (u32 k = 1; k < f.world(); k++) sendLine<T>(f.data(f.peer(k)) + at, flag, own);
    }
  }
  const bool had = takeSums<T, N>(f, m, mine, flag, [&](u32 i) { return i == blockIdx.x ? begin : stretchAt(m, i); });
  if (had) startNext();
  f.close(epoch);
}

// manyScatter is manyOneshot for shares: each rank gets the lines of its own ones only. The list is that of all ranks' shares of this rank's inputs, of which this rank's own have the outputs.
template <class T> SYMMEM_DEVICE void manyScatter(const Params &p, const Many &m) {
  constexpr u32 N = Sealed<T>::value ? 4 : 2;
  Frame<0> f(p, kKindMany);
  const Stretch begin = stretchOf(m, f.peer(1), blockIdx.x), own = stretchOf(m, p.rank, blockIdx.x);
  awaitPrevious();
  if (!__syncthreads_and(f.alive())) return;
  const u32 epoch = f.open(), flag = lineFlag(epoch);
  if (!mayWrite(f, m, epoch)) return;
  const u64 buffer = (epoch & 1) * f.world() * p.span;
  for (u32 k = 1; k < f.world(); k++) {
    const u32 q = f.peer(k);
    const u64 to = f.data(q) + buffer + p.rank * p.span;
    for (u32 i = blockIdx.x; i < m.count; i += gridDim.x) {
      const Stretch t = k == 1 && i == blockIdx.x ? begin : stretchOf(m, q, i);
      const Span<T, N> s(t.in, t.in, t.count);
      for (u64 v = threadIdx.x; v < t.vectors; v += blockDim.x) sendLine<T>(to + (t.line + v) * 16, flag, s.template load<false>(t.in, t.first + v));
    }
  }
  const bool had = takeSums<T, N>(f, m, f.data(p.rank) + buffer, flag, [&](u32 i) { return i == blockIdx.x ? own : stretchOf(m, p.rank, i); });
  if (had) startNext();
  tellTaken(f, m, epoch);
  f.close(epoch);
}

// manyPull is twoshotPull over the list: each rank has stretches of its own to reduce. In place is safe: a vector is read and written by the
// same thread of the same rank, and what is of another tensor in the same 16 bytes is not touched. Of a reduce-scatter, which has no rows of outputs, the result is stored to this rank's own.
template <class T> SYMMEM_DEVICE void manyPull(const Params &p, const Many &m) {
  Frame<0> f(p, kKindMany);
  awaitPrevious();
  // The block decides, not each thread: who has gone is not waited for in a barrier, and neither is the peer that it would have waited for.
  if (!__syncthreads_and(f.alive())) return;
  const u32 epoch = f.open(), world = f.world();
  const AnyOp op{p.op};
  if (!f.template barrier<false>(kFlagStart, epoch)) return;
  for (u32 i = blockIdx.x; i < m.count; i += gridDim.x) {
    const Stretch t = stretchAt(m, i);
    const Span<T, 4> s(t.in, t.out, t.count);
    const u64 *ins = (const u64 *)m.table + t.row * world, *outs = (const u64 *)m.table + t.outRow * world;
    const bool own = t.outRow == kOwnOnly;
    for (u64 v = t.first + threadIdx.x; v < t.first + t.vectors; v += blockDim.x) {
      const bool whole = s.whole(v);
      const Words<4> sum = reduce<T, AnyOp, 0, 4>(op, world, [&](u32 first, auto &x) {
        constexpr u32 B = sizeof(x) / sizeof(x[0]);
        if (whole) {
#pragma unroll
          for (u32 j = 0; j < B; j++) x[j] = loadStrong(s.at(ins[slot(f, first + j)], v), Words<4>());
          return;
        }
#pragma unroll
        for (u32 j = 0; j < B; j++) x[j] = s.template load<true>(ins[slot(f, first + j)], v);
      });
#pragma unroll 1
      for (u32 k = 0; k < (own ? 1 : world); k++) s.store(own ? t.out : outs[f.peer(k)], v, sum);
    }
  }
  if (f.template barrier<true>(kFlagEnd, epoch)) f.close(epoch);
}

#define SYMMEM_JOIN(form, dtype) symmem_many_##form##_##dtype
#define SYMMEM_NAME(form, dtype) SYMMEM_JOIN(form, dtype)
#define SYMMEM_KERNEL(form, body)                                                                                          \
  extern "C" __global__ void __launch_bounds__(512)                                                                        \
      SYMMEM_NAME(form, SYMMEM_DTYPE)(const __grid_constant__ Params p, const __grid_constant__ Many m) {                  \
    body<SYMMEM_TYPE>(p, m);                                                                                               \
  }
SYMMEM_KERNEL(oneshot, manyOneshot)
SYMMEM_KERNEL(scatter, manyScatter)
#ifndef SYMMEM_ONESHOT_ONLY
SYMMEM_KERNEL(pull, manyPull)
#endif

#endif
