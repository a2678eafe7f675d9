"""Why a prompt is found or not: each reason, what is told to whom, and that asking changes nothing."""

from __future__ import annotations

import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.block_pool import remembered_prefixes
from headrace.core.explain import Difference, Explanation, Query, explain
from headrace.core.kv_manager import BlockTable, KVManager

SIZE = 4
PROMPT = list(range(10, 22))  # three blocks


def ask(kv: KVManager, tokens: list[int], *, salt: str | None = None, tenant: str = "", now: float = 0.0) -> Explanation:
    return explain(kv, Query(query_id=7, token_ids=tuple(tokens), cache_salt=salt, tenant=tenant), now)


def start(kv: KVManager, tokens: list[int], *, salt: str | None = None, tenant: str = "", now: float = 0.0) -> tuple[BlockTable, int]:
    """Take the blocks of a prompt; nothing is computed yet."""
    kv.begin_plan(now)
    table = kv.new_table(salt=salt, tenant=tenant)
    taken = kv.take(table, tokens, read_cache=True, reserve=0)
    assert taken is not None
    kv.end_plan()
    return table, taken[0]


def serve(kv: KVManager, tokens: list[int], *, salt: str | None = None, tenant: str = "", now: float = 0.0) -> int:
    """A whole request; the tokens it found."""
    table, cached = start(kv, tokens, salt=salt, tenant=tenant, now=now)
    kv.register(table, tokens, len(tokens))
    kv.free(table)
    return cached


def manager(num_blocks: int = 16, **options: bool) -> KVManager:
    return KVManager(num_blocks=num_blocks, block_size=SIZE, **options)


def test_a_cached_prompt():
    kv = manager()
    serve(kv, PROMPT)
    found = ask(kv, [*PROMPT, 5])
    assert (found.query_id, found.reason, found.cached_blocks, found.cached_tokens, found.num_tokens) == (7, "cached", 3, 12, 13)
    found = ask(kv, PROMPT)
    assert (found.reason, found.cached_blocks, found.cached_tokens) == ("cached", 3, 11)


def test_what_is_remembered_is_bounded_by_the_blocks():
    """Of thousands of prompts that came and went a small pool keeps the latest, and what is cached can always be told."""
    kv = manager(num_blocks=6)
    prompts = [[number, 1, 2, 3] for number in range(5000)]
    for number, prompt in enumerate(prompts):
        serve(kv, prompt, now=float(number))
    kv.pool.check()
    kept = remembered_prefixes(6)
    assert kept == 1024
    assert len(kv.pool._evicted) == kept
    assert len(kv.journal._used) == kept + 6
    assert [ask(kv, prompt).reason for prompt in (prompts[0], prompts[-kept - 7], prompts[-kept - 6])] == ["never_seen", "never_seen", "evicted"]
    assert all(ask(kv, prompt).reason == "cached" for prompt in prompts[-6:])


def test_more_is_remembered_of_more_blocks_up_to_a_limit():
    assert [remembered_prefixes(count) for count in (1, 256, 1456, 1_000_000)] == [1024, 1024, 5824, 65_536]


def test_off_and_too_short():
    assert ask(manager(enable_prefix_caching=False), PROMPT).reason == "caching_off"
    short = ask(manager(), PROMPT[:3])
    assert (short.reason, short.cached_tokens) == ("below_one_block", 0)


def test_a_prompt_that_leaves_the_cached_one():
    kv = manager()
    serve(kv, PROMPT)
    serve(kv, [*PROMPT[:5], 99, 99, 99])
    changed = [*PROMPT[:6], 77, *PROMPT[7:]]
    found = ask(kv, changed)
    assert (found.reason, found.cached_blocks) == ("never_seen", 1)
    assert found.difference == Difference(position=6, cached_token_id=PROMPT[6], prompt_token_id=77)
    assert ask(kv, [1, 2, 3, 4]).difference is None, "nothing is shared"


