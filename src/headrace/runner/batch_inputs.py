"""Turns the rows of a step into the tensors that the model reads.

All buffers are made once. On CPU the model reads them directly; on CUDA they are pinned and sent without waiting, which is safe because
a step's results are fetched before the next step writes to them.

Legend: S slots, R rows, T tokens of the step, B blocks of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.core.messages import Row
from headrace.kernels.attention import AttentionMetadata
from headrace.runner.token_history import TokenHistory


@dataclass(slots=True, kw_only=True)
class Batch:
    """One step's input. `order[i]` is the index of the caller's row that stands at place i: rows with one token come first."""

    input_ids_T: Tensor  # int64
    meta: AttentionMetadata
    order: list[int]
    query_starts: list[int]  # [R + 1] token offset of the row at each place


class _Buffer:
    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=dtype, pin_memory=on_cuda)
        self._device = torch.zeros(size, dtype=dtype, device=device) if on_cuda else self._host
        self.array = self._host.numpy()

    def send(self, count: int) -> Tensor:
        """The first `count` elements on the device."""
        if self._device is not self._host:
            self._device[:count].copy_(self._host[:count], non_blocking=True)
        return self._device[:count]


class BatchInputs:
    """Block tables of all slots and the input buffers of a step. The tensors of a `Batch` are views that the next `build` overwrites."""

    def __init__(
        self, *, history: TokenHistory, max_num_tokens: int, max_blocks: int, block_size: int, device: torch.device, deterministic: bool
    ) -> None:
        num_slots = len(history.length_S)
        self._history = history
        self._block_size = block_size
        self._deterministic = deterministic
        self._block_table_SB = np.zeros((num_slots, max_blocks), dtype=np.int32)
        self._input_ids = _Buffer(max_num_tokens, torch.int64, device)
        self._positions = _Buffer(max_num_tokens, torch.int64, device)
        self._slot_mapping = _Buffer(max_num_tokens, torch.int64, device)
        self._query_start = _Buffer(num_slots + 1, torch.int32, device)
        self._context_len = _Buffer(num_slots, torch.int32, device)
        self._prompt_tokens = _Buffer(num_slots, torch.int32, device)
        self._block_table = _Buffer(num_slots * max_blocks, torch.int32, device)

    def place_blocks(self, row: Row) -> None:
        """Enters the row's new blocks in its slot's table."""
        if row.new_block_ids:
            self._block_table_SB[row.slot, row.block_offset : row.block_offset + len(row.new_block_ids)] = row.new_block_ids

    def build(self, rows: Sequence[Row]) -> Batch:
        """The input of one step over `rows` (at least one; of different slots)."""
        order = [i for i, row in enumerate(rows) if row.num_tokens == 1]
        num_decode_rows = len(order)
        order += [i for i, row in enumerate(rows) if row.num_tokens > 1]
        num_rows = len(order)
        slot_R = np.fromiter((rows[i].slot for i in order), dtype=np.int64, count=num_rows)
        start_R = np.fromiter((rows[i].start for i in order), dtype=np.int64, count=num_rows)
        count_R = np.fromiter((rows[i].num_tokens for i in order), dtype=np.int64, count=num_rows)
        context_R = start_R + count_R
        assert (context_R <= self._history.filled_S[slot_R]).all(), "a row computes a token that is not known yet"

        query_start_R1 = self._query_start.array[: num_rows + 1]
        np.cumsum(count_R, out=query_start_R1[1:])
        num_tokens = int(query_start_R1[-1])
        positions_T = self._positions.array[:num_tokens]
        if num_decode_rows == num_rows:
            slot_T = slot_R
            positions_T[:] = start_R
        else:
            slot_T = np.repeat(slot_R, count_R)
            np.add(np.arange(num_tokens), np.repeat(start_R - query_start_R1[:-1], count_R), out=positions_T)
        self._input_ids.array[:num_tokens] = self._history.tokens_SL[slot_T, positions_T]
        block_T, offset_T = np.divmod(positions_T, self._block_size)
        self._slot_mapping.array[:num_tokens] = self._block_table_SB[slot_T, block_T].astype(np.int64) * self._block_size + offset_T
        self._context_len.array[:num_rows] = context_R
        prompt_R = self._history.num_prompt_S[slot_R]
        np.clip(prompt_R - start_R, 0, count_R, out=self._prompt_tokens.array[:num_rows], casting="unsafe")
        width = -(-int(context_R.max()) // self._block_size)
        self._block_table.array[: num_rows * width].reshape(num_rows, width)[:] = self._block_table_SB[slot_R, :width]

        meta = AttentionMetadata(
            query_start_R1=self._query_start.send(num_rows + 1),
            context_len_R=self._context_len.send(num_rows),
            block_table_RB=self._block_table.send(num_rows * width).view(num_rows, width),
            slot_mapping_T=self._slot_mapping.send(num_tokens),
            positions_T=self._positions.send(num_tokens),
            query_lens=count_R.tolist(),
            context_lens=context_R.tolist(),
            num_decode_rows=num_decode_rows,
            deterministic=self._deterministic,
            prompt_lens=prompt_R.tolist(),
            prompt_tokens_R=self._prompt_tokens.send(num_rows),
        )
        return Batch(input_ids_T=self._input_ids.send(num_tokens), meta=meta, order=order, query_starts=query_start_R1.tolist())
