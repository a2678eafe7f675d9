"""What compiled paths do, as metrics: how far they are, what they serve, and that nothing is compiled again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

STATES = ("ready", "compiling", "compiled", "failed", "retired")


class Status(Protocol):
    """See `config.CompileStatus`."""

    @property
    def state(self) -> str: ...

    @property
    def compiled_steps_total(self) -> int: ...

    @property
    def general_steps_total(self) -> int: ...

    @property
    def compiled_tokens_total(self) -> int: ...

    @property
    def padded_tokens_total(self) -> int: ...

    @property
    def compilations_total(self) -> int: ...

    @property
    def recompiles_total(self) -> int: ...


class CompileMetrics(Collector):
    """Gives out the latest status; every series is there from the start."""

    def __init__(self) -> None:
        self.status: Status | None = None

    def collect(self) -> Iterator[Metric]:
        status = self.status

        def total(name: str) -> int:
            return 0 if status is None else int(getattr(status, name))

        state = GaugeMetricFamily("headrace_compile_state", "1 for the state that compiled paths are in together.", labels=("state",))
        for name in STATES:
            state.add_metric((name,), float(name == ("ready" if status is None else status.state)))
        steps = CounterMetricFamily("headrace_steps", "Steps computed, by the path that computed them.", labels=("path",))
        steps.add_metric(("compiled",), total("compiled_steps_total"))
        steps.add_metric(("ready",), total("general_steps_total"))
        tokens = CounterMetricFamily("headrace_compiled_step_tokens", "Tokens computed in compiled steps, by what they are for.", labels=("kind",))
        tokens.add_metric(("useful",), total("compiled_tokens_total"))
        tokens.add_metric(("padding",), total("padded_tokens_total"))
        yield from (state, steps, tokens)
        yield CounterMetricFamily("headrace_compilations", "Packages compiled for this service.", value=total("compilations_total"))
        yield CounterMetricFamily("headrace_recompiles", "Compilations beyond the first of a path: stays at 0.", value=total("recompiles_total"))

    def describe(self) -> Iterator[Metric]:
        return iter(())
