import asyncio
import json
from typing import Any

import httpx
import pytest

from headrace.errors import EngineUnavailable, InvalidRequest, RequestFailed
from headrace.server.responses.schema import UNSUPPORTED, ResponseBody
from tests.patience import LIMIT_S, eventually
from tests.server.fakes import ANSWER, CONTEXT, World, refused

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
NAMED = {"type": "function", "name": "f"}
Events = list[tuple[str, dict[str, Any]]]


async def respond(world: World, value: object = "Hi", **fields: object) -> httpx.Response:
    return await world.post("/v1/responses", {"input": value, "max_output_tokens": 12, **fields})


def named_events(text: str) -> Events:
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def last_prompt(world: World) -> str:
    return bytes(world.generator.requests[-1].prompt_token_ids).decode()


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def without_ids(value: Any) -> Any:
    """A response without what differs each time."""
    if isinstance(value, dict):
        return {key: without_ids(item) for key, item in value.items() if key not in ("id", "created_at", "completed_at", "call_id")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


async def test_plain_answer(world: World):
    world.generator.cached_tokens = 4
    response = (await respond(world, instructions="Be brief.", metadata={"a": "b"}, user="u", temperature=0.5)).json()
    assert response["id"].startswith("resp_")
    assert response["object"] == "response"
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = response["output"]
    assert item["id"].startswith("msg_")
    part = {"type": "output_text", "text": ANSWER[:10], "annotations": [], "logprobs": []}
    assert {**item, "id": None} == {"type": "message", "id": None, "status": "incomplete", "role": "assistant", "content": [part]}
    assert response["usage"] == {
        "input_tokens": len("[system]Be brief.[user]Hi[assistant]"),
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len("[system]Be brief.[user]Hi[assistant]") + 12,
    }
    assert (response["instructions"], response["metadata"], response["user"]) == ("Be brief.", {"a": "b"}, "u")
    assert (response["temperature"], response["top_p"], response["store"]) == (0.5, 1.0, True)


async def test_a_stream_has_the_documented_events_and_is_the_plain_answer(world: World):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    plain = (await respond(world, **fields)).json()
    events = named_events((await respond(world, **fields, stream=True)).text)
    kinds = [kind for kind, _ in events]
    deltas = [event for kind, event in events if kind == "response.output_text.delta"]
    assert kinds == [
        *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
        *["response.output_text.delta"] * len(deltas),
        *("response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete"),
    ]
    assert [event["type"] for _, event in events] == kinds
    assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
    created, final = events[0][1]["response"], events[-1][1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert "".join(event["delta"] for event in deltas) == text_of(final)
    assert [entry for event in deltas for entry in event["logprobs"]] == final["output"][0]["content"][0]["logprobs"]
    assert len(final["output"][0]["content"][0]["logprobs"]) == 12
    assert without_ids(final) == without_ids(plain)
    assert {event["item_id"] for _, event in events if "item_id" in event} == {final["output"][0]["id"]}


async def test_an_item_of_each_kind_becomes_its_turn(world: World):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "O"}, {"type": "input_text", "text": "ne"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Two", "annotations": [], "parsed": None}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "parsed_arguments": None},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "42"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
        {"role": "user", "content": "Three"},
    ]
    response = await respond(world, items)
    assert response.status_code == 200, response.text
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    result = "<tool_response>\n42\n</tool_response>"
    assert last_prompt(world) == f"[system]Be brief.[user]One[assistant]Two\n{call}[user]{result}[assistant]No[user]Three[assistant]"
    listed = (await world.http.get(f"/v1/responses/{response.json()['id']}/input_items?order=asc&limit=100")).json()
    assert [item["type"] for item in listed["data"]] == [
        *("message", "message", "reasoning", "message", "function_call", "function_call_output", "message", "message")
    ]
    assert all(item["id"] and item["status"] == "completed" for item in listed["data"])


async def test_the_form_of_the_text_reaches_the_engine(world: World):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    response = (await respond(world, text={"format": form})).json()
    assert response["text"] == {"format": form, "verbosity": "medium"}
    structured = world.generator.requests[-1].params.structured
    assert structured is not None
    assert (structured.kind, json.loads(structured.source), structured.param) == ("json_schema", schema, "text.format.schema")
    await respond(world, text={"format": {"type": "json_object"}})
    structured = world.generator.requests[-1].params.structured
    assert structured is not None
    assert structured.kind == "json_object"
    await respond(world, text={"format": {"type": "text"}})
    assert world.generator.requests[-1].params.structured is None


async def test_a_conversation_goes_on_from_a_stored_response(world: World):
    first = (await respond(world, instructions="Be brief.")).json()
    second = (await respond(world, "And?", previous_response_id=first["id"])).json()
    assert last_prompt(world) == f"[user]Hi[assistant]{ANSWER[:10]}[user]And?[assistant]"  # instructions are not carried over
    assert second["previous_response_id"] == first["id"]
    await world.http.delete(f"/v1/responses/{first['id']}")
    await respond(world, "So?", previous_response_id=second["id"], stream=True)  # what came before is kept with the last one
    assert last_prompt(world) == f"[user]Hi[assistant]{ANSWER[:10]}[user]And?[assistant]{ANSWER[:10]}[user]So?[assistant]"


async def test_what_is_not_stored_cannot_be_fetched_or_continued(world: World):
    response = (await respond(world, store=False)).json()
    assert response["store"] is False
    refused(await world.http.get(f"/v1/responses/{response['id']}"), 404, param="response_id")
    refused(await respond(world, previous_response_id=response["id"]), param="previous_response_id", code="previous_response_not_found")


async def test_stored_responses_can_be_fetched_and_deleted(world: World):
    response = (await respond(world, stream=True)).text
    final = named_events(response)[-1][1]["response"]
    path = f"/v1/responses/{final['id']}"
    assert (await world.http.get(path)).json() == final
    assert (await world.http.get(path, params={"include[]": "reasoning.encrypted_content"})).json() == final
    refused(await world.http.get(path, params={"include": "everything"}), param="include")
    refused(await world.http.get(path, params={"stream": "true"}), param="stream")
    refused(await world.http.get(path, params={"what": "1"}), param="what")
    assert (await world.http.delete(path)).json() == {"id": final["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        refused(await world.http.request(method, path), 404, param="response_id")
    assert refused(await world.http.put(path), 405)
    assert (await world.http.put(path)).headers["allow"] == "DELETE, GET, HEAD"


async def test_pages_of_input_items(world: World):
    response = (await respond(world, [{"role": "user", "content": str(number)} for number in range(5)])).json()
    path = f"/v1/responses/{response['id']}/input_items"

    async def page(**params: object) -> tuple[str, bool, dict[str, Any]]:
        body = (await world.http.get(path, params=params)).json()  # type: ignore[arg-type]
        assert body["object"] == "list"
        return "".join(item["content"][0]["text"] for item in body["data"]), body["has_more"], body

    assert (await page())[:2] == ("43210", False)
    assert (await page(order="asc"))[:2] == ("01234", False)
    texts, more, body = await page(order="asc", limit=2)
    assert (texts, more, body["first_id"], body["last_id"]) == ("01", True, body["data"][0]["id"], body["data"][1]["id"])
    assert (await page(order="asc", limit=2, after=body["last_id"]))[:2] == ("23", True)
    assert (await page(after=body["first_id"]))[2]["first_id"] is None
    for params in ({"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "msg_nope"}):
        refused(await world.http.get(path, params=params), param=next(iter(params)))  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [{"api_keys": ("one", "two")}], indirect=True)
async def test_nobody_sees_the_responses_of_another_key(world: World):
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    response = (await world.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1}, headers=one)).json()
    path = f"/v1/responses/{response['id']}"
    refused(await world.http.get(path, headers=two), 404)
    refused(await world.http.delete(path, headers=two), 404)
    body = {"input": "Hi", "previous_response_id": response["id"]}
    refused(await world.post("/v1/responses", body, headers=two), param="previous_response_id")
    assert (await world.http.get(path, headers=one)).status_code == 200


async def test_an_error_before_the_first_token_has_a_status_of_its_own(world: World):
    world.generator.error = InvalidRequest("no", param="prompt")
    for stream in (False, True):
        refused(await respond(world, stream=stream), param="input")
    world.generator.error = EngineUnavailable("gone")
    refused(await respond(world), 503)


async def test_a_stream_that_fails_says_so_last_and_keeps_what_there_is(world: World):
    world.generator.error, world.generator.error_after = RequestFailed("broken"), 3
    kind, event = named_events((await respond(world, stream=True)).text)[-1]
    assert kind == "response.failed"
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "server_error"
    assert text_of(event["response"]) == "Hé"
    assert (await world.http.get(f"/v1/responses/{event['response']['id']}")).json() == event["response"]
    refused(await respond(world, previous_response_id=event["response"]["id"]), param="previous_response_id")


async def test_the_oldest_items_go_where_truncation_is_auto(world: World):
    turns = [{"role": ("user", "assistant")[number % 2], "content": f"{number:02}" * 30} for number in range(20)]
    items = [{"role": "system", "content": "Stay."}, *turns, {"role": "user", "content": "Last."}]
    refused(await respond(world, items), param="input", code="context_length_exceeded")
    response = (await respond(world, items, truncation="auto", max_output_tokens=20)).json()
    prompt = last_prompt(world)
    assert prompt.startswith("[system]Stay.[")
    assert prompt.endswith("1919[user]Last.[assistant]")
    assert CONTEXT - 20 - 80 < len(prompt) <= CONTEXT - 20
    assert response["truncation"] == "auto"
    listed = (await world.http.get(f"/v1/responses/{response['id']}/input_items?order=asc")).json()["data"]
    assert prompt == "".join(f"[{item['role']}]{item['content'][0]['text']}" for item in listed) + "[assistant]"
    refused(await respond(world, "x" * CONTEXT, truncation="auto"), param="input", code="context_length_exceeded")


async def test_a_background_response_is_fetched_later(world: World):
    world.generator.pause = asyncio.Event()
    queued = (await respond(world, background=True)).json()
    assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
    path = f"/v1/responses/{queued['id']}"
    await eventually(lambda: world.generator.open == 1)
    assert (await world.http.get(path)).json()["status"] == "in_progress"
    assert world.service.admission.active == 1
    refused(await respond(world, previous_response_id=queued["id"]), param="previous_response_id")
    world.generator.pause.set()
    await asyncio.wait_for(world.service.admission.idle.wait(), LIMIT_S)
    final = (await world.http.get(path)).json()
    assert (final["status"], text_of(final)) == ("incomplete", ANSWER[:10])
    refused(await world.http.post(f"{path}/cancel"), param="response_id")


async def test_a_background_response_can_be_cancelled_or_deleted(world: World):
    world.generator.pause = asyncio.Event()
    paths = [f"/v1/responses/{(await respond(world, background=True)).json()['id']}" for _ in range(3)]
    await eventually(lambda: world.generator.open == 3)
    assert (await world.http.post(f"{paths[0]}/cancel")).json()["status"] == "cancelled"
    assert (await world.http.post(f"{paths[0]}/cancel")).json()["status"] == "cancelled"
    assert (await world.http.get(paths[0])).json()["status"] == "cancelled"
    assert (await world.http.delete(paths[1])).status_code == 200
    assert world.generator.open == 1
    world.generator.error = RequestFailed("broken")
    world.generator.error_after = 1
    world.generator.pause.set()
    await asyncio.wait_for(world.service.admission.idle.wait(), LIMIT_S)
    failed = (await world.http.get(paths[2])).json()
    assert (failed["status"], failed["error"]["message"]) == ("failed", "broken")
    refused(await world.http.get(paths[1]), 404)


@pytest.mark.parametrize("world", [{"max_requests": 1}], indirect=True)
async def test_background_responses_are_admitted_like_others(world: World):
    refused(await respond(world, background=True), 429)
    assert world.service.admission.active == 0
    foreground = (await respond(world)).json()
    refused(await world.http.post(f"/v1/responses/{foreground['id']}/cancel"), param="response_id")


async def test_counting_is_what_an_answer_is_charged_for(world: World):
    first = (await respond(world)).json()
    for fields in ({"instructions": "Be."}, {"previous_response_id": first["id"]}):
        count = (await world.post("/v1/responses/input_tokens", {"input": "Hi", **fields})).json()
        answer = (await respond(world, **fields)).json()
        assert count == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}
    refused(await world.post("/v1/responses/input_tokens", {}), param="input")


@pytest.mark.parametrize(
    ("value", "param"),
    [
        *((value, "input") for value in (None, 5, [], {})),
        *(([value], "input[0]") for value in (None, "x", 5)),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].type"),
        ([{"id": "msg_1"}], "input[0].type"),
        ([{"type": "computer_call"}], "input[0].type"),
        ([{}], "input[0].role"),
        ([{"role": "wizard", "content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": 5}], "input[0].content"),
        ([{"role": "user", "content": [5]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
        ([{"role": "user", "content": "x", "weight": 1}], "input[0].weight"),
        ([{"type": "function_call", "call_id": "c", "name": "f"}], "input[0].arguments"),
        ([{"type": "function_call_output", "call_id": "c", "output": 5}], "input[0].output"),
        ([{"type": "reasoning", "encrypted_content": "abc"}], "input[0].encrypted_content"),
        ("x" * CONTEXT * 20, "input"),
        ("x" * CONTEXT, "input"),
    ],
)
async def test_bad_input_is_refused_by_name(world: World, value, param):
    refused(await respond(world, value), param=param)
    assert not world.generator.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *(({name: {"id": "x"}}, name) for name in UNSUPPORTED),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"include": ["message.output_text.logprobs"], "tools": [FUNCTION]}, "include"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "stream"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"truncation": "middle"}, "truncation"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "weight": 1}}}, "text.format.weight"),
        ({"tools": "weather"}, "tools"),
        ({"tools": ["weather"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tools": [FUNCTION], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}},
            "tool_choice.tools",
        ),
        ({"metadata": {"k" * 65: "v"}}, "metadata." + "k" * 65),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"metadata": {str(number): "v" for number in range(17)}}, "metadata"),
        ({"user": "u" * 600}, "user"),
        ({"tools": [{**FUNCTION, "description": "x" * 2**20}], "tool_choice": "none"}, "tools"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"messages": []}, "messages"),
    ],
)
async def test_bad_options_are_refused_by_name(world: World, fields, param):
    refused(await respond(world, **fields), param=param)
    assert not world.generator.requests


async def test_every_optional_field_may_be_null(world: World):
    names = (set(ResponseBody.model_fields) | set(UNSUPPORTED)) - {"input", "max_output_tokens"}
    response = await respond(world, **dict.fromkeys(names))
    assert response.status_code == 200, response.text
    assert without_ids(response.json()) == without_ids((await respond(world)).json())


async def test_paths_with_ids_are_counted_under_one_label(world: World):
    await world.http.get("/v1/responses/resp_1")
    await world.http.get("/v1/responses/resp_2")
    metrics = (await world.http.get("/metrics")).text
    (line,) = [line for line in metrics.splitlines() if '/v1/responses/{response_id}"' in line and "4xx" in line]
    assert line.endswith(" 2.0")
    assert "resp_1" not in metrics
