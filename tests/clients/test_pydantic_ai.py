"""pydantic-ai's agents over chats, responses and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic_ai import Agent, NativeOutput, RunContext, ToolDefinition, ToolOutput
from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.conftest import KEY, Server
from tests.clients.tasks import ANSWER, FORM_QUESTION, QUESTION, Place, Weather

SETTINGS = {"temperature": 0, "max_tokens": 200}
MODELS: dict[str, Callable[[Server], Model]] = {
    "chat": lambda server: OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.openai_url, api_key=KEY)),
    "responses": lambda server: OpenAIResponsesModel(server.model, provider=OpenAIProvider(base_url=server.openai_url, api_key=KEY)),
    "messages": lambda server: AnthropicModel(
        server.model, provider=AnthropicProvider(base_url=server.url, api_key=KEY), profile={"supports_json_schema_output": True}
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, server: Server) -> Model:
    return MODELS[request.param](server)


async def test_chat_and_stream(model: Model):
    agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 24}, system_prompt="You are helpful.")
    whole = await agent.run(QUESTION)
    assert ANSWER in whole.output
    async with agent.run_stream(QUESTION) as stream:
        assert "".join([text async for text in stream.stream_text(delta=True)]) == whole.output
    again = await agent.run("And of Italy?", message_history=whole.all_messages())
    assert again.output


@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
async def test_typed(model: Model, form: Any):
    agent = Agent(model, output_type=form(Place), model_settings=SETTINGS, retries=0)
    assert isinstance((await agent.run(FORM_QUESTION)).output, Place)


async def test_tool(model: Model):
    """A function that has to be called first; what it says goes back to the model, which then has to answer in a form."""
    asked: list[Weather] = []

    async def at_first(context: RunContext[None], tools: list[ToolDefinition]) -> list[ToolDefinition]:
        return [] if asked else tools

    async def then(context: RunContext[None], tools: list[ToolDefinition]) -> list[ToolDefinition]:
        return tools if asked else []

    def weather(request: Weather) -> str:
        """Tells the weather of a city."""
        asked.append(request)
        return "Sunny."

    capabilities = [PrepareTools(at_first), PrepareOutputTools(then)]
    agent = Agent(model, output_type=ToolOutput(Place), tools=[weather], capabilities=capabilities, model_settings=SETTINGS, retries=0)
    result = await agent.run(FORM_QUESTION)
    assert isinstance(result.output, Place)
    assert asked
