from __future__ import annotations

import random

import pytest

from headrace.config import SpeculativeConfig
from headrace.core.messages import StepPlan
from headrace.core.speculation import FIRST_PAUSE, TRIALS, look_up
from headrace.errors import ConfigError
from headrace.sampling_params import StructuredOutputs
from tests.core import block_world
from tests.core.block_world import Engine, config, naive_answer, request

LOOPS = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)


def guess(tokens: list[int], *, longest: int = 3, shortest: int = 2, count: int = 4) -> list[int]:
    return list(look_up("".join(map(chr, tokens)), longest=longest, shortest=shortest, count=count))


def test_what_followed_before_is_guessed_to_follow_again():
    assert guess([1, 2, 3, 4, 5, 6, 7, 1, 2]) == [3, 4, 5, 6]
    assert guess([1, 2, 3, 4, 1, 2, 5, 6, 7, 1, 2]) == [5, 6, 7, 1]  # at its latest place
    assert guess([9, 1, 2, 3, 4, 5, 6, 1, 2, 0, 9, 1, 2]) == [3, 4, 5, 6]  # the longest run counts more
    assert guess([1, 2, 3, 4, 5, 6, 2]) == []
    assert guess([1, 2, 3, 4, 5, 6, 2], shortest=1) == [3, 4, 5, 6]
    assert guess([1, 2, 3, 1, 2], count=6) == [3, 1, 2, 3, 1, 2]  # a text that repeats itself goes on so
    assert guess([7, 7, 7]) == [7, 7, 7, 7]
    assert guess([7]) == guess([7, 7], shortest=2) == []


@pytest.mark.parametrize("seed", range(30))
def test_the_fast_lookup_finds_what_a_plain_one_does(seed: int):
    rng = random.Random(seed)
    tokens = [rng.choice((0, 1, 2, 0xD800, 150_000)) for _ in range(rng.randrange(1, 60))]
    longest, count = rng.randrange(2, 6), rng.randrange(1, 6)
    expected: list[int] = []
    for size in range(longest, 0, -1):
        places = [i for i in range(len(tokens) - size) if tokens[i : i + size] == tokens[len(tokens) - size :]]
        if places:
            expected = list(tokens)
            for _ in range(count):
                expected.append(expected[len(expected) - len(tokens) + places[-1] + size])
            expected = expected[len(tokens) :]
            break
    assert guess(tokens, longest=longest, shortest=1, count=count) == expected


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"method": "eagle"}, "eagle"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min"),
        ({"model": "x"}, "model"),
    ],
)
def test_a_wrong_config_is_refused_by_the_name_of_its_key(values: dict, fault: str):
    with pytest.raises(ConfigError, match=fault):
        SpeculativeConfig.parse(values)


def test_one_length_of_a_lookup_stands_for_both():
    assert SpeculativeConfig.parse({"prompt_lookup_max": 6}) == SpeculativeConfig(prompt_lookup_max=6, prompt_lookup_min=6)
    assert SpeculativeConfig.parse({"prompt_lookup_min": 3}) == SpeculativeConfig(prompt_lookup_max=3, prompt_lookup_min=3)
    assert SpeculativeConfig.parse({}) == SpeculativeConfig()


def seconds_of(plan: StepPlan, per_token: float) -> float:
    return 0.010 + per_token * plan.num_tokens


def run(engine: Engine, *, per_token: float) -> None:
    """On a machine whose steps take a fixed time and so much for each token."""
    while engine.scheduler.has_work():
        while len(engine.outstanding) < 2 and engine.plan() is not None:
            pass
        engine.update(seconds=seconds_of(engine.outstanding[0], per_token))


def guessed(engine: Engine) -> int:
    return sum(row.num_speculated for plan in engine.plans for row in plan.rows)


def test_accepted_guesses_save_steps_and_all_are_counted():
    plain, engine = Engine(config()), Engine(config(speculative_config=LOOPS))
    for one in (plain, engine):
        one.add(request("a", 10, 100))
        run(one, per_token=0.0)
        one.check_answers()
        one.check_at_rest()
    stats = engine.scheduler.stats()
    assert stats.spec_draft_tokens_total == guessed(engine) == stats.spec_accepted_tokens_total + stats.spec_rejected_tokens_total
    assert stats.spec_drafts_total == sum(row.num_speculated > 0 for plan in engine.plans for row in plan.rows)
    assert stats.spec_accepted_tokens_total > 30
    assert len(plain.plans) - len(engine.plans) == stats.spec_accepted_tokens_total
    assert stats.generation_tokens_total == 100


