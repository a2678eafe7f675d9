// AMX tile registers, all eight of 16 rows of 64 bytes: 32 values of bfloat16 or 16 of float32 each.
#pragma once

#include <stdint.h>

#if defined(__AMX_BF16__)

#include <immintrin.h>

namespace {

constexpr int64_t kTileK = 32, kTileRows = 16, kTileValues = kTileRows * kTileK;  // of a tile of bfloat16
constexpr int kTileStride = 64;                                                   // bytes from a row to the next, of a tile alone

inline void configure_tiles() {
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  asm volatile("ldtilecfg %0" ::"m"(config));  // the compiler's intrinsic reads 8 bytes only, as far as the compiler knows
}

// What the compiler holds back must be in memory before tiles are loaded: loads don't say what they read.
inline void write_back() { asm volatile("" ::: "memory"); }

}  // namespace

#endif
