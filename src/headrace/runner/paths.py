"""The ways a step can be computed, and what may become of each: one table of states.

Every service has the ready path, which computes any step and never leaves. Beside it stand prepared paths, each for steps of one shape:

    ready ──compile──> compiling ──load──> compiled ──retire──> retired
      │                    ├─────fail────> failed  <──fail────────┘ (from compiled)
      ├──load──> compiled  └────retire───> retired
      ├──fail──> failed
      └──retire──> retired

`ready`: nothing is prepared yet, the ready path serves. `compiled`: the prepared form is loaded and serves. `failed`: it could not be prepared,
or raised while it ran. `retired`: it works and is not used, because it does not pay. Whatever the state, the ready path serves what this one
doesn't. An event that the table does not hold is a mistake of ours and raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from headrace.config import PathState, PathStatus

Event = Literal["compile", "load", "fail", "retire"]

TRANSITIONS: dict[tuple[PathState, Event], PathState] = {
    ("ready", "compile"): "compiling",
    ("ready", "load"): "compiled",  # prepared earlier: an artifact, or an entry of the cache
    ("ready", "fail"): "failed",
    ("ready", "retire"): "retired",
    ("compiling", "load"): "compiled",
    ("compiling", "fail"): "failed",
    ("compiling", "retire"): "retired",
    ("compiled", "retire"): "retired",
    ("compiled", "fail"): "failed",
}


class IllegalTransition(RuntimeError):
    """The table has no such event in this state."""


@dataclass(slots=True, kw_only=True)
class Path:
    """One prepared path."""

    name: str
    state: PathState = "ready"
    reason: str | None = None  # why it failed or was retired

    def move(self, event: Event, reason: str | None = None) -> None:
        """Raises `IllegalTransition`. A failure and a retirement need a reason."""
        following = TRANSITIONS.get((self.state, event))
        if following is None:
            raise IllegalTransition(f"path {self.name}: no {event!r} in state {self.state!r}")
        assert (reason is not None) == (event in ("fail", "retire")), "a reason goes with a failure or a retirement, and only there"
        self.state, self.reason = following, reason


class Paths:
    """All prepared paths of a service, by name, in the order of their preparation."""

    def __init__(self, names: Iterable[str]) -> None:
        self._paths = {name: Path(name=name) for name in names}

    def __getitem__(self, name: str) -> Path:
        return self._paths[name]

    def __iter__(self) -> Iterator[Path]:
        return iter(self._paths.values())

    def names(self, *states: PathState) -> list[str]:
        """Paths in one of these states."""
        return [path.name for path in self if path.state in states]

    @property
    def state(self) -> PathState:
        """Of all together: work that goes on is told first, then what serves, then why nothing does."""
        found = {path.state for path in self}
        order: tuple[PathState, ...] = ("compiling", "compiled", "failed", "retired")
        return next((state for state in order if state in found), "ready")

    @property
    def reason(self) -> str | None:
        """Of the first path that failed, or else of the first that was retired."""
        return next((path.reason for state in ("failed", "retired") for path in self if path.state == state), None)

    def statuses(self) -> tuple[PathStatus, ...]:
        return tuple(PathStatus(name=path.name, state=path.state, reason=path.reason) for path in self)

    def check(self) -> None:
        """Recomputes what must hold; for tests."""
        for name, path in self._paths.items():
            assert name == path.name
            assert (path.reason is not None) == (path.state in ("failed", "retired")), path
