from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from headrace.bench.traces import Trace, load_trace
from headrace.core.step_work import StepWork
from headrace.plan.fleet import Engine, replay
from headrace.plan.search import Axis, OutOfTime, search
from headrace.plan.simulator import Delays
from headrace.plan.slo import Limit, parse_slo
from headrace.plan.tuning import best_start, score_of, time_to_lose
from tests.plan.test_simulator import config

SEQS = Axis(name="max-num-seqs", values=(1, 4, 8, 16, 32, 64), ordered=True)
TOKENS = Axis(name="max-num-batched-tokens", values=(64, 128, 256, 512), ordered=True)
THREADS = Axis(name="threads", values=(1, 2, 4), ordered=True)
SPECULATION = Axis(name="speculation", values=(None, "ngram"), ordered=False)
AXES = [SEQS, TOKENS, THREADS, SPECULATION]
START_S = 3.0  # of a server


def bowl(**best: Any) -> Callable[[Mapping[str, Any]], float]:
    """Each step away from the best place on each axis costs a tenth."""

    def score(settings: Mapping[str, Any]) -> float:
        steps = sum(abs(axis.values.index(settings[axis.name]) - axis.values.index(best[axis.name])) for axis in AXES)
        return float(100.0 * 0.9**steps)

    return score


def walked(score: Callable[[Mapping[str, Any]], float], start: Mapping[str, Any], **rest: Any) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    tried: list[dict[str, Any]] = []

    def trial(settings: Mapping[str, Any], best: float) -> float:
        tried.append(dict(settings))
        return score(settings)

    return search(AXES, [start], trial, **rest), tried


START = {"max-num-seqs": 8, "max-num-batched-tokens": 256, "threads": 4, "speculation": None}


@pytest.mark.parametrize("best", [START, {"max-num-seqs": 64, "max-num-batched-tokens": 64, "threads": 1, "speculation": "ngram"}])
def test_the_top_is_found_and_what_lies_beyond_it_was_tried(best: dict[str, Any]) -> None:
    found, tried = walked(bowl(**best), START)
    assert found == best
    assert len(tried) == len({tuple(settings.items()) for settings in tried}), "nothing is tried twice"
    assert len(tried) < 25 < len(list(itertools.product(*(axis.values for axis in AXES))))
    for axis in AXES[:3]:
        place = axis.values.index(best[axis.name])
        beside = [best | {axis.name: axis.values[i]} for i in (place - 1, place + 1) if 0 <= i < len(axis.values)]
        assert any(settings in tried for settings in beside), "that more or less was worse is seen"


def test_settings_that_do_not_go_together_are_passed_over() -> None:
    found, tried = walked(
        bowl(**(START | {"max-num-seqs": 64, "max-num-batched-tokens": 64})),
        START,
        is_valid=lambda settings: settings["max-num-seqs"] * 8 <= settings["max-num-batched-tokens"],
    )
    assert all(settings["max-num-seqs"] * 8 <= settings["max-num-batched-tokens"] for settings in tried)
    assert found["max-num-seqs"] >= 16


def test_what_is_within_the_noise_is_no_gain() -> None:
    found, _ = walked(lambda settings: 100.0 + (settings["threads"] == 2), START)
    assert found == START


def test_out_of_time_the_best_so_far_counts() -> None:
    left = 3

    def trial(settings: Mapping[str, Any], best: float) -> float:
        nonlocal left
        left -= 1
        if left < 0:
            raise OutOfTime
        return bowl(**(START | {"max-num-seqs": 64}))(settings)

    assert search(AXES, [START], trial)["max-num-seqs"] == 32
    assert search(AXES, [START], trial) == START, "no trial at all"


class SimulatedServer:
    """Threads help less and less and speculation costs this workload; a trial takes the server's start and the time that its load takes."""

    def __init__(self, trace: Trace, limits: tuple[Limit, ...]) -> None:
        self.trace, self.limits = trace, limits
        self.seconds = 0.0
        self.known: dict[tuple[Any, ...], tuple[float, float]] = {}

    def __call__(self, settings: Mapping[str, Any], best: float) -> float:
        score, took = self.known.setdefault(tuple(settings.items()), self._run(settings))
        lost = time_to_lose(len(self.trace.requests), best, self.limits)
        self.seconds += START_S + (took if lost is None else min(took, lost))
        return score

    def expected(self, settings: Mapping[str, Any]) -> float:
        """As the simulation knows it: without what threads and speculation do."""
        return self._run(dict(settings) | {"threads": START["threads"], "speculation": None})[0]

    def _run(self, settings: Mapping[str, Any]) -> tuple[float, float]:
        speed = settings["threads"] ** 0.6 * (0.9 if settings["speculation"] else 1.0)

        class Costs:
            def seconds(self, work: StepWork) -> float:
                crowding = 1.0 + max(0.0, work.sampled - 16) ** 1.5 / 40  # beyond 16 rows the cache is too small
                return (0.004 + 0.0003 * work.tokens * crowding + 1e-7 * work.decode_attended) / speed

        engine = Engine(
            config=config(
                max_num_seqs=settings["max-num-seqs"], max_num_batched_tokens=settings["max-num-batched-tokens"], num_blocks=4000, max_model_len=2048
            ),
            costs=lambda number: Costs(),
            delays=Delays(),
        )
        fleet = replay(self.trace, engine, 1)
        assert fleet is not None
        values = {limit.name: limit.value(fleet.latencies[limit.metric]) for limit in self.limits}
        return score_of(fleet.figures()["request_throughput"], self.limits, values), fleet.seconds


@pytest.mark.parametrize(
    ("trace", "limits"),
    [
        ("burst:prompt=60,output=12,requests=24,sigma=0.6", ()),
        ("poisson:rate=14,prompt=60,output=12,requests=24,sigma=0.6", parse_slo("p95_ttft=250ms,p95_itl=25ms")),
    ],
    ids=["all at once", "with limits"],
)
def test_it_comes_near_an_exhaustive_grid_in_a_quarter_of_its_time(trace: str, limits: tuple[Limit, ...]) -> None:
    server = SimulatedServer(load_trace(trace), limits)
    start = best_start(AXES, START, server.expected, simulated=frozenset({"max-num-seqs", "max-num-batched-tokens"}))
    best = search(AXES, [START, start], server, is_valid=lambda settings: settings["max-num-seqs"] <= settings["max-num-batched-tokens"])
    searching = server.seconds
    grid = [dict(zip((axis.name for axis in AXES), place, strict=True)) for place in itertools.product(*(axis.values for axis in AXES))]
    server.seconds = 0.0
    top = max(server(settings, 0.0) for settings in grid)
    assert server(best, 0.0) >= 0.95 * top
    assert searching <= 0.25 * server.seconds
