"""The loop that turns the wheel: drain the inbox, plan, execute, update, emit.

Three threads meet here. The *caller's* thread runs `run()` and alone touches the scheduler. The *runner's* thread executes plans one after
the other and alone touches the runner. Any thread may `post()`. Requests and finished steps arrive in one queue, so the loop sleeps until
there is something to do and never polls.

With async scheduling, step n+1 is planned while step n runs, and handed to the runner the moment step n ends: bookkeeping, detokenising
and sockets all happen in the shadow of a running step. With it off, step n+1 is planned when the tokens of step n are known.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.config import CompileStatus
from headrace.core.explain import Explanation, Query
from headrace.core.messages import AbortRequest, AddRequest, Kernel, SchedulerStats, StepPlan, StepResult, TokenOutput
from headrace.core.step_tokens import StepTokens
from headrace.engine.kernel_recorder import KernelRecorder
from headrace.engine.timeline import Timelines
from headrace.engine.wire import Abort, Add, Explain, Explained, FromEngine, Heartbeat, Outputs, Record, Shutdown, StepTrace, TracedRow
from headrace.observe.work import WorkLedger

MAX_FAILED_STEPS = 3  # in a row; after so many the process is assumed to be broken
HEARTBEAT_S = 0.25
REST_S = 5.0  # without work, after which the engine is at rest

logger = logging.getLogger("headrace.engine")


class SchedulerLike(Protocol):
    """What the loop needs of `core.scheduler.Scheduler`; see docs there."""

    step_tokens: StepTokens

    def add(self, message: AddRequest, now: float) -> TokenOutput | None: ...
    def abort(self, message: AbortRequest) -> TokenOutput | None: ...
    def plan(self, now: float) -> StepPlan | None: ...
    def update(self, result: StepResult, now: float) -> list[TokenOutput]: ...
    def fail_step(self, plan: StepPlan, message: str) -> list[TokenOutput]: ...
    def take_outputs(self) -> list[TokenOutput]: ...
    def retry_after(self) -> int: ...
    def stats(self) -> SchedulerStats: ...
    def explain(self, query: Query, now: float) -> Explanation: ...
    def has_work(self) -> bool: ...


class RunnerLike(Protocol):
    def execute(self, plan: StepPlan) -> StepResult: ...
    def start_profile(self) -> None: ...
    def stop_profile(self) -> Callable[[], tuple[Kernel, ...]]: ...


def debugging() -> bool:
    """Whether the user wants tracebacks in the log."""
    return os.environ.get("HEADRACE_DEBUG") == "1"


class EngineBroken(Exception):
    """Steps fail one after the other: only a new process can help."""


@dataclass(frozen=True, slots=True)
class News:
    """Something outside of the loop has changed that a heartbeat tells of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepDone:
    outcome: StepResult | BaseException  # an exception: the step raised it


Inbound = Add | Abort | Shutdown | Explain | Record | News | _StepDone


