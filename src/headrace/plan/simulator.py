"""One engine without a model: the scheduler itself, a clock that jumps, and a step-cost model in the runner's place.

The loop does what `engine.engine_core` does, in its order: when a step ends, the one that was planned ahead starts at once, then the result is
taken in, then the next one is planned. So a request that comes while a step runs waits for that one and, if there is one, for the step that is
planned already.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.bench.traces import TracedRequest
from headrace.config import SchedulerConfig
from headrace.core.messages import AddRequest, SampledRow, StepPlan, StepResult, TokenOutput
from headrace.core.scheduler import Scheduler
from headrace.plan.costs import Costs, Sample
from headrace.sampling_params import SamplingParams

TOKEN = 0  # every answer consists of it


def _never(idle: float) -> float:
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """What lies around the engine and between its steps, in seconds."""

    handoff: float = 0.0  # from the end of a step to the start of the next one
    before: float = 0.0  # from sending a request to the engine's inbox, without
    before_token: float = 0.0  # for each token of its prompt
    after: float = 0.0  # from the end of a step to the client that reads its token
    cold: Callable[[float], float] = _never  # that a step takes more after so many without one


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a request. Times are seconds from the trace's begin, where the client is."""

    sent: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first: float | None = None
    last: float | None = None
    longest_gap: float = 0.0
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


@dataclass(slots=True, kw_only=True)
class Replay:
    """One engine's part of a trace."""

    outcomes: list[Outcome]  # in the order of the requests
    gaps: array[float] = field(default_factory=lambda: array("d"))  # between tokens, of all requests
    steps: int = 0
    busy: float = 0.0  # seconds in steps
    end: float = 0.0  # of the last step
    step_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    num_blocks: int = 0
    peak_blocks: int = 0  # held by requests
    block_seconds: float = 0.0  # integral of the blocks held over the time in steps


class Overrun(Exception):
    """A watch has seen enough."""


class Watch:
    """Looks on; what it raises ends the replay."""

    def first_token(self, outcome: Outcome) -> None:
        pass

    def end(self, outcome: Outcome) -> None:
        pass


class Prompts:
    """Token ids for prompts of which only the lengths and what they share are known."""

    def __init__(self, *, distinct: bool) -> None:
        self._distinct = distinct  # else all consist of one token: no prefix cache looks at them
        self._plain: dict[int, tuple[int, ...]] = {}
        self._begins: dict[str, int] = {}
        self._next = TOKEN + 1

    def __call__(self, request: TracedRequest) -> tuple[int, ...]:
        if not self._distinct:
            count = request.num_prompt_tokens
            return self._plain.setdefault(count, (TOKEN,) * count)
        shared: Sequence[int] = ()
        if request.prefix is not None:
            begin = self._begins.setdefault(request.prefix, 1 + (len(self._begins) << 40) + (1 << 60))
            shared = range(begin, begin + request.num_prefix_tokens)
        own = request.num_prompt_tokens - request.num_prefix_tokens
        self._next += own
        return (*shared, *range(self._next - own, self._next))


