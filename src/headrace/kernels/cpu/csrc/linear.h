// y[M, N] = x[M, K] @ W[N, K]^T where W stays in its GGUF blocks and x is quantised to 8 bits in blocks of 32.
//
// Packed weight: rows in groups of 16, a group's blocks one after the other along K. Within a block the 16 rows are interleaved by four
// values (a "quad"), so that one 32-bit lane of a vector holds four neighbouring values of one row, as multiply-add instructions want it:
//   quad j of a block of bytes:    64 bytes at 64 * j, byte 4 * row + i is value 4 * j + i of the row
//   nibbles: quads j and j + 4 are the low and high halves of the bytes at 64 * j
//   scales:  16 numbers, one a row
// Nothing is unpacked to memory and no row becomes larger than in the file (K blocks of 4 bits by 3 %, for their 6-bit scales are bytes here).
//
// The sum over a block is exact (integers); blocks are added up in order of K in float32 by fused multiply-adds.
#pragma once

#include "float_linear.h"
#include "kernels.h"
#include "output_rows.h"
#include "simd.h"

namespace {

using headrace::BlockInfo;
using headrace::kBlock;

// ---- sums over one block: W rows (lanes), 8 quads of weights w against 32 values of x

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
inline B broadcast_quad(const int8_t* x) {
  int32_t quad;
  memcpy(&quad, x, 4);
  return _mm512_set1_epi32(quad);
}
inline I dot_step(I sum, B w, B x) { return _mm512_dpbusd_epi32(sum, w, x); }
#define HEADRACE_DOT_STEP
#elif defined(__AVXVNNI__)
inline I dot_step(I sum, B w, B x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#define HEADRACE_DOT_STEP
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
inline B broadcast_quad(const int8_t* x) {
  int32_t quad;
  memcpy(&quad, x, 4);
  return _mm256_set1_epi32(quad);
}
#endif

#if defined(HEADRACE_DOT_STEP)

// unsigned weights of up to 8 bits
inline I dot_unsigned(const B* w, const int8_t* x) {
  I even = int_set1(0), odd = int_set1(0);
  for (int j = 0; j < 8; j += 2) {
    even = dot_step(even, w[j], broadcast_quad(x + 4 * j));
    odd = dot_step(odd, w[j + 1], broadcast_quad(x + 4 * j + 4));
  }
  return int_add(even, odd);
}
inline I dot_nibbles(const B* w, const int8_t* x) { return dot_unsigned(w, x); }
// w holds value + 128, see prepare_signed
inline I dot_signed(const B* w, const int8_t* x, int32_t x_sum) { return int_sub(dot_unsigned(w, x), int_set1(128 * x_sum)); }
inline B prepare_signed(B w) {
#if defined(__AVX512F__)
  return _mm512_xor_si512(w, byte_set1(-128));
#else
  return _mm256_xor_si256(w, byte_set1(-128));
#endif
}
// 4 quads, values 0..63
inline I dot_half(const B* w, const int8_t* x) {
  I sum = int_set1(0);
  for (int j = 0; j < 4; ++j) sum = dot_step(sum, w[j], broadcast_quad(x + 4 * j));
  return sum;
}

#elif defined(__AVX2__)

// 16-bit sums can't overflow: 8 quads of 2 products of at most 15 * 127 each make 30480.
inline I dot_nibbles(const B* w, const int8_t* x) {
  B sum = _mm256_maddubs_epi16(w[0], broadcast_quad(x));
  for (int j = 1; j < 8; ++j) sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[j], broadcast_quad(x + 4 * j)));
  return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
}
// |w| * (x with w's sign): a pair makes at most 2 * 128 * 127 = 32512
inline I dot_signed(const B* w, const int8_t* x, int32_t) {
  const B ones = _mm256_set1_epi16(1);
  I sum = _mm256_setzero_si256();
  for (int j = 0; j < 8; ++j) {
    const B pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[j]), _mm256_sign_epi8(broadcast_quad(x + 4 * j), w[j]));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
  }
  return sum;
}
inline B prepare_signed(B w) { return w; }
// two quads of values up to 63 make at most 4 * 63 * 127 = 32004 in 16 bits
inline I dot_half(const B* w, const int8_t* x) {
  const B ones = _mm256_set1_epi16(1);
  const B a = _mm256_add_epi16(_mm256_maddubs_epi16(w[0], broadcast_quad(x)), _mm256_maddubs_epi16(w[1], broadcast_quad(x + 4)));
  const B b = _mm256_add_epi16(_mm256_maddubs_epi16(w[2], broadcast_quad(x + 8)), _mm256_maddubs_epi16(w[3], broadcast_quad(x + 12)));
  return _mm256_add_epi32(_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones));
}

