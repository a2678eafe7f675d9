"""The tokens of every slot, and who holds it. All on the host: each step ends with its samples there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.core.messages import Row, SlotStart


class TokenHistory:
    """Arrays over the slots S.

    `tokens_SL` int32: prompt and answer, valid below `length_S` (int64), and behind them guesses below `filled_S` (int64); `num_prompt_S`
    int64: how many of them are the prompt.
    """

    def __init__(self, *, num_slots: int, max_model_len: int) -> None:
        # one more than the longest request: the sample of a row that was planned ahead of the request's end
        self.tokens_SL = np.zeros((num_slots, max_model_len + 1), dtype=np.int32)  # pages are taken when written
        self.length_S = np.zeros(num_slots, dtype=np.int64)
        self.filled_S = np.zeros(num_slots, dtype=np.int64)
        self.num_prompt_S = np.zeros(num_slots, dtype=np.int64)
        self._holder: list[str | None] = [None] * num_slots

    def start(self, start: SlotStart) -> None:
        """Forgets whoever was in the slot."""
        count = len(start.token_ids)
        self.tokens_SL[start.slot, :count] = start.token_ids
        self.length_S[start.slot] = self.filled_S[start.slot] = count
        self.num_prompt_S[start.slot] = start.num_prompt_tokens
        self._holder[start.slot] = start.request_id

    def release(self, slot: int) -> None:
        """Rows that were planned for the slot's request before this are not run any more."""
        self._holder[slot] = None

    def holds(self, row: Row) -> bool:
        """Whether the row's slot is held by the row's request."""
        return self._holder[row.slot] == row.request_id

    def append(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """One new token for each of some different slots."""
        index = np.asarray(slots, dtype=np.int64)
        self.tokens_SL[index, self.length_S[index]] = token_ids
        self.length_S[index] += 1
        self.filled_S[index] = self.length_S[index]

    def guess(self, slot: int, token_ids: Sequence[int]) -> None:
        """What may follow, until the next `append` or `extend`."""
        first = self.length_S[slot]
        self.filled_S[slot] = first + len(token_ids)
        self.tokens_SL[slot, first : first + len(token_ids)] = token_ids

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Some new tokens for one slot."""
        self.guess(slot, token_ids)
        self.length_S[slot] = self.filled_S[slot]
