// Activations to 8 bits: blocks of 32 values, scale = largest magnitude / 127. A NaN or infinity in a block makes its scale one, so it
// reaches every output of its row and no other row.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

inline headrace::BlockInfo block_info(float scale, int32_t first_half, int32_t second_half) {
  const int32_t sum = first_half + second_half;
  return {scale, scale * (float)sum, sum, {(int16_t)first_half, (int16_t)second_half}};
}

#if defined(__AVX2__)

inline int32_t sum_of_16(__m128i bytes) {
  const __m256i pairs = _mm256_madd_epi16(_mm256_cvtepi8_epi16(bytes), _mm256_set1_epi16(1));
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
  const __m256 inverse = _mm256_set1_ps(magnitude < 1e-30f ? 0.0f : 127.0f / magnitude);
  __m256i n[4];
  for (int i = 0; i < 4; ++i) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
  const __m256i ab = _mm256_packs_epi32(n[0], n[1]), cd = _mm256_packs_epi32(n[2], n[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works within 128-bit halves
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order);
  _mm256_storeu_si256((__m256i*)q, bytes);
  return block_info(magnitude / 127.0f, sum_of_16(_mm256_castsi256_si128(bytes)), sum_of_16(_mm256_extracti128_si256(bytes, 1)));
}

#else

inline headrace::BlockInfo quantize_block(const float* x, int8_t* q) {
  float magnitude = 0.0f;
  for (int i = 0; i < 32; ++i) {
    const float m = fabsf(x[i]);
    if (!(m <= magnitude)) magnitude = m;
    if (magnitude != magnitude) break;
  }
  const float inverse = magnitude < 1e-30f ? 0.0f : 127.0f / magnitude;
  int32_t sums[2] = {0, 0};
  for (int i = 0; i < 32; ++i) {
    const float scaled = x[i] * inverse;
    q[i] = scaled == scaled ? (int8_t)nearbyintf(scaled) : (int8_t)-128;
    sums[i / 16] += q[i];
  }
  return block_info(magnitude / 127.0f, sums[0], sums[1]);
}

#endif

void quantize(const float* x, int64_t m, int64_t k, int8_t* q, headrace::BlockInfo* info) {
  for (int64_t block = 0; block < m * (k / headrace::kBlock); ++block) info[block] = quantize_block(x + 32 * block, q + 32 * block);
}

}  // namespace
