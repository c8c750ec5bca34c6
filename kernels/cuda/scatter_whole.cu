// Reduce-scatter and reduce by lines, for messages of whole vectors. The generator compiles this file once for each dtype and world size.
#include "whole.cuh"

#define SYMMEM_JOIN(form, dtype, world) symmem_scatter_##form##_##dtype##_sum_w##world
#define SYMMEM_NAME(form, dtype, world) SYMMEM_JOIN(form, dtype, world)
#define SYMMEM_KERNEL(form, body, ...)                                                                                     \
  extern "C" __global__ void __launch_bounds__(256, ##__VA_ARGS__)                                                         \
      SYMMEM_NAME(form, SYMMEM_DTYPE, SYMMEM_WORLD)(const __grid_constant__ PushParams<SYMMEM_WORLD> p) {                  \
    body<SYMMEM_TYPE, SumOp>(p);                                                                                           \
  }
SYMMEM_KERNEL(whole, scatterWhole)
SYMMEM_KERNEL(root, rootWhole)
#if __CUDA_ARCH__ < 900 // with nothing of what is newer it is the same for all
// Two blocks a multiprocessor: a plan may have half of a device, which is to be a block on each.
SYMMEM_KERNEL(flow, scatterFlow, 2)
#endif
