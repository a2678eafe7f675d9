"""Service level objectives: `p95_ttft=300ms,p95_itl=50ms`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.bench.figures import METRICS, percentile

ALIASES = {"e2e": "e2el", "latency": "e2el"}
UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a metric of the whole run may be at most, in seconds. `share`: the percentile, in percent; None: the mean."""

    metric: str  # one of bench.figures.METRICS
    share: float | None
    seconds: float

    @property
    def name(self) -> str:
        return f"{'mean' if self.share is None else f'p{self.share:g}'}_{self.metric}"

    def __str__(self) -> str:
        return f"{self.name}={self.seconds * 1e3:g}ms"

    def allowed(self, count: int) -> int:
        """How many of so many values may be above the limit before the percentile surely is."""
        return count if self.share is None else max(0, count - 1 - int((count - 1) * self.share / 100.0))

    def value(self, ordered: Sequence[float]) -> float:
        """Of values in ascending order; 0 of none."""
        if not len(ordered):
            return 0.0
        return statistics.fmean(ordered) if self.share is None else percentile(ordered, self.share)


def parse_slo(text: str) -> tuple[Limit, ...]:
    """Raises `ValueError`, which says what would be right."""
    limits = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"(?:p(\d+(?:\.\d+)?)|(mean|median))_(\w+)=(\d+(?:\.\d+)?)(ms|s)", part)
        metric = "" if match is None else ALIASES.get(match[3], match[3])
        if match is None or metric not in METRICS or (match[1] and not 0 < float(match[1]) < 100) or not float(match[4]):
            raise ValueError(f"use p95_ttft=300ms, mean_itl=50ms or the like, with {', '.join(METRICS)} in ms or s, not {part!r}")
        share = None if match[2] == "mean" else 50.0 if match[2] else float(match[1])
        limits.append(Limit(metric=metric, share=share, seconds=float(match[4]) * UNITS[match[5]]))
    if not limits:
        raise ValueError("use p95_ttft=300ms, mean_itl=50ms or the like")
    return tuple(limits)


def misses(limits: Sequence[Limit], values: Mapping[str, float]) -> list[Limit]:
    """Those that are not kept. `values`: seconds by the limits' names."""
    return [limit for limit in limits if values[limit.name] > limit.seconds]


def kept_share(limits: Sequence[Limit], values: Mapping[str, float]) -> float:
    """1 where all limits are kept, else how much of the time that was taken the worst one allows: 0.5 of twice its limit."""
    return min((min(1.0, limit.seconds / values[limit.name]) for limit in limits if values[limit.name] > 0.0), default=1.0)
