"""The real engine loop under a clock that stands still while the loop works: what the simulation must agree with, to the last bit."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from headrace.bench.traces import TracedRequest
from headrace.config import EngineConfig, SchedulerConfig
from headrace.core.messages import AddRequest, StepPlan, StepResult
from headrace.core.scheduler import Scheduler
from headrace.engine.engine_core import EngineCore
from headrace.engine.wire import Add, Outputs, Shutdown
from headrace.plan.costs import Costs
from headrace.plan.simulator import Prompts
from headrace.runner.fake import FakeRunner, FakeScript
from headrace.sampling_params import SamplingParams
from tests.patience import LIMIT_S

VOCABULARY = 1000
PAUSE_S = 0.001  # between two looks at whether all have ended


class QuietInbox(queue.SimpleQueue):  # type: ignore[type-arg]
    """Knows when the loop waits for a message and there is none."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting = False

    def put(self, item: object, block: bool = True, timeout: float | None = None) -> None:
        with self.changed:
            self.waiting = False
            super().put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        with self.changed:
            try:
                return super().get(block=False)
            except queue.Empty:
                if not block:
                    raise
                self.waiting = True
                self.changed.notify_all()
        return super().get(timeout=timeout)

    def wait_until_quiet(self) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.waiting, LIMIT_S)


class VirtualCore:
    """Replays requests; `tokens[i]`: when the tokens of request i came."""

    def __init__(self, config: SchedulerConfig, costs: Costs, requests: Sequence[TracedRequest], *, async_scheduling: bool) -> None:
        self.now = 0.0
        self.inbox = QuietInbox()
        self.costs = costs
        self.tokens: list[list[float]] = [[] for _ in requests]
        self.running = threading.Event()
        prompts = Prompts(distinct=True)
        self.left = [self._add(i, request, prompts(request)) for i, request in enumerate(requests)]
        self.ends = 0
        script = FakeScript(vocab_size=VOCABULARY, eos_every=0)
        engine = EngineConfig(
            model="fake",
            block_size=config.block_size,
            num_gpu_blocks_override=config.num_blocks,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self.runner = FakeRunner(engine, script)
        self.scheduler = Scheduler(config)
        self.core = EngineCore(self, self.scheduler, self._emit, inbox=self.inbox, async_scheduling=async_scheduling, clock=lambda: self.now)

    def _add(self, number: int, request: TracedRequest, prompt: tuple[int, ...]) -> tuple[float, Add]:
        params = SamplingParams(temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True)
        message = AddRequest(request_id=str(number), prompt_token_ids=prompt, params=params, arrival=request.arrival, tenant=request.tenant)
        return request.arrival, Add(message)

    def _emit(self, message: Any) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                assert output.error_code is None, output.error_message
                self.tokens[int(output.request_id)] += [self.now] * len(output.token_ids)
                self.ends += output.finish_reason is not None

    def execute(self, plan: StepPlan) -> StepResult:
        """Of the runner, in its thread: time goes on only where the loop has nothing to do."""
        self.running.set()
        self.inbox.wait_until_quiet()
        seconds = self.costs.seconds(plan.work)
        end = self.now + seconds
        self._let_come(end)
        result = self.runner.execute(plan)
        self.now = end
        self.running.clear()
        return dataclasses.replace(result, seconds=seconds, model_seconds=seconds)

    def _let_come(self, until: float) -> None:
        while self.left and self.left[0][0] < until:
            self.now, message = self.left.pop(0)
            self.core.post(message)
            self.inbox.wait_until_quiet()

    def run(self) -> list[list[float]]:
        thread = threading.Thread(target=self.core.run)
        thread.start()
        try:
            while self.ends < len(self.tokens):
                self.inbox.wait_until_quiet()
                if not self.running.is_set() and not self.scheduler.has_work() and self.left:
                    self._let_come(self.left[0][0] + 1e-9)
                time.sleep(PAUSE_S)
        finally:
            self.core.post(Shutdown())
            thread.join(LIMIT_S)
        assert not thread.is_alive()
        return self.tokens
