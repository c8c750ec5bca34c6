// All-reduce in two halves of what is sent as int8, in blocks of 64 elements with a scale each. Blocks are counted from the first element of
// the message, whatever its address. One dtype a file: symmem_quantized_<dtype>_wn, and for ranks without addresses of each other
// symmem_quantize_<dtype>, symmem_quantized_sum and symmem_dequantize_<dtype>, which wait for nobody.
//
// Of a block, m = the largest magnitude, scale = max(m / 127, 2^-126), and an element is sent as the byte 128 + x / scale, x / scale rounded to
// the nearest, ties to even: 1 to 255. So no word of a line is 0, nor is a scale: what is empty has not come. A block with an infinity
// or a NaN has a NaN as scale, and so all of it is NaN. The own input goes the same way, and results do too.
#include "frame.cuh"

enum : u32 { kKindQuantized = 33 };
enum : u32 { kQuantizedBlock = 64, kQuantizedBytes = 68 };

// Quantized is the parameter, beside Comm where there is one.
//
// An image of a shard is [shard] lines of 64 bytes and then [shard] scales of 4, in span bytes. The workspace is, behind the records,
//
//   images  [2][2][world] of span each: by parity of the epoch, inputs or sums, and writer
struct Quantized {
  u64 in, out;  // of elements, at any place; may be the same
  u64 count;    // elements
  u64 shard;    // blocks that one rank sums
  u64 span;     // bytes of an image: a multiple of 128
  u64 images;   // quantize: where [world] images go. dequantize: where they come from. sum: u64[world], where each rank's image is
  u64 sum;      // sum: where the image of the sum goes
  u32 op;       // kSum or kAvg
  u32 world;
};
SYMMEM_AT(Quantized, in, 0);
SYMMEM_AT(Quantized, out, 8);
SYMMEM_AT(Quantized, count, 16);
SYMMEM_AT(Quantized, shard, 24);
SYMMEM_AT(Quantized, span, 32);
SYMMEM_AT(Quantized, images, 40);
SYMMEM_AT(Quantized, sum, 48);
SYMMEM_AT(Quantized, op, 56);
SYMMEM_AT(Quantized, world, 60);
static_assert(sizeof(Quantized) == 64, "Quantized");

// Four threads have a block, sixteen elements each: a line.
struct Sixteen { float x[16]; };

// Line is what is sent of them. All four have the scale.
struct Line {
  Words<4> w;
  u32 scale;
};

template <class T> SYMMEM_DEVICE Sixteen loadSixteen(u64 base, u64 i, u64 count) {
  constexpr u32 E = 16 / T::width;
  Sixteen s;
  if (base % 16 == 0 && i + 16 <= count) {
    Words<4> v[T::width];
#pragma unroll
    for (u32 k = 0; k < T::width; k++) v[k] = loadWeak(base + i * T::width + k * 16, Words<4>());
#pragma unroll
    for (u32 e = 0; e < 16; e++) s.x[e] = T::decode((u32)element<T>(v[e / E], e % E));
    return s;
  }
#pragma unroll
  for (u32 e = 0; e < 16; e++) s.x[e] = i + e < count ? T::decode((u32)loadElement<T::width>(base + (i + e) * T::width)) : 0.f;
  return s;
}
template <class T> SYMMEM_DEVICE void storeSixteen(u64 base, u64 i, u64 count, const Sixteen &s) {
  constexpr u32 E = 16 / T::width;
  if (base % 16 == 0 && i + 16 <= count) {
#pragma unroll
    for (u32 k = 0; k < T::width; k++) {
      Words<4> v = {};
#pragma unroll
      for (u32 e = 0; e < E; e++) setElement<T>(v, e, T::encode(s.x[k * E + e]));
      storeWeak(base + i * T::width + k * 16, v);
    }
    return;
  }
#pragma unroll
  for (u32 e = 0; e < 16; e++)
    if (i + e < count) storeElement<T::width>(base + (i + e) * T::width, T::encode(s.x[e]));
}

// quantize: the warp calls.
SYMMEM_DEVICE Line quantize(const Sixteen &s) {
  float m = 0;
#pragma unroll
  for (u32 e = 0; e < 16; e++) m = FloatAcc::max(m, f32From(f32Bits(s.x[e]) & 0x7fffffff));
  m = FloatAcc::max(m, __shfl_xor_sync(~0u, m, 1));
  m = FloatAcc::max(m, __shfl_xor_sync(~0u, m, 2));
  Line l;
  if (!(f32Bits(m) < 0x7f800000)) {
    l.scale = 0x7fffffff;
    l.w = {{0x80808080, 0x80808080, 0x80808080, 0x80808080}};
    return l;
  }
  const float scale = FloatAcc::max(__fdiv_rn(m, 127.f), f32From(0x00800000)), inverse = __fdiv_rn(1.f, scale);
  l.scale = f32Bits(scale);
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    l.w.w[i] = 0;
#pragma unroll
    for (u32 e = 0; e < 4; e++) // 1.5 * 2^23 + 128: the last bit counts 1
      l.w.w[i] |= (f32Bits(__fadd_rn(__fmul_rn(s.x[4 * i + e], inverse), 12583040.f)) & 0xff) << (8 * e);
  }
  return l;
}
SYMMEM_DEVICE Sixteen dequantize(const Line &l) {
  Sixteen s;
#pragma unroll
  for (u32 e = 0; e < 16; e++) // 2^23 + byte, less 2^23 + 128
    s.x[e] = __fmul_rn(__fsub_rn(f32From(0x4b000000 | (l.w.w[e / 4] >> (8 * (e % 4)) & 0xff)), 8388736.f), f32From(l.scale));
  return s;
}

