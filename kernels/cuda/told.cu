// What ends a run whose parts go over the network. Ranks that have addresses of each other's memory wait for each other in kernels, and leave at
// once when one has given up. What a library carries to other ranks in between does not know of that: it brings them what was never finished. So it
// brings them a word too, which is not 0 when a rank that it comes from has given up, and this kernel looks at it.
#include "params.cuh"

enum : u32 { kFaultTold = 18, kKindTold = 40 };

// symmem_told is one block. word is the address of a u32 in memory of this device, which the work before has written.
extern "C" __global__ void symmem_told(const __grid_constant__ Comm c, u64 word) {
  awaitPrevious();
  if (threadIdx.x != 0 || loadRelaxed(word) == 0) return;
  giveUp(c.dead, c.fault, (u64)kFaultTold << 56 | (u64)kKindTold << 48 | (u64)(c.rank & 0xffff) << 32);
}
