// y[M, N] = x[M, K] @ W[N, K]^T where W stays in its GGUF blocks (formats.h) and x is quantised in blocks of 32 (quantize.h).
//
// The sum over a block is exact (integers); blocks are added up in order of K in float32 by fused multiply-adds. So a product that sums blocks by
// other instructions (panel_linear.h) gives the same bits.
#pragma once

#include <type_traits>

#include "byte_tiles.h"
#include "float_linear.h"
#include "formats.h"
#include "kernels.h"
#include "output_rows.h"
#include "panel_linear.h"
#include "simd.h"

namespace {

// V vectors of rows times C activation rows, all of K; sums stay in registers. The first tile of a group asks for the weights that follow.
template <class Format, int V, int C>
inline void tile(const headrace::Linear& a, int64_t group, int lane, int64_t first, bool fetch) {
  const int64_t blocks = a.columns / kBlock;
  const uint8_t* weight = a.weight + group * (a.columns / Format::kValues * Format::kBytes);
  const int8_t* x = a.x + first * a.columns;
  const BlockInfo* info = a.info + first * blocks;
  F sum[V][C];
  for (int v = 0; v < V; ++v)
    for (int c = 0; c < C; ++c) sum[v][c] = set1(0.0f);
  for (int64_t b = 0; b < blocks; ++b) {
    if (fetch) {
      constexpr int64_t bytes = Format::kBytes * kBlock / Format::kValues;
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(weight + b * bytes + kFetchAhead + i, 0, 2);
    }
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Format block(weight, b, lane + v * W);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[v][c] = block.add(sum[v][c], x + c * a.columns + b * kBlock, info[c * blocks + b]);
    }
  }
  for (int v = 0; v < V; ++v)
    for (int c = 0; c < C; ++c) put_rows(a, group * kGroupRows + lane + v * W, first + c, sum[v][c]);
}

#if defined(__AVX512F__)
constexpr int kColumns = 8;
#else
constexpr int kColumns = 4;  // 8 registers hold weights, 4 sums
#endif
constexpr int64_t kFewestPanelRows = 8;  // with fewer, weights are used as they come from memory
#if defined(__AMX_INT8__)
constexpr int64_t kFewestTileRows = 12;  // a tile takes as long for fewer
#else
constexpr int64_t kFewestTileRows = 0;
#endif

template <class Format, int C>
inline void group_rows(const headrace::Linear& a, int64_t group, int64_t first, bool fetch) {
  constexpr int vectors = kGroupRows / W;
  if constexpr (C <= 2) {
    tile<Format, vectors, C>(a, group, 0, first, fetch);
  } else {
    for (int v = 0; v < vectors; ++v) tile<Format, 1, C>(a, group, v * W, first, fetch && v == 0);
  }
}

template <class Format>
void linear_of(const headrace::Linear& a, int64_t first_group, int64_t last_group, int64_t first, int64_t last) {
  if constexpr (!std::is_same<Format, Q6_K>::value) {  // its blocks have two scales
#if defined(__AMX_INT8__)
    if (a.tiles) return byte_tile_linear<Format>(a, first_group, last_group, first, last);
#endif
    if (last - first >= kFewestPanelRows) return panel_linear<Format>(a, first_group, last_group, first, last);
  }
  for (int64_t group = first_group; group < last_group; ++group) {
    int64_t m = first;
    for (; m + kColumns <= last; m += kColumns) group_rows<Format, kColumns>(a, group, m, m == first);
    if constexpr (kColumns > 4) {
      if (m + 4 <= last) {
        group_rows<Format, 4>(a, group, m, m == first);
        m += 4;
      }
    }
    switch (last - m) {
      case 3: group_rows<Format, 3>(a, group, m, m == first); break;
      case 2: group_rows<Format, 2>(a, group, m, m == first); break;
      case 1: group_rows<Format, 1>(a, group, m, m == first); break;
    }
  }
}

void linear(const headrace::Linear& a, int64_t first_group, int64_t last_group, int64_t first, int64_t last) {
  switch (a.format) {
    case headrace::kF32: return float_linear<Float32>(a, first_group, last_group, first, last);
    case headrace::kF16: return float_linear<Float16>(a, first_group, last_group, first, last);
    case headrace::kBF16: return float_linear<BFloat16>(a, first_group, last_group, first, last);
    case headrace::kQ4_0: return linear_of<Q4_0>(a, first_group, last_group, first, last);
    case headrace::kQ4_1: return linear_of<Q4_1>(a, first_group, last_group, first, last);
    case headrace::kQ5_0: return linear_of<Q5_0>(a, first_group, last_group, first, last);
    case headrace::kQ5_1: return linear_of<Q5_1>(a, first_group, last_group, first, last);
    case headrace::kQ8_0: return linear_of<Q8_0>(a, first_group, last_group, first, last);
    case headrace::kQ4_K: return linear_of<Q4_K>(a, first_group, last_group, first, last);
    case headrace::kQ5_K: return linear_of<Q5_K>(a, first_group, last_group, first, last);
    case headrace::kQ6_K: return linear_of<Q6_K>(a, first_group, last_group, first, last);
  }
}

}  // namespace
