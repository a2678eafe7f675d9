// Products of several activation rows with weights in blocks by AMX: one instruction makes the whole-numbered sums of a block of 32 values for 16
// weight rows and up to 16 activation rows. They are exact, and the float32 steps after them are those of linear.h in the same order: so the bits
// are those of its kernels, and the number of rows may decide.
//
// Sums leave the tile after every block, which takes as long as the product and more where they are waited for. So three blocks are under
// way at once: one is multiplied, the one before it on its way to memory, and the one before that taken up by the totals, which stay in registers.
#pragma once

#include "kernels.h"

#if defined(__AMX_INT8__)

#include <new>

#include "formats.h"
#include "output_rows.h"
#include "simd.h"
#include "tiles.h"

namespace {

using headrace::ByteTile;

constexpr int64_t kByteTileBlocks = 24;  // that are unpacked at once: they stay in the nearest cache

// What tiles take of a block of 16 weight rows: bytes, and whether these have signs.
template <class Format>
struct TileWeights : Format {
  static constexpr bool kSigned = false;
  using Format::Format;
  inline const void* bytes() const { return this->w; }
};
template <>
struct TileWeights<Q8_0> : PlainScale<0> {  // as they are packed
  static constexpr bool kSigned = true;
  const uint8_t* base;
  TileWeights(const uint8_t* group, int64_t block, int) : base(group + block * Q8_0::kBytes) { scale = load_scales(base + 512, 0); }
  inline const void* bytes() const { return base; }
};

inline void configure_byte_tiles() {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 32, 32, 64, 64};  // 0 to 3: sums, 4 and 5: activations, 6 and 7: weights
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 8, 8};
  } config;
  asm volatile("ldtilecfg %0" ::"m"(config));
}

// Sums of a block on their way, of activations' lower and upper bytes
struct ByteSums {
  alignas(64) int32_t lower[16 * 16], upper[16 * 16];
};

// The compiler's intrinsics want register numbers as literals, not as template arguments.
template <int Register>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "n"(Register) : "memory");
}
template <int Register>
inline void store_tile(int32_t* to) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"((int64_t)64), "n"(Register) : "memory");
}
template <bool Signed, int Sums, int X, int Weights>
inline void multiply_bytes() {
  asm volatile("tilezero %%tmm%c0" ::"n"(Sums));
  if constexpr (Signed) {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(Sums), "n"(X), "n"(Weights));
  } else {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(Sums), "n"(X), "n"(Weights));
  }
}

// Turn: 0 and 1, by turns: which registers
template <int Turn, class Weights>
inline void multiply_block(const Weights& w, const ByteTile& x) {
  load_tile<6 + Turn>(w.bytes(), 64);
  load_tile<4 + Turn>(x.lower, 32);
  multiply_bytes<Weights::kSigned, Turn, 4 + Turn, 6 + Turn>();
  if (__builtin_expect(x.wide != 0, 0)) {
    load_tile<4 + Turn>(x.upper, 32);
    multiply_bytes<Weights::kSigned, 2 + Turn, 4 + Turn, 6 + Turn>();
  }
}

template <int Turn>
inline void store_sums(const ByteTile& x, ByteSums& sums) {
  store_tile<Turn>(sums.lower);
  if (__builtin_expect(x.wide != 0, 0)) store_tile<2 + Turn>(sums.upper);
}

// R rows
template <int R, class Weights>
inline void add_sums(const Weights& w, const ByteTile& x, const ByteSums& sums, F (&totals)[R]) {
  const bool wide = x.wide != 0;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    I sum = load_bytes(sums.lower + 16 * r);
    if (__builtin_expect(wide, 0)) sum = int_add(sum, times_256(load_bytes(sums.upper + 16 * r)));
    totals[r] = w.finish(totals[r], sum, set1(x.scale[r]), set1(x.scaled_sum[r]), int_set1(x.sum[r]));
    asm volatile("" : "+v"(totals[r]));  // row by row, or else the compiler loads all sums first, and has no registers for them
  }
}

// `count` blocks of one group of weight rows times those of one tile of activation rows, of which R count. totals: [R, 16], go on. weight: where the
// blocks are unpacked from; null where the panel holds them already
template <class Format, int R>
inline void tile_blocks(const uint8_t* weight, int64_t begin, int64_t count, TileWeights<Format>* panel, const ByteTile* x, float* totals) {
  const auto prepare = [&](int64_t b) __attribute__((always_inline)) {
    if (!weight || b >= count) return;
    constexpr int64_t bytes = Format::kBytes * kBlock / Format::kValues;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(weight + (begin + b) * bytes + kFetchAhead + i, 0, 2);
    new (panel + b) TileWeights<Format>(weight, begin + b, 0);
  };
  ByteSums sums[2];
  F now[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) now[r] = load(totals + 16 * r);
  prepare(0);
  prepare(1);
  for (int64_t b = 0; b < count + 2; b += 2) {
    if (b < count) multiply_block<0>(panel[b], x[b]);
    if (b > 0 && b - 1 < count) store_sums<1>(x[b - 1], sums[1]);
    prepare(b + 2);
    if (b > 1) add_sums<R>(panel[b - 2], x[b - 2], sums[0], now);
    if (b + 1 < count) multiply_block<1>(panel[b + 1], x[b + 1]);
    if (b < count) store_sums<0>(x[b], sums[0]);
    prepare(b + 3);
    if (b > 0 && b - 1 < count) add_sums<R>(panel[b - 1], x[b - 1], sums[1], now);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) store(totals + 16 * r, now[r]);
}

// first: a multiple of kTileRows
template <class Format>
void byte_tile_linear(const headrace::Linear& a, int64_t first_group, int64_t last_group, int64_t first, int64_t last) {
  alignas(64) unsigned char memory[kByteTileBlocks * sizeof(TileWeights<Format>)];
  alignas(64) float totals[(headrace::kRowsAtOnce + kTileRows) * kGroupRows];
  auto* panel = (TileWeights<Format>*)memory;
  const int64_t blocks = a.columns / kBlock, group_bytes = a.columns / Format::kValues * Format::kBytes;
  const int64_t parts = (blocks + kByteTileBlocks - 1) / kByteTileBlocks;
  configure_byte_tiles();
  for (int64_t group = first_group; group < last_group; ++group) {
    memset(totals, 0, (size_t)((last - first + kTileRows) * kGroupRows) * sizeof(float));
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = part * blocks / parts, count = (part + 1) * blocks / parts - begin;
      for (int64_t m = first; m < last; m += kTileRows) {
        const auto run = last - m > kTileRows / 2 ? tile_blocks<Format, kTileRows> : tile_blocks<Format, kTileRows / 2>;
        run(m == first ? a.weight + group * group_bytes : nullptr, begin, count, panel, a.tiles + m / kTileRows * blocks + begin,
            totals + (m - first) * kGroupRows);
      }
    }
    for (int64_t m = first; m < last; ++m) put_rows(a, group * kGroupRows, m, load(totals + (m - first) * kGroupRows));
  }
  _tile_release();
}

}  // namespace

#endif
