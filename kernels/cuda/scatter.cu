// Reduce-scatter and reduce for small messages: every rank pushes to each owner of a share what its input has of that, in lines, and the owner
// combines them in the order of the ranks. No barrier. Of a reduce, root owns the one share. Shares of whole vectors have kernels of their own: see
// whole.cuh.
//
// The generator compiles this file once for each dtype.
#include "lines.cuh"

// Shares says what is whose. Params has this rank's input and output in in[0] and out[0], in shard the elements of a share, and in peer the root.
struct Shares {
  const Params &p;
  SYMMEM_DEVICE u64 first(u32 q) const { return p.flags & kToRoot ? 0 : q * p.shard < p.count ? q * p.shard : p.count; }
  SYMMEM_DEVICE u64 count(u32 q) const {
    if (p.flags & kToRoot) return q == p.peer ? p.count : 0;
    const u64 left = p.count - first(q);
    return left < p.shard ? left : p.shard;
  }
};

// scatterPush pushes lines of 8 bytes and flags, or, sealed, lines that are all data: see seal.
template <class T, class Op, bool sealed> SYMMEM_DEVICE void scatterPush(const Params &p) {
  constexpr int N = sealed ? 4 : 2;
  constexpr u32 B = 4; // peers to send to at a time
  Frame<0> f(p, kKindScatter);
  awaitPrevious();
  if (!__syncthreads_and(f.alive())) return;
  const u32 epoch = f.open(), world = p.world, flag = lineFlag(epoch);
  const Shares shares{p};
  const u64 own = shares.count(p.rank);
  if (own == 0) { // nobody sends to this rank: see kFlagTaken
    for (u32 r = threadIdx.x; r < world; r += blockDim.x)
      if (r != p.rank && shares.count(r) > 0) f.await(kFlagTaken, r, epoch - 2);
    if (!__syncthreads_and(f.ok)) return;
  }
  const u64 buffer = (epoch & 1) * world * p.span, slotAt = buffer + p.rank * p.span;
  const u64 begin = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
  const u64 most = p.shard * T::width / (N * 4) + 2; // vectors of a share, wherever it begins
  for (u64 v = begin; v < most; v += step) {
#pragma unroll 1
    for (u32 k = 1; k < world; k += B) {
      Words<N> x[B];
      bool there[B];
#pragma unroll
      for (u32 b = 0; b < B; b++) {
        there[b] = k + b < world;
        if (!there[b]) continue;
        const u32 q = f.peer(k + b);
        const u64 at = p.in[0] + shares.first(q) * T::width;
        const Span<T, N> s(at, at, shares.count(q));
        there[b] = shares.count(q) > 0 && v < s.vectors;
        if (there[b]) x[b] = s.template load<false>(at, v);
      }
#pragma unroll
      for (u32 b = 0; b < B; b++) {
        if (!there[b]) continue;
        const u64 to = f.data(f.peer(k + b)) + slotAt + v * 16;
        if constexpr (sealed)
          storeStrong(to, seal(x[b]));
        else
          storeHalves(to, lineOf(flag, x[b].w[0], x[b].w[1]));
      }
    }
  }
  if (own > 0) {
    const u64 in = p.in[0] + shares.first(p.rank) * T::width, out = p.out[0], mine = f.data(p.rank) + buffer;
    const Span<T, N> s(in, out, own);
    const Op op{p.op};
    for (u64 v = begin; v < s.vectors; v += step) {
      const Words<N> self = s.template load<false>(in, v);
      const Words<N> sum = reduce<T, Op, 0, N>(op, world, [&](u32 first, auto &x) {
        if constexpr (sealed) {
          fetchSealed<T>(f, mine + v * 16, first, self, x);
        } else {
          constexpr u32 R = sizeof(x) / sizeof(x[0]);
          Halves line[R];
          u32 missing;
          do {
#pragma unroll
            for (u32 j = 0; j < R; j++) line[j] = loadHalves(mine + slot(f, first + j) * p.span + v * 16);
            missing = p.rank;
#pragma unroll
            for (u32 j = 0; j < R; j++)
              if (other(f, first + j) && !lineHas(line[j], flag)) missing = first + j;
          } while (missing != p.rank && f.again(missing));
#pragma unroll
          for (u32 j = 0; j < R; j++) x[j] = first + j == p.rank ? self : Words<2>{{(u32)line[j].h[0], (u32)line[j].h[1]}};
        }
      });
      if (f.ok) s.store(out, v, sum);
    }
    bool lacking = false; // some rank that sends to this one and gets nothing
    for (u32 r = 0; r < world; r++) lacking = lacking || shares.count(r) == 0;
    if (lacking && __syncthreads_and(f.ok))
      for (u32 r = threadIdx.x; r < world; r += blockDim.x)
        if (shares.count(r) == 0) f.signal(r, kFlagTaken, epoch);
  }
  f.close(epoch);
  startNext(); // as in symmem_lines
}

#define SYMMEM_JOIN(form, dtype) symmem_scatter_##form##_##dtype
#define SYMMEM_NAME(form, dtype) SYMMEM_JOIN(form, dtype)
#define SYMMEM_KERNEL(form, sealed)                                                                                             \
  extern "C" __global__ void __launch_bounds__(512) SYMMEM_NAME(form, SYMMEM_DTYPE)(const __grid_constant__ Params p) {          \
    scatterPush<SYMMEM_TYPE, AnyOp, sealed>(p);                                                                                 \
  }
SYMMEM_KERNEL(ll, false)
#if SYMMEM_FLOAT
SYMMEM_KERNEL(push, true)
#endif
