"""The list of tools of a request, of which each route reads the items in its own shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.errors import InvalidRequest
from headrace.text.tools import FunctionTool

MAX_TOOLS_BYTES = 2**20  # of JSON


def read_tools(value: Any, read_tool: Callable[[Any, str], FunctionTool]) -> list[FunctionTool]:
    """`read_tool` is given an item and its name, such as tools[2]. Raises `InvalidRequest`."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest("tools must be a list of tools.", param="tools")
    size = len(msgspec.json.encode(value))
    if size > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"tools takes {size} bytes of JSON; at most {MAX_TOOLS_BYTES} are allowed.", param="tools")
    return [read_tool(item, f"tools[{index}]") for index, item in enumerate(value)]
