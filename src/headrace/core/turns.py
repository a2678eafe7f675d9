"""Whose rows a step holds while several tenants use the engine: short steps for all, and a step of their own for prompts of those behind.

A tenant that sends little finds two things in its way when its request comes: the step that runs, and the rows of others in the step that
computes its prompt. So where another tenant was here lately, steps are kept short: their decodes take turns, the one that waits longest
first, and their prompts get small chunks. And while a tenant that is far behind in tokens has a prompt to compute, the rows of the others
are left out: these are ahead of it by more than they lose. That lasts for a moment only.

A tenant that has the engine to itself for a while is served as if there were no tenants.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.draft import PlannedStep
from headrace.core.request import Request, RequestState
from headrace.core.roster import Roster
from headrace.core.step_time import StepTimeModel
from headrace.core.step_work import StepWork

STEP_S = 0.05  # of a step that a tenant which comes may have to wait for
DECODE_SHARE = 0.6  # of it, for decodes beside prompts
MIN_DECODES = 4  # one decode in so many runs in each step, however long that takes
OWN_STEP_S = 0.12  # of a step without the rows of those ahead
PAUSE_S = 0.2  # none begins so long after the first in a row: the answers of those ahead go on
AHEAD_S = 0.02  # nothing is planned ahead of a step that takes longer: a tenant that comes would have to wait for both
AWAY_S = 30.0  # a tenant that was not here for so long is not expected back
MIN_SLOTS = 8  # with fewer, none is kept free for a tenant that comes
_NEXT_TO_NOTHING = StepWork(decode_tokens=1, decode_attended=1, prompt_tokens=1, prompt_attended=1, sampled=1)


class TenantTurns:
    """`lead`: tokens by which a tenant is ahead of one that gets steps of its own."""

    def __init__(self, roster: Roster, step_time: StepTimeModel, *, lead: int) -> None:
        self._roster = roster
        self._step_time = step_time
        self._lead = lead
        self._last_seen: dict[str, float] = {}
        self._behind: frozenset[str] = frozenset()  # tenants that this step is for; empty: for all
        self._passed_over: frozenset[Request] = frozenset()  # decodes that wait for a later step
        self._own_since: float | None = None  # when the first of the own steps in a row was planned

    @property
    def are_taken(self) -> bool:
        """Whether there is, or lately was, more than one tenant."""
        return len(self._last_seen) > 1

    @property
    def step_s(self) -> float | None:
        """What the step may take with its prompts; None: as long as the decodes in it bear."""
        if not self.are_taken:
            return None
        return self._worth_its_start(OWN_STEP_S if self._behind else STEP_S)

    def may_plan_behind(self, step: PlannedStep) -> bool:
        """Whether the next step may be planned while this one runs."""
        if not (self.are_taken and self._step_time.ready):
            return True
        return self._step_time.predict(step.plan.work) <= AHEAD_S

    def begin(self, now: float) -> None:
        """Decide whom the next step is for. Background requests are no part of this."""
        present = self._present()
        self._last_seen |= dict.fromkeys(present, now)
        if not self.are_taken:
            return
        self._last_seen = {tenant: at for tenant, at in self._last_seen.items() if at > now - AWAY_S}
        paused = self._own_since is not None and now >= self._own_since + PAUSE_S
        behind = frozenset() if paused else self._with_prompts_behind(present)
        self._behind = behind
        self._own_since = (now if self._own_since is None else self._own_since) if behind else None
        self._passed_over = frozenset() if behind or not self.are_taken else self._excess_decodes()

    def open(self) -> bool:
        """The prompts that the step was for find no place in it: now it is for all. False where it was before."""
        was_closed = bool(self._behind)
        self._behind = frozenset()
        if was_closed:
            self._own_since = None
            self._passed_over = self._excess_decodes()
        return was_closed

    @property
    def skips_any(self) -> bool:
        """Whether `skip` is true of any request."""
        return bool(self._passed_over or self._behind)

    def skip(self, request: Request) -> bool:
        """Whether the request has no row in this step."""
        return request in self._passed_over or bool(self._behind and request.message.tenant not in self._behind)

    def keeps_free(self, tenant: str) -> bool:
        """Whether the last free slot is kept from this tenant, which has half of all at least and has had most tokens."""
        roster = self._roster
        if not self.are_taken or roster.num_free_slots > 1 or roster.num_slots < MIN_SLOTS or 2 * roster.slots_of(tenant) < roster.num_slots:
            return False
        return all(roster.shares.served(other) <= roster.shares.served(tenant) for other in roster.shares)

    def _worth_its_start(self, seconds: float) -> float:
        """At least twice what a step takes with next to nothing in it: a slow model would spend its short steps on reading weights."""
        return max(seconds, 2 * self._step_time.predict(_NEXT_TO_NOTHING)) if self._step_time.ready else seconds

    def _present(self) -> set[str]:
        if len(self._roster.shares) > 1:
            return {request.message.tenant for request in self._roster if not request.background}
        return set(self._roster.shares) if self._roster.num_foreground else set()

    def _far_behind(self, present: Iterable[str]) -> set[str]:
        served = {tenant: self._roster.computed.served(tenant) for tenant in present}
        most = max(served.values(), default=0)
        return {tenant for tenant, tokens in served.items() if tokens + self._lead <= most}

    def _with_prompts_behind(self, present: set[str]) -> frozenset[str]:
        behind, roster = self._far_behind(present), self._roster
        if not behind:
            return frozenset()
        starting: Iterable[Request] = (*roster.preempted, *roster.waiting) if roster.num_free_slots else ()
        prompts = [request for request in roster.running if request.num_remaining > 1]
        return frozenset(request.message.tenant for request in (*prompts, *starting) if request.message.tenant in behind and not request.background)

    def _excess_decodes(self) -> frozenset[Request]:
        """Decodes that would make the step too long: those that ran last, where those of tenants far behind count as if they had run earlier."""
        running = [request for request in self._roster.running if request.state is RequestState.RUNNING and not request.background]
        decodes = [request for request in running if request.num_remaining == 1]
        if not decodes or not self._step_time.ready:
            return frozenset()
        seconds = self._worth_its_start(STEP_S) * (DECODE_SHARE if any(request.num_remaining > 1 for request in running) else 1.0)
        attended = sum(request.num_computed + 1 for request in decodes) / len(decodes)
        least, count = -(-len(decodes) // MIN_DECODES), len(decodes)
        while count > least and self._step_time.predict(StepWork(count, int(count * attended))) > seconds:
            count -= 1
        behind = self._far_behind({request.message.tenant for request in decodes})
        decodes.sort(key=lambda request: (request.planned_step - MIN_DECODES * (request.message.tenant in behind), request.rank))
        return frozenset(decodes[count:])
