"""A model behind one call: some rows in, the likeliest next token of each out. Keys and values stand in one contiguous place for each row.

Shape suffixes: R rows, T tokens of the step, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.config import EngineConfig
from headrace.kernels.attention import AttentionMetadata
from headrace.models.loader import load_config, load_model
from headrace.runner.device import resolve_device, resolve_dtype, resolve_kv_dtype
from headrace.runner.execution_path import choose_path
from headrace.runner.memory import physical_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Keys and values of each layer, [rows, length, K, D]."""

    layers: list[tuple[Tensor, Tensor]]
    length: int  # tokens that each row has room for


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a step computes of a row: `token_ids` at the positions from `start` on."""

    row: int
    start: int
    token_ids: Sequence[int]


class PlainModel:
    """Loads what `headrace serve` with the same settings would compute with. Raises what that raises."""

    def __init__(self, config: EngineConfig) -> None:
        self._device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, self._device, load_config(config.model).torch_dtype)
        path = choose_path(config, self._device, dtype)
        self._model = load_model(config.model, dtype=dtype, device=self._device, packed=path.packed, kernels=path.kernels, bits=path.bits)
        torch.set_num_threads(config.threads or physical_cores())
        self._kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, path)
        self.max_length = self._model.config.max_position_embeddings
        self.eos_token_ids = self._model.config.eos_token_ids

    def new_cache(self, rows: int, length: int) -> Cache:
        config = self._model.config
        size = (rows, length, config.num_kv_heads, config.head_dim)
        empty = [torch.empty(size, dtype=self._kv_dtype, device=self._device) for _ in range(2 * config.num_layers)]
        return Cache(layers=list(zip(empty[::2], empty[1::2], strict=True)), length=length)

    @torch.inference_mode()
    def step(self, cache: Cache, parts: Sequence[Part]) -> list[int]:
        """The likeliest token behind each part, whose keys and values are stored."""
        order = sorted(range(len(parts)), key=lambda i: len(parts[i].token_ids) > 1)  # the attention wants rows of one token first
        ordered = [parts[i] for i in order]
        lengths = [len(part.token_ids) for part in ordered]
        ends = list(itertools.accumulate(lengths))
        positions = [position for part, length in zip(ordered, lengths, strict=True) for position in range(part.start, part.start + length)]
        places = [part.row * cache.length + part.start + i for part, length in zip(ordered, lengths, strict=True) for i in range(length)]
        contexts = [part.start + length for part, length in zip(ordered, lengths, strict=True)]
        positions_T = self._tensor(positions, torch.int64)
        meta = AttentionMetadata(
            query_start_R1=self._tensor([0, *ends], torch.int32),
            context_len_R=self._tensor(contexts, torch.int32),
            block_table_RB=self._tensor([[part.row] for part in ordered], torch.int32),  # a row's place is one block as long as the row
            slot_mapping_T=self._tensor(places, torch.int64),
            positions_T=positions_T,
            query_lens=lengths,
            context_lens=contexts,
            num_decode_rows=lengths.count(1),
        )
        ids_T = self._tensor([token for part in ordered for token in part.token_ids], torch.int64)
        hidden_TE = self._model(ids_T, positions_T, cache.layers, meta)
        last_R = self._tensor([end - 1 for end in ends], torch.int64)
        tokens = self._model.compute_logits(hidden_TE.index_select(0, last_R)).argmax(dim=-1).tolist()
        by_part = dict(zip(order, tokens, strict=True))
        return [by_part[i] for i in range(len(parts))]

    def _tensor(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)
