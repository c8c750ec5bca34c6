// All-reduce, residual and RMSNorm in one launch, with an fp8 copy of the result if that is asked for:
//
//   s = the sum of all ranks' in, in rank order and in float32, rounded to the dtype: what an all-reduce gives
//   x = s + residual, rounded to the dtype; goes to residualOut
//   y = x * (1 / sqrt(mean of x^2 over the row + epsilon)) * (bias + weight), rounded to the dtype; goes to out
//   q = y * inverse, or 1 / what is at scale in its place, rounded to e4m3; goes to quantized
//
// A row belongs to one block, or a cluster of blocks, whose threads are as many as the row's length alone says: so the squares are added in the same order however
// many rows there are, and in every form. Root and quotients are rounded as IEEE 754 has it, so that the host gives the same bits.
#pragma once
#include "frame.cuh"

enum : u32 { kKindRMSNorm = 32 };

// Norm is the parameter beside Comm. All addresses are of this rank's memory and aligned to 16 bytes; rows follow each other without gaps.
struct Norm {
  u64 in;           // what is summed; of the local kernel: s
  u64 residual;     // each rank's own
  u64 residualOut;  // may equal residual
  u64 weight;       // of a row
  u64 out;          // or 0 for none; may equal in
  u64 quantized;    // or 0 for none; bytes
  u64 inputs;       // twoshot_pull: u64[world], every rank's in
  u64 span;         // push: bytes of a slot in the workspace. See below
  u32 rows;
  u32 columns;      // elements of a row: whole vectors of 16 bytes
  u32 shard;        // two-shot: vectors of each row that one rank sums
  float epsilon;
  float bias;       // added to weight: 0, or 1 for weights that are stored so
  u32 reserved;
  u64 scale;        // of quantized: where a float is that the launch reads, or kInverse and the bits of 1 / scale
};
SYMMEM_AT(Norm, in, 0);
SYMMEM_AT(Norm, residual, 8);
SYMMEM_AT(Norm, residualOut, 16);
SYMMEM_AT(Norm, weight, 24);
SYMMEM_AT(Norm, out, 32);
SYMMEM_AT(Norm, quantized, 40);
SYMMEM_AT(Norm, inputs, 48);
SYMMEM_AT(Norm, span, 56);
SYMMEM_AT(Norm, rows, 64);
SYMMEM_AT(Norm, columns, 68);
SYMMEM_AT(Norm, shard, 72);
SYMMEM_AT(Norm, epsilon, 76);
SYMMEM_AT(Norm, bias, 80);
SYMMEM_AT(Norm, reserved, 84);
SYMMEM_AT(Norm, scale, 88);
static_assert(sizeof(Norm) == 96, "Norm");
enum : u64 { kInverse = 1ull << 63 };

// Layout of the workspace, behind the records; lines are of 16 bytes:
//
//   oneshot_push  [2][world] slots of span = round128(16 * vectors of all rows): by parity of the epoch and writer
//   twoshot_push  [2][2][world] slots of span = round128(16 * shard * rows): by parity, inputs or sums, and writer
//   twoshot_pull  the sums of all rows
//
// kKept is how many vectors of a row a thread keeps in registers; of longer rows the rest is loaded again.
enum : u32 { kKept = 2 };

// e4m3 rounds to fp8: nearest, ties to even; what is beyond 448 becomes that, and NaN 0x7f.
SYMMEM_DEVICE u32 e4m3(float x) {
  const u32 bits = f32Bits(x), sign = bits >> 24 & 0x80;
  u32 m = bits & 0x7fffffff;
  if (m > 0x7f800000) return 0x7f;
  if (m >= 0x43e00000) return sign | 0x7e; // 448
  if (m < 0x3c800000) return sign | (f32Bits(__fadd_rn(f32From(m), 16384.f)) - 0x46800000); // below 2^-6, in steps of 2^-9
  m += 0x7ffff + (m >> 20 & 1);
  return sign | ((m >> 20) - 960);
}

enum : u32 { kWarps = 16 }; // of a row at most

