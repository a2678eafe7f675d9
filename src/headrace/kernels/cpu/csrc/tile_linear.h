// y[M, N] = x[M, K] @ W[N, K]^T in bfloat16 by AMX: 16 x 16 sums in float32 stay in a tile register for all of K.
//
// Weights are unpacked to bfloat16, 32 outputs at a time, into a panel that stays in the second cache and serves all activation rows. The weights'
// values are those of their format's definition, rounded to the nearest.
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

// Values k and k + 1 of 16 weight rows in floating point.
inline void put_pair(uint16_t* out, F even, F odd) {
  alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
  _mm512_store_si512(out, _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
}

// The same of weights in blocks in fewer instructions: rounded as whole numbers, halves away from zero. The upper words of one move below the other's.
inline void put_rounded(uint16_t* out, F even, F odd) {
  const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  const __m512i low = _mm512_add_epi32(_mm512_castps_si512(even), half), high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
  _mm512_store_si512(out, _mm512_mask_shuffle_epi8(high, 0x3333333333333333u, low, upper));
}

// A whole number q of `Bits` bits, from bit `First` of each lane on, becomes the float 2 ** Bias + q without a conversion: it moves to where that
// float's fraction has its units. Who multiplies takes the power off with what it adds.
template <int Bits>
constexpr int kBias = Bits == 4 ? 7 : 8;

template <int First, int Bits>
inline F biased(B w) {
  constexpr int units = 23 - kBias<Bits>;
  if constexpr (First < units) w = _mm512_slli_epi32(w, units - First);
  if constexpr (First > units) w = _mm512_srli_epi32(w, First - units);
  const __m512i mask = _mm512_set1_epi32(((1 << Bits) - 1) << units), power = _mm512_set1_epi32((127 + kBias<Bits>) << 23);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(w, mask, power, 0xea));  // w & mask | power
}

// Four values that lie in the lanes of w, `Bits` apart from `First` on by bytes: q * scale + minimum, where `lowered` is minimum - 2 ** Bias * scale.
template <int First, int Bits>
inline void unpack_quad(B w, F scale, F lowered, uint16_t* out) {
  put_rounded(out, fma(biased<First, Bits>(w), scale, lowered), fma(biased<First + 8, Bits>(w), scale, lowered));
  put_rounded(out + 32, fma(biased<First + 16, Bits>(w), scale, lowered), fma(biased<First + 24, Bits>(w), scale, lowered));
}

// minimum - 2 ** Bias * scale; the minimum of a format without one is its offset's
template <int Bias, int Offset>
inline F lowered(const PlainScale<Offset>& block) {
  return block.scale * set1(-(float)(Offset + (1 << Bias)));
}
template <int Bias>
inline F lowered(const ShiftedScale& block) {
  return fma(block.scale, set1(-(float)(1 << Bias)), block.minimum);
}

// All of K of one group; its tiles stand 2 * kTileValues apart.
template <class Format>
inline void unpack_group(const uint8_t* weight, int64_t k, uint16_t* out) {
  for (int64_t b = 0; b < k / kTileK; ++b, out += 2 * kTileValues) {
    constexpr int64_t bytes = Format::kBytes * kTileK / Format::kValues;
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(weight + b * bytes + kFetchAhead + i, 0, 2);
    const Format block(weight, b, 0);
    if constexpr (std::is_same<Format, Q6_K>::value) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) unpack_quad<0, 8>(block.w[j], block.factors[j / 4], block.factors[j / 4] * set1(-32.0f - 256.0f), out + 64 * j);
    } else if constexpr (Format::kBits == 4) {
      const F low = lowered<kBias<4>>(block);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const B w = load_bytes(Format::nibbles(weight, b) + 64 * j);
        unpack_quad<0, 4>(w, block.scale, low, out + 64 * j);
        unpack_quad<4, 4>(w, block.scale, low, out + 64 * (j + 4));
      }
    } else {
      const F low = lowered<kBias<8>>(block);
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) unpack_quad<0, 8>(block.w[j], block.scale, low, out + 64 * j);
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

// One block of activation rows, or its first half, times one pair of groups. sums: [32, 32]
template <Way way, bool both_halves>
inline void tile_sums(const headrace::TileLinear& a, const uint16_t* x, const uint16_t* panel, int64_t steps, float* sums, Finished& before) {
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
  }
  _tile_stored(0, sums, kSumStride);
  _tile_stored(1, sums + 16, kSumStride);
  if constexpr (both_halves) {
    _tile_stored(2, sums + 16 * 32, kSumStride);
    _tile_stored(3, sums + 16 * 32 + 16, kSumStride);
  }
}

// The panel's weights times the blocks of activation rows.
template <Way way>
void panel_times(const headrace::TileLinear& a, int64_t first_pair, int64_t last_pair, int64_t first_block, int64_t last_block, const uint16_t* panel) {
  const int64_t steps = (a.columns + kTileK - 1) / kTileK, pair_values = steps * 2 * kTileValues;
  alignas(64) float sums[2][32 * 32];
  Finished before;
  int turn = 0;
  for (int64_t block = first_block; block < last_block; ++block) {
    const int64_t first = block * 32, rows = a.count - first < 32 ? a.count - first : 32;
    for (int64_t pair = first_pair; pair < last_pair; ++pair, turn ^= 1) {
      const uint16_t *x = a.x + block * pair_values, *weights = panel + (pair - first_pair) * pair_values;
      if (rows > kTileRows) {
        tile_sums<way, true>(a, x, weights, steps, sums[turn], before);
      } else {
        tile_sums<way, false>(a, x, weights, steps, sums[turn], before);
      }
      before = {sums[turn], pair, first, 0, rows};
    }
  }
  put_some<way>(a, before, before.rows);
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
    panel_times<Way::kGated>(a, first_pair, last_pair, first_block, last_block, panel);
  } else if (a.bias || a.rows % 32) {
    panel_times<Way::kAny>(a, first_pair, last_pair, first_block, last_block, panel);
  } else if (a.accumulate) {
    panel_times<Way::kAdd>(a, first_pair, last_pair, first_block, last_block, panel);
  } else {
    panel_times<Way::kStore>(a, first_pair, last_pair, first_block, last_block, panel);
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