// Sums adds ranks' values up in their order.
struct Sums {
  Sixteen a;
  SYMMEM_DEVICE void add(u32 rank, const Sixteen &s) {
#pragma unroll
    for (u32 e = 0; e < 16; e++) a.x[e] = rank == 0 ? s.x[e] : __fadd_rn(a.x[e], s.x[e]);
  }
  SYMMEM_DEVICE Line result(const Quantized &p) {
    if (p.op == kAvg) {
#pragma unroll
      for (u32 e = 0; e < 16; e++) a.x[e] = __fdiv_rn(a.x[e], (float)p.world);
    }
    return quantize(a);
  }
};

// Place is the thread's part of the blocks that its warp is at. Warps go through a shard together, so that all lanes are there to tell each
// other scales.
struct Place {
  u64 first, step;
  u32 lane, sub;
  SYMMEM_DEVICE Place() {
    const u32 threads = gridDim.x * blockDim.x, id = blockIdx.x * blockDim.x + threadIdx.x;
    lane = id % 32;
    sub = lane % 4;
    first = id / 32 * 8ull;
    step = threads / 32 * 8ull;
  }
  SYMMEM_DEVICE u64 line(u64 block) const { return block * kQuantizedBlock + sub * 16; }
  SYMMEM_DEVICE u64 element(u64 block) const { return block * kQuantizedBlock + sub * 16; }
};
SYMMEM_DEVICE u64 scaleAt(const Quantized &p, u64 block) { return p.shard * kQuantizedBlock + block * 4; }

// send stores a line to an image of a peer.
SYMMEM_DEVICE void send(const Quantized &p, const Place &t, u64 image, u64 block, const Line &l) {
  storeStrong(image + t.line(block), l.w);
  if (t.sub == 0) storeRelaxed(image + scaleAt(p, block), l.scale);
}

// receive waits for a line of rank r in an image, and empties it. The warp calls; here says whether the thread has a block.
SYMMEM_DEVICE Line receive(Ranks<> &f, const Quantized &p, const Place &t, u64 image, u64 block, u32 r, bool here) {
  Line l = {{{0, 0, 0, 0}}, 0};
  if (here) {
    const u64 line = image + t.line(block), scale = image + scaleAt(p, block);
    do {
      l.w = loadStrong(line, Words<4>());
      l.scale = t.sub == 0 ? loadRelaxed(scale) : 1;
    } while (!(come(l.w) && l.scale != 0) && f.again(r));
    storeStrong(line, Words<4>{});
    if (t.sub == 0) storeRelaxed(scale, 0);
  }
  l.scale = __shfl_sync(~0u, l.scale, t.lane - t.sub);
  return l;
}

template <class T> SYMMEM_DEVICE void quantizedAllReduce(const Comm &c, const Quantized &p) {
  Ranks<> f(c, kKindQuantized);
  u32 epoch;
  if (!f.begin(epoch)) return;
  const u32 world = f.world(), rank = f.rank();
  const u64 blocks = (p.count + kQuantizedBlock - 1) / kQuantizedBlock, mine = f.data(rank);
  const u64 inputs = (epoch & 1) * 2 * world * p.span, sums = inputs + world * p.span;
  const Place t;
  for (u64 b0 = t.first; b0 < p.shard; b0 += t.step) {
    const u64 b = b0 + t.lane / 4;
#pragma unroll 1
    for (u32 k = 1; k < world; k++) {
      const u32 q = f.peer(k);
      const u64 g = q * p.shard + b;
      const Line l = quantize(loadSixteen<T>(p.in, t.element(g), b < p.shard ? p.count : 0)); // what is another thread's may be written
      if (b < p.shard && g < blocks) send(p, t, f.data(q) + inputs + rank * p.span, b, l);
    }
  }
  for (u64 b0 = t.first; b0 < p.shard; b0 += t.step) {
    const u64 b = b0 + t.lane / 4, g = rank * p.shard + b;
    const bool here = b < p.shard && g < blocks;
    const Line own = quantize(loadSixteen<T>(p.in, t.element(g), here ? p.count : 0));
    Sums a;
#pragma unroll 1
    for (u32 r = 0; r < world; r++) {
      Line l = receive(f, p, t, mine + inputs + r * p.span, b, r, here && r != rank);
#pragma unroll
      for (u32 i = 0; i < 4; i++) l.w.w[i] = r == rank ? own.w.w[i] : l.w.w[i]; // of all of a Line it would be through memory
      l.scale = r == rank ? own.scale : l.scale;
      a.add(r, dequantize(l));
    }
    const Line l = a.result(p);
    if (!here || !f.ok) continue;
#pragma unroll 1
    for (u32 k = 1; k < world; k++) send(p, t, f.data(f.peer(k)) + sums + rank * p.span, b, l);
    storeSixteen<T>(p.out, t.element(g), p.count, dequantize(l));
  }
  for (u64 b0 = t.first; b0 < p.shard; b0 += t.step) {
    const u64 b = b0 + t.lane / 4;
#pragma unroll 1
    for (u32 k = 1; k < world; k++) {
      const u32 q = f.peer(k);
      const u64 g = q * p.shard + b;
      const bool here = b < p.shard && g < blocks;
      const Line l = receive(f, p, t, mine + sums + q * p.span, b, q, here);
      if (here && f.ok) storeSixteen<T>(p.out, t.element(g), p.count, dequantize(l));
    }
  }
  f.close(epoch);
}

