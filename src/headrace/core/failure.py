"""What a step that raised takes down with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headrace.core.draft import PlannedStep
from headrace.core.request import Request, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    requests: tuple[Request, ...]  # alive, and in the failed step or built on what it did not write
    device_blocks: frozenset[int]  # nobody may find these any more
    host_blocks: frozenset[int]  # hold nothing that can be swapped in


def damage_of(step: PlannedStep, later: Sequence[PlannedStep], alive: Collection[Request]) -> Damage:
    """All that cannot be trusted after `step` failed, through the plans made ahead of its failure."""
    device = set().union(*step.written)
    device.update(to for _, to in (*step.plan.swap_in, *step.plan.copies))
    host = {to for _, to in step.plan.swap_out}
    lost = {request: None for request in step.requests if request.state is not RequestState.FINISHED}
    doubtful: set[int] = set()  # written by requests that are gone: from what, nobody remembers
    while True:
        for ahead in later:
            ahead.spread(device, host)
            for request, blocks in zip(ahead.requests, ahead.written, strict=True):
                if request in lost:
                    device.update(blocks)
                elif request.state is RequestState.FINISHED:
                    doubtful.update(blocks)
        more = [request for request in alive if request not in lost and not device.isdisjoint(request.table.blocks)]
        if not more:
            return Damage(requests=tuple(lost), device_blocks=frozenset(device | doubtful), host_blocks=frozenset(host))
        lost.update(dict.fromkeys(more))
