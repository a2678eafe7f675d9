"""Anthropic's Python client."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest

from tests.clients.conftest import KEY, Server
from tests.clients.tasks import ANSWER, FORM_QUESTION, QUESTION, TOOL_QUESTION, Place, Weather

TOOL = {"name": "weather", "description": "Tells the weather of a city.", "input_schema": Weather.model_json_schema()}
GREEDY = {"extra_body": {"temperature": 0}}


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def test_chat_and_stream(client: anthropic.Anthropic, server: Server):
    request = {"model": server.model, "max_tokens": 24, "messages": [{"role": "user", "content": QUESTION}], **GREEDY}
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
    assert whole.content[0].text == text
    assert ANSWER in text
    assert client.messages.count_tokens(model=server.model, messages=request["messages"]).input_tokens == whole.usage.input_tokens


def test_tool_and_its_result(client: anthropic.Anthropic, server: Server):
    asked = [{"role": "user", "content": TOOL_QUESTION}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    request = {"model": server.model, "max_tokens": 100, "tools": [TOOL], **GREEDY}
    with client.messages.stream(**request, messages=asked, tool_choice=choice) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (use,) = message.content
    Weather.model_validate(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny."}
    history = [*asked, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**request, messages=history, tool_choice={"type": "none"}).content[0].text


def test_typed(client: anthropic.Anthropic, server: Server):
    messages = [{"role": "user", "content": FORM_QUESTION}]
    parsed = client.messages.parse(model=server.model, max_tokens=200, messages=messages, output_format=Place, **GREEDY)
    assert isinstance(parsed.parsed_output, Place)


async def test_async(server: Server):
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        request = {"model": server.model, "max_tokens": 12, "messages": [{"role": "user", "content": QUESTION}], **GREEDY}
        whole = await client.messages.create(**request)
        async with client.messages.stream(**request) as stream:
            assert "".join([text async for text in stream.text_stream]) == whole.content[0].text


def test_errors(client: anthropic.Anthropic):
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="nope", max_tokens=1, messages=[{"role": "user", "content": QUESTION}])
    assert unknown.value.request_id
