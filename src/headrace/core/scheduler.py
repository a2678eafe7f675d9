"""What runs in the next step. No clock and no device: time is passed in, plans and results are messages.

The engine turns the wheel with three calls: `plan(now)` decides a step, the runner executes it, `update(result, now)` takes its tokens in.
`plan` may be called once more before the result of the plan before is in. A request then stands in the plan ahead by counters alone:
`num_computed` counts positions of all plans made, `num_pending` the sample that is drawn but not known, and a row without token ids
tells the runner to use that sample. A request that turns out to be finished leaves a stale row in the plan ahead, whose result is ignored.

One plan, in this order:
1. Decoding requests get one token each, from the oldest to the youngest; where blocks run out, younger ones are preempted (`preemption`).
   While there are several tenants, some wait for a later step (`turns`).
2. Waiting requests take slots and the blocks of their whole prompt (`admission`), unless something was just preempted (see `fair_slots`).
3. The rest of the token budget goes to prompts (`policy.split_prefill`); beside decodes it is limited by the step-time model, so that the
   inter-token latency holds. Prompts that others wait for come first up to where those can start; then 2 and 3 are repeated.
4. Background requests, which all others go before, get what is left of the step's time (`background`).
5. In a step of decodes alone guesses may join their rows (`speculation`). How many tokens such a step gives is known with its result, and
   what to guess with the one before: so there is no plan ahead of a result that guesses wait for.
"""

from __future__ import annotations

import math
from collections import deque

from headrace.config import SchedulerConfig
from headrace.core.admission import Admission, limit_refusal, max_total_tokens, tokens_needed
from headrace.core.background import Background
from headrace.core.deadline import Deadlines
from headrace.core.draft import PlanDraft, PlannedStep
from headrace.core.explain import Explanation, Query, explain
from headrace.core.failure import damage_of
from headrace.core.fair_slots import FairSlots
from headrace.core.finish_rate import FinishRate
from headrace.core.kv_manager import KVManager
from headrace.core.messages import AbortRequest, AddRequest, FinishReason, Row, SampledRow, SchedulerStats, StepPlan, StepResult, TokenOutput
from headrace.core.outputs import append_tokens, collect_prompt_logprobs, make_output, refusal
from headrace.core.policy import AGED_SHARE, MIN_PREFILL_CHUNK, PrefillNeed, queue_key, rank, split_prefill
from headrace.core.preemption import Preemption
from headrace.core.prefix import HashFunction, blake2b_digest
from headrace.core.prompt_budget import prompt_budget
from headrace.core.request import Request, RequestState
from headrace.core.roster import Roster
from headrace.core.snapshots import Snapshots
from headrace.core.speculation import Speculation
from headrace.core.step_time import StepTimeModel
from headrace.core.step_tokens import StepTokens, tokens_of
from headrace.core.turns import TenantTurns

MAX_RETRY_AFTER_S = 60
LAST_ENDED = 256  # ids of ended requests that are remembered


