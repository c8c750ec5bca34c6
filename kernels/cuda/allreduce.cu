// The all-reduce kernels of one dtype. The generator compiles this file once for each dtype and group of forms:
//
//   SYMMEM_WORLD 0                 every form that every dtype has, each op and world size
//   SYMMEM_WORLD W, SYMMEM_PUSH 1  oneshot_push and twoshot_push, each for any message and for whole vectors, and of lists of such, sum
//   SYMMEM_WORLD W, SYMMEM_PUSH 0  oneshot_pull, twoshot_pull and twoshot_flow, sum
#include "oneshot.cuh"
#include "push.cuh"
#include "twoshot.cuh"

// Threads in a block at most, and blocks that a multiprocessor is to hold at least: that caps the registers.
#define SYMMEM_BOUNDS 512
#define SYMMEM_BOUNDS_FLOW 512, 2
// Blocks of oneshot_push_whole are of at most 256 threads. Asked for 4, the compiler takes 44 registers in place of 40 between two ranks, loads
// earlier, and is up to 5 % faster.
#define SYMMEM_BOUNDS_ONESHOT 256, 4
// A plan has half of the device: the fewer registers, the more threads. Between two and three ranks 48 do without a spill; between four, where they do not, it is up to 8 % slower.
#define SYMMEM_BOUNDS_TWOSHOT 256, (SYMMEM_WORLD <= 3 ? 5 : SYMMEM_WORLD == 4 ? 4 : 2)

#define SYMMEM_JOIN(form, dtype, tail) symmem_allreduce_##form##_##dtype##_##tail
#define SYMMEM_NAME(form, dtype, tail) SYMMEM_JOIN(form, dtype, tail)
#define SYMMEM_TAKES(params, form, body, ...)                                                                              \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__)                                                                \
      SYMMEM_NAME(form, SYMMEM_DTYPE, SYMMEM_TAIL)(const __grid_constant__ params p) {                                     \
    body<SYMMEM_TYPE, SYMMEM_OP, SYMMEM_WORLD>(p);                                                                         \
  }
#define SYMMEM_KERNEL(form, body, ...) SYMMEM_TAKES(Params, form, body, __VA_ARGS__)

#if SYMMEM_WORLD == 0
#define SYMMEM_OP AnyOp
#define SYMMEM_TAIL any_wn
SYMMEM_KERNEL(oneshot_ll, oneshotLL, SYMMEM_BOUNDS)
#else
#define SYMMEM_OP SumOp
#define SYMMEM_SUM(world) sum_w##world
#define SYMMEM_SUM_OF(world) SYMMEM_SUM(world)
#define SYMMEM_TAIL SYMMEM_SUM_OF(SYMMEM_WORLD)
#endif

#if SYMMEM_WORLD != 0 && SYMMEM_PUSH
SYMMEM_KERNEL(oneshot_push, oneshotPush, SYMMEM_BOUNDS)
SYMMEM_KERNEL(twoshot_push, twoshotPush, SYMMEM_BOUNDS)
SYMMEM_TAKES(PushParams<SYMMEM_WORLD>, oneshot_push_whole, oneshotPushWhole, SYMMEM_BOUNDS_ONESHOT)
SYMMEM_TAKES(PushParams<SYMMEM_WORLD>, twoshot_push_whole, twoshotPushWhole, SYMMEM_BOUNDS_TWOSHOT)
#if SYMMEM_WORLD == 2
// For longer messages: 32 registers, with which shorter ones are slower. Of those of oneshot_push_longer each thread has more than one vector.
#define SYMMEM_BOUNDS_LONG 256, 8
SYMMEM_TAKES(PushParams<2>, oneshot_push_long, oneshotPushWhole, SYMMEM_BOUNDS_LONG)
extern "C" __global__ void __launch_bounds__(SYMMEM_BOUNDS_LONG)
    SYMMEM_NAME(oneshot_push_longer, SYMMEM_DTYPE, SYMMEM_TAIL)(const __grid_constant__ PushParams<2> p) {
  oneshotPushLonger<SYMMEM_TYPE, SYMMEM_OP>(p);
}
#endif
extern "C" __global__ void __launch_bounds__(SYMMEM_BOUNDS_ONESHOT)
    SYMMEM_NAME(many_push_whole, SYMMEM_DTYPE, SYMMEM_TAIL)(const __grid_constant__ PushParams<SYMMEM_WORLD> p, const __grid_constant__ WholeMany m) {
  manyPushWhole<SYMMEM_TYPE, SYMMEM_OP, SYMMEM_WORLD>(p, m);
}
#else
SYMMEM_KERNEL(oneshot_pull, oneshotPull, SYMMEM_BOUNDS)
SYMMEM_KERNEL(twoshot_pull, twoshotPull, SYMMEM_BOUNDS)
SYMMEM_KERNEL(twoshot_flow, twoshotFlow, SYMMEM_BOUNDS_FLOW)
#endif
