// Causal attention of tokens one by one over a paged context of 16-bit keys and values: what decode rows need, where each token has a context of
// its own and only the query heads of a group share what is read.
//
// Keys are not turned as in attention.h, where many tokens share that work: a vector runs along the head, products of W positions are added up together. So sums are made in another order than there, which is again fixed by a token's position, the window and the sizes of the model.
// Walk, tiles, parts and states are those of attention.h.
#pragma once

#include "attention.h"

namespace {

constexpr int kDecodeRows = 4;  // query heads of a group that share the walk over a tile

struct Half {
  static inline F load(const uint16_t* x) { return load_half(x); }
};
struct BFloat {
  static inline F load(const uint16_t* x) { return load_bfloat(x); }
};

template <int V>
inline void ask_for(const uint16_t* row, int64_t head_dim) {
#pragma GCC unroll 8
  for (int64_t d = 0; d < (V ? V * W : head_dim); d += 32) __builtin_prefetch(row + d, 0, 3);
}

// scores [R, kTile] of positions [begin, end), multiples of W. q: [R, D]. V: vectors a head, 0 where only head_dim tells. `soon` is read after this.
template <class Value, int R, int V>
inline void decode_scores(const float* q, const uint16_t* const* keys, const uint16_t* const* soon, int64_t head_dim, int begin, int end,
                          float* scores) {
  for (int j = begin; j < end; j += W) {
    F parts[R][W];
    for (int i = 0; i < W; ++i) {
      F sum[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r] = set1(0.0f);
#pragma GCC unroll 8
      for (int64_t d = 0; d < (V ? V * W : head_dim); d += W) {
        const F key = Value::load(keys[j + i] + d);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r] = fma(key, load(q + r * head_dim + d), sum[r]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) parts[r][i] = sum[r];
      ask_for<V>(soon[j + i], head_dim);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(scores + r * kTile + j, lane_sums(parts[r]));
  }
}

// V vectors of the sums of R rows, from d on: sums * correction + weights @ values, positions in order. soon: null where nothing follows
template <class Value, int R, int V>
inline void decode_values(const float* weights, const float* correction, const uint16_t* const* values, const uint16_t* const* soon, int64_t head_dim,
                          int begin, int end, int64_t d, float* state, int64_t state_stride) {
  F sum[R][V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[r][v] = load(state + r * state_stride + d + v * W) * set1(correction[r]);
  for (int j = begin; j < end; ++j) {
    F value[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) value[v] = Value::load(values[j] + d + v * W);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const F weight = set1(weights[r * kTile + j]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] = fma(weight, value[v], sum[r][v]);
    }
    if (soon) ask_for<0>(soon[j], head_dim);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(state + r * state_stride + d + v * W, sum[r][v]);
}

// Keys and values of a tile: where those of each position begin, of the first key/value head
struct Walk {
  const uint16_t *keys[kTile], *values[kTile];
  int begin, end;  // positions that the token sees
};

template <class Value, int R>
void decode_rows(const Attention& a, const Walk& tile, const uint16_t* const* keys, const uint16_t* const* values, const uint16_t* const* soon,
                 const float* q, float* state, int64_t state_stride) {
  const int64_t head_dim = a.head_dim;
  const int first = tile.begin / W * W, last = (tile.end + W - 1) / W * W;
  float scores[R * kTile], correction[R];
  if (head_dim == 64) {
    decode_scores<Value, R, 64 / W>(q, keys, values, head_dim, first, last, scores);
  } else {
    decode_scores<Value, R, 0>(q, keys, values, head_dim, first, last, scores);
  }
  for (int r = 0; r < R; ++r) correction[r] = soften(a, scores + r * kTile, tile.begin, tile.end, state + r * state_stride + head_dim);
  int64_t d = 0;
  for (; d + 4 * W <= head_dim; d += 4 * W)
    decode_values<Value, R, 4>(scores, correction, values, d ? nullptr : soon, head_dim, tile.begin, tile.end, d, state, state_stride);
  for (; d < head_dim; d += W)
    decode_values<Value, R, 1>(scores, correction, values, d ? nullptr : soon, head_dim, tile.begin, tile.end, d, state, state_stride);
}

// Positions [start + begin, start + end), and in the vectors around them such as repeat one of these.
inline void walk_tile(const Attention& a, const int32_t* blocks, int64_t start, int begin, int end, Walk& out) {
  out.begin = begin;
  out.end = end;
  for (int j = begin; j < end; ++j) {
    const int64_t position = start + j, slot = (int64_t)blocks[position / a.block_size] * a.block_size + position % a.block_size;
    out.keys[j] = (const uint16_t*)a.k_cache + slot * a.num_kv_heads * a.head_dim;
    out.values[j] = (const uint16_t*)a.v_cache + slot * a.num_kv_heads * a.head_dim;
  }
  for (int j = begin / W * W; j < begin; ++j) out.keys[j] = out.keys[begin], out.values[j] = out.values[begin];
  for (int j = end; j < (end + W - 1) / W * W; ++j) out.keys[j] = out.keys[end - 1], out.values[j] = out.values[end - 1];
}

// One token whose position is `context` - 1. state: of its first head; those of the next key/value head are head_stride floats behind
template <class Value>
void decode_token(const Attention& a, const int32_t* blocks, int64_t first_head, int64_t last_head, int64_t part, int64_t token, int64_t context,
                  float* state, int64_t state_stride, int64_t head_stride, float* queries) {
  const int64_t head_dim = a.head_dim, group = a.num_heads / a.num_kv_heads, lowest = a.window > 0 && context > a.window ? context - a.window : 0;
  const int64_t start = part * headrace::kPart, stop = start + headrace::kPart < context ? start + headrace::kPart : context;
  const auto walk_of = [&](int64_t tile, Walk& out) {
    walk_tile(a, blocks, tile, lowest > tile ? (int)(lowest - tile) : 0, (int)(stop - tile < kTile ? stop - tile : kTile), out);
  };
  int64_t tile = start > lowest / kTile * kTile ? start : lowest / kTile * kTile;
  if (tile >= stop) return;
  const float* q = a.q + (token * a.num_heads + first_head * group) * head_dim;
  for (int64_t i = 0; i < (last_head - first_head) * group * head_dim; ++i) queries[i] = q[i] * a.scale;
  Walk both[2];
  int turn = 0;
  walk_of(tile, both[0]);
  for (; tile < stop; tile += kTile, turn ^= 1) {
    const Walk& now = both[turn];
    Walk& next = both[turn ^ 1];
    const bool goes_on = tile + kTile < stop;
    if (goes_on) {
      walk_of(tile + kTile, next);
      for (int j = (next.end + W - 1) / W * W; j < kTile; ++j) next.keys[j] = next.keys[next.end - 1];  // asked for, never read
    }
    const uint16_t *keys[kTile], *values[kTile], *soon[kTile];
    for (int64_t head = first_head; head < last_head; ++head) {
      for (int j = now.begin / W * W; j < (now.end + W - 1) / W * W; ++j) {
        keys[j] = now.keys[j] + head * head_dim;
        values[j] = now.values[j] + head * head_dim;
      }
      if (goes_on)
        for (int j = 0; j < kTile; ++j) soon[j] = next.keys[j] + head * head_dim;
      const float* query = queries + (head - first_head) * group * head_dim;
      float* s = state + (head - first_head) * head_stride;
      for (int64_t row = 0; row < group; row += kDecodeRows) {
        const uint16_t* const* after = goes_on ? soon : nullptr;
        const int64_t left = group - row;
        const auto run = left == 1   ? decode_rows<Value, 1>
                         : left == 2 ? decode_rows<Value, 2>
                         : left == 3 ? decode_rows<Value, 3>
                                     : decode_rows<Value, kDecodeRows>;
        run(a, now, keys, values, after, query + row * head_dim, s + row * state_stride, state_stride);
      }
    }
  }
}

// As attention_part, for caches of 16-bit values.
void decode_attention_part(const Attention& a, const int32_t* blocks, int64_t first_head, int64_t last_head, int64_t part, int64_t first, int64_t last,
                           int64_t position, float* state, int64_t state_stride, float* scratch) {
  const int64_t group = a.num_heads / a.num_kv_heads, head_stride = (last - first) * group * state_stride;
  clear_states(state, (last_head - first_head) * (last - first) * group, state_stride, a.head_dim);
  const auto one = a.cache_dtype == headrace::kBFloat16 ? decode_token<BFloat> : decode_token<Half>;
  for (int64_t token = first; token < last; ++token)
    one(a, blocks, first_head, last_head, part, token, position + token - first + 1, state + (token - first) * group * state_stride, state_stride,
        head_stride, scratch);
}

}  // namespace
