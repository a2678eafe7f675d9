"""Work that nobody waits for: it runs in what others leave, and gives its place to them.

A background request is of the last priority class under every policy. While others are in the engine its rows may make a step only a little
longer than theirs alone; else a step of it is short, so that whoever comes next waits for a moment only, and none is planned ahead.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.config import SchedulerConfig
from headrace.core.admission import RESERVE_SHARE, Admission
from headrace.core.draft import PlanDraft
from headrace.core.kv_manager import KVManager
from headrace.core.policy import MIN_PREFILL_CHUNK
from headrace.core.preemption import Preemption
from headrace.core.request import Request, RequestState
from headrace.core.roster import Roster
from headrace.core.step_time import StepTimeModel

SLOWDOWN = 1.1  # a step of others may take so many times as long with background rows in it
STEP_S = 0.05  # a step of background rows alone, while others come now and then
QUIET_STEP_S = 0.2  # and when none has come for QUIET_S: long steps waste less
QUIET_S = 5.0


class Background:
    def __init__(
        self, config: SchedulerConfig, roster: Roster, kv: KVManager, preemption: Preemption, admission: Admission, step_time: StepTimeModel
    ) -> None:
        self._config = config
        self._roster = roster
        self._kv = kv
        self._preemption = preemption
        self._admission = admission
        self._step_time = step_time
        self._latest = float("-inf")  # when others were last in the engine

    @property
    def is_alone(self) -> bool:
        """Whether there is background work and nothing else."""
        return bool(len(self._roster)) and not self._roster.num_foreground

    def make_way(self, draft: PlanDraft, now: float) -> bool:
        """Preempt background requests, the youngest first, until all others that wait find slots and blocks. True if any had to go."""
        if self._roster.num_foreground:
            self._latest = now
        if len(self._roster) == self._roster.num_foreground:
            return False
        victims = [request for request in self._roster.running if request.background]
        if not victims:
            return False
        num_slots = num_blocks = 0
        for request in (*self._roster.preempted, *self._roster.waiting.scan()):
            if not request.background:
                num_slots += 1
                num_blocks += self._kv.num_blocks_for(len(request.token_ids))
        made = False
        while num_slots and victims and not self._has_room(num_slots, num_blocks):
            self._preemption.preempt(victims.pop(), draft, may_swap=False)  # a plan that ends up without rows cannot move blocks
            made = True
        draft.has_preempted = False  # it was no want of memory that keeps others from starting
        return made

    def _has_room(self, num_slots: int, num_blocks: int) -> bool:
        reserve = min(len(self._roster.running), self._kv.pool.num_blocks // RESERVE_SHARE)
        return self._roster.num_free_slots >= num_slots and self._kv.pool.num_free >= num_blocks + reserve

    def plan(
        self,
        draft: PlanDraft,
        now: float,
        *,
        may_start: bool,
        plan_decode: Callable[[Request, PlanDraft], None],
        schedule: Callable[[Request, int, PlanDraft], None],
    ) -> None:
        """Add rows of background requests to a draft that holds all rows of others. Starts come after decodes: they may copy from their blocks."""
        if len(self._roster) == self._roster.num_foreground:
            return
        budget = self._tokens(draft, now)
        for request in [request for request in self._roster.running if request.background and request.num_remaining == 1]:
            if budget and request.state is RequestState.RUNNING:  # not preempted for one before it
                plan_decode(request, draft)
                budget -= 1
        if may_start and not draft.has_preempted:
            self._admission.start_waiting(draft, background=True)
        for request in self._prompts(draft):
            num_tokens = min(request.num_remaining, budget)
            if num_tokens:
                schedule(request, num_tokens, draft)
                budget -= num_tokens

    def _tokens(self, draft: PlanDraft, now: float) -> int:
        """How many tokens of background requests may join the draft, which holds all rows of others."""
        attended = sum(row.num_tokens * (row.start + row.num_tokens) for row in draft.rows.values())
        beside = bool(draft.rows)
        target = STEP_S if now < self._latest + QUIET_S else QUIET_STEP_S
        if beside:
            target = SLOWDOWN * self._step_time.predict(
                tokens=draft.num_tokens, attended=attended, has_prefill=draft.num_tokens > draft.num_decode_tokens
            )
        return self._step_time.prefill_chunk(
            decode_tokens=draft.num_tokens,
            decode_attended=attended,
            num_prompts=1,
            context=max((request.num_computed for request in self._roster.running if request.background), default=0),
            limit=self._config.max_num_batched_tokens - draft.num_tokens,
            floor=0 if beside else MIN_PREFILL_CHUNK,
            target_s=target,
        )

    def _prompts(self, draft: PlanDraft) -> list[Request]:
        """Running background requests with more to compute, or that have just started."""
        rest = [request for request in self._roster.running if request.background and request not in draft.rows]
        return [request for request in rest if request.num_remaining > 1 or (request.num_remaining == 1 and request.admitted_step == draft.step_id)]