class SimulatedEngine:
    """`known`: steps that the scheduler has learned from before, the latest last: how large it makes steps depends on what it thinks they take."""

    def __init__(
        self,
        config: SchedulerConfig,
        costs: Costs,
        delays: Delays,
        *,
        async_scheduling: bool = True,
        watch: Watch | None = None,
        known: Sequence[Sample] = (),
    ) -> None:
        self._scheduler = Scheduler(config)
        for sample in known:
            self._scheduler.step_time.observe(sample.work, seconds=sample.seconds)
        self._costs = costs
        self._delays = delays
        self._async_scheduling = async_scheduling
        self._watch = Watch() if watch is None else watch
        self._prompts = Prompts(distinct=config.enable_prefix_caching)
        self._params: dict[int, SamplingParams] = {}
        self._open: dict[str, Outcome] = {}
        self._rows: dict[str, tuple[SampledRow, SampledRow]] = {}  # by request: without a token, with one
        self._running: StepPlan | None = None
        self._ahead: StepPlan | None = None
        self._seconds = 0.0  # that the running step takes
        self._end = math.inf  # of the running step
        self._ended = 0.0  # the last one
        self._blocks = 0  # held while it runs

    def run(self, requests: Sequence[TracedRequest]) -> Replay:
        """Replays requests, which come in the order of their arrivals."""
        scheduler, delays = self._scheduler, self._delays
        replay = Replay(outcomes=[], num_blocks=scheduler.kv.pool.num_blocks)
        arrivals = [request.arrival + delays.before + delays.before_token * request.num_prompt_tokens for request in requests]
        order = sorted(range(len(requests)), key=arrivals.__getitem__)
        replay.outcomes = [Outcome(sent=request.arrival, num_prompt_tokens=request.num_prompt_tokens) for request in requests]
        i, count = 0, len(order)
        while True:
            arrival = arrivals[order[i]] if i < count else math.inf
            if self._running is not None and self._end <= arrival:
                now = self._end
                self._finish(now, replay)
            elif i < count:
                now = arrival
            else:
                assert not scheduler.has_work(), "there is work that no step does"
                break
            while i < count and arrivals[order[i]] <= now:
                self._add(requests[order[i]], replay.outcomes[order[i]], f"r{order[i]}", now)
                i += 1
            self._turn(now, replay)
        stats = scheduler.stats()
        replay.recomputed_tokens = stats.recomputed_tokens_total
        replay.preemptions = stats.preemptions_recompute_total + stats.preemptions_swap_total
        return replay

    def _add(self, request: TracedRequest, outcome: Outcome, name: str, now: float) -> None:
        count = request.num_output_tokens
        params = self._params.get(count)
        if params is None:
            params = self._params[count] = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        self._open[name] = outcome
        self._rows[name] = (SampledRow(request_id=name), SampledRow(request_id=name, token_ids=(TOKEN,)))
        message = AddRequest(request_id=name, prompt_token_ids=self._prompts(request), params=params, arrival=now, tenant=request.tenant)
        refused = self._scheduler.add(message, now)
        if refused is not None:
            self._close(refused, now)

    def _turn(self, now: float, replay: Replay) -> None:
        if self._running is None:
            plan = self._ahead or self._plan(now)
            self._ahead = None
            if plan is not None:
                self._start(plan, now, replay)
        if self._running is not None and self._async_scheduling and self._ahead is None:
            self._ahead = self._plan(now)

    def _plan(self, now: float) -> StepPlan | None:
        plan = self._scheduler.plan(now)
        for output in self._scheduler.take_outputs():
            self._close(output, now)
        return plan

    def _start(self, plan: StepPlan, now: float, replay: Replay) -> None:
        self._running = plan
        self._seconds = self._costs.seconds(plan.work)
        if self._ended < now:
            self._seconds += self._delays.cold(now - self._ended)
        self._end = now + self._delays.handoff + self._seconds
        replay.steps += 1
        replay.step_tokens += plan.work.tokens
        replay.busy += self._seconds

    def _finish(self, now: float, replay: Replay) -> None:
        plan, seconds = self._running, self._seconds
        assert plan is not None
        pool = self._scheduler.kv.pool
        held = pool.num_blocks - pool.num_free
        replay.peak_blocks = max(replay.peak_blocks, held)
        replay.block_seconds += held * seconds
        replay.end = now
        self._running, self._ended = None, now
        if self._ahead is not None:  # first keep the runner busy, then do the books
            ahead, self._ahead = self._ahead, None
            self._start(ahead, now, replay)
        known = self._rows
        rows = tuple([known[row.request_id][row.sample] for row in plan.rows])
        outputs = self._scheduler.update(StepResult(step_id=plan.step_id, rows=rows, seconds=seconds, model_seconds=seconds), now)
        arrived, gaps = now + self._delays.after, replay.gaps
        for output in outputs:
            outcome = self._open[output.request_id]
            if output.token_ids:
                outcome.num_output_tokens += 1
                if outcome.last is None:
                    outcome.first = outcome.last = arrived
                    outcome.num_cached_tokens = output.cached_tokens or 0
                    self._watch.first_token(outcome)
                else:
                    gap = arrived - outcome.last
                    gaps.append(gap)
                    if gap > outcome.longest_gap:
                        outcome.longest_gap = gap
                    outcome.last = arrived
            if output.finish_reason is not None:
                self._close(output, now)

    def _close(self, output: TokenOutput, now: float) -> None:
        outcome = self._open.pop(output.request_id)
        outcome.num_preemptions = output.num_preemptions
        if output.finish_reason == "error":
            outcome.error = output.error_code or "error"
        self._watch.end(outcome)
