"""Taking blocks from younger requests so that older ones go on.

A victim is always younger (by rank) than the request it makes room for, so the oldest one always advances and nothing can live-lock. A
request that finds no victim stalls: it keeps its blocks and has no row in this step, until older ones end.
"""

from __future__ import annotations

from typing import Literal

from headrace.core.draft import PlanDraft
from headrace.core.kv_manager import KVManager
from headrace.core.request import Request, RequestState
from headrace.core.roster import Roster

MIN_SWAP_TOKENS = 64  # auto: computing fewer tokens again is cheaper than copying them twice


class Preemption:
    def __init__(self, roster: Roster, kv: KVManager, *, mode: Literal["auto", "recompute", "swap"]) -> None:
        self._roster = roster
        self._kv = kv
        self._mode = mode
        self.num_recomputes = 0  # totals; never fall
        self.num_swaps = 0

    def grow(self, request: Request, draft: PlanDraft) -> bool:
        """Give a decoding request, for which no block is free, the place for its next position by preemption. False: it stalls."""
        victims = self._victims(request, draft)
        for victim in victims:
            self.preempt(victim, draft)
        return bool(victims) and self._kv.grow(request.table, request.num_computed + 1)

    def _victims(self, request: Request, draft: PlanDraft) -> list[Request]:
        """The fewest youngest requests whose blocks give one free block; none where all that are younger could not give one.

        Those of a tenant to whom the request's owes slots come last.
        """
        victims: list[Request] = []
        younger = [other for other in reversed(self._roster.running) if other.rank > request.rank and other not in draft.rows]
        if len(self._roster.shares) > 1:
            younger.sort(key=lambda other: self._roster.is_owed(other.message.tenant, request.message.tenant))
        for candidate in younger:
            victims.append(candidate)
            if self._kv.num_freed_by(victim.table for victim in victims):
                return victims
        return []

    def preempt(self, victim: Request, draft: PlanDraft, *, may_swap: bool = True) -> None:
        """Take slot and blocks from a running request that has no row in the draft."""
        assert victim not in draft.rows, "rows are planned from old to young, victims are younger than all of them"
        draft.has_preempted = True
        victim.num_preemptions += 1
        if may_swap and self._swaps(victim):
            draft.swap_out.extend(self._kv.swap_out(victim.table, victim.num_computed))
            self._roster.preempt(victim, RequestState.SWAPPED)
            self.num_swaps += 1
        else:
            self._kv.free(victim.table)
            victim.num_computed = 0
            self._roster.preempt(victim, RequestState.PREEMPTED)
            self.num_recomputes += 1

    def _swaps(self, victim: Request) -> bool:
        # with nothing left to plan, it ends with the result that is on its way
        if self._mode == "recompute" or not victim.num_computed or not victim.num_remaining or not self._kv.can_swap_out(victim.num_computed):
            return False
        if victim.message.pooling == "mean":
            return False  # the runner's sum over the positions so far does not outlive the slot
        return self._mode == "swap" or victim.num_computed >= MIN_SWAP_TOKENS
