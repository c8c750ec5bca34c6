// SGLang's push all-reduce kernels from its package, for `symmem bench --peer sglang`: each dtype and world size that has them, with
// programmatic dependent launch. See sglang.sh.
#include "csrc/distributed/custom_all_reduce.cuh"

#define KERNELS(T, W)                                                                                       \
  template __global__ void sglang::all_reduce_1shot_push_kernel<T, W, true>(                                \
      const __grid_constant__ sglang::AllReducePushParams<W>);                                              \
  template __global__ void sglang::all_reduce_2shot_push_kernel<T, W, true>(                                \
      const __grid_constant__ sglang::AllReducePushParams<W>);
#define DTYPES(W) KERNELS(__nv_bfloat16, W) KERNELS(__half, W) KERNELS(float, W)

DTYPES(2) DTYPES(3) DTYPES(4) DTYPES(5) DTYPES(6) DTYPES(7) DTYPES(8)
