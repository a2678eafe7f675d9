import random

import pytest

from headrace.core.step_time import FIRST_CHUNK, GROWTH, ITL_FACTOR, StepTimeModel, _non_negative_fit
from headrace.core.step_work import StepWork

START_S = 0.004


def seconds_of(work: StepWork, bend: float = 0.0) -> float:
    """Rows cost six times as much as prompt tokens; those have a start of their own."""
    decode_tokens, decode_attended, prompt_tokens, prompt_attended, _ = work
    prompts = START_S + 0.0001 * prompt_tokens + 2e-8 * prompt_attended if prompt_tokens else 0.0
    return max(0.010 + 0.0006 * decode_tokens + 2e-7 * decode_attended + prompts, bend * (decode_tokens + prompt_tokens))


DECODES = StepWork(8, 2400)


def trained(bend: float = 0.0, noise: float = 0.0, steps: int = 200) -> StepTimeModel:
    rng, model = random.Random(1), StepTimeModel()
    for i in range(steps):
        decodes = rng.randrange(1, 17)
        prompt = rng.choice([0, 0, rng.randrange(8, 200)]) if i % 20 else 1500
        work = StepWork(decodes, decodes * rng.randrange(20, 900))
        if prompt:
            work = work.with_prompt(prompt, rng.randrange(2000))
        model.observe(work, seconds=seconds_of(work, bend) * (1 + noise * rng.uniform(-1, 1)))
    return model


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_it_learns_what_rows_and_prompt_tokens_cost_apart(noise: float):
    model = trained(noise=noise)
    for work in (DECODES, StepWork(16, 300), DECODES.with_prompt(8, 100), DECODES.with_prompt(64, 500), StepWork().with_prompt(1500, 0)):
        assert model.predict(work) == pytest.approx(seconds_of(work), rel=0.01 + noise)


def test_what_prompts_cost_outlasts_a_long_answer():
    model = trained()
    for context in range(1, 20_000):
        model.observe(StepWork(1, context), seconds=seconds_of(StepWork(1, context)))
    assert model.predict(StepWork(1, 100).with_prompt(200, 0)) == pytest.approx(seconds_of(StepWork(1, 100).with_prompt(200, 0)), rel=0.02)


@pytest.mark.parametrize("bend", [0.0, 0.0012])
def test_the_chunk_keeps_the_step_within_its_target(bend: float):
    """Also where the machine is flat for a few tokens and steep for many, after some steps of that very size."""
    model = trained(bend=bend)
    for _ in range(40):
        chunk = model.prefill_chunk(DECODES, num_prompts=1, context=500, limit=1000, floor=8, target_s=None)
        mixed = seconds_of(DECODES.with_prompt(chunk, 500), bend)
        model.observe(DECODES.with_prompt(chunk, 500), seconds=mixed)
        model.observe(DECODES, seconds=seconds_of(DECODES, bend))
    undisturbed = seconds_of(DECODES, bend)
    assert 0.6 * ITL_FACTOR < mixed / undisturbed < 1.2 * ITL_FACTOR


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_the_fit_is_the_best_without_negative_coefficients(noise: float):
    rng = random.Random(5)
    for _ in range(200):
        size = rng.randrange(1, 7)
        rows = [[rng.random() for _ in range(size)] for _ in range(size + 4)]
        right = [sum(rng.choice((-1, 1, 2)) * value for value in row) + noise * rng.uniform(-1, 1) for row in rows]
        xx = [[sum(row[i] * row[j] for row in rows) for j in range(i + 1)] for i in range(size)]
        xy = [sum(row[i] * y for row, y in zip(rows, right, strict=True)) for i in range(size)]
        found = _non_negative_fit(xx, xy, [rng.choice((0.0, 1.0)) for _ in range(size)])
        assert min(found) >= 0.0
        for i in range(size):  # no step to either side lowers the loss (Karush, Kuhn, Tucker)
            slope = xy[i] - sum(xx[max(i, j)][min(i, j)] * found[j] for j in range(size))
            assert slope <= 1e-4 * abs(xy[i]) if found[i] == 0.0 else abs(slope) <= 1e-4 * max(map(abs, xy))


def test_an_absolute_target_and_the_bounds():
    model = trained()
    ask = {"num_prompts": 1, "context": 0}
    assert model.prefill_chunk(DECODES, **ask, limit=1000, floor=8, target_s=0.050) == pytest.approx(295, abs=8)
    assert model.prefill_chunk(DECODES, **ask, limit=1000, floor=8, target_s=0.001) == 8
    assert model.prefill_chunk(DECODES, **ask, limit=1000, floor=8, target_s=100.0) == 1000
    assert model.prefill_chunk(DECODES, **ask, limit=5, floor=8, target_s=100.0) == 5