def test_nothing_is_planned_ahead_of_tokens_that_guesses_wait_for():
    engine = Engine(config(speculative_config=LOOPS))
    engine.add(request("a", 10, 30))
    assert engine.plan() is not None
    assert engine.plan() is None
    engine.update()
    assert engine.plan() is not None
    assert engine.plan() is None


def test_an_end_inside_a_run_of_right_guesses_is_the_end():
    """Whatever token of a long answer stops it, what was computed behind it is dropped."""
    answer, _ = naive_answer(request("a", 10, 60))
    for stop in set(answer):
        engine = Engine(config(speculative_config=LOOPS))
        engine.add(request("a", 10, 60, stop_token_ids=(stop,)))
        engine.run()
        engine.check_answers()
        engine.check_at_rest()
        assert engine.tokens("a") == answer[: answer.index(stop) + 1]


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_no_guess_goes_beyond_max_tokens(max_tokens: int):
    engine = Engine(config(speculative_config=LOOPS))
    engine.add(request("a", [5, 6, 7, 8, 9, 10, 5, 6, 7], max_tokens))
    engine.run()
    engine.check_answers()
    assert all(row.start + row.num_tokens <= 9 + max_tokens - 1 for plan in engine.plans for row in plan.rows)


def test_an_answer_that_a_grammar_holds_is_not_guessed():
    engine = Engine(config(speculative_config=LOOPS))
    engine.add(request("a", [5, 6, 7, 8, 9, 10, 5], 40, structured=StructuredOutputs(kind="regex", source="a*")))
    assert engine.plan() is not None
    assert engine.plan() is not None  # ahead: nothing waits for its tokens
    engine.run()
    assert guessed(engine) == 0


def test_guesses_take_no_blocks_from_others():
    """Two requests that fill the pool: the younger one must not be preempted for a guess of the older."""
    engine = Engine(config(num_blocks=8, speculative_config=LOOPS, enable_prefix_caching=False))
    engine.add(request("a", [5, 6, 7, 8, 9, 10, 5], 8))
    engine.add(request("b", [5, 6, 7, 8, 9, 10, 5], 8))
    engine.run()
    assert guessed(engine) > 0
    assert engine.scheduler.stats().preemptions_recompute_total == 0
    engine.check_answers()


def test_a_step_holds_no_more_tokens_than_allowed():
    engine = Engine(config(max_num_batched_tokens=9, max_num_seqs=8, speculative_config=LOOPS))  # the world counts
    for name in "abcdefgh":
        engine.add(request(name, [5, 6, 7, 8, 9, 10, 5], 20))
    engine.run()
    assert max(plan.num_tokens for plan in engine.plans) == 9
    engine.check_answers()


def test_under_load_nothing_is_guessed_and_plans_are_made_ahead_again():
    """With rows that cost what they bring, a guess that may be wrong is a loss."""
    engine = Engine(config(speculative_config=LOOPS))
    for name in "abcdefgh":
        engine.add(request(name, 10, 80))
    ahead = 0
    while all(outputs == [] or outputs[-1].finish_reason is None for outputs in engine.outputs.values()):
        while len(engine.outstanding) < 2 and engine.plan() is not None:
            pass
        ahead += len(engine.outstanding) == 2
        engine.update(seconds=seconds_of(engine.outstanding[0], 0.010))
    assert 0 < sum(any(row.num_speculated for row in plan.rows) for plan in engine.plans) <= TRIALS + 1
    assert ahead > 40


def test_a_request_whose_guesses_are_wrong_pauses(monkeypatch: pytest.MonkeyPatch):
    """Its answer has no pattern: what was found by chance is wrong, and soon it is not tried any more."""
    engine = Engine(config(speculative_config=SpeculativeConfig(prompt_lookup_min=1, prompt_lookup_max=1)))
    monkeypatch.setattr(block_world, "token_after", lambda history: history[1] % 12)
    engine.add(request("a", list(range(12)), 400))
    run(engine, per_token=0.004)
    stats = engine.scheduler.stats()
    assert stats.spec_drafts_total > TRIALS
    assert stats.spec_drafts_total < 80
    steps = [any(row.num_speculated for row in plan.rows) for plan in engine.plans]
    assert max(len(run) for run in "".join("x" if step else "-" for step in steps).split("x")) >= FIRST_PAUSE
