"""Our own CPU kernels: linears that read GGUF blocks as they are, paged attention, and the small steps between them.

The kernels are compiled at first use (`build.py`) and are ordinary torch operators: `torch.compile` and export keep each as one opaque
step. `load()` first; where it returns None, `reason()` says why and the caller stays with torch's own operators.

A row's result is the same to the last bit whatever else is in the batch, however many threads there are and however a prompt is cut. It may depend
on whether its token is one of a prompt: those have products of their own where the instruction set makes them faster.

A step may be filled up to a fixed shape: rows without tokens, and tokens past the last row whose slot is -1. Those attend to nothing and are
stored nowhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headrace.kernels.attention import AttentionMetadata
from headrace.kernels.cpu.library import CpuKernels, load, reason, use_libraries
from headrace.kernels.cpu.packing import FORMATS, Arena, PackedWeight, pack, packed_bytes

__all__ = [
    "FORMATS",
    "HEAD_STEP",
    "Arena",
    "CpuKernels",
    "PackedEmbedding",
    "PackedLinear",
    "PackedWeight",
    "activations_of_16_bits",
    "attention_add_",
    "layers_add_",
    "load",
    "mlp_add_",
    "pack",
    "packed_bytes",
    "paged_attention",
    "reason",
    "rms_norm",
    "rope_write_kv",
    "use_libraries",
]

_TWICE = 1 << 8  # added to a format: kTwice in csrc/ops.h
HEAD_STEP = 16  # sizes of a head that `paged_attention` takes are multiples of it


class PackedLinear(nn.Module):
    """x [.., columns] @ weight.T + bias -> [.., rows], in x's dtype, with a weight in GGUF blocks. bias: float32.

    Against a weight in blocks x is rounded to 8 bits in blocks of 32, 16 bits where a value stands out; against one in floating point it is
    taken as float32. With AMX the tokens of prompts are multiplied in bfloat16 (both sides rounded, sums in float32), unless the weight is float32 or
    16-bit activations are asked for.

    `format`: the number of the weight's format for the operators, which `activations_of_16_bits` changes.
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("data", weight.data)
        self.register_buffer("bias", bias)
        self.format = weight.type_number
        self.type_number, self.rows, self.columns = weight.type_number, weight.rows, weight.columns

    @property
    def in_bfloat16(self) -> bool:
        """Whether products with tokens of prompts are made in bfloat16 where there is AMX."""
        return self.format < _TWICE and FORMATS[self.format] != "F32"

    def forward(self, x: Tensor, meta: AttentionMetadata | None = None) -> Tensor:
        """`meta`: of the step whose tokens x are, [T, columns]; without it none of them is taken as a prompt's."""
        places = (None, None) if meta is None else (meta.query_start_R1, meta.prompt_tokens_R)
        return torch.ops.headrace_cpu.linear.default(x.contiguous(), self.data, self.format, self.rows, self.bias, *places)


class PackedEmbedding(nn.Module):
    """Rows of a table in GGUF blocks by token id, float32; `linear` has the same table as output weight, for a model that ties both."""

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self.register_buffer("data", weight.data)
        self.format = weight.type_number
        self.type_number, self.rows, self.columns = weight.type_number, weight.rows, weight.columns

    def forward(self, ids_T: Tensor) -> Tensor:
        return torch.ops.headrace_cpu.embedding.default(ids_T, self.data, self.type_number, self.rows, self.columns)

    def linear(self, x: Tensor) -> Tensor:
        return torch.ops.headrace_cpu.linear.default(x.contiguous(), self.data, self.format, self.rows, None, None, None)


def activations_of_16_bits(model: nn.Module) -> None:
    """From now on products with the weights in blocks of `model` take activations as 16 bits: twice the work, and a hundredth of the rounding.
    None is made in bfloat16 any more.

    Who has noted a module's `format` must ask for it again.
    """
    for module in model.modules():
        if isinstance(module, PackedLinear | PackedEmbedding) and FORMATS[module.type_number] != "F32":
            module.format = module.type_number + _TWICE


