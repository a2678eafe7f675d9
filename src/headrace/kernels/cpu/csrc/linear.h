// y[M, N] = x[M, K] @ W[N, K]^T where W stays in its GGUF blocks and x is quantised to 16 bits in blocks of 32.
//
// Packed weight: rows in groups of 16, a group's blocks one after the other along K. Within a block the 16 rows are interleaved by four
// values (a "quad"), so that one 32-bit lane of a vector holds four neighbouring values of one row, as multiply-add instructions want it:
//   quad j of a block of bytes:    64 bytes at 64 * j, byte 4 * row + i is value 4 * j + i of the row
//   nibbles: quads j and j + 4 are the low and high halves of the bytes at 64 * j
//   fifth bits: 64 bytes, bit j of byte 4 * row + i belongs to value 4 * j + i of the row
//   scales:  16 numbers, one a row
// Nothing is unpacked to memory and no row becomes larger than in the file, but for K blocks (of 4 bits by 3 %: their 6-bit scales are bytes here;
// of 3 bits twofold: they are kept as Q6_K, which holds them exactly).
//
// The sum over a block is exact (integers); blocks are added up in order of K in float32 by fused multiply-adds.
#pragma once

#include "block_dot.h"
#include "float_linear.h"
#include "kernels.h"
#include "output_rows.h"
#include "simd.h"

