// Collectives by the NVLink switch: loads from a multicast address that add what every rank has there, and stores to one that
// every rank gets. All-reduce has both; reduce and reduce-scatter are its kernel that only loads, on this rank's share; broadcast and
// all-gather only store, see symmem_cast.
//
// Sum of f32, f16 and bf16 only. Sums of 16-bit floats are asked for with at least the precision of float32 in
// between; nothing is known of the order, which is the switch's own and may change from load to load. So the bits may differ from
// those of other kernels, from run to run, and with oneshot_multimem from rank to rank.
//
// A multicast address and the plain one of the same memory are aliases, which are ordered only with a proxy fence in between: one
// stands behind the barrier at the beginning, before loads of what was stored at plain addresses, and one before the barrier at the
// end, behind stores to what is loaded at plain addresses after it.
#include "copy.cuh"
#include "frame.cuh"

SYMMEM_DEVICE Words<4> loadReduced(F32, u64 at) {
  Words<4> x;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(at) : "memory");
  return x;
}
SYMMEM_DEVICE Words<4> loadReduced(F16, u64 at) {
  Words<4> x;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(at) : "memory");
  return x;
}
SYMMEM_DEVICE Words<4> loadReduced(BF16, u64 at) {
  Words<4> x;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(at) : "memory");
  return x;
}
SYMMEM_DEVICE void storeAll(u64 at, Words<4> x) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1,%2,%3,%4};"
               ::"l"(at), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3]) : "memory");
}

SYMMEM_DEVICE void fenceAlias() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// multimem reduces the vectors from low to high: to every rank's output, or to this rank's only. The vectors at the ends go by way of
// the peers' own addresses, and, to every rank's output, all if that is not aligned as the input is. To every rank's output it is safe in
// place: a vector is loaded and stored by the same thread of the same rank. To this rank's only it is not, as peers may still load
// what would be overwritten, and what was loaded by one address is stored by another; so, staged, results wait in the workspace until all
// have loaded. Of a reduce or a reduce-scatter in and out are this rank's share: another one on each rank, or of no elements.
template <class T, bool everywhere> SYMMEM_DEVICE void multimem(const Params &p, u32 kind) {
  constexpr int U = 8;
  Frame<0> f(p, kind);
  awaitPrevious();
  if (!__syncthreads_and(f.alive())) return;
  const u32 epoch = f.open();
  const u64 out = output(f, p.rank);
  const Span<T, 4> s(input(f, p.rank), out, p.count);
  const u64 low = everywhere ? p.rank * p.shard : 0, end = everywhere ? low + p.shard : s.vectors;
  const u64 high = end < s.vectors ? end : s.vectors;
  const u64 begin = low + blockIdx.x * (u64)blockDim.x + threadIdx.x, step = gridDim.x * (u64)blockDim.x;
  const bool staged = !everywhere && (p.flags & kStaged);
  const u64 stage = f.data(p.rank);
  // keep stores a whole vector of this rank's output, which is aligned as the input is.
  auto keep = [&](u64 v, const Words<4> &x) { storeWeak(staged ? stage + v * 16 : s.at(out, v), x); };
  if (!f.template barrier<false>(kFlagStart, epoch)) return;
  fenceAlias();
  for (u64 v = begin; v < high; v += U * step) {
    if (v + (U - 1) * step < high && s.whole(v) && s.whole(v + (U - 1) * step) && s.alike) {
      Words<4> x[U];
#pragma unroll
      for (int u = 0; u < U; u++) x[u] = loadReduced(T(), s.at(p.multicastIn, v + u * step));
#pragma unroll
      for (int u = 0; u < U; u++) {
        if (everywhere)
          storeAll(s.at(p.multicastOut, v + u * step), x[u]);
        else
          keep(v + u * step, x[u]);
      }
      continue;
    }
#pragma unroll 1
    for (int u = 0; u < U; u++) {
      const u64 i = v + u * step;
      if (i >= high) break;
      if (s.whole(i) && (s.alike || !everywhere)) {
        const Words<4> x = loadReduced(T(), s.at(p.multicastIn, i));
        if (everywhere)
          storeAll(s.at(p.multicastOut, i), x);
        else if (staged)
          storeWeak(stage + i * 16, x);
        else
          s.store(out, i, x);
        continue;
      }
      Accumulator<T, SumOp, 4> a;
      const SumOp op{kSum};
      // To this rank's output only, it is not whole.
      auto load = [&](u32 r) {
        if constexpr (everywhere) return s.template load<true>(input(f, r), i);
        return loadPart<T, 4>(input(f, r), s.first(i), s.count);
      };
      a.first(load(0));
#pragma unroll 1
      for (u32 r = 1; r < p.world; r++) a.add(op, load(r));
      const Words<4> sum = a.result(op, p.world);
      if constexpr (everywhere) {
#pragma unroll 1
        for (u32 k = 0; k < p.world; k++) s.store(output(f, f.peer(k)), i, sum);
      } else if (staged) {
        storeWeak(stage + i * 16, sum);
      } else {
        storePart<T, 4>(out, s.first(i), s.count, sum);
      }
    }
  }
  fenceAlias(); // what was loaded or stored by the multicast addresses, before what others do behind the barrier by their own
  if (!f.template barrier<true>(kFlagEnd, epoch)) return;
  // Each thread moves what it has stored itself.
  if (staged)
    for (u64 v = begin; v < high; v += step) s.store(out, v, loadWeak(stage + v * 16, Words<4>()));
  f.close(epoch);
}