#else

template <class T>
__attribute__((noinline)) I dot_quads(const B* w, const int8_t* x, int quads) {
  I sum = int_set1(0);
  for (int j = 0; j < quads; ++j) {
    T bytes[sizeof(B)];
    memcpy(bytes, &w[j], sizeof(B));
    for (int lane = 0; lane < W; ++lane)
      for (int i = 0; i < 4; ++i) sum[lane] += (int32_t)bytes[4 * lane + i] * x[4 * j + i];
  }
  return sum;
}
inline I dot_nibbles(const B* w, const int8_t* x) { return dot_quads<uint8_t>(w, x, 8); }
inline I dot_signed(const B* w, const int8_t* x, int32_t) { return dot_quads<int8_t>(w, x, 8); }
inline B prepare_signed(B w) { return w; }
inline I dot_half(const B* w, const int8_t* x) { return dot_quads<uint8_t>(w, x, 4); }

#endif

// ---- formats. A Block reads W rows (from `lane` on) of one block of 32 values, once; add() then serves any number of activation rows.

inline void load_nibbles(const uint8_t* base, int lane, B* w) {
  const B low = byte_set1(15);
  for (int j = 0; j < 4; ++j) {
    const B packed = load_bytes(base + 64 * j + 4 * lane);
    w[j] = byte_and(packed, low);
    w[j + 4] = byte_and(shift_right<4>(packed), low);
  }
}

inline F load_scales(const uint8_t* base, int lane) { return load_half((const uint16_t*)base + lane); }

struct Q4_0 {  // nibbles 256, scales 32: (value - 8) * scale
  static constexpr int64_t kValues = 32, kBytes = 288;
  B w[8];
  F scale;
  Q4_0(const uint8_t* group, int64_t block, int lane) {
    const uint8_t* base = group + block * kBytes;
    load_nibbles(base, lane, w);
    scale = load_scales(base + 256, lane);
  }
  inline I dot(const int8_t* x, int32_t sum, const int16_t*) const { return int_sub(dot_nibbles(w, x), int_set1(8 * sum)); }
  inline F add(F sum, F product, const BlockInfo& info) const { return fma(product, scale * set1(info.scale), sum); }
};

struct Q4_1 {  // nibbles 256, scales 32, minima 32: value * scale + minimum
  static constexpr int64_t kValues = 32, kBytes = 320;
  B w[8];
  F scale, minimum;
  Q4_1(const uint8_t* group, int64_t block, int lane) {
    const uint8_t* base = group + block * kBytes;
    load_nibbles(base, lane, w);
    scale = load_scales(base + 256, lane);
    minimum = load_scales(base + 288, lane);
  }
  inline I dot(const int8_t* x, int32_t, const int16_t*) const { return dot_nibbles(w, x); }
  inline F add(F sum, F product, const BlockInfo& info) const {
    return fma(product, scale * set1(info.scale), fma(minimum, set1(info.scaled_sum), sum));
  }
};

