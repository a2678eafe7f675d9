"""Messages made of blocks, and the messages of a chat that they become."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from headrace.errors import InvalidRequest
from headrace.server.messages.schema import Block, MessageShape, Strict, TextBlock, ThinkingBlock, ToolResultBlock, ToolUseBlock
from headrace.server.schema import Message, validate

BLOCKS: dict[str, dict[str, type[Strict]]] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
    "system": {"text": TextBlock},
}
IMAGES = ("image", "document", "file", "container_upload", "browser_state")

AnyBlock = TypeVar("AnyBlock", bound=Block)


def read_conversation(messages: Any, system: Any) -> list[Message]:
    """The whole conversation as a template takes it. Raises `InvalidRequest` that names the block."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages is required: a list of at least one message.", param="messages")
    turns: list[dict[str, Any]] = []
    if system is not None:
        turns.append({"role": "system", "content": text_of(system, "system")})
    for index, value in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(value, dict):
            raise InvalidRequest(f"{name} must be an object with a role and a content.", param=name)
        message = validate(MessageShape, value, prefix=name)
        blocks = read_blocks(message.content, f"{name}.content", message.role)
        turns += assistant_turn(blocks) if message.role == "assistant" else other_turns(blocks, message.role)
    return [Message.model_validate(turn) for turn in turns]


def read_blocks(value: Any, name: str, role: str) -> list[Strict]:
    if isinstance(value, str):
        return [TextBlock(type="text", text=value)]
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be a text or a list of blocks.", param=name)
    return [read_block(item, f"{name}[{index}]", role) for index, item in enumerate(value)]


def read_block(value: Any, name: str, role: str) -> Strict:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object, a block with a type.", param=name)
    kind = value.get("type")
    known = BLOCKS[role]
    if not isinstance(kind, str) or kind not in known:
        shown = kind[:40] if isinstance(kind, str) else kind
        reason = "this model cannot read it: it is no multimodal model" if shown in IMAGES else f"a message of the {role} may hold {', '.join(known)}"
        raise InvalidRequest(f"{name}.type {shown!r} is not supported: {reason}.", param=f"{name}.type", code="unsupported_value")
    return validate(known[kind], value, prefix=name)


def text_of(value: Any, name: str) -> str:
    """The text of a text, or of a list of text blocks."""
    return "".join(block.text for block in read_blocks(value, name, "system") if isinstance(block, TextBlock))


def assistant_turn(blocks: list[Strict]) -> list[dict[str, Any]]:
    """One message: thoughts, text and calls."""
    turn: dict[str, Any] = {"role": "assistant", "content": "".join(block.text for block in blocks if isinstance(block, TextBlock))}
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if thoughts:
        turn["reasoning_content"] = thoughts
    if calls:
        turn["tool_calls"] = calls
    return [turn]


def other_turns(blocks: list[Strict], role: str) -> list[dict[str, Any]]:
    """A message for each result of a tool, and one for the text between them."""
    turns: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            result = "" if block.content is None else text_of(block.content, "content of a tool_result")
            # templates have no word for it
            turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": f"Error: {result}" if block.is_error else result})
        elif isinstance(block, TextBlock):
            if not turns or turns[-1]["role"] != role:
                turns.append({"role": role, "content": ""})
            turns[-1]["content"] += block.text
    return turns or [{"role": role, "content": ""}]
