"""Earlier calls in the form that a chat template can write. Templates do not say what they take, so they are tried once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_NEEDLE = "needle4711"
_ID = "call00001"  # fits Mistral's templates, the strictest


@dataclass(frozen=True, slots=True, kw_only=True)
class CallHistory:
    takes_objects: bool  # arguments as an object; else as the text of one
    takes_texts: bool  # arguments as text: for broken ones
    short_ids: bool  # ids of calls must be nine letters and digits

    @classmethod
    def probe(cls, render: Callable[[list[dict[str, Any]]], str | None], source: str) -> CallHistory:
        """`render` gives the text of a conversation, or None where the template fails."""

        def writes(arguments: Any) -> bool:
            call = {"id": _ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
            conversation: list[dict[str, Any]] = [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "x", "tool_call_id": _ID, "name": "probe"},
            ]
            return _NEEDLE in (render(conversation) or "")

        return cls(takes_objects=writes({"key": _NEEDLE}), takes_texts=writes(json.dumps({"key": _NEEDLE})), short_ids="[TOOL_CALLS]" in source)

    def fit(self, turn: dict[str, Any]) -> dict[str, Any]:
        """The turn with its calls, or its result of one, as the template takes them."""
        turn = dict(turn)
        if self.short_ids and "tool_call_id" in turn:
            turn["tool_call_id"] = _short(turn["tool_call_id"])
        if "tool_calls" in turn:
            turn["tool_calls"] = [self._call(call) for call in turn["tool_calls"]]
        return turn

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            if not self.takes_texts:
                arguments = {"arguments": arguments}
        elif not self.takes_objects and self.takes_texts:
            arguments = json.dumps(arguments, ensure_ascii=False)
        fitted = {**call, "function": {**function, "arguments": arguments}}
        if self.short_ids and "id" in fitted:
            fitted["id"] = _short(fitted["id"])
        return fitted


def _short(call_id: Any) -> Any:
    """The same for the same id."""
    if not isinstance(call_id, str) or (len(call_id) == 9 and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
