// Causal attention of tokens over a paged context, straight from the block table.
//
// A token's context is walked in tiles of 64 positions that start at multiples of 64, with an online softmax; every kPart positions a new
// state begins, and states are folded in order. So the steps of a token's result are fixed by its position, the window and the sizes of
// the model: it does not matter which thread, batch or prefill chunk computes it.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using headrace::Attention;

constexpr int kTile = 64;
constexpr int64_t kStateExtra = 2;  // a state is D sums, the maximum and the denominator
const float kNegativeInfinity = -__builtin_inff();

// Query times key sums lanes across a register, which costs shuffles: half a 512-bit register leaves a port free for them.
#if defined(__AVX2__)
using Q = __m256;
inline Q load_q(const float* p) { return _mm256_loadu_ps(p); }
inline Q fma_q(Q a, Q b, Q c) { return _mm256_fmadd_ps(a, b, c); }
inline Q zero_q() { return _mm256_setzero_ps(); }
inline void sum_lanes_of_4(const Q* x, float* out) {
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
#else
using Q = F;
inline Q load_q(const float* p) { return load(p); }
inline Q fma_q(Q a, Q b, Q c) { return fma(a, b, c); }
inline Q zero_q() { return set1(0.0f); }
inline void sum_lanes_of_4(const Q* x, float* out) {
  for (int i = 0; i < 4; ++i) out[i] = lane_sum(x[i]);
}
#endif

// scores[m * kTile + j] for H query heads and positions [begin, end), multiples of P
template <int H, int P>
inline void query_key(const float* q, const float* const* keys, int64_t head_dim, int begin, int end, float* scores) {
  for (int j = begin; j < end; j += P) {
    Q sum[H][P];
    for (int m = 0; m < H; ++m)
      for (int i = 0; i < P; ++i) sum[m][i] = zero_q();
    for (int64_t d = 0; d < head_dim; d += 8) {
      Q query[H];
      for (int m = 0; m < H; ++m) query[m] = load_q(q + m * head_dim + d);
#pragma GCC unroll 8
      for (int i = 0; i < P; ++i) {
        const Q key = load_q(keys[j + i] + d);
        for (int m = 0; m < H; ++m) sum[m][i] = fma_q(query[m], key, sum[m][i]);
      }
    }
    for (int m = 0; m < H; ++m)
      for (int i = 0; i < P; i += 4) sum_lanes_of_4(sum[m] + i, scores + m * kTile + j + i);
  }
}

// sums of H heads over V vectors of the head, from d on: sums * correction + weights @ values
template <int H, int V>
inline void weigh_values(const float* weights, const float* correction, const float* const* values, int begin, int end, int64_t d, float* state,
                         int64_t state_stride) {
  F sum[H][V];
  for (int m = 0; m < H; ++m)
    for (int v = 0; v < V; ++v) sum[m][v] = load(state + m * state_stride + d + v * W) * set1(correction[m]);
  for (int j = begin; j < end; ++j) {
    F weight[H];
    for (int m = 0; m < H; ++m) weight[m] = set1(weights[m * kTile + j]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const F value = load(values[j] + d + v * W);
      for (int m = 0; m < H; ++m) sum[m][v] = fma(weight[m], value, sum[m][v]);
    }
  }
  for (int m = 0; m < H; ++m)
    for (int v = 0; v < V; ++v) store(state + m * state_stride + d + v * W, sum[m][v]);
}

// Scores of positions [begin, end) become weights; the state's maximum and denominator move on. Returns what old sums are multiplied by.
inline float soften(const Attention& a, float* scores, int begin, int end, float* state_end) {
  const int first = begin / W * W, last = (end + W - 1) / W * W;
  if (a.softcap != 0.0f) {  // c * tanh(s / c), where tanh(t) = 1 - 2 / (e ** 2t + 1)
    for (int j = first; j < last; j += W) {
      const F t = load(scores + j) * set1(a.scale) * set1(2.0f / a.softcap);
      store(scores + j, set1(a.softcap) - set1(2.0f * a.softcap) / (vexp(t) + set1(1.0f)));
    }
  } else {
    for (int j = first; j < last; j += W) store(scores + j, load(scores + j) * set1(a.scale));
  }
  for (int j = first; j < begin; ++j) scores[j] = kNegativeInfinity;
  for (int j = end; j < last; ++j) scores[j] = kNegativeInfinity;
  F largest = set1(kNegativeInfinity);
  for (int j = first; j < last; j += W) largest = vmax(load(scores + j), largest);
  const float before = state_end[0], tile_max = lane_max(largest), maximum = before > tile_max ? before : tile_max;
  F total = set1(0.0f);
  for (int j = first; j < last; j += W) {
    const F weight = vexp(load(scores + j) - set1(maximum));
    store(scores + j, weight);
    total = total + weight;
  }
  float correction = 0.0f;
  if (before == maximum) {
    correction = 1.0f;
  } else if (before != kNegativeInfinity) {
    float e[W];
    store(e, vexp(set1(before - maximum)));
    correction = e[0];
  }
  state_end[0] = maximum;
  state_end[1] = state_end[1] * correction + lane_sum(total);
  return correction;
}

template <int H>
inline void tile_heads(const Attention& a, const float* q, const float* const* keys, const float* const* values, int begin, int end, float* state,
                       int64_t state_stride) {
  constexpr int positions = H == 1 || W == 16 ? 8 : 4;
  constexpr int vectors = H == 1 ? 8 : 4;
  float scores[H * kTile], correction[H];
  const int64_t head_dim = a.head_dim;
  query_key<H, positions>(q, keys, head_dim, begin / positions * positions, (end + positions - 1) / positions * positions, scores);
  for (int m = 0; m < H; ++m) correction[m] = soften(a, scores + m * kTile, begin, end, state + m * state_stride + head_dim);
  int64_t d = 0;
  for (; d + vectors * W <= head_dim; d += vectors * W) weigh_values<H, vectors>(scores, correction, values, begin, end, d, state, state_stride);
  for (; d < head_dim; d += W) weigh_values<H, 1>(scores, correction, values, begin, end, d, state, state_stride);
}

inline void floats_of(const void* x, headrace::Dtype dtype, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += W)
    store(out + i, dtype == headrace::kBFloat16 ? load_bfloat((const uint16_t*)x + i) : load_half((const uint16_t*)x + i));
}

