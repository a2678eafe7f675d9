"""The scheduler's rules one by one, over a block world that checks every position."""

from __future__ import annotations

import pytest

from headrace.core.messages import StepPlan
from headrace.core.policy import MIN_PREFILL_CHUNK
from tests.core.block_world import Engine, config, naive_answer, next_token, request, score


def rows(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    assert plan is not None
    return [(row.request_id, row.start, row.num_tokens, row.sample) for row in plan.rows]


def test_prompt_then_tokens_one_by_one():
    engine = Engine(config())
    engine.add(request("a", 5, 3))
    engine.run(ahead=False)
    assert [rows(plan) for plan in engine.plans] == [[("a", 0, 5, True)], [("a", 5, 1, True)], [("a", 6, 1, True)]]
    assert all(row.token_ids for plan in engine.plans for row in plan.rows)
    engine.check_answers()
    engine.check_at_rest()


def test_planning_ahead_names_unknown_tokens_by_their_slot_and_never_plans_beyond_the_end():
    engine = Engine(config())
    engine.add(request("a", 5, 3))
    engine.run()
    assert [rows(plan) for plan in engine.plans] == [[("a", 0, 5, True)], [("a", 5, 1, True)], [("a", 6, 1, True)]]
    assert [plan.rows[0].token_ids == () for plan in engine.plans] == [False, True, True]
    engine.check_answers()
    engine.check_at_rest()


def test_a_plan_made_ahead_of_the_end_leaves_a_stale_row():
    prompt = [1, 2, 3]
    engine = Engine(config())
    engine.add(request("a", prompt, 8, eos_token_ids=(next_token(prompt),)))
    engine.plan(), engine.plan(), engine.update()
    assert engine.end("a").finish_reason == "stop"
    assert engine.scheduler.has_work()  # a result is due
    engine.add(request("b", 5, 2))
    engine.run()
    engine.check_answers()
    engine.check_at_rest()


def test_an_id_can_be_used_again_while_a_stale_row_of_its_first_use_runs():
    engine = Engine(config())
    engine.add(request("a", 5, 8))
    engine.plan(), engine.plan()
    engine.abort("a")
    del engine.messages["a"]
    engine.add(request("a", [7, 7, 7], 4))
    engine.run()
    assert engine.tokens("a") == naive_answer(engine.messages["a"])[0]
    engine.check_at_rest()


def test_chunks_fill_the_budget_and_decode_rows_come_first():
    engine = Engine(config(max_num_batched_tokens=20))
    engine.add(request("a", 8, 4))
    engine.turn(ahead=False)
    engine.add(request("b", 50, 4))
    engine.turn(ahead=False)
    assert rows(engine.plans[-1]) == [("a", 8, 1, True), ("b", 0, 19, False)]
    engine.run(ahead=False)
    assert max(plan.num_tokens for plan in engine.plans) == 20
    engine.check_answers()


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


def test_priority_runs_first_under_its_policy_only():
    for policy, first in (("priority", "b"), ("fcfs", "a")):
        engine = Engine(config(max_num_seqs=1, scheduling_policy=policy))
        engine.add(request("a", 5, 2, priority=1))
        engine.add(request("b", 5, 2, priority=-1))
        assert engine.plan().rows[0].request_id == first
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


def test_stop_rules():
    prompt = [1, 2, 3]
    answer, _ = naive_answer(request("x", prompt, 12))
    third = answer.index(answer[2])  # where that token first stands
    cases = [
        ({"eos_token_ids": (answer[2],)}, third + 1, "stop", None),
        ({"stop_token_ids": (answer[2],)}, third + 1, "stop", answer[2]),
        ({"stop_token_ids": (answer[2],), "min_tokens": 12}, 12, None, None),
        ({}, 12, "length", None),
    ]
    for i, (fields, count, reason, stop_reason) in enumerate(cases):
        engine = Engine(config())
        engine.add(request(f"r{i}", prompt, 12, **fields))
        engine.run()
        end = engine.end(f"r{i}")
        assert len(engine.tokens(f"r{i}")) == count
        assert reason is None or end.finish_reason == reason
        assert reason is None or end.stop_reason == stop_reason


def test_a_prompt_can_be_scored_without_a_token():
    engine = Engine(config(max_num_batched_tokens=8))
    engine.add(request("a", 21, 0, prompt_logprobs=1))
    engine.add(request("b", 5, 0))
    engine.run()
    for name in "ab":
        (output,) = engine.outputs[name]
        assert (output.finish_reason, output.token_ids) == ("length", ())
    prompt = engine.messages["a"].prompt_token_ids
    assert engine.outputs["a"][0].prompt_logprobs == tuple(score(prompt, i) for i in range(1, 21))
    assert engine.outputs["b"][0].prompt_logprobs is None


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


def test_without_chunked_prefill_prompts_stay_whole_and_take_turns_with_decodes():
    engine = Engine(config(enable_chunked_prefill=False, max_num_batched_tokens=32))
    assert engine.add(request("large", 33, 2)).error_code == "context_length_exceeded"
    for i in range(12):
        engine.add(request(f"r{i}", 5 + i, 5))
    engine.run()
    seen: set[str] = set()
    for plan in engine.plans:
        kinds = {row.request_id in seen for row in plan.rows}
        assert len(kinds) == 1, "a step holds prompts or decodes, not both"
        for row in plan.rows:
            assert row.sample
            seen.add(row.request_id)
    engine.check_answers()


def test_beside_decodes_the_chunk_follows_the_measured_step_time():
    def chunks(target_itl_ms: float | None) -> list[int]:
        engine = Engine(config(max_num_batched_tokens=512, max_model_len=4096, block_size=64, num_blocks=64, target_itl_ms=target_itl_ms))
        engine.add(request("running", 8, 400))
        sizes = []
        for step in range(400):
            if step == 50:
                engine.add(request("long", 2000, 1))
            plan = engine.plan()
            if plan is None:
                break
            prompt_tokens = sum(row.num_tokens for row in plan.rows if row.request_id == "long")
            if prompt_tokens and len(plan.rows) > 1:
                sizes.append(prompt_tokens)
            engine.update(seconds=0.010 + 0.001 * plan.num_tokens)
        return sizes

    by_ratio, by_target = chunks(None), chunks(60.0)
    assert 10 <= by_ratio[len(by_ratio) // 2] <= 20  # 2.5 x 11 ms
    assert 40 <= by_target[len(by_target) // 2] <= 60
    assert min(by_ratio) >= MIN_PREFILL_CHUNK


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


def test_the_same_calls_give_the_same_plans():
    def plans() -> list[StepPlan]:
        engine = Engine(config(num_blocks=30, num_host_blocks=10, max_num_seqs=6))
        for i in range(30):
            engine.add(request(f"r{i}", [*range(i % 7 + 1), i], 20, arrival=engine.now, tenant=f"t{i % 3}", priority=i % 2))
            engine.turn()
        engine.run()
        return engine.plans

    assert plans() == plans()
