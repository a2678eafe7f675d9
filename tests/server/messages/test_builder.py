"""Calls and thinking as blocks and events; text alone is tested with the route."""

from typing import Any

import pytest

from headrace.server.answer import Header, Piece, Usage
from headrace.server.messages.builder import MessageBuilder, call_input
from headrace.text.answer_events import ContentText, Event, ReasoningText, ToolCallArguments, ToolCallBegin

TURN: list[Event] = [
    ReasoningText(text="Let me "),
    ReasoningText(text="see."),
    ContentText(text="I will look."),
    ToolCallBegin(index=0, id="call_a", name="weather"),
    ToolCallArguments(index=0, text='{"city": '),
    ToolCallArguments(index=0, text='"Rome"}'),
    ToolCallBegin(index=1, id="call_b", name="time"),
]


def build(events: list[Event], *, cut: int = 1, **last: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All events of an answer that comes in pieces of `cut` answer events, and the whole message."""
    builder = MessageBuilder(Header(answer_id="msg_1", created=0, model="m"), Usage(prompt_tokens=3, completion_tokens=5))
    made = builder.begin()
    pieces = [events[start : start + cut] for start in range(0, len(events), cut)] or [[]]
    for number, piece in enumerate(pieces):
        ending = last if number + 1 == len(pieces) else {}
        made += builder.push(Piece(index=0, opens=number == 0, text="", events=piece, **ending))
    made += builder.end()
    return made, builder.message


def test_thinking_text_and_calls_are_blocks_in_their_order():
    events, message = build(TURN, finish_reason="tool_calls")
    assert message["stop_reason"] == "tool_use"
    assert message["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        {"type": "text", "text": "I will look."},
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "id": "call_b", "name": "time", "input": {}},
    ]
    short = [(event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events[2:]]
    start, delta, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert short == [
        (start, 0, None),
        (delta, 0, "thinking_delta"),
        (delta, 0, "thinking_delta"),
        (delta, 0, "signature_delta"),
        (stop, 0, None),
        (start, 1, None),
        (delta, 1, "text_delta"),
        (stop, 1, None),
        (start, 2, None),
        (delta, 2, "input_json_delta"),
        (delta, 2, "input_json_delta"),
        (stop, 2, None),
        (start, 3, None),
        (stop, 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    blocks = [event["content_block"] for event in events if event["type"] == start]
    assert blocks == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}},
        {"type": "tool_use", "id": "call_b", "name": "time", "input": {}},
    ]


@pytest.mark.parametrize("cut", [2, 3, 7])
def test_how_an_answer_is_cut_changes_nothing(cut: int):
    assert build(TURN, cut=cut, finish_reason="tool_calls") == build(TURN, finish_reason="tool_calls")


@pytest.mark.parametrize(
    ("last", "stop_reason", "stop_sequence"),
    [
        ({"finish_reason": "stop"}, "end_turn", None),
        ({"finish_reason": "stop", "stop_reason": 7}, "end_turn", None),
        ({"finish_reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "length"}, "max_tokens", None),
        ({"finish_reason": "tool_calls"}, "tool_use", None),
    ],
)
def test_stop_reasons(last: dict[str, Any], stop_reason: str, stop_sequence: str | None):
    events, message = build([ContentText(text="x")], **last)
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)
    assert events[-2]["delta"] == {"stop_reason": stop_reason, "stop_sequence": stop_sequence}


def test_an_empty_answer_has_no_block():
    events, message = build([], finish_reason="stop")
    assert [event["type"] for event in events] == ["message_start", "ping", "message_delta", "message_stop"]
    assert message["content"] == []


@pytest.mark.parametrize(
    ("text", "value"),
    [("", {}), (" ", {}), ('{"a": [1, {"b": "x"}]}', {"a": [1, {"b": "x"}]}), ('{"a": 1, "b": "x', {"a": 1}), ("[1]", {}), ("nonsense", {})],
)
def test_the_input_of_a_call_is_an_object_whatever_was_written(text: str, value: dict[str, Any]):
    assert call_input(text) == value
