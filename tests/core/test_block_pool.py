"""The pool against a naive model that keeps plain lists and searches them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.block_pool import BlockPool
from headrace.core.prefix import blake2b_digest, make_node

NUM_BLOCKS = 7


def node_of(prefix: tuple[int, ...]):
    """The node of a prefix in blocks of one token, made anew each time so that identity never helps."""
    node = None
    for token in prefix:
        node = make_node(node, None, (token,), lambda data: blake2b_digest(data)[:1])  # one byte: collisions happen
    return node


prefixes = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.now = 0.0
        self.refs = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.keys: dict[int, tuple[int, ...]] = {}  # findable blocks
        self.lease: dict[int, float] = {}
        self.unleased: list[int] = []  # findable and not held, oldest first
        self.leased: list[int] = []

    def blanks(self) -> set[int]:
        return {block for block, refs in self.refs.items() if refs == 0 and block not in self.keys}

    @precondition(lambda self: 0 in self.refs.values())
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        if self.blanks():
            assert block in self.blanks()
        else:
            expected = (self.unleased or self.leased).pop(0)
            assert block == expected
            del self.keys[block]
            self.lease.pop(block, None)
        self.refs[block] = 1

    @rule(prefix=prefixes)
    def acquire_found(self, prefix: tuple[int, ...]) -> None:
        found = self.pool.find(node_of(prefix))
        assert found == next((block for block, key in self.keys.items() if key == prefix), None)
        if found is not None:
            self.pool.acquire(found)
            self.refs[found] += 1
            for places in (self.unleased, self.leased):
                if found in places:
                    places.remove(found)

    @precondition(lambda self: any(self.refs.values()))
    @rule(pick=st.integers(0, 100), seconds=st.sampled_from([0, 0, 5, 20]))
    def release(self, pick: int, seconds: float) -> None:
        held = [block for block, refs in self.refs.items() if refs]
        block = held[pick % len(held)]
        lease_until = self.now + seconds if seconds else 0.0
        self.pool.release(block, lease_until=lease_until)
        self.lease[block] = max(self.lease.get(block, 0.0), lease_until)
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if block not in self.keys:
                self.lease.pop(block)
            elif self.lease[block] > self.now:
                self.leased.append(block)
                if len(self.leased) > NUM_BLOCKS // 2:
                    oldest = self.leased.pop(0)
                    self.lease.pop(oldest)
                    self.unleased.append(oldest)
            else:
                self.unleased.append(block)

    @rule(pick=st.integers(0, 100), prefix=prefixes)
    def register(self, pick: int, prefix: tuple[int, ...]) -> None:
        held = [block for block, refs in self.refs.items() if refs and block not in self.keys]
        if held and prefix not in self.keys.values():
            block = held[pick % len(held)]
            self.pool.register(block, node_of(prefix))
            self.keys[block] = prefix

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def uncache(self, block: int) -> None:
        self.pool.uncache(block)
        if self.keys.pop(block, None) is not None:
            self.lease.pop(block, None)
            for places in (self.unleased, self.leased):
                if block in places:
                    places.remove(block)

    @rule(seconds=st.sampled_from([1, 6, 30]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.pool.expire_leases(self.now)
        expired = []
        while self.leased and self.lease[self.leased[0]] <= self.now:
            expired.append(self.leased.pop(0))
        self.unleased[:0] = expired

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.num_free == sum(refs == 0 for refs in self.refs.values())
        assert self.pool.num_findable == len(self.keys)
        assert self.pool.num_leased == len(self.leased)
        assert all(self.pool.ref_count(block) == refs for block, refs in self.refs.items())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def cached(pool: BlockPool, prefix: tuple[int, ...]) -> int:
    block = pool.allocate()
    pool.register(block, node_of(prefix))
    return block


def test_blank_blocks_go_first_then_the_least_recently_used():
    pool = BlockPool(3)
    first, second = cached(pool, (1,)), cached(pool, (2,))
    pool.release(first)
    pool.release(second)
    assert pool.find(node_of((1,))) == first  # looking is not using
    assert pool.allocate() not in (first, second)
    assert [pool.allocate(), pool.allocate()] == [first, second]
    assert pool.find(node_of((1,))) is None


def test_leases_order_evictions_but_never_refuse():
    pool = BlockPool(4)
    blocks = [cached(pool, (i,)) for i in range(4)]
    for block in blocks:
        pool.release(block, lease_until=10.0)
    assert pool.num_leased == 2  # half of the pool
    assert [pool.allocate() for _ in range(4)] == blocks
    assert pool.num_free == 0


def test_a_lease_outlives_use_by_others_until_it_expires():
    pool = BlockPool(4)
    leased, other = cached(pool, (1,)), cached(pool, (2,))
    pool.release(leased, lease_until=10.0)
    pool.acquire(leased)
    pool.release(leased)
    pool.release(other)
    pool.allocate(), pool.allocate()
    assert pool.find(node_of((1,))) == leased
    pool.expire_leases(11.0)
    assert pool.allocate() == leased  # expired: older than the other


def test_misuse_is_an_assertion():
    pool = BlockPool(2)
    with pytest.raises(AssertionError):
        pool.release(0)
    with pytest.raises(AssertionError):
        pool.acquire(0)


@pytest.mark.parametrize("break_it", ["lost", "twice", "count", "findable"])
def test_check_finds_what_is_wrong(break_it: str):
    pool = BlockPool(3)
    block = cached(pool, (1,))
    pool.check()
    if break_it == "lost":
        pool._blank.pop()
    elif break_it == "twice":
        pool._lru[block] = None
    elif break_it == "count":
        pool._num_findable += 1
    else:
        pool._nodes[block] = None
    with pytest.raises(AssertionError):
        pool.check()
