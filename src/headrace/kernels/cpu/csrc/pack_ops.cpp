// GGUF blocks into the kernels' layout (linear.h) and single rows of it back to floats. Packing moves bits and changes no value.
#include <cstring>

#include "ops.h"

namespace headrace {
namespace {

// 32 values 0..15 in the order of `value(i)` -> nibbles at `out` + 64 * (quad % 4) + 4 * r
template <class Value>
void put_nibbles(uint8_t* out, int64_t r, const Value& value) {
  for (int i = 0; i < 16; ++i) out[64 * (i / 4) + 4 * r + i % 4] = static_cast<uint8_t>(value(i) | value(i + 16) << 4);
}

void put_half(uint8_t* out, int64_t r, const uint8_t* half) { std::memcpy(out + 2 * r, half, 2); }

// bits: 32 of them, one a value
void put_fifth_bits(uint8_t* out, int64_t r, uint32_t bits) {
  for (int i = 0; i < 4; ++i) {
    int byte = 0;
    for (int quad = 0; quad < 8; ++quad) byte |= (bits >> (4 * quad + i) & 1) << quad;
    out[4 * r + i] = static_cast<uint8_t>(byte);
  }
}

// Q4_K, or with fifth bits Q5_K
void pack_shifted_k(const uint8_t* in, int64_t r, bool five, uint8_t* out) {
  put_half(out, r, in);
  put_half(out + 32, r, in + 2);
  const uint8_t* s = in + 4;  // 8 scales and 8 minima of 6 bits: four whole ones each, the rest in nibbles and the top bits of the first
  const int64_t bits = five ? 320 : 256;
  for (int sub = 0; sub < 8; ++sub) {
    uint8_t* to = out + 64 + (bits + 32) * sub;
    const uint8_t* values = in + (five ? 48 : 16) + sub / 2 * 32;  // two neighbouring sub-blocks share 32 bytes
    put_nibbles(to, r, [&](int i) { return values[i] >> (sub % 2 * 4) & 15; });
    if (five) {
      uint32_t high = 0;  // bit `sub` of 32 bytes
      for (int i = 0; i < 32; ++i) high |= static_cast<uint32_t>(in[16 + i] >> sub & 1) << i;
      put_fifth_bits(to + 256, r, high);
    }
    const int j = sub % 4;
    to[bits + r] = sub < 4 ? s[j] & 63 : static_cast<uint8_t>((s[8 + j] & 15) | (s[j] >> 6 << 4));
    to[bits + 16 + r] = sub < 4 ? s[4 + j] & 63 : static_cast<uint8_t>((s[8 + j] >> 4) | (s[4 + j] >> 6 << 4));
  }
}

// Sub-block `sub` of Q6_K: 32 values 0..63 and the scale factors of its halves
template <class Value>
void put_sixes(uint8_t* out, int64_t r, int sub, const Value& value, uint8_t first_factor, uint8_t second_factor) {
  uint8_t* to = out + 32 + 416 * sub;
  put_nibbles(to, r, [&](int i) { return value(i) & 15; });
  for (int v = 0; v < 2; ++v) {
    for (int i = 0; i < 4; ++i) {
      int pairs = 0;
      for (int quad = 0; quad < 4; ++quad) pairs |= value(16 * v + 4 * quad + i) >> 4 << (2 * quad);
      to[256 + 64 * v + 4 * r + i] = static_cast<uint8_t>(pairs);
    }
  }
  to[384 + r] = first_factor;
  to[400 + r] = second_factor;
}

void pack_q6_k(const uint8_t* in, int64_t r, uint8_t* out) {
  put_half(out, r, in + 208);
  for (int sub = 0; sub < 8; ++sub) {
    const int half = sub / 4, part = sub % 4;  // 128 values: 64 bytes of low nibbles, 32 bytes of bit pairs
    const uint8_t *low = in + 64 * half + 32 * (part % 2), *high = in + 128 + 32 * half;
    const auto value = [&](int i) { return (low[i] >> (part / 2 * 4) & 15) | (high[i] >> (2 * part) & 3) << 4; };
    put_sixes(out, r, sub, value, in[192 + 2 * sub], in[192 + 2 * sub + 1]);
  }
}

// As Q6_K: values -4..3 become 28..35, of which that format takes 32 off, and the scale factors of 6 bits become bytes.
void pack_q3_k(const uint8_t* in, int64_t r, uint8_t* out) {
  put_half(out, r, in + 108);
  const uint8_t *high = in, *low = in + 32, *scales = in + 96;
  const auto factor = [&](int i) {
    const int nibble = scales[i % 8] >> (i / 8 * 4) & 15, pair = scales[8 + i % 4] >> (i / 4 * 2) & 3;
    return static_cast<uint8_t>((nibble | pair << 4) - 32);
  };
  for (int sub = 0; sub < 8; ++sub) {
    const auto value = [&](int i) { return (low[32 * (sub / 4) + i] >> (2 * (sub % 4)) & 3) + (high[i] >> sub & 1 ? 32 : 28); };
    put_sixes(out, r, sub, value, factor(2 * sub), factor(2 * sub + 1));
  }
}

// One block of row r of a group.
void pack_block(int64_t format, const uint8_t* in, int64_t r, uint8_t* out) {
  switch (format) {
    case kF32: std::memcpy(out + 4 * r, in, 4); break;
    case kF16:
    case kBF16: put_half(out, r, in); break;
    case kQ4_0:
      put_half(out + 256, r, in);
      for (int j = 0; j < 4; ++j) std::memcpy(out + 64 * j + 4 * r, in + 2 + 4 * j, 4);  // byte i holds values i and i + 16 already
      break;
    case kQ4_1:
      put_half(out + 256, r, in);
      put_half(out + 288, r, in + 2);
      for (int j = 0; j < 4; ++j) std::memcpy(out + 64 * j + 4 * r, in + 4 + 4 * j, 4);
      break;
    case kQ5_0:
    case kQ5_1: {
      const int64_t halves = format == kQ5_1 ? 2 : 1;
      uint32_t high;
      std::memcpy(&high, in + 2 * halves, 4);
      for (int j = 0; j < 4; ++j) std::memcpy(out + 64 * j + 4 * r, in + 2 * halves + 4 + 4 * j, 4);
      put_fifth_bits(out + 256, r, high);
      for (int64_t i = 0; i < halves; ++i) put_half(out + 320 + 32 * i, r, in + 2 * i);
      break;
    }
    case kQ8_0:
      put_half(out + 512, r, in);
      for (int j = 0; j < 8; ++j) std::memcpy(out + 64 * j + 4 * r, in + 2 + 4 * j, 4);
      break;
    case kQ3_K: pack_q3_k(in, r, out); break;
    case kQ4_K:
    case kQ5_K: pack_shifted_k(in, r, format == kQ5_K, out); break;
    case kQ6_K: pack_q6_k(in, r, out); break;
  }
}

}  // namespace

FormatSize format_size(int64_t format) {
  switch (format) {
    case kF32: return {1, 4, 64};
    case kF16:
    case kBF16: return {1, 2, 32};
    case kQ4_0: return {32, 18, 288};
    case kQ4_1: return {32, 20, 320};
    case kQ5_0: return {32, 22, 352};
    case kQ5_1: return {32, 24, 384};
    case kQ8_0: return {32, 34, 544};
    case kQ3_K: return {256, 110, 3360};
    case kQ4_K: return {256, 144, 2368};
    case kQ5_K: return {256, 176, 2880};
    case kQ6_K: return {256, 210, 3360};
    default: STD_TORCH_CHECK(false, "headrace_cpu: format ", format, " is not supported");
  }
}

// raw: uint8, the blocks of [rows, columns] -> out: uint8, as large as packed_bytes says; rows that are missing in the last group are zeros
void pack_(const Tensor& packed, const Tensor& raw, int64_t format, int64_t rows, int64_t columns) {
  const FormatSize size = format_size(format);
  check_dense(raw, "raw");
  STD_TORCH_CHECK(rows > 0 && columns > 0 && columns % size.values == 0, "headrace_cpu: [", rows, ", ", columns, "] is no whole number of blocks of ",
                  size.values);
  const int64_t blocks = columns / size.values, groups = (rows + kGroupRows - 1) / kGroupRows;
  STD_TORCH_CHECK(raw.scalar_type() == ScalarType::Byte && raw.numel() == rows * blocks * size.bytes, "headrace_cpu: the blocks of a weight [", rows,
                  ", ", columns, "] take ", rows * blocks * size.bytes, " bytes, not ", raw.numel());
  check_dense(packed, "packed");
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte && packed.numel() == groups * blocks * size.group_bytes, "headrace_cpu: a packed weight [",
                  rows, ", ", columns, "] takes ", groups * blocks * size.group_bytes, " bytes");
  const auto* in = static_cast<const uint8_t*>(raw.const_data_ptr());
  auto* out = static_cast<uint8_t*>(packed.mutable_data_ptr());
  parallel_items(groups, 4, [&](int64_t first, int64_t last) {
    for (int64_t group = first; group < last; ++group) {
      const int64_t filled = rows - group * kGroupRows < kGroupRows ? rows - group * kGroupRows : kGroupRows;
      for (int64_t block = 0; block < blocks; ++block) {
        uint8_t* to = out + (group * blocks + block) * size.group_bytes;
        if (filled < kGroupRows) std::memset(to, 0, static_cast<size_t>(size.group_bytes));
        for (int64_t r = 0; r < filled; ++r) pack_block(format, in + ((group * kGroupRows + r) * blocks + block) * size.bytes, r, to);
      }
    }
  });
}

// rows of a packed table by id, float32
Tensor embedding(const Tensor& ids, const Tensor& packed, int64_t format, int64_t rows, int64_t columns) {
  const Weight weight = weight_of(packed, format, rows, columns);
  check_dense(ids, "ids");
  STD_TORCH_CHECK(ids.scalar_type() == ScalarType::Long && ids.dim() == 1, "headrace_cpu: ids must be int64 [T]");
  const auto* id = static_cast<const int64_t*>(ids.const_data_ptr());
  const int64_t n = ids.numel(), sizes[2] = {n, columns};
  Tensor y = new_tensor(sizes, 2, ScalarType::Float);
  float* to = static_cast<float*>(y.mutable_data_ptr());
  parallel_items(n, 32, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      STD_TORCH_CHECK(0 <= id[i] && id[i] < rows, "headrace_cpu: id ", id[i], " is outside of a table with ", rows, " rows");
      kernels().unpack_row(weight.data, format, id[i], columns, to + i * columns);
    }
  });
  return y;
}

}  // namespace headrace
