"""Work that nobody waits for: it runs in what others leave, and gives its place to them.

A background request is of the last priority class under every policy. While others are in the engine its rows take a small share of the time:
each step of theirs adds to a credit, which rows of background requests use up. Saved for a few steps it pays for a prompt's chunk, which no
single step's share would. Alone a step of it is short, so that whoever comes next waits for a moment only, and none is planned ahead.
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
from headrace.core.step_work import StepWork

SHARE = 0.1  # of the time of others' steps that background rows may add to them, over several steps
STRETCH = 2.0  # a step of others' decodes may take so many times as long with background rows in it: as with a prompt of their own
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
        self._credit = 0.0  # seconds that background rows may add to steps of others

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
        work, others = draft.work, draft.num_tokens
        others_s = self._step_time.predict(work) if draft.rows else None
        target_s, may_save = self._target(work, now, others_s)
        # what is saved to the full pays for a token, even if it takes longer than STRETCH allows
        limit, floor = self._config.max_num_batched_tokens, MIN_PREFILL_CHUNK if others_s is None else 0 if may_save else 1
        for request in [request for request in self._roster.running if request.background and request.num_remaining == 1]:
            more = work.with_decode(request.num_computed + 1)
            if draft.num_tokens >= limit or (draft.num_tokens - others >= floor and self._step_time.predict(more) > target_s):
                break
            if request.state is RequestState.RUNNING:  # not preempted for one before it
                plan_decode(request, draft)
                work = more
        if may_start and not draft.has_preempted:
            self._admission.start_waiting(draft, background=True)
        budget = self._step_time.prefill_chunk(
            draft.work,
            num_prompts=1,
            context=max((request.num_computed for request in self._roster.running if request.background), default=0),
            limit=limit - draft.num_tokens,
            floor=max(0, floor - (draft.num_tokens - others)),
            target_s=target_s,
        )
        for request in self._prompts(draft):
            num_tokens = min(request.num_remaining, budget)
            if may_save and num_tokens < min(request.num_remaining, MIN_PREFILL_CHUNK):
                break
            if num_tokens:
                schedule(request, num_tokens, draft)
                budget -= num_tokens
        if others_s is not None:
            self._credit -= self._step_time.predict(draft.work) - others_s

    def _target(self, work: StepWork, now: float, others_s: float | None) -> tuple[float, bool]:
        """What the step may take with rows of background requests, in seconds, and whether saving would allow more in a later step.

        `others_s`: what the draft, which holds all rows of others, takes as it is; None without rows.
        """
        if others_s is None:
            return STEP_S if now < self._latest + QUIET_S else QUIET_STEP_S, False
        most_s = (STRETCH - 1.0) * others_s
        self._credit = min(self._credit + SHARE * others_s, most_s)
        # a prompt of others has made the step long already
        credit = min(self._credit, SHARE * others_s) if work.prompt_tokens else self._credit
        return others_s + credit, credit < most_s

    def _prompts(self, draft: PlanDraft) -> list[Request]:
        """Running background requests with more to compute, or that have just started."""
        rest = [request for request in self._roster.running if request.background and request not in draft.rows]
        return [request for request in rest if request.num_remaining > 1 or (request.num_remaining == 1 and request.admitted_step == draft.step_id)]