struct Q8_0 {  // bytes 512, scales 32: value * scale
  static constexpr int64_t kValues = 32, kBytes = 544;
  B w[8];
  F scale;
  Q8_0(const uint8_t* group, int64_t block, int lane) {
    const uint8_t* base = group + block * kBytes;
    for (int j = 0; j < 8; ++j) w[j] = prepare_signed(load_bytes(base + 64 * j + 4 * lane));
    scale = load_scales(base + 512, lane);
  }
  inline I dot(const int8_t* x, int32_t sum, const int16_t*) const { return dot_signed(w, x, sum); }
  inline F add(F sum, F product, const BlockInfo& info) const { return fma(product, scale * set1(info.scale), sum); }
};

struct Q4_K {  // of 256 values: scales 32, minima 32; 8 times: nibbles 256, scale factors 16, minimum factors 16
  static constexpr int64_t kValues = 256, kBytes = 2368;
  B w[8];
  F scale, minimum;
  Q4_K(const uint8_t* group, int64_t block, int lane) {
    const uint8_t* base = group + block / 8 * kBytes;
    const uint8_t* sub = base + 64 + block % 8 * 288;
    load_nibbles(sub, lane, w);
    scale = load_scales(base, lane) * load_u8(sub + 256 + lane);
    minimum = load_scales(base + 32, lane) * load_u8(sub + 272 + lane);
  }
  inline I dot(const int8_t* x, int32_t, const int16_t*) const { return dot_nibbles(w, x); }
  inline F add(F sum, F product, const BlockInfo& info) const {
    return fma(product, scale * set1(info.scale), fma(minimum, set1(-info.scaled_sum), sum));
  }
};

struct Q6_K {  // of 256 values: scales 32; 8 times: low nibbles 256, high bit pairs 128, scale factors of both halves 2 * 16
  static constexpr int64_t kValues = 256, kBytes = 3360;
  B w[8];
  F scale;
  I factors[2];
  Q6_K(const uint8_t* group, int64_t block, int lane) {
    const uint8_t* base = group + block / 8 * kBytes;
    const uint8_t* sub = base + 32 + block % 8 * 416;
    load_nibbles(sub, lane, w);
    const B pair = byte_set1(3);
    for (int v = 0; v < 2; ++v) {  // 64 bytes hold the high bits of quads 4v .. 4v + 3
      const B high = load_bytes(sub + 256 + 64 * v + 4 * lane);
      w[4 * v] = byte_or(w[4 * v], shift_left<4>(byte_and(high, pair)));
      w[4 * v + 1] = byte_or(w[4 * v + 1], shift_left<4>(byte_and(shift_right<2>(high), pair)));
      w[4 * v + 2] = byte_or(w[4 * v + 2], shift_left<4>(byte_and(shift_right<4>(high), pair)));
      w[4 * v + 3] = byte_or(w[4 * v + 3], shift_left<4>(byte_and(shift_right<6>(high), pair)));
      factors[v] = load_s8((const int8_t*)sub + 384 + 16 * v + lane);
    }
    scale = load_scales(base, lane);
  }
  inline I dot(const int8_t* x, int32_t, const int16_t* half_sums) const {
    const I first = int_sub(dot_half(w, x), int_set1(32 * half_sums[0]));
    const I second = int_sub(dot_half(w + 4, x + 16), int_set1(32 * half_sums[1]));
    return int_add(int_mul(first, factors[0]), int_mul(second, factors[1]));
  }
  inline F add(F sum, F product, const BlockInfo& info) const { return fma(product, scale * set1(info.scale), sum); }
};

// ---- loops

// One block of W rows times one block of each of C activation rows. A row that is not fine adds the same whether or not another one is.
template <class Format, int C, bool Fine>
inline void add_block(const Format& weight, const int8_t* x, int64_t x_stride, const BlockInfo* info, int64_t info_stride, F* sum) {
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    const BlockInfo& block = info[c * info_stride];
    F product = to_f(weight.dot(x + c * x_stride, block.sums[0], block.half_sums[0]));
    if constexpr (Fine) {
      const F fine = to_f(weight.dot(x + c * x_stride + kBlock, block.sums[1], block.half_sums[1]));
      product = fma(fine, set1(1.0f / headrace::kFineSteps), product);
    }
    sum[c] = weight.add(sum[c], product, block);
  }
}

