"""Tools as /v1/responses has them: functions are flat there, and a choice may allow some of them only."""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidRequest
from headrace.server.responses.schema import AllowedTools, FunctionToolBody, NamedTool
from headrace.server.schema import validate
from headrace.text.tools import FunctionTool, ToolChoice

MODES = ("none", "auto", "required")


def read_tool(value: Any, name: str) -> FunctionTool:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object with a type.", param=name)
    kind = value.get("type")
    if isinstance(kind, str) and kind != "function":
        raise InvalidRequest(
            f"{name} is of type {kind[:40]!r}: this server runs no tools of its own. Send functions, and run them yourself.",
            param=f"{name}.type",
            code="unsupported_value",
        )
    tool = validate(FunctionToolBody, value, prefix=name)
    given = {} if tool.parameters is None else {"parameters": tool.parameters}
    return FunctionTool(name=tool.name, description=tool.description, strict=bool(tool.strict), **given)


def read_choice(value: Any, tools: list[FunctionTool]) -> tuple[list[FunctionTool], ToolChoice | None]:
    """The tools that may be called, and the choice among them; None: as the number of tools has it."""
    if value is None:
        return tools, None
    if isinstance(value, str) and value in MODES:
        return tools, ToolChoice(mode=value)  # type: ignore[arg-type]
    if not isinstance(value, dict):
        raise InvalidRequest(f"tool_choice must be one of {', '.join(MODES)}, or an object that names a function.", param="tool_choice")
    kind = value.get("type")
    if kind == "allowed_tools":
        allowed = validate(AllowedTools, value, prefix="tool_choice")
        names = {tool.name for tool in allowed.tools}
        unknown = sorted(names - {tool.name for tool in tools})
        if unknown or not names:
            raise InvalidRequest(f"tool_choice.tools must name functions of tools; {unknown[:1]} is none of them.", param="tool_choice.tools")
        return [tool for tool in tools if tool.name in names], ToolChoice(mode=allowed.mode)
    if isinstance(kind, str) and kind != "function":
        raise InvalidRequest(
            f"tool_choice is of type {kind[:40]!r}, which is not supported; name a function.", param="tool_choice.type", code="unsupported_value"
        )
    return tools, ToolChoice(mode="required", name=validate(NamedTool, value, prefix="tool_choice").name)
