"""Chat messages as templates expect them: roles and contents are strings, arguments of calls are objects where they can be, nothing is null."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.errors import InvalidRequest

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # kind of part -> where its text stands


def normalize_messages(messages: Sequence[Mapping[str, Any]], *, knows_developer: bool) -> list[dict[str, Any]]:
    """New messages with content as one string. The role developer becomes system where the template does not know it.

    Raises `InvalidRequest` for what is not text or has the wrong shape.
    """
    if not messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    result = [_normalize(message, index, knows_developer) for index, message in enumerate(messages)]
    _name_results(result)
    return result


def _normalize(message: Mapping[str, Any], index: int, knows_developer: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages[{index}] must be an object with a role.", param="messages")
    result = {key: value for key, value in message.items() if value is not None}
    result["content"] = _text(message.get("content"), f"messages[{index}].content")
    if message["role"] == "developer" and not knows_developer:
        result["role"] = "system"
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], f"messages[{index}].tool_calls")
    return result


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{where} must be a string, null or a list of parts.", param="messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise InvalidRequest(f"{where}: a part of type {kind!r} cannot be read; this model takes text only.", param="messages")
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}: a part of type {kind!r} must have its text as a string.", param="messages")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Clients send arguments as a string of JSON; here they become the object, or stay the string where there is none in it.

    A call that a limit cut off is part of the conversation from then on; refusing it would end that.
    """
    if not isinstance(calls, list | tuple):
        raise InvalidRequest(f"{where} must be a list.", param="messages")
    result = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise InvalidRequest(f"{where}[{index}] must have a function.", param="messages")
        result.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return result


def _arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _name_results(messages: list[dict[str, Any]]) -> None:
    """Some templates write the function's name beside its result; clients send the id of the call only."""
    names: dict[Any, Any] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id")] = call["function"].get("name")
        if message["role"] == "tool" and "name" not in message and names.get(message.get("tool_call_id")):
            message["name"] = names[message["tool_call_id"]]
