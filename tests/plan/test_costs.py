from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import pytest

from headrace.core.step_work import StepWork
from headrace.errors import ConfigError
from headrace.plan.costs import Measured, Sample, fit


def true_seconds(work: StepWork) -> float:
    """Flat up to 8 rows, as where the weights are what a step waits for, then rising; prompt tokens go through kernels of their own."""
    seconds = 0.010 + 0.0005 * max(0, work.decode_tokens - 8) + 1e-6 * work.decode_attended
    if work.prompt_tokens:
        seconds += 0.004 + 0.0002 * work.prompt_tokens + 0.0001 * (work.sampled - work.decode_tokens) + 2e-7 * work.prompt_attended
    return seconds


def decoding(rows: int, context: int = 0) -> StepWork:
    return StepWork(rows, context, 0, 0, rows)


def prompts(tokens: int, attended: int = 0) -> StepWork:
    return StepWork(0, 0, tokens, attended, 1)


def samples(noise: float = 0.0) -> list[Sample]:
    draw = random.Random(1)
    found = []
    for rows, prompt in itertools.product((0, 1, 2, 4, 8, 12, 16, 24, 32), (0, 16, 100, 256, 512)):
        for _ in range(4):
            context, before = rows * draw.randint(1, 2000), draw.randint(0, 1000)
            work = StepWork(rows, context, prompt, prompt * (before + prompt), rows + bool(prompt))
            if work.tokens:
                seconds = true_seconds(work) * (1.0 + noise * draw.uniform(-1.0, 1.0))
                found.append(Sample(work, seconds))
    return found


def test_the_fit_finds_the_cost_of_steps_that_were_not_measured() -> None:
    costs = fit(samples(), noise=None)
    for work in (decoding(1, 500), decoding(20, 9000), prompts(40, 8000), StepWork(4, 2000, 300, 90_000, 5)):
        assert costs.seconds(work) == pytest.approx(true_seconds(work), rel=0.02)


def test_beyond_what_was_measured_the_last_slope_goes_on() -> None:
    costs = fit(samples(), noise=None)
    small, large = (costs.seconds(prompts(tokens)) for tokens in (1000, 2000))
    assert large - small == pytest.approx(0.2, rel=0.05)


def test_a_kind_of_step_that_was_not_measured_is_taken_for_the_other() -> None:
    """Prompt tokens for so many decodes; a step of decodes for one with the fewest prompt tokens and no first token."""
    found = samples()
    decodes_only = fit([sample for sample in found if not sample.work.prompt_tokens], noise=None)
    assert decodes_only.seconds(prompts(20, 9000)) == decodes_only.seconds(decoding(20, 9000))
    prompts_only = fit([sample for sample in found if sample.work.prompt_tokens], noise=None)
    assert 0.0 < prompts_only.seconds(decoding(4)) == prompts_only.seconds(StepWork(4, 0, 16, 0, 4))


def test_no_slope_is_negative() -> None:
    """However the machine paused, more tokens never take less."""
    costs = fit(samples(noise=0.8), noise=None)
    for times in ([costs.seconds(decoding(rows)) for rows in range(1, 600)], [costs.seconds(prompts(tokens)) for tokens in range(1, 600)]):
        assert times == sorted(times)


def test_noise_is_that_of_the_measured_steps_and_of_its_seed() -> None:
    found = samples(noise=0.2)
    work = decoding(8, 8000)
    plain = fit(found, noise=None).seconds(work)
    drawn = [[costs.seconds(work) for _ in range(200)] for costs in (fit(found, noise=1), fit(found, noise=1), fit(found, noise=2))]
    assert drawn[0] == drawn[1] != drawn[2]
    assert min(drawn[0]) == pytest.approx(0.8 * plain, rel=0.1)
    assert max(drawn[0]) == pytest.approx(1.2 * plain, rel=0.1)
    assert sum(drawn[0]) / 200 == pytest.approx(plain, rel=0.05)
    assert fit(found).spread()["decode"] == pytest.approx(0.1, abs=0.05)


def test_too_few_steps_say_nothing() -> None:
    with pytest.raises(ConfigError, match="too few"):
        fit(samples()[:3])


def measured() -> Measured:
    return Measured(
        model="m",
        machine="x",
        flags=("threads: 2",),
        num_blocks=10,
        block_size=16,
        max_model_len=100,
        handoff_s=0.001,
        before_s=0.002,
        before_token_s=1e-6,
        after_s=0.003,
        samples=tuple(samples()),
    )


def test_what_was_measured_can_be_kept(tmp_path: Path) -> None:
    measured().write(tmp_path / "costs.json")
    assert Measured.read(tmp_path / "costs.json") == measured()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"samples": {"decodes": [1]}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--step-costs: .*costs.json"):
        Measured.read(tmp_path / "costs.json")
    dataclasses.replace(measured(), samples=()).write(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="no measured steps"):
        Measured.read(tmp_path / "none.json")


def test_a_step_after_a_pause_takes_more_the_longer_it_was() -> None:
    """Up to a pause of a few tenths of a second; what was in the step does not count, and steps after pauses do not blur what others take."""
    draw = random.Random(3)
    cold = []
    for _ in range(60):
        idle, work = draw.choice((0.02, 0.1, 0.4, 3.0)), draw.choice((decoding(1, 500), prompts(60)))
        cold.append(Sample(work, true_seconds(work) + 0.05 * min(idle, 0.4), idle))
    costs = fit([*samples(), *cold], noise=None)
    assert [costs.cold(idle) for idle in (0.02, 0.1, 0.4, 60.0)] == pytest.approx([0.001, 0.005, 0.02, 0.02], rel=0.05)
    assert costs.seconds(decoding(1, 500)) == pytest.approx(true_seconds(decoding(1, 500)), rel=0.02)
    assert fit(samples()).cold(1.0) == 0.0, "no such step was measured"
