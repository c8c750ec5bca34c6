// A kernel of somebody else's, on symmem.cuh alone: all-reduce, residual and RMSNorm in one launch.
//
//   sum = residual + the sum of all ranks' x, in rank order
//   y   = sum / sqrt(mean of sum^2 over the row + epsilon) * weight
//
// x, residual, sum and y are float[rows][columns], weight is float[columns]; columns is a multiple of 4, all are aligned to 16 bytes, and
// sum may be residual. Every rank has x of its own, and computes all rows. The data of a workspace is float[2][rows][columns], which take
// turns by epoch: a rank that is in launch n + 1 waits there for all ranks, so in launch n + 2 nobody reads any more what was put in n.
#include "symmem.cuh"

using namespace symmem;

// total is the sum over the block, the same in all threads: those of a warp first, then of the warps, in order.
static __device__ float total(float v) {
  __shared__ float warps[32];
  for (u32 d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  __syncthreads(); // the last sum has been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  v = 0;
  for (u32 w = 0; w < blockDim.x / 32; w++) v += warps[w];
  return v;
}

extern "C" __global__ void __launch_bounds__(512)
    allreduce_rmsnorm(const __grid_constant__ Comm c, const float *x, const float *residual, float *sum, const float *weight,
                      float *y, u32 rows, u32 columns, float epsilon) {
  Ranks<> ranks(c, kKindUser);
  u32 epoch;
  if (!ranks.begin(epoch)) return;
  const u64 row = columns * 4ull, turn = (epoch & 1) * rows * row;
  // This block's rows go to the workspace of this rank; peers load them there.
  for (u64 r = blockIdx.x; r < rows; r += gridDim.x) ranks.put(ranks.rank(), turn + r * row, (u64)x + r * row, row);
  if (!ranks.barrier(0, epoch)) return;
  for (u64 r = blockIdx.x; r < rows; r += gridDim.x) {
    float squares = 0;
    for (u64 i = threadIdx.x * 16ull; i < row; i += blockDim.x * 16ull) {
      float4 s = *(const float4 *)((u64)residual + r * row + i);
      for (u32 from = 0; from < ranks.world(); from++) {
        const Words<4> v = loadStrong(ranks.data(from) + turn + r * row + i, Words<4>());
        s.x += __uint_as_float(v.w[0]), s.y += __uint_as_float(v.w[1]), s.z += __uint_as_float(v.w[2]), s.w += __uint_as_float(v.w[3]);
      }
      *(float4 *)((u64)sum + r * row + i) = s; // read again below, by this thread
      squares += s.x * s.x + s.y * s.y + s.z * s.z + s.w * s.w;
    }
    const float scale = rsqrtf(total(squares) / columns + epsilon);
    for (u64 i = threadIdx.x * 16ull; i < row; i += blockDim.x * 16ull) {
      const float4 s = *(const float4 *)((u64)sum + r * row + i), w = *(const float4 *)((u64)weight + i);
      *(float4 *)((u64)y + r * row + i) = make_float4(s.x * scale * w.x, s.y * scale * w.y, s.z * scale * w.z, s.w * scale * w.w);
    }
  }
  ranks.close(epoch);
}
