"""LiteLLM, as a client of OpenAI's, vLLM's and Anthropic's APIs."""

from __future__ import annotations

from typing import Any

import litellm
import pytest

from tests.clients.conftest import KEY, Server
from tests.clients.tasks import ANSWER, FORM_QUESTION, QUESTION, TOOL_QUESTION, WEATHER_TOOL, Place, Weather

PROVIDERS = ["openai", "hosted_vllm", "anthropic"]


def complete(server: Server, provider: str, question: str | list[Any], **options: Any) -> Any:
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    url = server.url if provider == "anthropic" else server.openai_url
    options = {"temperature": 0, "max_tokens": 200, "num_retries": 0, **options}
    return litellm.completion(model=f"{provider}/{server.model}", api_base=url, api_key=KEY, messages=messages, **options)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_chat_and_stream(server: Server, provider: str):
    whole = complete(server, provider, QUESTION, max_tokens=24)
    chunks = list(complete(server, provider, QUESTION, max_tokens=24, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == text
    assert ANSWER in text
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("provider", PROVIDERS)
def test_tool_and_its_result(server: Server, provider: str):
    asked = {"role": "user", "content": TOOL_QUESTION}
    options = {"tools": [WEATHER_TOOL], "parallel_tool_calls": False}
    message = complete(server, provider, [asked], tool_choice="required", **options).choices[0].message
    (call,) = message.tool_calls
    Weather.model_validate_json(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    assert complete(server, provider, [asked, message.model_dump(), result], tool_choice="none", **options).choices[0].message.content


@pytest.mark.parametrize("provider", PROVIDERS)
def test_typed(server: Server, provider: str):
    answer = complete(server, provider, FORM_QUESTION, response_format=Place).choices[0].message.content
    Place.model_validate_json(answer)


def test_responses_and_embeddings(server: Server):
    where = {"model": f"openai/{server.model}", "api_base": server.openai_url, "api_key": KEY}
    answer = litellm.responses(**where, input=QUESTION, temperature=0, max_output_tokens=24)
    assert ANSWER in answer.output[0].content[0].text
    assert len(litellm.embedding(**where, input=["A cat.", "A kitten."]).data) == 2
    assert ANSWER in litellm.text_completion(**where, prompt="The capital of France is", max_tokens=8, temperature=0).choices[0].text
