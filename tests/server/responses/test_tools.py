"""Tools and reasoning of responses: what reaches the prompt, and what comes back. How calls are read is tested with chats."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import World, refused
from tests.server.families import THINKS, marked_tokenizer
from tests.server.responses.test_routes import last_prompt, named_events, text_of, without_ids

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": None,
}
CLOCK = {"type": "function", "name": "get_time"}
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOON = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.fixture
async def world(tokenizer: Tokenizer) -> AsyncIterator[World]:
    """A byte a token: tools take room."""
    world = World(tokenizer)
    world.service.loaded = world.with_context(65536)
    yield world
    await world.close()


@pytest.fixture
async def thinker(tmp_path: Path) -> AsyncIterator[World]:
    """A world whose model reasons."""
    tokenizer = marked_tokenizer(tmp_path)
    world = World(tokenizer)
    world.service.loaded = dataclasses.replace(world.with_context(65536), template=ChatTemplate(THINKS, tokenizer))
    yield world
    await world.close()


async def answer(world: World, text: str, **fields: Any) -> dict[str, Any]:
    """The response that a model's text becomes; the stream of it must be the same in pieces."""
    world.generator.answer, world.generator.stops = text, True
    body = {"input": "Hi", **fields}
    response = await world.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    events = named_events((await world.post("/v1/responses", {**body, "stream": True})).text)
    assert without_ids(events[-1][1]["response"]) == without_ids(whole)
    joined: dict[int, str] = {}
    for kind, event in events:
        if kind.endswith(".delta"):
            joined[event["output_index"]] = joined.get(event["output_index"], "") + event["delta"]
    texts = [item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in whole["output"]]
    assert [joined.get(index, "") for index in range(len(texts))] == texts
    return whole


async def test_words_and_two_calls(world: World):
    response = await answer(world, f"Let me see.\n{ROME}\n{NOON}", tools=[WEATHER, CLOCK])
    message, first, second = response["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (first["name"], json.loads(first["arguments"])) == ("get_weather", {"city": "Rome"})
    assert (second["name"], json.loads(second["arguments"])) == ("get_time", {})
    assert first["call_id"] != second["call_id"]
    assert response["status"] == "completed"
    assert response["tools"] == [WEATHER, CLOCK]
    assert '"name": "get_weather", "description": "Weather of a city"' in last_prompt(world)


async def test_a_conversation_goes_on_with_the_results(world: World):
    first = (await answer(world, ROME, tools=[WEATHER]))["output"]
    (call,) = first
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny"}
    question = {"role": "user", "content": "Hi"}
    response = await answer(world, "It is sunny.", input=[question, call, result], tools=[WEATHER])
    by_items = last_prompt(world)
    assert text_of(response) == "It is sunny."
    stored = (await world.post("/v1/responses", {"input": "Hi", "tools": [WEATHER]})).json()
    assert stored["output"][0]["type"] == "message"  # the fake says the same again
    world.generator.answer = ROME
    stored = (await world.post("/v1/responses", {"input": "Hi", "tools": [WEATHER]})).json()
    result = {**result, "call_id": stored["output"][0]["call_id"]}
    await world.post("/v1/responses", {"input": [result], "tools": [WEATHER], "previous_response_id": stored["id"]})
    assert last_prompt(world) == by_items
    assert "Sunny" in by_items


async def test_a_choice_may_force_forbid_or_narrow(world: World):
    def structured() -> bool:
        return world.generator.requests[-1].params.structured is not None

    await answer(world, ROME, tools=[WEATHER, CLOCK], tool_choice="required")
    assert structured()
    await answer(world, ROME, tools=[WEATHER, CLOCK], tool_choice={"type": "function", "name": "get_weather"})
    assert structured()
    response = await answer(world, ROME, tools=[WEATHER, CLOCK], tool_choice="none")
    assert (text_of(response), structured()) == (ROME, False)
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    response = await answer(world, NOON, tools=[WEATHER, CLOCK], tool_choice=allowed)
    assert response["tool_choice"] == allowed
    assert "get_weather" not in last_prompt(world)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [CLOCK, CLOCK]}, "tools[1].name"),
        ({"tools": [{**CLOCK, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**CLOCK, "parameters": {"type": "string"}}]}, "tools[0].parameters"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ],
)
async def test_what_a_turn_refuses_is_named_as_the_body_has_it(world: World, fields: dict[str, Any], param: str):
    refused(await world.post("/v1/responses", {"input": "Hi", **fields}), param=param)


async def test_reasoning_is_an_item_of_its_own(thinker: World):
    response = await answer(thinker, "<think>Hm.</think>Yes.")
    reasoning, message = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "Yes."
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    again = {"input": [{"role": "user", "content": "Hi"}, *response["output"], {"role": "user", "content": "So?"}]}
    assert (await thinker.post("/v1/responses", again)).status_code == 200
    await answer(thinker, "Yes.", reasoning={"effort": "none"})
    assert "</think>" in thinker.tokenizer.decode(list(thinker.generator.requests[-1].prompt_token_ids), skip_special_tokens=False)
