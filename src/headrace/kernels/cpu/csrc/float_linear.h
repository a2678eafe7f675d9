// y[M, N] = x[M, K] @ W[N, K]^T with weights in floating point: groups of 16 rows interleaved value by value, float32 activations.
//
// Activations are cut into tiles of at most kFloatColumns rows, as even as can be, and a tile is turned so that its rows' values lie side by
// side (arrange). Sums of a tile stay in registers while K is walked: one fused multiply-add a value, in order of K, whatever the tile.
// One tile walks all of K, as fast as weights come from memory. More of them take turns at a part of K that stays in the nearest cache
// (kDepth), each asking for its share of the part that follows; sums wait in `partial` meanwhile.
#pragma once

#include "kernels.h"
#include "output_rows.h"
#include "simd.h"

namespace {

#if defined(__AVX512F__)
constexpr int kFloatColumns = 12, kFloatGroups = 2;  // 24 sums, 2 weights and an activation in 32 registers
#else
constexpr int kFloatColumns = 6, kFloatGroups = 1;  // 12 sums, 2 weights and an activation in 16 registers
#endif
constexpr int64_t kDepth = 128;
constexpr int kVectors = kGroupRows / W;

struct Float32 {
  static constexpr int64_t kBytes = 64;  // of one value of 16 rows
  static F load_rows(const uint8_t* p, int lane) { return load((const float*)p + lane); }
};
struct Float16 {
  static constexpr int64_t kBytes = 32;
  static F load_rows(const uint8_t* p, int lane) { return load_half((const uint16_t*)p + lane); }
};
struct BFloat16 {
  static constexpr int64_t kBytes = 32;
  static F load_rows(const uint8_t* p, int lane) { return load_bfloat((const uint16_t*)p + lane); }
};

// Of `rows` activation rows, the first one of a tile; all who cut rows into tiles cut the same number of them.
inline int64_t tiles_of(int64_t rows) { return (rows + kFloatColumns - 1) / kFloatColumns; }
inline int64_t tile_start(int64_t rows, int64_t tile) { return tile * rows / tiles_of(rows); }

// x [rows, K] -> out: tile after tile, each [K, rows of the tile]
void arrange(const float* x, int64_t rows, int64_t k, int64_t tile, float* out) {
  const int64_t first = tile_start(rows, tile), n = tile_start(rows, tile + 1) - first;
  x += first * k;
  out += first * k;
  for (int64_t i = 0; i < k; ++i, out += n)
    for (int64_t c = 0; c < n; ++c) out[c] = x[c * k + i];
}

struct FloatTile {
  const uint8_t* weight;  // of the first group, at the first value
  int64_t stride;         // bytes from a group to the next
  const float* x;         // [count, C]
  int64_t count;
  const uint8_t* fetch;   // memory to ask for, `step` bytes a value, for `lines` values
  int64_t step, lines;
};

template <class Format, int G, int C, bool fetch>
__attribute__((always_inline)) inline void float_steps(F (&sum)[G * kVectors][C], const FloatTile& t, int64_t begin, int64_t end) {
  const uint8_t* weight = t.weight + begin * Format::kBytes;
  const float* x = t.x + begin * C;
  for (int64_t k = begin; k < end; ++k, weight += Format::kBytes, x += C) {
    if (fetch) __builtin_prefetch(t.fetch + k * t.step, 0, 2);
    F w[G * kVectors];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) w[g * kVectors + v] = Format::load_rows(weight + g * t.stride, v * W);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const F value = set1(x[c]);
#pragma GCC unroll 4
      for (int v = 0; v < G * kVectors; ++v) sum[v][c] = fma(w[v], value, sum[v][c]);
    }
  }
}

// Sums start at zero or go on from `partial` [C, G * 16], and end there.
template <class Format, int G, int C>
__attribute__((noinline)) void float_tile(const FloatTile& t, float* partial, bool fresh) {
  F sum[G * kVectors][C];
#pragma GCC unroll 4
  for (int v = 0; v < G * kVectors; ++v)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) sum[v][c] = fresh ? set1(0.0f) : load(partial + (c * G * kVectors + v) * W);
  float_steps<Format, G, C, true>(sum, t, 0, t.lines);
  float_steps<Format, G, C, false>(sum, t, t.lines, t.count);
#pragma GCC unroll 4
  for (int v = 0; v < G * kVectors; ++v)
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) store(partial + (c * G * kVectors + v) * W, sum[v][c]);
}

template <class Format, int G, int C = kFloatColumns>
inline void float_tile_of(int64_t n, const FloatTile& t, float* partial, bool fresh) {
  if (n == C) return float_tile<Format, G, C>(t, partial, fresh);
  if constexpr (C > (G == 1 ? 1 : kFloatColumns / 2)) float_tile_of<Format, G, C - 1>(n, t, partial, fresh);
}

// All tiles over G groups.
template <class Format, int G>
void float_groups(const headrace::Linear& a, int64_t group, int64_t first, int64_t rows) {
  float partial[headrace::kRowsAtOnce * G * kGroupRows];
  const int64_t tiles = tiles_of(rows), stride = a.columns * Format::kBytes, depth = tiles == 1 ? a.columns : kDepth;
  const uint8_t* weight = a.weight + group * stride;
  for (int64_t k = 0; k < a.columns; k += depth) {
    const int64_t count = k + depth < a.columns ? depth : a.columns - k;
    const int64_t share = count * Format::kBytes / 64 / tiles;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t start = tile_start(rows, tile), n = tile_start(rows, tile + 1) - start;
      FloatTile t = {weight + k * Format::kBytes, stride, a.floats + (first + start) * a.columns + k * n, count, nullptr, 64, 0};
      if (tiles == 1) {
        t.fetch = t.weight + kFetchAhead;
        t.step = Format::kBytes;
        t.lines = count;
      } else {
        t.fetch = t.weight + count * Format::kBytes + share * tile * 64;
        t.lines = share;
      }
      float_tile_of<Format, G>(n, t, partial + start * G * kGroupRows, k == 0);
    }
  }
  for (int64_t m = 0; m < rows; ++m)
    for (int v = 0; v < G * kVectors; ++v) put_rows(a, group * kGroupRows + v * W, first + m, load(partial + m * G * kGroupRows + v * W));
}

template <class Format>
void float_linear(const headrace::Linear& a, int64_t first_group, int64_t last_group, int64_t first, int64_t last) {
  int64_t group = first_group;
  if (kFloatGroups > 1 && last - first > kFloatColumns)
    for (; group + kFloatGroups <= last_group; group += kFloatGroups) float_groups<Format, kFloatGroups>(a, group, first, last - first);
  for (; group < last_group; ++group) float_groups<Format, 1>(a, group, first, last - first);
}

}  // namespace
