// The list of a kernel that takes many tensors.
#pragma once
#include "symmem.cuh"

// Stretch is vectors of one tensor: of 16 bytes, or of 8 for the lines of oneshot_ll; counted as Span does.
struct Stretch {
  u64 in, out; // this rank's, of the tensor's first element; alike on all ranks modulo 16
  u64 count;   // elements of the tensor
  u64 first;   // the stretch's first vector
  u64 vectors; // of the stretch
  u64 line;    // oneshot: where its first line is in a slot, in lines
  u64 row;     // pull: the row of the tensor's inputs in Many::table
  u64 outRow;  // pull: the row of its outputs
};
static_assert(sizeof(Stretch) == 64, "Stretch");

// Many is the parameter beside Params.
struct Many {
  u64 stretches; // address of all Stretches in memory of this device: oneshot, the same on every rank; pull, those of this rank
  u64 table;     // pull: u64[rows][world] of addresses, in memory of this device
  u32 count;     // of stretches
  u32 reserved;
};
SYMMEM_AT(Many, stretches, 0);
SYMMEM_AT(Many, table, 8);
SYMMEM_AT(Many, count, 16);
SYMMEM_AT(Many, reserved, 20);
static_assert(sizeof(Many) == 24, "Many");

// stretchAt is stretch i, or an empty one beyond the last.
SYMMEM_DEVICE Stretch stretchAt(const Many &m, u32 i) {
  if (i >= m.count) return {};
  return ((const Stretch *)m.stretches)[i];
}
