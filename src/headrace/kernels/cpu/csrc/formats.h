// How weights of GGUF blocks lie packed, and how a block of them meets a block of activations.
//
// Packed weight: rows in groups of 16, a group's blocks one after the other along K. Within a block the 16 rows are interleaved by four
// values (a "quad"), so that one 32-bit lane of a vector holds four neighbouring values of one row, as multiply-add instructions want it:
//   quad j of a block of bytes:    64 bytes at 64 * j, byte 4 * row + i is value 4 * j + i of the row
//   nibbles: quads j and j + 4 are the low and high halves of the bytes at 64 * j
//   fifth bits: 64 bytes, bit j of byte 4 * row + i belongs to value 4 * j + i of the row
//   scales:  16 numbers, one a row
// The weight is never unpacked as a whole, and no row becomes larger than in the file, but for K blocks (of 4 bits by 3 %: their 6-bit scales are
// bytes here; of 3 bits twofold: they are kept as Q6_K, which holds them exactly).
//
// A Block reads W rows (from `lane` on) of one block of 32 values, once. add() then serves any number of activation rows; finish() is its end, for
// who has made the whole-numbered sum of weights and activations already.
#pragma once

#include "block_dot.h"
#include "kernels.h"
#include "simd.h"

namespace {

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

// The sum of a block's weights times its activations, whole.
template <int Bits>
inline I dot_block(const B* w, const int8_t* x, const BlockInfo& info) {
  const I sum = dot_bytes<Bits, 8>(w, x);
  return __builtin_expect(info.upper != 0, 0) ? int_add(sum, dot_upper<Bits>(w[info.wide], info.upper)) : sum;
}

template <int Factor>
inline I times(I x) {
  return Factor == 0 ? int_set1(0) : int_mul(x, int_set1(Factor));
}

// Bits, and what is taken off a value: (value - Offset) * scale
template <int Offset>
struct PlainScale {
  F scale;
  inline F finish(F sum, I dot, F x_scale, F, I x_sum) const { return fma(to_f(int_sub(dot, times<Offset>(x_sum))), scale * x_scale, sum); }
  inline F finish(F sum, I dot, const BlockInfo& info) const {
    return fma(to_f(int_sub(dot, int_set1(Offset * info.sum))), scale * set1(info.scale), sum);
  }
};
template <int Bits, int Offset>
struct Plain : PlainScale<Offset> {  // nibbles 256, of 5 bits: fifth bits 64; scales 32
  static constexpr int kBits = Bits;
  static constexpr int64_t kValues = 32, kScales = Bits == 5 ? 320 : 256, kBytes = kScales + 32;
  B w[8];
  Plain(const uint8_t* group, int64_t block, int lane) {
    const uint8_t* base = group + block * kBytes;
    if constexpr (Bits == 5) {
      load_fives(base, lane, w);
    } else {
      load_nibbles(base, lane, w);
    }
    this->scale = load_scales(base + kScales, lane);
  }
  inline F add(F sum, const int8_t* x, const BlockInfo& info) const { return this->finish(sum, dot_block<Bits>(w, x, info), info); }
};
using Q4_0 = Plain<4, 8>;
using Q5_0 = Plain<5, 16>;

struct ShiftedScale {
  F scale, minimum;
  inline F finish(F sum, I dot, F x_scale, F x_scaled_sum, I) const { return fma(to_f(dot), scale * x_scale, fma(minimum, x_scaled_sum, sum)); }
  inline F finish(F sum, I dot, const BlockInfo& info) const { return finish(sum, dot, set1(info.scale), set1(info.scaled_sum), int_set1(0)); }
};
template <int Bits>
struct Shifted : ShiftedScale {  // nibbles 256, of 5 bits: fifth bits 64; scales 32, minima 32: value * scale + minimum
  static constexpr int kBits = Bits;
  static constexpr int64_t kValues = 32, kScales = Bits == 5 ? 320 : 256, kBytes = kScales + 64;
  B w[8];
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
  inline F add(F sum, const int8_t* x, const BlockInfo& info) const { return finish(sum, dot_block<Bits>(w, x, info), info); }
};
using Q4_1 = Shifted<4>;
using Q5_1 = Shifted<5>;

struct Q8_0 : PlainScale<kSignedOffset> {  // bytes 512, scales 32: value * scale
  static constexpr int kBits = 8;
  static constexpr int64_t kValues = 32, kBytes = 544;
  B w[8];
  Q8_0(const uint8_t* group, int64_t block, int lane) {
    const uint8_t* base = group + block * kBytes;
    for (int j = 0; j < 8; ++j) w[j] = prepare_signed(load_bytes(base + 64 * j + 4 * lane));
    scale = load_scales(base + 512, lane);
  }
  inline F add(F sum, const int8_t* x, const BlockInfo& info) const { return finish(sum, dot_block<8>(w, x, info), info); }
};

template <int Bits>
struct ShiftedK : ShiftedScale {
  // of 256 values: scales 32, minima 32; 8 times: nibbles 256, of 5 bits: fifth bits 64; scale factors 16, minimum factors 16
  static constexpr int kBits = Bits;
  static constexpr int64_t kValues = 256, kFactors = Bits == 5 ? 320 : 256, kSubBytes = kFactors + 32, kBytes = 64 + 8 * kSubBytes;
  B w[8];
  ShiftedK(const uint8_t* group, int64_t block, int lane) {
    const uint8_t* base = group + block / 8 * kBytes;
    const uint8_t* sub = base + 64 + block % 8 * kSubBytes;
    if constexpr (Bits == 5) {
      load_fives(sub, lane, w);
    } else {
      load_nibbles(sub, lane, w);
    }
    scale = load_scales(base, lane) * load_u8(sub + kFactors + lane);
    minimum = load_scales(base + 32, lane) * (load_u8(sub + kFactors + 16 + lane) * set1(-1.0f));
  }
  inline F add(F sum, const int8_t* x, const BlockInfo& info) const { return finish(sum, dot_block<Bits>(w, x, info), info); }
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
    I first = int_sub(dot_bytes<6, 4>(w, x), int_set1(32 * info.half_sums[0]));
    I second = int_sub(dot_bytes<6, 4>(w + 4, x + 16), int_set1(32 * info.half_sums[1]));
    if (__builtin_expect(info.upper != 0, 0)) {
      const I wide = dot_upper<6>(w[info.wide], info.upper);
      (info.wide < 4 ? first : second) = int_add(info.wide < 4 ? first : second, wide);
    }
    return fma(fma(to_f(second), factors[1], to_f(first) * factors[0]), set1(info.scale), sum);
  }
};

}  // namespace
