"""Why prompt tokens were not found in the prefix cache, counted: hits and misses together are all tokens that were looked up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.block_pool import BlockPool
from headrace.core.prefix import PrefixNode

MAX_BEGINNINGS = 4096  # first blocks whose salt is remembered


@dataclass(slots=True, kw_only=True)
class MissTotals:
    """Tokens, by why the first missing block of their prompt was not there."""

    new: int = 0  # nothing is known of it
    evicted: int = 0  # it was cached and had to make room
    other_salt: int = 0  # the prompt's beginning came last under another salt
    partial: int = 0  # behind the last full block; and the last token, which is always computed


class PrefixMisses:
    """Fed with each prompt when it first starts. Bounded, and O(1) beside making the hash of one block."""

    def __init__(self) -> None:
        self.totals = MissTotals()
        self._salts: OrderedDict[int, str | None] = OrderedDict()  # hash of a first block's tokens -> the salt it came with last

    def note(
        self, token_ids: Sequence[int], *, num_cached: int, salt: str | None, chain: Sequence[PrefixNode], block_size: int, pool: BlockPool
    ) -> None:
        """A prompt of which `num_cached` tokens need no computing. `chain`: the nodes of its full blocks."""
        num_full = len(token_ids) // block_size
        num_found = -(-num_cached // block_size)  # a prompt that is found whole computes its last token again, in a copy of the last block
        known, earlier = self._beginning(token_ids[:block_size], salt) if num_full else (False, None)
        missing = (num_full - num_found) * block_size
        self.totals.partial += len(token_ids) - num_cached - max(missing, 0)
        if missing <= 0:
            return
        if pool.evicted_at(chain[num_found]) is not None:
            self.totals.evicted += missing
        elif num_found == 0 and known and earlier != salt:
            self.totals.other_salt += missing
        else:
            self.totals.new += missing

    def _beginning(self, token_ids: Sequence[int], salt: str | None) -> tuple[bool, str | None]:
        """Whether these tokens have begun a prompt before, and its salt."""
        key = hash(tuple(token_ids))
        known = key in self._salts
        earlier = self._salts.pop(key, None)
        self._salts[key] = salt
        if len(self._salts) > MAX_BEGINNINGS:
            self._salts.popitem(last=False)
        return known, earlier
