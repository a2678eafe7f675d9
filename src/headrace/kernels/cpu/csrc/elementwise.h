// Norms, activations, rotation and conversions of rows; plain loops over vectors with a scalar tail.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* out) {
  F sum = set1(0.0f);
  int64_t i = 0;
  for (; i + W <= size; i += W) sum = fma(load(x + i), load(x + i), sum);
  float total = lane_sum(sum);
  for (; i < size; ++i) total += x[i] * x[i];
  const float factor = 1.0f / sqrtf(total / (float)size + eps);
  for (i = 0; i + W <= size; i += W) store(out + i, load(x + i) * set1(factor) * load(weight + i));
  for (; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

inline F silu(F x) { return x / (set1(1.0f) + vexp(set1(0.0f) - x)); }

void silu_mul(const float* gate, const float* up, int64_t size, float* out) {
  int64_t i = 0;
  for (; i + W <= size; i += W) store(out + i, silu(load(gate + i)) * load(up + i));
  for (; i < size; ++i) {  // the same steps in one lane
    float lane[W];
    store(lane, silu(set1(gate[i])) * set1(up[i]));
    out[i] = lane[0];
  }
}

// out may be x
void rotate(const float* x, const float* cos, const float* sin, int64_t rotary, int64_t head_dim, float* out) {
  const int64_t half = rotary / 2;
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    const F low = load(x + i), high = load(x + half + i);
    store(out + i, fma(high, load(sin + i), low * load(cos + i)));
    store(out + half + i, fma(low, load(sin + half + i), high * load(cos + half + i)));
  }
  for (; i < half; ++i) {
    const float low = x[i], high = x[half + i];
    out[i] = low * cos[i] + high * sin[i];
    out[half + i] = high * cos[half + i] + low * sin[half + i];
  }
  if (out != x)
    for (i = rotary; i < head_dim; ++i) out[i] = x[i];
}

inline uint16_t to_bfloat(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (uint16_t)(x == x ? rounded : bits >> 16 | 0x40);
}

void to_float(const void* x, headrace::Dtype dtype, int64_t n, float* out) {
  if (dtype == headrace::kFloat32) {
    memcpy(out, x, (size_t)n * 4);
    return;
  }
  const uint16_t* from = (const uint16_t*)x;
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, dtype == headrace::kBFloat16 ? load_bfloat(from + i) : load_half(from + i));
  if (i < n) {
    uint16_t rest[W] = {};
    float values[W];
    memcpy(rest, from + i, (size_t)(n - i) * 2);
    store(values, dtype == headrace::kBFloat16 ? load_bfloat(rest) : load_half(rest));
    memcpy(out + i, values, (size_t)(n - i) * 4);
  }
}

// What is not a number stays so: vmin and vmax give their second operand then.
inline F load_for_half(const float* x, bool saturate) { return saturate ? vmax(set1(-65504.0f), vmin(set1(65504.0f), load(x))) : load(x); }

void from_float(const float* x, headrace::Dtype dtype, int64_t n, void* out, bool saturate) {
  uint16_t* to = (uint16_t*)out;
  if (dtype == headrace::kFloat32) {
    memcpy(out, x, (size_t)n * 4);
  } else if (dtype == headrace::kBFloat16) {
    for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat(x[i]);
  } else {
    int64_t i = 0;
    for (; i + W <= n; i += W) store_half(to + i, load_for_half(x + i, saturate));
    if (i < n) {
      float rest[W] = {};
      uint16_t halves[W];
      memcpy(rest, x + i, (size_t)(n - i) * 4);
      store_half(halves, load_for_half(rest, saturate));
      memcpy(to + i, halves, (size_t)(n - i) * 2);
    }
  }
}

inline float half_at(const uint8_t* halves, int64_t row) {
  uint16_t one[W] = {};
  float values[W];
  memcpy(one, halves + 2 * row, 2);
  store(values, load_half(one));
  return values[0];
}

