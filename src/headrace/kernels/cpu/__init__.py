"""Our own CPU kernels: linears that read GGUF blocks as they are, paged attention, and the small steps between them.

The kernels are compiled at first use (`build.py`) and are ordinary torch operators: `torch.compile` and export keep each as one opaque
step. `load()` first; where it returns None, `reason()` says why and the caller stays with torch's own operators.

A row's result is the same to the last bit whatever else is in the batch, however many threads there are and however a prompt is cut.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.kernels.attention import AttentionMetadata
from headrace.kernels.cpu.library import CpuKernels, available, load, reason
from headrace.kernels.cpu.packing import FORMATS, Arena, PackedWeight, huge_pages, pack, packed_bytes

__all__ = [
    "FORMATS",
    "Arena",
    "CpuKernels",
    "PackedEmbedding",
    "PackedLinear",
    "PackedWeight",
    "available",
    "huge_pages",
    "linear",
    "load",
    "pack",
    "packed_bytes",
    "paged_attention",
    "reason",
    "rms_norm",
    "rope_write_kv",
    "silu_mul",
]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [.., columns] @ weight.T + bias -> [.., rows], in x's dtype. bias: float32.

    Against a weight in blocks x is rounded to 8 bits in blocks of 32; against one in floating point it is taken as float32.
    """
    return torch.ops.headrace_cpu.linear(x.contiguous(), weight.data, weight.type_number, weight.rows, bias)


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
) -> Tensor:
    """What `kernels.attention.paged_attention` does; caches may be float32, bfloat16 or float16, the head size a multiple of 16."""
    return torch.ops.headrace_cpu.paged_attention(
        q_THD.contiguous(),
        k_cache,
        v_cache,
        meta.query_start_R1,
        meta.context_len_R,
        meta.block_table_RB,
        scale,
        sliding_window or 0,
        logit_softcap or 0.0,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / root of its mean square over the last dimension * weight (float32), in x's dtype."""
    return torch.ops.headrace_cpu.rms_norm(x.contiguous(), weight, eps)


def rope_write_kv(qkv: Tensor, cos_sin: tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> Tensor:
    """Turns queries and keys of qkv [T, (H + 2 K) * D], stores keys and values in their slots; returns the queries [T, H, D].

    cos_sin: as `models.rope.RotaryEmbedding.cos_sin` makes them, each [T, 1, rotary size].
    """
    return torch.ops.headrace_cpu.rope_write_kv(qkv.contiguous(), *cos_sin, k_cache, v_cache, slot_mapping_T)


def silu_mul(x: Tensor) -> Tensor:
    """silu(first half) * second half, over the last dimension."""
    return torch.ops.headrace_cpu.silu_mul(x.contiguous())


class PackedLinear(nn.Module):
    """x @ weight.T + bias with a weight in GGUF blocks."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("data", weight.data)
        self.register_buffer("bias", bias)
        self.type_number, self.rows, self.columns = weight.type_number, weight.rows, weight.columns

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.headrace_cpu.linear(x.contiguous(), self.data, self.type_number, self.rows, self.bias)


class PackedEmbedding(nn.Module):
    """Rows of a table in GGUF blocks by token id; `linear` uses the same table as the output weight of a model that ties both."""

    def __init__(self, weight: PackedWeight, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("data", weight.data)
        self.type_number, self.rows, self.columns, self.dtype = weight.type_number, weight.rows, weight.columns, dtype

    def forward(self, ids_T: Tensor) -> Tensor:
        return torch.ops.headrace_cpu.embedding(ids_T, self.data, self.type_number, self.rows, self.columns, _DTYPES[self.dtype])

    def linear(self, x: Tensor) -> Tensor:
        return torch.ops.headrace_cpu.linear(x.contiguous(), self.data, self.type_number, self.rows, None)
