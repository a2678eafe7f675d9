"""Taking blocks away: preemption of both kinds, what new requests leave free, and cancelling."""

from __future__ import annotations

import pytest

from tests.core.block_world import Engine, config, request


@pytest.mark.parametrize(("mode", "num_host_blocks"), [("recompute", 64), ("swap", 64), ("swap", 0), ("auto", 64)])
@pytest.mark.parametrize("ahead", [False, True])
def test_preemption_changes_no_answer_and_spares_the_oldest(mode: str, num_host_blocks: int, ahead: bool):
    engine = Engine(config(num_blocks=24, num_host_blocks=num_host_blocks, preemption_mode=mode, max_num_seqs=4))
    for i in range(4):
        engine.add(request(f"r{i}", 20, 60, arrival=float(i)))
    engine.run(ahead=ahead)
    engine.check_answers()
    engine.check_at_rest()
    assert engine.end("r0").num_preemptions == 0
    assert engine.end("r3").num_preemptions > 0
    stats = engine.scheduler.stats()
    if mode == "recompute" or not num_host_blocks:
        assert stats.preemptions_recompute_total > 0
        assert stats.preemptions_swap_total == 0
        assert stats.recomputed_tokens_total > 0
    elif mode == "swap":
        assert stats.preemptions_swap_total > 0
    else:
        assert stats.preemptions_swap_total + stats.preemptions_recompute_total > 0


def test_a_victim_is_the_least_urgent_and_youngest():
    engine = Engine(config(num_blocks=12, max_num_seqs=3, scheduling_policy="priority", num_host_blocks=0))
    engine.add(request("old", 12, 20, arrival=0.0, priority=1))
    engine.add(request("urgent", 12, 20, arrival=1.0, priority=0))
    engine.run()
    assert engine.end("urgent").num_preemptions == 0
    assert engine.end("old").num_preemptions > 0
    engine.check_answers()


def test_a_more_urgent_request_starts_before_a_preempted_one():
    engine = Engine(config(num_blocks=12, max_num_seqs=2, scheduling_policy="priority"))
    engine.add(request("old", 16, 24, priority=1))
    engine.add(request("young", 16, 24, arrival=1.0, priority=1))
    while not engine.scheduler.stats().preemptions_recompute_total:
        engine.turn(ahead=False)
    engine.add(request("urgent", 4, 4, arrival=2.0, priority=0))
    engine.turn(ahead=False)
    assert "urgent" in engine.first_token_step
    engine.run()
    engine.check_answers()


@pytest.mark.parametrize(("num_prompt", "starts"), [(20, False), (16, True)])
def test_a_new_request_leaves_blocks_for_those_that_run(num_prompt: int, starts: bool):
    engine = Engine(config(num_blocks=32, max_num_batched_tokens=256))
    for name in "ab":
        engine.add(request(name, 48, 3))  # 12 blocks each
    engine.turn(ahead=False)
    engine.add(request("c", num_prompt, 3, arrival=1.0))  # 6 blocks are free, two of them kept for the two that run
    engine.turn(ahead=False)
    assert ("c" in engine.first_token_step) == starts
    engine.run()
    engine.check_answers()


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "pending", "running", "swapped", "preempted", "unknown"])
@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_abort_frees_at_once_in_any_state(moment: str, reason: str):
    swap = moment == "swapped"
    engine = Engine(
        config(
            num_blocks=20,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            num_host_blocks=20 if swap else 0,
            preemption_mode="swap",
        )
    )
    if moment in ("swapped", "preempted"):
        engine.add(request("old", 20, 60))
        engine.add(request("a", 20, 60, arrival=1.0))
        while engine.scheduler.stats().num_swapped + engine.scheduler.stats().num_waiting == 0:
            engine.turn()
    elif moment != "unknown":
        engine.add(request("a", 20, 20))
        if moment in ("prefilling", "pending", "running"):
            engine.plan()
        if moment in ("pending", "running"):
            engine.update(), engine.plan()
        if moment == "running":
            engine.update()
    output = engine.abort("a", reason)
    if moment == "unknown":
        assert output is None
        return
    assert output.finish_reason == reason
    assert engine.abort("a") is None
    if moment not in ("swapped", "preempted"):
        engine.check_at_rest()
    engine.run()
    engine.check_answers()
    engine.check_at_rest()
