"""Which of two ways to compute a step is faster, learned from the service's own steps.

Steps of one kind take the two ways in turn until each has been seen often enough; then the one with the lower median stays. Nothing is computed
only to be measured, and what else the machine does falls on both alike.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from statistics import median

SAMPLES = 12  # of each way, before the verdict
SKIPPED = 2  # of each way: the first steps bring memory in


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Median seconds a token."""

    compiled: float
    general: float

    @property
    def pays(self) -> bool:
        return self.compiled < self.general


@dataclass(slots=True)
class _Record:
    compiled: list[float] = field(default_factory=list)
    general: list[float] = field(default_factory=list)
    verdict: Verdict | None = None


class Trials:
    """One trial for each kind of step. `samples`: how many of each way are compared."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._needed = samples + SKIPPED
        self._records: dict[Hashable, _Record] = {}

    def takes_compiled(self, kind: Hashable) -> bool:
        """Whether the next step of this kind goes the compiled way."""
        record = self._records.get(kind)
        if record is None:
            return True
        if record.verdict is not None:
            return record.verdict.pays
        return len(record.compiled) <= len(record.general)

    def record(self, kind: Hashable, *, compiled: bool, seconds: float, num_tokens: int) -> Verdict | None:
        """What a step took; returns the verdict on the step that brings it, and None on all others."""
        record = self._records.setdefault(kind, _Record())
        if record.verdict is not None:
            return None
        (record.compiled if compiled else record.general).append(seconds / num_tokens)
        if min(len(record.compiled), len(record.general)) < self._needed:
            return None
        record.verdict = Verdict(compiled=median(record.compiled[SKIPPED:]), general=median(record.general[SKIPPED:]))
        record.compiled.clear()
        record.general.clear()
        return record.verdict
