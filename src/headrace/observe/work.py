"""Where the wall time of an engine goes: every second is put into exactly one kind.

A device that is never idle may still do little that anybody asked for. So the time of a step is divided: what the runner spends around the
model (inputs, sampling, copies, hand-over) is `host`; the model's own time belongs to the tokens it computed, each an equal part, by what
they were for. Time without a step is `host` where the loop itself was at work, `waiting` where requests were there and none could run, and
`idle` without any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TOKEN_KINDS = ("useful", "padding", "recompute", "speculation", "discarded")
KINDS = (*TOKEN_KINDS, "compile", "host", "waiting", "idle")
WORDS: Mapping[str, str] = {
    "useful": "tokens that requests needed",
    "padding": "places of a static shape that no token needed",
    "recompute": "tokens computed again after a preemption",
    "speculation": "guessed tokens that were wrong",
    "discarded": "tokens of requests that had already ended, and steps that failed",
    "compile": "steps in which torch compiled",
    "host": "planning, inputs, sampling, messages",
    "waiting": "requests were there, but none could run",
    "idle": "no request was there",
}


@dataclass(slots=True, kw_only=True)
class PathWork:
    """What one path has computed: the ready path, or a compiled one by its name."""

    steps: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOKEN_KINDS, 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS[:-2], 0.0))  # of its steps


@dataclass(slots=True, kw_only=True)
class Work:
    """The division of the time from an engine's start to a moment of it. Nothing in it ever falls."""

    paths: dict[str, PathWork] = field(default_factory=dict)
    between: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("host", "waiting", "idle"), 0.0))  # seconds without a step

    @property
    def seconds(self) -> dict[str, float]:
        """By kind, over all paths and the time between steps."""
        total = dict.fromkeys(KINDS, 0.0) | self.between
        for path in self.paths.values():
            for kind, seconds in path.seconds.items():
                total[kind] += seconds
        return total


class WorkLedger:
    """Divides time as it passes: `lap` says how long it is since the last lap, and one of the others what that time was. `now`: seconds."""

    def __init__(self, now: float) -> None:
        self._work = Work()
        self._mark = now

    def snapshot(self) -> Work:
        """A copy, which stays as it is."""
        return plus(Work(), self._work)

    def lap(self, now: float) -> float:
        """Seconds since the last lap, to be given to one of the others."""
        seconds, self._mark = max(0.0, now - self._mark), max(now, self._mark)
        return seconds

    def pass_between(self, kind: str, now: float) -> None:
        """No step ran since the last lap. kind: host, waiting or idle."""
        self._work.between[kind] += self.lap(now)

    def add_step(self, seconds: float, *, path: str, model_seconds: float, tokens: Mapping[str, int], compiled: bool = False) -> None:
        """A step took so many seconds, hand-over included, and the model so many of them. `tokens`: by kind, padding among them."""
        entry = self._work.paths.setdefault(path, PathWork())
        entry.steps += 1
        model = min(model_seconds, seconds)
        entry.seconds["host"] += seconds - model
        num_tokens = sum(tokens.values())
        for kind, count in tokens.items():
            entry.tokens[kind] += count
            if not compiled and num_tokens:
                entry.seconds[kind] += model * count / num_tokens
        if compiled or not num_tokens:
            entry.seconds["compile" if compiled else "host"] += model


def since(before: Work, now: Work) -> Work:
    """What was added between two snapshots of one engine."""
    return _combined(now, before, -1)


def plus(one: Work, other: Work) -> Work:
    """Two divisions of different times, together."""
    return _combined(one, other, 1)


def _combined(one: Work, other: Work, sign: int) -> Work:
    return Work(
        between={kind: seconds + sign * other.between[kind] for kind, seconds in one.between.items()},
        paths={name: _combined_path(one.paths.get(name, PathWork()), other.paths.get(name, PathWork()), sign) for name in one.paths | other.paths},
    )


def _combined_path(one: PathWork, other: PathWork, sign: int) -> PathWork:
    return PathWork(
        steps=one.steps + sign * other.steps,
        tokens={kind: count + sign * other.tokens[kind] for kind, count in one.tokens.items()},
        seconds={kind: seconds + sign * other.seconds[kind] for kind, seconds in one.seconds.items()},
    )
