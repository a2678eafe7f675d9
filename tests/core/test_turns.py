"""Whose rows a step holds while several tenants use the engine, in simulated time."""

from __future__ import annotations

import pytest

from headrace.core.turns import AWAY_S, MIN_DECODES, MIN_SLOTS, OWN_STEP_S, PAUSE_S, STEP_S
from tests.core.block_world import Engine, config, request

FIXED_S, TOKEN_S = 0.005, 0.003  # what a step costs, and what each of its tokens adds


def engine_of(**fields: object) -> Engine:
    return Engine(config(**({"max_num_seqs": 32, "max_num_batched_tokens": 128, "num_blocks": 2000} | fields)))


def turn(engine: Engine, *, ahead: bool = True) -> None:
    """One step, which takes the time of the formula."""
    for _ in range(2 if ahead else 1):
        if len(engine.outstanding) < (2 if ahead else 1):
            engine.plan()
    if engine.outstanding:
        engine.update(seconds=seconds_of(engine.outstanding[0].num_tokens))


def seconds_of(num_tokens: int) -> float:
    return FIXED_S + TOKEN_S * num_tokens


def tenants(plan) -> set[str]:
    return {row.request_id.rstrip("0123456789") for row in plan.rows}


def flooded(engine: Engine, *, count: int = 24, prompt: int = 8, answer: int = 300, turns: int = 30) -> Engine:
    """A tenant that was here a moment ago, and another that keeps all slots busy."""
    engine.add(request("light0", 8, 6, tenant="light"))
    for _ in range(8):
        turn(engine)
    for i in range(count):
        engine.add(request(f"heavy{i}", prompt, answer, arrival=engine.now, tenant="heavy"))
    for _ in range(turns):
        turn(engine)
    return engine


def close(engine: Engine) -> None:
    for request_id in engine.messages:
        engine.abort(request_id)
    engine.run()
    engine.check_at_rest()


def test_the_prompt_of_a_tenant_far_behind_gets_a_step_of_its_own_at_once():
    engine = flooded(engine_of())
    assert not engine.outstanding[1:], "nothing is planned ahead of a long step"
    engine.add(request("light1", 30, 4, arrival=engine.now, tenant="light"))
    made = len(engine.plans)
    while "light1" not in engine.first_token_step:
        turn(engine)
    after = engine.plans[made:]
    assert tenants(after[0]) == {"light"}
    assert after[0].rows[0].num_tokens == 30
    assert len(after) == 1
    turn(engine)
    assert tenants(engine.plans[-1]) == {"light", "heavy"}  # beside its answer, all go on
    close(engine)


def test_answers_of_others_wait_for_a_moment_only_however_many_prompts_come():
    engine = flooded(engine_of(max_num_batched_tokens=512))
    for i in range(1, 8):
        engine.add(request(f"light{i}", 60, 1, arrival=engine.now, tenant="light"))
    started, last_heavy, longest = engine.now, engine.now, 0.0
    while engine.now < started + 3.0:
        turn(engine, ahead=False)
        if "heavy" in tenants(engine.plans[-1]):
            longest, last_heavy = max(longest, engine.now - last_heavy), engine.now
    assert longest <= PAUSE_S + 2 * OWN_STEP_S + STEP_S
    assert {f"light{i}" for i in range(1, 8)} <= engine.first_token_step.keys()
    close(engine)


def test_steps_are_short_while_another_tenant_was_here_lately_and_as_long_as_ever_later():
    engine = flooded(engine_of(max_num_seqs=64), count=40)
    for _ in range(60):
        turn(engine)
    decodes = engine.plans[-1].num_tokens
    assert seconds_of(decodes) <= 1.1 * STEP_S
    assert decodes >= 40 / MIN_DECODES
    recent = engine.plans[-2 * MIN_DECODES :]
    assert len({row.request_id for plan in recent for row in plan.rows}) == 40  # they take turns
    engine.now += AWAY_S
    for _ in range(3):
        turn(engine)
    assert engine.plans[-1].num_tokens == 40
    close(engine)


def test_the_last_free_slot_is_kept_for_a_tenant_that_was_here_lately():
    engine = flooded(engine_of(max_num_seqs=MIN_SLOTS), count=2 * MIN_SLOTS)
    assert engine.scheduler.stats().num_running == MIN_SLOTS - 1
    engine.add(request("light1", 8, 1, arrival=engine.now, tenant="light"))
    turn(engine)
    turn(engine)
    assert "light1" in engine.first_token_step
    assert engine.scheduler.stats().preemptions_recompute_total == 0
    assert engine.scheduler.stats().num_running == MIN_SLOTS - 1
    engine.now += AWAY_S
    for _ in range(3):
        turn(engine)
    assert engine.scheduler.stats().num_running == MIN_SLOTS  # when it does not come back, somebody else gets it
    close(engine)


def test_one_that_holds_all_blocks_in_few_slots_gives_way_too():
    engine = flooded(engine_of(num_blocks=152, block_size=4), count=3, prompt=190, answer=30, turns=6)
    engine.add(request("light1", 30, 4, arrival=engine.now, tenant="light"))
    made = len(engine.plans)
    while "light1" not in engine.first_token_step:
        turn(engine)
    assert len(engine.plans) - made <= 2
    assert engine.scheduler.stats().preemptions_recompute_total == 1
    engine.run()
    engine.check_answers()


@pytest.mark.parametrize("ahead", [False, True])
def test_blocks_are_taken_from_the_tenant_that_holds_most_though_its_requests_are_older(ahead: bool):
    engine = engine_of(num_blocks=60, max_num_seqs=6)
    for i in range(5):
        engine.add(request(f"heavy{i}", 20, 60, tenant="heavy"))
    for _ in range(10):
        turn(engine, ahead=ahead)
    engine.add(request("light0", 8, 30, arrival=engine.now, tenant="light"))
    engine.run(ahead=ahead)
    assert engine.end("light0").num_preemptions == 0
    assert sum(engine.end(f"heavy{i}").num_preemptions for i in range(5)) > 0
    engine.check_answers()


def test_background_work_of_the_same_key_is_no_other_tenant():
    engine = engine_of(max_num_seqs=64)
    engine.add(request("line0", 8, 200, tenant="key background", background=True))
    for i in range(40):
        engine.add(request(f"r{i}", 4, 100, tenant="key"))
    for _ in range(60):
        turn(engine)
    assert sum(row.request_id.startswith("r") for row in engine.plans[-1].rows) == 40
    close(engine)


def test_steps_of_a_slow_model_hold_more_than_their_start():
    """Where reading the weights alone takes as long as a step should, answers and prompts would come in crumbs."""
    fixed_s = 2 * STEP_S
    engine = Engine(config(max_num_seqs=32, max_num_batched_tokens=512, num_blocks=2000))

    def step(times: int = 1) -> None:
        for _ in range(times):
            if not engine.outstanding:
                engine.plan()
            engine.update(seconds=fixed_s + 0.001 * engine.outstanding[0].num_tokens)

    engine.add(request("light0", 8, 6, tenant="light"))
    step(6)
    for i in range(16):
        engine.add(request(f"heavy{i}", 200, 60, arrival=engine.now, tenant="heavy"))
    step(40)
    decodes = [plan for plan in engine.plans if not plan.work.prompt_tokens]
    assert len(decodes[-1].rows) == 16, "all of them fit into twice what a step takes anyhow"
    prompts = [plan for plan in engine.plans if plan.work.prompt_tokens and plan.work.decode_tokens]
    assert max(plan.work.prompt_tokens for plan in prompts) > 50
    close(engine)
