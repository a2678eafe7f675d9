// Whole decoder layers, one after the other, without a way back to Python between them.
#include "ops.h"

namespace headrace {

// For each layer what attention_add_ and then mlp_add_ do. weights: of each layer the norm, qkv and output of its attention, the norm, gate_up and
// down of its feed-forward; formats: of those four matrices; caches: its keys and values; windows: one a layer, 0 for none.
void layers_add_(const Tensor& residual, const std::vector<Tensor>& weights, const std::vector<int64_t>& formats, double eps, int64_t num_heads,
                 int64_t inner, const Tensor& cos, const Tensor& sin, const std::vector<Tensor>& caches, const Tensor& slots,
                 const Tensor& query_start, const Tensor& context_len, const Tensor& block_table,
                 const std::optional<Tensor>& prompt_tokens, double scale, const std::vector<int64_t>& windows, double softcap) {
  const size_t layers = windows.size();
  STD_TORCH_CHECK(weights.size() == 6 * layers && formats.size() == 4 * layers && caches.size() == 2 * layers, "headrace_cpu: ", layers,
                  " layers have 6 weights, 4 formats and 2 caches each, not ", weights.size(), ", ", formats.size(), " and ", caches.size());
  for (size_t layer = 0; layer < layers; ++layer) {
    const Tensor* weight = &weights[6 * layer];
    const int64_t* format = &formats[4 * layer];
    attention_add_(residual, weight[0], eps, weight[1], format[0], weight[2], format[1], num_heads, cos, sin, caches[2 * layer],
                   caches[2 * layer + 1], slots, query_start, context_len, block_table, prompt_tokens, scale, windows[layer], softcap);
    mlp_add_(residual, weight[3], eps, weight[4], format[2], weight[5], format[3], inner, query_start, prompt_tokens);
  }
}

}  // namespace headrace
