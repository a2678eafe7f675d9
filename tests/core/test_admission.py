"""Who comes in and when: limits, the bounded queue, deadlines."""

from __future__ import annotations

import pytest

from tests.core.block_world import Engine, config, request


def test_limits_are_refused_with_the_numbers():
    engine = Engine(config(max_model_len=40, num_blocks=8))
    for prompt, max_tokens, words in ((30, 20, ("50", "40")), (40, 1, ("41", "40")), (30, 5, ("9 KV blocks", "8 blocks", "32 tokens"))):
        output = engine.add(request(f"r{prompt}-{max_tokens}", prompt, max_tokens))
        assert output.finish_reason == "error"
        assert output.error_code == "context_length_exceeded"
        assert all(word in output.error_message for word in words)
    assert engine.add(request("fits", 30, 2)) is None
    assert engine.add(request("open", 30, None)) is None
    assert engine.add(request("empty", [], 2)).error_code == "invalid_value"
    engine.run()
    assert len(engine.tokens("open")) == 2  # to the end of the KV cache
    assert not engine.scheduler.has_work()


def test_an_id_in_use_is_a_bug_of_the_caller():
    engine = Engine(config())
    engine.add(request("a", 3))
    with pytest.raises(ValueError, match="in use"):
        engine.scheduler.add(request("a", 3), 0.0)


def test_the_queue_is_bounded_beyond_what_can_run_at_once():
    engine = Engine(config(max_num_seqs=2, max_num_queued_reqs=3))
    refused = [engine.add(request(f"r{i}", 5, 4)) for i in range(8)]
    assert [output is None for output in refused] == [True] * 5 + [False] * 3
    assert {output.error_code for output in refused if output} == {"queue_full"}
    engine.plan()
    assert engine.add(request("more", 5, 4)).error_code == "queue_full"
    engine.run()
    assert engine.add(request("later", 5, 4)) is None
    engine.run()
    engine.check_at_rest()


def test_no_queue_at_all_still_runs_what_can_run_at_once():
    engine = Engine(config(max_num_seqs=1, max_num_queued_reqs=0))
    assert engine.add(request("a", 5, 4)) is None
    assert engine.add(request("b", 5, 4)).error_code == "queue_full"
    engine.run()


def test_the_choices_of_one_request_are_one_place_in_the_queue():
    engine = Engine(config(max_num_seqs=2, max_num_queued_reqs=2))
    engine.add(request("busy", 5, 30))
    engine.plan(), engine.update()
    for i in range(6):
        assert engine.add(request(f"c{i}", 5, 4, fork_of="c0" if i else None)) is None
    assert engine.add(request("next", 5, 4)) is None
    assert engine.add(request("last", 5, 4)).error_code == "queue_full"
    engine.run()


def test_the_earliest_deadline_runs_first_and_a_missed_one_ends():
    engine = Engine(config(max_num_seqs=1))
    engine.add(request("a", 5, 20, deadline=100.0))
    engine.add(request("b", 5, 20, deadline=0.05))
    engine.add(request("c", 5, 20, deadline=0.1))
    assert engine.add(request("late", 5, 2, deadline=0.0)).error_code == "deadline_exceeded"
    engine.run()
    assert engine.end("b").finish_reason == "length"  # its first token was in time
    assert engine.end("a").finish_reason == "length"
    assert engine.end("c").error_code == "deadline_exceeded"
    engine.check_answers()
    engine.check_at_rest()


def test_a_missed_deadline_is_told_though_nothing_runs():
    engine = Engine(config())
    engine.add(request("a", 5, 20, deadline=0.05))
    engine.now = 1.0
    assert engine.scheduler.plan(engine.now) is None
    assert engine.scheduler.has_work()
    (output,) = engine.scheduler.take_outputs()
    assert output.error_code == "deadline_exceeded"
    assert not engine.scheduler.has_work()


def test_retry_after_follows_the_measured_speed():
    engine = Engine(config(max_num_seqs=1, max_num_queued_reqs=100))
    assert engine.scheduler.retry_after() == 1
    for i in range(40):
        engine.add(request(f"r{i}", 4, 1))
    for _ in range(20):
        engine.plan(), engine.update(seconds=3.0)
    assert engine.scheduler.retry_after() == 3
    assert "try again in 3 s" in engine_full_message(engine)


def engine_full_message(engine: Engine) -> str:
    while (output := engine.add(request(f"x{len(engine.messages)}", 4, 1))) is None:
        pass
    return output.error_message
