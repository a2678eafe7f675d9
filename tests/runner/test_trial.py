"""Two ways take turns, and the faster one stays."""

from __future__ import annotations

import pytest

from headrace.runner.trial import SKIPPED, Trials, Verdict


def run(trials: Trials, kind: str, *, compiled: float, general: float, steps: int, slow_first: bool = False) -> tuple[list[bool], list[Verdict]]:
    ways, verdicts = [], []
    for step in range(steps):
        way = trials.takes_compiled(kind)
        seconds = (compiled if way else general) * (100 if slow_first and way and step < 2 * SKIPPED else 1)
        verdict = trials.record(kind, compiled=way, seconds=seconds * 4, num_tokens=4)
        ways.append(way)
        verdicts += [verdict] if verdict else []
    return ways, verdicts


@pytest.mark.parametrize(("compiled", "general"), [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0)])
def test_the_faster_way_stays(compiled: float, general: float) -> None:
    ways, verdicts = run(Trials(samples=3), "a", compiled=compiled, general=general, steps=30)
    assert verdicts == [Verdict(compiled=compiled, general=general)]
    tried = 2 * (3 + SKIPPED)
    assert ways[:tried].count(True) == ways[:tried].count(False)
    assert set(ways[tried:]) == {compiled < general}


def test_first_steps_do_not_count() -> None:
    _, verdicts = run(Trials(samples=3), "a", compiled=1.0, general=2.0, steps=12, slow_first=True)
    assert verdicts == [Verdict(compiled=1.0, general=2.0)]


def test_kinds_are_apart() -> None:
    trials = Trials(samples=1)
    run(trials, "a", compiled=2.0, general=1.0, steps=10)
    run(trials, "b", compiled=1.0, general=2.0, steps=10)
    assert (trials.takes_compiled("a"), trials.takes_compiled("b"), trials.takes_compiled("c")) == (False, True, True)


def test_one_slow_step_decides_nothing() -> None:
    trials = Trials(samples=5)
    for step in range(30):
        way = trials.takes_compiled("a")
        trials.record("a", compiled=way, seconds=50.0 if way and step == 8 else 1.0 if way else 2.0, num_tokens=1)
    assert trials.takes_compiled("a")
