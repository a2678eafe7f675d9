// Quantised linears, norms and the feed-forward: checks, work space and threads around the kernels.
#include <algorithm>

#include "ops.h"

namespace headrace {

namespace {

// m activation rows in pieces of as many rows, at most kRowsAtOnce, of whole tiles of `tile` rows.
int64_t rows_a_chunk(int64_t m, int64_t tile) {
  const int64_t most = kRowsAtOnce / tile * tile, chunks = (m + most - 1) / most, rows = (m + chunks - 1) / chunks;
  return (rows + tile - 1) / tile * tile;
}

// Activations as the kernels want them against weights in floating point.
const float* arranged(const float* x, int64_t m, int64_t k, int64_t chunk, Scratch& scratch) {
  if (m == 1) return x;
  float* out = scratch.get<float>(m * k);
  const int64_t columns = kernels().float_columns, tiles = chunk / columns;
  parallel_items((m + chunk - 1) / chunk * tiles, 4096 / k + 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t row = i / tiles * chunk, rows = m - row < chunk ? m - row : chunk;
      if (i % tiles * columns < rows) kernels().arrange(x + row * k, rows, k, i % tiles, out + row * k);
    }
  });
  return out;
}

}  // namespace

Weight weight_of(const Tensor& packed, int64_t format, int64_t rows, int64_t columns) {
  const bool twice = format >= kTwice;
  if (twice) format -= kTwice;
  const FormatSize size = format_size(format);
  check_dense(packed, "packed");
  STD_TORCH_CHECK(format != kQ3_K, "headrace_cpu: weights of Q3_K are packed as Q6_K");
  STD_TORCH_CHECK(columns % size.values == 0, "headrace_cpu: ", columns, " columns are no whole number of blocks of ", size.values);
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte && packed.numel() == (rows + 15) / 16 * (columns / size.values) * size.group_bytes,
                  "headrace_cpu: packed does not hold a weight [", rows, ", ", columns, "] in format ", format);
  const bool tiled = kernels().tile_linear != nullptr && !twice && format != kF32;
  return {static_cast<const uint8_t*>(packed.const_data_ptr()), format, rows, columns, twice, tiled};
}

// out[M, rows] (+)= x[M, columns] @ weight^T, all float32
void multiply(const Weight& weight, const float* x, int64_t m, const float* bias, bool accumulate, float* out) {
  if (m == 0) return;
  static thread_local Scratch q_scratch, info_scratch, tile_scratch, rest_scratch, arranged_scratch;
  const int64_t k = weight.columns, blocks = k / kBlock, groups = (weight.rows + kGroupRows - 1) / kGroupRows;
  const bool floats = weight.format == kF32 || weight.format == kF16 || weight.format == kBF16;
  const bool by_tiles = !floats && weight.format != kQ6_K && kernels().fewest_tile_rows > 0 && m >= kernels().fewest_tile_rows;
  ByteTile* tiles = by_tiles ? tile_scratch.get<ByteTile>((m + kByteTileRows - 1) / kByteTileRows * blocks) : nullptr;
  int8_t* q = floats || by_tiles ? nullptr : q_scratch.get<int8_t>(m * k);
  BlockInfo* info = floats || by_tiles ? nullptr : info_scratch.get<BlockInfo>(m * blocks);
  float* rest = !floats && weight.twice ? rest_scratch.get<float>(m * k) : nullptr;
  const auto quantize = [&](const float* from) {
    if (tiles) {
      return parallel_items((m + kByteTileRows - 1) / kByteTileRows * blocks, 32, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          const int64_t row = i / blocks * kByteTileRows, rows = std::min(m - row, kByteTileRows);
          kernels().quantize_tile(from + row * k, rows, k, i % blocks, rest ? rest + row * k : nullptr, tiles + i);
        }
      });
    }
    parallel_items(m, 16384 / k + 1, [&](int64_t first, int64_t last) {
      kernels().quantize(from + first * k, last - first, k, q + first * k, info + first * blocks, rest ? rest + first * k : nullptr);
    });
  };
  if (!floats) quantize(x);
  const int64_t chunk = rows_a_chunk(m, floats ? kernels().float_columns : tiles ? kByteTileRows : 8), chunks = (m + chunk - 1) / chunk;
  const float* rows = floats ? arranged(x, m, k, chunk, arranged_scratch) : nullptr;
  Linear args{weight.data, weight.format, weight.rows, k, rows, q, info, tiles, bias, out, weight.rows, accumulate};
  const int64_t pieces = torch::stable::get_num_threads() * 8;
  const int64_t groups_a_piece = groups / pieces > 2 ? groups / pieces / 2 * 2 : 2;  // even: tiles over two groups are the fastest
  const int64_t pieces_a_chunk = (groups + groups_a_piece - 1) / groups_a_piece;
  const auto compute = [&] {
    parallel_items(chunks * pieces_a_chunk, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const int64_t row = i / pieces_a_chunk * chunk, group = i % pieces_a_chunk * groups_a_piece;
        kernels().linear(args, group, group + groups_a_piece < groups ? group + groups_a_piece : groups, row, row + chunk < m ? row + chunk : m);
      }
    });
  };
  compute();
  if (rest) {
    quantize(rest);
    args.bias = nullptr;
    args.accumulate = true;
    compute();
  }
}

