// Collectives that move elements and change none: every rank loads what it is to have from where the others have it, between barriers. What
// that is, is a list of pieces, any bytes each. A second list is of what peers have got by the first: behind a barrier in between.
//
// Pieces are cut into chunks, of which a block of the grid takes every so many-th. Whoever has the same bytes in a piece gives it the
// same turn, on every rank, so that the block that loads a chunk of the second list is the one that the block which stored it has met.
#include "copy.cuh"

struct Piece {
  u64 from;  // address of the first byte, on any rank
  u64 to;    // address where it goes, on this rank
  u64 bytes;
  u64 turn;  // the block that takes the first chunk, modulo the grid
};

enum : u32 { kInlinePieces = 8 };

// Pieces is the parameter beside Comm.
struct Pieces {
  u64 table;      // more than kInlinePieces: address of all Pieces in memory of this device, in place of inlined
  u32 counts[2];  // of each list; the second is behind the first
  u32 phases;     // 1, or 2 if some rank has a second list
  u32 reserved;
  Piece inlined[kInlinePieces];
};
SYMMEM_AT(Pieces, table, 0);
SYMMEM_AT(Pieces, counts, 8);
SYMMEM_AT(Pieces, phases, 16);
SYMMEM_AT(Pieces, reserved, 20);
SYMMEM_AT(Pieces, inlined, 24);
static_assert(sizeof(Pieces) == 280, "Pieces");

SYMMEM_DEVICE Piece pieceAt(const Pieces &p, u32 i) {
  if (p.counts[0] + p.counts[1] <= kInlinePieces) return p.inlined[i];
  return ((const Piece *)p.table)[i];
}

// pull does one list. Blocks begin at another piece each: so all links are busy.
SYMMEM_DEVICE void pull(const Pieces &p, u32 first, u32 count) {
  for (u32 i = 0; i < count; i++) {
    const Piece c = pieceAt(p, first + (i + blockIdx.x) % count);
    const u64 skipped = c.turn % gridDim.x;
    for (u64 k = (blockIdx.x + gridDim.x - skipped) % gridDim.x; k * kChunkBytes < c.bytes; k += gridDim.x) {
      const u64 at = k * kChunkBytes, left = c.bytes - at;
      copyChunk(c.to + at, c.from + at, left < kChunkBytes ? left : kChunkBytes);
    }
  }
}

// Which barrier is which flag of a block's record.
enum : u32 { kPullReady = 0, kPullPassed = 1, kPullDone = 2 };

extern "C" __global__ void __launch_bounds__(512) symmem_pull(const __grid_constant__ Comm c, const __grid_constant__ Pieces p) {
  Ranks<> ranks(c, kKindPull);
  u32 epoch;
  if (!ranks.begin(epoch)) return;
  if (!ranks.barrier<false>(kPullReady, epoch)) return; // inputs are there
  pull(p, 0, p.counts[0]);
  if (p.phases > 1) {
    if (!ranks.barrier<true>(kPullPassed, epoch)) return;
    pull(p, p.counts[0], p.counts[1]);
  }
  // Whoever has come here has loaded everything: what is behind this launch may write to what it loaded.
  if (!ranks.barrier<true>(kPullDone, epoch)) return;
  ranks.close(epoch);
}
