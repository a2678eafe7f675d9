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

// Rows of queries that walk a tile together: the query heads of one key/value head, token after token.
#if defined(__AVX512F__)
constexpr int kQueryRows = 6, kPositionVectors = 4, kValueVectors = 4;  // 24 sums, 4 vectors and a number in 32 registers
#else
constexpr int kQueryRows = 6, kPositionVectors = 2, kValueVectors = 2;  // 12 sums, 2 vectors and a number in 16 registers
#endif

inline F load_as(const void* x, headrace::Dtype dtype, int64_t i) {
  if (dtype == headrace::kFloat32) return load((const float*)x + i);
  return dtype == headrace::kBFloat16 ? load_bfloat((const uint16_t*)x + i) : load_half((const uint16_t*)x + i);
}

// Memory of the next tile, asked for little by little while this one is computed: a decode step reads all keys and values once.
struct Fetch {
  const char* rows[2 * kTile];
  int count = 0, next = 0;
  int64_t row_bytes = 0, offset = 0;
  inline void some(int lines) {
    for (; lines > 0 && next < count; --lines) {
      __builtin_prefetch(rows[next] + offset, 0, 2);
      offset += 64;
      if (offset >= row_bytes) {
        offset = 0;
        ++next;
      }
    }
  }
};

// W keys become columns [j, j + W) of `out` [D, kTile].
inline void turn_keys(const void* const* keys, headrace::Dtype dtype, int64_t head_dim, int j, float* out, Fetch& fetch) {
  for (int64_t d = 0; d < head_dim; d += W) {
    fetch.some(W);
    F rows[W];
    for (int i = 0; i < W; ++i) rows[i] = load_as(keys[j + i], dtype, d);
    transpose(rows);
    for (int i = 0; i < W; ++i) store(out + (d + i) * kTile + j, rows[i]);
  }
}

