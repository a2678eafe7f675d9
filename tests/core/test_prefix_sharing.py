"""What requests share: the prefix cache, prefixes that are being computed, and the choices of one request."""

from __future__ import annotations

import pytest

from tests.core.block_world import Engine, config, request, score


def test_the_second_request_over_a_prompt_is_cached_but_for_its_last_token():
    engine = Engine(config())
    prompt = list(range(13))
    for name, cached in (("a", 0), ("b", 12), ("c", 12)):
        engine.add(request(name, prompt, 4))
        engine.run()
        assert engine.outputs[name][0].cached_tokens == cached
    engine.add(request("d", prompt[:12], 4))  # found whole: copy, and compute one token
    engine.run()
    assert engine.outputs["d"][0].cached_tokens == 11
    assert engine.world.computed["d"] == 1 + 3
    engine.check_answers()
    stats = engine.scheduler.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total, stats.prompt_tokens_total) == (51, 35, 51)


def test_salts_and_switches_separate():
    engine = Engine(config())
    prompt = list(range(13))
    for name, salt, cached in (("a", "x", 0), ("b", "y", 0), ("c", None, 0), ("d", "x", 12)):
        engine.add(request(name, prompt, 2, cache_salt=salt))
        engine.run()
        assert engine.outputs[name][0].cached_tokens == cached
    off = Engine(config(enable_prefix_caching=False))
    for name in "ab":
        off.add(request(name, prompt, 2))
        off.run()
        assert off.outputs[name][0].cached_tokens == 0
    assert off.scheduler.stats().num_cached_blocks == 0
    assert off.scheduler.stats().prefix_query_tokens_total == 0


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation():
    engine = Engine(config())
    engine.add(request("a", 6, 11, session_id="s"))
    engine.run()
    whole = [*engine.messages["a"].prompt_token_ids, *engine.tokens("a")]
    engine.add(request("b", [*whole, 1, 2], 2, session_id="s"))
    engine.run()
    assert engine.outputs["b"][0].cached_tokens == 16


def test_a_burst_over_one_prefix_computes_it_once():
    engine = Engine(config(max_num_batched_tokens=32, num_blocks=200))
    prefix = list(range(48))
    for i in range(6):
        engine.add(request(f"r{i}", [*prefix, 100 + i, 101 + i], 2))
    engine.run()
    assert sum(engine.world.computed.values()) == 48 + 6 * (2 + 1)
    assert [engine.outputs[f"r{i}"][0].cached_tokens for i in range(6)] == [0, 48, 48, 48, 48, 48]
    engine.check_answers()


def test_a_burst_over_one_prefix_shares_it_in_the_same_step():
    engine = Engine(config(max_num_batched_tokens=64))
    for i in range(4):
        engine.add(request(f"r{i}", [*range(40), 100 + i], 2))
    assert engine.plan().num_tokens == 40 + 4


def test_a_long_prompt_that_others_wait_for_is_computed_only_as_far_as_they_need_it_first():
    engine = Engine(config(max_num_batched_tokens=64, max_num_seqs=16))
    engine.add(request("long", list(range(200)), 2))
    for i in range(6):
        engine.add(request(f"short{i}", [*range(8), 300 + i], 2))
    plan = engine.plan()
    done = {row.request_id for row in plan.rows if row.sample}
    assert done == {f"short{i}" for i in range(6)}
    engine.run()
    engine.check_answers()


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_forks_share_the_prompt_and_compute_one_token_of_it(num_prompt: int, ahead: bool, caching: bool):
    engine = Engine(config(enable_prefix_caching=caching))
    prompt = list(range(num_prompt))
    for i in range(3):
        engine.add(request(f"c{i}", prompt, 6, fork_of="c0" if i else None))
    engine.run(ahead=ahead)
    engine.check_answers()
    engine.check_at_rest()
    for child in ("c1", "c2"):
        assert engine.outputs[child][0].cached_tokens == num_prompt - 1
        assert engine.world.computed[child] == 6


@pytest.mark.parametrize("ahead", [False, True])
def test_forks_of_a_prompt_that_is_found_whole(ahead: bool):
    """The parent starts on a copied block; a fork must not copy from that block in the same step."""
    engine = Engine(config())
    prompt = list(range(8))
    engine.add(request("warm", prompt, 1))
    engine.run()
    for i in range(3):
        engine.add(request(f"c{i}", prompt, 6, fork_of="c0" if i else None))
    engine.run(ahead=ahead)
    assert sum(len(plan.copies) for plan in engine.plans) == 3
    engine.check_answers()
    engine.check_at_rest()


def test_a_fork_whose_parent_is_gone_is_an_ordinary_request():
    engine = Engine(config())
    prompt = list(range(9))
    engine.add(request("c0", prompt, 1))
    engine.run()
    engine.add(request("c1", prompt, 4, fork_of="c0"))
    engine.add(request("c2", prompt, 4, fork_of="never"))
    engine.run()
    assert engine.outputs["c1"][0].cached_tokens == 8
    engine.check_answers()


def test_a_fork_waits_for_a_parent_that_waits():
    engine = Engine(config(max_num_seqs=1))
    for i in range(3):
        engine.add(request(f"c{i}", 9, 3, fork_of="c0" if i else None))
    engine.run()
    assert [engine.end(f"c{i}").finish_reason for i in range(3)] == ["length"] * 3


def test_prompt_scores_are_whole_though_chunked_cached_and_preempted():
    engine = Engine(config(max_num_batched_tokens=8, num_blocks=12, max_num_seqs=4))
    prompt = list(range(21))
    engine.add(request("warm", prompt, 2))
    engine.run()
    engine.add(request("old", 5, 30, arrival=engine.now))
    engine.turn()
    engine.add(request("a", prompt, 4, arrival=engine.now, prompt_logprobs=1))
    engine.run()
    first = engine.outputs["a"][0]
    assert first.prompt_logprobs == tuple(score(prompt, i) for i in range(1, 21))
    assert first.cached_tokens == 0
    assert all(output.prompt_logprobs is None for output in engine.outputs["a"][1:])
    engine.check_answers()


def test_a_parent_that_is_computed_again_is_forked_when_it_decodes():
    """The rest of its answer is written to the block that the fork copies from, by a row that is planned after the copy."""
    engine = Engine(config(num_blocks=13, max_num_batched_tokens=11, enable_prefix_caching=False, preemption_mode="recompute"))
    engine.add(request("old", 4, 30, arrival=0.0))
    engine.add(request("parent", 10, 40, arrival=1.0))
    parent = engine.scheduler._roster.get("parent")
    assert parent is not None
    while not (parent.num_preemptions and parent.num_computed == 11 and parent.num_remaining > 1):
        assert engine.turn(ahead=False)
    engine.add(request("fork", engine.messages["parent"].prompt_token_ids, 4, arrival=2.0, fork_of="parent"))
    engine.run(ahead=False)
    engine.check_answers()
    engine.check_at_rest()
