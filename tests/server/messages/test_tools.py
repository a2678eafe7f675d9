"""Tools and thinking of messages: what reaches the prompt, and what comes back. How calls are read is tested with chats."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import World
from tests.server.families import THINKS, marked_tokenizer
from tests.server.messages.test_routes import last_prompt, named_events, refused

WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK = {"type": "custom", "name": "get_time", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NOON = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
USER = {"role": "user", "content": "Hi"}


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


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream."""
    message: dict[str, Any] = events[0]["message"]
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            message["content"].append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            value = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            texts[event["index"]] = texts.get(event["index"], "") + value
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
    for index, block in enumerate(message["content"]):
        kind, text = block["type"], texts.get(index, "")
        block |= {"input": json.loads(text or "{}")} if kind == "tool_use" else {kind: text}
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "id": "", "content": [{**block, "id": ""} for block in message["content"]]}


async def answer(world: World, text: str, **fields: Any) -> dict[str, Any]:
    """The message that a model's text becomes; the stream of it must be the same in pieces."""
    world.generator.answer, world.generator.stops = text, True
    body = {"messages": [USER], "max_tokens": 1000, **fields}
    response = await world.post("/v1/messages", body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    events = named_events((await world.post("/v1/messages", {**body, "stream": True})).text)
    assert without_ids(put_together(events)) == without_ids(whole)
    return whole


async def test_words_and_two_calls(world: World):
    message = await answer(world, f"Let me see.\n{ROME}\n{NOON}", tools=[WEATHER, CLOCK])
    text, first, second = message["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "get_weather", {"city": "Rome"})
    assert (second["name"], second["input"]) == ("get_time", {})
    assert first["id"] != second["id"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert '"name": "get_weather", "description": "Weather of a city"' in last_prompt(world)
    count = await world.post("/v1/messages/count_tokens", {"messages": [USER], "tools": [WEATHER, CLOCK]})
    assert count.json()["input_tokens"] == message["usage"]["input_tokens"]


async def test_a_conversation_goes_on_with_the_results(world: World):
    call = (await answer(world, ROME, tools=[WEATHER]))["content"]
    result = {"type": "tool_result", "tool_use_id": call[0]["id"], "content": "Sunny"}
    messages = [USER, {"role": "assistant", "content": call}, {"role": "user", "content": [result]}]
    message = await answer(world, "It is sunny.", messages=messages, tools=[WEATHER])
    assert message["content"] == [{"type": "text", "text": "It is sunny."}]
    assert message["stop_reason"] == "end_turn"
    assert "Sunny" in last_prompt(world)


async def test_a_choice_may_force_or_forbid(world: World):
    def structured() -> bool:
        return world.generator.requests[-1].params.structured is not None

    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}, {"type": "any", "disable_parallel_tool_use": True}):
        await answer(world, ROME, tools=[WEATHER, CLOCK], tool_choice=choice)
        assert structured()
    message = await answer(world, ROME, tools=[WEATHER, CLOCK], tool_choice={"type": "none"})
    assert (message["content"], structured()) == ([{"type": "text", "text": ROME}], False)
    await answer(world, ROME, tool_choice={"type": "none"})


@pytest.mark.parametrize(
    ("fields", "about"),
    [
        ({"tools": [CLOCK, CLOCK]}, "tools[1].name"),
        ({"tools": [{**CLOCK, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**CLOCK, "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "output_config.effort"),
    ],
)
async def test_what_a_turn_refuses_is_named_as_the_body_has_it(world: World, fields: dict[str, Any], about: str):
    refused(await world.post("/v1/messages", {"messages": [USER], "max_tokens": 5, **fields}), about=about)


async def test_thinking_is_a_block_where_it_was_asked_for(thinker: World):
    text = "<think>Hm.</think>Yes."
    message = await answer(thinker, text, thinking={"type": "enabled", "budget_tokens": 100})
    assert message["content"] == [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Yes."}]
    again = [USER, {"role": "assistant", "content": message["content"]}, USER]
    await answer(thinker, text, messages=again, thinking={"type": "adaptive"})
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        message = await answer(thinker, text, **fields)
        assert message["content"] == [{"type": "text", "text": "Yes."}]
        assert "</think>" in thinker.tokenizer.decode(list(thinker.generator.requests[-1].prompt_token_ids), skip_special_tokens=False)