// warpTotal is the sum over the warp: of those 16 apart, then 8, 4, 2, 1. totalOf is that of warps, in order.
SYMMEM_DEVICE float warpTotal(float v) {
#pragma unroll
  for (u32 d = 16; d > 0; d /= 2) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
  return v;
}
SYMMEM_DEVICE float totalOf(const float *warps) {
  float v = warps[0];
#pragma unroll
  for (u32 w = 1; w < kWarps; w++) v = __fadd_rn(v, warps[w]);
  return v;
}

// blockTotal is the sum over the block of up to 512 threads, the same in all of them. Warps that are not there add 0,
// which changes no sum of squares. turn is another one each time, so that nobody waits for those who have not read the last total.
static SYMMEM_DEVICE float blockTotal(float v, u32 turn) {
  __shared__ __align__(16) float totals[2][kWarps];
  float *warps = totals[turn % 2];
  v = warpTotal(v);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  if (threadIdx.x >= blockDim.x / 32 && threadIdx.x < kWarps) warps[threadIdx.x] = 0;
  __syncthreads();
  return totalOf(warps);
}

#if __CUDA_ARCH__ >= 900
// A row may belong to a cluster of C blocks in place of one, whose threads are as many together: so more multiprocessors send and take what is of few rows.
SYMMEM_DEVICE u32 clusterRank() {
  u32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// storeCluster stores v where the r-th block of the cluster has `to` in its shared memory.
SYMMEM_DEVICE void storeCluster(float *to, u32 r, float v) {
  u32 at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"((u32)__cvta_generic_to_shared(to)), "r"(r));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}
// Two barriers of the cluster's threads that have not ended. Before the first store into its shared memory a block must have begun.
SYMMEM_DEVICE void tellBegun() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
SYMMEM_DEVICE void awaitBegun() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
SYMMEM_DEVICE void meetCluster() { asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// clusterTotal is blockTotal of a cluster of C blocks, whose warps are counted through. Each warp stores its sum to all of them.
template <u32 C> static SYMMEM_DEVICE float clusterTotal(float v, u32 turn) {
  __shared__ __align__(16) float totals[2][kWarps];
  float *warps = totals[turn % 2];
  v = warpTotal(v);
  if (turn == 0) awaitBegun();
  if (threadIdx.x % 32 < C) storeCluster(warps + (clusterRank() * blockDim.x + threadIdx.x) / 32, threadIdx.x % 32, v);
  if (threadIdx.x >= C * blockDim.x / 32 && threadIdx.x < kWarps) warps[threadIdx.x] = 0;
  meetCluster();
  return totalOf(warps);
}
#endif

// addResidual gives s + r, and adds its squares, in order, to squares.
template <class T> SYMMEM_DEVICE Words<4> addResidual(const Words<4> &s, const Words<4> &r, float &squares) {
  constexpr u32 E = 16 / T::width;
  float a[E];
#pragma unroll
  for (u32 e = 0; e < E; e++) a[e] = __fadd_rn(T::decode((u32)element<T>(s, e)), T::decode((u32)element<T>(r, e)));
  const Words<4> x = encodeFloats<T>(a);
  float sum = 0;
#pragma unroll
  for (u32 e = 0; e < E; e++) {
    const float v = T::decode((u32)element<T>(x, e));
    sum = e == 0 ? __fmul_rn(v, v) : __fadd_rn(sum, __fmul_rn(v, v));
  }
  squares = __fadd_rn(squares, sum);
  return x;
}

// storeQuantized stores a vector of y as fp8 at an address. It is no part of its callers: few want it, and it is long.
template <class T> static __device__ __noinline__ void storeQuantized(u64 to, Words<4> y, u64 scale) {
  constexpr u32 E = 16 / T::width;
  float inverse = f32From((u32)scale);
  if (!(scale & kInverse)) {
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(inverse) : "l"(scale) : "memory");
    inverse = __fdiv_rn(1.f, inverse);
  }
  u32 q[E / 4] = {};
#pragma unroll
  for (u32 e = 0; e < E; e++) q[e / 4] |= e4m3(__fmul_rn(T::decode((u32)element<T>(y, e)), inverse)) << (8 * (e % 4));
  if constexpr (E == 8)
    storeWeak(to, Words<2>{{q[0], q[1]}});
  else
    asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(q[0]) : "memory");
}

// finish stores what comes of one vector of x; at is its first byte in the rows.
template <class T> SYMMEM_DEVICE void finish(const Norm &n, u64 at, const Words<4> &x, const Words<4> &weight, float scale) {
  constexpr u32 E = 16 / T::width;
  float a[E];
#pragma unroll
  for (u32 e = 0; e < E; e++) {
    const float w = __fadd_rn(n.bias, T::decode((u32)element<T>(weight, e)));
    a[e] = __fmul_rn(__fmul_rn(T::decode((u32)element<T>(x, e)), scale), w);
  }
  const Words<4> y = encodeFloats<T>(a);
  if (n.out != 0) storeWeak(n.out + at, y);
  if (n.quantized != 0) storeQuantized<T>(n.quantized + at / T::width, y, n.scale);
}

// rowThread is this thread among those of a row, which C blocks have, and rowThreads how many these are.
template <u32 C> SYMMEM_DEVICE u32 rowThread() {
#if __CUDA_ARCH__ >= 900
  if (C > 1) return clusterRank() * blockDim.x + threadIdx.x;
#endif
  return threadIdx.x;
}
template <u32 C> SYMMEM_DEVICE u32 rowThreads() { return C * blockDim.x; }

// normRow does one row, the turn-th of the block, or of the cluster. fetch(v, s) gives vector v of the row's sum, and says whether it came. behind is called when all have. Block, cluster.
template <class T, u32 C = 1, class Fetch, class Behind> SYMMEM_DEVICE void normRow(const Norm &n, u32 row, u32 turn, Fetch fetch, Behind behind) {
  const u32 vectors = n.columns / (16 / T::width), tid = rowThread<C>(), threads = rowThreads<C>();
  const u64 at = (u64)row * vectors * 16;
  Words<4> kept[kKept], other[kKept];
  float squares = 0;
  bool ok = true;
#pragma unroll
  for (u32 k = 0; k < kKept; k++)
    if (tid + k * threads < vectors) other[k] = loadWeak(n.residual + at + (tid + k * threads) * 16ull, Words<4>());
#pragma unroll
  for (u32 k = 0; k < kKept; k++) {
    const u32 v = tid + k * threads;
    if (v >= vectors) continue;
    Words<4> s;
    if (!fetch(v, s)) ok = false;
    kept[k] = addResidual<T>(s, other[k], squares);
    if (ok) storeWeak(n.residualOut + at + v * 16ull, kept[k]);
  }
#pragma unroll 1
  for (u32 v = tid + kKept * threads; v < vectors; v += threads) {
    const Words<4> r = loadWeak(n.residual + at + v * 16ull, Words<4>());
    Words<4> s;
    if (!fetch(v, s)) ok = false;
    const Words<4> x = addResidual<T>(s, r, squares);
    if (ok) storeWeak(n.residualOut + at + v * 16ull, x);
  }
  behind();
#pragma unroll
  for (u32 k = 0; k < kKept; k++) // under way while the squares are added up
    if (tid + k * threads < vectors) other[k] = loadWeak(n.weight + (tid + k * threads) * 16ull, Words<4>());
#if __CUDA_ARCH__ >= 900
  if constexpr (C > 1)
    squares = clusterTotal<C>(squares, turn);
  else
#endif
    squares = blockTotal(squares, turn);
  const float mean = __fdiv_rn(squares, (float)n.columns);
  const float scale = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(mean, n.epsilon)));
  if (!ok) return;