// The tokens of one key/value head over one tile: positions [tile, tile + filled), of which those under `below` are seen by none.
inline void tile_tokens(const Attention& a, const int32_t* blocks, int64_t kv_head, int64_t tile, int below, int filled, int64_t first,
                        int64_t tokens, int64_t position, float* state, int64_t state_stride, float* scratch) {
  const int64_t group = a.num_heads / a.num_kv_heads, head_dim = a.head_dim;
  const float *keys[kTile], *values[kTile];
  int64_t block = (tile + below) / a.block_size, offset = (tile + below) % a.block_size;
  for (int j = below; j < filled; ++j) {
    const int64_t row = (((int64_t)blocks[block] * a.block_size + offset) * a.num_kv_heads + kv_head) * head_dim;
    if (a.cache_dtype == headrace::kFloat32) {
      keys[j] = (const float*)a.k_cache + row;
      values[j] = (const float*)a.v_cache + row;
    } else {
      float *key = scratch + j * head_dim, *value = scratch + (kTile + j) * head_dim;
      floats_of((const uint16_t*)a.k_cache + row, a.cache_dtype, head_dim, key);
      floats_of((const uint16_t*)a.v_cache + row, a.cache_dtype, head_dim, value);
      keys[j] = key;
      values[j] = value;
    }
    if (++offset == a.block_size) {
      offset = 0;
      ++block;
    }
  }
  // products are made in whole runs of positions; those that no token sees repeat one it does
  for (int j = 0; j < below; ++j) keys[j] = keys[below];
  for (int j = filled; j < kTile; ++j) keys[j] = keys[filled - 1];
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t p = position + i;
    const int end = (int)(p + 1 - tile < filled ? p + 1 - tile : filled);
    const int64_t under = a.window > 0 ? p - a.window + 1 - tile : 0;
    const int begin = under > 0 ? (int)(under < kTile ? under : kTile) : 0;
    if (begin >= end) continue;
    const float* q = a.q + ((first + i) * a.num_heads + kv_head * group) * head_dim;
    float* s = state + i * group * state_stride;
    int64_t m = 0;
    for (; m + 3 <= group; m += 3) tile_heads<3>(a, q + m * head_dim, keys, values, begin, end, s + m * state_stride, state_stride);
    if (group - m == 2) tile_heads<2>(a, q + m * head_dim, keys, values, begin, end, s + m * state_stride, state_stride);
    if (group - m == 1) tile_heads<1>(a, q + m * head_dim, keys, values, begin, end, s + m * state_stride, state_stride);
  }
}

