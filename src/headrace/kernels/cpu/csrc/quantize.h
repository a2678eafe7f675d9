// Activations to small integers: blocks of 32 values, scale = largest magnitude / 127. Blocks that stand out of their row carry most of
// the error of rounding, for a few channels of a model are far larger than the others: those get a second byte, in steps of scale / 254.
// A NaN or infinity in a block makes its scale one, so it reaches every output of its row and no other row.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

constexpr float kFineAbove = 2.5f;  // times the row's root mean square

inline void fill_info(headrace::BlockInfo& info, float scale, bool fine, const int32_t* half_sums) {
  for (int part = 0; part < 2; ++part) {
    info.sums[part] = half_sums[2 * part] + half_sums[2 * part + 1];
    for (int half = 0; half < 2; ++half) info.half_sums[part][half] = (int16_t)half_sums[2 * part + half];
  }
  info.scale = scale;
  info.scaled_sum = scale * ((float)info.sums[0] + (float)info.sums[1] * (1.0f / headrace::kFineSteps));
  info.fine = fine;
}

#if defined(__AVX2__)

inline int32_t sum_of_16(__m128i bytes) {
  const __m256i pairs = _mm256_madd_epi16(_mm256_cvtepi8_epi16(bytes), _mm256_set1_epi16(1));
  __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

inline void store_32(const __m256i* n, int8_t* q, int32_t* half_sums) {
  const __m256i ab = _mm256_packs_epi32(n[0], n[1]), cd = _mm256_packs_epi32(n[2], n[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works within 128-bit halves
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order);
  _mm256_storeu_si256((__m256i*)q, bytes);
  half_sums[0] = sum_of_16(_mm256_castsi256_si128(bytes));
  half_sums[1] = sum_of_16(_mm256_extracti128_si256(bytes, 1));
}

inline void quantize_block(const float* x, float fine_above, int8_t* q, headrace::BlockInfo& info) {
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
  const bool fine = magnitude > fine_above;
  __m256i n[4];
  int32_t half_sums[4] = {0, 0, 0, 0};
  for (int i = 0; i < 4; ++i) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
  store_32(n, q, half_sums);
  if (fine) {
    const __m256 steps = _mm256_set1_ps((float)headrace::kFineSteps);
    for (int i = 0; i < 4; ++i) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_fmsub_ps(v[i], inverse, _mm256_cvtepi32_ps(n[i])), steps));
    store_32(n, q + 32, half_sums + 2);
  } else {
    memset(q + 32, 0, 32);
  }
  fill_info(info, magnitude / 127.0f, fine, half_sums);
}

#else

inline void quantize_block(const float* x, float fine_above, int8_t* q, headrace::BlockInfo& info) {
  float magnitude = 0.0f;
  for (int i = 0; i < 32; ++i) {
    const float m = fabsf(x[i]);
    if (!(m <= magnitude)) magnitude = m;
    if (magnitude != magnitude) break;
  }
  const float inverse = magnitude < 1e-30f ? 0.0f : 127.0f / magnitude;
  const bool fine = magnitude > fine_above;
  int32_t half_sums[4] = {0, 0, 0, 0};
  for (int i = 0; i < 32; ++i) {
    const float scaled = x[i] * inverse, whole = nearbyintf(scaled);
    q[i] = scaled == scaled ? (int8_t)whole : (int8_t)-128;
    q[32 + i] = fine && scaled == scaled ? (int8_t)nearbyintf((scaled - whole) * (float)headrace::kFineSteps) : (int8_t)0;
    half_sums[i / 16] += q[i];
    half_sums[2 + i / 16] += q[32 + i];
  }
  fill_info(info, magnitude / 127.0f, fine, half_sums);
}

#endif

void quantize(const float* x, int64_t m, int64_t k, int8_t* q, headrace::BlockInfo* info) {
  for (int64_t row = 0; row < m; ++row) {
    F squares = set1(0.0f);
    for (int64_t i = 0; i < k; i += W) squares = fma(load(x + row * k + i), load(x + row * k + i), squares);
    const float fine_above = kFineAbove * sqrtf(lane_sum(squares) / (float)k);
    for (int64_t block = row * (k / 32); block < (row + 1) * (k / 32); ++block) quantize_block(x + 32 * block, fine_above, q + 64 * block, info[block]);
  }
}

}  // namespace
