// Activations to whole numbers: blocks of 32 values, of 8 bits each, with a scale of their own. A few channels of a model are far larger than
// the others, and would leave nothing of the other values of their block. So where four neighbours (a "quad") hold a value that is more than
// kOutlier times all others, that quad gets 16 bits, and the scale is made for the others.
// A NaN or infinity in a block makes its scale one, so it reaches every output of its row and no other row.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

constexpr float kNarrow = 127, kWide = 127 * 256;  // largest numbers of 8 and 16 bits: both bytes stay within -127 .. 127

constexpr float kOutlier = 2.0f;

// largest: magnitude of a block, second: of its quads but the one that holds the largest. NaN reaches the scale.
inline float scale_of(float largest, float second) {
  if (!(largest > kOutlier * second)) return largest / kNarrow;
  const float narrow = second / kNarrow, wide = largest / kWide;
  return narrow > wide ? narrow : wide;
}
inline float inverse_of(float largest, float scale) { return largest < 1e-30f ? 0.0f : 1.0f / scale; }

#if defined(__AVX2__)

inline void store_32(const __m256i* n, int8_t* q) {
  const __m256i ab = _mm256_packs_epi32(n[0], n[1]), cd = _mm256_packs_epi32(n[2], n[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works within 128-bit halves
  _mm256_storeu_si256((__m256i*)q, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order));
}

inline int32_t sum_of_16(__m256i a, __m256i b) {
  const __m256i pairs = _mm256_add_epi32(a, b);
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

inline __m256i quad_maximum(__m256i x) {  // in all lanes of each 128 bits
  x = _mm256_max_epi32(x, _mm256_shuffle_epi32(x, 0x4e));
  return _mm256_max_epi32(x, _mm256_shuffle_epi32(x, 0xb1));
}

inline int32_t maximum_of_8(__m256i x) {
  x = quad_maximum(x);
  return _mm_cvtsi128_si32(_mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}

inline float float_of(int32_t bits) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(bits))); }

inline headrace::BlockInfo quantize_block(const float* x, int8_t* q, float* rest) {
  __m256 v[4];
  __m256i m[4];  // magnitudes compare as integers, where NaN is larger than all
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    m[i] = quad_maximum(_mm256_and_si256(_mm256_castps_si256(v[i]), _mm256_set1_epi32(0x7fffffff)));
  }
  const __m256i mixed = _mm256_blend_epi32(_mm256_blend_epi32(m[0], m[1], 0x22), _mm256_blend_epi32(m[2], m[3], 0x88), 0xcc);
  const __m256i quads = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  const int32_t largest = maximum_of_8(quads);
  const int32_t wide = __builtin_ctz((unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(quads, _mm256_set1_epi32(largest)))));
  const __m256i is_wide = _mm256_cmpeq_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(wide));
  const int32_t second = maximum_of_8(_mm256_andnot_si256(is_wide, quads));
  const float scale = scale_of(float_of(largest), float_of(second));
  const __m256 inverse = _mm256_set1_ps(inverse_of(float_of(largest), scale));
  __m256i upper[4], lower[4], whole[4];
  for (int i = 0; i < 4; ++i) {  // 256 * upper + lower; a lower byte of -128 becomes -127, for not every product takes it
    const __m256i n = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    upper[i] = _mm256_srai_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(128)), 8);
    lower[i] = _mm256_max_epi32(_mm256_sub_epi32(n, _mm256_slli_epi32(upper[i], 8)), _mm256_set1_epi32(-127));
    whole[i] = _mm256_add_epi32(_mm256_slli_epi32(upper[i], 8), lower[i]);
    if (rest) _mm256_storeu_ps(rest + 8 * i, _mm256_fnmadd_ps(_mm256_cvtepi32_ps(whole[i]), _mm256_set1_ps(scale), v[i]));
  }
  int8_t uppers[32];
  store_32(upper, uppers);
  store_32(lower, q);
  const int32_t first_half = sum_of_16(whole[0], whole[1]), second_half = sum_of_16(whole[2], whole[3]), sum = first_half + second_half;
  headrace::BlockInfo info = {scale, scale * (float)sum, sum, {first_half, second_half}, wide, 0};
  memcpy(&info.upper, uppers + 4 * wide, 4);
  return info;
}

#else

inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits & 0x7fffffff;
}

inline headrace::BlockInfo quantize_block(const float* x, int8_t* q, float* rest) {
  float quads[8], largest = -1.0f, second = 0.0f;
  int32_t wide = 0;
  for (int j = 0; j < 8; ++j) {
    quads[j] = fabsf(x[4 * j]);
    for (int i = 1; i < 4; ++i)
      if (bits_of(x[4 * j + i]) > bits_of(quads[j])) quads[j] = fabsf(x[4 * j + i]);
    if (largest == -1.0f || bits_of(quads[j]) > bits_of(largest)) largest = quads[j], wide = j;
  }
  for (int j = 0; j < 8; ++j)
    if (j != wide && bits_of(quads[j]) > bits_of(second)) second = quads[j];
  const float scale = scale_of(largest, second), inverse = inverse_of(largest, scale);
  headrace::BlockInfo info = {scale, 0.0f, 0, {0, 0}, wide, 0};
  int8_t uppers[4] = {0, 0, 0, 0};
  for (int i = 0; i < 32; ++i) {
    const float scaled = x[i] * inverse;
    const int32_t whole = scaled == scaled ? (int32_t)nearbyintf(scaled) : 0, upper = (whole + 128) >> 8;
    const int32_t lower = whole - upper * 256 > -127 ? whole - upper * 256 : -127;
    q[i] = (int8_t)lower;
    if (i / 4 == wide) uppers[i % 4] = (int8_t)upper;
    info.half_sums[i / 16] += 256 * upper + lower;
    if (rest) rest[i] = x[i] - (float)(256 * upper + lower) * scale;
  }
  memcpy(&info.upper, uppers, 4);
  info.sum = info.half_sums[0] + info.half_sums[1];
  info.scaled_sum = scale * (float)info.sum;
  return info;
}

#endif

void quantize(const float* x, int64_t m, int64_t k, int8_t* q, headrace::BlockInfo* info, float* rest) {
  for (int64_t block = 0; block < m * (k / headrace::kBlock); ++block)
    info[block] = quantize_block(x + 32 * block, q + 32 * block, rest ? rest + 32 * block : nullptr);
}

void quantize_tile(const float* x, int64_t rows, int64_t k, int64_t block, float* rest, headrace::ByteTile* out) {
  out->wide = 0;
  for (int64_t row = 0; row < headrace::kByteTileRows; ++row) {
    headrace::BlockInfo info = {};
    if (row < rows) info = quantize_block(x + row * k + 32 * block, out->lower[row], rest ? rest + row * k + 32 * block : nullptr);
    out->scale[row] = info.scale;
    out->scaled_sum[row] = info.scaled_sum;
    out->sum[row] = info.sum;
    if (info.upper == 0) continue;
    if (out->wide == 0) memset(out->upper, 0, sizeof out->upper);
    out->wide |= 1u << row;
    memcpy(out->upper[row] + 4 * info.wide, &info.upper, 4);
  }
}

}  // namespace
