// Collectives that move elements and change none, for small messages: every rank pushes lines to those that are to have them, without a barrier.
//
// All ranks cut a piece alike: into lines of 8 bytes, counted from the aligned address at or before its first byte on the sender. A line is
// stored and loaded by blocks of the same number. Pieces of whole vectors, of one length, have kernels of their own: see whole.cuh.
#include "lines.cuh"

struct LinePiece {
  u64 at;     // address of the first byte, on this rank: where it is sent from, or where it goes
  u64 bytes;  // more than 0
  u64 slot;   // where in the receiver's buffer the lines are, in bytes
  u32 peer;   // the rank that it goes to, or comes from
  u32 lead;   // bytes that the first line has in front of it, below 8
  u32 turn;   // of the blocks, alike for both
  u32 oneWay; // nothing goes the other way
};

enum : u32 { kInlineLines = 14 };

// Lines is the parameter beside Comm.
struct Lines {
  u64 table;    // more than kInlineLines: address of all pieces in memory of this device, in place of inlined
  u64 span;     // bytes of each of the two buffers
  u64 longest;  // lines of the longest piece
  u64 from, to, bytes; // what this rank copies from its input to its output
  u32 sends, receives; // pieces; those that are received are behind those that are sent
  u32 awaits, tells;   // some that are sent, or received, are one way
  LinePiece inlined[kInlineLines];
};
SYMMEM_AT(Lines, table, 0);
SYMMEM_AT(Lines, span, 8);
SYMMEM_AT(Lines, longest, 16);
SYMMEM_AT(Lines, from, 24);
SYMMEM_AT(Lines, to, 32);
SYMMEM_AT(Lines, bytes, 40);
SYMMEM_AT(Lines, sends, 48);
SYMMEM_AT(Lines, receives, 52);
SYMMEM_AT(Lines, awaits, 56);
SYMMEM_AT(Lines, tells, 60);
SYMMEM_AT(Lines, inlined, 64);
static_assert(sizeof(Lines) == 624, "Lines");

SYMMEM_DEVICE LinePiece pieceOf(const Lines &p, u32 i) {
  if (p.sends + p.receives <= kInlineLines) return p.inlined[i];
  return ((const LinePiece *)p.table)[i];
}

// begin is the first line of a piece that this thread does.
SYMMEM_DEVICE u64 begin(const Lines &p, const LinePiece &c) {
  const u64 skipped = c.turn * ((p.longest + blockDim.x - 1) / blockDim.x) % gridDim.x;
  return (blockIdx.x + gridDim.x - skipped) % gridDim.x * blockDim.x + threadIdx.x;
}

constexpr u32 kUnroll = 4;

template <class T> SYMMEM_DEVICE void send(const Lines &p, const LinePiece &c, u64 to, u32 flag) {
  const Span<T, 2> s(c.at, c.at, c.bytes / T::width);
  const u64 step = gridDim.x * (u64)blockDim.x;
  for (u64 v = begin(p, c); v < s.vectors; v += kUnroll * step) {
    Words<2> x[kUnroll];
#pragma unroll
    for (u32 u = 0; u < kUnroll; u++)
      if (v + u * step < s.vectors) x[u] = s.template load<false>(c.at, v + u * step);
#pragma unroll
    for (u32 u = 0; u < kUnroll; u++)
      if (v + u * step < s.vectors) storeHalves(to + (v + u * step) * 16, lineOf(flag, x[u].w[0], x[u].w[1]));
  }
}

template <class T> SYMMEM_DEVICE void receive(const Lines &p, const LinePiece &c, Ranks<> &ranks, u64 from, u32 flag) {
  const Span<T, 2> s(c.lead, c.at, c.bytes / T::width);
  const u64 step = gridDim.x * (u64)blockDim.x;
  for (u64 v = begin(p, c); v < s.vectors; v += kUnroll * step) {
    Halves x[kUnroll];
    bool all;
    do {
      all = true;
#pragma unroll
      for (u32 u = 0; u < kUnroll; u++) x[u] = loadHalves(from + (v + u * step < s.vectors ? v + u * step : v) * 16);
#pragma unroll
      for (u32 u = 0; u < kUnroll; u++) all = all && lineHas(x[u], flag);
    } while (!all && ranks.again(c.peer));
    if (!ranks.ok) return;
#pragma unroll
    for (u32 u = 0; u < kUnroll; u++)
      if (v + u * step < s.vectors) s.store(c.at, v + u * step, Words<2>{{(u32)x[u].h[0], (u32)x[u].h[1]}});
  }
}

// copyOwn copies what stays on this rank.
template <class T> SYMMEM_DEVICE void copyOwn(const Lines &p) {
  const Span<T, 2> s(p.from, p.to, p.bytes / T::width);
  for (u64 v = blockIdx.x * (u64)blockDim.x + threadIdx.x; v < s.vectors; v += gridDim.x * (u64)blockDim.x)
    s.store(p.to, v, s.template load<false>(p.from, v));
}

extern "C" __global__ void __launch_bounds__(512) symmem_lines(const __grid_constant__ Comm c, const __grid_constant__ Lines p) {
  Ranks<> ranks(c, kKindLines);
  u32 epoch;
  if (!ranks.begin(epoch, p.table, p.sends)) return;
  const u32 flag = lineFlag(epoch);
  const u64 buffer = (epoch & 1) * p.span;
  if (p.awaits) {
    for (u32 i = threadIdx.x; i < p.sends; i += blockDim.x)
      if (pieceOf(p, i).oneWay) ranks.await(kFlagTaken, pieceOf(p, i).peer, epoch - 2);
    if (!__syncthreads_and(ranks.ok)) return;
  }
#pragma unroll 1
  for (u32 i = 0; i < p.sends; i++) {
    const LinePiece piece = pieceOf(p, i);
    const u64 to = ranks.data(piece.peer) + buffer + piece.slot;
    if ((piece.at | piece.bytes) % 4 == 0)
      send<U32>(p, piece, to, flag);
    else
      send<U8>(p, piece, to, flag);
  }
  if ((p.from | p.to | p.bytes) % 4 == 0)
    copyOwn<U32>(p);
  else
    copyOwn<U8>(p);
#pragma unroll 1
  for (u32 i = p.sends; i < p.sends + p.receives; i++) {
    const LinePiece piece = pieceOf(p, i);
    const u64 from = ranks.data(c.rank) + buffer + piece.slot;
    if ((piece.at | piece.bytes | piece.lead) % 4 == 0)
      receive<U32>(p, piece, ranks, from, flag);
    else
      receive<U8>(p, piece, ranks, from, flag);
  }
  if (p.tells && __syncthreads_and(ranks.ok))
    for (u32 i = p.sends + threadIdx.x; i < p.sends + p.receives; i += blockDim.x)
      if (pieceOf(p, i).oneWay) ranks.signal(pieceOf(p, i).peer, kFlagTaken, epoch);
  ranks.close(epoch);
  startNext(); // behind a barrier, since threads without lines of their own do not know whether other ranks' blocks are at work
}

// symmem_meet is a barrier of all ranks on their streams, of one block: what every rank's stream has done before is visible behind it. The launch
// itself writes nothing, so its barrier need not release.
extern "C" __global__ void __launch_bounds__(512) symmem_meet(const __grid_constant__ Comm c) {
  Ranks<> ranks(c, kKindMeet);
  u32 epoch;
  if (!ranks.begin(epoch) || !ranks.barrier<false>(0, epoch)) return;
  startNext();
  ranks.close(epoch);
}