// scores [R, kTile] of V vectors of positions from j on: sums over the head in order. q: [D, R], keys: [D, kTile]
template <int R, int V>
inline void query_key(const float* q, const float* keys, int64_t head_dim, int j, float* scores) {
  F sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = set1(0.0f);
  for (int64_t d = 0; d < head_dim; ++d) {
    F key[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) key[v] = load(keys + d * kTile + j + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F query = set1(q[d * R + r]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] = fma(query, key[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(scores + r * kTile + j + v * W, sum[r][v]);
}

// sums of R rows over V vectors of the head, from d on: sums * correction + weights @ values, positions in order
template <int R, int V>
inline void weigh_values(const float* weights, const float* correction, const float* const* values, int begin, int end, int64_t d, float* state,
                         int64_t state_stride, Fetch& fetch) {
  F sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = load(state + r * state_stride + d + v * W) * set1(correction[r]);
  for (int j = begin; j < end; ++j) {
    fetch.some(2);
    F value[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) value[v] = load(values[j] + d + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F weight = set1(weights[r * kTile + j]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] = fma(weight, value[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(state + r * state_stride + d + v * W, sum[r][v]);
}

// Scores of positions [begin, end) of a tile become weights, the others 0; the state's maximum and denominator move on. Returns what old
// sums are multiplied by.
inline float soften(const Attention& a, float* scores, int begin, int end, float* state_end) {
  constexpr int vectors = kTile / W;
  F x[vectors];
  for (int j = 0; j < begin; ++j) scores[j] = kNegativeInfinity;
  for (int j = end; j < kTile; ++j) scores[j] = kNegativeInfinity;
  for (int v = 0; v < vectors; ++v) x[v] = load(scores + v * W);
  if (a.softcap != 0.0f) {  // c * tanh(s / c), where tanh(t) = 1 - 2 / (e ** 2t + 1)
    for (int v = begin / W; v < (end + W - 1) / W; ++v) {
      store(scores + v * W, set1(a.softcap) - set1(2.0f * a.softcap) / (vexp(x[v] * set1(2.0f / a.softcap)) + set1(1.0f)));
    }
    for (int j = begin / W * W; j < begin; ++j) scores[j] = kNegativeInfinity;
    for (int j = end; j < (end + W - 1) / W * W; ++j) scores[j] = kNegativeInfinity;
    for (int v = 0; v < vectors; ++v) x[v] = load(scores + v * W);
  }
  F largest = x[0];
  for (int v = 1; v < vectors; ++v) largest = vmax(x[v], largest);
  const float before = state_end[0], tile_max = lane_max(largest), maximum = before > tile_max ? before : tile_max;
  F total = set1(0.0f);
  for (int v = 0; v < vectors; ++v) {
    const F weight = vexp(x[v] - set1(maximum));
    store(scores + v * W, weight);
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

struct Tile {  // 64 positions of one key/value head
  const float* keys;           // [D, kTile]
  const float* const* values;  // of each position
  int64_t start;               // position of the first one
  int filled;                  // positions that there are
};

// R rows from `row` on, whose queries are q [D, R].
template <int R>
void tile_rows(const Attention& a, const Tile& tile, const float* q, int64_t row, int64_t position, float* state, int64_t state_stride,
               Fetch& fetch) {
  const int64_t group = a.num_heads / a.num_kv_heads, head_dim = a.head_dim;
  int begin[R], end[R], first = kTile, last = 0;
  for (int r = 0; r < R; ++r) {
    const int64_t p = position + (row + r) / group, under = a.window > 0 ? p - a.window + 1 - tile.start : 0;
    begin[r] = under > 0 ? (int)(under < kTile ? under : kTile) : 0;
    end[r] = (int)(p + 1 - tile.start < tile.filled ? p + 1 - tile.start : tile.filled);
    if (begin[r] >= end[r]) continue;
    if (begin[r] < first) first = begin[r];
    if (end[r] > last) last = end[r];
  }
  if (first >= last) return;
  float scores[R * kTile], correction[R];
  int j = 0;
  for (; j + kPositionVectors * W <= last; j += kPositionVectors * W) query_key<R, kPositionVectors>(q, tile.keys, head_dim, j, scores);
  for (; j < last; j += W) query_key<R, 1>(q, tile.keys, head_dim, j, scores);
  for (int r = 0; r < R; ++r) {
    if (begin[r] < end[r]) {
      correction[r] = soften(a, scores + r * kTile, begin[r], end[r], state + r * state_stride + head_dim);
    } else {
      correction[r] = 1.0f;
      for (int i = 0; i < kTile; ++i) scores[r * kTile + i] = 0.0f;
    }
  }
  int64_t d = 0;
  for (; d + kValueVectors * W <= head_dim; d += kValueVectors * W)
    weigh_values<R, kValueVectors>(scores, correction, tile.values, first, last, d, state, state_stride, fetch);
  for (; d < head_dim; d += W) weigh_values<R, 1>(scores, correction, tile.values, first, last, d, state, state_stride, fetch);
}

template <int R = kQueryRows>
inline void tile_rows_of(int64_t n, const Attention& a, const Tile& tile, const float* q, int64_t row, int64_t position, float* state,
                         int64_t state_stride, Fetch& fetch) {
  if (n >= R) return tile_rows<R>(a, tile, q, row, position, state, state_stride, fetch);
  if constexpr (R > 1) tile_rows_of<R - 1>(n, a, tile, q, row, position, state, state_stride, fetch);
}

// Queries of one key/value head times the scale, in blocks of kQueryRows rows, each [D, rows of the block]; the last block may be smaller.
inline void arrange_queries(const Attention& a, int64_t kv_head, int64_t first, int64_t tokens, float* out) {
  const int64_t group = a.num_heads / a.num_kv_heads, rows = tokens * group, head_dim = a.head_dim;
  for (int64_t row = 0; row < rows; row += kQueryRows) {
    const int64_t n = rows - row < kQueryRows ? rows - row : kQueryRows;
    for (int64_t r = 0; r < n; ++r) {
      const float* q = a.q + ((first + (row + r) / group) * a.num_heads + kv_head * group + (row + r) % group) * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) out[row * head_dim + d * n + r] = q[d] * a.scale;
    }
  }
}

// All rows of one key/value head over one tile, of which positions under `below` are seen by none; `ahead` positions follow it.
// scratch: 2 * kTile * D floats
inline void tile_head(const Attention& a, const int32_t* blocks, int64_t kv_head, int64_t start, int below, int filled, int ahead, const float* q,
                      int64_t rows, int64_t position, float* state, int64_t state_stride, float* scratch) {
  const int64_t head_dim = a.head_dim, size = a.cache_dtype == headrace::kFloat32 ? 4 : 2;
  const void* keys[kTile];
  const float* values[kTile];
  int64_t block = (start + below) / a.block_size, offset = (start + below) % a.block_size;
  for (int j = below; j < filled; ++j) {
    const int64_t place = (((int64_t)blocks[block] * a.block_size + offset) * a.num_kv_heads + kv_head) * head_dim;
    keys[j] = (const char*)a.k_cache + place * size;
    if (a.cache_dtype == headrace::kFloat32) {
      values[j] = (const float*)a.v_cache + place;
    } else {
      float* value = scratch + (kTile + j) * head_dim;
      for (int64_t d = 0; d < head_dim; d += W) store(value + d, load_as((const uint16_t*)a.v_cache + place, a.cache_dtype, d));
      values[j] = value;
    }
    if (++offset == a.block_size) {
      offset = 0;
      ++block;
    }
  }
  Fetch fetch;
  fetch.row_bytes = head_dim * size;
  for (int j = 0; j < ahead; ++j) {  // the tile is whole where another follows: block and offset stand at the next
    const int64_t place = (((int64_t)blocks[block] * a.block_size + offset) * a.num_kv_heads + kv_head) * head_dim * size;
    fetch.rows[fetch.count++] = (const char*)a.k_cache + place;
    fetch.rows[fetch.count++] = (const char*)a.v_cache + place;
    if (++offset == a.block_size) {
      offset = 0;
      ++block;
    }
  }
  // products are made in whole vectors of positions; those that no row sees repeat one it does
  for (int j = 0; j < below; ++j) keys[j] = keys[below], values[j] = values[below];
  const int whole = (filled + W - 1) / W * W;
  for (int j = filled; j < whole; ++j) keys[j] = keys[filled - 1];
  for (int j = 0; j < whole; j += W) turn_keys(keys, a.cache_dtype, head_dim, j, scratch, fetch);
  const Tile tile = {scratch, values, start, filled};
  for (int64_t row = 0; row < rows; row += kQueryRows) {
    tile_rows_of(rows - row, a, tile, q + row * head_dim, row, position, state + row * state_stride, state_stride, fetch);
  }
  fetch.some(2 * kTile * (int)(fetch.row_bytes / 64 + 1));
}

// States that have seen nothing.
inline void clear_states(float* state, int64_t count, int64_t stride, int64_t head_dim) {
  for (float* s = state; s < state + count * stride; s += stride) {
    for (int64_t d = 0; d < head_dim; ++d) s[d] = 0.0f;
    s[head_dim] = kNegativeInfinity;
    s[head_dim + 1] = 0.0f;
  }
}

void attention_part(const Attention& a, const int32_t* blocks, int64_t first_head, int64_t last_head, int64_t part, int64_t first, int64_t last,
                    int64_t position, float* state, int64_t state_stride, float* scratch) {
  const int64_t head_dim = a.head_dim, tokens = last - first, states_a_head = tokens * (a.num_heads / a.num_kv_heads);
  clear_states(state, (last_head - first_head) * states_a_head, state_stride, head_dim);
  float* queries = scratch + 2 * kTile * head_dim;
  for (int64_t head = first_head; head < last_head; ++head) arrange_queries(a, head, first, tokens, queries + (head - first_head) * states_a_head * head_dim);
  const int64_t context = position + tokens;  // positions that the last token sees
  const int64_t lowest = a.window > 0 && position >= a.window ? position - a.window + 1 : 0;
  const int64_t start = part * headrace::kPart, stop = start + headrace::kPart < context ? start + headrace::kPart : context;
  // the heads of a position are neighbours in memory: heads within tiles walk it almost in order
  for (int64_t tile = start > lowest / kTile * kTile ? start : lowest / kTile * kTile; tile < stop; tile += kTile) {
    const int filled = (int)(stop - tile < kTile ? stop - tile : kTile);
    const int below = lowest > tile ? (int)(lowest - tile) : 0;  // positions under every token's window may be gone
    const int ahead = (int)(stop - tile - filled < kTile ? stop - tile - filled : kTile);
    for (int64_t head = first_head; head < last_head; ++head)
      tile_head(a, blocks, head, tile, below, filled, ahead, queries + (head - first_head) * states_a_head * head_dim, states_a_head, position,
                state + (head - first_head) * states_a_head * state_stride, state_stride, scratch);
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