def test_many_prompts_beside_few_decodes_take_their_share_of_the_time():
    """By the root of their number, and by their ratio to the decodes where that is more, unless the user named a target."""
    model = trained()
    ask = {"context": 0, "limit": 2000, "floor": 8}
    undisturbed = model.predict(DECODES)
    for prompts, share in ((1, 1), (4, 2), (40, 40**0.5), (80, 10)):
        chunk = model.prefill_chunk(DECODES, **ask, num_prompts=prompts, target_s=None)
        took = model.predict(DECODES.with_prompt(chunk, 0)) - START_S
        assert took / undisturbed == pytest.approx(1 + share * (ITL_FACTOR - 1), rel=0.02)
    assert model.prefill_chunk(DECODES, **ask, num_prompts=24, target_s=0.05) == model.prefill_chunk(DECODES, **ask, num_prompts=1, target_s=0.05)


def test_a_dear_start_of_prompts_is_not_paid_for_a_few_tokens_each():
    """Where any prompt token costs more than a step of decodes, a chunk still has as many as take as long as that step."""
    model = StepTimeModel()
    for prompt in (*range(8, 200, 8), *(0,) * 60):
        work = StepWork(1, 100)
        model.observe(work.with_prompt(prompt, 0) if prompt else work, seconds=0.006 + (0.011 + 0.0002 * prompt if prompt else 0.0))
    assert model.prefill_chunk(StepWork(1, 100), num_prompts=1, context=0, limit=2000, floor=8, target_s=None) == pytest.approx(30, abs=2)
    assert model.prefill_chunk(StepWork(1, 100), num_prompts=1, context=0, limit=2000, floor=8, target_s=0.012) == 8  # what the user named, holds


def test_before_any_data_the_chunk_is_small():
    model = StepTimeModel()
    assert model.prefill_chunk(StepWork(1, 1), num_prompts=1, context=0, limit=2048, floor=8, target_s=None) == FIRST_CHUNK
    for _ in range(50):
        model.observe(StepWork(10, 100), seconds=0.0)  # a clock that stands still
    assert not model.ready


def test_a_slow_first_step_is_forgotten():
    model = StepTimeModel()
    model.observe(StepWork(1, 10), seconds=5.0)
    for context in range(10, 60):
        model.observe(StepWork(1, context), seconds=0.02)
    assert model.predict(StepWork(1, 60)) == pytest.approx(0.02, rel=0.1)


def test_it_follows_a_machine_that_becomes_slower():
    model = trained()
    for _ in range(60):
        model.observe(DECODES, seconds=0.1)
    assert model.predict(DECODES) == pytest.approx(0.1, rel=0.1)


def test_a_chunk_far_beyond_all_steps_seen_is_not_trusted():
    """Decode steps and a tiny prompt say nothing of a thousand tokens, whatever line goes through them."""
    model = StepTimeModel()
    for context in range(50):
        model.observe(StepWork(1, context + 1), seconds=0.05)
    model.observe(StepWork(prompt_tokens=4, prompt_attended=16), seconds=0.05)
    ask = {"beside": StepWork(1, 50), "num_prompts": 1, "context": 0, "limit": 2048, "floor": 8, "target_s": None}
    assert model.prefill_chunk(**ask) == FIRST_CHUNK
    model.observe(StepWork(prompt_tokens=33, prompt_attended=33 * 33), seconds=0.05)
    assert model.prefill_chunk(**ask) == GROWTH * 33


def test_a_long_prompt_does_not_blur_what_an_undisturbed_step_takes():
    """Hundreds of steps with prompt tokens and none without, on a machine where the first tokens of a step are almost free."""

    def seconds(tokens: int, attended: int) -> float:
        return max(0.025 + 0.0005 * tokens, 0.0025 * tokens) + 5e-7 * attended

    model, context = StepTimeModel(), 0
    for step in range(60):
        model.observe(StepWork(1, step + 1), seconds=seconds(1, step + 1))
    ratios = []
    while context < 4000:
        chunk = model.prefill_chunk(StepWork(1, 60), num_prompts=1, context=context, limit=2047, floor=8, target_s=None)
        attended = 60 + chunk * (context + chunk)
        took = seconds(1 + chunk, attended)
        model.observe(StepWork(1, 60).with_prompt(chunk, context), seconds=took)
        ratios.append(took / seconds(1, 60))
        context += chunk
    assert model.predict(StepWork(1, 60)) == pytest.approx(seconds(1, 60), rel=0.05)
    assert max(ratios[1:]) < 1.25 * ITL_FACTOR
    assert sum(ratios[5:]) / len(ratios[5:]) > 0.8 * ITL_FACTOR


def test_a_pause_right_before_a_prompt_does_not_count_for_all_of_it():
    """No step of decodes alone follows for many seconds that could tell better."""
    model = trained()
    for step in range(100):
        slow = 2.5 if step >= 80 else 1.0
        model.observe(DECODES, seconds=slow * seconds_of(DECODES))
    assert model.predict(DECODES) == pytest.approx(seconds_of(DECODES), rel=0.05)


def test_most_steps_keep_the_latency_on_a_machine_that_varies():
    rng, model = random.Random(3), trained()
    kept = 0
    for _ in range(400):
        chunk = model.prefill_chunk(DECODES, num_prompts=1, context=500, limit=1000, floor=8, target_s=0.05)
        work = DECODES.with_prompt(chunk, 500)
        seconds = seconds_of(work) * rng.uniform(0.7, 1.3)
        model.observe(work, seconds=seconds)
        kept += seconds <= 0.05
    assert 0.65 < kept / 400 < 0.85
