"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str  # name of the check
    ok: bool
    evidence: str  # what was seen, with its numbers
    remedy: str | None = None  # what to do; None where all is well
    gain: str | None = None  # what that is worth, where it can be told

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def well(check: str, evidence: str) -> Finding:
    return Finding(check=check, ok=True, evidence=evidence)


def fault(check: str, evidence: str, remedy: str, gain: str | None = None) -> Finding:
    return Finding(check=check, ok=False, evidence=evidence, remedy=remedy, gain=gain)
