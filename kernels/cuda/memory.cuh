// Accesses that symmem.cuh has not: of halves of vectors, and of single elements.
#pragma once
#include "params.cuh"

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
