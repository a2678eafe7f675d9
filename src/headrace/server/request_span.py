"""The span of one request, with its parts and what OpenTelemetry's conventions for generative AI say of it.

It begins where the request comes in (`request_log.py`) and is handed along as `scope["state"]["span"]`; None where the request isn't traced.
Names of attributes: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/. No text of a prompt or an answer is among them.
"""

from __future__ import annotations

import time
from collections.abc import Generator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.engine.wire import Timeline
from headrace.observe.tracing import Span, Tracing, Value
from headrace.server.trace_context import TraceContext, continued

if TYPE_CHECKING:
    from headrace.server.answer import Answer, Usage
    from headrace.server.parse import ParsedRequest
    from headrace.server.streaming import Send

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
MAX_TIMELINES = 16  # of the choices or texts of one request that are drawn
SAMPLING = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")


class _Extent:
    """A part that comes in many pieces: from the first one to the last, and how long the pieces took together."""

    def __init__(self) -> None:
        self.begin = self.end = self.seconds = 0.0
        self.count = 0

    def add(self, begin: float, end: float) -> None:
        self.begin = self.begin if self.count else begin
        self.end = end
        self.seconds += end - begin
        self.count += 1


class RequestSpan:
    """An `engine.timeline.Watcher`."""

    def __init__(self, span: Span, *, operation: str, model: str, arrival: float) -> None:
        self._span = span
        self._operation = operation
        self._arrival = arrival
        self._submitted: float | None = None  # all of it monotonic seconds
        self._num_timelines = 0
        self._text, self._writes = _Extent(), _Extent()
        self._num_bytes = 0
        self._error: str | None = None
        span.set({"gen_ai.operation.name": operation, "gen_ai.provider.name": "headrace", "gen_ai.request.model": model})

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self._span.child(name, begin, time.monotonic())

    def asks(self, request: ParsedRequest) -> None:
        """What is wanted. The request goes to the engine now."""
        params = request.prompts[0].params
        self._name(request.model)
        self._span.set({"gen_ai.request.stream": request.stream, "gen_ai.request.choice.count": request.n})
        given = {f"gen_ai.request.{name}": getattr(params, name) for name in ("max_tokens", *SAMPLING)}
        self._span.set({name: value for name, value in given.items() if value is not None})

    def asks_for_vectors(self, model: str, usage: Usage) -> None:
        self._name(model)
        self._span.set({"gen_ai.usage.input_tokens": usage.prompt_tokens})

    def _name(self, model: str) -> None:
        self._submitted = time.monotonic()
        self._span.rename(f"{self._operation} {model}")
        self._span.set({"gen_ai.request.model": model, "gen_ai.response.model": model})

    def answered(self, answer: Answer) -> None:
        """As far as it went."""
        usage = answer.usage
        told: dict[str, Value] = {
            "gen_ai.response.id": answer.answer_id,
            "gen_ai.response.finish_reasons": [reason or "error" for reason in answer.finish_reasons],
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        }
        if usage.reasoning_tokens is not None:
            told["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
        if answer.first_token_at is not None:
            told["gen_ai.latency.time_to_first_token"] = answer.first_token_at - self._arrival
        self._span.set(told)
        self._error = answer.error

    def detokenised(self, begin: float, end: float) -> None:
        self._text.add(begin, end)

    def computed(self, timeline: Timeline) -> None:
        self._num_timelines += 1
        if self._num_timelines > MAX_TIMELINES:
            self._span.set({"headrace.choices_left_out": self._num_timelines - MAX_TIMELINES})
            return
        choice = {"headrace.request_id": timeline.request_id}
        first = timeline.chunks[0].started if timeline.chunks else timeline.decode_begin
        submitted = self._arrival if self._submitted is None else self._submitted
        until = time.monotonic() if first is None else first
        self._span.child("queue", submitted, until, choice)
        if self._num_timelines == 1:
            self._span.set({"gen_ai.latency.time_in_queue": until - submitted})
        for chunk in timeline.chunks:
            place = {"headrace.position": chunk.start, "headrace.tokens": chunk.num_tokens}
            self._span.child("prefill", chunk.started, chunk.ended, choice | place)
        told: dict[str, Value] = {"headrace.prefill_chunks": timeline.num_chunks, "headrace.preemptions": timeline.num_preemptions}
        if timeline.decode_begin is not None and timeline.decode_end is not None:
            self._span.child("decode", timeline.decode_begin, timeline.decode_end, choice | told | {"headrace.steps": timeline.num_decode_steps})
        else:
            self._span.set(told)

    def counting(self, send: Send) -> Send:
        """`send`, with its time told as the part `write`."""

        async def timed(message: MutableMapping[str, Any]) -> None:
            begin = time.monotonic()
            try:
                await send(message)
            finally:
                self._writes.add(begin, time.monotonic())
                self._num_bytes += len(message.get("body", b""))

        return timed

    def ended(self, told: dict[str, Value], *, error: str | None = None) -> None:
        """`told`: the status that the protocol has for it, and more. `error`: its type, where there was one."""
        now = time.monotonic()
        if self._text.count:
            self._span.child("detokenize", self._text.begin, self._text.end, {"headrace.seconds": self._text.seconds})
        if self._writes.count:
            writes = {"headrace.seconds": self._writes.seconds, "headrace.writes": self._writes.count, "headrace.bytes": self._num_bytes}
            self._span.child("write", self._writes.begin, self._writes.end, writes)
        self._span.set(told | {"gen_ai.latency.e2e": now - self._arrival})
        self._span.end(now, error=error or self._error)


def begin(
    tracing: Tracing, name: str, *, operation: str, model: str, traceparent: list[str], tracestate: list[str], arrival: float
) -> tuple[TraceContext, RequestSpan | None]:
    """What the request's trace is called, and its span where it is sampled. The lists: values of the headers."""
    caller = continued(traceparent)
    parent = None if caller is None else (caller.trace_id, caller.parent_id, caller.sampled)
    span = tracing.begin(name, at=arrival, parent=parent, state=tracestate)
    context = TraceContext(trace_id=span.trace_id, span_id=span.span_id, parent_id="" if caller is None else caller.parent_id, sampled=span.sampled)
    return context, RequestSpan(span, operation=operation, model=model, arrival=arrival) if span.sampled else None
