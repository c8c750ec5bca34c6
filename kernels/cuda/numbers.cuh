// The dtypes and what the operations do to them: the same bits as the kernels of the host, payloads of NaN apart. Nothing
// here may be contracted to a fused multiply-add or flushed to zero; the compiler's options say so.
#pragma once
#include "memory.cuh"

SYMMEM_DEVICE float f32From(u32 x) { return __int_as_float((s32)x); }
SYMMEM_DEVICE u32 f32Bits(float x) { return (u32)__float_as_int(x); }

// Each dtype has the width of an element in bytes, the type Acc in which it is accumulated, decode and encode between the two
// (encode takes what is beyond the element's range modulo its width), and the operations. min and max give NaN if either has
// it, and hold -0 to be less than +0.
struct FloatAcc {
  typedef float Acc;
  enum : bool { floats = true };
  static SYMMEM_DEVICE float sum(float a, float b) { return __fadd_rn(a, b); }
  static SYMMEM_DEVICE float prod(float a, float b) { return __fmul_rn(a, b); }
  static SYMMEM_DEVICE float min(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
  static SYMMEM_DEVICE float max(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
  static SYMMEM_DEVICE float avg(float a, u32 world) { return __fdiv_rn(a, (float)world); }
};

struct F32 : FloatAcc {
  enum : u32 { width = 4 };
  static SYMMEM_DEVICE float decode(u32 x) { return f32From(x); }
  static SYMMEM_DEVICE u32 encode(float a) { return f32Bits(a); }
};

struct F16 : FloatAcc {
  enum : u32 { width = 2 };
  static SYMMEM_DEVICE float decode(u32 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"((u16)x));
    return r;
  }
  static SYMMEM_DEVICE u32 encode(float a) {
    u16 r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(a));
    return r;
  }
  static SYMMEM_DEVICE u32 encode(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
};

struct BF16 : FloatAcc {
  enum : u32 { width = 2 };
  static SYMMEM_DEVICE float decode(u32 x) { return f32From(x << 16); }
  static SYMMEM_DEVICE u32 encode(float a) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(a));
    return r;
  }
  static SYMMEM_DEVICE u32 encode(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
};

struct F64 {
  typedef double Acc;
  enum : bool { floats = false };
  enum : u32 { width = 8 };
  static SYMMEM_DEVICE double decode(u64 x) { return __longlong_as_double((s64)x); }
  static SYMMEM_DEVICE u64 encode(double a) { return (u64)__double_as_longlong(a); }
  static SYMMEM_DEVICE double sum(double a, double b) { return __dadd_rn(a, b); }
  static SYMMEM_DEVICE double prod(double a, double b) { return __dmul_rn(a, b); }
  static SYMMEM_DEVICE double min(double a, double b) {
    double r;
    asm("min.f64 %0, %1, %2;" : "=d"(r) : "d"(a), "d"(b));
    return a != a ? a : b != b ? b : r;
  }
  static SYMMEM_DEVICE double max(double a, double b) {
    double r;
    asm("max.f64 %0, %1, %2;" : "=d"(r) : "d"(a), "d"(b));
    return a != a ? a : b != b ? b : r;
  }
  static SYMMEM_DEVICE double avg(double a, u32 world) { return __ddiv_rn(a, (double)world); }
};

// Integer is an integer of type T, accumulated in A (of at least 32 bits, signed if T is), added and multiplied in the
// unsigned B so that it wraps around.
template <class T, class A, class B> struct Integer {
  typedef A Acc;
  enum : bool { floats = false };
  enum : u32 { width = sizeof(T) };
  static SYMMEM_DEVICE A decode(u64 x) { return (A)(T)x; }
  static SYMMEM_DEVICE B encode(A a) { return (B)a; }
  static SYMMEM_DEVICE A sum(A a, A b) { return (A)((B)a + (B)b); }
  static SYMMEM_DEVICE A prod(A a, A b) { return (A)((B)a * (B)b); }
  static SYMMEM_DEVICE A min(A a, A b) { return a < b ? a : b; }
  static SYMMEM_DEVICE A max(A a, A b) { return a > b ? a : b; }
  static SYMMEM_DEVICE A avg(A a, u32 world) { return (A)(T)a / (A)world; }
};
typedef Integer<s8, s32, u32> I8;
typedef Integer<s16, s32, u32> I16;
typedef Integer<s32, s32, u32> I32;
typedef Integer<s64, s64, u64> I64;
typedef Integer<u8, u32, u32> U8;
typedef Integer<u16, u32, u32> U16;
typedef Integer<u32, u32, u32> U32;
typedef Integer<u64, u64, u64> U64;

// SumOp is Sum and Avg, AnyOp is every operation; op is Params::op.
struct SumOp {
  enum : bool { any = false };
  u32 op;
};
struct AnyOp {
  enum : bool { any = true };
  u32 op;
};

// element is element e of a vector, as bits.
template <class T, int N> SYMMEM_DEVICE u64 element(const Words<N> &x, int e) {
  if constexpr (T::width == 8) return (u64)x.w[2 * e] | (u64)x.w[2 * e + 1] << 32;
  if constexpr (T::width == 4) return x.w[e];
  if constexpr (T::width == 2) return (x.w[e / 2] >> (16 * (e % 2))) & 0xffff;
  if constexpr (T::width == 1) return (x.w[e / 4] >> (8 * (e % 4))) & 0xff;
}

// setElement sets element e of a vector whose element e is 0.
template <class T, int N> SYMMEM_DEVICE void setElement(Words<N> &x, int e, u64 bits) {
  if constexpr (T::width == 8) {
    x.w[2 * e] = (u32)bits;
    x.w[2 * e + 1] = (u32)(bits >> 32);
  }
  if constexpr (T::width == 4) x.w[e] = (u32)bits;
  if constexpr (T::width == 2) x.w[e / 2] |= ((u32)bits & 0xffff) << (16 * (e % 2));
  if constexpr (T::width == 1) x.w[e / 4] |= ((u32)bits & 0xff) << (8 * (e % 4));
}

// encodeFloats makes a vector of floats. It rounds two of 16 bits at a time: the compiler does so by itself only where neither is of any other use, and one at a time is
// four times as slow.
template <class T, int E> SYMMEM_DEVICE Words<E * T::width / 4> encodeFloats(const float (&a)[E]) {
  Words<E * T::width / 4> x;
  if constexpr (T::width == 2) {
#pragma unroll
    for (int k = 0; k < E / 2; k++) x.w[k] = T::encode(a[2 * k], a[2 * k + 1]);
  } else {
#pragma unroll
    for (int k = 0; k < E; k++) x.w[k] = T::encode(a[k]);
  }
  return x;
}

// Accumulator combines vectors in the order in which they are added.
template <class T, class Op, int N> struct Accumulator {
  typedef typename T::Acc Acc;
  static constexpr int E = N * 4 / T::width;
  Acc a[E];

  template <Acc combine(Acc, Acc)> SYMMEM_DEVICE void each(const Words<N> &x) {
#pragma unroll
    for (int e = 0; e < E; e++) a[e] = combine(a[e], T::decode(element<T>(x, e)));
  }
  SYMMEM_DEVICE void first(const Words<N> &x) {
#pragma unroll
    for (int e = 0; e < E; e++) a[e] = T::decode(element<T>(x, e));
  }
  SYMMEM_DEVICE void add(Op op, const Words<N> &x) {
    if constexpr (Op::any) {
      switch (op.op) { // all elements in one case, rather than one switch an element
      case kProd: each<T::prod>(x); return;
      case kMin: each<T::min>(x); return;
      case kMax: each<T::max>(x); return;
      }
    }
    each<T::sum>(x);
  }
  // result is what has been combined. W is the world size if that is known when compiling: the inverse of a power of two is exact, so a
  // product with it has the bits of the quotient, without the call.
  template <int W = 0> SYMMEM_DEVICE Words<N> result(Op op, u32 world) {
    if constexpr (W != 0 && (W & (W - 1)) == 0) {
      const Acc by = op.op == kAvg ? (Acc)1 / W : (Acc)1;
#pragma unroll
      for (int e = 0; e < E; e++) a[e] = a[e] * by;
    } else if (op.op == kAvg) {
#pragma unroll
      for (int e = 0; e < E; e++) a[e] = T::avg(a[e], world);
    }
    if constexpr (T::floats) return encodeFloats<T>(a);
    Words<N> x = {};
#pragma unroll
    for (int e = 0; e < E; e++) setElement<T>(x, e, T::encode(a[e]));
    return x;
  }
};
