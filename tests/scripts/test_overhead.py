from __future__ import annotations

import time

import pytest

from tests.scripts.load_script import load_script

overhead = load_script("overhead")


def test_a_part_within_another_is_taken_out_of_it() -> None:
    clock = overhead.Clock()
    inner = clock.timed("inner", lambda: time.sleep(0.02))
    outer = clock.timed("outer", lambda: (time.sleep(0.01), inner()))
    begin = time.perf_counter()
    clock.steps.append({})
    outer()
    wall = time.perf_counter() - begin
    parts = clock.steps[0]
    assert parts["inner"][0] >= 0.02
    assert parts["outer"][0] >= 0.01
    assert sum(part[0] for part in parts.values()) == pytest.approx(wall, abs=0.002)
    assert parts["inner"][1] < 0.01  # asleep


def test_the_steps_with_the_least_wall_time_count() -> None:
    clock = overhead.Clock()
    clock.steps = [{"a": [seconds, 0.001]} for seconds in (0.5, 0.004, 0.9, 0.7, 0.006, 0.8, 0.6, 0.4)]
    assert clock.best() == {"a": (pytest.approx(5.0), pytest.approx(1.0))}


def test_the_table_adds_up() -> None:
    parts = {"model: layers": (80.0, 40.0), "model: logits": (10.0, 5.0), "sampling": (10.0, 5.0)}
    last = overhead.table(parts, 16).splitlines()[-2:]
    assert last == ["| a step of 16 rows | 100.00 | | 50.00 | |", "| beside the model | 10.00 | 10.0% | 5.00 | 10.0% |"]
