// A kernel of a user's that waits twice for the other ranks, whose waits TestWaitsOfAUser bounds.
#include "symmem.cuh"

extern "C" __global__ void two_waits(const __grid_constant__ symmem::Comm c) {
  symmem::Ranks<> ranks(c, symmem::kKindUser);
  const unsigned epoch = ranks.open();
  if (!ranks.barrier(0, epoch)) return;
  if (!ranks.barrier(1, epoch)) return;
  ranks.close(epoch);
}
