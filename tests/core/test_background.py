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


def test_beside_others_a_step_grows_by_a_tenth_at_most():
    engine = Engine(config(max_num_batched_tokens=128))
    for i in range(8):
        engine.add(request(f"warm{i}", 6 + i, 6))
    while engine.scheduler.has_work():
        turn(engine)
    for i in range(4):
        engine.add(request(f"bg{i}", 40, 20, arrival=engine.now, background=True))
    for _ in range(3):
        turn(engine)
    engine.add(request("fg", 60, 12, arrival=engine.now))
    first = turn(engine)
    assert tokens_of(first, "fg") == 60
    while tokens_of(plan := turn(engine), "fg"):
        assert tokens_of(plan, "fg") == 1
        assert tokens_of(plan, "bg") <= 1
    assert tokens_of(first, "bg") <= 7
    while engine.scheduler.has_work():
        turn(engine)
    engine.check_answers()
    engine.check_at_rest()


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
