"""Slots and blocks for tenants that have fewer than their part, when others hold all of them.

Tokens are shared out fairly as they are computed (`waiting_queue`, `policy.split_prefill`), but a request keeps its slot to its end: a tenant
with many long answers would make all others wait for one of those ends. So the youngest requests of whoever holds most give way, until each
tenant that waits has its part. What they have computed stays in the prefix cache as long as there is room.
"""

from __future__ import annotations

from collections import Counter

from headrace.core.admission import RESERVE_SHARE
from headrace.core.draft import PlanDraft
from headrace.core.kv_manager import KVManager
from headrace.core.preemption import Preemption
from headrace.core.request import Request
from headrace.core.roster import Roster

OWED_PATIENCE = 3.0


class FairSlots:
    def __init__(self, roster: Roster, kv: KVManager, preemption: Preemption) -> None:
        self._roster = roster
        self._kv = kv
        self._preemption = preemption

    def make_way(self, draft: PlanDraft) -> None:
        """Preempt the fewest youngest requests of the tenant that holds most slots, so that the head of the queue can start.

        Only where the head's tenant has had no more tokens than the other one, and is below its part of the slots when that one is above. At
        most one start a plan, and each request gives way at most once.
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

    def patience(self, prompts: list[Request]) -> float:
        """How much longer than usual decodes wait beside these prompts: where one is of a tenant that is owed slots, and others have too many."""
        if len(self._roster.shares) < 2:
            return 1.0
        held = Counter(request.message.tenant for request in self._roster.running if not request.background)
        crowding = [tenant for tenant, count in held.items() if count > self._roster.part]
        tenants = {request.message.tenant for request in prompts}
        return OWED_PATIENCE if any(self._roster.is_owed(tenant, other) for tenant in tenants for other in crowding) else 1.0

    def _victims(self, head: Request) -> list[Request]:
        """None where there is room already, or where none could be made."""
        victims: list[Request] = []
        held = Counter(request.message.tenant for request in self._roster.running if not request.background)
        if self._has_room(head, victims) or not held:
            return []
        tenant, count = held.most_common(1)[0]
        if not self._roster.is_owed(head.message.tenant, tenant):
            return []
        for candidate in reversed(self._roster.running):
            if count <= self._roster.part:
                break
            if (
                candidate.message.tenant == tenant
                and not candidate.num_preemptions
                and not candidate.background
                and candidate.rank[0] >= head.rank[0]
            ):
                victims.append(candidate)
                count -= 1
                if self._has_room(head, victims):
                    return victims
        return []

    def _has_room(self, head: Request, victims: list[Request]) -> bool:
        pool = self._kv.pool
        reserve = min(len(self._roster.running), pool.num_blocks // RESERVE_SHARE)
        num_free = pool.num_free + self._kv.num_freed_by(victim.table for victim in victims)
        enough = num_free >= self._kv.num_blocks_for(len(head.token_ids)) + reserve
        return enough and self._roster.num_free_slots + len(victims) > 0
