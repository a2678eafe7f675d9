// Sums over one block of 32 values, or half of one: W rows (lanes) of whole-numbered weights, in quads as linear.h describes them, times
// activations as quantize.h makes them: a byte each, and at times a second, upper byte for the four values of one quad. Exact.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using headrace::BlockInfo;
using headrace::kBlock;

// w: `Quads` quads of weights of `Bits` bits, unsigned, or signed for 8 bits, as prepare_signed left them. x: their lower bytes
template <int Bits, int Quads>
inline I dot_bytes(const B* w, const int8_t* x);
// The same of all 8 quads for V vectors of rows times C activation rows, `stride` bytes apart.
template <int Bits, int V, int C>
inline void dot_columns(const B* const* w, const int8_t* x, int64_t stride, I (&sums)[V][C]);
// 256 times one quad of weights times upper bytes
template <int Bits>
inline I dot_upper(const B& w, int32_t upper);
inline B prepare_signed(B w);
// kSignedOffset: what prepare_signed added to each weight

#if defined(__AVX512F__)
inline I times_256(I x) { return _mm512_slli_epi32(x, 8); }
inline B broadcast_quad(const int8_t* x) {
  int32_t quad;
  memcpy(&quad, x, 4);
  return int_set1(quad);
}
#elif defined(__AVX2__)
inline I times_256(I x) { return _mm256_slli_epi32(x, 8); }
inline B broadcast_quad(const int8_t* x) {
  int32_t quad;
  memcpy(&quad, x, 4);
  return int_set1(quad);
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

constexpr int kSignedOffset = 128;  // the instruction takes one operand unsigned
inline B prepare_signed(B w) { return flip_sign_bits(w); }
template <int Bits, int Quads>
inline I dot_bytes(const B* w, const int8_t* x) {
  I sum = int_set1(0);
#pragma GCC unroll 8
  for (int j = 0; j < Quads; ++j) sum = dot_step(sum, w[j], broadcast_quad(x + 4 * j));
  return sum;
}
template <int Bits, int V, int C>
inline void dot_columns(const B* const* w, const int8_t* x, int64_t stride, I (&sums)[V][C]) {
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const B quad = broadcast_quad(x + c * stride + 4 * j);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[v][c] = dot_step(j == 0 ? int_set1(0) : sums[v][c], w[v][j], quad);
    }
}
template <int Bits>
inline I dot_upper(const B& w, int32_t upper) {
  return times_256(dot_step(int_set1(0), w, int_set1(upper)));
}

#elif defined(__AVX2__)

constexpr int kSignedOffset = 0;
inline B prepare_signed(B w) { return w; }
inline I widen(B sums, int factor) { return _mm256_madd_epi16(sums, _mm256_set1_epi16((int16_t)factor)); }

// Products of N quads, added up in 16 bits.
template <int N>
inline B chain(const B* w, const int8_t* x) {
  B sum = _mm256_maddubs_epi16(w[0], broadcast_quad(x));
#pragma GCC unroll 8
  for (int j = 1; j < N; ++j) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[j], broadcast_quad(x + 4 * j)));
  return sum;
}
// |w| * (x with w's sign): a pair makes at most 2 * 128 * 127
inline B signed_pairs(B w, B x) { return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)); }

// As many quads fit 16 bits as make at most 2 products of 15 * 127 (8 quads), 31 * 127 (4) or 63 * 127 (2) each. One chain after the other, for
// the weights of a block fill half of the registers.
template <int Bits, int Quads>
inline I dot_bytes(const B* w, const int8_t* x) {
  if constexpr (Bits == 8) {
    I sum = widen(signed_pairs(w[0], broadcast_quad(x)), 1);
#pragma GCC unroll 8
    for (int j = 1; j < Quads; ++j) sum = _mm256_add_epi32(sum, widen(signed_pairs(w[j], broadcast_quad(x + 4 * j)), 1));
    return sum;
  } else {
    constexpr int n = Bits == 4 ? 8 : Bits == 5 ? 4 : 2;
    static_assert(Bits <= 6 && Quads % n == 0, "sums of 16 bits would overflow");
    I sum = widen(chain<n>(w, x), 1);
#pragma GCC unroll 8
    for (int first = n; first < Quads; first += n) sum = _mm256_add_epi32(sum, widen(chain<n>(w + first, x + 4 * first), 1));
    return sum;
  }
}
template <int Bits, int V, int C>
inline void dot_columns(const B* const* w, const int8_t* x, int64_t stride, I (&sums)[V][C]) {
  constexpr int n = Bits == 4 ? 8 : Bits == 5 ? 4 : Bits == 6 ? 2 : 1;  // quads whose products are added up in 16 bits
#pragma GCC unroll 8
  for (int first = 0; first < 8; first += n) {
    B chains[V][C];
#pragma GCC unroll 8
    for (int j = first; j < first + n; ++j)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) {
        const B quad = broadcast_quad(x + c * stride + 4 * j);
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
          const B pairs = Bits == 8 ? signed_pairs(w[v][j], quad) : _mm256_maddubs_epi16(w[v][j], quad);
          chains[v][c] = j == first ? pairs : _mm256_add_epi16(chains[v][c], pairs);
          asm volatile("" : "+x"(chains[v][c]));  // or else the compiler makes all products first, and has no registers for them
        }
      }
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) sums[v][c] = first == 0 ? widen(chains[v][c], 1) : _mm256_add_epi32(sums[v][c], widen(chains[v][c], 1));
  }
}
template <int Bits>
inline I dot_upper(const B& w, int32_t upper) {
  const B x = int_set1(upper);
  return widen(Bits == 8 ? signed_pairs(w, x) : _mm256_maddubs_epi16(w, x), 256);
}

#else

constexpr int kSignedOffset = 0;
inline B prepare_signed(B w) { return w; }
template <class T>
__attribute__((noinline)) I dot_quads(const B* w, const int8_t* x, int quads) {  // slow to compile in many copies
  I sum = int_set1(0);
  for (int j = 0; j < quads; ++j) {
    T bytes[sizeof(B)];
    memcpy(bytes, &w[j], sizeof(B));
    for (int lane = 0; lane < W; ++lane)
      for (int i = 0; i < 4; ++i) sum[lane] += (int32_t)bytes[4 * lane + i] * x[4 * j + i];
  }
  return sum;
}
template <int Bits, int Quads>
inline I dot_bytes(const B* w, const int8_t* x) {
  return Bits == 8 ? dot_quads<int8_t>(w, x, Quads) : dot_quads<uint8_t>(w, x, Quads);
}
template <int Bits, int V, int C>
inline void dot_columns(const B* const* w, const int8_t* x, int64_t stride, I (&sums)[V][C]) {
  for (int c = 0; c < C; ++c)
    for (int v = 0; v < V; ++v) sums[v][c] = dot_bytes<Bits, 8>(w[v], x + c * stride);
}
template <int Bits>
inline I dot_upper(const B& w, int32_t upper) {
  return dot_bytes<Bits, 1>(&w, (const int8_t*)&upper) * 256;
}

#endif

}  // namespace
