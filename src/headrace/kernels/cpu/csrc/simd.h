// One vector of float32 (F), one of bytes (B) and one of int32 (I), as wide as the instruction set has them.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)

using F = __m512;
using B = __m512i;
using I = __m512i;
constexpr int W = 16;
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F vmax(F a, F b) { return _mm512_max_ps(a, b); }
inline F vmin(F a, F b) { return _mm512_min_ps(a, b); }
inline F vround(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F power_of_two(F n) {  // 2 ** n for whole n
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline F zero_where_less(F p, F x, float bound) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set1(bound), _CMP_NLT_UQ), p); }
inline F to_f(I x) { return _mm512_cvtepi32_ps(x); }
inline F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_half(uint16_t* p, F x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
inline F load_bfloat(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline F load_u8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline B load_bytes(const void* p) { return _mm512_loadu_si512(p); }
inline B byte_and(B a, B b) { return _mm512_and_si512(a, b); }
inline B byte_or(B a, B b) { return _mm512_or_si512(a, b); }
inline B byte_set1(int x) { return _mm512_set1_epi8((char)x); }
template <int N>
inline B shift_right(B a) {
  return _mm512_srli_epi16(a, N);
}
template <int N>
inline B shift_left(B a) {
  return _mm512_slli_epi16(a, N);
}
inline I int_set1(int x) { return _mm512_set1_epi32(x); }
inline I int_sub(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I int_add(I a, I b) { return _mm512_add_epi32(a, b); }
inline I int_mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
inline I load_s8(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }

#elif defined(__AVX2__)

using F = __m256;
using B = __m256i;
using I = __m256i;
constexpr int W = 8;
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F set1(float x) { return _mm256_set1_ps(x); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F vmax(F a, F b) { return _mm256_max_ps(a, b); }
inline F vmin(F a, F b) { return _mm256_min_ps(a, b); }
inline F vround(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F power_of_two(F n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)); }
inline F zero_where_less(F p, F x, float bound) { return _mm256_and_ps(_mm256_cmp_ps(x, set1(bound), _CMP_NLT_UQ), p); }
inline F to_f(I x) { return _mm256_cvtepi32_ps(x); }
inline F load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store_half(uint16_t* p, F x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
inline F load_bfloat(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F load_u8(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
inline B load_bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline B byte_and(B a, B b) { return _mm256_and_si256(a, b); }
inline B byte_or(B a, B b) { return _mm256_or_si256(a, b); }
inline B byte_set1(int x) { return _mm256_set1_epi8((char)x); }
template <int N>
inline B shift_right(B a) {
  return _mm256_srli_epi16(a, N);
}
template <int N>
inline B shift_left(B a) {
  return _mm256_slli_epi16(a, N);
}
inline I int_set1(int x) { return _mm256_set1_epi32(x); }
inline I int_sub(I a, I b) { return _mm256_sub_epi32(a, b); }
inline I int_add(I a, I b) { return _mm256_add_epi32(a, b); }
inline I int_mul(I a, I b) { return _mm256_mullo_epi32(a, b); }
inline I load_s8(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }

#else  // the compiler's own vectors, for any machine

typedef float F __attribute__((vector_size(32)));
typedef uint8_t B __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
constexpr int W = 8;
#define HEADRACE_EACH(expression)                  \
  F r;                                             \
  for (int i = 0; i < W; ++i) r[i] = (expression); \
  return r
inline F load(const float* p) {
  F r;
  memcpy(&r, p, sizeof r);
  return r;
}
inline void store(float* p, F x) { memcpy(p, &x, sizeof x); }
inline F set1(float x) { HEADRACE_EACH(x); }
#ifdef __FP_FAST_FMAF
inline F fma(F a, F b, F c) { HEADRACE_EACH(__builtin_fmaf(a[i], b[i], c[i])); }
#else
inline F fma(F a, F b, F c) { return a * b + c; }
#endif
inline F vmax(F a, F b) { HEADRACE_EACH(a[i] > b[i] ? a[i] : b[i]); }
inline F vmin(F a, F b) { HEADRACE_EACH(a[i] < b[i] ? a[i] : b[i]); }
inline F vround(F a) { HEADRACE_EACH(nearbyintf(a[i])); }
inline F power_of_two(F n) { HEADRACE_EACH(n[i] == n[i] ? ldexpf(1.0f, (int)n[i]) : n[i]); }
inline F zero_where_less(F p, F x, float bound) { HEADRACE_EACH(x[i] < bound ? 0.0f : p[i]); }
inline F to_f(I x) { HEADRACE_EACH((float)x[i]); }
inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  if (exponent == 0) {  // zero and subnormal numbers: fraction * 2 ** -24
    const float magnitude = (float)fraction * 5.9604644775390625e-8f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
  float r;
  memcpy(&r, &bits, 4);
  return r;
}
inline uint16_t float_to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000u) return sign | 0x7e00;   // not a number
  if (bits >= 0x477ff000u) return sign | 0x7c00;  // rounds to infinity
  float magnitude;
  memcpy(&magnitude, &bits, 4);
  if (bits < 0x38800000u) return sign | (uint16_t)nearbyintf(magnitude * 16777216.0f);  // subnormal: steps of 2 ** -24
  bits += 0xfff + ((bits >> 13) & 1);
  return sign | (uint16_t)((bits - 0x38000000u) >> 13);
}
inline F load_half(const uint16_t* p) { HEADRACE_EACH(half_to_float(p[i])); }
inline void store_half(uint16_t* p, F x) {
  for (int i = 0; i < W; ++i) p[i] = float_to_half(x[i]);
}
inline F load_bfloat(const uint16_t* p) {
  uint32_t bits[W];
  for (int i = 0; i < W; ++i) bits[i] = (uint32_t)p[i] << 16;
  F r;
  memcpy(&r, bits, sizeof r);
  return r;
}
inline F load_u8(const uint8_t* p) { HEADRACE_EACH((float)p[i]); }
inline B load_bytes(const void* p) {
  B r;
  memcpy(&r, p, sizeof r);
  return r;
}
inline B byte_and(B a, B b) { return a & b; }
inline B byte_or(B a, B b) { return a | b; }
inline B byte_set1(int x) { return B{} + (uint8_t)x; }
template <int N>
inline B shift_right(B a) {
  return a >> N;
}
template <int N>
inline B shift_left(B a) {
  return a << N;
}
inline I int_set1(int x) { return I{} + x; }
inline I int_sub(I a, I b) { return a - b; }
inline I int_add(I a, I b) { return a + b; }
inline I int_mul(I a, I b) { return a * b; }
inline I load_s8(const int8_t* p) {
  I r;
  for (int i = 0; i < W; ++i) r[i] = p[i];
  return r;
}

#endif

// Halves of a vector onto each other until one lane is left.
#if defined(__AVX2__)
inline __m128 upper_half(__m128 x) { return _mm_movehl_ps(x, x); }
inline __m128 second_lane(__m128 x) { return _mm_shuffle_ps(x, x, 1); }
#if defined(__AVX512F__)
inline __m256 lower(F x) { return _mm512_castps512_ps256(x); }
inline __m256 upper(F x) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)); }
inline __m256 sum_to_8(F x) { return _mm256_add_ps(lower(x), upper(x)); }
inline __m256 max_to_8(F x) { return _mm256_max_ps(lower(x), upper(x)); }
#else
inline __m256 sum_to_8(F x) { return x; }
inline __m256 max_to_8(F x) { return x; }
#endif
inline float lane_sum(F x) {
  const __m256 eight = sum_to_8(x);
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  sum = _mm_add_ps(sum, upper_half(sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, second_lane(sum)));
}
inline float lane_max(F x) {
  const __m256 eight = max_to_8(x);
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  most = _mm_max_ps(most, upper_half(most));
  return _mm_cvtss_f32(_mm_max_ss(most, second_lane(most)));
}
#else
inline float lane_sum(F x) {
  for (int step = W / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) x[i] += x[i + step];
  return x[0];
}
inline float lane_max(F x) {
  for (int step = W / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) x[i] = x[i] > x[i + step] ? x[i] : x[i + step];
  return x[0];
}
#endif

// W vectors of W numbers: rows become columns.
#if defined(__AVX2__)
inline void transpose_8(__m256* r) {
  __m256 a[8], b[8];
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
    b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
    b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
    b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}
#endif
inline void transpose(F* rows) {
#if defined(__AVX512F__)
  __m256 quarters[4][8];  // by half of the rows, by half of the columns
  for (int i = 0; i < 16; ++i) {
    quarters[i / 8 * 2][i % 8] = lower(rows[i]);
    quarters[i / 8 * 2 + 1][i % 8] = upper(rows[i]);
  }
  for (int q = 0; q < 4; ++q) transpose_8(quarters[q]);
  for (int i = 0; i < 16; ++i) {
    const __m512 low = _mm512_castps256_ps512(quarters[i / 8][i % 8]);
    rows[i] = _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(low), _mm256_castps_pd(quarters[2 + i / 8][i % 8]), 1));
  }
