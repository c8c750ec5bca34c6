// Collectives that move elements and change none: every rank copies a list of pieces, any bytes each, between barriers. It loads what it is to have from
// where the others have it, or stores what it has to where they are to have it: the first barrier says that inputs are there and outputs free, the
// last that everything was loaded, and stored. A second list is of what ranks have got by the first: behind a barrier in between, or, where both store,
// chunk by chunk: whoever stores one of the first tells the rank that passes it on.
//
// Pieces are cut into chunks, of which a block of the grid takes every so many-th. Whoever has the same bytes in a piece gives it the
// same turn, on every rank, so that the block that copies a chunk of the second list is the one that the block which stored it has met.
#include "copy.cuh"

struct Piece {
  u64 from;  // address of the first byte, on any rank
  u64 to;    // address where it goes, on any rank: one of the two is on this one
  u64 bytes;
  u32 turn;  // the block that takes the first chunk, modulo the grid
  u32 peer;  // chunk by chunk: of the first list the rank that gets the piece, of the second the one that it comes from
};

enum : u32 { kInlinePieces = 8 };

// Pieces is the parameter beside Comm.
struct Pieces {
  u64 table;      // more than kInlinePieces: address of all Pieces in memory of this device, in place of inlined
  u32 counts[2];  // of each list; the second is behind the first
  u32 phases;     // 1, or 2 if some rank has a second list
  u32 chunks;     // not 0: the second list goes chunk by chunk, and so many has the longest piece of the first, on any rank
  Piece inlined[kInlinePieces];
};
SYMMEM_AT(Pieces, table, 0);
SYMMEM_AT(Pieces, counts, 8);
SYMMEM_AT(Pieces, phases, 16);
SYMMEM_AT(Pieces, chunks, 20);
SYMMEM_AT(Pieces, inlined, 24);
static_assert(sizeof(Pieces) == 280, "Pieces");

SYMMEM_DEVICE Piece pieceAt(const Pieces &p, u32 i) {
  if (p.counts[0] + p.counts[1] <= kInlinePieces) return p.inlined[i];
  return ((const Piece *)p.table)[i];
}

// Walk goes through a list, a chunk of each piece in turn, so that all links are busy from begin to end, and what a rank copies to itself takes no time of
// its own. Blocks begin at another piece each.
struct Walk {
  const Pieces &p;
  u32 first, count, begin;

  SYMMEM_DEVICE Walk(const Pieces &pieces, u32 list)
      : p(pieces), first(list == 0 ? 0 : p.counts[0]), count(p.counts[list]), begin(count == 0 ? 0 : blockIdx.x % count) {}

  // rounds calls f for each chunk that this block does, with its piece, where it is in that, its bytes, and how many rounds have been before.
  template <class F> SYMMEM_DEVICE void rounds(const F &f) const {
    bool more = count != 0;
    u32 n = 0;
    for (u64 round = 0; more; round += gridDim.x, n++) {
      more = false;
      for (u32 i = 0; i < count; i++) {
        const Piece c = pieceAt(p, first + (begin + i < count ? begin + i : begin + i - count));
        const u32 skipped = c.turn % gridDim.x;
        const u32 k = blockIdx.x >= skipped ? blockIdx.x - skipped : blockIdx.x + gridDim.x - skipped;
        const u64 at = (round + k) * kChunkBytes;
        if (at >= c.bytes) continue;
        const u64 left = c.bytes - at;
        if (!f(c, at, left < kChunkBytes ? left : kChunkBytes, n)) return;
        more = true;
      }
    }
  }
};

SYMMEM_DEVICE void pull(const Pieces &p, u32 list) {
  Walk(p, list).rounds([](const Piece &c, u64 at, u64 bytes, u32) {
    copyChunk(c.to + at, c.from + at, bytes);
    return true;
  });
}

// Which barrier is which flag of a block's record.
enum : u32 { kPullReady = 0, kPullPassed = 1, kPullDone = 2 };
enum : u32 { kPullRounds = 4 }; // where in the record a block counts the rounds of all launches, alike on all ranks

// pass does both lists, the second chunk by chunk. A block counts the rounds of the first list to each peer by kPullPassed, from base on, and the block of its number
// there awaits as many before it stores the same chunk. It says whether all came, to
// all threads of the block alike. Block.
SYMMEM_DEVICE bool pass(const Pieces &p, Ranks<> &ranks, u32 base) {
  Walk(p, 0).rounds([&](const Piece &c, u64 at, u64 bytes, u32 n) {
    copyChunk(c.to + at, c.from + at, bytes);
    __syncthreads();
    // The next chunk is under way while one thread's release waits for this one: each time of another warp.
    if (threadIdx.x == n % (blockDim.x / 32) * 32) ranks.signal(c.peer, kPullPassed, base + n + 1);
    return true;
  });
  bool came = true;
  u32 have = 0;
  Walk(p, 1).rounds([&](const Piece &c, u64 at, u64 bytes, u32 n) {
    if (have <= n) came = ranks.wait(kPullPassed, c.peer, base + n + 1), have = n + 1;
    if (came) copyChunk(c.to + at, c.from + at, bytes);
    return came;
  });
  return came;
}

extern "C" __global__ void __launch_bounds__(256, 2) symmem_pull(const __grid_constant__ Comm c, const __grid_constant__ Pieces p) {
  Ranks<> ranks(c, kKindPull);
  u32 epoch;
  if (!ranks.begin(epoch, p.table, p.inlined[1].from, p.inlined[3].from)) return;
  if (!ranks.barrier<false>(kPullReady, epoch)) return; // inputs are there, and outputs free
  if (p.chunks != 0) {
    const u32 base = loadRelaxed(ranks.record + kPullRounds);
    if (!pass(p, ranks, base)) return;
    // In front of the barrier, whose fence is between it and the epoch: the host may run the plan in another stream when it has seen that.
    if (threadIdx.x == 0) storeRelaxed(ranks.record + kPullRounds, base + (p.chunks + gridDim.x - 1) / gridDim.x + 1);
  } else {
    pull(p, 0);
    if (p.phases > 1) {
      if (!ranks.barrier<true>(kPullPassed, epoch)) return;
      pull(p, 1);
    }
  }
  // Whoever has come here has loaded and stored everything: what is behind this launch may read what others stored, and write to what they loaded.
  if (!ranks.barrier<true>(kPullDone, epoch)) return;
  startNext();
  ranks.close(epoch);
}
