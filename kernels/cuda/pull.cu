// Collectives that move elements and change none: every rank copies a list of pieces, any bytes each, between barriers. It loads what it is to have from
// where the others have it, or stores what it has to where they are to have it: the first barrier says that inputs are there and outputs free, the
// last that everything was loaded, and stored. A second list is of what ranks have got by the first: behind a barrier in between.
//
// Pieces are cut into chunks, of which a block of the grid takes every so many-th. Whoever has the same bytes in a piece gives it the
// same turn, on every rank, so that the block that copies a chunk of the second list is the one that the block which stored it has met.
#include "copy.cuh"

struct Piece {
  u64 from;  // address of the first byte, on any rank
  u64 to;    // address where it goes, on any rank: one of the two is on this one
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

// pull does one list, a chunk of each piece in turn, so that all links are busy from begin to end, and what a rank copies to itself takes no time of
// its own. Blocks begin at another piece each.
SYMMEM_DEVICE void pull(const Pieces &p, u32 first, u32 count) {
  if (count == 0) return;
  const u32 begin = blockIdx.x % count;
  bool more = true;
  for (u64 round = 0; more; round += gridDim.x) {
    more = false;
    for (u32 i = 0; i < count; i++) {
      const Piece c = pieceAt(p, first + (begin + i < count ? begin + i : begin + i - count));
      const u32 skipped = (u32)(c.turn % gridDim.x);
      const u32 k = blockIdx.x >= skipped ? blockIdx.x - skipped : blockIdx.x + gridDim.x - skipped;
      const u64 at = (round + k) * kChunkBytes;
      if (at >= c.bytes) continue;
      const u64 left = c.bytes - at;
      copyChunk(c.to + at, c.from + at, left < kChunkBytes ? left : kChunkBytes);
      more = true;
    }
  }
}

// Which barrier is which flag of a block's record.
enum : u32 { kPullReady = 0, kPullPassed = 1, kPullDone = 2 };

extern "C" __global__ void __launch_bounds__(256, 2) symmem_pull(const __grid_constant__ Comm c, const __grid_constant__ Pieces p) {
  Ranks<> ranks(c, kKindPull);
  u32 epoch;
  if (!ranks.begin(epoch)) return;
  if (!ranks.barrier<false>(kPullReady, epoch)) return; // inputs are there, and outputs free
  pull(p, 0, p.counts[0]);
  if (p.phases > 1) {
    if (!ranks.barrier<true>(kPullPassed, epoch)) return;
    pull(p, p.counts[0], p.counts[1]);
  }
  // Whoever has come here has loaded and stored everything: what is behind this launch may read what others stored, and write to what they loaded.
  if (!ranks.barrier<true>(kPullDone, epoch)) return;
  startNext();
  ranks.close(epoch);
}
