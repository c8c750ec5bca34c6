// All-reduce, residual and RMSNorm in one launch:
//
//   hidden += the sum of all ranks' x, in rank order
//   y       = hidden / sqrt(mean of hidden^2 over the row + epsilon) * weight
//
// x, hidden and y are float[rows][columns], weight is float[columns]; columns is a multiple of 4, all are aligned to 16 bytes. Every rank
// has x of its own, and computes all rows. The workspace is float[2][rows][columns], which take turns by epoch: a rank that is in run n + 1
// waits there for all ranks, so in run n + 2 nobody reads any more what was put in n.
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
    allreduce_rmsnorm(const __grid_constant__ Comm c, const float *x, float *hidden, const float *weight, float *y, u32 rows,
                      u32 columns, float epsilon) {
  Ranks<> ranks(c, kKindUser);
  u32 epoch;
  if (!ranks.begin(epoch)) return; // the job is over
  const u64 row = columns * 4ull, turn = (epoch & 1) * rows * row;

  // The rows of this block go to the workspace of this rank, where the blocks of this number on all ranks load them.
  for (u64 at = blockIdx.x * row; at < rows * row; at += gridDim.x * row) ranks.put(ranks.rank(), turn + at, (u64)x + at, row);
  if (!ranks.barrier(0, epoch)) return; // a peer is lost, or did not come in time

  for (u64 at = blockIdx.x * row; at < rows * row; at += gridDim.x * row) {
    float squares = 0;
    for (u64 i = threadIdx.x * 16ull; i < row; i += blockDim.x * 16ull) {
      float4 h = *(float4 *)((u64)hidden + at + i);
      for (u32 from = 0; from < ranks.world(); from++) {
        const Words<4> v = loadStrong(ranks.data(from) + turn + at + i, Words<4>());
        h.x += __uint_as_float(v.w[0]), h.y += __uint_as_float(v.w[1]), h.z += __uint_as_float(v.w[2]), h.w += __uint_as_float(v.w[3]);
      }
      *(float4 *)((u64)hidden + at + i) = h; // read again below, by this thread
      squares += h.x * h.x + h.y * h.y + h.z * h.z + h.w * h.w;
    }
    const float scale = rsqrtf(total(squares) / columns + epsilon);
    for (u64 i = threadIdx.x * 16ull; i < row; i += blockDim.x * 16ull) {
      const float4 h = *(float4 *)((u64)hidden + at + i), w = *(const float4 *)((u64)weight + i);
      *(float4 *)((u64)y + at + i) = make_float4(h.x * scale * w.x, h.y * scale * w.y, h.z * scale * w.z, h.w * scale * w.w);
    }
  }
  ranks.close(epoch);
}
