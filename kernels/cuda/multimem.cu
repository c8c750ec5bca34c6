// All-reduce by the NVLink switch: loads from a multicast address that add what every rank has there, and stores to one that
// every rank gets. Sum of f32, f16 and bf16 only. Sums of 16-bit floats are asked for with at least the precision of float32 in
// between; nothing is known of the order, which is the switch's own and may change from load to load. So the bits may differ from
// those of other kernels, from run to run, and with oneshot_multimem from rank to rank.
//
// A multicast address and the plain one of the same memory are aliases, which are ordered only with a proxy fence in between: one
// stands behind the barrier at the beginning, before loads of what was stored at plain addresses, and one before the barrier at the
// end, behind stores to what is loaded at plain addresses after it.
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

// multimem reduces the vectors from low to high: to every rank's output, or to this rank's only. The vectors at the ends, and
// all if the output is not aligned as the input is, go by way of the peers' own addresses. To every rank's output it is safe in
// place: a vector is loaded and stored by the same thread of the same rank. To this rank's only it is not, as peers still load
// what would be overwritten; so, staged, results wait in the workspace until all have loaded.
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
  // keep stores a whole vector of this rank's output.
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
      if (s.whole(i) && s.alike) {
        const Words<4> x = loadReduced(T(), s.at(p.multicastIn, i));
        if (everywhere)
          storeAll(s.at(p.multicastOut, i), x);
        else
          keep(i, x);
        continue;
      }
      Accumulator<T, SumOp, 4> a;
      const SumOp op{kSum};
      a.first(s.template load<true>(input(f, 0), i));
#pragma unroll 1
      for (u32 r = 1; r < p.world; r++) a.add(op, s.template load<true>(input(f, r), i));
      const Words<4> sum = a.result(op, p.world);
      if (staged) {
        storeWeak(stage + i * 16, sum);
        continue;
      }
#pragma unroll 1
      for (u32 k = 0; k < (everywhere ? p.world : 1); k++) s.store(output(f, f.peer(k)), i, sum);
    }
  }
  fenceAlias(); // what was loaded or stored by the multicast addresses, before what others do behind the barrier by their own
  if (!f.template barrier<true>(kFlagEnd, epoch)) return;
  // Each thread moves what it has stored itself.
  if (staged)
    for (u64 v = begin; v < high; v += step) s.store(out, v, loadWeak(stage + v * 16, Words<4>()));
  f.close(epoch);
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
