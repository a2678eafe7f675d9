"""Tools as /v1/messages has them."""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidRequest
from headrace.server.messages.schema import ToolBody, ToolChoiceBody
from headrace.server.schema import validate
from headrace.text.tools import FunctionTool, ToolChoice


def read_tool(value: Any, name: str) -> FunctionTool:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object with a name and an input_schema.", param=name)
    kind = value.get("type")
    if isinstance(kind, str) and kind != "custom":
        raise InvalidRequest(
            f"{name} is of type {kind[:40]!r}: this server runs no tools of its own. Send tools with an input_schema, and run them yourself.",
            param=f"{name}.type",
            code="unsupported_value",
        )
    tool = validate(ToolBody, value, prefix=name)
    return FunctionTool(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=bool(tool.strict))


def read_choice(value: Any) -> tuple[ToolChoice | None, bool]:
    """(what the answer has to do with the tools, whether it may make several calls); None: as the number of tools has it."""
    if value is None:
        return None, True
    if not isinstance(value, dict):
        raise InvalidRequest("tool_choice must be an object with a type: auto, any, tool or none.", param="tool_choice")
    choice = validate(ToolChoiceBody, value, prefix="tool_choice")
    if (choice.name is not None) != (choice.type == "tool"):
        raise InvalidRequest("tool_choice.name is required with type tool, and allowed with no other type.", param="tool_choice.name")
    parallel = not choice.disable_parallel_tool_use
    if choice.type in ("any", "tool"):
        return ToolChoice(mode="required", name=choice.name), parallel
    return ToolChoice(mode="none" if choice.type == "none" else "auto"), parallel
