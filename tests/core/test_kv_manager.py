"""Block tables: a random walk in lockstep with a manager whose hash always collides, contents followed position by position."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.kv_manager import BlockTable, KVManager

SIZE = 2  # tokens in a block


def collide(data: bytes) -> bytes:
    return b"same"


class Holder:
    """One request: its tokens and its tables in both managers."""

    def __init__(self, tokens: list[int], salt: str | None, tables: list[BlockTable]) -> None:
        self.tokens = tokens
        self.salt = salt
        self.tables = tables

    @property
    def key(self) -> tuple[int, ...]:
        return tuple(self.tokens)


class KVMachine(RuleBasedStateMachine):
    """Each rule is one plan. `content[block]` is the prefix (salt, tokens) whose keys and values were written last."""

    def __init__(self) -> None:
        super().__init__()
        self.managers = [
            KVManager(num_blocks=12, block_size=SIZE, num_host_blocks=6, session_lease_s=10.0),
            KVManager(num_blocks=12, block_size=SIZE, num_host_blocks=6, session_lease_s=10.0, hash_function=collide),
        ]
        self.device: dict[int, tuple] = {}
        self.host: dict[int, tuple] = {}
        self.running: list[Holder] = []
        self.swapped: list[Holder] = []
        self.now = 0.0

    def begin(self) -> None:
        self.now += 1.0
        for manager in self.managers:
            manager.begin_plan(self.now)

    def end(self) -> None:
        for manager in self.managers:
            manager.end_plan()

    def write(self, holder: Holder, start: int) -> None:
        """Compute all positions from `start` on and make full blocks findable."""
        count = len(holder.tokens) - start
        for manager, table in zip(self.managers, holder.tables, strict=True):
            manager.mark_written(table, start, count)
            manager.register(table, holder.tokens, len(holder.tokens))
        for position in range(start, len(holder.tokens)):
            index = position // SIZE
            self.device[holder.tables[0].blocks[index]] = (holder.salt, *holder.tokens[: position + 1])

    def verify(self, holder: Holder) -> None:
        for index, block in enumerate(holder.tables[0].blocks):
            assert self.device[block] == (holder.salt, *holder.tokens[: (index + 1) * SIZE])

    def both(self, results: list) -> object:
        assert results[0] == results[1], "the hash function changed the outcome"
        return results[0]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=7), salt=st.sampled_from([None, None, "a"]), leased=st.booleans())
    def take(self, tokens: list[int], salt: str | None, leased: bool) -> None:
        self.begin()
        tables = [manager.new_table(salt=salt, session_id="s" if leased else None) for manager in self.managers]
        findable = {self.device[block] for block in range(12) if self.managers[0].pool.node(block) is not None}
        longest = 0
        while (longest + 1) * SIZE <= len(tokens) and (salt, *tokens[: (longest + 1) * SIZE]) in findable:
            longest += 1
        for manager, table in zip(self.managers, tables, strict=True):
            assert len(manager.match(table, tokens)) == longest
        taken = self.both([m.take(t, tokens, read_cache=True, reserve=0) for m, t in zip(self.managers, tables, strict=True)])
        if taken is not None:
            num_cached, copies = taken
            holder = Holder(list(tokens), salt, tables)
            self.running.append(holder)
            for source, to in copies:
                self.device[to] = self.device[source]
            assert num_cached in (longest * SIZE, len(tokens) - 1, len(tokens) - SIZE)
            for position in range(num_cached // SIZE):
                assert self.device[tables[0].blocks[position]] == (salt, *tokens[: (position + 1) * SIZE])
            self.write(holder, num_cached)
            self.verify(holder)
        self.end()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from([None, "a"]), sound=st.booleans())
    def restore(self, tokens: list[int], salt: str | None, sound: bool) -> None:
        """Blocks come from elsewhere: only blank ones are filled, and nothing is found of those that could not be."""
        self.begin()
        cached, blank = self.managers[0].pool.num_findable, self.managers[0].pool.num_blank
        tables = [manager.new_table(salt=salt, session_id="s") for manager in self.managers]
        new = self.both([m.restore(t, tokens) for m, t in zip(self.managers, tables, strict=True)])
        assert isinstance(new, list)
        blocks = tables[0].blocks
        assert len(blocks) == len(tokens) // SIZE or len(new) == blank
        for index, block in enumerate(blocks):
            content = (salt, *tokens[: (index + 1) * SIZE])
            assert block in new or self.device[block] == content
            self.device[block] = content
        for manager, table in zip(self.managers, tables, strict=True):
            if sound:
                manager.register(table, tokens, len(blocks) * SIZE)
            manager.free(table, lease_s=5.0)
            assert manager.pool.num_findable == cached + (len(new) if sound else 0)
        self.end()

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 100), token=st.integers(0, 1))
    def decode(self, pick: int, token: int) -> None:
        self.begin()
        holder = self.running[pick % len(self.running)]
        if self.both([m.grow(t, len(holder.tokens) + 1) for m, t in zip(self.managers, holder.tables, strict=True)]):
            holder.tokens.append(token)
            self.write(holder, len(holder.tokens) - 1)
        self.verify(holder)
        self.end()

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 100), num_prompt=st.integers(1, 7))
    def fork(self, pick: int, num_prompt: int) -> None:
        self.begin()
        parent = self.running[pick % len(self.running)]
        num_prompt = min(num_prompt, len(parent.tokens))
        tables = [manager.new_table(salt=parent.salt) for manager in self.managers]
        taken = self.both(
            [m.fork(p, c, num_prompt, reserve=0) for m, p, c in zip(self.managers, parent.tables, tables, strict=True)],
        )
        if taken is not None:
            num_cached, copies = taken
            assert num_cached == num_prompt - 1
            assert len(copies) == (num_cached % SIZE > 0)
            child = Holder(parent.tokens[:num_prompt], parent.salt, tables)
            self.running.append(child)
            for _, to in copies:
                self.device[to] = (parent.salt, *parent.tokens[:num_cached])
            self.write(child, num_cached)
            self.verify(child)
        self.verify(parent)
        self.end()

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 100))
    def free(self, pick: int) -> None:
        holder = self.running.pop(pick % len(self.running))
        for manager, table in zip(self.managers, holder.tables, strict=True):
            manager.free(table)

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 100))
    def swap_out(self, pick: int) -> None:
        holder = self.running[pick % len(self.running)]
        if not self.both([manager.can_swap_out(len(holder.tokens)) for manager in self.managers]):
            return
        self.begin()
        self.running.remove(holder)
        self.swapped.append(holder)
        pairs = self.both([m.swap_out(t, len(holder.tokens)) for m, t in zip(self.managers, holder.tables, strict=True)])
        for device, host in pairs:
            self.host[host] = self.device[device]
        self.end()

    @precondition(lambda self: self.swapped)
    @rule(pick=st.integers(0, 100))
    def swap_in(self, pick: int) -> None:
        self.begin()
        holder = self.swapped[pick % len(self.swapped)]
        pairs = self.both([m.swap_in(t, holder.tokens, reserve=0) for m, t in zip(self.managers, holder.tables, strict=True)])
        if pairs is not None:
            self.swapped.remove(holder)
            self.running.append(holder)
            for host, device in pairs:
                self.device[device] = self.host[host]
                assert host not in self.managers[0]._host_free, "the host block is read in this plan"
            self.verify(holder)
            for manager, table in zip(self.managers, holder.tables, strict=True):
                manager.register(table, holder.tokens, len(holder.tokens))
        self.end()

    @invariant()
    def conserved(self) -> None:
        for i, manager in enumerate(self.managers):
            manager.check([holder.tables[i] for holder in (*self.running, *self.swapped)])
        for holder in self.running:
            self.verify(holder)


TestKV = KVMachine.TestCase
TestKV.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def run_prompt(kv: KVManager, tokens: list[int], *, leased: bool = False, salt: str | None = None) -> tuple[BlockTable, int]:
    """Take, compute and register a whole prompt as one plan; (table, cached tokens)."""
    kv.begin_plan(kv._now)
    table = kv.new_table(salt=salt, session_id="s" if leased else None)
    taken = kv.take(table, tokens, read_cache=True, reserve=0)
    assert taken is not None
    kv.register(table, tokens, len(tokens))
    kv.end_plan()
    return table, taken[0]


def test_later_blocks_are_evicted_before_earlier_ones():
    kv = KVManager(num_blocks=4, block_size=SIZE)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    kv.free(run_prompt(kv, tokens)[0])
    run_prompt(kv, [9, 9, 9])
    probe = kv.new_table()
    assert len(kv.match(probe, tokens)) == 2


def test_a_session_keeps_its_blocks_ahead_of_others_until_the_lease_ends():
    for seconds, kept in ((5.0, 2), (50.0, 0)):
        kv = KVManager(num_blocks=8, block_size=SIZE, session_lease_s=10.0)
        kv.free(run_prompt(kv, [1, 1, 1, 1], leased=True)[0])
        kv.free(run_prompt(kv, [2, 2, 2, 2])[0])
        kv.begin_plan(seconds)
        run_prompt(kv, [3] * 12)
        assert len(kv.match(kv.new_table(), [1, 1, 1, 1])) == kept


def test_a_prompt_found_whole_is_copied_and_its_last_token_computed():
    kv = KVManager(num_blocks=8, block_size=SIZE)
    tokens = [1, 2, 3, 4]
    first, _ = run_prompt(kv, tokens)
    kv.begin_plan(0.0)
    second = kv.new_table()
    assert kv.take(second, tokens, read_cache=True, reserve=0) == (3, [(first.blocks[1], second.blocks[1])])
    assert second.blocks[0] == first.blocks[0]
    assert second.blocks[1] != first.blocks[1]
    kv.end_plan()
    kv.check([first, second])


def test_a_block_that_this_plan_writes_is_computed_again_rather_than_copied():
    kv = KVManager(num_blocks=8, block_size=SIZE)
    tokens = [1, 2, 3, 4]
    kv.begin_plan(0.0)
    first, second = kv.new_table(), kv.new_table()
    kv.take(first, tokens, read_cache=True, reserve=0)
    kv.mark_written(first, 0, 4)
    kv.register(first, tokens, 4)
    assert kv.take(second, tokens, read_cache=True, reserve=0) == (2, [])
    kv.end_plan()


def test_a_source_is_not_evicted_for_its_own_copy():
    kv = KVManager(num_blocks=2, block_size=SIZE)
    tokens = [1, 2, 3, 4]
    kv.free(run_prompt(kv, tokens)[0])
    kv.begin_plan(0.0)
    table = kv.new_table()
    assert kv.take(table, tokens, read_cache=True, reserve=0) == (2, [])  # no third block to copy to
    kv.end_plan()
    kv.check([table])


def test_a_source_is_not_evicted_for_others_in_the_same_plan():
    kv = KVManager(num_blocks=6, block_size=SIZE)
    kv.free(run_prompt(kv, [1, 2, 3, 4])[0])
    kv.free(run_prompt(kv, [9, 9])[0])
    kv.begin_plan(0.0)
    table, other = kv.new_table(), kv.new_table()
    _, copies = kv.take(table, [1, 2, 3, 4], read_cache=True, reserve=0)
    ((source, to),) = copies
    assert kv.take(other, [8] * 6, read_cache=True, reserve=0) is not None  # takes all other blocks
    assert source not in (to, *other.blocks)
    assert kv.pool.num_free == 0
    kv.end_plan()
    assert kv.pool.num_free == 1
    kv.check([table, other])


def test_a_prefix_in_flight_is_seen_until_it_is_registered():
    kv = KVManager(num_blocks=16, block_size=SIZE)
    tokens = [1, 2, 3, 4, 5, 6]
    kv.begin_plan(0.0)
    first = kv.new_table()
    kv.take(first, tokens, read_cache=True, reserve=0)
    second = kv.new_table()
    found = kv.in_flight(second, [1, 2, 3, 4, 9, 9], 0)
    assert found is not None
    assert found.holder is first
    assert found.num_tokens == 4
    assert kv.in_flight(kv.new_table(salt="other"), tokens, 0) is None
    kv.register(first, tokens, 2)
    assert not kv.still_in_flight(found)
    kv.free(first)
    kv.end_plan()
    assert kv.in_flight(second, tokens, len(kv.match(second, tokens))) is None
    kv.check([])


def test_a_colliding_hash_never_gives_another_prompts_blocks():
    kv = KVManager(num_blocks=16, block_size=SIZE, hash_function=collide)
    run_prompt(kv, [1, 1, 2, 2])
    assert run_prompt(kv, [3, 3, 2, 2])[1] == 0  # the second block has the same tokens and another parent
    assert run_prompt(kv, [1, 1, 2, 2, 5])[1] == 4
    assert run_prompt(kv, [1, 1, 2, 2, 5], salt="a")[1] == 0
