from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.bench.traces import Trace, TracedRequest, load_trace
from headrace.plan.fleet import Engine, keeps_slo, replay, replicas_needed
from headrace.plan.report import answer, cost_of, text
from headrace.plan.simulator import Delays
from headrace.plan.slo import parse_slo
from tests.plan.test_simulator import LinearCosts, config


def engine(**changes: object) -> Engine:
    return Engine(config=config(**changes), costs=lambda number: LinearCosts(), delays=Delays())


def no_progress(replicas: int) -> Callable[[], None]:
    return lambda: None


def test_a_fleet_counts_all_its_requests_together() -> None:
    trace = load_trace("burst:prompt=10,output=4,requests=8")
    fleet = replay(trace, engine(), 2, limits=parse_slo("p95_ttft=60ms"))
    assert fleet is not None
    assert (fleet.num_output_tokens, fleet.num_prompt_tokens, fleet.failed) == (32, 80, 0)
    assert fleet.latencies["ttft"] == pytest.approx([0.05] * 8), "each engine computes its four prompts in one step"
    assert fleet.latencies["itl"] == pytest.approx([0.014] * 24)
    assert fleet.figures()["p95_ttft_ms"] == pytest.approx(50.0)
    assert fleet.seconds == pytest.approx(0.05 + 3 * 0.014)
    assert fleet.busy_share == pytest.approx(1.0)
    assert keeps_slo(fleet)


def test_goodput_counts_requests_that_keep_each_limit_by_themselves() -> None:
    """Four slots: the other four wait for them."""
    trace = load_trace("burst:prompt=10,output=4,requests=8")
    fleet = replay(trace, engine(), 1, limits=parse_slo("p50_ttft=60ms"))
    assert fleet is not None
    assert fleet.good == 4
    assert fleet.figures()["request_goodput"] == pytest.approx(4 / fleet.seconds)


@pytest.mark.parametrize("limit", [60, 120])
def test_the_fewest_engines_are_found(limit: int) -> None:
    """The search gives up early on fleets that are too small, and finds what trying them all finds."""
    trace, limits = load_trace("poisson:rate=60,prompt=12,output=12,requests=60"), parse_slo(f"p95_ttft={limit}ms,mean_itl=30ms")
    found = replicas_needed(trace, engine(), limits, on_try=no_progress)
    kept = [count for count in range(1, 10) if keeps_slo(replay(trace, engine(), count, limits=limits))]
    assert (None if found is None else found.replicas) == (kept[0] if kept else None)


def test_no_fleet_keeps_what_one_request_alone_misses() -> None:
    trace = load_trace("burst:prompt=10,output=4,requests=6")
    tried: list[int] = []

    def on_try(replicas: int) -> Callable[[], None]:
        tried.append(replicas)
        return lambda: None

    assert replicas_needed(trace, engine(), parse_slo("p95_ttft=5ms"), on_try=on_try) is None
    assert tried == [1, 2, 4, 6]


def test_a_fleet_with_refused_requests_does_not_keep_its_limits() -> None:
    trace = Trace(name="t", requests=(TracedRequest(arrival=0.0, num_prompt_tokens=1000, num_output_tokens=2),) * 2)
    fleet = replay(trace, engine(), 1, limits=parse_slo("p95_ttft=60s"))
    assert fleet is not None
    assert fleet.errors == {"context_length_exceeded": 2}
    assert not keeps_slo(fleet)
    assert replay(trace, engine(), 1, limits=parse_slo("p95_ttft=60s"), give_up=True) is None


def test_the_answer_in_words() -> None:
    trace, limits = load_trace("burst:prompt=10,output=4,requests=8"), parse_slo("p95_ttft=60ms")
    fleet = replay(trace, engine(), 2, limits=limits)
    assert fleet is not None
    words = text(answer(trace, fleet, limits, assumptions=["a thing"], price=1.5, tried=[1, 2]))
    for part in ("8 requests in 0.0 s", "a thing", "2 engines: keep p95_ttft=60ms", "ms: mean 50.0, p50 50.0", "Cost: 3.00 an hour"):
        assert part in words, words
    missed = replay(trace, engine(), 1, limits=limits)
    assert missed is not None
    assert "1 engine: MISSED p95_ttft=60ms" in text(answer(trace, missed, limits, assumptions=[], price=None, tried=[1]))
    assert "up to 8 keeps" in text(answer(trace, None, limits, assumptions=[], price=None, tried=[1, 8]))


def test_cost() -> None:
    fleet = replay(load_trace("burst:prompt=10,output=4,requests=8"), engine(), 2)
    assert fleet is not None
    cost = cost_of(fleet, 1.5)
    assert cost["per_hour"] == 3.0
    assert cost["per_million_output_tokens"] == pytest.approx(3.0 / 3600 * fleet.seconds / 32 * 1e6)
