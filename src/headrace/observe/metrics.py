"""Prometheus metrics of one process, under `headrace_*` and the names that vLLM's dashboards and scalers know.

Labels come from closed sets, so that no client can make new series. A fault in here never reaches a request: it is logged once and counted.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Concatenate, ParamSpec, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headrace.observe.compile_metrics import CompileMetrics, Status
from headrace.observe.drift import DriftWatch
from headrace.observe.token_metrics import TokenMetrics
from headrace.observe.work import Work
from headrace.observe.work_metrics import WorkMetrics

FINISH_REASONS = ("stop", "length", "abort", "error")
OUTCOMES = ("2xx", "3xx", "4xx", "5xx", "client_gone")
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
LONG_SECONDS = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

logger = logging.getLogger("headrace.metrics")
Parameters = ParamSpec("Parameters")


class RequestMetrics(Protocol):
    """What is recorded of one request: see `Metrics`."""

    def prompt(self, tokens: int) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def more_tokens(self, seconds: float, count: int) -> None: ...

    def finished(self, reason: str, seconds: float, tokens: int) -> None: ...


class Stats(Protocol):
    """A snapshot of the scheduler: see `core.messages.SchedulerStats`."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    prefix_miss_new_tokens_total: int
    prefix_miss_evicted_tokens_total: int
    prefix_miss_other_salt_tokens_total: int
    prefix_miss_partial_tokens_total: int
    kv_sampled_positions_total: int
    kv_unused_positions_total: int
    preemptions_recompute_total: int
    preemptions_swap_total: int
    recomputed_tokens_total: int
    spec_drafts_total: int
    spec_draft_tokens_total: int
    spec_accepted_tokens_total: int
    spec_rejected_tokens_total: int


