// Copies of any bytes by the threads of a block.
#pragma once
#include "memory.cuh"

enum : u32 { kChunkBytes = 16384 }; // what a block moves of one piece at a time

// copyElements copies what is aligned to width on both sides. All loads of a round are under way before the first is stored.
template <u32 width> SYMMEM_DEVICE void copyElements(u64 to, u64 from, u64 bytes) {
  constexpr u32 U = 4;
  const u64 step = blockDim.x * width;
  for (u64 at = threadIdx.x * width; at < bytes; at += U * step) {
    u64 x[U];
#pragma unroll
    for (u32 u = 0; u < U; u++)
      if (at + u * step < bytes) x[u] = loadElement<width>(from + at + u * step);
#pragma unroll
    for (u32 u = 0; u < U; u++)
      if (at + u * step < bytes) storeElement<width>(to + at + u * step, x[u]);
  }
}
template <> SYMMEM_DEVICE void copyElements<16>(u64 to, u64 from, u64 bytes) {
  constexpr u32 U = 4;
  const u64 step = blockDim.x * 16;
  for (u64 at = threadIdx.x * 16; at < bytes; at += U * step) {
    Words<4> x[U];
#pragma unroll
    for (u32 u = 0; u < U; u++)
      if (at + u * step < bytes) x[u] = loadStrong(from + at + u * step, Words<4>());
#pragma unroll
    for (u32 u = 0; u < U; u++)
      if (at + u * step < bytes) storeWeak(to + at + u * step, x[u]);
  }
}

// copyAligned copies in elements of width, which the two sides have in common, and single bytes before and behind them.
template <u32 width> SYMMEM_DEVICE void copyAligned(u64 to, u64 from, u64 bytes) {
  u64 head = (0 - to) % width;
  if (head > bytes) head = bytes;
  const u64 body = (bytes - head) / width * width, tail = head + body;
  copyElements<1>(to, from, head);
  copyElements<width>(to + head, from + head, body);
  copyElements<1>(to + tail, from + tail, bytes - tail);
}

SYMMEM_DEVICE void copyChunk(u64 to, u64 from, u64 bytes) {
  const u64 apart = to - from;
  if (apart % 16 == 0)
    copyAligned<16>(to, from, bytes);
  else if (apart % 8 == 0)
    copyAligned<8>(to, from, bytes);
  else if (apart % 4 == 0)
    copyAligned<4>(to, from, bytes);
  else if (apart % 2 == 0)
    copyAligned<2>(to, from, bytes);
  else
    copyElements<1>(to, from, bytes);
}
