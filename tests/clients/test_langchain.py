"""LangChain's models for OpenAI's API."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

from tests.clients.conftest import KEY, Server
from tests.clients.tasks import ANSWER, FORM_QUESTION, QUESTION, TOOL_QUESTION, Place, Weather


def chat_model(server: Server, **options: Any) -> ChatOpenAI:
    options = {"max_tokens": 200, "temperature": 0, "max_retries": 0, **options}
    return ChatOpenAI(base_url=server.openai_url, api_key=KEY, model=server.model, **options)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_chat_and_stream(server: Server, use_responses_api: bool):
    model = chat_model(server, max_tokens=24, stream_usage=True, use_responses_api=use_responses_api)
    whole = model.invoke(QUESTION)
    chunks = list(model.stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert ANSWER in whole.text
    assert whole.usage_metadata["output_tokens"] == sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_tool_and_its_result(server: Server, use_responses_api: bool):
    model = chat_model(server, use_responses_api=use_responses_api)
    asked = HumanMessage(TOOL_QUESTION)
    message = model.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False).invoke([asked])
    (call,) = message.tool_calls
    Weather.model_validate(call["args"])
    after = model.bind_tools([Weather], tool_choice="none").invoke([asked, message, ToolMessage("Sunny.", tool_call_id=call["id"])])
    assert after.text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("strict", [None, True])
def test_typed(server: Server, method: Any, strict: bool | None):
    model = chat_model(server).with_structured_output(Place, method=method, strict=strict)
    assert isinstance(model.invoke(FORM_QUESTION), Place)
    assert isinstance(list(model.stream(FORM_QUESTION))[-1], Place)


async def test_async_batch(server: Server):
    answers = await chat_model(server, max_tokens=16).abatch([QUESTION, QUESTION, "Say hi."])
    assert answers[0].text == answers[1].text
    assert ANSWER in answers[0].text


def test_embeddings(server: Server):
    embeddings = OpenAIEmbeddings(base_url=server.openai_url, api_key=KEY, model=server.model, dimensions=32, check_embedding_ctx_length=False)
    assert [len(vector) for vector in embeddings.embed_documents(["A cat.", "A kitten."])] == [32, 32]
