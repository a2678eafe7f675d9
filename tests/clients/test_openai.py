"""OpenAI's Python client."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.clients.conftest import KEY, Server
from tests.clients.tasks import ANSWER, FORM_QUESTION, QUESTION, TOOL_QUESTION, WEATHER_TOOL, Place, Weather

MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.openai_url, api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def test_models(client: openai.OpenAI, server: Server):
    assert [model.id for model in client.models.list()] == [server.model]
    assert client.models.retrieve(server.model).id == server.model


def test_chat_and_stream(client: openai.OpenAI, server: Server):
    request = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert whole.choices[0].message.content == text
    assert ANSWER in text
    assert chunks[-1].usage == whole.usage


def test_tool_and_its_result(client: openai.OpenAI, server: Server):
    asked = [{"role": "user", "content": TOOL_QUESTION}]
    request = {"model": server.model, "tools": [WEATHER_TOOL], "temperature": 0, "max_completion_tokens": 100}
    message = client.chat.completions.create(**request, messages=asked, tool_choice="required").choices[0].message
    (call, *others) = message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    results = [{"role": "tool", "tool_call_id": each.id, "content": "Sunny."} for each in (call, *others)]
    after = client.chat.completions.create(**request, messages=[*asked, message, *results], tool_choice="none").choices[0]
    assert after.message.content


def test_streamed_tool(client: openai.OpenAI, server: Server):
    tool = openai.pydantic_function_tool(Weather, name="weather")
    request = {"model": server.model, "messages": [{"role": "user", "content": TOOL_QUESTION}], "tools": [tool], "temperature": 0}
    with client.chat.completions.stream(**request, tool_choice="required", parallel_tool_calls=False) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert isinstance(call.function.parsed_arguments, Weather)


def test_typed(client: openai.OpenAI, server: Server):
    request = {"model": server.model, "messages": [{"role": "user", "content": FORM_QUESTION}], "temperature": 0, "max_completion_tokens": 200}
    parsed = client.chat.completions.parse(**request, response_format=Place)
    assert isinstance(parsed.choices[0].message.parsed, Place)
    with client.chat.completions.stream(**request, response_format=Place) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed


def test_responses(client: openai.OpenAI, server: Server):
    request = {"model": server.model, "input": QUESTION, "temperature": 0, "max_output_tokens": 24}
    whole = client.responses.create(**request)
    with client.responses.stream(**request) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert whole.output_text == text
    assert ANSWER in text
    tool = {"type": "function", "name": "weather", "parameters": Weather.model_json_schema(), "strict": True}
    called = client.responses.create(model=server.model, input=TOOL_QUESTION, tools=[tool], tool_choice="required", temperature=0)
    assert {item.type for item in called.output} == {"function_call"}
    typed = client.responses.parse(model=server.model, input=FORM_QUESTION, text_format=Place, temperature=0, max_output_tokens=200)
    assert isinstance(typed.output_parsed, Place)


def test_completion_and_embeddings(client: openai.OpenAI, server: Server):
    completion = client.completions.create(model=server.model, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert ANSWER in completion.choices[0].text
    embedded = client.embeddings.create(model=server.model, input=["A cat.", "A kitten."], dimensions=64)  # asks for base64
    assert [len(item.embedding) for item in embedded.data] == [64, 64]


async def test_async(server: Server):
    async with openai.AsyncOpenAI(base_url=server.openai_url, api_key=KEY, max_retries=0) as client:
        request = {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12}
        whole = await client.chat.completions.create(**request)
        stream = await client.chat.completions.create(**request, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == whole.choices[0].message.content


def test_errors(client: openai.OpenAI, server: Server):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model=server.model, messages=MESSAGES, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
        )
    assert "not" in refused.value.message
