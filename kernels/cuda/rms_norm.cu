// The kernels of rms_norm.cuh of one dtype: symmem_rms_norm_<form>_<dtype>_w<world>, where n stands for every world size, and
// symmem_rms_norm_<dtype>, the part behind the sum.
#include "rms_norm.cuh"

#define SYMMEM_JOIN(form, dtype, tail) symmem_rms_norm_##form##_##dtype##_##tail
#define SYMMEM_NAME(form, dtype, tail) SYMMEM_JOIN(form, dtype, tail)
#define SYMMEM_KERNEL(form, tail, ...) SYMMEM_KERNEL_OF(form, tail, __launch_bounds__(512), __VA_ARGS__)
#define SYMMEM_KERNEL_OF(form, tail, bounds, ...)                                                                          \
  extern "C" __global__ void bounds                                                                                        \
      SYMMEM_NAME(form, SYMMEM_DTYPE, tail)(const __grid_constant__ Comm c, const __grid_constant__ Norm n) {              \
    __VA_ARGS__(c, n);                                                                                                     \
  }
#define SYMMEM_LOCAL(dtype) symmem_rms_norm_##dtype
#define SYMMEM_LOCAL_NAME(dtype) SYMMEM_LOCAL(dtype)

SYMMEM_KERNEL(oneshot_push, wn, normOneshotPush<SYMMEM_TYPE, 0>)
SYMMEM_KERNEL(twoshot_push, wn, normTwoshotPush<SYMMEM_TYPE, 0>)
SYMMEM_KERNEL(twoshot_pull, wn, normTwoshotPull<SYMMEM_TYPE>)
#if SYMMEM_SPECIAL // kernels for one world size, on the devices that most have
SYMMEM_KERNEL(oneshot_push, w2, normOneshotPush<SYMMEM_TYPE, 2>)
// For few rows, of which a cluster of eight blocks has each.
#define SYMMEM_CLUSTER __cluster_dims__(8, 1, 1) __launch_bounds__(64)
SYMMEM_KERNEL_OF(oneshot_push_cluster, w2, SYMMEM_CLUSTER, normOneshotPush<SYMMEM_TYPE, 2, 8>)
SYMMEM_KERNEL_OF(oneshot_push_cluster, w4, SYMMEM_CLUSTER, normOneshotPush<SYMMEM_TYPE, 4, 8>)
SYMMEM_KERNEL_OF(oneshot_push_cluster, w8, SYMMEM_CLUSTER, normOneshotPush<SYMMEM_TYPE, 8, 8>)
#ifdef SYMMEM_TWO_BLOCKS // of 512 threads fit a multiprocessor
SYMMEM_KERNEL_OF(oneshot_push, w4, __launch_bounds__(512, 2), normOneshotPush<SYMMEM_TYPE, 4>)
#else
SYMMEM_KERNEL(oneshot_push, w4, normOneshotPush<SYMMEM_TYPE, 4>)
#endif
SYMMEM_KERNEL(oneshot_push, w8, normOneshotPush<SYMMEM_TYPE, 8>)
SYMMEM_KERNEL(twoshot_push, w4, normTwoshotPush<SYMMEM_TYPE, 4>)
SYMMEM_KERNEL(twoshot_push, w8, normTwoshotPush<SYMMEM_TYPE, 8>)
#endif

extern "C" __global__ void __launch_bounds__(512) SYMMEM_LOCAL_NAME(SYMMEM_DTYPE)(const __grid_constant__ Norm n) {
  normLocal<SYMMEM_TYPE>(n);
}
