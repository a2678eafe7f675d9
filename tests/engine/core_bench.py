"""The engine's loop in a thread: a scheduler that only counts, and a runner that tests hold and let go."""

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from headrace.core.messages import AbortRequest, AddRequest, Row, SampledRow, SchedulerStats, StepPlan, StepResult, TokenOutput
from headrace.core.step_tokens import StepTokens
from headrace.engine.engine_core import EngineCore
from headrace.engine.wire import Add, Heartbeat, Outputs, Shutdown
from headrace.sampling_params import SamplingParams
from tests.patience import LIMIT_S


class CountingScheduler:
    """Gives each request one row a step until it has had max_tokens of them. `log` holds what was called, in order."""

    def __init__(self, *, queue_size: int = 100) -> None:
        self.queue_size = queue_size
        self.left: dict[str, int] = {}  # rows still to be planned
        self.open: dict[str, int] = {}  # tokens still to be emitted
        self.outstanding: list[StepPlan] = []
        self.steps = 0
        self.log: list[str] = []
        self.unsent: list[TokenOutput] = []  # ended by plan
        self.step_tokens = StepTokens()

    def add(self, message: AddRequest, now: float) -> TokenOutput | None:
        if len(self.open) >= self.queue_size:
            return TokenOutput(request_id=message.request_id, finish_reason="error", error_code="queue_full", error_message="full")
        self.left[message.request_id] = self.open[message.request_id] = message.params.max_tokens or 0
        return None

    def abort(self, message: AbortRequest) -> TokenOutput | None:
        self.log.append(f"abort {message.request_id}")
        self.left.pop(message.request_id, None)
        if self.open.pop(message.request_id, None) is None:
            return None
        return TokenOutput(request_id=message.request_id, finish_reason=message.reason)

    def plan(self, now: float) -> StepPlan | None:
        late = [name for name in self.left if name.startswith("late")]
        for name in late:
            del self.left[name], self.open[name]
        self.unsent += [TokenOutput(request_id=name, finish_reason="error", error_code="deadline_exceeded") for name in late]
        names = [name for name, left in self.left.items() if left]
        if not names:
            return None
        assert len(self.outstanding) < 2
        self.steps += 1
        self.log.append(f"plan {self.steps}")
        for name in names:
            self.left[name] -= 1
        rows = tuple(
            Row(request_id=name, slot=0, start=0, num_tokens=1, token_ids=(), block_offset=0, new_block_ids=(), sample=True) for name in names
        )
        plan = StepPlan(step_id=self.steps, rows=rows)
        self.outstanding.append(plan)
        return plan

    def update(self, result: StepResult, now: float) -> list[TokenOutput]:
        self.log.append(f"update {result.step_id}")
        plan = self.outstanding.pop(0)
        assert plan.step_id == result.step_id
        self.step_tokens = StepTokens(useful=plan.num_tokens)
        outputs = []
        for row in result.rows:
            if row.request_id in self.open:
                self.open[row.request_id] -= 1
                done = self.open[row.request_id] == 0
                outputs.append(TokenOutput(request_id=row.request_id, token_ids=row.token_ids, finish_reason="length" if done else None))
                if done:
                    del self.open[row.request_id]
        return outputs

    def fail_step(self, plan: StepPlan, message: str) -> list[TokenOutput]:
        self.log.append(f"fail {plan.step_id}")
        self.outstanding.remove(plan)
        names = [row.request_id for row in plan.rows if self.open.pop(row.request_id, None) is not None]
        for name in names:
            del self.left[name]
        return [TokenOutput(request_id=name, finish_reason="error", error_code="request_failed", error_message=message) for name in names]

    def take_outputs(self) -> list[TokenOutput]:
        outputs, self.unsent = self.unsent, []
        return outputs

    def retry_after(self) -> int:
        return 7

    def has_work(self) -> bool:
        return bool(self.open or self.unsent)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(**dict.fromkeys(SchedulerStats.__slots__, 0) | {"num_running": len(self.open)})


class HeldRunner:
    """Runs a step when the test lets one go; all at once if it is not held."""

    def __init__(self, *, held: bool = False) -> None:
        self.permits = threading.Semaphore(0)
        self.held = held
        self.begun: list[int] = []
        self.errors: dict[int, BaseException] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self.begun.append(plan.step_id)
        if self.held:
            assert self.permits.acquire(timeout=LIMIT_S)
        if plan.step_id in self.errors:
            raise self.errors[plan.step_id]
        rows = tuple(SampledRow(request_id=row.request_id, token_ids=(plan.step_id,)) for row in plan.rows)
        return StepResult(step_id=plan.step_id, rows=rows, seconds=0.0)


class WatchedInbox(queue.SimpleQueue):
    """Knows whether the loop waits for a message without an end."""

    resting = False

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        self.resting = timeout is None
        message = super().get(block, timeout)
        self.resting = False
        return message


class Bench:
    """A core in a thread, and what it emitted. `ahead`: seconds by which its clock is ahead."""

    def __init__(self, scheduler: CountingScheduler, runner: HeldRunner, *, async_scheduling: bool) -> None:
        self.scheduler, self.runner = scheduler, runner
        self.inbox = WatchedInbox()
        self.ahead = 0.0
        self.emitted: list[Outputs | Heartbeat] = []
        self.error: BaseException | None = None
        self.rests: list[int] = []  # steps before each
        self.core = EngineCore(
            runner,
            scheduler,
            self.emitted.append,
            async_scheduling=async_scheduling,
            clock=lambda: time.monotonic() + self.ahead,
            inbox=self.inbox,
            at_rest=lambda: self.rests.append(len(self.runner.begun)),
        )
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.core.run()
        except BaseException as error:
            self.error = error

    def add(self, name: str, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.core.post(Add(AddRequest(request_id=name, prompt_token_ids=(1,), params=params, arrival=0.0)))

    def outputs(self) -> list[TokenOutput]:
        return [output for message in list(self.emitted) if isinstance(message, Outputs) for output in message.outputs]

    def ends(self) -> dict[str, str]:
        return {output.request_id: output.finish_reason for output in self.outputs() if output.finish_reason}

    def heartbeats(self) -> list[Heartbeat]:
        return [message for message in list(self.emitted) if isinstance(message, Heartbeat)]


@contextmanager
def running(
    first: Mapping[str, int] = MappingProxyType({}), *, held: bool = False, async_scheduling: bool = True, queue_size: int = 100
) -> Iterator[Bench]:
    """`first`: names and lengths of requests that are there when the loop begins."""
    bench = Bench(CountingScheduler(queue_size=queue_size), HeldRunner(held=held), async_scheduling=async_scheduling)
    for name, max_tokens in first.items():
        bench.add(name, max_tokens)
    bench.thread.start()
    try:
        yield bench
    finally:
        bench.runner.permits.release(1000)
        bench.core.post(Shutdown())
        bench.thread.join(LIMIT_S)
        assert not bench.thread.is_alive()
