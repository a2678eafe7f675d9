"""Totals that go on over the restarts of an engine."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TypeVar

from headrace.config import CompileStatus
from headrace.core.messages import SchedulerStats

Snapshot = TypeVar("Snapshot", SchedulerStats, CompileStatus)


def add_totals(stats: Snapshot, earlier: Snapshot | None) -> Snapshot:
    """`stats` with the totals of earlier engines added, so that totals never fall."""
    if earlier is None:
        return stats
    totals = [field.name for field in fields(stats) if field.name.endswith("_total")]
    return replace(stats, **{name: getattr(stats, name) + getattr(earlier, name) for name in totals})