class EngineCore:
    """One scheduler and one runner, turned until `Shutdown` is posted.

    `emit` receives what goes to the client; it must not block. `inbox` may be filled before the core exists. `compile_status` is asked for each
    heartbeat. `at_rest` is called once when there has been nothing to do for `REST_S` after some steps. `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        runner: RunnerLike,
        scheduler: SchedulerLike,
        emit: Callable[[FromEngine], None],
        *,
        inbox: queue.SimpleQueue[Inbound] | None = None,
        async_scheduling: bool = True,
        compile_status: Callable[[], CompileStatus] | None = None,
        at_rest: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._emit = emit
        self._async_scheduling = async_scheduling
        self._compile_status = compile_status
        self._at_rest = at_rest
        self._clock = clock
        self._inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue() if inbox is None else inbox
        self._plans: queue.SimpleQueue[StepPlan | Record | None] = queue.SimpleQueue()
        self._kernels = KernelRecorder(runner, emit)
        self._running: StepPlan | None = None  # handed to the runner, not yet done
        self._ahead: StepPlan | None = None  # planned, runs next
        self._step_started: float | None = None
        self._outputs: list[TokenOutput] = []  # collected for one frame
        self._stopping = False
        self._failed_steps = 0  # in a row
        self._steps_total = 0
        self._step_seconds_total = 0.0
        self._ledger = WorkLedger(clock())
        self._last_heartbeat = float("-inf")
        self._stale = True  # something has happened since the last heartbeat
        self._rested = True  # no step since the engine was at rest
        self._recorded_until = float("-inf")  # steps that start before are told one by one
        self._timelines = Timelines()
        self._planned_at: dict[int, tuple[float, float]] = {}  # begin and end of planning, by step, of plans not done

    def post(self, message: Add | Abort | Shutdown | Explain | Record | News) -> None:
        """Leaves a message for the loop; from any thread."""
        self._inbox.put(message)

    def run(self) -> None:
        """Turns until `Shutdown`, then returns once the running step has ended.

        Raises `EngineBroken` when steps keep failing, and whatever the scheduler raises: its state is then unknown.
        """
        thread = threading.Thread(target=self._run_plans, name="runner", daemon=True)
        thread.start()
        try:
            while not (self._stopping and self._running is None):
                self._drain_inbox()
                self._flush_outputs()
                self._turn()
                self._flush_outputs()  # what planning ended
                self._beat()
        finally:
            self._plans.put(None)
        thread.join()

    def abandon_plan(self) -> None:
        """After `run`: what a plan that was made ahead and never ran should have written must not be taken for content."""
        if self._ahead is not None:
            self._scheduler.fail_step(self._ahead, "The engine ended before this step.")
            self._ahead = None

    def _run_plans(self) -> None:
        """Body of the runner's thread."""
        while (plan := self._plans.get()) is not None:
            if isinstance(plan, Record):
                self._kernels.record(plan)
                continue
            try:
                outcome: StepResult | BaseException = self._runner.execute(plan)
            except BaseException as error:  # also SystemExit, which would end this thread in silence
                outcome = error
            self._inbox.put(_StepDone(outcome=outcome))

    def _drain_inbox(self) -> None:
        """Handles all that has arrived; sleeps for the first message if there is nothing else to do."""
        try:
            message = self._wait_for_message()
            while True:
                self._handle(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _wait_for_message(self) -> Inbound:
        """The next message; raises `queue.Empty` where a heartbeat is due before there is one, or the engine has come to rest."""
        idle, since = self._idle(), self._clock()
        if idle:
            timeout = None if self._rested else REST_S
        else:
            timeout = max(self._last_heartbeat + HEARTBEAT_S - since, 0.0)
        if self._running is not None:
            return self._inbox.get(timeout=timeout)
        self._ledger.pass_between("host", since)
        try:
            return self._inbox.get(timeout=timeout)
        except queue.Empty:
            if idle:
                self._rested = True
                self._at_rest()
            raise
        finally:
            self._ledger.pass_between("idle" if idle else "waiting", self._clock())

    def _idle(self) -> bool:
        return self._running is None and not self._scheduler.has_work()

    def _handle(self, message: Inbound) -> None:
        self._stale = True
        match message:
            case Add(request):
                self._timelines.add_request(request)
                output = self._scheduler.add(request, self._clock())
            case Abort(request):
                output = self._scheduler.abort(request)
            case _StepDone():
                self._finish_step(message)
                return
            case News():
                return
            case Shutdown():
                self._stopping = True
                return
            case Record(until=until):
                self._recorded_until = until
                self._plans.put(message)
                return
            case Explain(query):
                self._emit(Explained(self._scheduler.explain(query, self._clock())))
                return
        if output is not None:
            self._outputs.append(output)

    def _turn(self) -> None:
        """Gives the runner its next plan and plans one ahead."""
        if self._stopping:
            return
        if self._running is None:
            plan = self._ahead or self._plan()
            self._ahead = None
            if plan is not None:
                self._start(plan)
        if self._running is not None and self._async_scheduling and self._ahead is None:
            self._ahead = self._plan()

    def _plan(self) -> StepPlan | None:
        begin = self._clock()
        plan = self._scheduler.plan(begin)
        self._outputs += self._scheduler.take_outputs()
        if plan is not None:
            self._planned_at[plan.step_id] = (begin, self._clock())
        return plan

    def _start(self, plan: StepPlan) -> None:
        self._running = plan
        self._rested = False
        self._step_started = self._clock()
        self._ledger.pass_between("host", self._step_started)
        self._plans.put(plan)

    def _finish_step(self, done: _StepDone) -> None:
        plan, started = self._running, self._step_started
        assert plan is not None
        assert started is not None
        self._running = self._step_started = None
        planned = self._planned_at.pop(plan.step_id)
        now = self._clock()
        seconds = self._ledger.lap(now)
        self._steps_total += 1
        self._step_seconds_total += now - started
        result = done.outcome
        if isinstance(result, BaseException):
            self._ledger.add_step(seconds, path="ready", model_seconds=seconds, tokens={"discarded": plan.num_tokens})
            self._fail_step(plan, result)
            return
        self._failed_steps = 0
        if self._ahead is not None and not self._stopping:  # first keep the runner busy, then do the books
            self._start(self._ahead)
            self._ahead = None
        self._outputs += self._scheduler.update(result, now)
        self._timelines.add_step(plan, started, now)
        if started < self._recorded_until:
            self._emit(self._trace_of(plan, result, planned, started=started, ended=now))
        tokens = self._scheduler.step_tokens
        self._ledger.add_step(
            seconds,
            path=result.path,
            model_seconds=result.model_seconds,
            compiled=result.compiled,
            tokens={
                "useful": tokens.useful,
                "padding": result.padded_tokens,
                "recompute": tokens.recompute,
                "speculation": tokens.speculation,
                "discarded": tokens.discarded,
            },
        )

    def _trace_of(self, plan: StepPlan, result: StepResult, planned: tuple[float, float], *, started: float, ended: float) -> StepTrace:
        rows = tuple(
            TracedRow(row.request_id, row.start, row.num_tokens, row.num_speculated, row.sample and row.num_tokens == 1 + row.num_speculated)
            for row in plan.rows
        )
        return StepTrace(plan.step_id, *planned, started, ended, self._clock(), result.model_seconds, result.path, result.padded_tokens, rows)

    def _fail_step(self, plan: StepPlan, error: BaseException) -> None:
        """Ends the requests of a step that raised, and of the one planned behind it: that counts on tokens and blocks which never came."""
        reason = f"{type(error).__name__}: {error}"
        message = f"The step that computed this request failed: {reason}"
        logger.error("step %d of %d rows failed: %s", plan.step_id, len(plan.rows), reason, exc_info=error if debugging() else None)
        self._outputs += self._scheduler.fail_step(plan, message)
        if self._ahead is not None:
            self._outputs += self._scheduler.fail_step(self._ahead, message)
            self._planned_at.pop(self._ahead.step_id)
            self._ahead = None
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            self._flush_outputs()
            raise EngineBroken(f"{self._failed_steps} steps in a row failed, the last one with {reason}") from error

    def _flush_outputs(self) -> None:
        if not self._outputs:
            return
        for timeline in self._timelines.take(self._outputs):
            self._emit(timeline)
        refused = any(output.error_code == "queue_full" for output in self._outputs)
        self._emit(Outputs(tuple(self._outputs), self._scheduler.retry_after() if refused else None))
        self._outputs.clear()

    def _beat(self) -> None:
        """Tells the client how things stand: at most every HEARTBEAT_S while steps run, and once when they stop."""
        now = self._clock()
        due = self._stale if self._idle() else now >= self._last_heartbeat + HEARTBEAT_S
        if not due:
            return
        status = None if self._compile_status is None else self._compile_status()
        if self._running is None:
            self._ledger.pass_between("host", now)
        self._emit(
            Heartbeat(self._scheduler.stats(), self._step_started, self._steps_total, self._step_seconds_total, now, self._ledger.snapshot(), status)
        )
        self._last_heartbeat = now
        self._stale = False