class Scheduler:
    """All requests of one engine. Not thread-safe; the same calls with the same values give the same plans."""

    def __init__(self, config: SchedulerConfig, *, hash_function: HashFunction = blake2b_digest) -> None:
        self.config = config
        self.step_time = StepTimeModel()
        self._kv = KVManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_host_blocks=config.num_host_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            session_lease_s=config.session_lease_s,
            hash_function=hash_function,
        )
        credit, weights = config.max_num_batched_tokens, dict(config.tenant_weights)
        self._roster = Roster(config.max_num_seqs, num_blocks=config.num_blocks, credit=credit, weights=weights)
        self._admission = Admission(config, self._roster, self._kv)
        self._preemption = Preemption(self._roster, self._kv, mode=config.preemption_mode)
        self._background = Background(config, self._roster, self._kv, self._preemption, self._admission, self.step_time)
        self._fair_slots = FairSlots(self._roster, self._kv, self._preemption)
        self._turns = TenantTurns(self._roster, self.step_time, lead=config.max_num_batched_tokens // 2)
        self._speculation = None if config.speculative_config is None else Speculation(config.speculative_config, self.step_time)
        self._snapshots = Snapshots(self._kv, self._roster, self._admission, self._preemption, self._speculation)
        self._planned: deque[PlannedStep] = deque()  # plans whose results are not in, oldest first
        self.step_tokens = StepTokens()  # of the step that `update` took in last
        self._deadlines = Deadlines(self._kv, self.step_time, step_tokens=config.max_num_batched_tokens)
        self._last_ended: deque[str] = deque(maxlen=LAST_ENDED)  # choice 0 may end before the other choices have arrived
        self._unsent: list[TokenOutput] = []  # terminal outputs made while planning
        self._next_step_id = 1
        self._next_seq = 0
        self._decoded_last = False  # without chunked prefill: steps of prompts and of decodes take turns
        self._finish_rate = FinishRate()
        self._generation_tokens = 0
        self._recomputed_tokens = 0

    @property
    def kv(self) -> KVManager:
        return self._kv

    # -- requests in and out -------------------------------------------------------------------------------------------

    def add(self, message: AddRequest, now: float) -> TokenOutput | None:
        """Take a request in. Returns its terminal output where it is refused, else None. ValueError where the id is in use."""
        if message.request_id in self._roster:
            raise ValueError(f"request id {message.request_id} is in use")
        refused = limit_refusal(message, self.config)
        if refused is not None:
            return refusal(message.request_id, *refused)
        in_group = message.fork_of is not None and (message.fork_of in self._roster or message.fork_of in self._last_ended)
        if not in_group and not message.background and self._roster.num_queued_with_one_more() > self.config.max_num_queued_reqs:
            text = f"The queue is full ({self.config.max_num_queued_reqs} requests wait); try again in {self.retry_after()} s."
            return refusal(message.request_id, "queue_full", text)
        seq = self._next_seq
        self._next_seq += 1
        request = Request(
            message=message,
            seq=seq,
            rank=rank(message, seq, self.config.scheduling_policy),
            queue_key=queue_key(message, seq, self.config.scheduling_policy),
            max_total_tokens=max_total_tokens(message, self.config),
            table=self._kv.new_table(salt=message.cache_salt, tenant=message.tenant, session_id=message.session_id, background=message.background),
            in_group=in_group,
        )
        if (late := self._deadlines.add(request, now)) is not None:
            return refusal(message.request_id, "deadline_exceeded", late)
        self._roster.add(request)
        return None

    def abort(self, message: AbortRequest) -> TokenOutput | None:
        """End a request at once, whatever its state. None where the id is not known (any more)."""
        request = self._roster.get(message.request_id)
        return None if request is None else self._finish(make_output(request, finish_reason=message.reason), request)

    def take_outputs(self) -> list[TokenOutput]:
        """Terminal outputs made by `plan` (deadlines). Ask after each `plan`; `update` and `fail_step` hand them out as well."""
        outputs, self._unsent = self._unsent, []
        return outputs

    def has_work(self) -> bool:
        """Whether any request is alive, any result is due or any output was not taken."""
        return bool(len(self._roster) or self._planned or self._unsent)

    # -- plan ----------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None where nothing can run before a result is in. At most two plans may be without a result."""
        assert len(self._planned) < 2, "two plans are without a result"
        self._expire(now)
        if self._planned and (self._awaits_tokens() or self._background.is_alone or not self._turns.may_plan_behind(self._planned[-1])):
            return None
        self._kv.begin_plan(now)
        draft = PlanDraft(step_id=self._next_step_id)
        if self.config.enable_chunked_prefill:
            made_way = self._background.make_way(draft, now)
            self._fair_slots.make_way(draft)
            self._turns.begin(now)
            self._plan_decodes(draft)
            self._plan_prompts(draft)
            if draft.num_tokens == draft.num_decode_tokens and self._turns.open():
                self._plan_decodes(draft)
                self._plan_prompts(draft)
            self._background.plan(draft, now, may_start=not made_way, plan_decode=self._plan_decode, schedule=self._schedule)
        else:
            if not self._decoded_last:
                self._plan_decodes(draft)
            if not draft.rows:
                self._plan_prompts(draft)
            if not draft.rows:
                self._plan_decodes(draft)
            self._decoded_last = draft.num_decode_tokens > 0
        if self._speculation is not None and draft.rows and draft.num_tokens == draft.num_decode_tokens and not draft.has_preempted:
            self._speculate(self._speculation, draft)
        self._kv.end_plan()
        if not draft.rows:
            assert not [*draft.swap_out, *draft.swap_in, *draft.copies], "blocks move for nobody"
            return None
        self._next_step_id += 1
        self._recomputed_tokens += draft.num_repeated
        step = draft.build()
        self._planned.append(step)
        return step.plan

    def _expire(self, now: float) -> None:
        for request, text in self._deadlines.late(now):
            output = make_output(request, finish_reason="error", error_code="deadline_exceeded", error_message=text)
            self._unsent.append(self._finish(output, request))

    def _plan_decodes(self, draft: PlanDraft) -> None:
        skips = self._leaves_out()
        for request in tuple(self._roster.running):
            if request.num_remaining != 1 or request.state is not RequestState.RUNNING or request in draft.rows:
                continue
            if not (skips and self._is_left_out(request)):
                self._plan_decode(request, draft)

    def _plan_decode(self, request: Request, draft: PlanDraft) -> None:
        end = request.num_computed + 1
        if self._kv.grow(request.table, end) or self._preemption.grow(request, draft):
            self._schedule(request, 1, draft)
            draft.num_decode_tokens += 1

    def _leaves_out(self) -> bool:
        """Whether any request may be left out of this step."""
        return self._turns.skips_any or len(self._roster) != self._roster.num_foreground

    def _is_left_out(self, request: Request) -> bool:
        """Whether the request waits for a later step or for `_background`. Without chunked prefill its class alone orders it."""
        return self.config.enable_chunked_prefill and (request.background or self._turns.skip(request))

    def _plan_prompts(self, draft: PlanDraft) -> None:
        budget: int | None = None
        while True:
            starts_background = not self.config.enable_chunked_prefill
            wanted = {} if draft.has_preempted else self._admission.start_waiting(draft, background=starts_background, kept=self._turns.keeps_free)
            rows = draft.rows
            open_rows = [request for request in self._roster.running if (row := rows.get(request)) is None or not row.sample]
            requests = [request for request in open_rows if self._is_prompt(request, draft) and not self._is_left_out(request)]
            if not requests:
                return
            first_pass = budget is None
            if budget is None:
                budget = prompt_budget(requests, draft, self.config, self.step_time, step_s=self._turns.step_s)
            chunked = self.config.enable_chunked_prefill
            needs = [
                PrefillNeed(
                    num_tokens=tokens_needed(request, wanted) if chunked else request.num_remaining,
                    rank=request.rank,
                    deadline=request.message.deadline,
                    aged=first_pass and request.admitted_step < draft.step_id,
                    served=self._roster.computed.served(request.message.tenant),
                )
                for request in requests
            ]
            aged_share = max(MIN_PREFILL_CHUNK, budget // AGED_SHARE)
            grants = split_prefill(needs, budget, aged_share=aged_share, whole=not chunked)
            if not any(grants):
                return
            for request, grant in zip(requests, grants, strict=True):
                if grant:
                    self._schedule(request, grant, draft)
                    budget -= grant
            if not chunked:
                return  # what starts in a second pass might not fit whole

    def _is_prompt(self, request: Request, draft: PlanDraft) -> bool:
        row = draft.rows.get(request)
        if row is not None:
            return not row.sample and request.num_remaining > 0
        return request.num_remaining > 1 or (request.num_remaining == 1 and request.admitted_step == draft.step_id)

    def _awaits_tokens(self) -> bool:
        """Whether the next plan is better made when the tokens on their way are known, for guesses behind them."""
        if self._speculation is None:
            return False
        if any(step.speculates for step in self._planned):
            return True
        running = self._roster.running
        starting = self._roster.num_free_slots and (len(self._roster.waiting) or self._roster.preempted)
        if starting or any(request.num_remaining > 1 for request in running):
            return False  # beside prompts nothing is guessed
        decoding = [request for request in running if request.num_remaining]
        return self._speculation.expects(decoding, num_rows=len(decoding), attended=sum(request.num_computed + 1 for request in decoding))

    def _speculate(self, speculation: Speculation, draft: PlanDraft) -> None:
        known = [request for request, row in draft.rows.items() if row.start < len(request.token_ids)]
        limit = self.config.max_num_batched_tokens - draft.num_tokens
        proposed = speculation.propose(known, num_rows=draft.num_tokens, attended=draft.work.decode_attended, limit=limit)
        for request, guesses in proposed.items():
            while guesses and not self._kv.grow(request.table, request.num_computed + len(guesses)):
                guesses = guesses[:-1]  # nobody gives way to a guess
            if guesses:
                draft.speculate(request, guesses, self._kv.mark_written(request.table, request.num_computed, len(guesses)))

    def _schedule(self, request: Request, num_tokens: int, draft: PlanDraft) -> None:
        kv, table = self._kv, request.table
        blocks = kv.mark_written(table, request.num_computed, num_tokens)
        self._roster.charge_computed(request, num_tokens)
        draft.schedule(request, num_tokens, blocks)
        if kv.caching:
            kv.register(table, request.token_ids, request.num_computed)

    # -- results -------------------------------------------------------------------------------------------------------

    def update(self, result: StepResult, now: float) -> list[TokenOutput]:
        """Take in the result of the oldest plan without one."""
        assert self._planned, "no plan is without a result"
        step = self._planned.popleft()
        plan = step.plan
        assert result.step_id == plan.step_id, f"the result of step {plan.step_id} is due, not of {result.step_id}"
        assert len(result.rows) == len(plan.rows)
        self.step_time.observe(plan.work, speculates=step.speculates, seconds=result.seconds)
        self.step_tokens = tokens_of(step, result)
        outputs = self.take_outputs()
        num_finished = 0
        for request, row, sampled in zip(step.requests, plan.rows, result.rows, strict=True):
            assert sampled.request_id == row.request_id
            if request.state is RequestState.FINISHED:
                continue
            output = self._take_row(request, row, sampled)
            if output is not None:
                num_finished += output.finish_reason is not None
                outputs.append(output)
        if num_finished:
            self._finish_rate.observe(num_finished, now)
        return outputs

    def _take_row(self, request: Request, row: Row, sampled: SampledRow) -> TokenOutput | None:
        request.num_pending -= row.sample
        if sampled.error is not None:
            self._kv.uncache(request.table.blocks)  # what cannot be sampled from must not be read by others
            return self._fail(request, sampled.error)
        if sampled.prompt_logprobs:
            collect_prompt_logprobs(request, row, sampled)
        if not row.sample:
            if request.samples or row.start + row.num_tokens < request.num_prompt:
                return None
            reason: FinishReason = "length" if request.message.pooling is None else "stop"
            return self._finish(make_output(request, finish_reason=reason, pooled=sampled.pooled), request)
        num_accepted = len(sampled.token_ids) - 1
        assert 0 <= num_accepted <= row.num_speculated
        if row.num_speculated and self._speculation is not None:
            self._speculation.take(request, num_guessed=row.num_speculated, num_accepted=num_accepted)
            request.num_computed += num_accepted
        num_taken, finish_reason, stop_reason = append_tokens(request, sampled.token_ids, complete=sampled.complete)
        self._generation_tokens += num_taken
        self._roster.shares.charge(request.message.tenant, num_taken)
        if self._kv.caching and request.state is RequestState.RUNNING:
            self._kv.register(request.table, request.token_ids, request.num_computed)
        if finish_reason is None and sampled.logprobs is None and request.has_output:  # nearly every row: nothing else is to be said
            return TokenOutput(request_id=request.request_id, token_ids=sampled.token_ids, num_preemptions=request.num_preemptions)
        output = make_output(
            request,
            token_ids=sampled.token_ids if num_accepted == 0 else sampled.token_ids[:num_taken],
            logprobs=None if sampled.logprobs is None else sampled.logprobs[:num_taken],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            ends_in_text=sampled.complete and stop_reason is None and request.token_ids[-1] not in request.message.eos_token_ids,
        )
        return output if finish_reason is None else self._finish(output, request)

    def fail_step(self, plan: StepPlan, message: str) -> list[TokenOutput]:
        """The step raised, and what it should have written is unknown: its requests end with an error, and so do all that built on it.

        A plan made ahead of it stays outstanding: execute it and `update`, or `fail_step` it as well.
        """
        step = next(step for step in self._planned if step.plan.step_id == plan.step_id)
        later = [other for other in self._planned if other.plan.step_id > plan.step_id]
        self._planned.remove(step)
        damage = damage_of(step, later, list(self._roster))
        self._kv.uncache(damage.device_blocks)
        outputs = self.take_outputs()
        outputs.extend(self._fail(request, message) for request in damage.requests)
        for request in [request for request in self._roster.preempted if not damage.host_blocks.isdisjoint(request.table.host_blocks)]:
            self._kv.free(request.table)
            request.num_computed = 0
            self._roster.preempt(request, RequestState.PREEMPTED)
        return outputs

    def _fail(self, request: Request, message: str) -> TokenOutput:
        return self._finish(make_output(request, finish_reason="error", error_code="request_failed", error_message=message), request)

    def _finish(self, output: TokenOutput, request: Request) -> TokenOutput:
        self._kv.free(request.table)
        self._roster.finish(request)
        self._last_ended.append(request.request_id)
        self._deadlines.forget(request)
        if self._speculation is not None:
            self._speculation.forget(request)
        return output

    # -- what others want to know --------------------------------------------------------------------------------------

    def retry_after(self) -> int:
        """Whole seconds, at least 1, in which as many requests end as can run at once, or all that wait if those are fewer."""
        num_ends = max(1, min(len(self._roster.waiting), self.config.max_num_seqs))
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self._finish_rate.seconds_per_finish * num_ends)))

    def explain(self, query: Query, now: float) -> Explanation:
        return explain(self._kv, query, now)

    def stats(self) -> SchedulerStats:
        return self._snapshots.take(generation_tokens=self._generation_tokens, recomputed_tokens=self._recomputed_tokens)

    def check(self) -> None:
        """Recompute every derived fact; raise AssertionError where one is wrong."""
        self._roster.check()
        self._kv.check(request.table for request in self._roster)
        assert len(self._planned) <= 2
        pending = [request for step in self._planned for request, row in zip(step.requests, step.plan.rows, strict=True) if row.sample]
        for request in self._roster:
            assert request.num_pending == sum(other is request for other in pending)
