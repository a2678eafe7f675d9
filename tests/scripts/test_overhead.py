from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.scripts.load_script import load_script

overhead = load_script("overhead")


def test_a_part_within_another_is_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = [0.0, 0.0]  # wall, processor

    def spend(wall: float, processor: float) -> None:
        passed[0] += wall
        passed[1] += processor

    monkeypatch.setattr(overhead, "time", SimpleNamespace(perf_counter=lambda: passed[0], thread_time=lambda: passed[1]))
    clock = overhead.Clock()
    inner = clock.timed("inner", lambda: spend(2.0, 0.0))
    outer = clock.timed("outer", lambda: (spend(1.0, 0.5), inner(), spend(4.0, 3.0)))
    clock.steps.append({})
    outer()
    assert clock.steps == [{"inner": [2.0, 0.0], "outer": [5.0, 3.5]}]


def test_the_steps_with_the_least_wall_time_count() -> None:
    clock = overhead.Clock()
    clock.steps = [{"a": [seconds, 0.001]} for seconds in (0.5, 0.004, 0.9, 0.7, 0.006, 0.8, 0.6, 0.4)]
    assert clock.best() == {"a": (pytest.approx(5.0), pytest.approx(1.0))}


def test_the_table_adds_up() -> None:
    parts = {"model: layers": (80.0, 40.0), "model: logits": (10.0, 5.0), "sampling": (10.0, 5.0)}
    last = overhead.table(parts, 16).splitlines()[-2:]
    assert last == ["| a step of 16 rows | 100.00 | | 50.00 | |", "| beside the model | 10.00 | 10.0% | 5.00 | 10.0% |"]
