// Activations to 16 bits: blocks of 32 values, scale = largest magnitude / 32512. 8 bits, one byte of these, would move a model's logits by
// several percent, for a few of its channels are far larger than the others.
// A NaN or infinity in a block makes its scale one, so it reaches every output of its row and no other row.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

constexpr float kLargest = 127 * 256;  // the upper byte stays within -127 .. 127, and so does the lower one: see split()

#if defined(__AVX2__)

// q = 256 * upper + lower with a lower byte of -128 .. 127; -128 becomes -127, for not every product takes it
inline void split(__m256i q, __m256i* upper, __m256i* lower) {
  *upper = _mm256_srai_epi32(_mm256_add_epi32(q, _mm256_set1_epi32(128)), 8);
  *lower = _mm256_max_epi32(_mm256_sub_epi32(q, _mm256_slli_epi32(*upper, 8)), _mm256_set1_epi32(-127));
}

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

inline headrace::BlockInfo quantize_block(const float* x, int8_t* q) {
  __m256 v[4];
  // magnitudes compare as integers, where NaN is larger than all
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(v[i]), _mm256_set1_epi32(0x7fffffff)));
  }
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  const float magnitude = _mm_cvtss_f32(_mm_castsi128_ps(m));
  const __m256 inverse = _mm256_set1_ps(magnitude < 1e-30f ? 0.0f : kLargest / magnitude);
  __m256i upper[4], lower[4], whole[4];
  for (int i = 0; i < 4; ++i) {
    split(_mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse)), upper + i, lower + i);
    whole[i] = _mm256_add_epi32(_mm256_slli_epi32(upper[i], 8), lower[i]);
  }
  store_32(upper, q);
  store_32(lower, q + 32);
  const int32_t first = sum_of_16(whole[0], whole[1]), second = sum_of_16(whole[2], whole[3]);
  const float scale = magnitude / kLargest;
  return {scale, scale * (float)(first + second), first + second, {first, second}};
}

#else

inline headrace::BlockInfo quantize_block(const float* x, int8_t* q) {
  float magnitude = 0.0f;
  for (int i = 0; i < 32; ++i) {
    const float m = fabsf(x[i]);
    if (!(m <= magnitude)) magnitude = m;
    if (magnitude != magnitude) break;
  }
  const float inverse = magnitude < 1e-30f ? 0.0f : kLargest / magnitude;
  int32_t sums[2] = {0, 0};
  for (int i = 0; i < 32; ++i) {
    const float scaled = x[i] * inverse;
    const int32_t whole = scaled == scaled ? (int32_t)nearbyintf(scaled) : 0, upper = (whole + 128) >> 8;
    const int32_t lower = whole - upper * 256 > -127 ? whole - upper * 256 : -127;
    q[i] = (int8_t)upper;
    q[32 + i] = (int8_t)lower;
    sums[i / 16] += 256 * upper + lower;
  }
  const float scale = magnitude / kLargest;
  return {scale, scale * (float)(sums[0] + sums[1]), sums[0] + sums[1], {sums[0], sums[1]}};
}

#endif

void quantize(const float* x, int64_t m, int64_t k, int8_t* q, headrace::BlockInfo* info) {
  for (int64_t block = 0; block < m * (k / headrace::kBlock); ++block) info[block] = quantize_block(x + 32 * block, q + 64 * block);
}

}  // namespace