int64_t last_size(const Tensor& t) {
  STD_TORCH_CHECK(t.dim() >= 1 && t.size(t.dim() - 1) > 0, "headrace_cpu: an activation needs a last dimension of at least 1");
  return t.size(t.dim() - 1);
}

static Tensor like_with_columns(const Tensor& x, int64_t columns) {
  int64_t sizes[8];
  const int64_t dims = x.dim();
  STD_TORCH_CHECK(dims <= 8, "headrace_cpu: tensors of more than 8 dimensions are not supported");
  for (int64_t i = 0; i + 1 < dims; ++i) sizes[i] = x.size(i);
  sizes[dims - 1] = columns;
  return new_tensor(sizes, dims, x.scalar_type());
}

Tensor linear(const Tensor& x, const Tensor& packed, int64_t format, int64_t rows, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& query_start, const std::optional<Tensor>& prompt_tokens) {
  static thread_local Scratch in, out;
  const int64_t k = last_size(x), m = x.numel() / k;
  const Weight weight = weight_of(packed, format, rows, k);
  Tensor y = like_with_columns(x, rows);
  const FloatOut to(y, "x", out);
  const float *from = as_floats(x, "x", in), *added = bias ? float_weight(*bias, rows, "bias") : nullptr;
  const StepTokens step = tokens_of_step(query_start, prompt_tokens, m);
  multiply_tokens(weight, from, step.prompts, added, false, to.data);
  multiply_tokens(weight, from, step.others, added, false, to.data);
  std::fill(to.data + (step.prompts.count + step.others.count) * rows, to.data + m * rows, 0.0f);
  to.store();
  return y;
}

// residual += down(silu(gate) * up), where gate and up are the halves of gate_up(rms_norm(residual)). With a query_start tokens past the last row are
// padding: they stay as they are, and cost nothing.
void mlp_add_(const Tensor& residual, const Tensor& norm_weight, double eps, const Tensor& gate_up, int64_t gate_up_format, const Tensor& down,
              int64_t down_format, int64_t inner, const std::optional<Tensor>& query_start, const std::optional<Tensor>& prompt_tokens) {
  const int64_t k = last_size(residual);
  check_dense(residual, "residual");
  STD_TORCH_CHECK(residual.scalar_type() == ScalarType::Float, "headrace_cpu: residual must be float32");
  const Weight first = weight_of(gate_up, gate_up_format, 2 * inner, k), second = weight_of(down, down_format, k, inner);
  const float* norm = float_weight(norm_weight, k, "norm_weight");
  const StepTokens step = tokens_of_step(query_start, prompt_tokens, residual.numel() / k);
  for (const Tokens& tokens : {step.prompts, step.others})
    feed_forward(first, second, norm, static_cast<float>(eps), tokens, static_cast<float*>(residual.mutable_data_ptr()));
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  static thread_local Scratch in, norm;
  const int64_t k = last_size(x), m = x.numel() / k;
  const float *from = as_floats(x, "x", in), *factors = float_weight(weight, k, "norm_weight");
  Tensor y = like_with_columns(x, k);
  const FloatOut to(y, "x", norm);
  parallel_items(m, 16384 / k + 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) kernels().rms_norm(from + i * k, factors, static_cast<float>(eps), k, to.data + i * k);
  });
  to.store();
  return y;
}

}  // namespace headrace
