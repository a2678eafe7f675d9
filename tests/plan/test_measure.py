from __future__ import annotations

import pytest

from headrace.bench.sse_client import Record
from headrace.core.messages import AddRequest
from headrace.core.step_work import StepWork
from headrace.engine.trace import Trace
from headrace.engine.wire import StepTrace, TracedRow
from headrace.plan.costs import Sample
from headrace.plan.measure import delays_of, handoffs, levels, samples_of
from headrace.sampling_params import SamplingParams
from headrace.server.perfetto import trace_object


def step(step_id: int, started: float, ended: float, *rows: TracedRow) -> StepTrace:
    return StepTrace(step_id, started - 0.002, started - 0.001, started, ended, ended + 0.001, 0.0, "ready", 0, rows)


def recording(*steps: StepTrace, arrivals: dict[str, float] | None = None) -> dict[str, object]:
    """As the server draws it."""
    trace = Trace(begin=10.0, end=15.0)
    for name, arrival in (arrivals or {}).items():
        trace.add_request(AddRequest(request_id=name, prompt_token_ids=(1,), params=SamplingParams(), arrival=arrival))
    for entry in steps:
        trace.add_step(entry)
    return trace_object(trace, model="tiny")


def test_what_was_in_each_step() -> None:
    """A prompt in two parts, the second of which yields a token, beside a decode."""
    found = samples_of(
        recording(
            step(1, 10.5, 10.6, TracedRow("a", 0, 7, 0, False), TracedRow("b", 30, 1, 0, True)),
            step(2, 10.6, 10.75, TracedRow("a", 7, 3, 0, False), TracedRow("b", 31, 1, 0, True)),
            step(3, 10.8, 10.82, TracedRow("a", 10, 1, 0, True)),
        )
    )
    assert found == [
        Sample(StepWork(1, 31, 7, 49, 1), pytest.approx(0.1)),
        Sample(StepWork(1, 32, 3, 30, 2), pytest.approx(0.15)),
        Sample(StepWork(1, 11, 0, 0, 1), pytest.approx(0.02), idle=pytest.approx(0.05)),
    ]


def test_handoffs_are_gaps_without_a_wait() -> None:
    row = TracedRow("a", 0, 1, 0, True)
    found = handoffs(recording(step(1, 10.0, 10.1, row), step(2, 10.101, 10.2, row), step(3, 10.5, 10.6, row)))
    assert found == pytest.approx([0.001])


def test_the_time_around_the_engine() -> None:
    """4 ms and 0.1 ms a prompt token before it, 2 ms behind it. A request whose prompt was not done has no partner, nor has one that nobody saw."""
    lengths = {"a": 10, "b": 40, "c": 100, "d": 40, "e": 60}
    steps = [step(i, 10.5 + i, 10.7 + i, TracedRow(name, 0, tokens, 0, False)) for i, (name, tokens) in enumerate(lengths.items())]
    steps += [
        step(10 + i, 10.7 + i, 10.8 + i, TracedRow(name, tokens, 1, 0, True)) for i, (name, tokens) in enumerate(lengths.items()) if name != "c"
    ]
    arrivals = {name: 10.4 + i for i, name in enumerate(lengths)}
    records = [
        Record(sent=arrivals[name] - 0.004 - 0.0001 * tokens, first=10.7 + i + 0.002, num_prompt_tokens=tokens)
        for i, (name, tokens) in enumerate(lengths.items())
        if name != "e"
    ]
    before, before_token, after = delays_of([recording(*steps, arrivals=arrivals)], [*reversed(records)])
    assert (before, before_token, after) == pytest.approx((0.004, 0.0001, 0.002))
    assert delays_of([recording(*steps)], []) == (0.0, 0.0, 0.0)


def test_levels_end_with_what_runs_at_once() -> None:
    assert levels(64) == [1, 2, 4, 8, 16, 32, 64]
    assert levels(10) == [1, 2, 4, 8, 10]
    assert levels(1) == [1]
