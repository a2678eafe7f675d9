"""One vector for a prompt, out of its hidden states after the final norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.core.messages import Pooling, Row, SlotStart


@dataclass(slots=True, kw_only=True)
class _Prompt:
    kind: Pooling
    num_tokens: int
    sum_E: Tensor | None = None  # float64, of the positions so far; the cut into chunks does not show in the mean


class PromptPooler:
    """Follows the prompts of all slots that ask for a vector, whatever their chunks."""

    def __init__(self, num_slots: int) -> None:
        self._prompts: list[_Prompt | None] = [None] * num_slots

    def start(self, start: SlotStart) -> None:
        """Forgets whoever was in the slot."""
        self._prompts[start.slot] = None if start.pooling is None else _Prompt(kind=start.pooling, num_tokens=start.num_prompt_tokens)

    def pool(self, rows: Sequence[Row], hidden_TE: Tensor, firsts: Sequence[int]) -> list[bytes | None]:
        """The vector of each row that computes the last position of such a prompt, as little-endian float32; None for all others.

        `hidden_TE`: the hidden states of the step; those of a row begin at its place in `firsts`. A vector may hold NaN or infinity where the
        model gave them.
        """
        vectors = {index: vector for index, row in enumerate(rows) if (vector := self._take(row, hidden_TE, firsts[index])) is not None}
        pooled: list[bytes | None] = [None] * len(rows)
        if vectors:
            values_NE = torch.stack(list(vectors.values())).cpu().numpy().astype("<f4")
            for index, values_E in zip(vectors, values_NE, strict=True):
                pooled[index] = values_E.tobytes()
        return pooled

    def _take(self, row: Row, hidden_TE: Tensor, first: int) -> Tensor | None:
        prompt = self._prompts[row.slot]
        if prompt is None:
            return None
        hidden_TE = hidden_TE[first : first + row.num_tokens]
        end = row.start + row.num_tokens
        if prompt.kind == "mean":
            sum_E = hidden_TE.sum(dim=0, dtype=torch.float64)
            prompt.sum_E = sum_E if row.start == 0 else prompt.sum_E + sum_E
        if end < prompt.num_tokens:
            return None
        return hidden_TE[-1].float() if prompt.sum_E is None else (prompt.sum_E / end).float()
