import random

import pytest

from headrace.core.step_time import FIRST_CHUNK, GROWTH, ITL_FACTOR, StepTimeModel


def seconds_of(tokens: int, attended: int, bend: float = 0.0) -> float:
    return max(0.010 + 0.0005 * tokens + 2e-7 * attended, bend * tokens)


def trained(bend: float = 0.0, noise: float = 0.0, steps: int = 200) -> StepTimeModel:
    rng, model = random.Random(1), StepTimeModel()
    for i in range(steps):
        decodes = rng.randrange(1, 17)
        prompt = rng.choice([0, 0, rng.randrange(8, 200)]) if i % 20 else 1500
        tokens = decodes + prompt
        attended = decodes * rng.randrange(20, 900) + (prompt * rng.randrange(prompt, 2000 + prompt) if prompt else 0)
        seconds = seconds_of(tokens, attended, bend) * (1 + noise * rng.uniform(-1, 1))
        model.observe(tokens=tokens, attended=attended, has_prefill=prompt > 0, seconds=seconds)
    return model


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_it_learns_a_linear_machine(noise: float):
    model = trained(noise=noise)
    for tokens, attended, has_prefill in ((8, 2400, False), (72, 40_000, True), (1500, 1_500_000, True)):
        assert model.predict(tokens=tokens, attended=attended, has_prefill=has_prefill) == pytest.approx(
            seconds_of(tokens, attended), rel=0.01 + noise
        )


@pytest.mark.parametrize("bend", [0.0, 0.0012])
def test_the_chunk_keeps_the_step_within_its_target(bend: float):
    """Also where the machine is flat for a few tokens and steep for many, after some steps of that very size."""
    model = trained(bend=bend)
    decode = {"decode_tokens": 8, "decode_attended": 2400, "num_prompts": 1}
    for _ in range(40):
        chunk = model.prefill_chunk(**decode, context=500, limit=1000, floor=8, target_s=None)
        attended = 2400 + chunk * (500 + chunk)
        mixed = seconds_of(8 + chunk, attended, bend)
        model.observe(tokens=8 + chunk, attended=attended, has_prefill=True, seconds=mixed)
        model.observe(tokens=8, attended=2400, has_prefill=False, seconds=seconds_of(8, 2400, bend))
    undisturbed = seconds_of(8, 2400, bend)
    assert 0.6 * ITL_FACTOR < mixed / undisturbed < 1.2 * ITL_FACTOR


def test_an_absolute_target_and_the_bounds():
    model = trained()
    ask = {"decode_tokens": 8, "decode_attended": 2400, "num_prompts": 1, "context": 0}
    assert model.prefill_chunk(**ask, limit=1000, floor=8, target_s=0.050) == pytest.approx(71, abs=8)
    assert model.prefill_chunk(**ask, limit=1000, floor=8, target_s=0.001) == 8
    assert model.prefill_chunk(**ask, limit=1000, floor=8, target_s=100.0) == 1000
    assert model.prefill_chunk(**ask, limit=5, floor=8, target_s=100.0) == 5


def test_many_prompts_beside_few_decodes_take_their_share_of_the_time():
    """By the root of their number, and by their ratio to the decodes where that is more, unless the user named a target."""
    model = trained()
    ask = {"decode_tokens": 8, "decode_attended": 2400, "context": 0, "limit": 1000, "floor": 8}
    undisturbed = model.predict(tokens=8, attended=2400, has_prefill=False)
    for prompts, share in ((1, 1), (4, 2), (40, 40**0.5), (80, 10)):
        chunk = model.prefill_chunk(**ask, num_prompts=prompts, target_s=None)
        took = model.predict(tokens=8 + chunk, attended=2400 + chunk * chunk, has_prefill=True)
        assert took / undisturbed == pytest.approx(1 + share * (ITL_FACTOR - 1), rel=0.1)
    assert model.prefill_chunk(**ask, num_prompts=24, target_s=0.05) == model.prefill_chunk(**ask, num_prompts=1, target_s=0.05)


def test_before_any_data_the_chunk_is_small():
    model = StepTimeModel()
    assert model.prefill_chunk(decode_tokens=1, decode_attended=1, num_prompts=1, context=0, limit=2048, floor=8, target_s=None) == FIRST_CHUNK
    for _ in range(50):
        model.observe(tokens=10, attended=100, has_prefill=False, seconds=0.0)  # a clock that stands still
    assert not model.ready


