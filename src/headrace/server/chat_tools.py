"""The tools of a request's body: their shape, their names, and which of them are to be called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from headrace.errors import InvalidRequest
from headrace.server.schema import validate
from headrace.server.tool_list import read_tools
from headrace.server.turn_fields import TurnFields
from headrace.text.tools import FunctionTool, ToolChoice

MAX_TOOLS = 512
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str


class NamedChoice(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["function"]
    function: NamedFunction


def tool_list(value: Any) -> tuple[FunctionTool, ...]:
    """The tools of a chat, of the right shape; `check_tools` looks at what is in them."""
    return tuple(read_tools(value, _one_tool))


def _one_tool(value: Any, name: str) -> FunctionTool:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object with a type and a function.", param=name)
    kind = value.get("type")
    if isinstance(kind, str) and kind != "function":
        raise InvalidRequest(
            f"{name} is of type {kind[:40]!r}; only functions can be called. Describe the tool as a function.",
            param=f"{name}.type",
            code="unsupported_value",
        )
    function = validate(ToolDefinition, value, prefix=name).function
    given = {} if function.parameters is None else {"parameters": function.parameters}
    return FunctionTool(name=function.name, description=function.description, strict=bool(function.strict), **given)


def tool_choice(value: Any) -> ToolChoice | None:
    """What a chat says of its tools; None: nothing."""
    if value is None:
        return None
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise InvalidRequest(f"tool_choice must be none, auto, required or a function to be called, not {value[:40]!r}.", param="tool_choice")
        return ToolChoice(mode=value)  # type: ignore[arg-type]
    if not isinstance(value, dict):
        raise InvalidRequest("tool_choice must be none, auto, required or an object that names a function.", param="tool_choice")
    kind = value.get("type")
    if isinstance(kind, str) and kind != "function":
        raise InvalidRequest(
            f"tool_choice is of type {kind[:40]!r}, which is not supported; name a function, or send only the tools that may be called.",
            param="tool_choice.type",
            code="unsupported_value",
        )
    return ToolChoice(mode="required", name=validate(NamedChoice, value, prefix="tool_choice").function.name)


def check_tools(tools: Sequence[FunctionTool], choice: ToolChoice | None, fields: TurnFields) -> ToolChoice:
    """The choice that holds. Raises `InvalidRequest` for names that cannot be used, and for a choice without its tool."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"{fields.tools} holds {len(tools)} tools; at most {MAX_TOOLS} are allowed.", param=fields.tools)
    names: set[str] = set()
    for index, tool in enumerate(tools):
        param = fields.tool_name.format(index)
        if not _NAME.fullmatch(tool.name):
            raise InvalidRequest(f"{param} must be 1 to 128 letters, digits, _, . or -, not {tool.name[:40]!r}.", param=param)
        if tool.name in names:
            raise InvalidRequest(f"{param} is {tool.name!r}, as another tool's; names must differ.", param=param)
        names.add(tool.name)
        if tool.parameters.get("type", "object") != "object":
            param = fields.tool_parameters.format(index)
            raise InvalidRequest(f"{param} must be the JSON schema of an object: its type must be object.", param=param)
    if choice is None:
        return ToolChoice(mode="auto" if tools else "none")
    if choice.mode != "none" and not tools:
        raise InvalidRequest(f"{fields.tool_choice} is allowed only together with {fields.tools}.", param=fields.tool_choice)
    if choice.name is not None and choice.name not in names:
        raise InvalidRequest(f"{fields.tool_choice} names {choice.name[:128]!r}, which is none of {fields.tools}.", param=fields.tool_choice)
    return choice