SYMMEM_DEVICE void put(const Quantized &p, const Place &t, u64 image, u64 block, const Line &l) {
  storeWeak(image + t.line(block), l.w);
  if (t.sub == 0) storeElement<4>(image + scaleAt(p, block), l.scale);
}
SYMMEM_DEVICE Line get(const Quantized &p, const Place &t, u64 image, u64 block) {
  return Line{loadWeak(image + t.line(block), Words<4>()), (u32)loadElement<4>(image + scaleAt(p, block))};
}

template <class T> SYMMEM_DEVICE void quantizeAll(const Quantized &p) {
  const u64 blocks = (p.count + kQuantizedBlock - 1) / kQuantizedBlock;
  const Place t;
  for (u64 b0 = t.first; b0 < blocks; b0 += t.step) {
    const u64 g = b0 + t.lane / 4;
    const Line l = quantize(loadSixteen<T>(p.in, t.element(g), p.count));
    if (g < blocks) put(p, t, p.images + g / p.shard * p.span, g % p.shard, l);
  }
}

SYMMEM_DEVICE void sumImages(const Quantized &p) { // count is the elements of the shard
  const u64 blocks = (p.count + kQuantizedBlock - 1) / kQuantizedBlock;
  const Place t;
  for (u64 b0 = t.first; b0 < blocks; b0 += t.step) {
    const u64 b = b0 + t.lane / 4;
    Sums a;
    for (u32 r = 0; r < p.world; r++) {
      u64 image;
      asm("ld.global.u64 %0, [%1];" : "=l"(image) : "l"(p.images + r * 8ull));
      Line l = {{{0x80808080, 0x80808080, 0x80808080, 0x80808080}}, 0x00800000};
      if (b < blocks) l = get(p, t, image, b);
      a.add(r, dequantize(l));
    }
    const Line l = a.result(p);
    if (b < blocks) put(p, t, p.sum, b, l);
  }
}

template <class T> SYMMEM_DEVICE void dequantizeAll(const Quantized &p) {
  const u64 blocks = (p.count + kQuantizedBlock - 1) / kQuantizedBlock;
  const Place t;
  for (u64 b0 = t.first; b0 < blocks; b0 += t.step) {
    const u64 g = b0 + t.lane / 4;
    if (g < blocks)
      storeSixteen<T>(p.out, t.element(g), p.count, dequantize(get(p, t, p.images + g / p.shard * p.span, g % p.shard)));
  }
}

#define SYMMEM_JOIN(name, dtype, tail) symmem_##name##_##dtype##tail
#define SYMMEM_NAME(name, dtype, tail) SYMMEM_JOIN(name, dtype, tail)
extern "C" __global__ void __launch_bounds__(256)
    SYMMEM_NAME(quantized, SYMMEM_DTYPE, _wn)(const __grid_constant__ Comm c, const __grid_constant__ Quantized p) {
  quantizedAllReduce<SYMMEM_TYPE>(c, p);
}
extern "C" __global__ void __launch_bounds__(256) SYMMEM_NAME(quantize, SYMMEM_DTYPE, )(const __grid_constant__ Quantized p) {
  quantizeAll<SYMMEM_TYPE>(p);
}
extern "C" __global__ void __launch_bounds__(256) symmem_quantized_sum(const __grid_constant__ Quantized p) { sumImages(p); }
extern "C" __global__ void __launch_bounds__(256) SYMMEM_NAME(dequantize, SYMMEM_DTYPE, )(const __grid_constant__ Quantized p) {
  dequantizeAll<SYMMEM_TYPE>(p);
}
