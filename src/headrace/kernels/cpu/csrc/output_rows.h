// Where all products put their results, and how far ahead they ask for weights.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using headrace::kGroupRows;

// W output rows of one activation row, fewer at the end of the weight
template <class Args>  // Linear or TileLinear
inline void put_rows(const Args& a, int64_t row, int64_t m, F sum) {
  float* out = a.out + m * a.out_stride + row;
  if (row + W <= a.rows) {
    if (a.bias) sum = sum + load(a.bias + row);
    store(out, a.accumulate ? load(out) + sum : sum);
    return;
  }
  float values[W];
  store(values, sum);
  for (int64_t i = 0; i < a.rows - row; ++i) {
    const float value = a.bias ? values[i] + a.bias[row + i] : values[i];
    out[i] = a.accumulate ? out[i] + value : value;
  }
}

constexpr int64_t kFetchAhead = 4096;  // bytes; the processor's own prefetch stops at every page

}  // namespace
