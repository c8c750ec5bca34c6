// Collectives that move elements and change none, by lines, for messages of whole vectors. The generator compiles this file once for each world size.
#include "whole.cuh"

// A plan has half of the device, and between more ranks a thread has more lines under way.
#define SYMMEM_BOUNDS 256, (SYMMEM_WORLD <= 4 ? 4 : 1)

#define SYMMEM_JOIN(form, world) symmem_lines_##form##_w##world
#define SYMMEM_NAME(form, world) SYMMEM_JOIN(form, world)
#define SYMMEM_KERNEL(form, body)                                                                                          \
  extern "C" __global__ void __launch_bounds__(SYMMEM_BOUNDS)                                                              \
      SYMMEM_NAME(form, SYMMEM_WORLD)(const __grid_constant__ PushParams<SYMMEM_WORLD> p) {                                \
    body(p);                                                                                                               \
  }
SYMMEM_KERNEL(gather, exchangeWhole<true>)
SYMMEM_KERNEL(exchange, exchangeWhole<false>)
SYMMEM_KERNEL(broadcast, broadcastWhole)
#if SYMMEM_WORLD > 2
SYMMEM_KERNEL(pass, passWhole)
#endif
