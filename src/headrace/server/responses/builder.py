"""One response in the making: pieces of the answer in, documented events out, the whole response at the end.

A plain answer is made by the same code, without its events: that is why a stream, put together, equals it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.errors import InvalidRequest, QueueFull, RequestError
from headrace.server.answer import Piece, Usage
from headrace.server.responses.items import new_id
from headrace.text.answer_events import ContentText, Event, ReasoningText, ToolCallArguments, ToolCallBegin

EventBody = dict[str, Any]
Kind = Literal["message", "reasoning", "function_call"]

PREFIXES: dict[Kind, str] = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


@dataclass(slots=True, kw_only=True)
class _OpenItem:
    """The item that the answer is at."""

    kind: Kind
    id: str
    call_id: str = ""
    name: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": "".join(self.texts)}
        return {"type": "output_text", "text": "".join(self.texts), "annotations": [], "logprobs": list(self.logprobs)}

    def body(self, status: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
        item: dict[str, Any] = {"type": self.kind, "id": self.id, "status": status}
        if self.kind == "function_call":
            return item | {"call_id": self.call_id, "name": self.name, "arguments": "".join(self.texts)}
        if self.kind == "reasoning":
            return item | {"summary": [], "content": parts, "encrypted_content": None}
        return item | {"role": "assistant", "content": parts}


class ResponseBuilder:
    """`response` is the object as it stands. Events come from `begin`, `push` for each piece, then `end` or `fail`."""

    def __init__(self, response: dict[str, Any], usage: Usage) -> None:
        self.response = response
        self._usage = usage
        self._output: list[dict[str, Any]] = response["output"]
        self._open: _OpenItem | None = None
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not come yet
        self._finish_reason: str | None = None
        self._sequence_number = 0
        self._events: list[EventBody] = []

    def begin(self) -> list[EventBody]:
        self._lifecycle("created")
        self._lifecycle("in_progress")
        return self._take()

    def push(self, piece: Piece) -> list[EventBody]:
        self._logprobs += piece.logprobs or ()
        for event in piece.events:
            self._answer_event(event)
        self._finish_reason = piece.finish_reason or self._finish_reason
        return self._take()

    def end(self) -> list[EventBody]:
        cut = self._finish_reason == "length"
        if self._open is None and not self._output:
            self._begin_item("message")  # an empty answer is a message, too
        self._close("incomplete" if cut else "completed")
        self.response["status"] = "incomplete" if cut else "completed"
        if cut:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        self.response["usage"] = usage_body(self._usage)
        self._lifecycle(self.response["status"])
        return self._take()

    def fail(self, error: RequestError) -> list[EventBody]:
        """What there is of the answer stays in the response."""
        self._close("incomplete")
        self.response["status"] = "failed"
        self.response["error"] = error_body(error)
        self.response["usage"] = usage_body(self._usage)
        self._lifecycle("failed")
        return self._take()

    def _answer_event(self, event: Event) -> None:
        match event:
            case ContentText():
                self._text("message", event.text)
            case ReasoningText():
                self._text("reasoning", event.text)
            case ToolCallBegin():
                self._begin_item("function_call", call_id=event.id, name=event.name)
            case ToolCallArguments():
                assert self._open is not None
                self._open.texts.append(event.text)
                self._emit("function_call_arguments.delta", delta=event.text)

    def _text(self, kind: Kind, text: str) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin_item(kind)
        assert self._open is not None
        self._open.texts.append(text)
        if kind == "reasoning":
            self._emit("reasoning_text.delta", content_index=0, delta=text)
            return
        logprobs, self._logprobs = self._logprobs, []
        self._open.logprobs += logprobs
        self._emit("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _begin_item(self, kind: Kind, *, call_id: str = "", name: str = "") -> None:
        self._close("completed")
        self._open = _OpenItem(kind=kind, id=new_id(PREFIXES[kind]), call_id=call_id, name=name)
        self._emit_item("added", self._open.body("in_progress", []))
        if kind != "function_call":
            self._emit("content_part.added", content_index=0, part=self._open.part())

    def _close(self, status: str) -> None:
        item = self._open
        if item is None:
            return
        text = "".join(item.texts)
        if item.kind == "function_call":
            self._emit("function_call_arguments.done", arguments=text)
        elif item.kind == "reasoning":
            self._emit("reasoning_text.done", content_index=0, text=text)
        else:
            item.logprobs += self._logprobs  # of tokens that have no text, such as the end
            self._logprobs = []
            self._emit("output_text.done", content_index=0, text=text, logprobs=item.logprobs)
        part = item.part()
        if item.kind != "function_call":
            self._emit("content_part.done", content_index=0, part=part)
        body = item.body(status, [part])
        self._emit_item("done", body)
        self._output.append(body)
        self._open = None

    def _emit(self, kind: str, **fields: Any) -> None:
        """An event of the open item."""
        assert self._open is not None
        self._add(f"response.{kind}", item_id=self._open.id, output_index=len(self._output), **fields)

    def _emit_item(self, kind: str, item: dict[str, Any]) -> None:
        self._add(f"response.output_item.{kind}", output_index=len(self._output), item=item)

    def _lifecycle(self, status: str) -> None:
        self._add(f"response.{status}", response={**self.response, "output": list(self._output)})

    def _add(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._sequence_number, **fields})
        self._sequence_number += 1

    def _take(self) -> list[EventBody]:
        events, self._events = self._events, []
        return events


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        # the prefix cache is automatic: nothing is written to it at a client's request or cost
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_body(error: RequestError) -> dict[str, Any]:
    """The error as a response has it; its codes are OpenAI's."""
    code = "server_error"
    if isinstance(error, InvalidRequest):
        code = "invalid_prompt"
    elif isinstance(error, QueueFull):
        code = "rate_limit_exceeded"
    return {"code": code, "message": error.message, "param": error.param, "type": error.type}
