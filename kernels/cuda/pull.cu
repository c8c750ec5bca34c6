// Collectives that move elements and change none: every rank copies a list of pieces, any bytes each, between barriers. It loads what it is to have from
// where the others have it, or stores what it has to where they are to have it: the first barrier says that inputs are there and outputs free, the
// last that everything was loaded, and stored. A second list is of what ranks have got by the first: behind a barrier in between, or, where both store,
// chunk by chunk: whoever stores one of the first tells the rank that passes it on.
//
// Pieces are cut into chunks, of which a block of the grid takes every so many-th. Whoever has the same bytes in a piece gives it the
// same turn, on every rank, so that the block that copies a chunk of the second list is the one that the block which stored it has met.
// Where the second list goes chunk by chunk, or pieces are stored together, turns do not count: a block takes the same chunks of all pieces.
#include "copy.cuh"

struct Piece {
  u64 from;  // address of the first byte, on any rank
  u64 to;    // address where it goes, on any rank: one of the two is on this one
  u64 bytes;
  u32 turn;  // the block that takes the first chunk, modulo the grid
  u32 peer;  // chunk by chunk: of the first list the rank that gets the piece, of the second the one that it comes from
};

enum : u32 { kInlinePieces = 8 };

// What is so of the pieces of a list.
enum : u32 {
  kStoredTogether = 1, // they are inlined, and fewer than 2^31 whole vectors each on both sides, which this rank stores
  kAlike = 4,          // and all are the same bytes
};

// Pieces is the parameter beside Comm.
struct Pieces {
  u64 table;      // more than kInlinePieces: address of all Pieces in memory of this device, in place of inlined
  u32 counts[2];  // of each list; the second is behind the first
  u32 phases;     // 1, or 2 if some rank has a second list
  u32 chunks;     // not 0: the second list goes chunk by chunk, and so many has the longest piece of the first, on any rank
  u32 chunk;      // and so many bytes has a chunk
  u32 flags;      // kStoredTogether and kAlike, of the second list shifted by 1
  Piece inlined[kInlinePieces];
};
SYMMEM_AT(Pieces, table, 0);
SYMMEM_AT(Pieces, counts, 8);
SYMMEM_AT(Pieces, phases, 16);
SYMMEM_AT(Pieces, chunks, 20);
SYMMEM_AT(Pieces, chunk, 24);
SYMMEM_AT(Pieces, flags, 28);
SYMMEM_AT(Pieces, inlined, 32);
static_assert(sizeof(Pieces) == 288, "Pieces");

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

  // rounds calls f for each chunk that this block does, with its piece, where it is in that, and its bytes.
  template <class F> SYMMEM_DEVICE void rounds(const F &f) const {
    bool more = count != 0;
    for (u64 round = 0; more; round += gridDim.x) {
      more = false;
      for (u32 i = 0; i < count; i++) {
        const Piece c = pieceAt(p, first + (begin + i < count ? begin + i : begin + i - count));
        const u32 skipped = c.turn % gridDim.x;
        const u32 k = blockIdx.x >= skipped ? blockIdx.x - skipped : blockIdx.x + gridDim.x - skipped;
        const u64 at = (round + k) * kChunkBytes;
        if (at >= c.bytes) continue;
        const u64 left = c.bytes - at;
        f(c, at, left < kChunkBytes ? left : kChunkBytes);
        more = true;
      }
    }
  }
};

enum : u32 { kTogether = 4, kHeld = 8 }; // pieces that are stored at a time, and vectors that a thread has of them