inline int nibble(const uint8_t* base, int64_t row, int i) {
  const int quad = i / 4;
  return base[64 * (quad % 4) + 4 * row + i % 4] >> (quad / 4 * 4) & 15;
}

// In the floating point steps of the format's definition. Layouts: linear.h.
void unpack_row(const uint8_t* weight, int64_t format, int64_t row, int64_t k, float* out) {
  const int64_t group = row / headrace::kGroupRows, r = row % headrace::kGroupRows;
  if (format == headrace::kF32 || format == headrace::kF16 || format == headrace::kBF16) {
    const int64_t size = format == headrace::kF32 ? 4 : 2;
    const headrace::Dtype dtype = format == headrace::kF32 ? headrace::kFloat32 : format == headrace::kF16 ? headrace::kFloat16 : headrace::kBFloat16;
    for (int64_t i = 0; i < k; i += W) {
      float values[W];  // as many of them as there are, gathered
      const int n = (int)(k - i < W ? k - i : W);
      for (int j = 0; j < n; ++j) memcpy((uint8_t*)values + j * size, weight + ((group * k + i + j) * headrace::kGroupRows + r) * size, (size_t)size);
      to_float(values, dtype, n, out + i);
    }
    return;
  }
  for (int64_t b = 0; b < k / 32; ++b, out += 32) {
    const bool five = format == headrace::kQ5_0 || format == headrace::kQ5_1 || format == headrace::kQ5_K;
    const int64_t bits = five ? 320 : 256;  // bytes of a block's values
    const auto value = [&](const uint8_t* base, int i) {
      return nibble(base, r, i) | (five ? (base[256 + 4 * r + i % 4] >> (i / 4) & 1) << 4 : 0);
    };
    if (format == headrace::kQ4_0 || format == headrace::kQ5_0) {
      const uint8_t* base = weight + (group * (k / 32) + b) * (bits + 32);
      const float scale = half_at(base + bits, r);
      for (int i = 0; i < 32; ++i) out[i] = (float)(value(base, i) - (five ? 16 : 8)) * scale;
    } else if (format == headrace::kQ4_1 || format == headrace::kQ5_1) {
      const uint8_t* base = weight + (group * (k / 32) + b) * (bits + 64);
      const float scale = half_at(base + bits, r), minimum = half_at(base + bits + 32, r);
      for (int i = 0; i < 32; ++i) {
        const float product = (float)value(base, i) * scale;
        out[i] = product + minimum;
      }
    } else if (format == headrace::kQ8_0) {
      const uint8_t* base = weight + (group * (k / 32) + b) * 544;
      const float scale = half_at(base + 512, r);
      for (int i = 0; i < 32; ++i) out[i] = (float)(int8_t)base[64 * (i / 4) + 4 * r + i % 4] * scale;
    } else if (format == headrace::kQ4_K || format == headrace::kQ5_K) {
      const uint8_t* base = weight + (group * (k / 256) + b / 8) * (64 + 8 * (bits + 32));
      const uint8_t* sub = base + 64 + b % 8 * (bits + 32);
      const float scale = half_at(base, r) * (float)sub[bits + r], minimum = half_at(base + 32, r) * (float)sub[bits + 16 + r];
      for (int i = 0; i < 32; ++i) {
        const float product = (float)value(sub, i) * scale;
        out[i] = product - minimum;
      }
    } else {
      const uint8_t* base = weight + (group * (k / 256) + b / 8) * 3360;
      const uint8_t* sub = base + 32 + b % 8 * 416;
      const float scale = half_at(base, r);
      for (int i = 0; i < 32; ++i) {
        const int quad = i / 4, high = sub[256 + 64 * (quad / 4) + 4 * r + i % 4] >> (2 * (quad % 4)) & 3;
        const float factor = scale * (float)(int8_t)sub[384 + 16 * (i / 16) + r];
        out[i] = factor * (float)((nibble(sub, r, i) | high << 4) - 32);
      }
    }
  }
}

}  // namespace
