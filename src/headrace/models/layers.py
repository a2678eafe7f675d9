"""The parts of a decoder layer that hold weights. All of them are made empty; `models.weights` fills them.

Shape suffixes: T tokens, E hidden size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.kernels.attention import AttentionMetadata, paged_attention, write_kv
from headrace.models.model_config import ACTIVATIONS, ModelConfig
from headrace.models.rope import rotate


class Linear(nn.Module):
    """x @ weight.T + bias, without the random start that nn.Linear computes only to be overwritten."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32; its weight stays float32 in a model of any dtype."""

    def __init__(self, size: int, *, eps: float, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32, device=device), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Self attention of one layer over the paged cache. q, k and v come from one product."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_size, self.kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.scale = config.attention_scale
        self.sliding_window = config.sliding_windows[layer]
        self.logit_softcap = config.attention_softcap
        self.qkv = Linear(config.hidden_size, self.q_size + 2 * self.kv_size, bias=config.qkv_bias, dtype=dtype, device=device)
        self.output = Linear(self.q_size, config.hidden_size, bias=config.output_bias, dtype=dtype, device=device)
        self.qk_norm = config.qk_norm
        if config.qk_norm is not None:
            sizes = (self.head_dim, self.head_dim) if config.qk_norm == "head" else (self.q_size, self.kv_size)
            self.q_norm, self.k_norm = (RMSNorm(size, eps=config.rms_norm_eps, device=device) for size in sizes)

    def forward(self, x_TE: Tensor, cos_sin: tuple[Tensor, Tensor] | None, kv_cache: tuple[Tensor, Tensor], meta: AttentionMetadata) -> Tensor:
        qkv = self.qkv(x_TE)
        qk, v = qkv.split((self.q_size + self.kv_size, self.kv_size), dim=-1)
        qk_THD = self.norm_qk(qk).unflatten(-1, (self.num_heads + self.num_kv_heads, self.head_dim))
        if cos_sin is not None:
            qk_THD = rotate(qk_THD, *cos_sin)
        q_THD, k_TKD = qk_THD.split((self.num_heads, self.num_kv_heads), dim=1)
        write_kv(k_TKD, v.unflatten(-1, (self.num_kv_heads, self.head_dim)), *kv_cache, meta.slot_mapping_T)
        out_THD = paged_attention(q_THD, *kv_cache, meta, scale=self.scale, sliding_window=self.sliding_window, logit_softcap=self.logit_softcap)
        return self.output(out_THD.flatten(1))

    def norm_qk(self, qk: Tensor) -> Tensor:
        """[T, (H + K) * D], normed where the architecture does so."""
        if self.qk_norm is None:
            return qk
        q, k = qk.split((self.q_size, self.kv_size), dim=-1)
        if self.qk_norm == "head":
            q, k = q.unflatten(-1, (self.num_heads, self.head_dim)), k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        return torch.cat((self.q_norm(q).flatten(1), self.k_norm(k).flatten(1)), dim=-1)


class MLP(nn.Module):
    """Gated feed-forward; gate and up come from one product."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias, dtype=dtype, device=device)
        self.down = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias, dtype=dtype, device=device)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_TE: Tensor) -> Tensor:
        gate, up = self.gate_up(x_TE).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)