def paged_attention(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
    prompts_in_bfloat16: bool = False,
) -> Tensor:
    """What `kernels.attention.paged_attention` does; caches may be float32, bfloat16 or float16, the head size a multiple of HEAD_STEP.

    `prompts_in_bfloat16`: with AMX, tokens of prompts attend in bfloat16: queries, keys, values and weights are rounded, sums are float32.
    """
    return torch.ops.headrace_cpu.paged_attention.default(
        q_THD.contiguous(),
        k_cache,
        v_cache,
        meta.query_start_R1,
        meta.context_len_R,
        meta.block_table_RB,
        meta.prompt_tokens_R if prompts_in_bfloat16 else None,
        scale,
        sliding_window or 0,
        logit_softcap or 0.0,
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / root of its mean square over the last dimension * weight (float32), in x's dtype."""
    return torch.ops.headrace_cpu.rms_norm.default(x.contiguous(), weight, eps)


def rope_write_kv(qkv: Tensor, cos_sin: tuple[Tensor, Tensor], k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> Tensor:
    """Turns queries and keys of qkv [T, (H + 2 K) * D], stores keys and values in their slots; returns the queries [T, H, D].

    Values beyond what a float16 cache can hold become the largest that it can.
    cos_sin: as `models.rope.RotaryEmbedding.cos_sin` makes them, each [T, 1, rotary size]; a size of 0 turns nothing.
    """
    return torch.ops.headrace_cpu.rope_write_kv.default(qkv.contiguous(), *cos_sin, k_cache, v_cache, slot_mapping_T)


def attention_add_(
    residual_TE: Tensor,
    norm_weight: Tensor,
    eps: float,
    qkv: PackedLinear,
    output: PackedLinear,
    num_heads: int,
    cos_sin: tuple[Tensor, Tensor],
    kv_cache: tuple[Tensor, Tensor],
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logit_softcap: float | None = None,
) -> None:
    """residual += output(attention(qkv(rms_norm(residual)))), the first half of a decoder layer without biases, in one call.

    residual: float32, dense; changed in place. The result is that of the single steps, bit by bit.
    """
    torch.ops.headrace_cpu.attention_add_.default(
        residual_TE,
        norm_weight,
        eps,
        qkv.data,
        qkv.format,
        output.data,
        output.format,
        num_heads,
        *cos_sin,
        *kv_cache,
        meta.slot_mapping_T,
        meta.query_start_R1,
        meta.context_len_R,
        meta.block_table_RB,
        meta.prompt_tokens_R,
        scale,
        sliding_window or 0,
        logit_softcap or 0.0,
    )


def mlp_add_(
    residual_TE: Tensor, norm_weight: Tensor, eps: float, gate_up: PackedLinear, down: PackedLinear, meta: AttentionMetadata | None = None
) -> None:
    """residual += down(silu(gate) * up) with gate and up of rms_norm(residual): the second half of a layer, as `attention_add_` the first.

    meta: of the step; tokens past its last row are left as they are. Without it all are there, and none is taken as a prompt's.
    """
    places = (None, None) if meta is None else (meta.query_start_R1, meta.prompt_tokens_R)
    torch.ops.headrace_cpu.mlp_add_.default(
        residual_TE, norm_weight, eps, gate_up.data, gate_up.format, down.data, down.format, down.columns, *places
    )


def layers_add_(
    residual_TE: Tensor,
    weights: list[Tensor],
    formats: list[int],
    eps: float,
    num_heads: int,
    inner: int,
    cos_sin: tuple[Tensor, Tensor],
    caches: list[Tensor],
    meta: AttentionMetadata,
    *,
    scale: float,
    windows: list[int],
    logit_softcap: float | None = None,
) -> None:
    """Layers one after the other, each as `attention_add_` and then `mlp_add_` would, in one call.

    Of each layer weights: norm, qkv and output, norm, gate_up and down; formats: those of the four matrices; caches: keys and values; windows:
    its sliding window, 0 for none. inner: the size between gate_up and down.
    """
    torch.ops.headrace_cpu.layers_add_.default(
        residual_TE,
        weights,
        formats,
        eps,
        num_heads,
        inner,
        *cos_sin,
        caches,
        meta.slot_mapping_T,
        meta.query_start_R1,
        meta.context_len_R,
        meta.block_table_RB,
        meta.prompt_tokens_R,
        scale,
        windows,
        logit_softcap or 0.0,
    )
