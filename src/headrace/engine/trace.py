"""What happened in an engine during a few seconds: steps, their rows, and what became of the requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.core.messages import AddRequest, TokenOutput
from headrace.engine.wire import StepTrace

MAX_ROWS = 200_000  # of all steps together; a trace ends early where there are more


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