#pragma unroll
  for (u32 k = 0; k < kKept; k++) {
    const u32 v = tid + k * threads;
    if (v < vectors) finish<T>(n, at + v * 16ull, kept[k], other[k], scale);
  }
#pragma unroll 1
  for (u32 v = tid + kKept * threads; v < vectors; v += threads)
    finish<T>(n, at + v * 16ull, loadWeak(n.residualOut + at + v * 16ull, Words<4>()), loadWeak(n.weight + v * 16ull, Words<4>()), scale);
}

// collectLines waits for the sealed lines of ranks first, first+1, … at `at` in their slots, empties them, and gives their data. For ranks
// beyond the last it gives anything.
template <int W, u32 B> SYMMEM_DEVICE void collectLines(Ranks<W> &f, u64 at, u64 span, u32 first, Words<4> (&x)[B]) {
  const u32 world = f.world();
  u32 missing;
  do {
#pragma unroll
    for (u32 j = 0; j < B; j++) x[j] = loadStrong(at + (first + j < world ? first + j : first) * span, Words<4>());
    missing = world;
#pragma unroll
    for (u32 j = 0; j < B; j++)
      if (first + j < world && !come(x[j])) missing = first + j;
  } while (missing != world && f.again(missing));
#pragma unroll
  for (u32 j = 0; j < B; j++) {
    if (first + j < world) storeStrong(at + (first + j) * span, Words<4>{});
    x[j] = unseal(x[j]);
  }
}

