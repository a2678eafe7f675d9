"""Streams, cancelled calls, deadlines and the end of the port."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import grpc
import pytest

from headrace.errors import QueueFull, RequestFailed
from tests.patience import LIMIT_S
from tests.server.fakes import ANSWER
from tests.server.open_inference.port import Port, refused, stream, text, typed, words


async def test_a_stream_is_the_whole_in_parts(port: Port):
    results = [result async for result in stream(port, [text("text_input", "Hi")], max_tokens=13)]
    assert "".join(words(result)[0] for result in results) == ANSWER
    assert len(results) == 13
    finals = [result.get_response().parameters["triton_final_response"].bool_param for result in results]
    assert finals == [False] * (len(results) - 1) + [True]
    assert [words(result, "finish_reason")[0] for result in results] == [""] * (len(results) - 1) + ["length"]
    assert results[0].as_numpy("completion_tokens") is None
    assert results[-1].as_numpy("completion_tokens").tolist() == [13]
    (whole,) = [result async for result in stream(port, [text("text_input", "Hi")], max_tokens=13, stream=False)]
    assert words(whole) == [ANSWER]
    assert whole.get_response().parameters["triton_final_response"].bool_param


async def test_requests_of_one_stream_are_answered_side_by_side(port: Port):
    port.world.generator.pause = asyncio.Event()
    call = port.stub.ModelStreamInfer()
    for request in (typed(id="a", max_tokens=2), typed(id="b", max_tokens=3), typed(id="c", model="nope"), typed(id="d", max_tokens=-1)):
        await call.write(request)
    await port.until_open(2)
    port.world.generator.pause.set()
    await call.done_writing()
    got: dict[str, list[Any]] = {}
    while (response := await call.read()) is not grpc.aio.EOF:
        got.setdefault(response.infer_response.id, []).append(response)
    assert {name: len(responses) for name, responses in got.items()} == {"a": 2, "b": 3, "c": 1, "d": 1}
    assert all(responses[-1].infer_response.parameters["triton_final_response"].bool_param for responses in got.values())
    assert "nope" in got["c"][0].error_message
    assert got["c"][0].infer_response.parameters["grpc-status"].string_param == "NOT_FOUND"
    assert got["d"][0].infer_response.parameters["error-param"].string_param == "max_tokens"
    assert await call.code() == grpc.StatusCode.OK


async def test_an_error_in_the_middle_ends_that_request_only(port: Port, caplog: pytest.LogCaptureFixture):
    port.world.generator.error, port.world.generator.error_after = RequestFailed("It broke."), 2
    call = port.stub.ModelStreamInfer()
    await call.write(typed(id="a", max_tokens=9))
    responses = [await call.read() for _ in range(3)]
    assert [response.error_message for response in responses] == ["", "", "It broke."]
    port.world.generator.error = ValueError("a fault")
    with caplog.at_level(logging.CRITICAL, "headrace.server"):
        await call.write(typed(id="b", max_tokens=9))
        responses = [await call.read() for _ in range(3)]
    assert responses[-1].infer_response.parameters["grpc-status"].string_param == "INTERNAL"
    assert "a fault" not in responses[-1].error_message
    port.world.generator.error = None
    await call.write(typed(id="c", max_tokens=1))
    assert (await call.read()).infer_response.id == "c"
    await call.done_writing()
    assert await call.code() == grpc.StatusCode.OK


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_cancelled_call_frees_everything(port: Port, streamed: bool):
    port.world.generator.pause = asyncio.Event()
    if streamed:
        call: Any = port.stub.ModelStreamInfer()
        for position in range(3):
            await call.write(typed(id=str(position), max_tokens=9))
    else:
        call = port.stub.ModelInfer(typed(max_tokens=9))
    await port.until_open(3 if streamed else 1)
    call.cancel()
    await port.until_open(0)
    await asyncio.wait_for(port.world.service.admission.idle.wait(), LIMIT_S)
    assert port.world.service.bodies.used == 0


async def test_the_deadline_of_the_call_is_the_requests(port: Port):
    port.world.generator.pause = asyncio.Event()
    for seconds in (0.4, 6, LIMIT_S):  # where the machine stands still, a call may be over before it reaches the server
        begin = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await port.stub.ModelInfer(typed(max_tokens=9), timeout=seconds)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        if port.world.generator.requests:
            break
    await port.until_open(0)
    deadline = port.world.generator.requests[0].deadline
    assert deadline is not None
    assert begin < deadline <= time.monotonic() + seconds
    late = QueueFull("Too late.")
    late.code = "deadline_exceeded"
    port.world.generator.error = late
    await refused(port.infer(parameters={"max_tokens": 9, "deadline_ms": 1}), grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_closing_ends_idle_streams_at_once_and_running_ones_in_time(port: Port):
    idle, running = port.stub.ModelStreamInfer(), port.stub.ModelStreamInfer()
    await idle.write(typed(max_tokens=1))
    await idle.read()
    await port.until_open(0)
    port.world.generator.pause = asyncio.Event()
    await running.write(typed(max_tokens=3))
    await running.read()
    closing = asyncio.ensure_future(port.server.close(grace=LIMIT_S))
    assert await asyncio.wait_for(idle.code(), LIMIT_S) == grpc.StatusCode.OK
    assert not closing.done()
    port.world.generator.pause.set()
    assert [(await running.read()).error_message for _ in range(2)] == ["", ""]
    assert await running.read() is grpc.aio.EOF
    await asyncio.wait_for(closing, LIMIT_S)
