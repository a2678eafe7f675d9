"""A decoder's step as a plain module of tensors: what is exported and compiled, and the shapes it is compiled for.

All that a step brings are tensors of fixed sizes. Only the number of KV blocks is left open, so that a package serves under any
`--kv-memory`. Angles come from tables over the static length: the same numbers, to the bit, as the eager path computes.

Legend: T tokens of the bucket, R rows, B blocks of the static length, N blocks of the storage, S tokens of a block, P positions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headrace.kernels.attention import AttentionMetadata
from headrace.models.decoder import Decoder
from headrace.runner.buckets import Bucket

_EXAMPLE_BLOCKS = 8  # of the storage while exporting; any number above 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What is the same in all buckets of a service."""

    static_length: int  # tokens of the longest context that goes this way
    block_size: int
    kv_dtype: str = "float32"  # of keys and values: the end of a torch dtype's name

    @property
    def table_width(self) -> int:
        """Blocks of the longest context."""
        return -(-self.static_length // self.block_size)


class StepModule(nn.Module):
    """The decoder and its tables. `forward` returns hidden states [T, E]; rows of padding hold nothing of use."""

    def __init__(self, model: Decoder, shape: StepShape) -> None:
        super().__init__()
        self.model = model
        self._ropes = list(model.ropes)
        for i, (rope, embedding) in enumerate(model.ropes.items()):
            assert not rope.length_dependent
            with torch.inference_mode(False), torch.no_grad():
                cos, sin = embedding.cos_sin(torch.arange(shape.static_length), None, model.dtype)
            self.register_buffer(f"cos_{i}", cos, persistent=False)
            self.register_buffer(f"sin_{i}", sin, persistent=False)

    def forward(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        query_start_R1: Tensor,
        context_len_R: Tensor,
        block_table_RB: Tensor,
        prompt_tokens_R: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        meta = AttentionMetadata(
            query_start_R1=query_start_R1,
            context_len_R=context_len_R,
            block_table_RB=block_table_RB,
            slot_mapping_T=slot_mapping_T,
            positions_T=positions_T,
            query_lens=[],  # of the eager path; the kernels read the tensors
            context_lens=[],
            num_decode_rows=0,
            prompt_tokens_R=prompt_tokens_R,
        )
        cos_sin = {
            rope: (getattr(self, f"cos_{i}").index_select(0, positions_T), getattr(self, f"sin_{i}").index_select(0, positions_T))
            for i, rope in enumerate(self._ropes)
        }
        return self.model(input_ids_T, positions_T, kv_caches, meta, cos_sin)

    def constants(self) -> dict[str, Tensor]:
        """Every weight and table by the name that a compiled package knows it by."""
        return dict(self.named_buffers(remove_duplicate=False)) | dict(self.named_parameters(remove_duplicate=False))


def skeleton(module: StepModule) -> StepModule:
    """A copy with shapes instead of weights and tables, small enough to be sent to another process."""
    memo = {id(tensor): torch.empty_like(tensor, device="meta", requires_grad=False) for tensor in _tensors(module)}
    return copy.deepcopy(module, memo)


def materialize(bare: StepModule) -> StepModule:
    """A skeleton with memory that nobody has touched, which costs nothing, in place of each weight: what exporting asks for."""
    memory = {id(tensor): torch.empty_like(tensor, device="cpu") for tensor in _tensors(bare)}
    for part in bare.modules():
        for table in (part._buffers, part._parameters):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = memory[id(tensor)] if table is part._buffers else nn.Parameter(memory[id(tensor)], requires_grad=False)
    return bare


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def example_inputs(module: StepModule, bucket: Bucket, shape: StepShape) -> tuple[Tensor | list[tuple[Tensor, Tensor]], ...]:
    """Arguments of `forward` in the bucket's shape."""
    config = module.model.config
    tokens, rows = bucket.num_tokens, bucket.num_rows
    size = (_EXAMPLE_BLOCKS, shape.block_size, config.num_kv_heads, config.head_dim)
    dtype = getattr(torch, shape.kv_dtype)
    caches = [(torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype)) for _ in range(config.num_layers)]
    return (
        torch.zeros(tokens, dtype=torch.int64),
        torch.zeros(tokens, dtype=torch.int64),
        torch.full((tokens,), -1, dtype=torch.int64),
        torch.zeros(rows + 1, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int32),
        torch.zeros(rows, shape.table_width, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int32),
        caches,
    )
