"""What happened in an engine during a few seconds: steps, their rows and kernels, and what became of the requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.core.messages import AddRequest, Kernel, TokenOutput
from headrace.engine.wire import Kernels, Record, StepTrace
from headrace.errors import QueueFull, RequestFailed

MAX_ROWS = 200_000  # of all steps together; a trace ends early where there are more
KERNELS_S = 60.0  # to get them from the engine


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedOutput:
    """An output as the client received it."""

    request_id: str
    at: float
    num_tokens: int
    finish_reason: str | None


@dataclass(slots=True)
class Trace:
    """Times are seconds on the machine's monotonic clock. Filled by the client while it is recorded."""

    begin: float
    end: float
    max_rows: int = MAX_ROWS
    steps: list[StepTrace] = field(default_factory=list)
    arrivals: dict[str, float] = field(default_factory=dict)  # of requests that came while it was recorded
    outputs: list[TracedOutput] = field(default_factory=list)
    kernels: tuple[Kernel, ...] | None = None  # None: not asked for
    num_rows: int = 0

    @property
    def is_full(self) -> bool:
        return self.num_rows >= self.max_rows

    def add_request(self, request: AddRequest) -> None:
        if not self.is_full:
            self.arrivals[request.request_id] = request.arrival

    def add_step(self, step: StepTrace) -> None:
        if not self.is_full:
            self.num_rows += len(step.rows)
            self.steps.append(step)

    def add_output(self, output: TokenOutput, now: float) -> None:
        if not self.is_full:
            traced = TracedOutput(request_id=output.request_id, at=now, num_tokens=len(output.token_ids), finish_reason=output.finish_reason)
            self.outputs.append(traced)


class TraceRecorder:
    """The client's part: records one trace at a time."""

    def __init__(self) -> None:
        self._trace: Trace | None = None
        self._kernels: asyncio.Future[Kernels] | None = None  # of the trace whose kernels are waited for

    async def record(self, seconds: float, send: Callable[[Record], None], *, kernels: bool) -> Trace:
        """From now on for so long. Raises `QueueFull` while another trace is recorded; with kernels `RequestFailed`."""
        now = time.monotonic()
        if self._trace is not None:
            raise QueueFull("Another trace is being recorded.", retry_after=math.ceil(max(1.0, self._trace.end - now)))
        trace = self._trace = Trace(begin=now, end=now + seconds)
        if kernels:
            self._kernels = asyncio.get_running_loop().create_future()
        try:
            try:
                send(Record(trace.end, kernels))
                await asyncio.sleep(seconds)
            finally:
                if kernels:
                    send(Record(0.0))
            if self._kernels is not None:
                trace.kernels = await self._received(self._kernels)
        finally:
            self._trace = self._kernels = None
        return trace

    @staticmethod
    async def _received(kernels: asyncio.Future[Kernels]) -> tuple[Kernel, ...]:
        try:
            message = await asyncio.wait_for(kernels, KERNELS_S)
        except TimeoutError:
            raise RequestFailed("The engine did not tell its kernels in time; try fewer seconds.") from None
        if message.error is not None:
            raise RequestFailed(f"Kernels cannot be recorded here: {message.error}")
        return message.kernels

    def add_request(self, request: AddRequest) -> None:
        if self._trace is not None:
            self._trace.add_request(request)

    def add_step(self, step: StepTrace) -> None:
        if self._trace is not None:
            self._trace.add_step(step)

    def add_output(self, output: TokenOutput, now: float) -> None:
        if self._trace is not None:
            self._trace.add_output(output, now)

    def add_kernels(self, message: Kernels) -> None:
        if self._kernels is not None and not self._kernels.done():
            self._kernels.set_result(message)
