"""Why prompts miss the prefix cache: every token that is looked up is found or has one cause."""

from __future__ import annotations

from headrace.core.prefix_misses import MAX_BEGINNINGS
from tests.core.block_world import Engine, config, request


def causes(engine: Engine) -> dict[str, int]:
    stats = engine.scheduler.stats()
    found = {cause: getattr(stats, f"prefix_miss_{cause}_tokens_total") for cause in ("new", "evicted", "other_salt", "partial")}
    assert sum(found.values()) + stats.prefix_hit_tokens_total == stats.prefix_query_tokens_total
    return {cause: count for cause, count in found.items() if count}


def run(engine: Engine, name: str, prompt: list[int], **fields: object) -> dict[str, int]:
    """The causes that one more request brings."""
    before = causes(engine)
    engine.add(request(name, prompt, 2, **fields))
    engine.run()
    return {cause: count - before.get(cause, 0) for cause, count in causes(engine).items() if count != before.get(cause, 0)}


def test_new_and_partial():
    engine = Engine(config())
    prompt = list(range(13))
    assert run(engine, "a", prompt) == {"new": 12, "partial": 1}
    assert run(engine, "b", prompt) == {"partial": 1}
    assert run(engine, "c", prompt[:12]) == {"partial": 1}, "found whole; its last token is computed again"
    assert run(engine, "d", [*prompt[:8], 40, 41, 42, 43, 44]) == {"new": 4, "partial": 1}
    assert run(engine, "e", [1, 2, 3]) == {"partial": 3}


def test_a_salt_for_each_request_kills_the_cache_and_is_named():
    engine = Engine(config())
    prompt = list(range(12))
    assert run(engine, "a", prompt, cache_salt="1") == {"new": 12}
    assert run(engine, "b", prompt, cache_salt="2") == {"other_salt": 12}
    assert run(engine, "c", prompt) == {"other_salt": 12}
    assert run(engine, "d", prompt, cache_salt="1") == {"partial": 1}
    assert run(engine, "e", [*prompt[:4], 30, 31, 32, 33], cache_salt="1") == {"new": 4}, "its beginning is there"


def test_what_made_room_is_named():
    engine = Engine(config(num_blocks=8))
    first = list(range(20))
    run(engine, "a", first)
    run(engine, "b", list(range(20, 44)))
    assert run(engine, "c", first)["evicted"] > 0


def test_choices_of_one_request_are_no_misses():
    engine = Engine(config())
    engine.add(request("a", list(range(13)), 2))
    engine.add(request("a-1", list(range(13)), 2, fork_of="a"))
    engine.run()
    assert causes(engine) == {"new": 12, "partial": 2}


def test_memory_is_bounded():
    engine = Engine(config())
    misses = engine.scheduler._admission.prefix_misses
    for number in range(MAX_BEGINNINGS + 10):
        misses._beginning((number, 1, 2, 3), None)
    assert len(misses._salts) == MAX_BEGINNINGS


def test_positions_behind_the_tokens_are_sampled():
    engine = Engine(config(block_size=16))
    engine.add(request("a", 18, 8))
    engine.turn()
    before = engine.scheduler.stats()
    after = engine.scheduler.stats()
    assert after.kv_sampled_positions_total - before.kv_sampled_positions_total == 32
    unused = after.kv_unused_positions_total - before.kv_unused_positions_total
    assert unused == 32 - len(next(iter(engine.scheduler._roster)).token_ids)
