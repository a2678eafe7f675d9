// Products of a step's tokens: those of prompts go through bfloat16 tiles where the instruction set has them (tile_linear.h), all others through the
// kernels for weights in blocks or in floating point.
#include <algorithm>
#include <numeric>
#include <vector>

#include "ops.h"

namespace headrace {
namespace {

constexpr int64_t kPanelBytes = 1 << 20;     // of unpacked weights that a thread holds: they stay in the second cache
constexpr int64_t kRowsAPanel = 1024;        // activation rows that a panel is unpacked for, where there are more
constexpr int64_t kFeedForwardRows = 480;    // whose wide activations are held at once
constexpr int64_t kConversionGrain = 16384;  // values

const int32_t* counting(int64_t n) {  // 0, 1, 2, ..
  static thread_local std::vector<int32_t> numbers;
  if (static_cast<int64_t>(numbers.size()) < n) {
    numbers.resize(static_cast<size_t>(n));
    std::iota(numbers.begin(), numbers.end(), 0);
  }
  return numbers.data();
}

// row_of(i, scratch) -> float32 [k], for each of `count` rows of activations
template <class RowOf>
const uint16_t* tiles_of(int64_t count, int64_t k, Scratch& scratch, const RowOf& row_of) {
  uint16_t* tiles = scratch.get<uint16_t>((count + kTileBlock - 1) / kTileBlock * kTileBlock * ((k + 31) / 32 * 32));
  parallel_items(count, kConversionGrain / k + 1, [&](int64_t first, int64_t last) {
    static thread_local Scratch row;
    for (int64_t i = first; i < last; ++i) kernels().to_tiles(row_of(i, row), k, i, tiles);
  });
  return tiles;
}

// Pieces of work: some pairs of weight groups, unpacked once, times a part of the activation rows, large enough for that to be worth it.
void multiply_tiles(const TileLinear& args) {
  const int64_t pair_values = (args.columns + 31) / 32 * 1024, groups = (args.rows + kGroupRows - 1) / kGroupRows;
  const int64_t pairs = args.gated ? groups / 2 : (groups + 1) / 2, blocks = (args.count + kTileBlock - 1) / kTileBlock;
  const int64_t parts = std::max<int64_t>(args.count / kRowsAPanel, 1), blocks_a_part = (blocks + parts - 1) / parts;
  const int64_t shares = torch::stable::get_num_threads() * 4, fit = std::max<int64_t>(kPanelBytes / (pair_values * 2), 1);
  const int64_t grain = std::min(fit, (pairs * parts + shares - 1) / shares), panels = (pairs + grain - 1) / grain;
  parallel_items(panels * parts, 1, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t pair = i % panels * grain, block = i / panels * blocks_a_part;
      kernels().tile_linear(args, pair, std::min(pair + grain, pairs), block, std::min(block + blocks_a_part, blocks),
                            scratch.get<uint16_t>(grain * pair_values));
    }
  });
}

// x: [count, columns], row i belongs to tokens.index[i]
void multiply_rows(const Weight& weight, const float* x, const Tokens& tokens, const float* bias, bool accumulate, float* out) {
  static thread_local Scratch tiles, apart;
  const int64_t k = weight.columns, width = weight.rows;
  if (tokens.prompt && weight.tiled) {
    const uint16_t* rows = tiles_of(tokens.count, k, tiles, [&](int64_t i, Scratch&) { return x + i * k; });
    return multiply_tiles({weight.data, weight.format, width, k, rows, tokens.count, tokens.index, bias, out, width, accumulate, nullptr});
  }
  if (tokens.in_a_row()) return multiply(weight, x, tokens.count, bias, accumulate, out + tokens.index[0] * width);
  float* sums = apart.get<float>(tokens.count * width);
  multiply(weight, x, tokens.count, bias, false, sums);
  for (int64_t i = 0; i < tokens.count; ++i) {
    float *to = out + tokens.index[i] * width, *from = sums + i * width;
    if (accumulate) {
      for (int64_t j = 0; j < width; ++j) to[j] += from[j];
    } else {
      std::copy(from, from + width, to);
    }
  }
}

// x: [T, k] -> [count, k]
const float* normed_rows(const float* x, int64_t k, const float* norm_weight, float eps, const Tokens& tokens, Scratch& scratch) {
  float* out = scratch.get<float>(tokens.count * k);
  parallel_items(tokens.count, kConversionGrain / k + 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) kernels().rms_norm(x + tokens.index[i] * k, norm_weight, eps, k, out + i * k);
  });
  return out;
}

const uint16_t* normed_tiles(const float* x, int64_t k, const float* norm_weight, float eps, const Tokens& tokens, Scratch& scratch) {
  return tiles_of(tokens.count, k, scratch, [&](int64_t i, Scratch& row) {
    float* out = row.get<float>(k);
    kernels().rms_norm(x + tokens.index[i] * k, norm_weight, eps, k, out);
    return out;
  });
}

}  // namespace

