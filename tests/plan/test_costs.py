from __future__ import annotations

import dataclasses
import itertools
import random
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.plan.costs import Measured, Sample, StepShape, fit


def true_seconds(shape: StepShape) -> float:
    """Flat up to 8 tokens, as where the weights are what a step waits for, then rising."""
    return 0.010 + 0.0005 * max(0, shape.tokens - 8) + 0.0001 * shape.sampled + 1e-6 * shape.context + 2e-7 * shape.attended


def samples(noise: float = 0.0) -> list[Sample]:
    draw = random.Random(1)
    found = []
    for rows, prompt in itertools.product((0, 1, 2, 4, 8, 12, 16, 24, 32), (0, 16, 100, 256, 512)):
        for _ in range(4):
            context, before = rows * draw.randint(1, 2000), draw.randint(0, 1000)
            shape = StepShape(rows + prompt, rows + bool(prompt), context, prompt * (before + prompt), bool(prompt))
            if shape.tokens:
                seconds = true_seconds(shape) * (1.0 + noise * draw.uniform(-1.0, 1.0))
                found.append(Sample(**shape._asdict(), seconds=seconds))
    return found


def test_the_fit_finds_the_cost_of_steps_that_were_not_measured() -> None:
    costs = fit(samples(), noise=None)
    for shape in (StepShape(1, 1, 500, 0, False), StepShape(20, 20, 9000, 0, False), StepShape(300, 5, 2000, 90_000, True)):
        assert costs.seconds(shape) == pytest.approx(true_seconds(shape), rel=0.02)


def test_beyond_what_was_measured_the_last_slope_goes_on() -> None:
    costs = fit(samples(), noise=None)
    small, large = (costs.seconds(StepShape(tokens, 1, 0, 0, True)) for tokens in (1000, 2000))
    assert large - small == pytest.approx(0.5, rel=0.05)


def test_no_slope_is_negative() -> None:
    """However the machine paused, more tokens never take less."""
    costs = fit(samples(noise=0.8), noise=None)
    times = [costs.seconds(StepShape(tokens, 1, 0, 0, False)) for tokens in range(1, 600)]
    assert times == sorted(times)


def test_noise_is_that_of_the_measured_steps_and_of_its_seed() -> None:
    found = samples(noise=0.2)
    shape = StepShape(8, 8, 8000, 0, False)
    plain = fit(found, noise=None).seconds(shape)
    drawn = [[costs.seconds(shape) for _ in range(200)] for costs in (fit(found, noise=1), fit(found, noise=1), fit(found, noise=2))]
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


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"samples": {"tokens": [1]}}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--step-costs: .*costs.json"):
        Measured.read(tmp_path / "costs.json")
    dataclasses.replace(measured(), samples=()).write(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="no measured steps"):
        Measured.read(tmp_path / "none.json")
