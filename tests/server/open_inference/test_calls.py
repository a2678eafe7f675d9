"""What a call takes and gives, with tritonclient and bare gRPC as clients; the engine is a fake."""

from __future__ import annotations

import json
import time

import grpc
import numpy as np
import tritonclient.grpc.aio as triton

from tests.server.fakes import ANSWER
from tests.server.open_inference.port import Port, refused, stream, tensor, text, typed, words


async def test_a_whole_answer(port: Port):
    port.world.generator.cached_tokens = 1
    result = await port.infer(request_id="mine", parameters={"max_tokens": 13})
    assert words(result) == [ANSWER]
    assert bytes(result.as_numpy("output_ids").tolist()).decode() == ANSWER
    assert words(result, "finish_reason") == ["length"]
    assert [result.as_numpy(name).tolist() for name in ("prompt_tokens", "completion_tokens", "cached_tokens")] == [[2], [13], [1]]
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("mine", "tiny", "1")
    assert port.world.generator.requests[0].prompt_token_ids == tuple(b"Hi")


async def test_typed_contents_are_answered_with_typed_contents(port: Port):
    response = await port.stub.ModelInfer(typed(max_tokens=13))
    outputs = {output.name: output.contents for output in response.outputs}
    assert not response.raw_output_contents
    assert outputs["text_output"].bytes_contents == [ANSWER.encode()]
    assert bytes(outputs["output_ids"].int64_contents) == ANSWER.encode()


async def test_parameters_of_every_kind_reach_the_sampler(port: Port):
    inputs = [
        text("text_input", "Hi"),
        text("sampling_parameters", json.dumps({"max_tokens": 3, "top_k": 7, "temperature": 0.3})),
        tensor("top_p", "FP32", np.array([0.7], np.float32)),
        tensor("stop_token_ids", "INT32", np.array([4, 5], np.int32)),
        text("stop", "x", "y"),
        text("logit_bias", '{"65": 2.5}'),
        tensor("ignore_eos", "BOOL", np.array([True])),
    ]
    before = time.monotonic()
    await port.infer(inputs, priority=3, timeout=250_000_000, parameters={"seed": 11, "min_p": "0.25", "bad_words": '["no"]'})
    (request,) = port.world.generator.requests
    params = request.params
    assert (params.max_tokens, params.top_k, params.temperature, params.top_p, params.seed, params.min_p) == (3, 7, 0.3, 0.7, 11, 0.25)
    assert (params.stop_token_ids, params.stop, params.bad_words, params.logit_bias) == ((4, 5), ("x", "y"), ("no",), {65: 2.5})
    assert params.ignore_eos
    assert request.priority == 3
    assert request.deadline is not None
    assert before + 250 <= request.deadline <= time.monotonic() + 250


async def test_a_stop_string_is_never_taken_for_json(port: Port):
    await port.infer(parameters={"stop": "[1]", "max_tokens": 1})
    assert port.world.generator.requests[0].params.stop == ("[1]",)


async def test_the_input_may_be_part_of_the_answer(port: Port):
    result = await port.infer([text("text_input", "Hi"), tensor("exclude_input_in_output", "BOOL", np.array([False]))], parameters={"max_tokens": 1})
    assert words(result) == ["HiH"]


async def test_ids_as_prompt(port: Port):
    for array in (np.array([72, 105], np.int32), np.array([[72, 105]], np.int64)):
        result = await port.infer([tensor("input_ids", "INT32" if array.ndim == 1 else "INT64", array)], parameters={"max_tokens": 2})
        assert result.as_numpy("prompt_tokens").tolist() == [2]
    both = await port.infer([tensor("input_ids", "INT64", np.array([[72, 105], [72, 106]]))], parameters={"max_tokens": 2, "n": 2})
    assert both.as_numpy("index").tolist() == [0, 1, 2, 3]
    assert both.as_numpy("output_lengths").tolist() == [2] * 4
    assert len(both.as_numpy("output_ids")) == 8
    assert port.world.generator.requests[-1].prompt_token_ids == (72, 106)