// prompt_tokens: int32 [R], of each row's tokens the first so many are of its prompt; without it none are. Tokens past the last row of query_start
// are padding, and in neither list. The lists hold until the thread's next call.
StepTokens tokens_of_step(const std::optional<Tensor>& query_start, const std::optional<Tensor>& prompt_tokens, int64_t padded) {
  static thread_local std::vector<int32_t> prompts, others;
  int64_t tokens = padded;
  if (query_start) {
    check_dense(*query_start, "query_start");
    const int64_t n = query_start->numel();
    STD_TORCH_CHECK(query_start->scalar_type() == ScalarType::Int && n > 0, "headrace_cpu: query_start must be int32 with at least 1 value");
    tokens = static_cast<const int32_t*>(query_start->const_data_ptr())[n - 1];
    STD_TORCH_CHECK(0 <= tokens && tokens <= padded, "headrace_cpu: query_start ends at ", tokens, ", and there are ", padded, " tokens");
  }
  if (!prompt_tokens || kernels().tile_linear == nullptr) return {{nullptr, 0, true}, {counting(tokens), tokens, false}};
  STD_TORCH_CHECK(query_start, "headrace_cpu: prompt_tokens needs query_start");
  check_dense(*prompt_tokens, "prompt_tokens");
  const int64_t rows = query_start->numel() - 1;
  STD_TORCH_CHECK(prompt_tokens->scalar_type() == ScalarType::Int && prompt_tokens->numel() == rows, "headrace_cpu: prompt_tokens must be int32 with ",
                  rows, " values");
  const auto* starts = static_cast<const int32_t*>(query_start->const_data_ptr());
  const auto* counts = static_cast<const int32_t*>(prompt_tokens->const_data_ptr());
  prompts.clear();
  others.clear();
  for (int64_t row = 0; row < rows; ++row) {
    STD_TORCH_CHECK(0 <= starts[row] && 0 <= counts[row] && counts[row] <= starts[row + 1] - starts[row], "headrace_cpu: row ", row, " has ",
                    starts[row + 1] - starts[row], " tokens, and ", counts[row], " of its prompt");
    const int32_t first_other = starts[row] + counts[row];
    for (int32_t i = starts[row]; i < first_other; ++i) prompts.push_back(i);
    for (int32_t i = first_other; i < starts[row + 1]; ++i) others.push_back(i);
  }
  return {{prompts.data(), static_cast<int64_t>(prompts.size()), true}, {others.data(), static_cast<int64_t>(others.size()), false}};
}

// The rows of `tokens` in out [T, rows] (+)= theirs in x [T, columns] @ weight^T
void multiply_tokens(const Weight& weight, const float* x, const Tokens& tokens, const float* bias, bool accumulate, float* out) {
  static thread_local Scratch gathered;
  if (tokens.count == 0) return;
  const int64_t k = weight.columns;
  if (tokens.in_a_row()) return multiply_rows(weight, x + tokens.index[0] * k, tokens, bias, accumulate, out);
  float* rows = gathered.get<float>(tokens.count * k);
  for (int64_t i = 0; i < tokens.count; ++i) std::copy(x + tokens.index[i] * k, x + (tokens.index[i] + 1) * k, rows + i * k);
  multiply_rows(weight, rows, tokens, bias, accumulate, out);
}

// The same of rms_norm(x), not added.
void multiply_normed(const Weight& weight, const float* x, const float* norm_weight, float eps, const Tokens& tokens, float* out) {
  static thread_local Scratch norm, tiles;
  if (tokens.count == 0) return;
  const int64_t k = weight.columns;
  if (!(tokens.prompt && weight.tiled))
    return multiply_rows(weight, normed_rows(x, k, norm_weight, eps, tokens, norm), tokens, nullptr, false, out);
  const uint16_t* rows = normed_tiles(x, k, norm_weight, eps, tokens, tiles);
  multiply_tiles({weight.data, weight.format, weight.rows, k, rows, tokens.count, tokens.index, nullptr, out, weight.rows, false, nullptr});
}

// The rows of `tokens` in residual += down(silu(gate) * up), where gate and up are the halves of gate_up(rms_norm(residual)).
void feed_forward(const Weight& gate_up, const Weight& down, const float* norm_weight, float eps, const Tokens& tokens, float* residual) {
  static thread_local Scratch norm, wide, narrow, tiles, product_tiles;
  const int64_t k = gate_up.columns, inner = down.columns;
  if (tokens.count == 0) return;
  if (tokens.prompt && gate_up.tiled && down.tiled && inner % 32 == 0) {  // what is between stays in bfloat16
    const uint16_t* rows = normed_tiles(residual, k, norm_weight, eps, tokens, tiles);
    uint16_t* product = product_tiles.get<uint16_t>((tokens.count + kTileBlock - 1) / kTileBlock * kTileBlock * inner);
    multiply_tiles({gate_up.data, gate_up.format, 2 * inner, k, rows, tokens.count, nullptr, nullptr, nullptr, 0, false, product});
    return multiply_tiles({down.data, down.format, k, inner, product, tokens.count, tokens.index, nullptr, residual, k, true, nullptr});
  }
  for (int64_t done = 0; done < tokens.count; done += kFeedForwardRows) {
    const Tokens part{tokens.index + done, std::min(kFeedForwardRows, tokens.count - done), tokens.prompt};
    float *both = wide.get<float>(part.count * 2 * inner), *product = narrow.get<float>(part.count * inner);
    const float* rows = normed_rows(residual, k, norm_weight, eps, part, norm);
    multiply_rows(gate_up, rows, {counting(part.count), part.count, part.prompt}, nullptr, false, both);
    parallel_items(part.count, 8192 / inner + 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) kernels().silu_mul(both + 2 * i * inner, both + (2 * i + 1) * inner, inner, product + i * inner);
    });
    multiply_rows(down, product, part, nullptr, true, residual);
  }
}

}  // namespace headrace