// V vectors of rows times C activation rows, all of K; sums stay in registers. The first tile of a group asks for the weights that follow.
template <class Format, int V, int C>
inline void tile(const headrace::Linear& a, int64_t group, int lane, int64_t first, bool fetch) {
  const int64_t blocks = a.columns / kBlock;
  const uint8_t* weight = a.weight + group * (a.columns / Format::kValues * Format::kBytes);
  const int8_t* x = a.x + 2 * first * a.columns;
  const BlockInfo* info = a.info + first * blocks;
  F sum[V][C];
  for (int v = 0; v < V; ++v)
    for (int c = 0; c < C; ++c) sum[v][c] = set1(0.0f);
  for (int64_t b = 0; b < blocks; ++b) {
    if (fetch) {
      constexpr int64_t bytes = Format::kBytes * kBlock / Format::kValues;
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(weight + b * bytes + kFetchAhead + i, 0, 2);
    }
    int32_t fine = 0;
    for (int c = 0; c < C; ++c) fine |= info[c * blocks + b].fine;
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Format block(weight, b, lane + v * W);
      if (fine) {
        add_block<Format, C, true>(block, x + 2 * b * kBlock, 2 * a.columns, info + b, blocks, sum[v]);
      } else {
        add_block<Format, C, false>(block, x + 2 * b * kBlock, 2 * a.columns, info + b, blocks, sum[v]);
      }
    }
  }
  for (int v = 0; v < V; ++v)
    for (int c = 0; c < C; ++c) put_rows(a, group * kGroupRows + lane + v * W, first + c, sum[v][c]);
}

#if defined(__AVX512F__)
constexpr int kColumns = 8;
#else
constexpr int kColumns = 4;  // 8 registers hold weights, 4 sums
#endif

template <class Format, int C>
inline void group_rows(const headrace::Linear& a, int64_t group, int64_t first, bool fetch) {
  constexpr int vectors = kGroupRows / W;
  if constexpr (C <= 2) {
    tile<Format, vectors, C>(a, group, 0, first, fetch);
  } else {
    for (int v = 0; v < vectors; ++v) tile<Format, 1, C>(a, group, v * W, first, fetch && v == 0);
  }
}

template <class Format>
void linear_of(const headrace::Linear& a, int64_t first_group, int64_t last_group, int64_t first, int64_t last) {
  for (int64_t group = first_group; group < last_group; ++group) {
    int64_t m = first;
    for (; m + kColumns <= last; m += kColumns) group_rows<Format, kColumns>(a, group, m, m == first);
    if constexpr (kColumns > 4) {
      if (m + 4 <= last) {
        group_rows<Format, 4>(a, group, m, m == first);
        m += 4;
      }
    }
    switch (last - m) {
      case 3: group_rows<Format, 3>(a, group, m, m == first); break;
      case 2: group_rows<Format, 2>(a, group, m, m == first); break;
      case 1: group_rows<Format, 1>(a, group, m, m == first); break;
    }
  }
}

void linear(const headrace::Linear& a, int64_t first_group, int64_t last_group, int64_t first, int64_t last) {
  switch (a.format) {
    case headrace::kF32: return float_linear<Float32>(a, first_group, last_group, first, last);
    case headrace::kF16: return float_linear<Float16>(a, first_group, last_group, first, last);
    case headrace::kBF16: return float_linear<BFloat16>(a, first_group, last_group, first, last);
    case headrace::kQ4_0: return linear_of<Q4_0>(a, first_group, last_group, first, last);
    case headrace::kQ4_1: return linear_of<Q4_1>(a, first_group, last_group, first, last);
    case headrace::kQ8_0: return linear_of<Q8_0>(a, first_group, last_group, first, last);
    case headrace::kQ4_K: return linear_of<Q4_K>(a, first_group, last_group, first, last);
    case headrace::kQ6_K: return linear_of<Q6_K>(a, first_group, last_group, first, last);
  }
}

}  // namespace