// letNextBegin lets the next launch begin, behind the last of the block's rows. A thread that has had vectors of every rank knows that their blocks of this number are at work. All threads have had theirs
// first: if the next launch begins with the first of them, the others take longer than that saves. The block calls.
template <u32 C = 1> SYMMEM_DEVICE void letNextBegin(const Norm &n, u32 row, u32 vectors) {
#if __CUDA_ARCH__ >= 900 // below it does nothing
  if (n.rows - row > gridDim.x / C) return;
  __syncthreads();
  if (rowThread<C>() < vectors) startNext();
#endif
}

// normOneshotPush sends every rank all rows in lines that say by themselves that they have come: see oneshotPush. The rank's own go through
// its own slot. A row belongs to C blocks, which are a cluster if they are more than one. Then none of them may end before the others have met it: one that finds the plan dead sends nothing.
template <class T, int W, u32 C = 1> SYMMEM_DEVICE void normOneshotPush(const Comm &c, const Norm &n) {
  Ranks<W> f(c, kKindRMSNorm);
#if __CUDA_ARCH__ >= 900
  if constexpr (C > 1) tellBegun();
#endif
  awaitPrevious(c.rank, c.workspace[0], n.in, n.rows);
  const u32 vectors = n.columns / (16 / T::width), tid = rowThread<C>(), threads = rowThreads<C>(), begin = blockIdx.x / C, step = gridDim.x / C;
  Words<4> x[kKept];
  auto load = [&](u32 row) {
#pragma unroll
    for (u32 k = 0; k < kKept; k++)
      if (tid + k * threads < vectors) x[k] = loadWeak(n.in + ((u64)row * vectors + tid + k * threads) * 16, Words<4>());
  };
  if (begin < n.rows) load(begin); // under way while the next loads are
  const bool alive = f.alive();
  const u32 epoch = f.open(), world = f.world();
  if (!__syncthreads_and(alive)) {
    if (C == 1) return;
    f.ok = false;
  }
  // A slot has been emptied since it was written two launches ago: the launch before has ended here with lines of every rank, whose launch before that had ended.
  const u64 buffer = (epoch & 1) * world * n.span, mine = f.data(f.rank()) + buffer;
  for (u32 row = begin; row < n.rows && (C == 1 || f.ok); row += step) {
    auto send = [&](u32 v, const Words<4> &line) {
#pragma unroll
      for (u32 k = 0; k < world; k++)
        storeStrong(f.data(f.peer(k)) + buffer + f.rank() * n.span + ((u64)row * vectors + v) * 16, line);
    };
    if (row != begin) load(row);
#pragma unroll
    for (u32 k = 0; k < kKept; k++)
      if (tid + k * threads < vectors) send(tid + k * threads, seal(x[k]));
#pragma unroll 1
    for (u32 v = tid + kKept * threads; v < vectors; v += threads)
      send(v, seal(loadWeak(n.in + ((u64)row * vectors + v) * 16, Words<4>())));
  }
  u32 turn = 0;
  for (u32 row = begin; row < n.rows; row += step)
    normRow<T, C>(
        n, row, turn++,
        [&](u32 v, Words<4> &s) {
          s = reduce<T, SumOp, W, 4>(SumOp{kSum}, world, [&](u32 first, auto &lines) {
            collectLines(f, mine + ((u64)row * vectors + v) * 16, n.span, first, lines);
          });
          return f.ok;
        },
        [&] { letNextBegin<C>(n, row, vectors); });
  f.close(epoch);
}

