"""Triton's client, over gRPC."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from tests.clients.conftest import KEY, Server
from tests.clients.tasks import ANSWER, FORM_QUESTION, QUESTION, TOOL_QUESTION, WEATHER_TOOL, Place, Weather

HEADERS = {"authorization": f"Bearer {KEY}"}


def conversation(question: str) -> list[triton.InferInput]:
    tensor = triton.InferInput("messages", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([json.dumps([{"role": "user", "content": question}]).encode()], dtype=object))
    return [tensor]


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.grpc_address) as client:
        yield client


def infer(client: triton.InferenceServerClient, server: Server, question: str, **parameters: Any) -> triton.InferResult:
    return client.infer(server.model, conversation(question), parameters={"temperature": "0", **parameters}, headers=HEADERS)


def test_chat_and_stream(client: triton.InferenceServerClient, server: Server):
    whole = infer(client, server, QUESTION, max_tokens=24).as_numpy("text_output")[0].decode()
    assert ANSWER in whole
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: results.put((result, error)), headers=HEADERS)
    client.async_stream_infer(server.model, conversation(QUESTION), parameters={"temperature": "0", "max_tokens": 24})
    text = ""
    while True:
        result, error = results.get(timeout=60)
        assert error is None
        if (delta := result.as_numpy("text_output")) is not None:
            text += delta[0].decode()
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.stop_stream()
    assert text == whole


def test_tool(client: triton.InferenceServerClient, server: Server):
    result = infer(client, server, TOOL_QUESTION, tools=json.dumps([WEATHER_TOOL]), tool_choice="required", parallel_tool_calls=False)
    (call,) = json.loads(result.as_numpy("tool_calls")[0])
    Weather.model_validate_json(call["function"]["arguments"])


def test_typed(client: triton.InferenceServerClient, server: Server):
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": Place.model_json_schema()}}
    result = infer(client, server, FORM_QUESTION, response_format=json.dumps(form), max_tokens=200)
    Place.model_validate_json(result.as_numpy("text_output")[0])
