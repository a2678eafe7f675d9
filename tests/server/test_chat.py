import pytest

from headrace.errors import ContextLengthExceeded
from headrace.server.chat_prompt import one_message, template_message
from headrace.server.schema import ChatBody
from headrace.server.unsupported import UNSUPPORTED
from tests.server.fakes import ANSWER, CONTEXT, World, events, refused

USER = {"role": "user", "content": "Hi"}


async def test_plain_answer(world: World):
    body = (await world.chat(max_tokens=12)).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER[:10], "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == len("[user]Hi[assistant]")


async def test_streams_are_the_plain_answer_in_pieces(world: World):
    fields = {"n": 3, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    plain = (await world.chat(**fields)).json()
    *chunks, done = events((await world.chat(**fields, stream=True)).text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(len(chunk["choices"]) == 1 and "usage" not in chunk for chunk in chunks)
    for whole in plain["choices"]:
        pieces = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == whole["index"]]
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        assert pieces[-1]["delta"] == {}
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert "".join(piece["delta"].get("content", "") for piece in pieces) == whole["message"]["content"]
        entries = [entry for piece in pieces for entry in (piece["logprobs"] or {"content": []})["content"]]
        assert entries == whole["logprobs"]["content"]
        assert len(entries) == 9
        assert bytes(value for entry in entries for value in entry["bytes"]).decode() == whole["message"]["content"]
        assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


async def test_without_a_limit_the_answer_fills_the_context(world: World):
    assert (await world.chat()).json()["usage"]["total_tokens"] == CONTEXT


async def test_a_prompt_that_the_engine_refuses_is_the_messages(world: World):
    world.generator.error = ContextLengthExceeded("no room in the KV cache", param="prompt")
    refused(await world.chat(), param="messages", code="context_length_exceeded")


FUNCTION = {"name": "f", "arguments": "{}", "parsed_arguments": {}}  # the last one is of the official clients


async def test_parts_null_and_roles_become_the_text_of_the_prompt(world: World):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Hi", "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}]},
        {"role": "tool", "content": "42", "tool_call_id": "c"},
        {"role": "assistant", "content": "ok", "refusal": None, "annotations": [], "audio": None, "function_call": None, "parsed": {"a": 1}},
        {"role": "user", "content": None},
    ]
    response = await world.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert response.status_code == 200, response.text
    prompt = bytes(world.generator.requests[-1].prompt_token_ids).decode()
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    result = "<tool_response>\n42\n</tool_response>"
    assert prompt == f"[system]Be brief.[user]Hi[assistant]{call}[user]{result}[assistant]ok[user][assistant]"


def test_templates_are_not_given_what_clients_made_of_an_answer():
    call = {"id": "c", "type": "function", "function": FUNCTION}
    message = template_message(one_message({"role": "assistant", "content": None, "parsed": None, "tool_calls": [call]}, "messages[0]"))
    plain = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert message == {"role": "assistant", "content": None, "tool_calls": [plain]}


async def test_the_text_of_control_tokens_stays_text(world: World):
    await world.chat("a</s>b", max_tokens=1)
    assert 257 not in world.generator.requests[-1].prompt_token_ids


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        *((value, "messages") for value in (None, [], "hi", {}, 5)),
        *(([value], "messages[0]") for value in (None, 1, "hi", [])),
        ([{}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([USER, {"role": "assistant"}], "messages[1].content"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "weight": 3}], "messages[0].weight"),
        ([{"role": "user", "content": "x" * CONTEXT * 10}], "messages"),
        ([{"role": "user", "content": "x" * CONTEXT}], "messages"),
    ],
)
async def test_bad_messages_are_refused_by_name(world: World, messages, param):
    refused(await world.post("/v1/chat/completions", {"messages": messages}), param=param)
    assert not world.generator.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "max_tokens": 30}, "max_completion_tokens"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"verbosity": "high"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"store": True}, "store"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "x"}, "prompt"),
    ],
)
async def test_bad_options_are_refused_by_name(world: World, fields, param):
    refused(await world.chat(**fields), param=param)
    assert not world.generator.requests


async def test_options_that_ask_for_nothing_are_accepted(world: World):
    fields = {
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "store": False,
        "verbosity": "medium",
        "parallel_tool_calls": True,
    }
    more = {
        "tools": [],
        "reasoning_effort": "none",
        "prediction": {"type": "content", "content": "x"},
        "add_special_tokens": False,
        "max_completion_tokens": 3,
    }
    assert (await world.chat(**fields, **more, max_tokens=3)).status_code == 200


async def test_every_optional_field_may_be_null(world: World):
    names = (set(ChatBody.model_fields) | set(UNSUPPORTED)) - {"messages"}
    response = await world.chat(**dict.fromkeys(names))
    assert response.status_code == 200, response.text
    assert response.json()["choices"] == (await world.chat()).json()["choices"]


async def test_the_last_message_can_be_continued_and_echoed(world: World):
    messages = [USER, {"role": "assistant", "content": "1, 2,"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1}
    answer = (await world.post("/v1/chat/completions", body)).json()
    assert bytes(world.generator.requests[-1].prompt_token_ids).decode() == "[user]Hi[assistant]1, 2,"
    assert answer["choices"][0]["message"]["content"] == "H"
    for stream in (False, True):
        echoed = await world.post("/v1/chat/completions", {**body, "echo": True, "stream": stream})
        if stream:
            deltas = [chunk["choices"][0]["delta"] for chunk in events(echoed.text)[:-1]]
            assert "".join(delta.get("content", "") for delta in deltas) == "1, 2,H"
        else:
            assert echoed.json()["choices"][0]["message"]["content"] == "1, 2,H"


@pytest.mark.parametrize("world", [{"trust_request_chat_template": True}], indirect=True)
async def test_templates_of_requests_where_the_operator_trusts_them(world: World):
    await world.chat(max_tokens=1, chat_template="<{{ messages[0].content }}{{ extra }}>", chat_template_kwargs={"extra": "!"})
    assert bytes(world.generator.requests[-1].prompt_token_ids) == b"<Hi!>"
    for template in ("{% if %}", "{{ ''.__class__.__mro__ }}", "{{ 1/0 }}"):
        refused(await world.chat(chat_template=template))


async def test_token_ids_and_prompt_scores_of_a_chat(world: World):
    choice = (await world.chat(max_tokens=2, return_token_ids=True, prompt_logprobs=0)).json()["choices"][0]
    assert choice["token_ids"] == list(ANSWER.encode()[:2])
    assert choice["prompt_token_ids"] == list(b"[user]Hi[assistant]")
    assert choice["prompt_logprobs"][0] is None
    assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"])
    chunks = events((await world.chat(max_tokens=2, return_token_ids=True, stream=True)).text)[:-1]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", [])] == choice["token_ids"]
