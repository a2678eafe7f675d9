"""The scheduler's rules one by one, over a block world that checks every position."""

from __future__ import annotations

from headrace.core.messages import SampledRow, StepPlan, StepResult
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
    engine = Engine(config(max_num_batched_tokens=12))
    engine.add(request("a", 8, 4))
    engine.turn(ahead=False)
    engine.add(request("b", 50, 4))
    engine.turn(ahead=False)
    assert rows(engine.plans[-1]) == [("a", 8, 1, True), ("b", 0, 11, False)]
    engine.run(ahead=False)
    assert max(plan.num_tokens for plan in engine.plans) == 12
    engine.check_answers()


def test_priority_runs_first_under_its_policy_only():
    for policy, first in (("priority", "b"), ("fcfs", "a")):
        engine = Engine(config(max_num_seqs=1, scheduling_policy=policy))
        engine.add(request("a", 5, 2, priority=1))
        engine.add(request("b", 5, 2, priority=-1))
        assert engine.plan().rows[0].request_id == first
        engine.run()


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


def test_a_complete_grammar_ends_the_request_at_once():
    for min_tokens, max_tokens, last in ((0, 12, 5), (9, 12, 5), (0, 2, 5), (0, 12, 6)):
        engine = Engine(config())
        engine.add(request("a", 3, max_tokens, min_tokens=min_tokens, eos_token_ids=(6,)))
        ends = []
        for token, complete in ((4, False), (last, True)):
            plan = engine.scheduler.plan(0.0)
            row = SampledRow(request_id="a", token_ids=(token,), complete=complete)
            ends = engine.scheduler.update(StepResult(step_id=plan.step_id, rows=(row,), seconds=0.01), 0.0)
        (end,) = ends
        assert (end.finish_reason, end.stop_reason, end.token_ids) == ("stop", None, (last,))
        assert end.ends_in_text == (last != 6)  # an end token ends the answer, but is no text
        assert not engine.scheduler.has_work()


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
        engine.add(request("running", 8, 160))
        sizes = []
        for step in range(160):
            if step == 50:
                engine.add(request("long", 900, 1))
            plan = engine.plan()
            if plan is None:
                break
            prompt_tokens = sum(row.num_tokens for row in plan.rows if row.request_id == "long")
            if prompt_tokens and len(plan.rows) > 1:
                sizes.append(prompt_tokens)
            engine.update(seconds=0.010 + 0.001 * plan.num_tokens)
        return sizes

    by_ratio, by_target = chunks(None), chunks(60.0)
    assert 10 <= by_ratio[len(by_ratio) // 2] <= 20  # twice 11 ms
    assert 40 <= by_target[len(by_target) // 2] <= 60
    assert min(by_ratio[:-1]) >= MIN_PREFILL_CHUNK  # the last one is what is left


def test_the_same_calls_give_the_same_plans():
    def plans() -> list[StepPlan]:
        engine = Engine(config(num_blocks=30, num_host_blocks=10, max_num_seqs=6))
        for i in range(30):
            engine.add(request(f"r{i}", [*range(i % 7 + 1), i], 20, arrival=engine.now, tenant=f"t{i % 3}", priority=i % 2))
            engine.turn()
        engine.run()
        return engine.plans

    assert plans() == plans()
