// All-reduce of a list of tensors in one launch, of one dtype. The list is cut into stretches of vectors of one tensor each, and a block of the
// grid takes every so many-th of them. The generator compiles this file once for each dtype, and once with SYMMEM_COPY for what only copies. Lists of
// whole vectors have a kernel of their own: manyPushWhole in push.cuh.
//
//   symmem_many_oneshot_<dtype>  push lines, as oneshot_push for f32, f16 and bf16 and as oneshot_ll for others; no barrier
//   symmem_many_pull_<dtype>     load the own stretches from every input, store the result to every output, between two barriers
//   symmem_many_copy_<width>     copy, between this rank's own memory; waits for nobody
#include "frame.cuh"
#include "stretch.cuh"

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

#else

// Sealed says whether lines of T are all data.
template <class T> struct Sealed { enum : bool { value = false }; };
template <> struct Sealed<F32> { enum : bool { value = true }; };
template <> struct Sealed<F16> { enum : bool { value = true }; };
template <> struct Sealed<BF16> { enum : bool { value = true }; };

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
  const AnyOp op{p.op};
  const u64 buffer = (epoch & 1) * f.world() * p.span, mine = f.data(p.rank) + buffer;
  for (u32 i = blockIdx.x; i < m.count; i += gridDim.x) {
    const Stretch t = i == blockIdx.x ? begin : stretchAt(m, i);
    const Span<T, N> s(t.in, t.out, t.count);
    for (u64 v = threadIdx.x; v < t.vectors; v += blockDim.x) {
      const Words<N> own = s.template load<false>(t.in, t.first + v);
      const u64 at = buffer + p.rank * p.span + (t.line + v) * 16;
      if constexpr (Sealed<T>::value) {
        const Words<4> line = seal(own);
        for (u32 k = 1; k < f.world(); k++) storeStrong(f.data(f.peer(k)) + at, line);
      } else {
        const Halves line = {{(u64)flag << 32 | own.w[0], (u64)flag << 32 | own.w[1]}};
        for (u32 k = 1; k < f.world(); k++) storeHalves(f.data(f.peer(k)) + at, line);
      }
    }
  }
  bool had = false; // a line from every rank, whose blocks of this number are at work then
  for (u32 i = blockIdx.x; i < m.count; i += gridDim.x) {
    const Stretch t = i == blockIdx.x ? begin : stretchAt(m, i);
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
  if (had) startNext();
  f.close(epoch);
}

// manyPull is twoshotPull over the list: each rank has stretches of its own to reduce. In place is safe: a vector is read and written by the
// same thread of the same rank, and what is of another tensor in the same 16 bytes is not touched.
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
      for (u32 k = 0; k < world; k++) s.store(outs[f.peer(k)], v, sum);
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
#ifndef SYMMEM_ONESHOT_ONLY
SYMMEM_KERNEL(pull, manyPull)
#endif

#endif
