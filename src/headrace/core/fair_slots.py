"""Slots and blocks for tenants that have fewer than their part, when others hold all of them.

Tokens are shared out fairly as they are computed (`waiting_queue`, `policy.split_prefill`), but a request keeps its slot to its end: a tenant
with many long answers would make all others wait for one of those ends. So the youngest requests of whoever holds most give way, until each
tenant that waits has its part. What they have computed stays in the prefix cache as long as there is room.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.admission import RESERVE_SHARE
from headrace.core.draft import PlanDraft
from headrace.core.kv_manager import KVManager
from headrace.core.preemption import Preemption
from headrace.core.request import Request
from headrace.core.roster import Roster


@dataclass(slots=True)
class _Held:
    """What one tenant's running requests hold; blocks that they share count for each."""

    tenant: str
    num_slots: int = 0
    num_blocks: int = 0

    def excess(self, roster: Roster) -> float:
        """How many times its part."""
        return max(self.num_slots / roster.num_slots, self.num_blocks / roster.num_blocks) / roster.shares.part(self.tenant)

    def is_above_part(self, roster: Roster) -> bool:
        return roster.is_part(self.tenant, self.num_slots - 1, self.num_blocks - 1)


class FairSlots:
    def __init__(self, roster: Roster, kv: KVManager, preemption: Preemption) -> None:
        self._roster = roster
        self._kv = kv
        self._preemption = preemption

    def make_way(self, draft: PlanDraft) -> None:
        """Preempt the fewest youngest requests of the tenant that holds most of its part, so that the head of the queue can start.

        Only where the head's tenant has had no more tokens than the other one, and is below its part of slots and blocks when that one is
        above. At most one start a plan, and each request gives way at most once.
        """
        if len(self._roster.shares) < 2:
            return
        head = next(self._roster.waiting.scan(), None)
        if head is None or head.background:
            return
        victims = self._victims(head)
        for victim in victims:
            self._preemption.preempt(victim, draft, may_swap=False)  # a plan that ends up without rows cannot move blocks
        draft.has_preempted = False  # it was no want of memory that keeps others from starting

    def _victims(self, head: Request) -> list[Request]:
        """None where there is room already, where none could be made, and for a request that wants more than its tenant's part."""
        victims: list[Request] = []
        holdings = self._held()
        if (
            self._has_room(head, victims)
            or not holdings
            or self._roster.is_part(head.message.tenant, 0, self._kv.num_blocks_for(len(head.token_ids)))
        ):
            return []
        tenant = max(holdings, key=lambda name: holdings[name].excess(self._roster))
        held = holdings[tenant]
        if not self._roster.is_owed(head.message.tenant, tenant):
            return []
        for candidate in reversed(self._roster.running):
            if not held.is_above_part(self._roster):
                break
            if (
                candidate.message.tenant == tenant
                and not candidate.num_preemptions
                and not candidate.background
                and candidate.rank[0] >= head.rank[0]
            ):
                victims.append(candidate)
                held.num_slots -= 1
                held.num_blocks -= len(candidate.table.blocks)
                if self._has_room(head, victims):
                    return victims
        return []

    def _held(self) -> dict[str, _Held]:
        holdings: dict[str, _Held] = {}
        for request in self._roster.running:
            if not request.background:
                held = holdings.setdefault(request.message.tenant, _Held(request.message.tenant))
                held.num_slots += 1
                held.num_blocks += len(request.table.blocks)
        return holdings

    def _has_room(self, head: Request, victims: list[Request]) -> bool:
        pool = self._kv.pool
        reserve = min(len(self._roster.running), pool.num_blocks // RESERVE_SHARE)
        num_free = pool.num_free + self._kv.num_freed_by(victim.table for victim in victims)
        enough = num_free >= self._kv.num_blocks_for(len(head.token_ids)) + reserve
        return enough and self._roster.num_free_slots + len(victims) > 0
