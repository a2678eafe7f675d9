"""Items of /v1/responses: how a client may write them, how they are stored, and which messages they become."""

from __future__ import annotations

import uuid
from typing import Any

from headrace.errors import InvalidRequest
from headrace.server.responses.schema import FunctionCallItem, FunctionCallOutputItem, Item, MessageItem, ReasoningItem, RefusalPart, TextPart
from headrace.server.schema import Message, validate

MODELS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}
PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex


def read_items(value: Any) -> list[dict[str, Any]]:
    """`input` as items, each whole: with an id, a status, and its content as parts. Raises `InvalidRequest` that names the item."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("input is required: a text, or a list of at least one item.", param="input")
    return [read_item(item, f"input[{index}]") for index, item in enumerate(value)]


def read_item(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object, an item such as a message.", param=name)
    kind = value.get("type") or ("message" if "role" in value else "item_reference" if value.keys() == {"id"} else "message")
    if not isinstance(kind, str) or kind not in MODELS:
        shown = kind[:40] if isinstance(kind, str) else kind
        raise InvalidRequest(
            f"{name}.type {shown!r} is not supported; send message, function_call, function_call_output or reasoning items.",
            param=f"{name}.type",
            code="unsupported_value",
        )
    item = validate(MODELS[kind], value, prefix=name)
    whole: dict[str, Any] = {"type": kind, "id": item.id or new_id(PREFIXES[kind]), "status": item.status or "completed"}
    match item:
        case MessageItem():
            text = text_of(item.content, f"{name}.content")
            part = {"type": "output_text", "text": text, "annotations": []} if item.role == "assistant" else {"type": "input_text", "text": text}
            whole |= {"role": item.role, "content": [part]}
        case FunctionCallItem():
            whole |= {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case FunctionCallOutputItem():
            whole |= {"call_id": item.call_id, "output": text_of(item.output, f"{name}.output")}
        case ReasoningItem():
            thoughts = "" if item.content is None else text_of(item.content, f"{name}.content")
            summary = "" if item.summary is None else text_of(item.summary, f"{name}.summary")
            whole |= {"summary": parts("summary_text", summary), "content": parts("reasoning_text", thoughts)}
    return whole


def parts(kind: str, text: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": text}] if text else []


def text_of(value: Any, name: str) -> str:
    """The text of a content: a text, or a list of parts with text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be a text or a list of parts.", param=name)
    return "".join(part_text(part, f"{name}[{index}]") for index, part in enumerate(value))


def part_text(value: Any, name: str) -> str:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object with a type and a text.", param=name)
    kind = value.get("type")
    if kind == "refusal":
        return validate(RefusalPart, value, prefix=name).refusal
    if isinstance(kind, str) and kind.startswith(("input_image", "input_file", "input_audio", "image", "file", "computer")):
        raise InvalidRequest(
            f"{name} is of type {kind[:40]!r}, which this model cannot read: it is no multimodal model. Send text parts only.",
            param=f"{name}.type",
            code="unsupported_value",
        )
    return validate(TextPart, value, prefix=name).text


def to_messages(items: list[dict[str, Any]], instructions: str | None) -> list[Message]:
    """The conversation as a template takes it: what the assistant thought, said and called in one turn is one message."""
    turns: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    open_turn: dict[str, Any] | None = None  # the assistant's, while its items follow each other
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            turns.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            open_turn = None
        elif kind == "message" and item["role"] != "assistant":
            turns.append({"role": item["role"], "content": "".join(part["text"] for part in item["content"])})
            open_turn = None
        else:
            if open_turn is None or (kind != "function_call" and "tool_calls" in open_turn) or (kind == "message" and open_turn["content"]):
                open_turn = {"role": "assistant", "content": ""}
                turns.append(open_turn)
            extend_turn(open_turn, item)
    return [Message.model_validate(turn) for turn in turns]


def extend_turn(turn: dict[str, Any], item: dict[str, Any]) -> None:
    if item["type"] == "message":
        turn["content"] = "".join(part["text"] for part in item["content"])
    elif item["type"] == "function_call":
        call = {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
        turn.setdefault("tool_calls", []).append(call)
    else:
        thoughts = "".join(part["text"] for part in item["content"])
        if thoughts:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + thoughts