async def test_a_chat_is_the_one_over_http(port: Port):
    messages = [{"role": "user", "content": "Hi"}]
    result = await port.infer([text("messages", json.dumps(messages))], parameters={"max_tokens": 4, "logprobs": True})
    (choice,) = (await port.world.chat("Hi", max_tokens=4, logprobs=True)).json()["choices"]
    assert words(result) == [choice["message"]["content"]]
    assert json.loads(words(result, "logprobs")[0]) == choice["logprobs"]
    first, second = port.world.generator.requests
    assert (first.prompt_token_ids, first.params) == (second.prompt_token_ids, second.params)


async def test_calls_of_tools_whole_and_streamed(port: Port):
    port.world.service.loaded = port.world.with_context(4096)
    port.world.generator.answer = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    port.world.generator.stops = True
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    over_http = await port.world.post("/v1/chat/completions", {"messages": messages, "tools": tools, "max_tokens": 200})
    (choice,) = over_http.json()["choices"]
    inputs = [text("messages", json.dumps(messages)), text("tools", json.dumps(tools))]
    result = await port.infer(inputs, parameters={"max_tokens": 200})
    calls = json.loads(words(result, "tool_calls")[0])
    assert [call["function"] for call in calls] == [call["function"] for call in choice["message"]["tool_calls"]]
    assert words(result, "finish_reason") == ["tool_calls"]
    deltas = [delta async for delta in stream(port, inputs, max_tokens=200)]
    parts = [part for delta in deltas if delta.as_numpy("tool_calls") is not None for part in json.loads(words(delta, "tool_calls")[0])]
    assert "".join(part["function"]["arguments"] for part in parts) == calls[0]["function"]["arguments"]
    assert words(deltas[-1], "finish_reason") == ["tool_calls"]


async def test_errors_have_their_codes(port: Port):
    invalid, missing = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    prompt = text("text_input", "Hi")
    assert "'nope'" in str(await refused(port.infer(model="nope"), missing))
    await refused(port.infer(model_version="2"), missing)
    assert "max_tokens" in str(await refused(port.infer(parameters={"max_tokens": 600}), invalid))
    assert "Unknown field 'maxtokens'" in str(await refused(port.infer(parameters={"maxtokens": 6}), invalid))
    assert "temperature" in str(await refused(port.infer(parameters={"temperature": "warm"}), invalid))
    assert "temperature" in str(await refused(port.infer([prompt, tensor("temperature", "FP32", np.float32([1, 2]))]), invalid))
    assert "ModelStreamInfer" in str(await refused(port.infer(parameters={"stream": True}), invalid))
    assert "model_name" in str(await refused(port.infer(parameters={"model": "tiny"}), invalid))
    assert "Exactly one" in str(await refused(port.infer([]), invalid))
    assert "Exactly one" in str(await refused(port.infer([prompt, tensor("input_ids", "INT64", np.array([1]))]), invalid))
    assert "messages is not valid JSON" in str(await refused(port.infer([text("messages", "[")]), invalid))
    assert "messages[0].role" in str(await refused(port.infer([text("messages", '[{"content": "x"}]')]), invalid))
    assert "token id 999" in str(await refused(port.infer([tensor("input_ids", "INT64", np.array([999]))]), invalid))
    assert "given twice" in str(await refused(port.infer([prompt, tensor("seed", "INT64", np.array([1]))], parameters={"seed": 1}), invalid))
    outputs = [triton.InferRequestedOutput("nope")]
    assert "no output 'nope'" in str(await refused(port.infer(outputs=outputs), invalid))
    assert port.world.generator.requests == []


async def test_wanted_outputs_only(port: Port):
    names = ["finish_reason", "text_output", "tool_calls"]
    result = await port.infer(outputs=[triton.InferRequestedOutput(name) for name in names], parameters={"max_tokens": 1})
    assert [output.name for output in result.get_response().outputs] == names
    assert words(result, "tool_calls") == ["null"]
