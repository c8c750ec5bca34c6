// What every all-reduce kernel needs beyond symmem.cuh: inputs and outputs, where the elements lie, and lines that say whether they have come.
#pragma once
#include "numbers.cuh"

// Frame is one thread's view of a launch. What it has besides Ranks is in functions, not in a derived struct: that makes the compiler keep
// other registers in twoshot_flow.
template <int W> using Frame = Ranks<W, Params>;

// input and output are where rank r's are.
template <int W> static SYMMEM_DEVICE u64 input(const Ranks<W, Params> &f, u32 r) { return f.address(f.comm.in, 0, r); }
template <int W> static SYMMEM_DEVICE u64 output(const Ranks<W, Params> &f, u32 r) { return f.address(f.comm.out, 1, r); }

// slot is which slot of a buffer to load from for rank r: its own, or this rank's for one beyond the last. This rank's holds
// nothing and may be read.
template <int W> static SYMMEM_DEVICE u32 slot(const Ranks<W, Params> &f, u32 r) {
  return W != 0 || r < f.world() ? r : f.comm.rank;
}
// other says whether r is another rank.
template <int W> static SYMMEM_DEVICE bool other(const Ranks<W, Params> &f, u32 r) {
  return r != f.comm.rank && (W != 0 || r < f.world());
}

// loadPart and storePart are the rare vectors that are not whole or not aligned: elements from i on, those below count only.
template <class T, int N> static __device__ __noinline__ Words<N> loadPart(u64 base, u64 i, u64 count) {
  Words<N> x = {};
#pragma unroll
  for (u32 e = 0; e < N * 4 / T::width; e++)
    if (i + e < count) setElement<T>(x, e, loadElement<T::width>(base + (i + e) * T::width));
  return x;
}
template <class T, int N> static __device__ __noinline__ void storePart(u64 base, u64 i, u64 count, Words<N> x) {
#pragma unroll
  for (u32 e = 0; e < N * 4 / T::width; e++)
    if (i + e < count) storeElement<T::width>(base + (i + e) * T::width, element<T>(x, e));
}

// Span is the message as vectors of N words, counted from the aligned address at or before the input's first element; so
// loads are aligned, and only the first and the last vector may be in part outside. Stores are whole vectors if the output
// is aligned as the input is.
template <class T, int N> struct Span {
  static constexpr u32 bytes = N * 4;
  static constexpr u32 E = bytes / T::width;
  u64 count;   // elements
  u64 vectors; // that hold any
  u32 lead;    // elements of the first vector that are before the message
  bool alike;  // the output is aligned as the input is

  SYMMEM_DEVICE Span(u64 in, u64 out, u64 n) : count(n) {
    lead = (u32)(in % bytes) / T::width;
    alike = (in - out) % bytes == 0;
    vectors = (n + lead + E - 1) / E;
  }
  SYMMEM_DEVICE bool whole(u64 v) const { return v * E >= lead && (v + 1) * E <= count + lead; }
  SYMMEM_DEVICE u64 at(u64 base, u64 v) const { return base - lead * T::width + v * bytes; }

  // first is the element that vector v begins with, below 0 by wrapping around.
  SYMMEM_DEVICE u64 first(u64 v) const { return v * E - lead; }

  // load is vector v of the elements at base, with 0 for what is outside. strong: a peer may have written it.
  template <bool strong> SYMMEM_DEVICE Words<N> load(u64 base, u64 v) const {
    if (whole(v)) return strong ? loadStrong(at(base, v), Words<N>()) : loadWeak(at(base, v), Words<N>());
    return loadPart<T, N>(base, first(v), count);
  }
  SYMMEM_DEVICE void store(u64 base, u64 v, const Words<N> &x) const {
    if (alike && whole(v))
      storeWeak(at(base, v), x);
    else
      storePart<T, N>(base, first(v), count, x);
  }
};

// reduce combines one vector of each rank, in rank order. fetch(first, v) fills v with those of ranks first, first+1, … A
// fetch loads without branches between the loads, or they would wait for each other; for a rank beyond the last it may give
// anything.
template <class T, class Op, int W, int N, class Fetch> SYMMEM_DEVICE Words<N> reduce(Op op, u32 world, Fetch fetch) {
  Accumulator<T, Op, N> a;
  if constexpr (W != 0) {
    Words<N> v[W];
    fetch(0, v);
    a.first(v[0]);
#pragma unroll
    for (int r = 1; r < W; r++) a.add(op, v[r]);
  } else {
#pragma unroll 1
    for (u32 first = 0; first < world; first += 4) {
      Words<N> v[4];
      fetch(first, v);
      if (first == 0)
        a.first(v[0]);
      else
        a.add(op, v[0]);
#pragma unroll
      for (u32 j = 1; j < 4; j++)
        if (first + j < world) a.add(op, v[j]);
    }
  }
  return a.result(op, world);
}

// A line that is all data and yet tells whether it has come: empty is 0, and what is sent is the complement of the data, in
// which a word of ones, a NaN, becomes another NaN. So workspaces that begin with zeros are ready, and readers write zeros back.
// Only for floats of 16 and 32 bits: for others a word of ones is a number.
SYMMEM_DEVICE Words<4> seal(Words<4> x) {
#pragma unroll
  for (int i = 0; i < 4; i++) x.w[i] = ~(x.w[i] == ~0u ? 0x7fffffffu : x.w[i]);
  return x;
}
SYMMEM_DEVICE Words<4> unseal(Words<4> x) {
#pragma unroll
  for (int i = 0; i < 4; i++) x.w[i] = ~x.w[i];
  return x;
}
SYMMEM_DEVICE bool come(const Words<4> &x) { return x.w[0] != 0 && x.w[1] != 0 && x.w[2] != 0 && x.w[3] != 0; }

// fetchSealed waits for the lines of ranks first, first+1, … at `at` in their slots, empties them, and gives their data; for
// this rank, own. Each word says by itself whether it has come. A line is emptied by a strong store, which the writer's next
// one, two launches later, comes after: between the two are this rank's lines of the launch between and the ends of launches.
template <class T, int W, u32 B>
SYMMEM_DEVICE void fetchSealed(Ranks<W, Params> &f, u64 at, u32 first, const Words<4> &own, Words<4> (&x)[B]) {
  u32 missing;
  do {
#pragma unroll
    for (u32 j = 0; j < B; j++) x[j] = loadStrong(at + slot(f, first + j) * f.comm.span, Words<4>());
    missing = f.comm.rank;
#pragma unroll
    for (u32 j = 0; j < B; j++)
      if (other(f, first + j) && !come(x[j])) missing = first + j;
  } while (missing != f.comm.rank && f.again(missing));
#pragma unroll
  for (u32 j = 0; j < B; j++) {
    storeStrong(at + slot(f, first + j) * f.comm.span, Words<4>{});
    x[j] = first + j == f.comm.rank ? own : unseal(x[j]);
  }
}
