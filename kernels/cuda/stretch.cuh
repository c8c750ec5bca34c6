// The list of a kernel that takes many tensors.
#pragma once
#include "symmem.cuh"

// Stretch is vectors of one tensor: of 16 bytes, or of 8 for the lines of oneshot_ll; counted as Span does.
struct Stretch {
  u64 in, out; // this rank's, of the tensor's first element; alike on all ranks modulo 16
  u64 count;   // elements of the tensor
  u64 first;   // the stretch's first vector
  u64 vectors; // of the stretch
  u64 line;    // oneshot, scatter and lines: where its first line is in a slot, in lines
  u64 row;     // pull: the row of the tensor's inputs in Many::table
  u64 outRow;  // pull: the row of its outputs, or kOwnOnly
};
enum : u64 { kOwnOnly = ~0ull };
static_assert(sizeof(Stretch) == 64, "Stretch");

// Many is the parameter beside Params.
struct Many {
  u64 stretches; // address of all Stretches in memory of this device: oneshot, the same on every rank; pull and moves, those of this rank; scatter and lines, [world][count]
  u64 table;     // pull: u64[rows][world] of addresses, in memory of this device; scatter and lines: u64[world], see many.cu, or 0
  u32 count;     // of stretches; scatter and lines: of each rank
  u32 shift;     // lines: 1 << shift threads, whole warps, do a stretch of one peer together
};
SYMMEM_AT(Many, stretches, 0);
SYMMEM_AT(Many, table, 8);
SYMMEM_AT(Many, count, 16);
SYMMEM_AT(Many, shift, 20);
static_assert(sizeof(Many) == 24, "Many");

// stretchAt is stretch i, or an empty one beyond the last.
SYMMEM_DEVICE Stretch stretchAt(const Many &m, u32 i) {
  if (i >= m.count) return {};
  return ((const Stretch *)m.stretches)[i];
}
// stretchOf is stretchAt for the list of rank r of a list for all of them.
SYMMEM_DEVICE Stretch stretchOf(const Many &m, u32 r, u32 i) {
  if (i >= m.count) return {};
  return ((const Stretch *)m.stretches)[(u64)r * m.count + i];
}

// WholeStretch is some vectors of 16 bytes of one tensor, which is whole vectors.
struct WholeStretch {
  u64 in, out; // this rank's
  u32 vectors;
  u32 line;    // where its first line is in a slot, in lines
};
static_assert(sizeof(WholeStretch) == 24, "WholeStretch");

enum : u32 { kInlineStretches = 64 };

// WholeMany is the parameter beside PushParams.
struct WholeMany {
  u64 stretches; // address of all WholeStretches in memory of this device; the same on every rank but for in and out
  u32 count;     // of stretches
  u32 shift;     // 1 << shift threads, whole warps, do a stretch together
  WholeStretch inlined[kInlineStretches]; // the first ones; empty beyond the last
};
SYMMEM_AT(WholeMany, stretches, 0);
SYMMEM_AT(WholeMany, count, 8);
SYMMEM_AT(WholeMany, shift, 12);
SYMMEM_AT(WholeMany, inlined, 16);
static_assert(sizeof(WholeMany) == 1552, "WholeMany");

// wholeStretchAt is stretch i, or an empty one beyond the last.
SYMMEM_DEVICE WholeStretch wholeStretchAt(const WholeMany &m, u32 i) {
  if (i >= m.count) return {};
  return ((const WholeStretch *)m.stretches)[i];
}
// firstWholeStretch is wholeStretchAt for the first that a warp does. It begins with a load from the parameter that depends on nothing else, since what it gives
// is the address of the first load from memory.
SYMMEM_DEVICE WholeStretch firstWholeStretch(const WholeMany &m, u32 i) {
  const WholeStretch x = m.inlined[min(i, kInlineStretches - 1)];
  return i < kInlineStretches ? x : wholeStretchAt(m, i);
}
