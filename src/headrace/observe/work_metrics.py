"""Where the time goes, as metrics. Totals go on over a restart of the engine, whose own division begins anew."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from headrace.observe.work import KINDS, TOKEN_KINDS, PathWork, Work, plus


class WorkMetrics(Collector):
    """Gives out the latest division; every kind is there from the start."""

    def __init__(self) -> None:
        self._ended = Work()  # of engines that are gone
        self._latest = Work()
        self._restarts = 0

    def update(self, work: Work, *, restarts: int) -> None:
        """A later snapshot, of the engine that came after so many restarts."""
        if restarts != self._restarts:
            self._ended, self._restarts = plus(self._ended, self._latest), restarts
        self._latest = work

    def collect(self) -> Iterator[Metric]:
        total = plus(self._ended, self._latest)
        kinds = CounterMetricFamily("headrace_work_seconds", "Wall time of the engine, by what it went into.", labels=("kind",))
        seconds = total.seconds
        for kind in KINDS:
            kinds.add_metric((kind,), seconds[kind])
        by_path = CounterMetricFamily("headrace_path_seconds", "Wall time of steps, by the path that computed them.", labels=("path", "kind"))
        tokens = CounterMetricFamily("headrace_path_tokens", "Tokens of steps, by path and what they were for.", labels=("path", "kind"))
        for name, path in ({"ready": PathWork()} | total.paths).items():
            for kind, value in path.seconds.items():
                by_path.add_metric((name, kind), value)
            for kind in TOKEN_KINDS:
                tokens.add_metric((name, kind), path.tokens[kind])
        yield from (kinds, by_path, tokens)

    def describe(self) -> Iterator[Metric]:
        return iter(())
