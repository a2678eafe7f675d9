// What the machine can do at most, with all threads at once: bytes read, multiply-adds of 4-bit weights with 8-bit activations, float32
// multiply-adds, multiply-adds of bfloat16 tiles (0 without them); each in billions a second. Compiled by roofline.py with the flags of the kernels
// and against their headers, so that the instructions are those that the kernels use.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "block_dot.h"
#include "simd.h"
#include "tiles.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int kChains = 12;  // independent sums: an instruction takes as long as about ten can start. Unrolled, or else they wait in memory
constexpr int kReads = 8;    // vectors of a step of reading
constexpr int64_t kBufferBytes = int64_t{256} << 20;

// The compiler can't know what a value was, and must make it.
template <class T>
inline void keep(T& x) {
#if defined(__AVX2__)
  asm volatile("" : "+x"(x));
#else
  asm volatile("" : "+m"(x));
#endif
}

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Most units a second of several rounds in which all threads do `amount` each.
double peak(int threads, int rounds, double amount, const std::function<void(int)>& work) {
  double best = 0.0;
  for (int round = 0; round < rounds; ++round) {
    std::atomic<int> ready{0};
    std::vector<std::thread> others;
    const auto together = [&](int thread) {
      ready.fetch_add(1);
      while (ready.load() < threads) std::this_thread::yield();
      work(thread);
    };
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(together, thread);
    const double start = seconds();
    together(0);
    for (std::thread& other : others) other.join();
    best = std::max(best, amount * threads / (seconds() - start));
  }
  return best;
}

void read_all(const float* buffer, int64_t bytes) {
  F sums[kReads];
  for (F& sum : sums) sum = set1(0.0f);
  for (int64_t i = 0; i < bytes / 4; i += kReads * W)
    for (int j = 0; j < kReads; ++j) sums[j] = vmax(sums[j], load(buffer + i + j * W));
  for (F& sum : sums) keep(sum);
}

void multiply_bytes(int64_t steps) {
  B weights = byte_set1(7), x = byte_set1(3);
  I sums[kChains];
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) sums[j] = int_set1(0);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
#if defined(HEADRACE_DOT_STEP)
      sums[j] = dot_step(sums[j], weights, x);
#elif defined(__AVX2__)
      sums[j] = _mm256_add_epi16(sums[j], _mm256_maddubs_epi16(weights, x));
      keep(x);
#else
      sums[j] = int_add(sums[j], dot_bytes<4, 1>(&weights, (const int8_t*)&x));
#endif
      keep(sums[j]);
    }
  }
}

void multiply_floats(int64_t steps) {
  F a = set1(0.5f), sums[kChains];
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) sums[j] = set1(0.0f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) {
      sums[j] = fma(a, a, sums[j]);
      keep(sums[j]);
    }
  }
}

#if defined(__AMX_BF16__)

constexpr int64_t kTileProducts = 4 * kTileRows * 16 * kTileK;  // of a step

// Asks the system for room for tiles, as `headrace.kernels.cpu.library` does.
bool tiles_allowed() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// On numbers from -1 to 1: zeros may be multiplied faster.
void multiply_tiles(int64_t steps) {
  alignas(64) uint16_t values[2][kTileValues];
  uint32_t state = 1;
  for (auto& tile : values) {
    for (uint16_t& value : tile) {
      state = state * 1664525u + 1013904223u;
      const float number = (float)(state >> 8) / (1 << 23) - 1.0f;
      uint32_t bits;
      std::memcpy(&bits, &number, sizeof(bits));
      value = (uint16_t)(bits >> 16);  // bfloat16
    }
  }
  configure_tiles();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, values[0], kTileStride);
  _tile_loadd(5, values[1], kTileStride);
  for (int64_t i = 0; i < steps; ++i) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_release();
}

#else

constexpr int64_t kTileProducts = 0;
bool tiles_allowed() { return false; }
void multiply_tiles(int64_t) {}

#endif

}  // namespace

int main(int, char** arguments) {
  const int threads = std::atoi(arguments[1]), rounds = std::atoi(arguments[2]);
  const int64_t steps = 2'000'000, bytes = kBufferBytes / threads / 4096 * 4096;
  std::vector<std::vector<float>> buffers;
  for (int thread = 0; thread < threads; ++thread) buffers.emplace_back(bytes / 4, 1.0f);
  const double read = peak(threads, rounds, (double)bytes, [&](int thread) { read_all(buffers[thread].data(), bytes); });
  const double packed = peak(threads, rounds, (double)steps * kChains * sizeof(B), [&](int) { multiply_bytes(steps); });
  const double floats = peak(threads, rounds, (double)steps * kChains * W, [&](int) { multiply_floats(steps); });
  const int64_t tile_steps = steps / 4;
  const double tiles = tiles_allowed() ? peak(threads, rounds, (double)tile_steps * kTileProducts, [&](int) { multiply_tiles(tile_steps); }) : 0.0;
  std::printf("%.3f %.3f %.3f %.3f\n", read / 1e9, packed / 1e9, floats / 1e9, tiles / 1e9);
  return 0;
}