def harmless(record: Callable[Concatenate[Metrics, Parameters], None]) -> Callable[Concatenate[Metrics, Parameters], None]:
    """A recorder that logs its first fault, counts all of them, and raises none."""

    @functools.wraps(record)
    def guarded(self: Metrics, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            record(self, *args, **kwargs)
        except Exception:
            if self.faults == 0:
                logger.exception("a metric could not be recorded; further faults are only counted")
            self.faults += 1

    return guarded


class Metrics:
    """All metrics of a serving process."""

    def __init__(self, *, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.drift = DriftWatch()
        self._answering: frozenset[str] = frozenset()  # paths of routes that generate or embed
        self.faults = 0  # recorders that failed
        self.first_tokens_total = 0
        self.first_token_seconds_total = 0.0  # from arrival, over all of them
        self.registry = CollectorRegistry()
        self._model = model_name
        self._totals = EngineTotals(model_name)
        both, ours = _Prefixed("headrace_", "vllm:"), _Prefixed("headrace_")
        self._running = self._gauge(both, "num_requests_running", "Requests that the engine computes.")
        self._waiting = self._gauge(both, "num_requests_waiting", "Requests that wait in the engine's queue.")
        self._swapped = self._gauge(both, "num_requests_swapped", "Requests that were moved to host memory.")
        self._kv_usage = self._gauge(both, "kv_cache_usage_perc", "Share of the KV blocks that requests hold, from 0 to 1.")
        self._cached_blocks = self._gauge(both, "kv_cache_cached_blocks", "KV blocks that the prefix cache can find.")
        self._prompt_tokens = self._counter(both, "prompt_tokens", "Tokens of accepted prompts.")
        self._tokens = TokenMetrics(model_name, SHORT_SECONDS)
        both.register(self._tokens)
        self._success = Counter("request_success", "Choices that ended, by reason.", ("model_name", "finished_reason"), registry=both)
        for reason in FINISH_REASONS:
            self._success.labels(model_name, reason)
        self._first = self._histogram(both, "time_to_first_token_seconds", "From arrival to the first token.", SHORT_SECONDS)
        self._end_to_end = self._histogram(both, "e2e_request_latency_seconds", "From arrival to the end of a choice.", LONG_SECONDS)
        self._prompt_sizes = self._histogram(both, "request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._answer_sizes = self._histogram(both, "request_generation_tokens", "Tokens of a choice.", TOKENS)
        self._ready = Gauge("ready", "1 while /ready says so.", registry=ours)
        self._http = Counter("http_requests", "HTTP requests by path and outcome.", ("path", "outcome"), registry=ours)
        self._batch_lines = Counter("batch_lines", "Lines of batches that have their result, by outcome.", ("outcome",), registry=ours)
        for outcome in ("completed", "failed"):
            self._batch_lines.labels(outcome)
        self._faults = Gauge("metrics_faults", "Metrics that could not be recorded.", registry=ours)
        self._compile, self._work = CompileMetrics(), WorkMetrics()
        for collector in (both, ours, self._totals, self._compile, self._work, self.drift):
            self.registry.register(collector)

    def _gauge(self, registry: _Prefixed, name: str, text: str) -> Gauge:
        return Gauge(name, text, ("model_name",), registry=registry).labels(self._model)

    def _counter(self, registry: _Prefixed, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=registry).labels(self._model)

    def _histogram(self, registry: _Prefixed, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, text, ("model_name",), registry=registry, buckets=tuple(buckets)).labels(self._model)

    def expect_paths(self, paths: Iterable[str], *, answering: Iterable[str] = ()) -> None:
        """The closed set of path labels; every series is there from the start. `answering`: those of them that generate or embed."""
        self._answering = frozenset(answering)
        for path in (*paths, "other"):
            for outcome in OUTCOMES:
                self._http.labels(path, outcome)

    @harmless
    def prompt(self, tokens: int) -> None:
        """A prompt was accepted by the engine."""
        self._count_prompt(tokens)
        self.drift.see("prompt_tokens", tokens, self._clock())

    @harmless
    def prompt_in_background(self, tokens: int) -> None:
        """One that nobody waits for: no part of what clients usually bring."""
        self._count_prompt(tokens)

    def _count_prompt(self, tokens: int) -> None:
        self._prompt_tokens.inc(tokens)
        self._prompt_sizes.observe(tokens)

    @harmless
    def generated(self, tokens: int) -> None:
        """Tokens of which only the number is told."""
        self._tokens.generated(tokens)

    @harmless
    def first_token(self, seconds: float) -> None:
        """The first token of a choice."""
        self._first.observe(max(0.0, seconds))
        self._tokens.generated(1)
        self.first_tokens_total += 1
        self.first_token_seconds_total += max(0.0, seconds)
        self.drift.see("time_to_first_token", seconds, self._clock())

    @harmless
    def more_tokens(self, seconds: float, count: int) -> None:
        """`count` tokens came together, so long after the one before them."""
        self._tokens.more(max(0.0, seconds), count)

    @harmless
    def finished(self, reason: str, seconds: float, tokens: int) -> None:
        """A choice ended after `seconds`, with so many tokens."""
        self.ended(reason)
        self._end_to_end.observe(max(0.0, seconds))
        self._answer_sizes.observe(tokens)
        if reason in ("stop", "length"):
            self.drift.see("generation_tokens", tokens, self._clock())

    @harmless
    def ended(self, reason: str) -> None:
        """A choice ended."""
        self._success.labels(self._model, reason if reason in FINISH_REASONS else "error").inc()

    @harmless
    def batch_line(self, *, ok: bool) -> None:
        """A line of a batch has its result."""
        self._batch_lines.labels("completed" if ok else "failed").inc()

    @harmless
    def http_request(self, path: str, status: int) -> None:
        """`path` is one of `expect_paths`; status 0: the client hung up before there was one."""
        self._http.labels(path, f"{status // 100}xx" if 200 <= status < 600 else "client_gone").inc()
        if path in self._answering and status:
            self.drift.see("refused", float(status >= 400), self._clock())

    @harmless
    def _snapshot(self, stats: Stats | None, state: str, restarts: int) -> None:
        self._ready.set(state == "ready")
        self._faults.set(self.faults)
        self._totals.set("restarts", restarts)
        if stats is None:
            return
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._swapped.set(stats.num_swapped)
        self._kv_usage.set(1 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0)
        self._cached_blocks.set(stats.num_cached_blocks)
        self._totals.update(stats)
        self.drift.speculated(stats.spec_draft_tokens_total, stats.spec_accepted_tokens_total, self._clock())

    def render(
        self, stats: Stats | None, *, state: str, restarts: int = 0, compile: Status | None = None, work: Work | None = None
    ) -> tuple[bytes, str]:
        """The text for /metrics and its content type."""
        self._compile.status = compile
        if work is not None:
            self._work.update(work, restarts=restarts)
        self._snapshot(stats, state, restarts)
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


class BackgroundMetrics:
    """`RequestMetrics` of work that nobody waits for: its tokens count, how long it took does not."""

    def __init__(self, metrics: Metrics) -> None:
        self.prompt = metrics.prompt_in_background
        self._metrics = metrics

    def first_token(self, seconds: float) -> None:
        self._metrics.generated(1)

    def more_tokens(self, seconds: float, count: int) -> None:
        self._metrics.generated(count)

    def finished(self, reason: str, seconds: float, tokens: int) -> None:
        self._metrics.ended(reason)


class _Prefixed(CollectorRegistry, Collector):
    """A registry whose metrics are given out once under each prefix, without the times of their making."""

    def __init__(self, *prefixes: str) -> None:
        super().__init__()
        self._prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            yield from with_prefixes(metric, self._prefixes)

    def describe(self) -> Iterator[Metric]:
        return iter(())


def with_prefixes(metric: Metric, prefixes: Iterable[str]) -> Iterator[Metric]:
    for prefix in prefixes:
        copy = Metric(prefix + metric.name, metric.documentation, metric.type)
        copy.samples = [Sample(prefix + sample.name, *sample[1:]) for sample in metric.samples if not sample.name.endswith("_created")]
        yield copy


class EngineTotals(Collector):
    """Counters of the engine process, from its snapshots. What is given out never falls, whatever a snapshot says."""

    NAMES: tuple[tuple[str, str, str], ...] = (
        ("prefix_cache_queries", "prefix_query_tokens_total", "Prompt tokens looked up in the prefix cache."),
        ("prefix_cache_hits", "prefix_hit_tokens_total", "Prompt tokens found in the prefix cache."),
        ("recomputed_tokens", "recomputed_tokens_total", "Tokens computed again after a preemption."),
        ("spec_decode_num_drafts", "spec_drafts_total", "Times that tokens of a request were guessed."),
        ("spec_decode_num_draft_tokens", "spec_draft_tokens_total", "Tokens guessed."),
        ("spec_decode_num_accepted_tokens", "spec_accepted_tokens_total", "Tokens guessed rightly."),
        ("spec_decode_num_rejected_tokens", "spec_rejected_tokens_total", "Tokens guessed wrongly."),
    )

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self._totals: dict[str, int] = {}

    MISSES = ("new", "evicted", "other_salt", "partial")
    OTHERS = (
        *("preemptions_recompute_total", "preemptions_swap_total", "kv_sampled_positions_total", "kv_unused_positions_total"),
        *(f"prefix_miss_{cause}_tokens_total" for cause in MISSES),
    )

    def update(self, stats: Stats) -> None:
        for name in [*(field for _, field, _ in self.NAMES), *self.OTHERS]:
            self.set(name, getattr(stats, name))

    def set(self, name: str, value: int) -> None:
        self._totals[name] = max(self.total(name), value)

    def total(self, name: str) -> int:
        return self._totals.get(name, 0)

    def collect(self) -> Iterator[Metric]:
        families = [self._family(name, text, self.total(field)) for name, field, text in self.NAMES]
        kinds = {kind: self.total(f"preemptions_{kind}_total") for kind in ("recompute", "swap")}
        families.append(self._family("num_preemptions", "Times a request was interrupted for want of KV blocks.", sum(kinds.values())))
        for family in families:
            yield from with_prefixes(family, ("headrace_", "vllm:"))
        by_kind = CounterMetricFamily("headrace_preemptions_by_kind", "The same, by what became of its blocks.", labels=("kind",))
        for kind, value in kinds.items():
            by_kind.add_metric((kind,), value)
        misses = CounterMetricFamily("headrace_prefix_cache_miss_tokens", "Prompt tokens not found in the prefix cache, by why.", labels=("cause",))
        for cause in self.MISSES:
            misses.add_metric((cause,), self.total(f"prefix_miss_{cause}_tokens_total"))
        sampled, unused = self.total("kv_sampled_positions_total"), self.total("kv_unused_positions_total")
        positions = CounterMetricFamily("headrace_kv_cache_positions", "Positions of held KV blocks, sampled, by what is there.", labels=("content",))
        positions.add_metric(("token",), max(0, sampled - unused))
        positions.add_metric(("nothing",), unused)
        yield from (by_kind, misses, positions)
        yield CounterMetricFamily("headrace_engine_restarts", "Times the engine was started again.", value=self.total("restarts"))

    def _family(self, name: str, text: str, value: int) -> Metric:
        family = CounterMetricFamily(name, text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def describe(self) -> Iterator[Metric]:
        return iter(())
