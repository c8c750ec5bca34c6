// What a kernel is given and how a workspace is laid out. The launch plans mirror this file; change both or neither.
//
// Names. An all-reduce kernel is symmem_allreduce_<form>_<dtype>_<op>_w<world>. The form is one of
//
//   oneshot_ll        push 16-byte lines of 8 bytes data and two flags; no barrier. Every dtype.
//   oneshot_push      push 16-byte lines that are all data; no barrier. f32, f16, bf16.
//   oneshot_push_whole, twoshot_push_whole   the same as without whole, for messages of whole vectors. They take PushParams
//   many_push_whole   oneshot_push_whole of a list of tensors. It takes PushParams and WholeMany; see stretch.cuh
//   oneshot_pull      load every input; barriers at both ends, or one when staged.
//   twoshot_push      push shards to their owners and results to everybody; no barrier. f32, f16, bf16.
//   twoshot_pull      load the own shard from every input, store the result to every output, between two barriers.
//   twoshot_flow      push shards to their owners in laps, store results to every output; credits instead of barriers.
//   oneshot_multimem, twoshot_multimem   reduction and broadcast by the NVLink switch; f32, f16, bf16, sum only. Reduce and
//                     reduce-scatter take the first, on this rank's share.
//
// Of the other collectives, symmem_lines_<pattern>_w<world>, symmem_scatter_whole_<dtype>_sum_w<world>, symmem_scatter_root_<dtype>_sum_w<world>, which
// is a reduce, and symmem_scatter_flow_<dtype>_sum_w<world>, for long shares, are for pieces of whole vectors, of one length. They take PushParams; see whole.cuh.
//
// For f32, f16 and bf16 there are kernels for each world size 2..8 with op "sum", which do Avg too (Params::op says which).
// For every dtype there are kernels "any_wn": each op, each world size, both taken from Params.
#pragma once
#include "symmem.cuh"

using namespace symmem;
typedef unsigned char u8;
typedef unsigned short u16;
typedef signed char s8;
typedef short s16;
typedef long long s64;

// Params::op. The values are those of kernels.Op.
enum : u32 { kSum = 1, kProd = 2, kMin = 3, kMax = 4, kAvg = 5 };

// Params::flags.
enum : u32 {
  kStaged = 1,    // oneshot_pull: copy the input to the workspace and let the peers read it there; oneshot_multimem: keep the
                  // result in the workspace until all have read the inputs. Needed in place
  kNoBarrier = 2, // oneshot_pull: touch no workspace and wait for nobody; the inputs are ready and stay
  kAtomics = 4,   // signals: the links to all peers have atomics
  kToRoot = 1024, // scatter: the rank Params::peer has the one share
};

// Which kernel a fault word comes from.
enum : u32 {
  kKindOneshotLL = 1, kKindOneshotPush = 2, kKindOneshotPull = 3, kKindTwoshotPush = 4, kKindTwoshotPull = 5,
  kKindTwoshotFlow = 6, kKindOneshotMultimem = 7, kKindTwoshotMultimem = 8, kKindBarrier = 16, kKindWait = 17,
  kKindSignal = 18, kKindPull = 19, kKindLines = 24, kKindMeet = 25, kKindScatter = 26, kKindAllToAllV = 27, kKindMany = 28,
  kKindCast = 29,
};

// Params is the parameter of every kernel, by value. It stands for a Comm (see Ranks), with the inputs and outputs beside the workspaces.
struct Params {
  enum : u32 { kTableRow = 2 };
  u64 in[kInline];      // every rank's input, by rank; aligned to its elements, alike on all ranks modulo 16
  u64 out[kInline];     // every rank's output, by rank; likewise. May equal in
  u64 workspace[kInline]; // every rank's part of this plan's workspace, by rank; 128-byte aligned
  u64 table;            // world > 8: u64[3][world] in device memory that takes the place of in, out and workspace
  u64 count;            // elements; symmem_put_signal: bytes
  u64 fault;            // 64-bit fault word; memory that this device and the host can access. Signals: the launch's cell, see signals.cu
  u64 dead;             // 32-bit word in this device's memory, 0 as long as all is well; signals: or 0 for none
  u64 stop;             // 32-bit word that the host sets to end all waiting, or 0
  u64 timeout;          // ns that one launch may wait
  u64 shard;            // two-shot: vectors of 16 bytes that one rank reduces, a multiple of 8. See Layout
  u64 span;             // bytes of one rank's slot in a message buffer. See Layout
  u64 multicastIn;      // multimem: multicast address of the input
  u64 multicastOut;     // multimem: multicast address of the output
  u32 rank, world;
  u32 op, flags;
  u32 index;            // a number of the host's, for the fault word; signals: the channel
  u32 peer;             // signals: the other rank
  u32 channels;         // signals: how many channels the pad has
  u32 reserved;
};

