// Loads and stores as the memory model names them. "Strong" accesses are relaxed at system scope: they go past the first
// level cache. The elements of a vector are accesses of their own, in no order: only each of them arrives whole.
#pragma once
#include "params.cuh"

#define SYMMEM_DEVICE __device__ __forceinline__

// Words is a vector of N 32-bit words: 2 or 4.
template <int N> struct Words { u32 w[N]; };

SYMMEM_DEVICE Words<4> loadWeak(u64 at, Words<4>) {
  Words<4> x;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(at) : "memory");
  return x;
}
SYMMEM_DEVICE Words<2> loadWeak(u64 at, Words<2>) {
  Words<2> x;
  asm volatile("ld.global.v2.u32 {%0,%1}, [%2];" : "=r"(x.w[0]), "=r"(x.w[1]) : "l"(at) : "memory");
  return x;
}
SYMMEM_DEVICE Words<4> loadStrong(u64 at, Words<4>) {
  Words<4> x;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(at) : "memory");
  return x;
}
SYMMEM_DEVICE Words<2> loadStrong(u64 at, Words<2>) {
  Words<2> x;
  asm volatile("ld.relaxed.sys.global.v2.u32 {%0,%1}, [%2];" : "=r"(x.w[0]), "=r"(x.w[1]) : "l"(at) : "memory");
  return x;
}
SYMMEM_DEVICE void storeWeak(u64 at, Words<4> x) {
  asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3]) : "memory");
}
SYMMEM_DEVICE void storeWeak(u64 at, Words<2> x) {
  asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(at), "r"(x.w[0]), "r"(x.w[1]) : "memory");
}
SYMMEM_DEVICE void storeStrong(u64 at, Words<4> x) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3])
               : "memory");
}

// Halves is 16 bytes as two accesses of 8, each of which arrives whole.
struct Halves { u64 h[2]; };

SYMMEM_DEVICE Halves loadHalves(u64 at) {
  Halves x;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(x.h[0]), "=l"(x.h[1]) : "l"(at) : "memory");
  return x;
}
SYMMEM_DEVICE void storeHalves(u64 at, Halves x) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(at), "l"(x.h[0]), "l"(x.h[1]) : "memory");
}

// One element of 1, 2, 4 or 8 bytes.
template <u32 width> SYMMEM_DEVICE u64 loadElement(u64 at) {
  if constexpr (width == 8) {
    u64 x;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
  } else {
    u32 x;
    if constexpr (width == 4) asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    if constexpr (width == 2)
      asm volatile("{.reg .u16 t; ld.relaxed.sys.global.u16 t, [%1]; cvt.u32.u16 %0, t;}" : "=r"(x) : "l"(at) : "memory");
    if constexpr (width == 1) asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
    return x;
  }
}
template <u32 width> SYMMEM_DEVICE void storeElement(u64 at, u64 x) {
  if constexpr (width == 8) asm volatile("st.global.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory");
  if constexpr (width == 4) asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"((u32)x) : "memory");
  if constexpr (width == 2) asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"((u16)x) : "memory");
  if constexpr (width == 1) asm volatile("st.global.u8 [%0], %1;" ::"l"(at), "r"((u32)x) : "memory");
}

// Words that count.
SYMMEM_DEVICE u32 loadRelaxed(u64 at) {
  u32 x;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
SYMMEM_DEVICE u32 loadAcquire(u64 at) {
  u32 x;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
SYMMEM_DEVICE void storeRelaxed(u64 at, u32 x) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
SYMMEM_DEVICE void storeRelease(u64 at, u32 x) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}
SYMMEM_DEVICE void fenceSystem() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// late reports whether a counter has not come to want yet; counters wrap around.
SYMMEM_DEVICE bool late(u32 counter, u32 want) { return (s32)(counter - want) < 0; }

SYMMEM_DEVICE u64 globalTimer() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// awaitPrevious waits for the work before this launch in its stream, and startNext lets the launch after it begin to start.
// Without programmatic stream serialization neither does anything.
SYMMEM_DEVICE void awaitPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
SYMMEM_DEVICE void startNext() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
