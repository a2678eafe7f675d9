"""Drift: quiet while nothing changes, said once when something does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from headrace.observe.drift import INTERVAL_S, MAX_PENDING, DriftDetector, DriftWatch, critical_distance, distance, persistence
from headrace.observe.metrics import BackgroundMetrics, Metrics

Values = Callable[[random.Random], Callable[[], float]]


def lengths(rng: random.Random) -> Callable[[], float]:
    return lambda: float(round(rng.lognormvariate(5, 1)))


def refusals(rng: random.Random) -> Callable[[], float]:
    return lambda: float(rng.random() < 0.05)


def bursts(rng: random.Random) -> Callable[[], float]:
    """Times of a queue: each resembles the one before."""
    level = 0.0

    def value() -> float:
        nonlocal level
        level = 0.8 * level + 0.6 * rng.gauss(0, 1)
        return math.exp(level)

    return value


@pytest.mark.parametrize("values", [lengths, refusals, bursts])
def test_quiet_on_a_stationary_stream(values: Values):
    total = 0
    for seed in range(40):
        detector, value = DriftDetector(), values(random.Random(seed))
        for _ in range(6000):
            detector.add(value())
        total += detector.drifts_total
    assert total == 0


@pytest.mark.parametrize("before", [1200, 1333, 5000])
def test_lengths_that_double_are_said_once(before: int):
    for seed in range(10):
        detector, value = DriftDetector(), lengths(random.Random(seed))
        for _ in range(before):
            detector.add(value())
        assert detector.drifts_total == 0
        for _ in range(600):
            detector.add(2 * value())
        assert detector.drifts_total == 1
        for _ in range(5000):
            detector.add(2 * value())
        assert detector.drifts_total == 1  # the new lengths are usual by now


def test_a_share_that_rises():
    detector, rng = DriftDetector(), random.Random(1)
    for _ in range(1500):
        detector.add(float(rng.random() < 0.02))
    for _ in range(600):
        detector.add(float(rng.random() < 0.4))
    assert detector.drifts_total == 1


def test_an_episode_is_no_drift():
    detector, value = DriftDetector(size=100, reference=500), lengths(random.Random(3))
    for index in range(4000):
        detector.add(value() * (3 if 2000 <= index < 2100 else 1))
    assert detector.drifts_total == 0


@pytest.mark.parametrize("sizes", [(1, 1), (7, 3), (50, 200)])
def test_distance_is_the_definition(sizes: tuple[int, int]):
    rng = random.Random(7)
    one, other = ([float(rng.randrange(12)) for _ in range(size)] for size in sizes)

    def below(sample: list[float], x: float) -> float:
        return sum(value <= x for value in sample) / len(sample)

    assert distance(one, other) == pytest.approx(max(abs(below(one, x) - below(other, x)) for x in range(12)))


def test_critical_distance():
    assert critical_distance(100, 100, 0.05) == pytest.approx(1.358 * math.sqrt(2 / 100), rel=1e-3)  # the constant of tables


def test_persistence():
    rng = random.Random(2)
    assert persistence([rng.random() for _ in range(1000)]) == pytest.approx(1.0, abs=0.15)
    assert persistence([5.0] * 10) == 1.0
    value = bursts(rng)
    assert 5 < persistence([value() for _ in range(5000)]) < 12  # (1 + 0.8) / (1 - 0.8), a little less for ranks


def test_memory_is_bounded_and_one_value_is_taken_in_a_second():
    watch = DriftWatch()
    for index in range(10 * MAX_PENDING):
        watch.see("prompt_tokens", 1.0, index * INTERVAL_S)
        watch.see("refused", 1.0, 0.0)
    assert len(watch._pending) == MAX_PENDING
    list(watch.collect())
    assert not watch._pending
    detector = watch._detectors["prompt_tokens"]
    assert len(detector._reference) <= 1000
    assert len(detector._latest) < 200


def samples(metrics: Metrics) -> dict[str, float]:
    text = metrics.render(None, state="ready")[0].decode()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in text.splitlines() if line.startswith("headrace_drift"))}


def test_what_a_server_sees():
    now = 0.0
    metrics, rng = Metrics(model_name="m", clock=lambda: now), random.Random(4)
    metrics.expect_paths(["/v1/completions", "/health"], answering=["/v1/completions"])
    background = BackgroundMetrics(metrics)
    assert set(samples(metrics).values()) == {0.0}
    for index in range(2400):
        now += 1.0
        background.prompt(100_000)
        metrics.prompt(round(rng.lognormvariate(5, 1)) * (2 if index >= 1400 else 1))
        metrics.first_token(rng.random())
        metrics.finished("length", 1.0, round(rng.lognormvariate(4, 1)))
        metrics.finished("abort", 1.0, 0)
        metrics.http_request("/v1/completions", 200 if index < 1400 else 429)
        metrics.http_request("/health", 503)
        if index % 15 == 0:
            found = samples(metrics)
    assert {name: value for name, value in found.items() if "total" in name} == {
        'headrace_drifts_total{stream="prompt_tokens"}': 1.0,
        'headrace_drifts_total{stream="generation_tokens"}': 0.0,
        'headrace_drifts_total{stream="time_to_first_token"}': 0.0,
        'headrace_drifts_total{stream="refused"}': 1.0,
        'headrace_drifts_total{stream="spec_acceptance"}': 0.0,
    }
    assert 0 < found['headrace_drift_distance{stream="time_to_first_token"}'] < 0.3


def test_guesses_that_are_wrong_more_often():
    watch, rng = DriftWatch(), random.Random(5)
    drafted = accepted = 0
    for index in range(600):
        drafted += 200
        accepted += round(200 * ((0.7 if index < 360 else 0.5) + rng.gauss(0, 0.05)))
        watch.speculated(drafted, accepted, 15.0 * index)
        watch.speculated(drafted + 1, accepted, 15.0 * index)  # too few to say anything
        list(watch.collect())
    assert watch._detectors["spec_acceptance"].drifts_total == 1
