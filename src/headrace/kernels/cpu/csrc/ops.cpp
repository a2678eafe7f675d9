// The library of operators: schemas and where they are computed. Their shapes without data (fake kernels) are in ../library.py.
#include "ops.h"

namespace headrace {
namespace {
void use_kernels(int64_t address) { kernels_in_use = reinterpret_cast<const KernelTable*>(address); }
}  // namespace
}  // namespace headrace

STABLE_TORCH_LIBRARY(headrace_cpu, m) {
  m.def("use_kernels(int address) -> ()");
  m.def("pack_(Tensor(a!) packed, Tensor raw, int format, int rows, int columns) -> ()");
  m.def("linear(Tensor x, Tensor packed, int format, int rows, Tensor? bias, Tensor? query_start, Tensor? prompt_tokens) -> Tensor");
  m.def(
      "mlp_add_(Tensor(a!) residual, Tensor norm_weight, float eps, Tensor gate_up, int gate_up_format, Tensor down, int down_format, int inner, "
      "Tensor? query_start, Tensor? prompt_tokens) -> ()");
  m.def("embedding(Tensor ids, Tensor packed, int format, int rows, int columns) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor query_start, Tensor context_len, Tensor block_table, "
      "Tensor? prompt_tokens, float scale, int window, float softcap) -> Tensor");
  m.def("rope_write_kv(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> Tensor");
  m.def(
      "attention_add_(Tensor(a!) residual, Tensor norm_weight, float eps, Tensor qkv, int qkv_format, Tensor output, int output_format, int "
      "num_heads, "
      "Tensor cos, Tensor sin, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slots, Tensor query_start, Tensor context_len, Tensor block_table, "
      "Tensor? prompt_tokens, float scale, int window, float softcap) -> ()");
  m.def(
      "layers_add_(Tensor(a!) residual, Tensor[] weights, int[] formats, float eps, int num_heads, int inner, Tensor cos, Tensor sin, "
      "Tensor(b!)[] caches, Tensor slots, Tensor query_start, Tensor context_len, Tensor block_table, Tensor? prompt_tokens, float scale, int[] windows, "
      "float softcap) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(headrace_cpu, CompositeExplicitAutograd, m) { m.impl("use_kernels", TORCH_BOX(&headrace::use_kernels)); }

STABLE_TORCH_LIBRARY_IMPL(headrace_cpu, CPU, m) {
  m.impl("pack_", TORCH_BOX(&headrace::pack_));
  m.impl("linear", TORCH_BOX(&headrace::linear));
  m.impl("mlp_add_", TORCH_BOX(&headrace::mlp_add_));
  m.impl("embedding", TORCH_BOX(&headrace::embedding));
  m.impl("rms_norm", TORCH_BOX(&headrace::rms_norm));
  m.impl("paged_attention", TORCH_BOX(&headrace::paged_attention));
  m.impl("rope_write_kv", TORCH_BOX(&headrace::rope_write_kv));
  m.impl("attention_add_", TORCH_BOX(&headrace::attention_add_));
  m.impl("layers_add_", TORCH_BOX(&headrace::layers_add_));
}
