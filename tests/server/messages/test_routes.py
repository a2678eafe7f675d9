import json
from typing import Any

import httpx
import pytest

from headrace.errors import EngineUnavailable, InvalidRequest, QueueFull, RequestFailed
from headrace.server.messages.schema import UNSUPPORTED, MessageBody
from tests.server.fakes import ANSWER, CONTEXT, World

USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}


async def ask(world: World, messages: object = (USER,), **fields: object) -> httpx.Response:
    return await world.post("/v1/messages", {"messages": messages, "max_tokens": 12, **fields})


def refused(response: httpx.Response, status: int = 400, *, kind: str = "invalid_request_error", about: str = "") -> str:
    """The message of an error in Anthropic's shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    message: str = body["error"]["message"]
    assert about in message, message
    return message


def named_events(text: str) -> list[dict[str, Any]]:
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def last_prompt(world: World) -> str:
    return bytes(world.generator.requests[-1].prompt_token_ids).decode()


async def test_plain_answer(world: World):
    response = await ask(world, system="Be brief.", metadata={"user_id": "u"}, service_tier="auto", temperature=0.5, top_k=5)
    body = response.json()
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": ANSWER[:10]}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len("[system]Be brief.[user]Hi[assistant]"),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 12,
        },
    }
    assert response.headers["request-id"] == response.headers["x-request-id"]
    params = world.generator.requests[-1].params
    assert (params.temperature, params.top_k) == (0.5, 5)


async def test_a_stream_has_the_documented_events_and_is_the_plain_answer(world: World):
    plain = (await ask(world)).json()
    events = named_events((await ask(world, stream=True)).text)
    kinds = [event["type"] for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert kinds == [
        *("message_start", "ping", "content_block_start"),
        *["content_block_delta"] * len(deltas),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    start = events[0]["message"]
    assert {**plain, "id": start["id"], "content": [], "stop_reason": None, "usage": start["usage"]} == start
    assert start["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    assert "".join(delta["text"] for delta in deltas) == plain["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": plain["stop_reason"], "stop_sequence": None}
    assert events[-2]["usage"] == plain["usage"]


async def test_blocks_become_turns(world: World):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "On", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "e"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Two"}, {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "42"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "no"}], "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3"},
                {"type": "text", "text": "Three"},
            ],
        },
        {"role": "assistant", "content": "Four"},
        {"role": "system", "content": "Five"},
        {"role": "user", "content": "Six"},
    ]
    response = await ask(world, messages, system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}])
    assert response.status_code == 200, response.text
    calls = last_prompt(world)[len("[system]Be brief.[user]One[assistant]Two\n") :].partition("[user]")[0]
    assert calls.startswith('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    results = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in ("42", "Error: no", ""))
    assert last_prompt(world) == (
        f"[system]Be brief.[user]One[assistant]Two\n{calls}[user]{results}\nThree[assistant]Four[system]Five[user]Six[assistant]"
    )


async def test_an_answer_that_was_begun_is_gone_on_with(world: World):
    body = (await ask(world, [USER, {"role": "assistant", "content": "1, 2,"}])).json()
    assert last_prompt(world) == "[user]Hi[assistant]1, 2,"
    assert body["content"] == [{"type": "text", "text": ANSWER[:10]}]


async def test_stop_sequences_reach_the_engine(world: World):
    await ask(world, stop_sequences=["a", "b"])
    assert world.generator.requests[-1].params.stop == ("a", "b")


async def test_the_form_of_the_text_reaches_the_engine(world: World):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await ask(world, output_config={"format": {"type": "json_schema", "schema": schema}})
    structured = world.generator.requests[-1].params.structured
    assert structured is not None
    assert (structured.kind, json.loads(structured.source), structured.param) == ("json_schema", schema, "output_config.format.schema")


async def test_counting_is_what_an_answer_is_charged_for(world: World):
    for fields in ({}, {"system": "Be brief."}, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}):
        body = {"messages": [USER], "model": "tiny", **fields}
        count = (await world.post("/v1/messages/count_tokens", body)).json()
        assert count == {"input_tokens": (await ask(world, **fields)).json()["usage"]["input_tokens"]}
    refused(await world.post("/v1/messages/count_tokens", {}), about="messages")


@pytest.mark.parametrize("world", [{"api_keys": ("one", "two")}], indirect=True)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "one"}, 200),
        ({"Authorization": "Bearer two"}, 200),
        ({"x-api-key": "one", "Authorization": "Bearer one"}, 200),
        ({"x-api-key": "one", "Authorization": "Bearer two"}, 401),
        ({"x-api-key": "one", "Authorization": "Basic one"}, 401),
        ({"x-api-key": "three"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ],
)
async def test_a_key_may_come_in_either_header(world: World, headers: dict[str, str], status: int):
    body = {"messages": [USER], "max_tokens": 1}
    response = await world.post("/v1/messages", body, headers={"anthropic-version": "2023-06-01", **headers})
    assert response.status_code == status
    if status == 401:
        refused(response, 401, kind="authentication_error")


async def test_errors_are_in_anthropics_shape_with_their_status(world: World):
    refused(await ask(world, model="nope"), 404, kind="not_found_error", about="nope")
    refused(await world.http.get("/v1/messages"), 405, about="POST")
    refused(await world.http.post("/v1/messages/nope"), 404, kind="not_found_error")
    refused(await world.http.post("/v1/messages", content=b"{"), about="JSON")
    for error, status, kind in (
        (InvalidRequest("bad", param="prompt"), 400, "invalid_request_error"),
        (QueueFull("full"), 429, "rate_limit_error"),
        (RequestFailed("broken"), 500, "api_error"),
        (EngineUnavailable("gone"), 503, "overloaded_error"),
    ):
        world.generator.error = error
        for stream in (False, True):
            refused(await ask(world, stream=stream), status, kind=kind, about=error.message)


async def test_a_stream_that_fails_ends_with_an_error_event(world: World):
    world.generator.error, world.generator.error_after = RequestFailed("broken"), 3
    events = named_events((await ask(world, stream=True)).text)
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "broken"}}
    assert "message_stop" not in [event["type"] for event in events]


@pytest.mark.parametrize(
    ("messages", "about"),
    [
        *((value, "messages") for value in (None, [], "hi", 5)),
        *(([value], "messages[0]") for value in (None, "hi", 5)),
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "multimodal"),
        ([{"role": "user", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "t"}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}], "redacted_thinking"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "forever"}}]}], "cache_control"),
        ([{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": 5}]}], "tool_result"),
        ([{"role": "user", "content": "x" * CONTEXT * 20}], "context"),
        ([{"role": "user", "content": "x" * CONTEXT}], "context"),
    ],
)
async def test_bad_messages_are_refused_by_name(world: World, messages, about):
    refused(await ask(world, messages), about=about)
    assert not world.generator.requests


@pytest.mark.parametrize(
    ("fields", "about"),
    [
        *(({name: {"x": 1}}, name) for name in UNSUPPORTED),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop": "x"}, "stop"),
        ({"n": 2}, "n"),
        ({"tools": 5}, "tools"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"metadata": {"a": "b"}}, "metadata.a"),
    ],
)
async def test_bad_options_are_refused_by_name(world: World, fields, about):
    refused(await ask(world, **fields), about=about)
    assert not world.generator.requests


async def test_every_optional_field_may_be_null(world: World):
    names = (set(MessageBody.model_fields) | set(UNSUPPORTED)) - {"messages", "max_tokens"}
    response = await ask(world, **dict.fromkeys(names))
    assert response.status_code == 200, response.text
    assert response.json()["content"] == (await ask(world)).json()["content"]
    assert (await ask(world, speed="standard", thinking={"type": "disabled"})).status_code == 200
