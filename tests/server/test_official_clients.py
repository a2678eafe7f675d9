"""The official clients of OpenAI's responses and of Anthropic's messages, against the real model."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import anthropic
import httpx
import openai
import pydantic
import pytest

from headrace.models.store import resolve_model
from tests.patience import LIMIT_S
from tests.ports import free_port

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

KEY = "a-key"
MODEL = "small"
ASK = "Say hi."


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log.txt"
    command = [sys.executable, "-m", "headrace", "serve", str(resolve_model(None)), "--port", str(port), "--served-model-name", MODEL]
    command += ["--api-key", KEY, "--max-model-len", "2048"]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2]) as process:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_ready(url, process, log)
            yield url
        finally:
            process.terminate()


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            if httpx.get(f"{url}/ready", timeout=LIMIT_S, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)


@pytest.fixture
def openai_client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=LIMIT_S) as client:
        yield client


@pytest.fixture
def anthropic_client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=LIMIT_S) as client:
        yield client


def test_responses_plain_and_streamed(openai_client: openai.OpenAI):
    request = {"model": MODEL, "input": ASK, "temperature": 0, "max_output_tokens": 40}
    plain = openai_client.responses.create(**request)
    with openai_client.responses.stream(**request) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert plain.output_text == final.output_text == text != ""
    assert plain.usage is not None
    assert final.usage is not None
    assert (plain.usage.input_tokens, plain.usage.output_tokens) == (final.usage.input_tokens, final.usage.output_tokens)


def test_a_conversation_by_id_is_the_conversation_by_items(openai_client: openai.OpenAI):
    first = openai_client.responses.create(model=MODEL, input=ASK, temperature=0, max_output_tokens=16)
    by_id = openai_client.responses.create(model=MODEL, input="Go on.", previous_response_id=first.id, temperature=0, max_output_tokens=8)
    items = [{"role": "user", "content": ASK}, *first.output, {"role": "user", "content": "Go on."}]
    by_items = openai_client.responses.create(model=MODEL, input=items, temperature=0, max_output_tokens=8)  # type: ignore[arg-type]
    assert by_id.output_text == by_items.output_text
    assert [item.type for item in openai_client.responses.input_items.list(by_id.id, order="asc", limit=2)] == ["message"] * 3
    assert openai_client.responses.retrieve(by_id.id) == by_id
    assert openai_client.responses.input_tokens.count(model=MODEL, input=ASK).input_tokens == first.usage.input_tokens  # type: ignore[union-attr]
    openai_client.responses.delete(by_id.id)
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve(by_id.id)


def test_a_response_in_the_background_can_be_cancelled(openai_client: openai.OpenAI):
    queued = openai_client.responses.create(model=MODEL, input=ASK, background=True, extra_body={"ignore_eos": True})
    assert queued.status == "queued"
    assert openai_client.responses.cancel(queued.id).status == "cancelled"
    done = openai_client.responses.create(model=MODEL, input=ASK, background=True, max_output_tokens=2)
    deadline = time.monotonic() + LIMIT_S
    while (status := openai_client.responses.retrieve(done.id).status) != "incomplete":
        assert status in ("queued", "in_progress")
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_messages_plain_and_streamed(anthropic_client: anthropic.Anthropic):
    request = {"model": MODEL, "max_tokens": 24, "messages": [{"role": "user", "content": ASK}], "extra_body": {"temperature": 0}}
    plain = anthropic_client.messages.create(**request)
    with anthropic_client.messages.stream(**request) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert plain.content[0].text == final.content[0].text == text != ""
    assert (plain.stop_reason, plain.usage) == (final.stop_reason, final.usage)
    count = anthropic_client.messages.count_tokens(model=MODEL, messages=request["messages"])
    assert count.input_tokens == plain.usage.input_tokens


class City(pydantic.BaseModel):
    name: Literal["Rome", "Paris"]
    sunny: bool


def test_responses_call_functions_and_keep_forms(openai_client: openai.OpenAI):
    tool = {"type": "function", "name": "weather", "description": "Weather of a city", "parameters": City.model_json_schema(), "strict": True}
    request = {"model": MODEL, "input": "Is it sunny in Rome?", "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with openai_client.responses.stream(**request, temperature=0) as stream:
        arguments = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        final = stream.get_final_response()
    (call,) = final.output
    assert call.type == "function_call"
    assert call.arguments == arguments
    City.model_validate_json(arguments)
    parsed = openai_client.responses.parse(model=MODEL, input="Is it sunny in Rome?", text_format=City, temperature=0)
    assert isinstance(parsed.output_parsed, City)


def test_messages_use_tools_and_keep_forms(anthropic_client: anthropic.Anthropic):
    tool = {"name": "weather", "description": "Weather of a city", "input_schema": City.model_json_schema()}
    messages = [{"role": "user", "content": "Is it sunny in Rome?"}]
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    request = {"model": MODEL, "max_tokens": 100, "tools": [tool], "tool_choice": choice, "extra_body": {"temperature": 0}}
    plain = anthropic_client.messages.create(messages=messages, **request)
    with anthropic_client.messages.stream(messages=messages, **request) as stream:
        final = stream.get_final_message()
    (use,) = final.content
    assert plain.stop_reason == final.stop_reason == "tool_use"
    assert (use.type, use.input) == ("tool_use", plain.content[0].input)
    City.model_validate(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Yes."}
    history = [*messages, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    answer = anthropic_client.messages.create(model=MODEL, max_tokens=5, tools=[tool], messages=history)
    assert answer.usage.output_tokens <= 5
    parsed = anthropic_client.messages.parse(model=MODEL, max_tokens=100, messages=messages, output_format=City)
    assert isinstance(parsed.parsed_output, City)


def test_errors_are_the_clients_own(anthropic_client: anthropic.Anthropic, openai_client: openai.OpenAI, url: str):
    messages = [{"role": "user", "content": ASK}]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        anthropic_client.messages.create(model="nope", max_tokens=1, messages=messages)
    assert unknown.value.request_id
    assert "nope" in str(unknown.value)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        anthropic_client.messages.create(model=MODEL, max_tokens=100_000, messages=messages)
    with anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=MODEL, max_tokens=1, messages=messages)
    with pytest.raises(openai.BadRequestError) as gone:
        openai_client.responses.create(model=MODEL, input=ASK, previous_response_id="resp_nope")
    assert gone.value.code == "previous_response_not_found"
