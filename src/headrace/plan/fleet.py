"""A trace on so many engines alike, and how many are needed.

A balancer deals requests out in turn, so each engine can be simulated for itself. A fleet is judged by all its requests together.
"""

from __future__ import annotations

import contextlib
import gc
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.bench.figures import percentile
from headrace.bench.traces import Trace
from headrace.config import SchedulerConfig
from headrace.plan.costs import Costs, Sample
from headrace.plan.simulator import Delays, Outcome, Overrun, Replay, SimulatedEngine, Watch
from headrace.plan.slo import Limit, misses

MOST_REPLICAS = 4096
PERCENTILES = (50.0, 90.0, 95.0, 99.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What is simulated. `costs(seed)`: of a step, on the engine of that number. `known`: see `SimulatedEngine`."""

    config: SchedulerConfig
    costs: Callable[[int], Costs]
    delays: Delays
    async_scheduling: bool = True
    known: Sequence[Sample] = ()


@dataclass(slots=True, kw_only=True)
class Fleet:
    """A trace's whole replay on `replicas` engines. Latencies are ascending, in seconds, of requests that were answered."""

    replicas: int
    num_requests: int
    errors: dict[str, int] = field(default_factory=dict)  # failed requests by why
    good: int = 0  # kept every limit, each request by itself
    latencies: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0  # from the first request to the last token
    busy_share: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    peak_kv: float = 0.0  # share of an engine's blocks
    mean_kv: float = 0.0  # while steps ran
    tokens_per_step: float = 0.0
    steps: int = 0
    missed: list[Limit] = field(default_factory=list)

    @property
    def failed(self) -> int:
        return sum(self.errors.values())

    def figures(self) -> dict[str, Any]:
        """By the names of `headrace bench serve`, latencies in milliseconds."""
        seconds = max(self.seconds, 1e-9)
        completed = self.num_requests - self.failed
        found: dict[str, Any] = {
            "replicas": self.replicas,
            "duration": self.seconds,
            "completed": completed,
            "failed": self.failed,
            "errors": self.errors,
            "total_input_tokens": self.num_prompt_tokens,
            "total_output_tokens": self.num_output_tokens,
            "cached_tokens": self.num_cached_tokens,
            "request_throughput": completed / seconds,
            "request_goodput": self.good / seconds,
            "output_throughput": self.num_output_tokens / seconds,
            "busy_share": self.busy_share,
            "tokens_per_step": self.tokens_per_step,
            "steps": self.steps,
            "kv_peak_share": self.peak_kv,
            "kv_mean_share": self.mean_kv,
            "preemptions": self.preemptions,
            "recomputed_tokens": self.recomputed_tokens,
            "missed": [str(limit) for limit in self.missed],
        }
        for name, ordered in self.latencies.items():
            if ordered:
                found[f"mean_{name}_ms"] = 1e3 * math.fsum(ordered) / len(ordered)
                found[f"median_{name}_ms"] = 1e3 * percentile(ordered, 50.0)
                found |= {f"p{share:g}_{name}_ms": 1e3 * percentile(ordered, share) for share in PERCENTILES}
        return found


class _Progress(Watch):
    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end

    def end(self, outcome: Outcome) -> None:
        self._on_end()


class _Impatient(_Progress):
    """Ends a replay as soon as a limit is surely missed or a request has failed."""

    def __init__(self, on_end: Callable[[], None], limits: Sequence[Limit], count: int) -> None:
        super().__init__(on_end)
        self._limits = [limit for limit in limits if limit.share is not None and limit.metric in ("ttft", "e2el")]
        self._left = {limit: limit.allowed(count) for limit in self._limits}

    def first_token(self, outcome: Outcome) -> None:
        self._look("ttft", outcome.first, outcome)

    def end(self, outcome: Outcome) -> None:
        super().end(outcome)
        if outcome.error is not None:
            raise Overrun
        self._look("e2el", outcome.last, outcome)

    def _look(self, metric: str, at: float | None, outcome: Outcome) -> None:
        assert at is not None
        for limit in self._limits:
            if limit.metric == metric and at - outcome.sent > limit.seconds:
                self._left[limit] -= 1
                if self._left[limit] < 0:
                    raise Overrun


def replay(
    trace: Trace, engine: Engine, replicas: int, *, limits: Sequence[Limit] = (), give_up: bool = False, on_end: Callable[[], None] = lambda: None
) -> Fleet | None:
    """`give_up`: None as soon as a limit is surely missed, instead of all that becomes of the requests."""
    watch = _Impatient(on_end, limits, len(trace.requests)) if give_up else _Progress(on_end)
    replays = []
    with _without_collector():
        for number in range(min(replicas, len(trace.requests))):
            simulated = SimulatedEngine(
                engine.config, engine.costs(number), engine.delays, async_scheduling=engine.async_scheduling, watch=watch, known=engine.known
            )
            try:
                replays.append(simulated.run(trace.requests[number::replicas]))
            except Overrun:
                return None
    return _joined(replays, replicas, limits)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """A replay makes millions of small objects and no cycles of them: looking for some takes a tenth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _joined(replays: Sequence[Replay], replicas: int, limits: Sequence[Limit]) -> Fleet:
    outcomes = [outcome for replay in replays for outcome in replay.outcomes]
    good = [outcome for outcome in outcomes if outcome.ok]
    latencies: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2el": []}
    for outcome in good:
        assert outcome.first is not None
        assert outcome.last is not None
        latencies["ttft"].append(outcome.first - outcome.sent)
        latencies["e2el"].append(outcome.last - outcome.sent)
        if outcome.num_output_tokens > 1:
            latencies["tpot"].append((outcome.last - outcome.first) / (outcome.num_output_tokens - 1))
    gaps = array("d")
    for replay in replays:
        gaps.extend(replay.gaps)
    latencies["itl"] = gaps  # type: ignore[assignment]
    latencies = {name: sorted(found) for name, found in latencies.items()}
    busy, steps = sum(replay.busy for replay in replays), sum(replay.steps for replay in replays)
    seconds = max((outcome.last for outcome in good if outcome.last is not None), default=0.0)
    held = sum(replay.block_seconds / replay.num_blocks for replay in replays)
    fleet = Fleet(
        replicas=replicas,
        num_requests=len(outcomes),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
        good=sum(_keeps(outcome, limits) for outcome in good),
        latencies=latencies,
        seconds=seconds,
        busy_share=busy / (seconds * replicas) if seconds else 0.0,
        num_prompt_tokens=sum(outcome.num_prompt_tokens for outcome in good),
        num_output_tokens=sum(outcome.num_output_tokens for outcome in good),
        num_cached_tokens=sum(outcome.num_cached_tokens for outcome in good),
        recomputed_tokens=sum(replay.recomputed_tokens for replay in replays),
        preemptions=sum(replay.preemptions for replay in replays),
        peak_kv=max(replay.peak_blocks / replay.num_blocks for replay in replays),
        mean_kv=held / busy if busy else 0.0,
        tokens_per_step=sum(replay.step_tokens for replay in replays) / max(steps, 1),
        steps=steps,
    )
    fleet.missed = misses(limits, {limit.name: limit.value(latencies[limit.metric]) for limit in limits})
    return fleet


def _keeps(outcome: Outcome, limits: Sequence[Limit]) -> bool:
    """Whether a request kept every limit by itself, whatever percentile is asked for; of its gaps the longest counts, as in `bench serve`."""
    assert outcome.first is not None
    assert outcome.last is not None
    values = {
        "ttft": outcome.first - outcome.sent,
        "e2el": outcome.last - outcome.sent,
        "itl": outcome.longest_gap,
        "tpot": (outcome.last - outcome.first) / max(outcome.num_output_tokens - 1, 1),
    }
    return all(values[limit.metric] <= limit.seconds for limit in limits)


def keeps_slo(fleet: Fleet | None) -> bool:
    return fleet is not None and not fleet.missed and not fleet.failed


def replicas_needed(
    trace: Trace, engine: Engine, limits: Sequence[Limit], *, most: int = MOST_REPLICAS, on_try: Callable[[int], Callable[[], None]]
) -> Fleet | None:
    """The smallest fleet that keeps all limits without a failed request; None where even `most` engines do not.

    Sizes are doubled, then halved in between: more engines keep a limit that fewer keep. `on_try` is told each size that is tried and gives what is
    called when a request ends.
    """
    low, high = 0, 1  # low does not keep it
    best = replay(trace, engine, high, limits=limits, give_up=True, on_end=on_try(high))
    while not keeps_slo(best):
        if high >= min(most, len(trace.requests)):
            return None
        low, high = high, min(2 * high, most, len(trace.requests))
        best = replay(trace, engine, high, limits=limits, give_up=True, on_end=on_try(high))
    while high - low > 1:
        middle = (low + high) // 2
        tried = replay(trace, engine, middle, limits=limits, give_up=True, on_end=on_try(middle))
        if keeps_slo(tried):
            best, high = tried, middle
        else:
            low = middle
    return best
