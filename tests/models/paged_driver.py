"""Runs a Decoder over a paged cache the way a runner does, for tests of models: many sequences, any chunking, scattered blocks."""

from __future__ import annotations

import random
from itertools import accumulate

import torch
from torch import Tensor

from headrace.kernels.attention import AttentionMetadata
from headrace.models.decoder import Decoder


class PagedDriver:
    """Sequences are named by number; `step` computes tokens of several at once and returns the logits at each of their positions."""

    def __init__(
        self, model: Decoder, *, num_blocks: int = 64, block_size: int = 4, deterministic: bool = False, kv_dtype: torch.dtype | None = None
    ) -> None:
        self.model, self.block_size, self.deterministic = model, block_size, deterministic
        config = model.config
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        dtype = kv_dtype or model.dtype
        # NaN wherever nothing was written: reading it shows
        self.kv_caches = [tuple(torch.full(shape, float("nan"), dtype=dtype) for _ in "kv") for _ in range(config.num_layers)]
        self.free = list(range(num_blocks))
        random.Random(0).shuffle(self.free)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    def step(self, work: dict[int, list[int]], *, prompt_lens: dict[int, int] | None = None) -> dict[int, Tensor]:
        """`work`: sequence -> its next tokens. Returns sequence -> logits [its tokens, V] float32."""
        order = sorted(work, key=lambda sequence: len(work[sequence]) != 1)
        positions: list[int] = []
        slots: list[int] = []
        for sequence in order:
            table, start = self.tables.setdefault(sequence, []), self.lengths.get(sequence, 0)
            end = self.lengths[sequence] = start + len(work[sequence])
            while len(table) * self.block_size < end:
                table.append(self.free.pop())
            positions += range(start, end)
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(start, end)]
        query_lens = [len(work[sequence]) for sequence in order]
        width = max(len(self.tables[sequence]) for sequence in order)
        meta = AttentionMetadata(
            query_start_R1=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
            context_len_R=torch.tensor([self.lengths[sequence] for sequence in order], dtype=torch.int32),
            block_table_RB=torch.tensor([self.tables[s] + [0] * (width - len(self.tables[s])) for s in order], dtype=torch.int32),
            slot_mapping_T=torch.tensor(slots),
            positions_T=torch.tensor(positions),
            query_lens=query_lens,
            context_lens=[self.lengths[sequence] for sequence in order],
            num_decode_rows=query_lens.count(1),
            prompt_lens=None if prompt_lens is None else [prompt_lens[sequence] for sequence in order],
            prompt_tokens_R=None if prompt_lens is None else torch.tensor([self._of_prompt(s, len(work[s]), prompt_lens[s]) for s in order]).int(),
            deterministic=self.deterministic,
        )
        with torch.inference_mode():
            ids = torch.tensor([token for sequence in order for token in work[sequence]])
            logits = self.model.compute_logits(self.model(ids, meta.positions_T, self.kv_caches, meta))
        return dict(zip(order, logits.split(query_lens), strict=True))

    def _of_prompt(self, sequence: int, count: int, prompt_len: int) -> int:
        return min(max(prompt_len - (self.lengths[sequence] - count), 0), count)

    def prefill(self, tokens: list[int], *, chunks: list[int] | None = None, sequence: int = 0) -> Tensor:
        """Logits [len(tokens), V] of one sequence, computed in chunks of the given sizes (they must sum to its length)."""
        parts, first = [], 0
        for size in chunks or [len(tokens)]:
            parts.append(self.step({sequence: tokens[first : first + size]}, prompt_lens={sequence: len(tokens)})[sequence])
            first += size
        assert first == len(tokens)
        return torch.cat(parts)

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` greedy tokens after `prompt`."""
        logits = self.prefill(prompt)
        out = [int(logits[-1].argmax())]
        while len(out) < count:
            logits = self.step({0: [out[-1]]}, prompt_lens={0: len(prompt)})[0]
            out.append(int(logits[-1].argmax()))
        return out
