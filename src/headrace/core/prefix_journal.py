"""Which prefixes each tenant has used of late. No plan depends on it: it says what may be told to whom.

Blocks are shared between tenants, and their tokens are the words of whoever computed them: the tokens of a cached block are shown only to a
tenant that has sent the very same ones.
"""

from __future__ import annotations

from collections import OrderedDict

from headrace.core.prefix import PrefixNode


class PrefixJournal:
    """The `capacity` prefixes that were used last."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def note(self, tenant: str, node: PrefixNode) -> None:
        """The tenant has sent these tokens."""
        key = (tenant, node.digest)
        self._used[key] = None
        self._used.move_to_end(key)
        if len(self._used) > self._capacity:
            self._used.popitem(last=False)

    def has_used(self, tenant: str, node: PrefixNode) -> bool:
        return (tenant, node.digest) in self._used
