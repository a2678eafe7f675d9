"""Prompts whose keys and values are kept, so that one that begins alike need not compute its beginning again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headrace.bench.rungs.plain_model import Cache


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    token_ids: Sequence[int]
    layers: list[tuple[Tensor, Tensor]]  # copies, [tokens, K, D]


class KeptPrefixes:
    """The latest prompts, `max_tokens` tokens of them at most."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._kept: list[_Kept] = []  # the latest at the end

    def fill(self, cache: Cache, row: int, prompt: Sequence[int]) -> int:
        """Copies what is known of a prompt into its row; how many tokens that is. The last one is always computed: it gives the first token."""
        if not self._kept:
            return 0
        best = max(self._kept, key=lambda kept: _common(kept.token_ids, prompt))
        count = min(_common(best.token_ids, prompt), len(prompt) - 1)
        for (k, v), (k_kept, v_kept) in zip(cache.layers, best.layers, strict=True):
            k[row, :count] = k_kept[:count]
            v[row, :count] = v_kept[:count]
        return count

    def keep(self, cache: Cache, row: int, prompt: Sequence[int]) -> None:
        count = len(prompt)
        if count > self._max_tokens:
            return
        self._kept = [kept for kept in self._kept if _common(kept.token_ids, prompt) < len(kept.token_ids)]  # what it begins with is in it
        layers = [(k[row, :count].clone(), v[row, :count].clone()) for k, v in cache.layers]
        self._kept.append(_Kept(token_ids=tuple(prompt), layers=layers))
        while sum(len(kept.token_ids) for kept in self._kept) > self._max_tokens:
            del self._kept[0]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
