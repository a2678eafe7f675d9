"""One message in the making: pieces of the answer in, documented events out, the whole message at the end.

A plain answer is made by the same code, without its events: that is why a stream, put together, equals it.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic_core import from_json

from headrace.server.answer import Header, Piece, Usage
from headrace.text.answer_events import ContentText, Event, ReasoningText, ToolCallArguments, ToolCallBegin

EventBody = dict[str, Any]
Kind = Literal["text", "thinking", "tool_use"]

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageBuilder:
    """`message` is the object as it stands. Events come from `begin`, `push` for each piece, then `end`."""

    def __init__(self, header: Header, usage: Usage) -> None:
        self.message: dict[str, Any] = {
            "id": header.answer_id,
            "type": "message",
            "role": "assistant",
            "model": header.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": None,
        }
        self._usage = usage
        self._blocks: list[dict[str, Any]] = self.message["content"]  # those that have ended
        self._open: dict[str, Any] | None = None  # the block that the answer is at, as it began
        self._texts: list[str] = []  # of the open block
        self._events: list[EventBody] = []

    def begin(self) -> list[EventBody]:
        self._add("message_start", message={**self.message, "content": [], "usage": usage_body(self._usage)})
        self._add("ping")
        return self._take()

    def push(self, piece: Piece) -> list[EventBody]:
        for event in piece.events:
            self._answer_event(event)
        if piece.finish_reason is not None:
            stopped = piece.finish_reason == "stop" and isinstance(piece.stop_reason, str)
            self.message["stop_reason"] = "stop_sequence" if stopped else STOP_REASONS[piece.finish_reason]
            self.message["stop_sequence"] = piece.stop_reason if stopped else None
        return self._take()

    def end(self) -> list[EventBody]:
        self._close()
        self.message["usage"] = usage_body(self._usage)
        delta = {"stop_reason": self.message["stop_reason"], "stop_sequence": self.message["stop_sequence"]}
        self._add("message_delta", delta=delta, usage=self.message["usage"])
        self._add("message_stop")
        return self._take()

    def _answer_event(self, event: Event) -> None:
        match event:
            case ContentText():
                self._text("text", event.text)
            case ReasoningText():
                self._text("thinking", event.text)
            case ToolCallBegin():
                self._begin_block({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
            case ToolCallArguments():
                self._texts.append(event.text)
                self._delta({"type": "input_json_delta", "partial_json": event.text})

    def _text(self, kind: Kind, text: str) -> None:
        if self._open is None or self._open["type"] != kind:
            self._begin_block({"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})})
        self._texts.append(text)
        self._delta({"type": f"{kind}_delta", kind: text})

    def _begin_block(self, block: dict[str, Any]) -> None:
        self._close()
        self._open, self._texts = block, []
        self._add("content_block_start", index=len(self._blocks), content_block=block)

    def _close(self) -> None:
        if self._open is None:
            return
        kind, text = self._open["type"], "".join(self._texts)
        if kind == "thinking":
            self._delta({"type": "signature_delta", "signature": ""})
        self._add("content_block_stop", index=len(self._blocks))
        self._blocks.append({**self._open, "input": call_input(text)} if kind == "tool_use" else {**self._open, kind: text})
        self._open = None

    def _delta(self, delta: dict[str, Any]) -> None:
        self._add("content_block_delta", index=len(self._blocks), delta=delta)

    def _add(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, **fields})

    def _take(self) -> list[EventBody]:
        events, self._events = self._events, []
        return events


def call_input(text: str) -> dict[str, Any]:
    """The input of a call from its JSON text. Of one that was cut, what is whole of it; of one that is no object, nothing."""
    try:
        value = from_json(text, allow_partial=True) if text.strip() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def usage_body(usage: Usage) -> dict[str, Any]:
    """`input_tokens` is the whole prompt. The others are parts of a bill that this server does not write."""
    return {
        "input_tokens": usage.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
