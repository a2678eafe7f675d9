// Products of many activation rows: a part of K of one group of weight rows is unpacked once into a panel, which stays in the nearest cache and
// serves all activation rows. Sums wait in memory from one part to the next.
#pragma once

#include <new>

#include "formats.h"
#include "kernels.h"
#include "output_rows.h"
#include "simd.h"

namespace {

constexpr int64_t kPanelBlocks = 16;  // that are unpacked at once
constexpr int kVectorsAGroup = headrace::kGroupRows / W;

// Registers for the sums of a block, by vectors of weight rows and activation rows.
#if defined(__AVX512F__)
template <int Bits>
constexpr int kPanelColumns = 8;
#else
template <int Bits>
constexpr int kPanelColumns = Bits == 4 || Bits == 8 ? 4 : 2;
#endif

// `count` unpacked blocks (of all vectors of a group, one vector after the other) times C activation rows. total: [C, 16], goes on
template <class Format, int C>
inline void vector_columns(const Format* blocks, int64_t count, const int8_t* x, int64_t columns, const BlockInfo* info, float* total) {
  constexpr int V = kVectorsAGroup;
  for (int64_t b = 0; b < count; ++b) {
    const B* w[V];
    for (int v = 0; v < V; ++v) w[v] = blocks[v * kPanelBlocks + b].w;
    I sums[V][C];
    dot_columns<Format::kBits, V, C>(w, x + b * kBlock, columns, sums);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const BlockInfo& i = info[c * (columns / kBlock) + b];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        if (__builtin_expect(i.upper != 0, 0)) sums[v][c] = int_add(sums[v][c], dot_upper<Format::kBits>(w[v][i.wide], i.upper));
        float* to = total + c * headrace::kGroupRows + v * W;
        store(to, blocks[v * kPanelBlocks + b].finish(load(to), sums[v][c], i));
      }
    }
  }
}

template <class Format, int C = kPanelColumns<Format::kBits>>
inline void vector_panel(const Format* blocks, int64_t count, const int8_t* x, int64_t columns, const BlockInfo* info, int64_t rows, float* total) {
  int64_t m = 0;
  for (; m + C <= rows; m += C)
    vector_columns<Format, C>(blocks, count, x + m * columns, columns, info + m * (columns / kBlock), total + m * headrace::kGroupRows);
  if constexpr (C > 1)
    vector_panel<Format, C / 2>(blocks, count, x + m * columns, columns, info + m * (columns / kBlock), rows - m, total + m * headrace::kGroupRows);
}

template <class Format>
void panel_linear(const headrace::Linear& a, int64_t first_group, int64_t last_group, int64_t first, int64_t last) {
  alignas(64) unsigned char memory[kVectorsAGroup * kPanelBlocks * sizeof(Format)];
  alignas(64) float totals[headrace::kRowsAtOnce * headrace::kGroupRows];
  Format* panel = (Format*)memory;
  const int64_t blocks = a.columns / kBlock, group_bytes = a.columns / Format::kValues * Format::kBytes, rows = last - first;
  const int64_t parts = (blocks + kPanelBlocks - 1) / kPanelBlocks;
  for (int64_t group = first_group; group < last_group; ++group) {
    const uint8_t* weight = a.weight + group * group_bytes;
    memset(totals, 0, (size_t)(rows * headrace::kGroupRows) * sizeof(float));
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = part * blocks / parts, count = (part + 1) * blocks / parts - begin;
      for (int64_t b = 0; b < count; ++b) {
        constexpr int64_t bytes = Format::kBytes * kBlock / Format::kValues;
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(weight + (begin + b) * bytes + kFetchAhead + i, 0, 2);
        for (int v = 0; v < kVectorsAGroup; ++v) new (panel + v * kPanelBlocks + b) Format(weight, begin + b, v * W);
      }
      vector_panel(panel, count, a.x + first * a.columns + begin * kBlock, a.columns, a.info + first * blocks + begin, rows, totals);
    }
    for (int64_t m = 0; m < rows; ++m)
      for (int v = 0; v < kVectorsAGroup; ++v)
        put_rows(a, group * headrace::kGroupRows + v * W, first + m, load(totals + m * headrace::kGroupRows + v * W));
  }
}

}  // namespace