SYMMEM_AT(Params, in, 0);
SYMMEM_AT(Params, out, 64);
SYMMEM_AT(Params, workspace, 128);
SYMMEM_AT(Params, table, 192);
SYMMEM_AT(Params, count, 200);
SYMMEM_AT(Params, fault, 208);
SYMMEM_AT(Params, dead, 216);
SYMMEM_AT(Params, stop, 224);
SYMMEM_AT(Params, timeout, 232);
SYMMEM_AT(Params, shard, 240);
SYMMEM_AT(Params, span, 248);
SYMMEM_AT(Params, multicastIn, 256);
SYMMEM_AT(Params, multicastOut, 264);
SYMMEM_AT(Params, rank, 272);
SYMMEM_AT(Params, world, 276);
SYMMEM_AT(Params, op, 280);
SYMMEM_AT(Params, flags, 284);
SYMMEM_AT(Params, index, 288);
SYMMEM_AT(Params, peer, 292);
SYMMEM_AT(Params, channels, 296);
SYMMEM_AT(Params, reserved, 300);
static_assert(sizeof(Params) == 304, "Params");

// Layout of the workspace of an all-reduce: as symmem.cuh says, with laps so far (twoshot_flow) in the first word of state. The buffers
// in its data need nothing between launches. vectors = ceil((count * width + 15) / 16) covers the message wherever it begins;
// shard = ceil(vectors / world) rounded up to a multiple of 8:
//
//   oneshot_ll    [2][world] slots of span = round128(2 * 8 * ceil((count * width + 7) / 8)) bytes
//   oneshot_push  [2][world] slots of span = round128(16 * vectors) bytes
//   oneshot_pull  staged: [2] of span = round128(16 * vectors) bytes; else nothing
//   oneshot_multimem  staged: span = round128(16 * vectors) bytes, local; else nothing
//   twoshot_push  [2][2][world] slots of span = 16 * shard bytes: by parity, inputs or results, writer
//   twoshot_flow  [world][blocks][kFlowSlots] laps of span bytes, a multiple of 128 that the host chooses
//   scatter_ll, scatter_push  [2][world] slots by writer, of span = round128(16 * lines of the longest share, wherever it begins)
//   scatter_whole, scatter_root  the same
//   scatter_flow  [world-1] slots by writer, of round128(16 * vectors of a share). See whole.cuh
//   lines_<pattern>  [2][world] slots by writer, of round256(32 * vectors of a piece)
//   lines_pass    [2] slots of round256(32 * vectors of the message)
//   others        nothing
enum : u32 { kFlagStart = 0, kFlagEnd = 1, kFlagFull = 0, kFlagFree = 2 };

enum : u32 { kFlowSlots = 4 }; // laps that a rank may be ahead of an owner; a power of two
enum : u32 { kFlowDelay = 2 }; // laps between pushing and reducing; less than kFlowSlots

// Layout of a signal pad, alike on every rank, all zeros at first:
//
//   counters  [channel][kPadKinds][writer] one word each, kPadStride bytes apart, counted up by that rank
//   states    [channel] of padStateBytes(world) each, local: u32 epoch of the barrier, u32 unused[7],
//             u32 sent[world], u32 consumed[world], u32 stored[world]
//
// sent and stored count only without kAtomics: signals that were begun, and those whose count has been stored.
enum : u32 { kPadStride = 128 };
enum : u32 { kPadSignal = 0, kPadBarrier = 1, kPadKinds = 2 };
__host__ __device__ constexpr u32 padStateBytes(u32 world) { return (32 + 12 * world + 127) / 128 * 128; }
