// All-to-all whose blocks are of any length, which the device knows only when the kernel runs.
//
// Each block of the grid tells the blocks of its number on all ranks how much its rank has for whom: so every rank knows all of it, what fits and
// what does not, and all come to the same verdict before anything is moved. Then each rank stores what it has for the others to where it goes.
#include "copy.cuh"

struct AllToAllV {
  u64 in, counts, received; // addresses on this rank
  u64 outputs;   // world > kInline: address of u64[world], every rank's output, in the place of out
  u64 rows, room; // of input and output, below 2^31
  u64 rowBytes;
  u64 lines;     // where in the kernel's data the blocks have theirs, blockBytes each
  u64 blockBytes; // of [world][world] lines by writer, and [world] of 16 bytes besides
  u32 displaced; // 1: behind the world counts are as many displacements; else the blocks of the input follow each other
  u32 reserved;
  u64 out[kInline]; // every rank's output
};
SYMMEM_AT(AllToAllV, in, 0);
SYMMEM_AT(AllToAllV, counts, 8);
SYMMEM_AT(AllToAllV, received, 16);
SYMMEM_AT(AllToAllV, outputs, 24);
SYMMEM_AT(AllToAllV, rows, 32);
SYMMEM_AT(AllToAllV, room, 40);
SYMMEM_AT(AllToAllV, rowBytes, 48);
SYMMEM_AT(AllToAllV, lines, 56);
SYMMEM_AT(AllToAllV, blockBytes, 64);
SYMMEM_AT(AllToAllV, displaced, 72);
SYMMEM_AT(AllToAllV, reserved, 76);
SYMMEM_AT(AllToAllV, out, 80);
static_assert(sizeof(AllToAllV) == 144, "AllToAllV");

// Why a kernel gave up, besides what symmem.cuh says. The low half of the fault word is then a number.
enum : u32 {
  kFaultCount = 16, // the peer's count is no count; the number is whom it is for, and above that kCountNegative or kCountBeyond
  kFaultRoom = 17,  // the peer's output is too short; the number is how many rows it is to get, or 2^32-1 for more
};
enum : u32 { kCountNegative = 1, kCountBeyond = 2 };

// A line is a count and a displacement in rows, each beside the flag. A count that is none is kNoCount, and has the reason beside it.
enum : u32 { kNoCount = 0xffffffff };

enum : u32 { kDone = 0 }; // the flag of the barrier at the end

// loadLine is a line, with acquire: who has it may store to the writer's output, which nobody reads any more.
SYMMEM_DEVICE Halves loadLine(u64 at) {
  Halves x;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(x.h[0]) : "l"(at) : "memory");
  x.h[1] = loadElement<8>(at + 8);
  return x;
}

// rowsFor is how much this rank has for rank q, and where in its input.
SYMMEM_DEVICE Halves rowsFor(const AllToAllV &p, u32 world, u32 q, u32 flag) {
  const s64 n = (s64)loadElement<8>(p.counts + q * 8ull);
  s64 at = 0;
  if (p.displaced)
    at = (s64)loadElement<8>(p.counts + ((u64)world + q) * 8);
  else
    for (u32 r = 0; r < q; r++) at += (s64)loadElement<8>(p.counts + r * 8ull); // if any is no count, that one is told
  u32 a = (u32)n, b = (u32)at;
  if (n < 0 || n != 0 && at < 0) {
    a = kNoCount;
    b = kCountNegative;
  } else if (n > (s64)p.rows || n != 0 && at > (s64)p.rows - n) {
    a = kNoCount;
    b = kCountBeyond;
  }
  const u64 high = (u64)flag << 32;
  return {{high | a, high | b}};
}

SYMMEM_DEVICE void refuse(const Comm &c, u32 why, u32 peer, u32 number) {
  giveUp(c.dead, c.fault, (u64)why << 56 | (u64)kKindAllToAllV << 48 | (u64)(peer & 0xffff) << 32 | number);
}

