"""Whether what comes in, or how it is answered, has changed: the latest values of a stream against those before them.

Two windows slide over each stream, as in KSWIN (Raab, Heusinger and Schleif, "Reactive Soft Prototype Computing for Concept Drift Streams",
Neurocomputing 2020), and the two-sample test of Kolmogorov and Smirnov compares them. Its limiting distribution gives the critical distance
(Smirnov 1948; Knuth, The Art of Computer Programming 2, 3.3.1). Requests of one moment resemble each other, so a stream takes one value in a
second at most; and since a test is made again and again, a drift must be seen in tests that share none of the latest values.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

REQUEST_STREAMS = ("prompt_tokens", "generation_tokens", "time_to_first_token", "refused")
STREAMS = (*REQUEST_STREAMS, "spec_acceptance")
INTERVAL_S = 1.0  # between two values that are taken
SIGNIFICANCE = 1e-4  # of one test
MAX_PENDING = 4096  # values that are kept between two collections
MIN_DRAFT_TOKENS = 50  # between two collections, of fewer nothing is said


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of the two empirical distribution functions, 0 to 1. Neither sample is empty."""
    first, second = sorted(one), sorted(other)
    points = {*first, *second}
    return max(abs(bisect_right(first, point) / len(first) - bisect_right(second, point) / len(second)) for point in points)


def critical_distance(one: float, other: float, significance: float = SIGNIFICANCE) -> float:
    """A larger distance of samples of these sizes comes from one distribution with at most this probability."""
    return math.sqrt(-math.log(significance / 2) / 2 * (one + other) / (one * other))


def persistence(values: Sequence[float]) -> float:
    """How many values in a row say as much as one that stands alone, 1 or more.

    From the autocorrelation r of neighbours' ranks: (1 + r) / (1 - r), as for the variance of a mean (Bayley and Hammersley 1946).
    """
    ordered = sorted(values)
    ranks = [bisect_left(ordered, value) + bisect_right(ordered, value) for value in values]
    mean = sum(ranks) / len(ranks)
    variance = sum((rank - mean) ** 2 for rank in ranks)
    if not variance:
        return 1.0
    neighbours = sum((one - mean) * (other - mean) for one, other in pairwise(ranks)) / variance
    r = min(max(neighbours, 0.0), 0.95)
    return (1 + r) / (1 - r)


class DriftDetector:
    """Of one stream: the latest `size` values against up to `reference` before them. Bounded; `add` computes once in `size` values."""

    def __init__(self, *, size: int = 200, reference: int = 1000) -> None:
        self.drifts_total = 0
        self.distance = 0.0  # of the latest test; 0 before there is one
        self._size = size
        self._latest: deque[float] = deque()
        self._reference: deque[float] = deque(maxlen=reference)
        self._suspected = False  # by the test before

    def add(self, value: float) -> None:
        self._latest.append(value)
        if len(self._latest) < self._size:
            return
        if len(self._reference) >= 2 * self._size and self._differs():
            if self._suspected:
                self.drifts_total += 1
                self._reference.clear()  # from now on this is usual
                self._suspected = False
            else:
                self._suspected = True
                self._latest.clear()  # they may be an episode; the reference stays as it is
                return
        else:
            self._suspected = False
        self._reference.extend(self._latest)
        self._latest.clear()

    def _differs(self) -> bool:
        self.distance = distance(self._latest, self._reference)
        lasting = persistence(self._reference)
        return self.distance > critical_distance(len(self._latest) / lasting, len(self._reference) / lasting)


class DriftWatch(Collector):
    """The streams of a server. Values are only kept when they come (`see`), and worked through when metrics are collected."""

    def __init__(self) -> None:
        self._detectors = {name: DriftDetector() for name in REQUEST_STREAMS}
        self._detectors["spec_acceptance"] = DriftDetector(size=40, reference=240)  # one value a collection
        self._pending: deque[tuple[str, float]] = deque(maxlen=MAX_PENDING)
        self._last_seen = dict.fromkeys(STREAMS, -math.inf)
        self._draft_tokens = self._accepted_tokens = 0

    def see(self, stream: str, value: float, now: float) -> None:
        """One value at `now` (seconds)."""
        if now >= self._last_seen[stream] + INTERVAL_S:
            self._last_seen[stream] = now
            self._pending.append((stream, value))

    def speculated(self, draft_tokens: int, accepted_tokens: int, now: float) -> None:
        """Totals since the start."""
        drafted, accepted = draft_tokens - self._draft_tokens, accepted_tokens - self._accepted_tokens
        if drafted >= MIN_DRAFT_TOKENS or drafted < 0:
            self._draft_tokens, self._accepted_tokens = draft_tokens, accepted_tokens
            if drafted > 0:
                self.see("spec_acceptance", accepted / drafted, now)

    def collect(self) -> Iterator[Metric]:
        while self._pending:
            stream, value = self._pending.popleft()
            self._detectors[stream].add(value)
        drifts = CounterMetricFamily("headrace_drifts", "Times that a stream of values has changed.", labels=("stream",))
        distances = GaugeMetricFamily("headrace_drift_distance", "Of the latest values from those before, 0 to 1.", labels=("stream",))
        for name, detector in self._detectors.items():
            drifts.add_metric((name,), detector.drifts_total)
            distances.add_metric((name,), detector.distance)
        yield from (drifts, distances)

    def describe(self) -> Iterator[Metric]:
        return iter(())