// Together is up to kTogether pieces of a list, from piece number i on, up to vector number `until` of each, of which a thread has some vectors at a time: one of each, and one or three more
// that are a block's threads behind each other. So the links to all of them are busy at all times. Bytes that are alike are loaded once.
template <bool alike> struct Together {
  static constexpr u32 kRows = alike ? 4 : 2, kLoaded = alike ? 1 : kTogether;
  u64 from[kLoaded], to[kTogether];
  u32 end[kTogether], most = 0;

  SYMMEM_DEVICE Together(const Pieces &p, u32 i, u32 n, u32 until) {
#pragma unroll
    for (u32 b = 0; b < kTogether; b++) {
      const Piece &c = p.inlined[b < n ? i + b : i];
      if (b < kLoaded) from[b] = c.from;
      to[b] = c.to;
      end[b] = b >= n ? 0 : c.bytes / 16 < until ? (u32)(c.bytes / 16) : until;
      most = end[b] > most ? end[b] : most;
    }
  }
  SYMMEM_DEVICE void load(Words<4> (&x)[kHeld], u32 v) const {
#pragma unroll
    for (u32 u = 0; u < kRows; u++)
#pragma unroll
      for (u32 b = 0; b < kLoaded; b++) {
        const u32 at = v + u * blockDim.x;
        if (at < (alike ? most : end[b])) x[u * kLoaded + b] = loadStrong(from[b] + at * 16ull, Words<4>());
      }
  }
  SYMMEM_DEVICE void store(const Words<4> (&x)[kHeld], u32 v) const {
#pragma unroll
    for (u32 u = 0; u < kRows; u++)
#pragma unroll
      for (u32 b = 0; b < kTogether; b++) {
        const u32 at = v + u * blockDim.x;
        if (at < end[b]) storeWeak(to[b] + at * 16ull, x[u * kLoaded + (alike ? 0 : b)]);
      }
  }
  // storeFrom stores from vector number v on, of which x has the first if it is loaded, and then from every so many.
  SYMMEM_DEVICE void storeFrom(Words<4> (&x)[kHeld], bool loaded, u32 v, u32 stride) const {
    if (!loaded) load(x, v);
#pragma unroll 1
    while (v < most) {
      store(x, v);
      v += stride;
      load(x, v);
    }
  }
};

// togetherRows is how often the vectors of a block's threads a thread has at a time, of a list that is stored together.
SYMMEM_DEVICE u32 togetherRows(const Pieces &p, u32 list) { return p.flags & kAlike << list ? Together<true>::kRows : Together<false>::kRows; }

// storeAll stores all pieces of a list up to vector number `until`, kTogether of them after the others: this thread's vectors from v on, of which x has those of the first pieces if they are loaded, and then from every so many.
SYMMEM_DEVICE void storeAll(const Pieces &p, u32 list, Words<4> (&x)[kHeld], bool loaded, u32 v, u32 until, u32 stride) {
  const u32 first = list == 0 ? 0 : p.counts[0], count = p.counts[list];
#pragma unroll 1
  for (u32 i = 0; i < count; i += kTogether) {
    const u32 n = count - i < kTogether ? count - i : kTogether;
    if (p.flags & kAlike << list)
      Together<true>(p, first + i, n, until).storeFrom(x, loaded && i == 0, v, stride);
    else
      Together<false>(p, first + i, n, until).storeFrom(x, loaded && i == 0, v, stride);
  }
}

// Which barrier is which flag of a block's record.
enum : u32 { kPullReady = 0, kPullPassed = 1, kPullDone = 2 };
enum : u32 { kPullRounds = 4 }; // where in the record a block counts the rounds of all launches, alike on all ranks

// passSome stores a chunk of each piece of a list. Block.
SYMMEM_DEVICE void passSome(const Pieces &p, u32 list, u64 at) {
  if (p.flags & kStoredTogether << list) {
    Words<4> x[kHeld];
    storeAll(p, list, x, false, at / 16 + threadIdx.x, (at + p.chunk) / 16, blockDim.x * togetherRows(p, list));
    return;
  }
  const u32 first = list == 0 ? 0 : p.counts[0];
#pragma unroll 1
  for (u32 i = 0; i < p.counts[list]; i++) {
    const Piece c = pieceAt(p, first + i);
    if (at < c.bytes) copyChunk(c.to + at, c.from + at, c.bytes - at < p.chunk ? c.bytes - at : p.chunk);
  }
}

