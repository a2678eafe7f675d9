"""What a traced request went through in the engine: the chunks of its prompt and its decode steps, told in one message at its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from headrace.core.messages import AddRequest, StepPlan, TokenOutput
from headrace.engine.wire import Chunk, Timeline

MAX_CHUNKS = 64  # of a request that are told one by one


class Watcher(Protocol):
    """Told what becomes of one request that is traced. Called on the event loop; must not block and must not raise."""

    def detokenised(self, begin: float, end: float) -> None:
        """Tokens became text in this time (monotonic seconds)."""

    def computed(self, timeline: Timeline) -> None:
        """All that the engine did for one choice. Comes before its last output, or never where the engine dies."""


@dataclass(slots=True)
class _Gathered:
    num_prompt_tokens: int
    chunks: list[Chunk] = field(default_factory=list)
    num_chunks: int = 0
    decode_begin: float | None = None
    decode_end: float | None = None
    num_decode_steps: int = 0


class Timelines:
    """Of the requests in the engine that are traced. Costs nothing while there are none."""

    def __init__(self) -> None:
        self._open: dict[str, _Gathered] = {}

    def add_request(self, request: AddRequest) -> None:
        if request.traced:
            self._open[request.request_id] = _Gathered(len(request.prompt_token_ids))

    def add_step(self, plan: StepPlan, started: float, ended: float) -> None:
        """A step that has ended well; times are monotonic seconds."""
        if not self._open:
            return
        for row in plan.rows:
            gathered = self._open.get(row.request_id)
            if gathered is None:
                continue
            if row.sample and row.start >= gathered.num_prompt_tokens and row.num_tokens == 1 + row.num_speculated:
                gathered.decode_begin = started if gathered.decode_begin is None else gathered.decode_begin
                gathered.decode_end = ended
                gathered.num_decode_steps += 1
            else:
                gathered.num_chunks += 1
                if len(gathered.chunks) < MAX_CHUNKS:
                    gathered.chunks.append(Chunk(started, ended, row.start, row.num_tokens))

    def take(self, outputs: Iterable[TokenOutput]) -> list[Timeline]:
        """Of the requests that end with these outputs."""
        if not self._open:
            return []
        return [
            Timeline(
                output.request_id,
                tuple(gathered.chunks),
                gathered.num_chunks,
                gathered.decode_begin,
                gathered.decode_end,
                gathered.num_decode_steps,
                output.num_preemptions,
            )
            for output in outputs
            if output.finish_reason is not None and (gathered := self._open.pop(output.request_id, None)) is not None
        ]
