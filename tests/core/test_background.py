"""Background requests run in what others leave."""

from __future__ import annotations

import pytest

from headrace.core.messages import StepPlan
from tests.core.block_world import Engine, config, request


def tokens_of(plan: StepPlan, prefix: str) -> int:
    return sum(row.num_tokens for row in plan.rows if row.request_id.startswith(prefix))


def turn(engine: Engine) -> StepPlan:
    """One step on a machine whose time is in proportion to its tokens."""
    plan = engine.plan()
    assert plan is not None
    engine.update(seconds=0.01 * plan.num_tokens)
    return plan


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_others_go_first_whatever_their_priority(policy: str):
    engine = Engine(config(max_num_seqs=1, scheduling_policy=policy))
    engine.add(request("bg", 5, 2, background=True, priority=-5))
    engine.add(request("fg", 5, 2, arrival=1.0, priority=7))
    assert [row.request_id for row in engine.plan().rows] == ["fg"]
    engine.run()
    engine.check_answers()


def test_a_slot_is_given_up_at_once():
    engine = Engine(config(max_num_seqs=2))
    for name in ("bg1", "bg2"):
        engine.add(request(name, 6, 30, background=True))
    for _ in range(5):
        engine.turn()
    engine.add(request("fg", 9, 5, arrival=engine.now))
    assert "fg" in [row.request_id for row in engine.plan().rows]
    assert engine.scheduler.stats().num_waiting == 1  # the younger one of them
    engine.run()
    engine.check_answers()
    engine.check_at_rest()


def test_blocks_are_given_up_at_once_and_nothing_is_swapped():
    engine = Engine(config(num_blocks=24, num_host_blocks=24, preemption_mode="swap", max_model_len=90))
    engine.add(request("bg", 60, 30, background=True))
    for _ in range(12):
        engine.turn()
    engine.add(request("fg", 60, 20, arrival=engine.now))
    plan = engine.plan()
    assert [row.request_id for row in plan.rows] == ["fg"]
    assert not plan.swap_out
    engine.run()
    engine.check_answers()
    engine.check_at_rest()


def warm(engine: Engine) -> None:
    """Until the engine has seen decodes and prompts of several sizes, together and alone."""
    for i in range(24):
        engine.add(request(f"warm{i}", 3 + i * 7 % 40, 2 + i % 6, arrival=engine.now))
        for _ in range(1 + i % 3):
            turn(engine)
    while engine.scheduler.has_work():
        turn(engine)


def test_beside_others_background_work_takes_a_tenth_of_the_time_and_no_step_more_than_twice():
    engine = Engine(config(max_num_batched_tokens=128, num_blocks=400, max_model_len=800))
    warm(engine)
    for i in range(4):
        engine.add(request(f"bg{i}", 30, 20, arrival=engine.now, background=True))
    engine.add(request("fg", 60, 600, arrival=engine.now))
    others, background, chunks = [], [], []
    while tokens_of(plan := turn(engine), "fg"):
        others.append(tokens_of(plan, "fg"))
        background.append(tokens_of(plan, "bg"))
        if background[-1]:
            chunks.append(plan)
    assert others[0] == 60
    assert background[0] <= 6, "a prompt of others has made this step long already"
    assert max(background[1:]) <= 1, "twice a step of one token"
    assert sum(others) * 0.08 <= sum(background) <= sum(others) * 0.11 + 1
    while engine.scheduler.has_work():
        turn(engine)
    engine.check_answers()


def test_beside_others_time_is_saved_for_a_chunk_worth_its_step():
    """Eight streams, each step as long as eight tokens: a prompt gets chunks of 8 every ten steps rather than bits of it all the time."""
    engine = Engine(config(max_num_batched_tokens=128, num_blocks=400, max_num_seqs=10, max_model_len=400))
    warm(engine)
    for i in range(8):
        engine.add(request(f"fg{i}", 8, 300, arrival=engine.now))
    for _ in range(3):
        turn(engine)
    engine.add(request("bg", 64, 2, arrival=engine.now, background=True))
    seen = [tokens_of(turn(engine), "bg") for _ in range(120)]
    assert set(seen[: seen.index(1)]) == {0, 8}, "chunks until the first token that it decodes"
    assert 8 <= seen.index(8, seen.index(8) + 1) - seen.index(8) <= 12
    while engine.scheduler.has_work():
        turn(engine)
    engine.check_answers()


def test_steps_of_background_work_alone_are_short_and_not_planned_ahead():
    engine = Engine(config(max_num_batched_tokens=512, num_blocks=1024))
    for i in range(6):
        engine.add(request(f"warm{i}", 10 * i + 1, 4))
    while engine.scheduler.has_work():
        turn(engine)
    engine.add(request("bg", 400, 4, arrival=engine.now, background=True))
    plan = engine.plan()
    assert plan.num_tokens <= 10  # 50 ms at 10 ms a token, or the least chunk
    assert engine.plan() is None
    engine.update(seconds=0.01 * plan.num_tokens)
    engine.now += 6.0
    quiet = engine.plan()
    assert 15 <= quiet.num_tokens <= 25
    engine.update(seconds=0.01 * quiet.num_tokens)
    engine.add(request("fg", 5, 2, arrival=engine.now))
    assert tokens_of(engine.plan(), "fg") == 5
    engine.run()
    engine.check_answers()


def test_background_work_takes_no_place_in_the_queue():
    engine = Engine(config(max_num_seqs=2, max_num_queued_reqs=1))
    for i in range(5):
        assert engine.add(request(f"bg{i}", 5, 9, background=True)) is None
    engine.turn()
    assert [engine.add(request(f"fg{i}", 5, 9)) for i in range(3)] == [None, None, None]  # two slots and one that waits
    refused = engine.add(request("fg3", 5, 9))
    assert refused is not None
    assert refused.error_code == "queue_full"
    engine.run()
    engine.check_answers()


def test_nobody_waits_for_a_prefix_that_background_work_computes():
    shared = list(range(40))
    engine = Engine(config(max_num_batched_tokens=16))
    engine.add(request("bg", [*shared, 1], 4, background=True))
    engine.plan()
    engine.add(request("fg", [*shared, 2], 4, arrival=1.0))
    engine.update()
    assert tokens_of(engine.plan(), "fg") > 0
    engine.run()
    engine.check_answers()
