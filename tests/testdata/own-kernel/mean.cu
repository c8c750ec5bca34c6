// mean.cu
#include "symmem.cuh"
using namespace symmem;

// average is y[i] = the mean of x[0][i], x[1][i] and so on.
static __device__ void average(const float *const *x, u32 world, float *y, u64 n) {
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
    float sum = 0;
    for (u32 r = 0; r < world; r++) sum += x[r][i];
    y[i] = sum / world;
  }
}

// mean reads the x of all ranks where they are.
extern "C" __global__ void mean(const __grid_constant__ Comm c, const float *const *x, float *y, u64 n) {
  Ranks<> ranks(c, kKindUser);
  u32 epoch;
  if (!ranks.begin(epoch)) return;      // an earlier run has failed
  if (!ranks.barrier(0, epoch)) return; // every rank's x is ready
  average(x, ranks.world(), y, n);
  if (!ranks.barrier(1, epoch)) return; // nobody reads x any more
  ranks.close(epoch);
}

// mean_here is for x that are on this GPU. It waits for nobody.
extern "C" __global__ void mean_here(const float *const *x, u32 world, float *y, u64 n) { average(x, world, y, n); }
