"""The search of `headrace tune`: one axis after the other, up the hill from where the simulation says the top is.

Settings act nearly independently of each other, and a trial costs a server's start and a load of many seconds; so the sum of the axes is tried
and not their product. On an axis whose values have an order the search walks from where it stands to both sides and stops where it gets worse,
so the report can show that more was worse; on others it tries every value. It goes over the axes until nothing is better. A trial that can no
longer win is ended early by whoever runs it: it is told the score to beat.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEAST_GAIN = 1.02  # times the best score that something else must reach: less is within what a machine varies
PASSES = 3  # over all axes

Settings = Mapping[str, Any]  # flag -> value; None: not given


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    name: str  # a flag
    values: tuple[Any, ...]
    ordered: bool  # whether between two values that get worse none is better


class OutOfTime(Exception):
    """No trial may be begun any more."""


Score = Callable[[Settings, float], float]
"""Of settings, in whatever is better when it is more; beside it what must be beaten, below which a trial may be cut short. Raises `OutOfTime`."""


def key_of(settings: Settings) -> tuple[tuple[str, str], ...]:
    """What makes settings the same, whatever their order."""
    return tuple(sorted((name, repr(value)) for name, value in settings.items()))


def search(
    axes: Sequence[Axis], starts: Sequence[Settings], score: Score, *, is_valid: Callable[[Settings], bool] = lambda settings: True
) -> Settings:
    """The best settings that were found before `OutOfTime`. It sets out from the best of `starts`, which are valid, and keeps the order of `axes`."""
    found = _Search(score, is_valid)
    try:
        for start in starts:
            worth = found.score_of(dict(start))
            if not found.best or worth > found.best_score:
                found.best, found.best_score = dict(start), worth
        for _ in range(PASSES):
            before = found.best
            for axis in axes:
                found.improve(axis)
            if found.best == before:
                break
    except OutOfTime:
        pass
    return found.best or starts[0]


class _Search:
    def __init__(self, score: Score, is_valid: Callable[[Settings], bool]) -> None:
        self._score = score
        self._is_valid = is_valid
        self._scores: dict[tuple[tuple[str, str], ...], float] = {}
        self.best: dict[str, Any] = {}
        self.best_score = 0.0

    def score_of(self, settings: dict[str, Any]) -> float:
        key = key_of(settings)
        if key not in self._scores:
            self._scores[key] = self._score(settings, self.best_score)
        return self._scores[key]

    def improve(self, axis: Axis) -> None:
        values = axis.values
        place = values.index(self.best[axis.name])
        if not axis.ordered:
            for value in values:
                self._try(axis, value)
            return
        for side in (values[place + 1 :], values[:place][::-1]):
            moved = False
            for value in side:
                better = self._try(axis, value)
                if better is False:
                    break
                moved = moved or bool(better)
            if moved:
                return  # the other side was worse than where the walk began

    def _try(self, axis: Axis, value: Any) -> bool | None:
        """Whether it is the best now; None where the value does not go with the others."""
        settings = self.best | {axis.name: value}
        if value == self.best[axis.name] or not self._is_valid(settings):
            return None
        found = self.score_of(settings)
        if found < self.best_score * LEAST_GAIN:
            return False
        self.best, self.best_score = settings, found
        return True
