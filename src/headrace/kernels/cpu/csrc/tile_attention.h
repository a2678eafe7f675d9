// Causal attention of prompt tokens on matrix tiles (AMX): products of bfloat16 with float32 sums, softmax in float32.
//
// A part of kPart positions is one softmax: all scores of 32 query rows, then their weights in place of them, then the sums of values. The order
// of additions within a tile follows the positions, and a weight of a position that a token doesn't see is exactly 0. So here too a token's
// result is fixed by its position, the window and the sizes of the model, whatever row of a tile it takes and whoever is beside it.
#pragma once

#include "attention.h"
#include "tiles.h"

#if defined(__AMX_BF16__)

namespace {

using headrace::kPart;
using headrace::kScoreStride;

constexpr int64_t kBlockRows = 2 * kTileRows;  // query rows that go through a part together: a tile of keys or values serves two products

inline int64_t depth_of(int64_t head_dim) { return (head_dim + kTileK - 1) / kTileK; }

inline __m512i bfloats(F first, F second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

// 32 values of a cache from x[i] on, or the last 16 and zeros
inline __m512i load_bfloats(const void* x, headrace::Dtype dtype, int64_t i, bool half) {
  if (dtype == headrace::kBFloat16) {
    const uint16_t* p = (const uint16_t*)x + i;
    return half ? _mm512_zextsi256_si512(_mm256_loadu_si256((const __m256i*)p)) : _mm512_loadu_si512(p);
  }
  return bfloats(load_as(x, dtype, i), half ? set1(0.0f) : load_as(x, dtype, i + W));
}

// Where the keys or values of a part's positions lie; null for those that nobody here sees.
struct Places {
  const void *keys[kPart], *values[kPart];
};

inline void find_places(const Attention& a, const int32_t* blocks, int64_t kv_head, int64_t start, int64_t begin, int64_t end, int64_t low,
                        int64_t high, Places& places) {
  const int64_t size = a.cache_dtype == headrace::kFloat32 ? 4 : 2;
  int64_t block = (start + begin) / a.block_size, offset = (start + begin) % a.block_size;
  for (int64_t j = low; j < high; ++j) {
    if (j < begin || j >= end) {
      places.keys[j] = places.values[j] = nullptr;
      continue;
    }
    const int64_t place = (((int64_t)blocks[block] * a.block_size + offset) * a.num_kv_heads + kv_head) * a.head_dim * size;
    places.keys[j] = (const char*)a.k_cache + place;
    places.values[j] = (const char*)a.v_cache + place;
    if (++offset == a.block_size) {
      offset = 0;
      ++block;
    }
  }
}

// Tiles [position / 16][d / 32] of keys: rows are pairs of d, columns positions.
inline void tile_keys(const Attention& a, const Places& places, int64_t low, int64_t high, uint16_t* out) {
  const int64_t depth = depth_of(a.head_dim);
  for (int64_t j = low; j < high; j += kTileRows)
    for (int64_t k = 0; k < depth; ++k) {
      const bool half = (k + 1) * kTileK > a.head_dim;
      F rows[16];
      for (int64_t i = 0; i < 16; ++i) {
        const void* key = places.keys[j + i];
        rows[i] = key ? _mm512_castsi512_ps(load_bfloats(key, a.cache_dtype, k * kTileK, half)) : set1(0.0f);
      }
      transpose(rows);
      uint16_t* tile = out + (j / kTileRows * depth + k) * kTileValues;
      for (int64_t i = 0; i < 16; ++i) _mm512_store_si512(tile + i * kTileK, _mm512_castps_si512(rows[i]));
    }
}

// Tiles [position / 32][d / 16] of values: rows are pairs of positions, columns d.
inline void tile_values(const Attention& a, const Places& places, int64_t low, int64_t high, uint16_t* out) {
  const int64_t across = a.head_dim / kTileRows;
  const __m512i first_half = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), second_half = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  for (int64_t j = low; j < high; j += 2) {
    const void *first = places.values[j], *second = places.values[j + 1];
    uint16_t* row = out + j / kTileK * across * kTileValues + j % kTileK * kTileRows;
    for (int64_t n = 0; n < across; n += 2) {
      const bool half = n + 1 == across;
      const __m512i x = first ? load_bfloats(first, a.cache_dtype, n * kTileRows, half) : _mm512_setzero_si512();
      const __m512i y = second ? load_bfloats(second, a.cache_dtype, n * kTileRows, half) : _mm512_setzero_si512();
      const __m512i low_pairs = _mm512_unpacklo_epi16(x, y), high_pairs = _mm512_unpackhi_epi16(x, y);  // 4 pairs of each 8 neighbours
      _mm512_store_si512(row + n * kTileValues, _mm512_permutex2var_epi64(low_pairs, first_half, high_pairs));
      if (!half) _mm512_store_si512(row + (n + 1) * kTileValues, _mm512_permutex2var_epi64(low_pairs, second_half, high_pairs));
    }
  }
}

// Query rows [row, row + rows) of one key/value head times the scale: bfloat16 [kBlockRows, depth * 32], zeros where there is nothing.
inline void tile_queries(const Attention& a, int64_t kv_head, int64_t first, int64_t row, int64_t rows, uint16_t* out) {
  const int64_t group = a.num_heads / a.num_kv_heads, depth = depth_of(a.head_dim);
  int64_t token = row / group, head = row % group;
  for (int64_t r = 0; r < kBlockRows; ++r) {
    const float* q = a.q + ((first + token) * a.num_heads + kv_head * group + head) * a.head_dim;
    for (int64_t k = 0; k < depth; ++k) {
      __m512i x = _mm512_setzero_si512();
      if (r < rows) {
        const bool half = (k + 1) * kTileK > a.head_dim;
        const float* from = q + k * kTileK;
        x = bfloats(load(from) * set1(a.scale), half ? set1(0.0f) : load(from + W) * set1(a.scale));
      }
      _mm512_store_si512(out + (r * depth + k) * kTileK, x);
    }
    if (++head == group) {
      head = 0;
      ++token;
    }
  }
}

// scores [16 * Tiles, kScoreStride] of positions [low, high)
template <int Tiles>
inline void tile_scores(const uint16_t* queries, const uint16_t* keys, int64_t depth, int64_t low, int64_t high, float* scores) {
  const int64_t query_bytes = depth * 64, below = kTileRows * depth * kTileK;
  for (int64_t j = low; j < high; j += 2 * kTileRows) {
    const uint16_t *left = keys + j / kTileRows * depth * kTileValues, *right = left + depth * kTileValues;
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Tiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; ++k) {
      _tile_loadd(4, queries + k * kTileK, query_bytes);
      _tile_loadd(6, left + k * kTileValues, kTileStride);
      _tile_loadd(7, right + k * kTileValues, kTileStride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (Tiles == 2) {
        _tile_loadd(5, queries + below + k * kTileK, query_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    float* to = scores + j;
    _tile_stored(0, to, kScoreStride * 4);
    _tile_stored(1, to + kTileRows, kScoreStride * 4);
    if constexpr (Tiles == 2) {
      _tile_stored(2, to + kTileRows * kScoreStride, kScoreStride * 4);
      _tile_stored(3, to + kTileRows * kScoreStride + kTileRows, kScoreStride * 4);
    }
  }
}

// 2 ** x to about 3e-6 of it; 0 far below, also at minus infinity
inline F power(F x) {
  const F r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
  F p = fma(set1(0.0134266945f), r, set1(0.0522424566f));
  p = fma(p, r, set1(0.241280214f));
  p = fma(p, r, set1(0.693044843f));
  p = fma(p, r, set1(1.0f));
  return _mm512_scalef_ps(p, x);  // p * 2 ** floor(x)
}

// Scores of positions [from, to) become those of nobody.
inline void hide(float* scores, int64_t from, int64_t to) {
  for (; from < to; from += W) {
    const auto lanes = (__mmask16)(to - from < W ? (1 << (to - from)) - 1 : 0xffff);
    _mm512_mask_storeu_ps(scores + from, lanes, set1(kNegativeInfinity));
  }
}

// Weights of positions [from, to), a multiple of 32
inline void clear(uint16_t* weights, int64_t from, int64_t to) {
  for (; from < to; from += kTileK) _mm512_storeu_si512(weights + from, _mm512_setzero_si512());
}

// Scores of a row, of which it sees [begin, end), become bfloat16 weights in [low, high), 0 where it sees nothing. state_end: maximum, denominator.
inline void tile_softmax(const Attention& a, float* scores, int64_t begin, int64_t end, int64_t low, int64_t high, float* state_end) {
  uint16_t* weights = (uint16_t*)scores;
  if (begin >= end) {  // its neighbours in the block see some of the part, it does not
    clear(weights, low, high);
    state_end[0] = kNegativeInfinity;
    state_end[1] = 0.0f;
    return;
  }
  const int64_t b = begin / kTileK * kTileK, e = (end + kTileK - 1) / kTileK * kTileK;
  if (a.softcap != 0.0f) {  // c * tanh(s / c), where tanh(t) = 1 - 2 / (e ** 2t + 1)
    for (int64_t j = b; j < e; j += W)
      store(scores + j, set1(a.softcap) - set1(2.0f * a.softcap) / (vexp(load(scores + j) * set1(2.0f / a.softcap)) + set1(1.0f)));
  }
  hide(scores, b, begin);
  hide(scores, end, e);
  F largest = set1(kNegativeInfinity), second = largest;
  for (int64_t j = b; j < e; j += kTileK) {
    largest = vmax(load(scores + j), largest);
    second = vmax(load(scores + j + W), second);
  }
  const float maximum = lane_max(vmax(largest, second));
  constexpr float log2_e = 1.44269504088896341f;
  const F factor = set1(log2_e), offset = set1(-maximum * log2_e);
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  F total = set1(0.0f);
  for (int64_t j = b; j < e; j += kTileK) {
    const F x = power(fma(load(scores + j), factor, offset)), y = power(fma(load(scores + j + W), factor, offset));
    const __m512bh both = _mm512_cvtne2ps_pbh(y, x);
    total = _mm512_dpbf16_ps(total, both, ones);  // what was rounded: the weights that values get sum to one
    _mm512_storeu_si512(weights + j, (__m512i)both);
  }
  clear(weights, low, b);
  clear(weights, e, high);
  state_end[0] = maximum;
  state_end[1] = lane_sum(total);
}

// Tile C of sums to the states' rows; fewer than 16 go by way of `spare`.
#define HEADRACE_SUMS_TO(C, rows, to)                                                                 \
  if ((rows) >= kTileRows) {                                                                          \
    _tile_stored(C, to, state_stride * 4);                                                            \
  } else {                                                                                            \
    _tile_stored(C, spare, kTileStride);                                                              \
    for (int64_t r = 0; r < (rows); ++r) store((to) + r * state_stride, load(spare + r * kTileRows)); \
  }

// Sums of `rows` rows of weights over the values of positions [low, high)
template <int Tiles>
inline void weigh_tiles(const float* scores, const uint16_t* values, int64_t head_dim, int64_t low, int64_t high, int64_t rows, float* state,
                      int64_t state_stride) {
  alignas(64) float spare[kTileRows * kTileRows];
  const int64_t across = head_dim / kTileRows;
  const uint16_t *weights = (const uint16_t*)scores, *below = (const uint16_t*)(scores + kTileRows * kScoreStride);
  for (int64_t n = 0; n < across; n += 2) {
    const int64_t next = n + 1 < across;  // the last tile of an odd number is computed twice
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (Tiles == 2) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t j = low; j < high; j += kTileK) {
      const uint16_t* value = values + (j / kTileK * across + n) * kTileValues;
      _tile_loadd(4, weights + j, kScoreStride * 4);
      _tile_loadd(6, value, kTileStride);
      _tile_loadd(7, value + next * kTileValues, kTileStride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if constexpr (Tiles == 2) {
        _tile_loadd(5, below + j, kScoreStride * 4);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    float *left = state + n * kTileRows, *right = left + next * kTileRows;
    HEADRACE_SUMS_TO(0, rows, left)
    HEADRACE_SUMS_TO(1, rows, right)
    if constexpr (Tiles == 2) {
      HEADRACE_SUMS_TO(2, rows - kTileRows, left + kTileRows * state_stride)
      HEADRACE_SUMS_TO(3, rows - kTileRows, right + kTileRows * state_stride)
    }
  }
}
#undef HEADRACE_SUMS_TO

// As attention_part. scratch: tile_attention_scratch floats, aligned to a cache line
void tile_attention_part(const Attention& a, const int32_t* blocks, int64_t first_head, int64_t last_head, int64_t part, int64_t first, int64_t last,
                         int64_t position, float* state, int64_t state_stride, float* scratch) {
  const int64_t head_dim = a.head_dim, depth = depth_of(head_dim), group = a.num_heads / a.num_kv_heads, tokens = last - first, rows = tokens * group;
  const int64_t start = part * kPart;
  const auto begin_of = [&](int64_t token) {  // the first position of the part that a token sees, and the one past the last
    const int64_t under = a.window > 0 ? position + token + 1 - a.window - start : 0;
    return under > 0 ? under : 0;
  };
  const auto end_of = [&](int64_t token) {
    const int64_t end = position + token + 1 - start;
    return end < kPart ? end : kPart;
  };
  const auto down = [](int64_t j) { return j / kTileK * kTileK; };
  const auto up = [](int64_t j) { return (j + kTileK - 1) / kTileK * kTileK; };
  uint16_t *keys = (uint16_t*)scratch, *values = keys + kPart * depth * kTileK, *queries = values + kPart * head_dim;
  float* scores = (float*)(queries + kBlockRows * depth * kTileK);
  configure_tiles();
  Places places;
  for (int64_t head = first_head; head < last_head; ++head, state += rows * state_stride) {
    const int64_t begin = begin_of(0), end = end_of(tokens - 1);
    find_places(a, blocks, head, start, begin, end, down(begin), up(end), places);
    tile_keys(a, places, down(begin), up(end), keys);
    tile_values(a, places, down(begin), up(end), values);
    for (int64_t row = 0; row < rows; row += kBlockRows) {
      const int64_t n = rows - row < kBlockRows ? rows - row : kBlockRows;
      const int64_t low = down(begin_of(row / group)), high = up(end_of((row + n - 1) / group));
      float* to = state + row * state_stride;
      if (low >= high) {
        for (int64_t r = 0; r < n; ++r) {
          for (int64_t d = 0; d < head_dim; d += W) store(to + r * state_stride + d, set1(0.0f));
          to[r * state_stride + head_dim] = kNegativeInfinity;
          to[r * state_stride + head_dim + 1] = 0.0f;
        }
        continue;
      }
      tile_queries(a, head, first, row, n, queries);
      write_back();
      const bool both = n > kTileRows;
      (both ? tile_scores<2> : tile_scores<1>)(queries, keys, depth, low, high, scores);
      for (int64_t r = 0; r < n; ++r) {
        const int64_t token = (row + r) / group;
        tile_softmax(a, scores + r * kScoreStride, begin_of(token), end_of(token), low, high, to + r * state_stride + head_dim);
      }
      write_back();
      (both ? weigh_tiles<2> : weigh_tiles<1>)(scores, values, head_dim, low, high, n, to, state_stride);
    }
  }
  _tile_release();
}

}  // namespace

#endif
