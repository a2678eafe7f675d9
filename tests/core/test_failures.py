"""What a failed row or step takes down with it, and what it leaves alone."""

from __future__ import annotations

import pytest

from tests.core.block_world import Engine, config, naive_answer, request


def test_a_failed_row_ends_its_request_alone():
    engine = Engine(config())
    for name in "ab":
        engine.add(request(name, 9, 8))
    engine.plan(), engine.plan()
    engine.update(failing=frozenset({"a"}))
    end = engine.end("a")
    assert (end.finish_reason, end.error_code) == ("error", "request_failed")
    assert "not finite" in end.error_message
    engine.run()
    assert engine.end("b").finish_reason == "length"
    engine.check_answers()
    engine.check_at_rest()


def test_blocks_of_a_failed_row_are_not_found_again():
    engine = Engine(config())
    prompt = list(range(17))
    engine.add(request("a", prompt, 8))
    engine.plan(), engine.update(failing=frozenset({"a"}))
    engine.add(request("b", prompt, 8))
    engine.run()
    assert engine.outputs["b"][0].cached_tokens == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_failed_step_ends_its_requests_and_uncaches_their_blocks(ahead: bool):
    engine = Engine(config())
    prompt = list(range(17))
    engine.add(request("a", prompt, 8))
    engine.plan()
    if ahead:
        engine.plan()
    engine.fail_step()
    assert engine.end("a").error_code == "request_failed"
    assert engine.end("a").error_message == "the step failed"
    engine.add(request("b", prompt, 8))
    engine.run()
    assert engine.outputs["b"][0].cached_tokens == 0
    engine.check_answers()
    engine.check_at_rest()


def test_what_was_computed_before_the_failed_step_stays_cached():
    engine = Engine(config())
    prompt = list(range(16))
    engine.add(request("warm", prompt, 1))
    engine.run()
    engine.add(request("a", [*prompt, *range(9)], 4))
    engine.plan(), engine.fail_step()
    engine.add(request("b", [*prompt, *range(9)], 4))
    engine.run()
    assert engine.outputs["b"][0].cached_tokens == 16
    engine.check_answers()


def test_a_request_that_builds_on_a_failed_step_fails_with_it_and_others_go_on():
    engine = Engine(config(max_num_batched_tokens=64))
    prompt = list(range(17))
    engine.add(request("a", prompt, 8))
    engine.plan()
    engine.add(request("b", [*prompt, 1], 8))  # finds blocks that the failed step should have filled
    engine.add(request("other", [40, 41, 42], 8))
    plan = engine.plan()
    assert {row.request_id for row in plan.rows} == {"a", "b", "other"}
    engine.fail_step()
    assert engine.end("a").finish_reason == engine.end("b").finish_reason == "error"
    engine.run()
    assert engine.tokens("other") == naive_answer(engine.messages["other"])[0]
    engine.check_at_rest()


def test_a_fork_that_copies_from_a_failed_step_fails_with_it():
    engine = Engine(config())
    for i in range(2):
        engine.add(request(f"c{i}", [1, 2, 3], 8, fork_of="c0" if i else None))
    engine.plan()
    assert engine.plan().copies
    engine.fail_step()
    assert engine.end("c0").finish_reason == engine.end("c1").finish_reason == "error"
    engine.run()
    engine.check_at_rest()


def test_a_request_fails_that_builds_on_a_cancelled_one_of_the_failed_step():
    engine = Engine(config())
    prompt = list(range(17))
    engine.add(request("a", prompt, 8))
    engine.plan()
    engine.add(request("b", [*prompt, 1], 8))
    engine.plan()
    engine.abort("a")
    engine.fail_step()
    assert engine.end("b").error_code == "request_failed"
    engine.run()
    engine.check_at_rest()


def test_blocks_that_a_cancelled_request_computed_from_a_failed_step_are_not_found():
    engine = Engine(config(max_num_batched_tokens=16))
    prompt = list(range(32))
    engine.add(request("a", prompt, 8))
    engine.plan(), engine.plan()  # two chunks
    engine.abort("a")
    engine.fail_step()
    engine.update()
    for name, cached in (("b", 0), ("c", 32)):  # c would find the second chunk behind the first one of b
        engine.add(request(name, [*prompt, 1], 8))
        engine.run()
        assert engine.outputs[name][0].cached_tokens == cached
    engine.check_answers()


def test_a_swap_that_failed_is_computed_again():
    engine = Engine(config(num_blocks=12, num_host_blocks=12, preemption_mode="swap", max_num_seqs=2))
    engine.add(request("old", 16, 24))
    engine.add(request("young", 16, 24, arrival=1.0))
    while not engine.plan().swap_out:
        engine.update()
    engine.fail_step()
    assert engine.end("old").error_code == "request_failed"
    engine.run()
    assert engine.tokens("young") == naive_answer(engine.messages["young"])[0]
    engine.check_at_rest()


def test_both_plans_can_fail_one_after_the_other():
    engine = Engine(config())
    for name in "abc":
        engine.add(request(name, 9, 8))
    engine.plan(), engine.plan()
    engine.fail_step(), engine.fail_step()
    assert not engine.scheduler.has_work()
    engine.check_at_rest()