def test_a_slow_first_step_is_forgotten():
    model = StepTimeModel()
    model.observe(tokens=1, attended=10, has_prefill=False, seconds=5.0)
    for context in range(10, 60):
        model.observe(tokens=1, attended=context, has_prefill=False, seconds=0.02)
    assert model.predict(tokens=1, attended=60, has_prefill=False) == pytest.approx(0.02, rel=0.1)


def test_it_follows_a_machine_that_becomes_slower():
    model = trained()
    for _ in range(60):
        model.observe(tokens=8, attended=2400, has_prefill=False, seconds=0.1)
    assert model.predict(tokens=8, attended=2400, has_prefill=False) == pytest.approx(0.1, rel=0.1)


def test_a_chunk_far_beyond_all_steps_seen_is_not_trusted():
    """Decode steps and a tiny prompt say nothing of a thousand tokens, whatever line goes through them."""
    model = StepTimeModel()
    for context in range(50):
        model.observe(tokens=1, attended=context + 1, has_prefill=False, seconds=0.05)
    model.observe(tokens=4, attended=10, has_prefill=True, seconds=0.05)
    ask = {"decode_tokens": 1, "decode_attended": 50, "num_prompts": 1, "context": 0, "limit": 2048, "floor": 8, "target_s": None}
    assert model.prefill_chunk(**ask) == FIRST_CHUNK
    model.observe(tokens=33, attended=33 * 33, has_prefill=True, seconds=0.05)
    assert model.prefill_chunk(**ask) == GROWTH * 33


def test_a_long_prompt_does_not_blur_what_an_undisturbed_step_takes():
    """Hundreds of steps with prompt tokens and none without, on a machine where the first tokens of a step are almost free."""

    def seconds(tokens: int, attended: int) -> float:
        return max(0.025 + 0.0005 * tokens, 0.0025 * tokens) + 5e-7 * attended

    model, context = StepTimeModel(), 0
    for step in range(60):
        model.observe(tokens=1, attended=step + 1, has_prefill=False, seconds=seconds(1, step + 1))
    ratios = []
    while context < 4000:
        chunk = model.prefill_chunk(decode_tokens=1, decode_attended=60, num_prompts=1, context=context, limit=2047, floor=8, target_s=None)
        attended = 60 + chunk * (context + chunk)
        took = seconds(1 + chunk, attended)
        model.observe(tokens=1 + chunk, attended=attended, has_prefill=True, seconds=took)
        ratios.append(took / seconds(1, 60))
        context += chunk
    assert model.predict(tokens=1, attended=60, has_prefill=False) == pytest.approx(seconds(1, 60), rel=0.05)
    assert max(ratios[1:]) < 1.25 * ITL_FACTOR
    assert sum(ratios[5:]) / len(ratios[5:]) > 0.8 * ITL_FACTOR


def test_a_pause_right_before_a_prompt_does_not_count_for_all_of_it():
    """No step of decodes alone follows for many seconds that could tell better."""
    model = trained()
    for step in range(100):
        slow = 2.5 if step >= 80 else 1.0
        model.observe(tokens=8, attended=2400, has_prefill=False, seconds=slow * seconds_of(8, 2400))
    assert model.predict(tokens=8, attended=2400, has_prefill=False) == pytest.approx(seconds_of(8, 2400), rel=0.05)


def test_most_steps_keep_the_latency_on_a_machine_that_varies():
    rng, model = random.Random(3), trained()
    decode = {"decode_tokens": 8, "decode_attended": 2400, "num_prompts": 1, "context": 500, "limit": 1000, "floor": 8}
    kept = 0
    for _ in range(400):
        chunk = model.prefill_chunk(**decode, target_s=0.05)
        attended = 2400 + chunk * (500 + chunk)
        seconds = seconds_of(8 + chunk, attended) * rng.uniform(0.7, 1.3)
        model.observe(tokens=8 + chunk, attended=attended, has_prefill=True, seconds=seconds)
        kept += seconds <= 0.05
    assert 0.65 < kept / 400 < 0.85
