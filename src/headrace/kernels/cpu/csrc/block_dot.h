// Sums over one block of 32 values, or half of one: W rows (lanes) of whole-numbered weights, in quads as linear.h describes them, times 16-bit
// activations in upper and lower bytes as quantize.h makes them. Exact.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using headrace::kBlock;

// w: `Quads` quads of unsigned weights of `Bits` bits. x: the upper bytes, and kBlock further the lower ones.
template <int Bits, int Quads>
inline I dot_unsigned(const B* w, const int8_t* x);
// 8 quads of signed bytes, as prepare_signed left them. x_sum: of the 32 activations
inline I dot_signed(const B* w, const int8_t* x, int32_t x_sum);
inline B prepare_signed(B w);

#if defined(__AVX512F__)
inline I times_256(I x) { return _mm512_slli_epi32(x, 8); }
inline B broadcast_quad(const int8_t* x) {
  int32_t quad;
  memcpy(&quad, x, 4);
  return _mm512_set1_epi32(quad);
}
#elif defined(__AVX2__)
inline I times_256(I x) { return _mm256_slli_epi32(x, 8); }
inline B broadcast_quad(const int8_t* x) {
  int32_t quad;
  memcpy(&quad, x, 4);
  return _mm256_set1_epi32(quad);
}
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
inline I dot_step(I sum, B w, B x) { return _mm512_dpbusd_epi32(sum, w, x); }
inline B flip_sign_bits(B w) { return _mm512_xor_si512(w, byte_set1(-128)); }
#define HEADRACE_DOT_STEP
#elif defined(__AVXVNNI__)
inline I dot_step(I sum, B w, B x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
inline B flip_sign_bits(B w) { return _mm256_xor_si256(w, byte_set1(-128)); }
#define HEADRACE_DOT_STEP
#endif

#if defined(HEADRACE_DOT_STEP)

template <int Bits, int Quads>
inline I dot_unsigned(const B* w, const int8_t* x) {
  I upper = int_set1(0), lower = int_set1(0);
#pragma GCC unroll 8
  for (int j = 0; j < Quads; ++j) {
    upper = dot_step(upper, w[j], broadcast_quad(x + 4 * j));
    lower = dot_step(lower, w[j], broadcast_quad(x + kBlock + 4 * j));
  }
  return int_add(times_256(upper), lower);
}
// the instruction takes one operand unsigned: weight + 128
inline B prepare_signed(B w) { return flip_sign_bits(w); }
inline I dot_signed(const B* w, const int8_t* x, int32_t x_sum) { return int_sub(dot_unsigned<8, 8>(w, x), int_set1(128 * x_sum)); }

#elif defined(__AVX2__)

inline I widen(B sums, int factor) { return _mm256_madd_epi16(sums, _mm256_set1_epi16((int16_t)factor)); }

// Products of N quads, added up in 16 bits.
template <int N>
inline B chain(const B* w, const int8_t* x) {
  B sum = _mm256_maddubs_epi16(w[0], broadcast_quad(x));
#pragma GCC unroll 8
  for (int j = 1; j < N; ++j) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[j], broadcast_quad(x + 4 * j)));
  return sum;
}

// As many quads fit 16 bits as make at most 2 products of 15 * 127 (8 quads), 31 * 127 (4) or 63 * 127 (2) each. One chain after the other, for
// the weights of a block fill half of the registers.
template <int Bits, int Quads>
inline I dot_unsigned(const B* w, const int8_t* x) {
  constexpr int n = Bits == 4 ? 8 : Bits == 5 ? 4 : 2;
  static_assert(Bits <= 6 && Quads % n == 0, "sums of 16 bits would overflow");
  I sum = widen(chain<n>(w, x), 256);
#pragma GCC unroll 8
  for (int first = n; first < Quads; first += n) sum = _mm256_add_epi32(sum, widen(chain<n>(w + first, x + 4 * first), 256));
#pragma GCC unroll 8
  for (int first = 0; first < Quads; first += n) sum = _mm256_add_epi32(sum, widen(chain<n>(w + first, x + kBlock + 4 * first), 1));
  return sum;
}
inline B prepare_signed(B w) { return w; }
// |w| * (x with w's sign): a pair makes at most 2 * 128 * 127
inline I dot_signed(const B* w, const int8_t* x, int32_t) {
  I upper = _mm256_setzero_si256(), lower = upper;
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) {
    const B size = _mm256_abs_epi8(w[j]);
    upper = _mm256_add_epi32(upper, widen(_mm256_maddubs_epi16(size, _mm256_sign_epi8(broadcast_quad(x + 4 * j), w[j])), 1));
    lower = _mm256_add_epi32(lower, widen(_mm256_maddubs_epi16(size, _mm256_sign_epi8(broadcast_quad(x + kBlock + 4 * j), w[j])), 1));
  }
  return _mm256_add_epi32(times_256(upper), lower);
}

#else

template <class T>
__attribute__((noinline)) I dot_quads(const B* w, const int8_t* x, int quads) {  // slow to compile in many copies
  I sum = int_set1(0);
  for (int j = 0; j < quads; ++j) {
    T bytes[sizeof(B)];
    memcpy(bytes, &w[j], sizeof(B));
    for (int lane = 0; lane < W; ++lane)
      for (int i = 0; i < 4; ++i) sum[lane] += (int32_t)bytes[4 * lane + i] * (256 * x[4 * j + i] + x[kBlock + 4 * j + i]);
  }
  return sum;
}
template <int Bits, int Quads>
inline I dot_unsigned(const B* w, const int8_t* x) {
  return dot_quads<uint8_t>(w, x, Quads);
}
inline B prepare_signed(B w) { return w; }
inline I dot_signed(const B* w, const int8_t* x, int32_t) { return dot_quads<int8_t>(w, x, 8); }

#endif

}  // namespace