// mineOf is how many rows the block has.
SYMMEM_DEVICE u32 mineOf(const Norm &n) { return n.rows > blockIdx.x ? (n.rows - blockIdx.x + gridDim.x - 1) / gridDim.x : 0; }

// normTwoshotPush sends each rank its shard of every row, in lines, and the rank sends the sum of it to everybody: see twoshotPush. Each rank
// then does all rows, with its own residual.
template <class T, int W> SYMMEM_DEVICE void normTwoshotPush(const Comm &c, const Norm &n) {
  Ranks<W> f(c, kKindRMSNorm);
  awaitPrevious(c.rank, c.workspace[0], n.in, n.rows);
  const bool alive = f.alive();
  const u32 epoch = f.open(), world = f.world(), rank = f.rank();
  if (!__syncthreads_and(alive)) return;
  const u32 vectors = n.columns / (16 / T::width), shard = n.shard, rows = mineOf(n);
  const u64 inputs = (epoch & 1) * 2 * world * n.span, sums = inputs + world * n.span, mine = f.data(rank);
  const u64 lines = (u64)rows * shard;
  auto rowOf = [&](u64 i) { return blockIdx.x + (u32)(i / shard) * gridDim.x; };
  for (u64 i = threadIdx.x; i < lines; i += blockDim.x) {
    const u32 row = rowOf(i), j = (u32)(i % shard);
    Words<4> x[W == 0 ? 1 : W];
#pragma unroll
    for (u32 k = 0; k < world; k++) {
      const u32 q = f.peer(k), v = q * shard + j;
      Words<4> &y = x[W == 0 ? 0 : k];
      if (v < vectors) y = loadWeak(n.in + ((u64)row * vectors + v) * 16, Words<4>());
      if (W == 0 && v < vectors) storeStrong(f.data(q) + inputs + rank * n.span + ((u64)row * shard + j) * 16, seal(y));
    }
    if constexpr (W != 0) {
#pragma unroll
      for (u32 k = 0; k < W; k++) {
        const u32 q = f.peer(k);
        if (q * shard + j < vectors) storeStrong(f.data(q) + inputs + rank * n.span + ((u64)row * shard + j) * 16, seal(x[k]));
      }
    }
  }
  for (u64 i = threadIdx.x; i < lines; i += blockDim.x) {
    const u64 at = ((u64)rowOf(i) * shard + i % shard) * 16;
    if (rank * shard + (u32)(i % shard) >= vectors) continue;
    const Words<4> line = seal(reduce<T, SumOp, W, 4>(
        SumOp{kSum}, world, [&](u32 first, auto &x) { collectLines(f, mine + inputs + at, n.span, first, x); }));
    if (!f.ok) break;
#pragma unroll
    for (u32 k = 0; k < world; k++) storeStrong(f.data(f.peer(k)) + sums + rank * n.span + at, line);
  }
  u32 turn = 0;
  for (u32 row = blockIdx.x; row < n.rows; row += gridDim.x)
    normRow<T>(
        n, row, turn++,
        [&](u32 v, Words<4> &s) {
          const u32 q = v / shard;
          const u64 at = mine + sums + q * n.span + ((u64)row * shard + (v - q * shard)) * 16;
          do
            s = loadStrong(at, Words<4>());
          while (!come(s) && f.again(q));
          storeStrong(at, Words<4>{});
          s = unseal(s);
          return f.ok;
        },
        [&] { letNextBegin(n, row, vectors); });
  f.close(epoch);
}

