"""The list of tools is bounded on every route that takes one."""

from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.server.chat_tools import tool_list
from headrace.server.messages.tools import read_tool as read_messages_tool
from headrace.server.responses.tools import read_tool as read_responses_tool
from headrace.server.tool_list import MAX_TOOLS_BYTES, read_tools

READERS = {
    "chat": tool_list,
    "messages": lambda value: read_tools(value, read_messages_tool),
    "responses": lambda value: read_tools(value, read_responses_tool),
}


@pytest.mark.parametrize("route", READERS)
def test_none_are_no_tools(route: str) -> None:
    assert list(READERS[route](None)) == []


@pytest.mark.parametrize("route", READERS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"name": "a"}, "tools must be a list"),
        (["x" * MAX_TOOLS_BYTES], "bytes of JSON; at most"),
    ],
)
def test_what_is_no_list_or_too_large_is_refused_by_name(route: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        READERS[route](value)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("route", READERS)
def test_items_are_named_by_their_place(route: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        READERS[route]([7])
    assert caught.value.param == "tools[0]"
