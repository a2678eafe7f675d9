"""The device's KV blocks: who holds them, and which of those nobody holds can still be found by their tokens.

A block is in exactly one of four places: held (ref count > 0), blank (nobody holds it and nothing in it can be found), in the LRU queue
(findable, evicted oldest first) or leased (findable, evicted only after the LRU queue is empty). All operations that plans make are O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from headrace.core.prefix import PrefixNode, same_prefix

REMEMBERED_A_BLOCK = 4
LEAST_REMEMBERED, MOST_REMEMBERED = 1024, 65_536


def remembered_prefixes(num_blocks: int) -> int:
    """Most prefixes that are remembered beyond those that are cached. Each takes about 400 bytes, so that a server's memory stops growing soon
    after its cache is full."""
    return min(max(REMEMBERED_A_BLOCK * num_blocks, LEAST_REMEMBERED), MOST_REMEMBERED)


class BlockPool:
    """`num_blocks` blocks with ids 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.max_leased = num_blocks // 2
        self.max_evicted = remembered_prefixes(num_blocks)
        self._now = 0.0
        self._ref_counts = [0] * num_blocks
        self._nodes: list[PrefixNode | None] = [None] * num_blocks
        self._lease_until = [0.0] * num_blocks
        self._by_digest: dict[bytes, list[int]] = {}  # more than one block only where digests collide
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._leased: OrderedDict[int, None] = OrderedDict()
        self._num_findable = 0
        self._evicted: OrderedDict[bytes, float] = OrderedDict()  # digest -> when; the latest evictions, the oldest first

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; findable ones count, they are evicted when needed."""
        return len(self._blank) + self.num_evictable

    @property
    def num_blank(self) -> int:
        """Blocks that nobody holds and in which nothing can be found."""
        return len(self._blank)

    @property
    def num_findable(self) -> int:
        return self._num_findable

    @property
    def num_evictable(self) -> int:
        """Findable blocks that nobody holds."""
        return len(self._lru) + len(self._leased)

    @property
    def num_leased(self) -> int:
        """Blocks that nobody holds and that are kept for a session."""
        return len(self._leased)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def node(self, block: int) -> PrefixNode | None:
        """What the block can be found by; None where it cannot."""
        return self._nodes[block]

    def check_written(self, blocks: Iterable[int]) -> None:
        """Nobody else may hold or find what is about to be written."""
        for block in blocks:
            assert self._ref_counts[block] == 1, f"block {block} is written while it is shared"
            assert self._nodes[block] is None, f"block {block} is written while it can be found"

    def expire_leases(self, now: float) -> None:
        """Move blocks whose lease has ended to the old end of the LRU queue. `now` also dates later releases."""
        self._now = now
        expired = []
        for block in self._leased:
            if self._lease_until[block] > now:
                break
            expired.append(block)
        for block in reversed(expired):  # the first released stays the first to go
            del self._leased[block]
            self._lru[block] = None
            self._lru.move_to_end(block, last=False)

    def allocate(self) -> int:
        """A block with ref count 1 and unknown content. The caller has checked `num_free`."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = (self._lru or self._leased).popitem(last=False)
            self._remember_eviction(block)
            self._forget(block)
        self._ref_counts[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Hold a block once more; it must be held or findable."""
        if self._ref_counts[block] == 0:
            assert self._nodes[block] is not None, f"block {block} is blank"
            self._lru.pop(block, None)
            self._leased.pop(block, None)
        self._ref_counts[block] += 1

    def release(self, block: int, *, lease_until: float = 0.0) -> None:
        """Hold a block once less. The last holder's release makes it evictable, after others until `lease_until` (seconds)."""
        assert self._ref_counts[block] > 0, f"block {block} is not held"
        self._lease_until[block] = max(self._lease_until[block], lease_until)
        self._ref_counts[block] -= 1
        if self._ref_counts[block] > 0:
            return
        if self._nodes[block] is None:
            self._lease_until[block] = 0.0
            self._blank.append(block)
        elif self._lease_until[block] > self._now:
            self._leased[block] = None
            if len(self._leased) > self.max_leased:
                oldest, _ = self._leased.popitem(last=False)
                self._lease_until[oldest] = 0.0
                self._lru[oldest] = None
        else:
            self._lru[block] = None

    def find(self, node: PrefixNode) -> int | None:
        """The block that holds exactly this prefix."""
        for block in self._by_digest.get(node.digest, ()):
            if same_prefix(self._nodes[block], node):
                return block
        return None

    def register(self, block: int, node: PrefixNode) -> None:
        """Make a held block findable. The caller has checked that no other block holds the same prefix."""
        assert self._ref_counts[block] > 0
        assert self._nodes[block] is None
        self._nodes[block] = node
        self._by_digest.setdefault(node.digest, []).append(block)
        self._evicted.pop(node.digest, None)
        self._num_findable += 1

    def evicted_at(self, node: PrefixNode) -> float | None:
        """When the prefix was last evicted, if that is remembered and nothing has held it since."""
        return self._evicted.get(node.digest)

    def findable_nodes(self) -> Iterator[PrefixNode]:
        """All of them, in no order. O(num_blocks): for answers to people, not for plans."""
        return (node for node in self._nodes if node is not None)

    def uncache(self, block: int) -> None:
        """Make a block unfindable, whoever holds it."""
        if self._nodes[block] is None:
            return
        self._forget(block)
        if self._ref_counts[block] == 0:
            self._lru.pop(block, None)
            self._leased.pop(block, None)
            self._blank.append(block)

    def _remember_eviction(self, block: int) -> None:
        node = self._nodes[block]
        assert node is not None
        self._evicted[node.digest] = self._now
        if len(self._evicted) > self.max_evicted:
            self._evicted.popitem(last=False)

    def _forget(self, block: int) -> None:
        node = self._nodes[block]
        assert node is not None
        same = self._by_digest[node.digest]
        same.remove(block)
        if not same:
            del self._by_digest[node.digest]
        self._nodes[block] = None
        self._lease_until[block] = 0.0
        self._num_findable -= 1

    def check(self) -> None:
        """Recompute every derived fact; raise AssertionError where one is wrong."""
        held = [block for block in range(self.num_blocks) if self._ref_counts[block]]
        places = [*held, *self._blank, *self._lru, *self._leased]
        assert sorted(places) == list(range(self.num_blocks)), "a block is lost or in two places"
        assert all(count >= 0 for count in self._ref_counts)
        findable = {block for block in range(self.num_blocks) if self._nodes[block] is not None}
        assert len(findable) == self._num_findable
        assert self.num_evictable == len(findable) - sum(self._nodes[block] is not None for block in held)
        assert findable.isdisjoint(self._blank)
        assert findable.issuperset(self._lru)
        assert findable.issuperset(self._leased)
        assert len(self._leased) <= self.max_leased
        assert len(self._evicted) <= self.max_evicted
        assert sorted(block for blocks in self._by_digest.values() for block in blocks) == sorted(findable)
        for digest, blocks in self._by_digest.items():
            assert blocks, "an empty entry"
            for i, block in enumerate(blocks):
                node = self._nodes[block]
                assert node is not None
                assert node.digest == digest
                assert not any(same_prefix(node, self._nodes[other]) for other in blocks[:i]), "one prefix in two findable blocks"