// normTwoshotPull loads the own shard of every row from every input, and stores the sum to every workspace, between two barriers of the blocks
// of this number, which have the same rows on all ranks.
template <class T> SYMMEM_DEVICE void normTwoshotPull(const Comm &c, const Norm &n) {
  Ranks<> f(c, kKindRMSNorm);
  u32 epoch;
  if (!f.begin(epoch, n.in, n.rows)) return;
  if (!f.template barrier<false>(kFlagStart, epoch)) return;
  const u32 vectors = n.columns / (16 / T::width), world = f.world(), rank = f.rank();
  const u32 low = rank * n.shard, wide = low >= vectors ? 0 : vectors - low < n.shard ? vectors - low : n.shard;
  const u64 all = (u64)mineOf(n) * wide;
  for (u64 i = threadIdx.x; i < all; i += blockDim.x) {
    const u64 at = ((u64)(blockIdx.x + (u32)(i / wide) * gridDim.x) * vectors + low + i % wide) * 16;
    const Words<4> s = reduce<T, SumOp, 0, 4>(SumOp{kSum}, world, [&](u32 first, auto &x) {
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        u64 from;
        asm("ld.global.u64 %0, [%1];" : "=l"(from) : "l"(n.inputs + (first + j < world ? first + j : rank) * 8ull));
        x[j] = loadStrong(from + at, Words<4>());
      }
    });
#pragma unroll 1
    for (u32 k = 0; k < world; k++) storeWeak(f.data(f.peer(k)) + at, s);
  }
  if (!f.template barrier<true>(kFlagEnd, epoch)) return;
  startNext();
  u32 turn = 0;
  for (u32 row = blockIdx.x; row < n.rows; row += gridDim.x)
    normRow<T>(
        n, row, turn++,
        [&](u32 v, Words<4> &s) {
          s = loadStrong(f.data(rank) + ((u64)row * vectors + v) * 16, Words<4>());
          return true;
        },
        [] {});
  f.close(epoch);
}

// normLocal is what comes behind the sum: normRow of sums that need no wait. A thread asks for kKept vectors before it looks at the first, which is faster. In normRow that would take
// registers of the kernels that wait for lines.
template <class T> SYMMEM_DEVICE void normLocal(const Norm &n) {
  awaitPrevious(n.in, n.rows);
  const u32 vectors = n.columns / (16 / T::width), tid = threadIdx.x, threads = blockDim.x;
  u32 turn = 0;
  for (u32 row = blockIdx.x; row < n.rows; row += gridDim.x, turn++) {
    const u64 at = (u64)row * vectors * 16;
    float squares = 0;
    auto load = [&](u64 from, u32 v, Words<4> (&x)[kKept]) {
#pragma unroll
      for (u32 k = 0; k < kKept; k++)
        if (v + k * threads < vectors) x[k] = loadWeak(from + (v + k * threads) * 16ull, Words<4>());
    };
    auto add = [&](u32 v, Words<4> (&s)[kKept]) {
      Words<4> r[kKept];
      load(n.residual + at, v, r);
      load(n.in + at, v, s);
#pragma unroll
      for (u32 k = 0; k < kKept; k++) {
        if (v + k * threads >= vectors) continue;
        s[k] = addResidual<T>(s[k], r[k], squares);
        storeWeak(n.residualOut + at + (v + k * threads) * 16ull, s[k]);
      }
    };
    Words<4> kept[kKept], other[kKept], weight[kKept];
    add(tid, kept);
#pragma unroll 1
    for (u32 v = tid + kKept * threads; v < vectors; v += kKept * threads) add(v, other);
    load(n.weight, tid, weight); // under way while the squares are added up
    const float mean = __fdiv_rn(blockTotal(squares, turn), (float)n.columns);
    const float scale = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(mean, n.epsilon)));
    auto end = [&](u32 v, const Words<4> (&x)[kKept]) {
#pragma unroll
      for (u32 k = 0; k < kKept; k++)
        if (v + k * threads < vectors) finish<T>(n, at + (v + k * threads) * 16ull, x[k], weight[k], scale);
    };
    end(tid, kept);
#pragma unroll 1
    for (u32 v = tid + kKept * threads; v < vectors; v += kKept * threads) {
      load(n.residualOut + at, v, other);
      load(n.weight, v, weight);
      end(v, other);
    }
  }
}
