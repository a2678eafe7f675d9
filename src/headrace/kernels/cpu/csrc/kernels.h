// What one instruction set offers. `kernels.cpp` is compiled to one library for each, with other
// flags; `ops.cpp` computes with the table of the one in use.
//
// All arithmetic is float32; other dtypes are converted at the edges. The kernels know no threads: a caller names the part to compute.
// The floating point steps of an output element depend on its own row and position only, never on what else a call computes.
#pragma once

#include <stdint.h>

namespace headrace {

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// The numbers that GGUF files write. Packed weights come in all of them but Q3_K, which is packed as Q6_K.
enum Format : int64_t { kF32 = 0, kF16 = 1, kBF16 = 30, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8, kQ3_K = 11, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14 };

constexpr int64_t kGroupRows = 16;    // output rows that lie interleaved in a packed weight
constexpr int64_t kBlock = 32;        // values of an activation that share a scale
constexpr int64_t kRowsAtOnce = 120;  // most activation rows of one call of `linear`: a whole number of all tiles, and they fit the caches

// Of 32 quantised values q of one activation row: x ~ q * scale. Their lower bytes lie apart; q = 256 * upper + lower, and at most the four values
// of one quad have upper bytes.
struct BlockInfo {
  float scale;
  float scaled_sum;      // scale * sum(q)
  int32_t sum;           // sum(q)
  int32_t half_sums[2];  // sum(q[0:16]), sum(q[16:32])
  int32_t wide;          // the quad: values 4 * wide .. 4 * wide + 3
  int32_t upper;         // their upper bytes; 0 where there are none
};

// A block of up to 16 activation rows, quantised, for products by tiles of bytes (byte_tiles.h). Rows that are not there have a scale of 0.
constexpr int64_t kByteTileRows = 16;
struct alignas(64) ByteTile {
  int8_t lower[kByteTileRows][32], upper[kByteTileRows][32];  // upper: 0 but in the rows' wide quads; not set where `wide` is 0
  float scale[kByteTileRows], scaled_sum[kByteTileRows];
  int32_t sum[kByteTileRows];
  uint32_t wide;  // bits: of rows with upper bytes
};

struct Linear {
  const uint8_t* weight;  // packed, see linear.h
  int64_t format;
  int64_t rows;           // N
  int64_t columns;        // K, a multiple of the format's block
  const float* floats;    // [M, K], arranged, for weights in floating point
  const int8_t* x;        // [M, K] quantised, lower bytes, for the others
  const BlockInfo* info;  // [M, K / 32]
  const ByteTile* tiles;  // [M / 16, K / 32] instead of both, or null
  const float* bias;      // [N] or null
  float* out;             // [M, out_stride]
  int64_t out_stride;
  bool accumulate;  // out += instead of out =
};

// Products in bfloat16 by tiles, for the tokens of prompts; see tile_linear.h for the order of x and of what is gated.
struct TileLinear {
  const uint8_t* weight;  // packed, in any format but kF32
  int64_t format;
  int64_t rows;           // N
  int64_t columns;        // K
  const uint16_t* x;      // [M, K]
  int64_t count;          // M
  const int32_t* tokens;  // [M] the row of `out` that each row of x goes to
  const float* bias;      // [N] or null
  float* out;             // [.., out_stride]
  int64_t out_stride;
  bool accumulate;
  uint16_t* gated;  // not null: instead of `out`, silu of the first half of N times the second, [M, N / 2]; N / 2 is a multiple of 32 then
};
constexpr int64_t kTileBlock = 32;  // rows of a block of activations, and outputs of a pair of weight groups

constexpr int64_t kPart = 512;         // positions whose softmax is merged as one; parts start at multiples of it
constexpr int64_t kScoreStride = kPart + 16;  // of rows of scores by tiles; a power of two would crowd a few sets of the nearest cache

// Floats that tile_attention_part needs as scratch: keys and values of a part, 32 queries and their scores
constexpr int64_t tile_attention_scratch(int64_t head_dim) {
  const int64_t depth = (head_dim + 31) / 32 * 32;
  return (kPart * (depth + head_dim) + 32 * depth) / 2 + 32 * kScoreStride;
}

constexpr int64_t kScratchRows = 128;  // of head_dim floats that attention_part needs as scratch, and one more for each state

struct Attention {
  const float* q;       // [T, H, D]
  const void* k_cache;  // [blocks, block_size, KH, D]
  const void* v_cache;
  Dtype cache_dtype;
  int64_t block_size, num_heads, num_kv_heads, head_dim;
  float scale;
  int64_t window;  // positions a token sees, its own included; 0: all
  float softcap;   // 0: none
};

struct KernelTable {
  const char* name;
  // floats [M, K] -> int8 [M, K], info [M, K / 32]; rest, where it is not null: [M, K], what rounding took off. x may be rest.
  void (*quantize)(const float* x, int64_t m, int64_t k, int8_t* q, BlockInfo* info, float* rest);
  // Block `block` of `rows` rows, at most kByteTileRows, into a tile; rest as above
  void (*quantize_tile)(const float* x, int64_t rows, int64_t k, int64_t block, float* rest, ByteTile* out);
  int64_t fewest_tile_rows;  // from so many rows on `linear` wants tiles of bytes, but for weights of Q6_K; 0: never
  // For weights in floating point: the next tile of `rows` activation rows [rows, K], of which there are ceil(rows / float_columns), into the
  // order that `linear` reads. Called with the rows that one call of `linear` takes; a single row stays as it is.
  void (*arrange)(const float* x, int64_t rows, int64_t k, int64_t tile, float* out);
  int64_t float_columns;
  // rows of groups [first_group, last_group) for activation rows [first, last)
  void (*linear)(const Linear& args, int64_t first_group, int64_t last_group, int64_t first, int64_t last);
  // null where there are no tiles: pairs of groups (of gate and up, where it is gated) for blocks of 32 activation rows.
  // panel: 1024 * ceil(K / 32) values for each pair, aligned
  void (*tile_linear)(const TileLinear& args, int64_t first_pair, int64_t last_pair, int64_t first_block, int64_t last_block, uint16_t* panel);
  // float32 [K] to a row of activations for tile_linear
  void (*to_tiles)(const float* x, int64_t k, int64_t row, uint16_t* tiles);
  // one row of a packed weight -> float32 [K]
  void (*unpack_row)(const uint8_t* weight, int64_t format, int64_t row, int64_t k, float* out);
  // Positions [part * kPart, ...) of one row's context for its tokens [first, last), whose positions start at `position` for `first`, and
  // key/value heads [first_head, last_head). state_stride apart, by head, token and query head of the group: D sums, maximum, denominator.
  void (*attention_part)(const Attention& args, const int32_t* blocks, int64_t first_head, int64_t last_head, int64_t part, int64_t first,
                         int64_t last, int64_t position, float* state, int64_t state_stride, float* scratch);
  // The same for each token by itself, from caches of 16-bit values.
  void (*decode_attention_part)(const Attention& args, const int32_t* blocks, int64_t first_head, int64_t last_head, int64_t part, int64_t first,
                                int64_t last, int64_t position, float* state, int64_t state_stride, float* scratch);
  // The same as attention_part with products in bfloat16; null where there are no tiles. scratch: tile_attention_scratch floats, aligned to a cache line
  void (*tile_attention_part)(const Attention& args, const int32_t* blocks, int64_t first_head, int64_t last_head, int64_t part, int64_t first,
                              int64_t last, int64_t position, float* state, int64_t state_stride, float* scratch);
  // `into` takes up the state of the part that follows its own
  void (*attention_fold)(float* into, const float* next, int64_t head_dim);
  void (*attention_finish)(const float* state, int64_t head_dim, float* out);
  void (*rms_norm)(const float* x, const float* weight, float eps, int64_t size, float* out);
  void (*silu_mul)(const float* gate, const float* up, int64_t size, float* out);
  // out = x * cos + (halves of x swapped) * sin over the first `rotary` values, the rest copied
  void (*rotate)(const float* x, const float* cos, const float* sin, int64_t rotary, int64_t head_dim, float* out);
  void (*to_float)(const void* x, Dtype dtype, int64_t n, float* out);
  // saturate: what a float16 can't hold becomes the largest it can (65504), not infinity
  void (*from_float)(const float* x, Dtype dtype, int64_t n, void* out, bool saturate);
};

}  // namespace headrace

// Exported by the library of each instruction set.
extern "C" const headrace::KernelTable* headrace_kernels();
