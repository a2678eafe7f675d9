"""What is counted at each token, cheaply: some hundred times a second, in the process whose core the engine's threads want too."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenMetrics(Collector):
    """`generation_tokens` and `inter_token_latency_seconds`. Used from one thread; collecting may happen in another."""

    def __init__(self, model_name: str, bounds: Sequence[float]) -> None:
        """`bounds`: upper bounds of the histogram's buckets, ascending, in seconds; one more without a bound follows them."""
        self._total = 0
        self._model = model_name
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._seconds = 0.0

    def generated(self, tokens: int) -> None:
        """Raises ValueError for a number that would let the counter fall."""
        if tokens < 0:
            raise ValueError(f"{tokens} tokens cannot have been generated")
        self._total += tokens

    def more(self, seconds: float, count: int) -> None:
        """`count` tokens came together, `seconds` after the one before them. They count as generated too."""
        self._total += count
        self._counts[bisect_left(self._bounds, seconds / count)] += count
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily("generation_tokens", "Tokens generated.", labels=("model_name",))
        tokens.add_metric((self._model,), self._total)
        yield tokens
        between = HistogramMetricFamily("inter_token_latency_seconds", "Between successive tokens of a choice.", labels=("model_name",))
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))
        between.add_metric((self._model,), buckets, self._seconds)
        yield between

    def describe(self) -> Iterator[Metric]:
        return iter(())
