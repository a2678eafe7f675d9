// y[M, N] = x[M, K] @ W[N, K]^T in bfloat16 by AMX: 16 x 16 sums in float32 stay in a tile register for all of K.
//
// Weights are unpacked to bfloat16, 32 outputs at a time, into a panel that stays in the second cache and serves all activation rows. The weights'
// values are those of their format's definition, rounded once.
//
//   activations: blocks of 32 rows; a block is [K / 32] pairs of tiles, a tile 16 rows x 32 values
//   panel: pairs of weight groups; a pair is [K / 32] pairs of tiles, a tile [16 pairs of values][16 weight rows][2]
//
// K is filled up to a multiple of 32 with zeros. A tile's rows don't meet: what stands in those past the last one reaches nobody.
#pragma once

#include "kernels.h"

#if defined(__AMX_BF16__)

#include <type_traits>

#include "elementwise.h"
#include "float_linear.h"
#include "formats.h"
#include "output_rows.h"
#include "simd.h"
#include "tiles.h"

namespace {

constexpr int kSumStride = 32 * sizeof(float);  // bytes from a row to the next

constexpr int64_t kNearBytes = 1 << 19;  // of activation rows that may still be in the second cache when they are read

// Values k and k + 1 of 16 weight rows.
inline void put_pair(uint16_t* out, F even, F odd) {
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
  _mm512_store_si512(out, _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
}

template <int I>
inline F byte_of(B w) {
  const B mask = _mm512_set1_epi32(255);
  if constexpr (I == 0) return to_f(byte_and(w, mask));
  if constexpr (I == 3) return to_f(_mm512_srli_epi32(w, 24));
  return to_f(byte_and(_mm512_srli_epi32(w, 8 * I), mask));
}

// Quads of bytes [begin, end) of a block: byte * scale + minimum
inline void unpack_quads(const B* w, int begin, int end, F scale, F minimum, uint16_t* out) {
#pragma GCC unroll 8
  for (int j = begin; j < end; ++j) {
    put_pair(out + 64 * j, fma(byte_of<0>(w[j]), scale, minimum), fma(byte_of<1>(w[j]), scale, minimum));
    put_pair(out + 64 * j + 32, fma(byte_of<2>(w[j]), scale, minimum), fma(byte_of<3>(w[j]), scale, minimum));
  }
}

// (value - Offset) * scale is exact in float32, and so is Offset * scale: the powers of two that offsets are only move its exponent
template <int Offset>
inline F minimum_of(const PlainScale<Offset>& block) {
  return block.scale * set1(-(float)Offset);
}
inline F minimum_of(const ShiftedScale& block) { return block.minimum; }

// All of K of one group; its tiles stand 2 * kTileValues apart.
template <class Format>
inline void unpack_group(const uint8_t* weight, int64_t k, uint16_t* out) {
  for (int64_t b = 0; b < k / kTileK; ++b, out += 2 * kTileValues) {
    constexpr int64_t bytes = Format::kBytes * kTileK / Format::kValues;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(weight + b * bytes + kFetchAhead + i, 0, 2);
    const Format block(weight, b, 0);
    if constexpr (std::is_same<Format, Q6_K>::value) {
      for (int half = 0; half < 2; ++half) unpack_quads(block.w, 4 * half, 4 * half + 4, block.factors[half], block.factors[half] * set1(-32.0f), out);
    } else {
      unpack_quads(block.w, 0, 8, block.scale, minimum_of(block), out);
    }
  }
}

template <class Format>
inline void unpack_float_group(const uint8_t* weight, int64_t k, uint16_t* out) {
  const F zero = set1(0.0f);
  for (int64_t first = 0; first < k; first += kTileK, out += 2 * kTileValues)
    for (int64_t i = 0; i < kTileK; i += 2) {
      const uint8_t* pair = weight + (first + i) * Format::kBytes;
      put_pair(out + 16 * i, first + i < k ? Format::load_rows(pair, 0) : zero, first + i + 1 < k ? Format::load_rows(pair + Format::kBytes, 0) : zero);
    }
}

// Bytes of a packed group of 16 rows.
template <class Format>
constexpr int64_t group_bytes(int64_t k) {
  return k / Format::kValues * Format::kBytes;
}

void unpack_weight_group(const headrace::TileLinear& a, int64_t group, uint16_t* out) {
  const int64_t k = a.columns;
  const uint8_t* w = a.weight;
  switch (a.format) {
    case headrace::kF16: return unpack_float_group<Float16>(w + group * k * Float16::kBytes, k, out);
    case headrace::kBF16: return unpack_float_group<BFloat16>(w + group * k * BFloat16::kBytes, k, out);
    case headrace::kQ4_0: return unpack_group<Q4_0>(w + group * group_bytes<Q4_0>(k), k, out);
    case headrace::kQ4_1: return unpack_group<Q4_1>(w + group * group_bytes<Q4_1>(k), k, out);
    case headrace::kQ5_0: return unpack_group<Q5_0>(w + group * group_bytes<Q5_0>(k), k, out);
    case headrace::kQ5_1: return unpack_group<Q5_1>(w + group * group_bytes<Q5_1>(k), k, out);
    case headrace::kQ8_0: return unpack_group<Q8_0>(w + group * group_bytes<Q8_0>(k), k, out);
    case headrace::kQ4_K: return unpack_group<Q4_K>(w + group * group_bytes<Q4_K>(k), k, out);
    case headrace::kQ5_K: return unpack_group<Q5_K>(w + group * group_bytes<Q5_K>(k), k, out);
    case headrace::kQ6_K: return unpack_group<Q6_K>(w + group * group_bytes<Q6_K>(k), k, out);
  }
}

inline uint16_t* tile_row(uint16_t* tiles, int64_t k, int64_t row) {
  const int64_t steps = (k + kTileK - 1) / kTileK;
  return tiles + row / 32 * steps * 2 * kTileValues + row % 32 * kTileK;
}

// Sums of one block of activation rows and one pair of groups, [32, 32], on their way out of the tiles. Their last steps are made a few rows at a
// time, between the products of the next block: these keep the tile unit busy and little else.
struct Finished {
  const float* sums = nullptr;
  int64_t pair = 0, first = 0, row = 0, rows = 0;  // activation row of the first, the next of `rows` to go
};

enum class Way { kGated, kStore, kAdd, kAny };  // kStore, kAdd: no bias, and all 32 outputs are there

template <Way way>
inline void put_some(const headrace::TileLinear& a, Finished& f, int64_t count) {
  const int64_t end = f.row + count < f.rows ? f.row + count : f.rows;
  for (; f.row < end; ++f.row) {
    const F low = load(f.sums + 32 * f.row), high = load(f.sums + 32 * f.row + 16);
    if constexpr (way == Way::kGated) {
      uint16_t* to = tile_row(a.gated, a.rows / 2, f.first + f.row) + f.pair / 2 * 2 * kTileValues + f.pair % 2 * 16;
      _mm256_store_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(silu(low) * high));
    } else if constexpr (way == Way::kAny) {
      const int64_t token = a.tokens[f.first + f.row], row = 2 * f.pair * kGroupRows;
      put_rows(a, row, token, low);
      if (row + kGroupRows < a.rows) put_rows(a, row + kGroupRows, token, high);
    } else {
      float* to = a.out + a.tokens[f.first + f.row] * a.out_stride + 32 * f.pair;
      store(to, way == Way::kAdd ? load(to) + low : low);
      store(to + 16, way == Way::kAdd ? load(to + 16) + high : high);
    }
  }
}

// The activation rows of the next block, asked for little by little: they come from the third cache, or the other core's second.
struct Ahead {
  const char *next, *end;
  int64_t lines;  // at a time
  inline void some() {
    for (int64_t i = 0; i < lines && next < end; ++i, next += 64) __builtin_prefetch(next, 0, 2);
  }
};

// One block of activation rows, or its first half, times one pair of groups. sums: [32, 32]
template <Way way, bool both_halves, bool asking>
inline void tile_sums(const headrace::TileLinear& a, const uint16_t* x, const uint16_t* panel, int64_t steps, float* sums, Finished& before, Ahead& ahead) {
  const int64_t share = (before.rows + steps - 1) / steps;
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (both_halves) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; ++i, x += 2 * kTileValues, panel += 2 * kTileValues) {
    write_back();
    _tile_loadd(4, x, kTileStride);
    _tile_stream_loadd(6, panel, kTileStride);  // x stays in the nearest cache, and the panel passes by
    _tile_dpbf16ps(0, 4, 6);
    _tile_stream_loadd(7, panel + kTileValues, kTileStride);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (both_halves) {
      _tile_loadd(5, x + kTileValues, kTileStride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    put_some<way>(a, before, share);
    if constexpr (asking) ahead.some();
  }
  _tile_stored(0, sums, kSumStride);
  _tile_stored(1, sums + 16, kSumStride);
  if constexpr (both_halves) {
    _tile_stored(2, sums + 16 * 32, kSumStride);
    _tile_stored(3, sums + 16 * 32 + 16, kSumStride);
  }
}

// The panel's weights times the blocks of activation rows.
template <Way way, bool asking>
void panel_times(const headrace::TileLinear& a, int64_t first_pair, int64_t last_pair, int64_t first_block, int64_t last_block, const uint16_t* panel) {
  const int64_t steps = (a.columns + kTileK - 1) / kTileK, pair_values = steps * 2 * kTileValues;
  alignas(64) float sums[2][32 * 32];
  Finished before;
  int turn = 0;
  for (int64_t block = first_block; block < last_block; ++block) {
    const int64_t first = block * 32, rows = a.count - first < 32 ? a.count - first : 32;
    const uint16_t *x = a.x + block * pair_values, *next = x + pair_values;
    Ahead ahead = {(const char*)next, (const char*)(block + 1 < last_block ? next + pair_values : next), 32 / (last_pair - first_pair) + 1};
    for (int64_t pair = first_pair; pair < last_pair; ++pair, turn ^= 1) {
      const uint16_t* weights = panel + (pair - first_pair) * pair_values;
      if (rows > kTileRows) {
        tile_sums<way, true, asking>(a, x, weights, steps, sums[turn], before, ahead);
      } else {
        tile_sums<way, false, asking>(a, x, weights, steps, sums[turn], before, ahead);
      }
      before = {sums[turn], pair, first, 0, rows};
    }
  }
  put_some<way>(a, before, before.rows);
}

template <Way way>
void panel_times_rows(const headrace::TileLinear& a, int64_t first_pair, int64_t last_pair, int64_t first_block, int64_t last_block,
                      const uint16_t* panel) {
  const int64_t bytes = (last_block - first_block) * headrace::kTileBlock * ((a.columns + kTileK - 1) / kTileK) * kTileStride;
  (bytes > kNearBytes ? panel_times<way, true> : panel_times<way, false>)(a, first_pair, last_pair, first_block, last_block, panel);
}

void tile_linear(const headrace::TileLinear& a, int64_t first_pair, int64_t last_pair, int64_t first_block, int64_t last_block, uint16_t* panel) {
  const int64_t pair_values = (a.columns + kTileK - 1) / kTileK * 2 * kTileValues;
  const int64_t groups = (a.rows + kGroupRows - 1) / kGroupRows, apart = a.gated ? groups / 2 : 1;
  for (int64_t pair = first_pair; pair < last_pair; ++pair) {
    const int64_t group = a.gated ? pair : 2 * pair;
    uint16_t* out = panel + (pair - first_pair) * pair_values;
    unpack_weight_group(a, group, out);
    if (group + apart < groups) unpack_weight_group(a, group + apart, out + kTileValues);  // else what stands there makes sums that nobody takes
  }
  configure_tiles();
  if (a.gated) {
    panel_times_rows<Way::kGated>(a, first_pair, last_pair, first_block, last_block, panel);
  } else if (a.bias || a.rows % 32) {
    panel_times_rows<Way::kAny>(a, first_pair, last_pair, first_block, last_block, panel);
  } else if (a.accumulate) {
    panel_times_rows<Way::kAdd>(a, first_pair, last_pair, first_block, last_block, panel);
  } else {
    panel_times_rows<Way::kStore>(a, first_pair, last_pair, first_block, last_block, panel);
  }
  _tile_release();
}

void to_tiles(const float* x, int64_t k, int64_t row, uint16_t* tiles) {
  uint16_t* to = tile_row(tiles, k, row);
  int64_t i = 0;
  for (; i + kTileK <= k; i += kTileK, to += 2 * kTileValues) _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(load(x + i + 16), load(x + i)));
  if (i < k) {
    float rest[kTileK] = {};
    memcpy(rest, x + i, (size_t)(k - i) * sizeof(float));
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(load(rest + 16), load(rest)));
  }
}

}  // namespace

#endif
