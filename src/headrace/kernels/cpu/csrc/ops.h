// The operators, by file, and the pieces that one lends another.
#pragma once

#include <vector>

#include "runtime.h"

namespace headrace {

constexpr int64_t kTwice = 1 << 8;  // added to a format: what rounding takes off activations is multiplied too, so that they count with 16 bits

struct Weight {  // checked
  const uint8_t* data;
  int64_t format, rows, columns;
  bool twice;
  bool tiled;  // tokens of prompts are multiplied in bfloat16 by tiles
};

// Rows of a step's activations whose products are made alike, in order. They decide by what a token is, never by how many there are: so its
// result doesn't depend on its batch mates, nor on how a prompt is cut.
struct Tokens {
  const int32_t* index;
  int64_t count;
  bool prompt;
  bool in_a_row() const { return index[count - 1] - index[0] + 1 == count; }
};
struct StepTokens {
  Tokens prompts, others;
};

struct FormatSize {
  int64_t values, bytes, group_bytes;  // of a block in the file, and of the same block of 16 packed rows
};

// pack_ops.cpp
FormatSize format_size(int64_t format);
void pack_(const Tensor& packed, const Tensor& raw, int64_t format, int64_t rows, int64_t columns);
Tensor embedding(const Tensor& ids, const Tensor& packed, int64_t format, int64_t rows, int64_t columns);

// linear_ops.cpp
Weight weight_of(const Tensor& packed, int64_t format, int64_t rows, int64_t columns);
int64_t last_size(const Tensor& t);
void multiply(const Weight& weight, const float* x, int64_t m, const float* bias, bool accumulate, float* out);
Tensor linear(const Tensor& x, const Tensor& packed, int64_t format, int64_t rows, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& query_start, const std::optional<Tensor>& prompt_tokens);
void mlp_add_(const Tensor& residual, const Tensor& norm_weight, double eps, const Tensor& gate_up, int64_t gate_up_format, const Tensor& down,
              int64_t down_format, int64_t inner, const std::optional<Tensor>& query_start, const std::optional<Tensor>& prompt_tokens);
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);

// token_ops.cpp
StepTokens tokens_of_step(const std::optional<Tensor>& query_start, const std::optional<Tensor>& prompt_tokens, int64_t padded);
void multiply_tokens(const Weight& weight, const float* x, const Tokens& tokens, const float* bias, bool accumulate, float* out);
void multiply_normed(const Weight& weight, const float* x, const float* norm_weight, float eps, const Tokens& tokens, float* out);
void feed_forward(const Weight& gate_up, const Weight& down, const float* norm_weight, float eps, const Tokens& tokens, float* residual);

// layer_ops.cpp
void layers_add_(const Tensor& residual, const std::vector<Tensor>& weights, const std::vector<int64_t>& formats, double eps, int64_t num_heads,
                 int64_t inner, const Tensor& cos, const Tensor& sin, const std::vector<Tensor>& caches, const Tensor& slots,
                 const Tensor& query_start, const Tensor& context_len, const Tensor& block_table,
                 const std::optional<Tensor>& prompt_tokens, double scale, const std::vector<int64_t>& windows, double softcap);

// attention_ops.cpp
void check_rows(const int32_t* query_start, const int32_t* context_len, int64_t rows, int64_t tokens, int64_t most_context);
Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& query_start, const Tensor& context_len,
                       const Tensor& block_table, const std::optional<Tensor>& prompt_tokens, double scale, int64_t window, double softcap);
Tensor rope_write_kv(const Tensor& qkv, const Tensor& cos, const Tensor& sin, const Tensor& k_cache, const Tensor& v_cache, const Tensor& slots);
void attention_add_(const Tensor& residual, const Tensor& norm_weight, double eps, const Tensor& qkv, int64_t qkv_format, const Tensor& output,
                    int64_t output_format, int64_t num_heads, const Tensor& cos, const Tensor& sin, const Tensor& k_cache, const Tensor& v_cache,
                    const Tensor& slots, const Tensor& query_start, const Tensor& context_len, const Tensor& block_table,
                    const std::optional<Tensor>& prompt_tokens, double scale, int64_t window, double softcap);

}  // namespace headrace
