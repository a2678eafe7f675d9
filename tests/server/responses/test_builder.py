"""Calls and reasoning as items and events; text alone is tested with the route."""

from typing import Any

import pytest

from headrace.errors import EngineUnavailable, InvalidRequest, QueueFull
from headrace.server.answer import Piece, Usage
from headrace.server.responses.builder import ResponseBuilder, error_body
from headrace.text.answer_events import ContentText, Event, ReasoningText, ToolCallArguments, ToolCallBegin

TURN: list[Event] = [
    ReasoningText(text="Let me "),
    ReasoningText(text="see."),
    ContentText(text="I will look."),
    ToolCallBegin(index=0, id="call_a", name="weather"),
    ToolCallArguments(index=0, text='{"city": '),
    ToolCallArguments(index=0, text='"Rome"}'),
    ToolCallBegin(index=1, id="call_b", name="time"),
    ToolCallArguments(index=1, text="{}"),
]


def build(events: list[Event], *, finish_reason: str, cut: int = 1) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All events of an answer that comes in pieces of `cut` answer events, and the whole response."""
    builder = ResponseBuilder({"id": "resp_1", "status": "in_progress", "output": [], "usage": None}, Usage(prompt_tokens=3))
    made = builder.begin()
    pieces = [events[start : start + cut] for start in range(0, len(events), cut)] or [[]]
    for number, piece in enumerate(pieces):
        last = number + 1 == len(pieces)
        made += builder.push(Piece(index=0, opens=number == 0, text="", events=piece, finish_reason=finish_reason if last else None))
    made += builder.end()
    assert [event["sequence_number"] for event in made] == list(range(len(made)))
    return made, builder.response


def short(event: dict[str, Any]) -> tuple[str, Any]:
    kind = event["type"].removeprefix("response.")
    return kind, event.get("output_index")


def test_reasoning_text_and_calls_are_items_in_their_order():
    events, response = build(TURN, finish_reason="tool_calls")
    assert response["status"] == "completed"
    reasoning, message, first, second = response["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"] == "I will look."
    assert {**first, "id": ""} == {
        "type": "function_call",
        "id": "",
        "status": "completed",
        "call_id": "call_a",
        "name": "weather",
        "arguments": '{"city": "Rome"}',
    }
    assert (second["call_id"], second["arguments"]) == ("call_b", "{}")
    assert [item["id"][:3] for item in response["output"]] == ["rs_", "msg", "fc_", "fc_"]
    assert [short(event) for event in events] == [
        *(("created", None), ("in_progress", None)),
        *(("output_item.added", 0), ("content_part.added", 0), ("reasoning_text.delta", 0), ("reasoning_text.delta", 0)),
        *(("reasoning_text.done", 0), ("content_part.done", 0), ("output_item.done", 0)),
        *(("output_item.added", 1), ("content_part.added", 1), ("output_text.delta", 1)),
        *(("output_text.done", 1), ("content_part.done", 1), ("output_item.done", 1)),
        *(("output_item.added", 2), ("function_call_arguments.delta", 2), ("function_call_arguments.delta", 2)),
        *(("function_call_arguments.done", 2), ("output_item.done", 2)),
        *(("output_item.added", 3), ("function_call_arguments.delta", 3), ("function_call_arguments.done", 3), ("output_item.done", 3)),
        ("completed", None),
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert all(item["status"] == "in_progress" and not item.get("content") and not item.get("arguments") for item in added)


@pytest.mark.parametrize("cut", [2, 3, 8])
def test_how_an_answer_is_cut_changes_nothing(cut: int):
    def without_ids(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        plain = []
        for event in events:
            kept = {key: value for key, value in event.items() if key not in ("item_id", "response")}
            if "item" in kept:
                kept["item"] = {**kept["item"], "id": ""}
            plain.append(kept)
        return plain

    assert without_ids(build(TURN, finish_reason="tool_calls", cut=cut)[0]) == without_ids(build(TURN, finish_reason="tool_calls")[0])


def test_a_call_that_was_cut_is_incomplete():
    _, response = build(TURN[:5], finish_reason="length")
    assert response["status"] == "incomplete"
    assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]
    assert response["output"][-1]["arguments"] == '{"city": '


def test_an_empty_answer_is_an_empty_message():
    events, response = build([], finish_reason="stop")
    assert [short(event)[0] for event in events][2:] == [
        *("output_item.added", "content_part.added", "output_text.done", "content_part.done", "output_item.done", "completed")
    ]
    assert response["output"][0]["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


def test_logprobs_go_with_the_text_that_follows_them():
    builder = ResponseBuilder({"id": "resp_1", "output": []}, Usage())
    entries = [{"token": token} for token in "abc"]
    first = builder.push(Piece(index=0, opens=True, text="", logprobs=entries[:1]))
    second = builder.push(Piece(index=0, opens=False, text="ab", events=[ContentText(text="ab")], logprobs=entries[1:2]))
    builder.push(Piece(index=0, opens=False, text="", logprobs=entries[2:], finish_reason="stop"))
    end = builder.end()
    assert first == []
    assert second[-1]["logprobs"] == entries[:2]
    assert end[0]["logprobs"] == entries
    assert builder.response["output"][0]["content"][0]["logprobs"] == entries


@pytest.mark.parametrize(
    ("error", "code"),
    [(InvalidRequest("a", param="input"), "invalid_prompt"), (QueueFull("b"), "rate_limit_exceeded"), (EngineUnavailable("c"), "server_error")],
)
def test_errors_have_codes_that_clients_know(error, code):
    assert error_body(error)["code"] == code
    assert error_body(error)["message"] == error.message