#elif defined(__AVX2__)
  transpose_8(rows);
#else
  for (int i = 0; i < W; ++i)
    for (int j = i + 1; j < W; ++j) {
      const float x = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = x;
    }
#endif
}

// Lane i is the sum of the lanes of rows[i].
inline F lane_sums(const F* rows) {
#if defined(__AVX512F__)
  F four[4];  // of rows 4 i .. 4 i + 3, in each quarter the sums of it
  for (int i = 0; i < 4; ++i) {
    const F *r = rows + 4 * i, ab = _mm512_unpacklo_ps(r[0], r[1]) + _mm512_unpackhi_ps(r[0], r[1]);
    const F cd = _mm512_unpacklo_ps(r[2], r[3]) + _mm512_unpackhi_ps(r[2], r[3]);
    four[i] = _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
  }
  const F low = _mm512_shuffle_f32x4(four[0], four[1], 0x88) + _mm512_shuffle_f32x4(four[0], four[1], 0xdd);
  const F high = _mm512_shuffle_f32x4(four[2], four[3], 0x88) + _mm512_shuffle_f32x4(four[2], four[3], 0xdd);
  return _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd);
#elif defined(__AVX2__)
  F four[2];
  for (int i = 0; i < 2; ++i) {
    const F *r = rows + 4 * i, ab = _mm256_unpacklo_ps(r[0], r[1]) + _mm256_unpackhi_ps(r[0], r[1]);
    const F cd = _mm256_unpacklo_ps(r[2], r[3]) + _mm256_unpackhi_ps(r[2], r[3]);
    four[i] = _mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee);
  }
  return _mm256_permute2f128_ps(four[0], four[1], 0x20) + _mm256_permute2f128_ps(four[0], four[1], 0x31);
#else
  F sums = rows[0];
  for (int i = 0; i < W; ++i) sums[i] = lane_sum(rows[i]);
  return sums;
#endif
}

// e ** x to about one unit in the last place for x <= 88; 0 below -87; NaN stays NaN.
inline F vexp(F original) {
  const F x = vmax(set1(-87.0f), vmin(set1(88.0f), original));  // the second operand wins where one is NaN
  const F n = vround(x * set1(1.44269504088896341f));
  F r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r) + set1(1.0f);
  return zero_where_less(p * power_of_two(n), original, -87.0f);
}

}  // namespace