namespace {

using headrace::BlockInfo;

// ---- formats. A Block reads W rows (from `lane` on) of one block of 32 values, once; add() then serves any number of activation rows.

inline void load_nibbles(const uint8_t* base, int lane, B* w) {
  const B low = byte_set1(15);
  for (int j = 0; j < 4; ++j) {
    const B packed = load_bytes(base + 64 * j + 4 * lane);
    w[j] = byte_and(packed, low);
    w[j + 4] = byte_and(shift_right<4>(packed), low);
  }
}

inline void load_fives(const uint8_t* base, int lane, B* w) {  // nibbles 256, fifth bits 64
  load_nibbles(base, lane, w);
  const B high = load_bytes(base + 256 + 4 * lane), bit = byte_set1(16);
  w[0] = byte_or(w[0], byte_and(shift_left<4>(high), bit));
  w[1] = byte_or(w[1], byte_and(shift_left<3>(high), bit));
  w[2] = byte_or(w[2], byte_and(shift_left<2>(high), bit));
  w[3] = byte_or(w[3], byte_and(shift_left<1>(high), bit));
  w[4] = byte_or(w[4], byte_and(high, bit));
  w[5] = byte_or(w[5], byte_and(shift_right<1>(high), bit));
  w[6] = byte_or(w[6], byte_and(shift_right<2>(high), bit));
  w[7] = byte_or(w[7], byte_and(shift_right<3>(high), bit));
}

inline F load_scales(const uint8_t* base, int lane) { return load_half((const uint16_t*)base + lane); }

// Bits, and what is taken off a value: (value - Offset) * scale
template <int Bits, int Offset>
struct Plain {  // nibbles 256, of 5 bits: fifth bits 64; scales 32
  static constexpr int64_t kValues = 32, kScales = Bits == 5 ? 320 : 256, kBytes = kScales + 32;
  B w[8];
  F scale;
  Plain(const uint8_t* group, int64_t block, int lane) {
    const uint8_t* base = group + block * kBytes;
    if constexpr (Bits == 5) {
      load_fives(base, lane, w);
    } else {
      load_nibbles(base, lane, w);
    }
    scale = load_scales(base + kScales, lane);
  }
  inline F add(F sum, const int8_t* x, const BlockInfo& info) const {
    return fma(to_f(int_sub(dot_unsigned<Bits, 8>(w, x), int_set1(Offset * info.sum))), scale * set1(info.scale), sum);
  }
};
using Q4_0 = Plain<4, 8>;
using Q5_0 = Plain<5, 16>;

template <int Bits>
struct Shifted {  // nibbles 256, of 5 bits: fifth bits 64; scales 32, minima 32: value * scale + minimum
  static constexpr int64_t kValues = 32, kScales = Bits == 5 ? 320 : 256, kBytes = kScales + 64;
  B w[8];
  F scale, minimum;
  Shifted(const uint8_t* group, int64_t block, int lane) {
    const uint8_t* base = group + block * kBytes;
    if constexpr (Bits == 5) {
      load_fives(base, lane, w);
    } else {
      load_nibbles(base, lane, w);
    }
    scale = load_scales(base + kScales, lane);
    minimum = load_scales(base + kScales + 32, lane);
  }
  inline F add(F sum, const int8_t* x, const BlockInfo& info) const {
    sum = fma(minimum, set1(info.scaled_sum), sum);
    return fma(to_f(dot_unsigned<Bits, 8>(w, x)), scale * set1(info.scale), sum);
  }
};
using Q4_1 = Shifted<4>;
using Q5_1 = Shifted<5>;

struct Q8_0 {  // bytes 512, scales 32: value * scale
  static constexpr int64_t kValues = 32, kBytes = 544;
  B w[8];
  F scale;
  Q8_0(const uint8_t* group, int64_t block, int lane) {
    const uint8_t* base = group + block * kBytes;
    for (int j = 0; j < 8; ++j) w[j] = prepare_signed(load_bytes(base + 64 * j + 4 * lane));
    scale = load_scales(base + 512, lane);
  }
  inline F add(F sum, const int8_t* x, const BlockInfo& info) const { return fma(to_f(dot_signed(w, x, info.sum)), scale * set1(info.scale), sum); }
};

template <int Bits>
struct ShiftedK {  // of 256 values: scales 32, minima 32; 8 times: nibbles 256, of 5 bits: fifth bits 64; scale factors 16, minimum factors 16
  static constexpr int64_t kValues = 256, kFactors = Bits == 5 ? 320 : 256, kSubBytes = kFactors + 32, kBytes = 64 + 8 * kSubBytes;
  B w[8];
  F scale, minimum;
  ShiftedK(const uint8_t* group, int64_t block, int lane) {
    const uint8_t* base = group + block / 8 * kBytes;
    const uint8_t* sub = base + 64 + block % 8 * kSubBytes;
    if constexpr (Bits == 5) {
      load_fives(sub, lane, w);
    } else {
      load_nibbles(sub, lane, w);
    }
    scale = load_scales(base, lane) * load_u8(sub + kFactors + lane);
    minimum = load_scales(base + 32, lane) * load_u8(sub + kFactors + 16 + lane);
  }
  inline F add(F sum, const int8_t* x, const BlockInfo& info) const {
    sum = fma(minimum, set1(-info.scaled_sum), sum);
    return fma(to_f(dot_unsigned<Bits, 8>(w, x)), scale * set1(info.scale), sum);
  }
};
using Q4_K = ShiftedK<4>;
using Q5_K = ShiftedK<5>;

struct Q6_K {  // of 256 values: scales 32; 8 times: low nibbles 256, high bit pairs 128, scale factors of both halves 2 * 16
  static constexpr int64_t kValues = 256, kBytes = 3360;
  B w[8];
  F factors[2];
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
      factors[v] = load_scales(base, lane) * to_f(load_s8((const int8_t*)sub + 384 + 16 * v + lane));
    }
  }
  inline F add(F sum, const int8_t* x, const BlockInfo& info) const {
    const I first = int_sub(dot_unsigned<6, 4>(w, x), int_set1(32 * info.half_sums[0]));
    const I second = int_sub(dot_unsigned<6, 4>(w + 4, x + 16), int_set1(32 * info.half_sums[1]));
    return fma(fma(to_f(second), factors[1], to_f(first) * factors[0]), set1(info.scale), sum);
  }
};

// ---- loops

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
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      const Format block(weight, b, lane + v * W);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[v][c] = block.add(sum[v][c], x + 2 * (c * a.columns + b * kBlock), info[c * blocks + b]);
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
    case headrace::kQ5_0: return linear_of<Q5_0>(a, first_group, last_group, first, last);
    case headrace::kQ5_1: return linear_of<Q5_1>(a, first_group, last_group, first, last);
    case headrace::kQ8_0: return linear_of<Q8_0>(a, first_group, last_group, first, last);
    case headrace::kQ4_K: return linear_of<Q4_K>(a, first_group, last_group, first, last);
    case headrace::kQ5_K: return linear_of<Q5_K>(a, first_group, last_group, first, last);
    case headrace::kQ6_K: return linear_of<Q6_K>(a, first_group, last_group, first, last);
  }
}

}  // namespace