def test_an_evicted_block_says_when():
    kv = manager(num_blocks=3)
    serve(kv, PROMPT, now=1.0)
    serve(kv, [50, 51, 52, 53], now=5.0)
    found = ask(kv, PROMPT, now=8.0)
    assert (found.reason, found.cached_blocks, found.evicted_s) == ("evicted", 2, 3.0)
    assert ask(kv, PROMPT, now=8.0, salt="s").reason == "other_salt", "under which the first blocks still are"
    serve(kv, PROMPT, now=9.0)
    assert ask(kv, PROMPT, now=9.0).reason == "cached"


def test_a_block_that_is_computed_now():
    kv = manager()
    table, _ = start(kv, PROMPT)
    found = ask(kv, [*PROMPT[:8], 1, 2, 3, 4])
    assert (found.reason, found.cached_blocks, found.awaited_tokens) == ("being_computed", 0, 8)
    kv.free(table)
    assert ask(kv, PROMPT).reason == "never_seen"


def test_another_salt():
    kv = manager()
    serve(kv, PROMPT, salt="mine")
    found = ask(kv, PROMPT)
    assert (found.reason, found.cached_blocks, found.difference) == ("other_salt", 0, None)
    serve(kv, PROMPT[:4])
    assert (ask(kv, PROMPT).reason, ask(kv, PROMPT).cached_blocks) == ("other_salt", 1)
    assert ask(kv, [*PROMPT[:4], 9, 9, 9, 9]).reason == "never_seen"


def test_nothing_of_another_tenant_is_told():
    kv = manager(num_blocks=6)
    serve(kv, PROMPT, tenant="a")
    serve(kv, PROMPT[:4], tenant="b")
    serve(kv, PROMPT, tenant="a", salt="hers")
    changed = [*PROMPT[:6], 77, *PROMPT[7:]]
    assert ask(kv, changed, tenant="a").difference is not None
    assert ask(kv, changed, tenant="b") == ask(kv, [*PROMPT[:4], 1, 2, 3, 4, *PROMPT[8:]], tenant="b")
    salted = [ask(kv, PROMPT, salt="other", tenant=tenant).reason for tenant in "abc"]
    assert salted == ["other_salt", "other_salt", "never_seen"], "b has sent the first block without a salt"
    assert ask(kv, [*PROMPT, 1, 2, 3, 4], salt="hers", tenant="b").difference is None
    serve(kv, list(range(100, 124)), tenant="b", now=1.0)  # evicts all
    assert [ask(kv, PROMPT, tenant=tenant).reason for tenant in "abc"] == ["evicted", "evicted", "never_seen"]
    serve(kv, PROMPT[:4], tenant="b", now=2.0)
    assert [ask(kv, PROMPT, tenant=tenant).reason for tenant in "abc"] == ["evicted", "never_seen", "never_seen"]


def test_whoever_hits_a_block_has_sent_its_words():
    kv = manager()
    serve(kv, PROMPT, tenant="a")
    assert serve(kv, [*PROMPT, 1], tenant="b") == 12
    changed = [*PROMPT[:6], 77, *PROMPT[7:]]
    assert ask(kv, changed, tenant="b").difference == ask(kv, changed, tenant="a").difference


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SALTS = st.sampled_from([None, "s", "t"])
REQUESTS = st.tuples(TOKENS, SALTS, st.sampled_from(["a", "b"]))


@settings(max_examples=150, deadline=None)
@given(st.lists(REQUESTS, max_size=12), REQUESTS)
def test_the_answer_is_what_a_request_finds_and_asking_changes_nothing(earlier, last):
    kv = manager(num_blocks=6)
    for index, (tokens, salt, tenant) in enumerate(earlier):
        serve(kv, tokens, salt=salt, tenant=tenant, now=float(index))
    tokens, salt, tenant = last
    other = copy.deepcopy(kv)
    found = ask(kv, tokens, salt=salt, tenant=tenant, now=99.0)
    kv.check([])
    for place in ("_lru", "_leased", "_blank", "_evicted"):
        assert list(getattr(kv.pool, place)) == list(getattr(other.pool, place))
    assert found.cached_tokens == serve(kv, tokens, salt=salt, tenant=tenant, now=99.0)
    assert (found.reason == "cached") == (len(tokens) >= SIZE and found.cached_blocks == len(tokens) // SIZE)
    if found.difference is not None:
        assert tokens[found.difference.position] == found.difference.prompt_token_id != found.difference.cached_token_id
