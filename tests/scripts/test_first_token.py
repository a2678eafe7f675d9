"""How a trace and the client's moments become parts that add up."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from tests.scripts.load_script import load_script


@pytest.fixture(scope="module")
def first_token() -> ModuleType:
    return load_script("first_token")


def trace(*, chunks: int = 1) -> dict[str, Any]:
    """One request in a trace that began at 100 s; times are microseconds from there."""
    events = [
        {"name": "process_name", "ph": "M"},
        {"name": "queued", "ph": "X", "ts": 4000.0, "dur": 3500.0},
        {"name": "plan 7", "ph": "X", "ts": 5500.0, "dur": 1000.0},
        {"name": "step 7: 1 rows, 128 tokens", "ph": "X", "ts": 7500.0, "dur": 30000.0},
        *({"name": "prefill 128", "ph": "X", "ts": 7500.0 + number, "dur": 30000.0} for number in range(chunks)),
        {"name": "1 tokens", "ph": "i", "ts": 39500.0},
        {"name": "1 tokens", "ph": "i", "ts": 90000.0},
    ]
    return {"otherData": {"begin": 100.0}, "traceEvents": events}


def test_the_parts_are_from_moment_to_moment_and_add_up(first_token: ModuleType) -> None:
    moments = first_token.Moments(begin=100.001, connected=100.0015, first=100.042)
    found = first_token.parts_of(moments, trace())
    assert [1e3 * found[part] for part in first_token.PARTS] == pytest.approx([0.5, 2.5, 1.5, 1.0, 1.0, 30.0, 2.0, 2.5, 41.0])
    assert "| step | 30.00 | 30.00 | 30.00 |" in first_token.table([found, found])


def test_what_the_trace_does_not_hold_whole_is_left_out(first_token: ModuleType) -> None:
    moments = first_token.Moments(begin=100.001, connected=100.0015, first=100.042)
    assert first_token.parts_of(moments, trace(chunks=2)) is None
    assert first_token.parts_of(first_token.Moments(begin=200.0, connected=200.1, first=200.2), trace()) is None
