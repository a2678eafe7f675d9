// y[M, N] = x[M, K] @ W[N, K]^T with weights in floating point: 16 rows interleaved value by value, float32 activations.
#pragma once

#include "kernels.h"
#include "output_rows.h"
#include "simd.h"

namespace {

// One fused multiply-add a value, in order of K.

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

template <class Format, int C>
inline void float_tile(const headrace::Linear& a, int64_t group, int64_t first, bool fetch) {
  constexpr int V = kGroupRows / W;
  const uint8_t* weight = a.weight + group * a.columns * Format::kBytes;
  const float* x = a.floats + first * a.columns;
  F sum[V][C];
  for (int v = 0; v < V; ++v)
    for (int c = 0; c < C; ++c) sum[v][c] = set1(0.0f);
  for (int64_t k = 0; k < a.columns; ++k) {
    if (fetch) __builtin_prefetch(weight + k * Format::kBytes + kFetchAhead, 0, 2);
    F w[V];
    for (int v = 0; v < V; ++v) w[v] = Format::load_rows(weight + k * Format::kBytes, v * W);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < V; ++v) sum[v][c] = fma(w[v], set1(x[c * a.columns + k]), sum[v][c]);
  }
  for (int v = 0; v < V; ++v)
    for (int c = 0; c < C; ++c) put_rows(a, group * kGroupRows + v * W, first + c, sum[v][c]);
}

template <class Format>
void float_linear(const headrace::Linear& a, int64_t first_group, int64_t last_group, int64_t first, int64_t last) {
  for (int64_t group = first_group; group < last_group; ++group) {
    int64_t m = first;
    for (; m + 6 <= last; m += 6) float_tile<Format, 6>(a, group, m, m == first);
    for (; m + 3 <= last; m += 3) float_tile<Format, 3>(a, group, m, m == first);
    if (last - m == 2) float_tile<Format, 2>(a, group, m, m == first);
    if (last - m == 1) float_tile<Format, 1>(a, group, m, m == first);
  }
}

}  // namespace