// Asks for keys and values of positions [begin, end): a decode step reads each once, faster than they come in on demand.
inline void fetch_ahead(const Attention& a, const int32_t* blocks, int64_t first_head, int64_t last_head, int64_t begin, int64_t end) {
  const int64_t size = a.cache_dtype == headrace::kFloat32 ? 4 : 2, bytes = (last_head - first_head) * a.head_dim * size;
  for (int64_t p = begin; p < end; ++p) {
    const int64_t row = (((int64_t)blocks[p / a.block_size] * a.block_size + p % a.block_size) * a.num_kv_heads + first_head) * a.head_dim * size;
    for (int64_t i = 0; i < bytes; i += 64) {
      __builtin_prefetch((const char*)a.k_cache + row + i, 0, 2);
      __builtin_prefetch((const char*)a.v_cache + row + i, 0, 2);
    }
  }
}

void attention_part(const Attention& a, const int32_t* blocks, int64_t first_head, int64_t last_head, int64_t part, int64_t first, int64_t last,
                    int64_t position, float* state, int64_t state_stride, float* scratch) {
  const int64_t head_dim = a.head_dim, tokens = last - first, states_a_head = tokens * (a.num_heads / a.num_kv_heads);
  for (int64_t i = 0; i < (last_head - first_head) * states_a_head; ++i) {
    float* s = state + i * state_stride;
    for (int64_t d = 0; d < head_dim; ++d) s[d] = 0.0f;
    s[head_dim] = kNegativeInfinity;
    s[head_dim + 1] = 0.0f;
  }
  const int64_t context = position + tokens;  // positions that the last token sees
  const int64_t lowest = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
  const int64_t start = part * headrace::kPart, stop = start + headrace::kPart < context ? start + headrace::kPart : context;
  // the heads of a position are neighbours in memory: heads within tiles walk it almost in order
  for (int64_t tile = start > lowest / kTile * kTile ? start : lowest / kTile * kTile; tile < stop; tile += kTile) {
    const int filled = (int)(stop - tile < kTile ? stop - tile : kTile);
    const int below = lowest > tile ? (int)(lowest - tile) : 0;  // positions under every token's window may be gone
    if (tokens <= 4)
      fetch_ahead(a, blocks, first_head, last_head, tile == start ? tile : tile + kTile, tile + 2 * kTile < stop ? tile + 2 * kTile : stop);
    for (int64_t head = first_head; head < last_head; ++head)
      tile_tokens(a, blocks, head, tile, below, filled, first, tokens, position, state + (head - first_head) * states_a_head * state_stride,
                  state_stride, scratch);
  }
}

// `into` takes up the state of the positions that follow its own.
void attention_fold(float* into, const float* next, int64_t head_dim) {
  if (next[head_dim] == kNegativeInfinity && next[head_dim + 1] == 0.0f) return;  // it saw nothing
  if (into[head_dim] == kNegativeInfinity && into[head_dim + 1] == 0.0f) {
    memcpy(into, next, (size_t)(head_dim + kStateExtra) * sizeof(float));
    return;
  }
  const float maximum = into[head_dim] > next[head_dim] ? into[head_dim] : next[head_dim];
  const F a = vexp(set1(into[head_dim] - maximum)), b = vexp(set1(next[head_dim] - maximum));
  for (int64_t d = 0; d < head_dim; d += W) store(into + d, fma(load(into + d), a, load(next + d) * b));
  float ab[2 * W];
  store(ab, a);
  store(ab + W, b);
  into[head_dim] = maximum;
  into[head_dim + 1] = into[head_dim + 1] * ab[0] + next[head_dim + 1] * ab[W];
}

void attention_finish(const float* state, int64_t head_dim, float* out) {
  const F inverse = set1(1.0f / state[head_dim + 1]);
  for (int64_t d = 0; d < head_dim; d += W) store(out + d, load(state + d) * inverse);
}

}  // namespace