// pass does both lists, the second chunk by chunk. In a round a block does the same chunk of all pieces of a list. It counts the rounds of the first list to each peer by kPullPassed, from base on,
// and the block of its number there awaits as many before it stores the same chunk. It says whether all came, to all threads of the block alike. Block.
SYMMEM_DEVICE bool pass(const Pieces &p, Ranks<> &ranks, u32 base) {
#pragma unroll 1
  for (u32 list = 0; list < 2; list++) {
    const u32 first = list == 0 ? 0 : p.counts[0], count = p.counts[list];
    if (count == 0) continue;
    const Piece own = pieceAt(p, first);                                  // of the second list: all are the same bytes
    const u64 bytes = list == 0 ? (u64)p.chunks * p.chunk : own.bytes;
    u32 n = base;
#pragma unroll 1
    for (u64 at = (u64)blockIdx.x * p.chunk; at < bytes; at += (u64)gridDim.x * p.chunk) {
      n++;
      if (list == 1 && !ranks.wait(kPullPassed, own.peer, n)) return false;
      passSome(p, list, at);
      if (list == 1) continue;
      __syncthreads();
      // The next chunk is under way while one warp's releases wait for this one: each time another warp.
      const u32 warp = n % ((blockDim.x + 31) / 32), lanes = blockDim.x - warp * 32 < 32 ? blockDim.x - warp * 32 : 32;
      if (threadIdx.x / 32 == warp)
        for (u32 i = threadIdx.x % 32; i < count; i += lanes) ranks.signal(pieceAt(p, i).peer, kPullPassed, n);
    }
  }
  return true;
}

extern "C" __global__ void __launch_bounds__(256, 2) symmem_pull(const __grid_constant__ Comm c, const __grid_constant__ Pieces p) {
  Ranks<> ranks(c, kKindPull);
  u32 epoch;
  if (!ranks.begin(epoch, p.table, p.inlined[1].from, p.inlined[3].from)) return;
  const bool together = p.chunks == 0 && p.phases == 1 && p.flags & kStoredTogether;
  const u32 each = blockDim.x * togetherRows(p, 0), begin = blockIdx.x * each + threadIdx.x;
  Words<4> x[kHeld];
  if (together && p.counts[0] != 0) { // what this rank has itself is there, and is loaded while it waits
    const u32 n = p.counts[0] < kTogether ? p.counts[0] : kTogether;
    if (p.flags & kAlike)
      Together<true>(p, 0, n, ~0u).load(x, begin);
    else
      Together<false>(p, 0, n, ~0u).load(x, begin);
  }
  if (!ranks.barrier<false>(kPullReady, epoch)) return; // inputs are there, and outputs free
  if (together) {
    storeAll(p, 0, x, true, begin, ~0u, gridDim.x * each);
  } else if (p.chunks != 0) {
    const u32 base = loadRelaxed(ranks.record + kPullRounds);
    if (!pass(p, ranks, base)) return;
    // In front of the barrier, whose fence is between it and the epoch: the host may run the plan in another stream when it has seen that.
    if (threadIdx.x == 0) storeRelaxed(ranks.record + kPullRounds, base + (p.chunks + gridDim.x - 1) / gridDim.x + 1);
  } else {
#pragma unroll 1
    for (u32 list = 0; list < p.phases; list++) {
      if (list > 0 && !ranks.barrier<true>(kPullPassed, epoch)) return;
      Walk(p, list).rounds([](const Piece &c, u64 at, u64 bytes) { copyChunk(c.to + at, c.from + at, bytes); });
    }
  }
  // Whoever has come here has loaded and stored everything: what is behind this launch may read what others stored, and write to what they loaded.
  if (!ranks.barrier<true>(kPullDone, epoch)) return;
  startNext();
  ranks.close(epoch);
}