// Cast is the parameter of symmem_cast beside Comm: bytes of this rank that all ranks are to have, at the same place each.
struct Cast {
  u64 from;         // address of the first byte on this rank
  u64 to;           // multicast address of where it goes
  u64 bytes;        // 0: this rank has nothing for the others
  u64 table;        // world > kInline: address of u64[world] in memory of this device, in place of own
  u64 own[kInline]; // where it goes on each rank, by rank, by its plain address: alike modulo 16, as `to` is
};
SYMMEM_AT(Cast, from, 0);
SYMMEM_AT(Cast, to, 8);
SYMMEM_AT(Cast, bytes, 16);
SYMMEM_AT(Cast, table, 24);
SYMMEM_AT(Cast, own, 32);
static_assert(sizeof(Cast) == 96, "Cast");

// castVectors stores whole vectors to all ranks. What they come from is aligned to an element of T only.
template <class T> SYMMEM_DEVICE void castVectors(u64 to, u64 from, u64 vectors) {
  const u64 step = gridDim.x * (u64)blockDim.x;
#pragma unroll 1
  for (u64 v = blockIdx.x * (u64)blockDim.x + threadIdx.x; v < vectors; v += step) {
    Words<4> x = {};
#pragma unroll
    for (u32 e = 0; e < 16 / T::width; e++) setElement<T>(x, e, loadElement<T::width>(from + v * 16 + e * T::width));
    storeAll(to + v * 16, x);
  }
}

// castAligned is castVectors from vectors. In place they are stored to where they were loaded, by another address.
SYMMEM_DEVICE void castAligned(u64 to, u64 from, u64 vectors, bool inPlace) {
  constexpr u32 U = 8;
  const u64 step = gridDim.x * (u64)blockDim.x;
  for (u64 v = blockIdx.x * (u64)blockDim.x + threadIdx.x; v < vectors; v += U * step) {
    Words<4> x[U];
#pragma unroll
    for (u32 u = 0; u < U; u++)
      if (v + u * step < vectors) x[u] = loadWeak(from + (v + u * step) * 16, Words<4>());
    if (inPlace) fenceAlias();
#pragma unroll
    for (u32 u = 0; u < U; u++)
      if (v + u * step < vectors) storeAll(to + (v + u * step) * 16, x[u]);
  }
}

// symmem_cast is broadcast and all-gather: every rank stores what it has to all ranks. Who may do what when:
//
//   before the barrier at the beginning  a rank that is late has not come to its launch, and work before that may still read and write
//                                        its output: nobody has stored anything
//   between the barriers                 every rank's output is written by others; nobody reads it. A rank loads what it has for the others,
//                                        and nobody else does
//   behind the barrier at the end        all that the blocks of this number of all ranks have stored is there; a launch ends when
//                                        that is so of all its blocks, and what follows may read the output and write to the input
//
// A multicast store is of an aligned vector. The bytes before the first and behind the last, at most 15 each, are stored one by one at the
// plain address of each rank, of which a neighbour in an all-gather may write other bytes of the same vector. In place this rank's own are
// there already; vectors it stores to itself as well, with the bytes that are there.
extern "C" __global__ void __launch_bounds__(512) symmem_cast(const __grid_constant__ Comm c, const __grid_constant__ Cast p) {
  Ranks<> ranks(c, kKindCast);
  u32 epoch;
  if (!ranks.begin(epoch)) return;
  if (!ranks.barrier<false>(kFlagStart, epoch)) return;
  fenceAlias(); // what others did to their outputs by plain addresses, before stores by the multicast address
  u64 head = (0 - p.to) % 16;
  if (head > p.bytes) head = p.bytes;
  const u64 vectors = (p.bytes - head) / 16, to = p.to + head, from = p.from + head;
  const auto own = [&](u32 r) {
    if (c.world <= kInline) return p.own[r];
    u64 x;
    asm volatile("ld.global.u64 %0, [%1];" : "=l"(x) : "l"(p.table + r * 8ull));
    return x;
  };
  if (from % 16 == 0)
    castAligned(to, from, vectors, own(c.rank) == p.from);
  else if (from % 8 == 0)
    castVectors<U64>(to, from, vectors);
  else if (from % 4 == 0)
    castVectors<U32>(to, from, vectors);
  else if (from % 2 == 0)
    castVectors<U16>(to, from, vectors);
  else
    castVectors<U8>(to, from, vectors);
  if (blockIdx.x + 1 == gridDim.x) { // which has the least to do
    for (u64 i = threadIdx.x; i < p.bytes - vectors * 16; i += blockDim.x) {
      const u64 at = i < head ? i : i + vectors * 16, x = loadElement<1>(p.from + at);
#pragma unroll 1
      for (u32 k = 0; k < ranks.world(); k++) {
        const u64 out = own(ranks.peer(k));
        if (out != p.from) storeElement<1>(out + at, x);
      }
    }
  }
  fenceAlias(); // what was stored by the multicast address, before what others do behind the barrier by their own
  if (!ranks.barrier<true>(kFlagEnd, epoch)) return;
  ranks.close(epoch);
}

#define SYMMEM_MULTIMEM(dtype, type)                                                                                        \
  extern "C" __global__ void __launch_bounds__(512)                                                                         \
      symmem_allreduce_oneshot_multimem_##dtype##_sum_wn(const __grid_constant__ Params p) {                                \
    multimem<type, false>(p, kKindOneshotMultimem);                                                                         \
  }                                                                                                                         \
  extern "C" __global__ void __launch_bounds__(512)                                                                         \
      symmem_allreduce_twoshot_multimem_##dtype##_sum_wn(const __grid_constant__ Params p) {                                \
    multimem<type, true>(p, kKindTwoshotMultimem);                                                                          \
  }
SYMMEM_MULTIMEM(f32, F32)
SYMMEM_MULTIMEM(f16, F16)
SYMMEM_MULTIMEM(bf16, BF16)
