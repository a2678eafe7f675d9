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
// Vectors of weight rows that are multiplied at once: of one group, or of two. Two share what is read of activations, which would else bound the products.
constexpr int kVectorsAGroup = headrace::kGroupRows / W, kGroupsAtOnce = 2 / kVectorsAGroup;

// Registers for the sums of a block, by vectors of weight rows and activation rows.
#if defined(__AVX512F__)
template <int Bits>
constexpr int kPanelColumns = 8;
#else
template <int Bits>
constexpr int kPanelColumns = Bits == 4 || Bits == 8 ? 4 : 2;
#endif

// `count` unpacked blocks of V vectors, one vector after the other, times C activation rows. total: [C, V, W], goes on
template <class Format, int V, int C>
inline void vector_columns(const Format* blocks, int64_t count, const int8_t* x, int64_t columns, const BlockInfo* info, float* total) {
  for (int64_t b = 0; b < count; ++b) {
    const B* w[V];
    for (int v = 0; v < V; ++v) w[v] = blocks[v * kPanelBlocks + b].w;
    I sums[V][C];
    dot_columns<Format::kBits, V, C>(w, x + b * kBlock, columns, sums);
    const BlockInfo* first = info + b;
    const int64_t stride = columns / kBlock;
    int32_t uppers = 0;
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) uppers |= first[c * stride].upper;
    if (__builtin_expect(uppers != 0, 0)) {  // asked once for all: a branch for each row would cost a third of the time
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const BlockInfo& i = first[c * stride];
        if (i.upper == 0) continue;
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sums[v][c] = int_add(sums[v][c], dot_upper<Format::kBits>(w[v][i.wide], i.upper));
      }
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        float* to = total + (c * V + v) * W;
        store(to, blocks[v * kPanelBlocks + b].finish(load(to), sums[v][c], first[c * stride]));
      }
  }
}

template <class Format, int V, int C = kPanelColumns<Format::kBits>>
inline void vector_panel(const Format* blocks, int64_t count, const int8_t* x, int64_t columns, const BlockInfo* info, int64_t rows, float* total) {
  int64_t m = 0;
  for (; m + C <= rows; m += C)
    vector_columns<Format, V, C>(blocks, count, x + m * columns, columns, info + m * (columns / kBlock), total + m * V * W);
  if constexpr (C > 1)
    vector_panel<Format, V, C / 2>(blocks, count, x + m * columns, columns, info + m * (columns / kBlock), rows - m, total + m * V * W);
}

// V vectors of weight rows, of one group or of two, times activation rows [first, last)
template <class Format, int V>
inline void panel_groups(const headrace::Linear& a, int64_t group, int64_t first, int64_t last, Format* panel, float* totals) {
  const int64_t blocks = a.columns / kBlock, group_bytes = a.columns / Format::kValues * Format::kBytes, rows = last - first;
  const int64_t parts = (blocks + kPanelBlocks - 1) / kPanelBlocks;
  memset(totals, 0, (size_t)(rows * V * W) * sizeof(float));
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = part * blocks / parts, count = (part + 1) * blocks / parts - begin;
    for (int v = 0; v < V; ++v) {
      const uint8_t* weight = a.weight + (group + v / kVectorsAGroup) * group_bytes;
      for (int64_t b = 0; b < count; ++b) {
        constexpr int64_t bytes = Format::kBytes * kBlock / Format::kValues;
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(weight + (begin + b) * bytes + kFetchAhead + i, 0, 2);
        new (panel + v * kPanelBlocks + b) Format(weight, begin + b, v % kVectorsAGroup * W);
      }
    }
    vector_panel<Format, V>(panel, count, a.x + first * a.columns + begin * kBlock, a.columns, a.info + first * blocks + begin, rows, totals);
  }
  for (int64_t m = 0; m < rows; ++m)
    for (int v = 0; v < V; ++v) put_rows(a, group * headrace::kGroupRows + v * W, first + m, load(totals + (m * V + v) * W));
}

template <class Format>
void panel_linear(const headrace::Linear& a, int64_t first_group, int64_t last_group, int64_t first, int64_t last) {
  constexpr int V = kVectorsAGroup * kGroupsAtOnce;
  alignas(64) unsigned char memory[V * kPanelBlocks * sizeof(Format)];
  alignas(64) float totals[headrace::kRowsAtOnce * V * W];
  Format* panel = (Format*)memory;
  int64_t group = first_group;
  for (; group + kGroupsAtOnce <= last_group; group += kGroupsAtOnce) panel_groups<Format, V>(a, group, first, last, panel, totals);
  if constexpr (kGroupsAtOnce > 1)
    for (; group < last_group; ++group) panel_groups<Format, kVectorsAGroup>(a, group, first, last, panel, totals);
}

}  // namespace
