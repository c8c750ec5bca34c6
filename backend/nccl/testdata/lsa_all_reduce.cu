// An all-reduce over NCCL's device interface, as somebody else might write it: the barrier between the ranks is NCCL's own, on the device,
// and the peers' addresses come from the window's handle. It is compiled in a test with the headers of the library that runs, since the
// structures belong to a version.
#include <nccl.h>
#include <nccl_device.h>

struct Args {
  ncclDevComm comm;
  ncclWindow_t window;
  size_t offset; // of the first element in the window, in bytes
  size_t count;  // of elements
};

extern "C" __global__ void lsa_all_reduce(const __grid_constant__ Args args) {
  ncclLsaBarrierSession<ncclCoopCta> barrier{ncclCoopCta(), args.comm, ncclTeamTagLsa(), blockIdx.x};
  barrier.sync(ncclCoopCta(), cuda::memory_order_relaxed);
  const int ranks = args.comm.lsaSize;
  const size_t first = threadIdx.x + size_t(blockDim.x) * (args.comm.lsaRank + size_t(blockIdx.x) * ranks);
  const size_t stride = size_t(blockDim.x) * gridDim.x * ranks;
  for (size_t i = first; i < args.count; i += stride) {
    float sum = 0;
    for (int r = 0; r < ranks; r++) {
      sum += static_cast<const float*>(ncclGetLsaPointer(args.window, args.offset, r))[i];
    }
    for (int r = 0; r < ranks; r++) {
      static_cast<float*>(ncclGetLsaPointer(args.window, args.offset, r))[i] = sum;
    }
  }
  barrier.sync(ncclCoopCta(), cuda::memory_order_release);
}