extern "C" __global__ void __launch_bounds__(512) symmem_all_to_all_v(const __grid_constant__ Comm c, const __grid_constant__ AllToAllV p) {
  Ranks<> ranks(c, kKindAllToAllV);
  u32 epoch;
  if (!ranks.begin(epoch)) return;
  const u32 world = c.world, tid = threadIdx.x, threads = blockDim.x, flag = epoch << 1 | 1;
  const u64 lines = p.lines + blockIdx.x * p.blockBytes, mine = ranks.data(c.rank) + lines, places = mine + (u64)world * world * 16;
  // The lines of the launch before have been read: nobody came past the barrier at its end sooner.
  for (u32 q = tid; q < world; q += threads) {
    const Halves line = rowsFor(p, world, q, flag);
    for (u32 k = 0; k < world; k++) storeHalves(ranks.data(ranks.peer(k)) + lines + ((u64)c.rank * world + q) * 16, line);
  }
  bool wrong = false;
  for (u32 i = tid; i < world * world; i += threads) {
    Halves line;
    do line = loadLine(mine + i * 16ull);
    while (((u32)(line.h[0] >> 32) != flag || (u32)(line.h[1] >> 32) != flag) && ranks.again(i / world));
    wrong = wrong || (u32)line.h[0] == kNoCount;
  }
  if (!__syncthreads_and(ranks.ok)) return;
  auto at = [&](u32 from, u32 to) { return loadHalves(mine + ((u64)from * world + to) * 16); };
  for (u32 q = tid; q < world; q += threads) { // where this rank's rows go in q's output
    u64 before = 0, all = 0;
    for (u32 r = 0; r < world; r++) {
      if (r == c.rank) before = all;
      all += (u32)at(r, q).h[0];
    }
    const Halves own = at(c.rank, q);
    storeWeak(places + q * 16ull, Words<4>{{(u32)own.h[0], (u32)own.h[1], (u32)before, 0}});
    wrong = wrong || all > p.room;
  }
  if (__syncthreads_or(wrong)) {
    // Every rank finds the same first.
    if (tid != 0) return;
    for (u32 r = 0; r < world; r++)
      for (u32 q = 0; q < world; q++)
        if ((u32)at(r, q).h[0] == kNoCount) return refuse(c, kFaultCount, r, (u32)at(r, q).h[1] << 16 | (q & 0xffff));
    for (u32 q = 0; q < world; q++) {
      u64 all = 0;
      for (u32 r = 0; r < world; r++) all += (u32)at(r, q).h[0];
      if (all > p.room) return refuse(c, kFaultRoom, q, all < 0xffffffff ? (u32)all : 0xffffffff);
    }
    return;
  }
  if (blockIdx.x == 0)
    for (u32 r = tid; r < world; r += threads) {
      u64 before = 0;
      for (u32 q = 0; q < r; q++) before += (u32)at(q, c.rank).h[0];
      storeElement<8>(p.received + r * 8ull, (u32)at(r, c.rank).h[0]);
      storeElement<8>(p.received + ((u64)world + r) * 8, before);
    }
  for (u32 k = 0; k < world; k++) { // from another rank on in each block, so that all links are busy
    const u32 q = ranks.peer((k + blockIdx.x) % world);
    const Words<4> place = loadWeak(places + q * 16ull, Words<4>());
    const u64 bytes = place.w[0] * p.rowBytes, from = p.in + place.w[1] * p.rowBytes;
    const u64 to = (world <= kInline ? p.out[q] : loadElement<8>(p.outputs + q * 8ull)) + place.w[2] * p.rowBytes;
    // Few chunks are spread over other blocks for each rank.
    for (u64 j = (blockIdx.x + gridDim.x - q % gridDim.x) % gridDim.x; j * kChunkBytes < bytes; j += gridDim.x) {
      const u64 done = j * kChunkBytes, left = bytes - done;
      copyChunk(to + done, from + done, left < kChunkBytes ? left : kChunkBytes);
    }
  }
  if (!ranks.barrier<true>(kDone, epoch)) return;
  ranks.close(epoch);
}
