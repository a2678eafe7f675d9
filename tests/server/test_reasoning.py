"""Reasoning in chats: split off, hidden, counted, bounded."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.text.chat_template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from tests.server.fakes import World, events, refused
from tests.server.families import HERMES, THINKS, marked_tokenizer

TEXT = "<think>\nHm.\n</think>\n\nHi."


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return marked_tokenizer(tmp_path_factory.mktemp("marked"))


@pytest.fixture
async def world(marked: Tokenizer) -> AsyncIterator[World]:
    world = World(marked)
    assert world.service.loaded is not None
    world.service.loaded = dataclasses.replace(world.service.loaded, template=ChatTemplate(THINKS, marked))
    world.generator.answer, world.generator.stops = TEXT, True
    yield world
    await world.close()


@pytest.mark.parametrize(("fields", "reasoning"), [({}, "Hm."), ({"include_reasoning": False}, None)])
async def test_message_stream_and_usage(world: World, fields: dict[str, Any], reasoning: str | None) -> None:
    body = (await world.chat(**fields)).json()
    message = body["choices"][0]["message"]
    assert message["content"] == "Hi."
    assert message.get("reasoning_content") == reasoning
    assert body["choices"][0]["finish_reason"] == "stop"
    # the fake writes its markers a byte a token
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nHm.\n</think>")}
    assert body["usage"]["completion_tokens"] == len(TEXT)
    chunks = events((await world.chat(**fields, stream=True, stream_options={"include_usage": True})).text)[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]  # type: ignore[index, call-overload]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (reasoning or "")
    assert "".join(delta.get("content", "") for delta in deltas) == "Hi."
    assert chunks[-1]["usage"] == body["usage"]  # type: ignore[index, call-overload]


async def test_reasoning_that_is_sent_back_reaches_the_template(world: World, marked: Tokenizer) -> None:
    assert world.service.loaded is not None
    source = "{% for message in messages %}({{ message.reasoning_content }}){{ message.content }}{% endfor %}"
    world.service.loaded = dataclasses.replace(world.service.loaded, template=ChatTemplate(source, marked))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning_content": "Hm."}, {"role": "user", "content": "c"}]
    assert (await world.post("/v1/chat/completions", {"messages": messages})).status_code == 200
    assert bytes(world.generator.requests[-1].prompt_token_ids) == b"()a(Hm.)b()c"


async def test_a_budget_becomes_a_grammar(world: World) -> None:
    assert (await world.chat(thinking_token_budget=7)).status_code == 200
    structured = world.generator.requests[-1].params.structured
    assert structured is not None
    assert "{0,7}" in structured.source
    assert structured.param == "thinking_token_budget"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": "5"}, "thinking_token_budget"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"include_reasoning": "no"}, "include_reasoning"),
    ],
)
async def test_bad_options_are_refused_by_name(world: World, fields: dict[str, Any], param: str) -> None:
    refused(await world.chat(**fields), param=param)


async def test_a_model_that_does_not_reason(world: World, marked: Tokenizer) -> None:
    assert world.service.loaded is not None
    world.service.loaded = dataclasses.replace(world.service.loaded, template=ChatTemplate(HERMES, marked))
    body = (await world.chat(reasoning_effort="none")).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert "completion_tokens_details" not in body["usage"]
    refused(await world.chat(reasoning_effort="low"), param="reasoning_effort")
    refused(await world.chat(thinking_token_budget=7), param="thinking_token_budget")
