"""POST /debug/trace: what is refused, the picture, and the way to a real engine and back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from headrace.core.messages import AddRequest, Kernel, TokenOutput
from headrace.engine.kernel_recorder import KernelRecorder
from headrace.engine.trace import Trace
from headrace.engine.wire import FromEngine, Kernels, Record, StepTrace, TracedRow
from headrace.errors import QueueFull, RequestFailed
from headrace.sampling_params import SamplingParams
from headrace.server.perfetto import KERNELS, trace_object
from tests.engine.fake_engine import add, collect, engine, fake_config
from tests.server.fakes import World, refused

PATH = "/debug/trace"


def step(step_id: int, started: float, *rows: TracedRow) -> StepTrace:
    return StepTrace(step_id, started - 0.002, started - 0.001, started, started + 0.01, started + 0.011, 0.008, "decode-4", 2, rows)


def recorded() -> Trace:
    trace = Trace(begin=10.0, end=15.0)
    trace.add_request(AddRequest(request_id="a", prompt_token_ids=(1,), params=SamplingParams(), arrival=10.1))
    trace.add_step(step(1, 10.5, TracedRow("a", 0, 7, 0, False), TracedRow("b", 30, 3, 2, True)))
    trace.add_step(step(2, 10.6, TracedRow("a", 7, 1, 0, True)))
    trace.add_output(TokenOutput(request_id="a", token_ids=(5,)), 10.52)
    trace.add_output(TokenOutput(request_id="a", token_ids=(6,), finish_reason="length"), 10.62)
    return trace


def test_the_picture():
    value = trace_object(recorded(), model="tiny")
    assert value["otherData"] == {"model": "tiny", "begin": 10.0, "seconds": 5.0, "complete": True}
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in value["traceEvents"] if event["name"] == "thread_name"}
    slices = [(names[event["pid"], event["tid"]], event["name"], event["ts"], event["dur"]) for event in value["traceEvents"] if event["ph"] == "X"]
    assert ("a", "queued", 100_000.0, 400_000.0) in slices
    assert ("a", "prefill 7", 500_000.0, 10_000.0) in slices
    assert ("a", "decode", 600_000.0, 10_000.0) in slices
    assert ("b", "decode", 500_000.0, 10_000.0) in slices
    assert ("Runner: steps", "step 1: 2 rows, 10 tokens", 500_000.0, 10_000.0) in slices
    assert ("Loop: plan, update", "plan 2", 598_000.0, 1_000.0) in slices
    assert ("Loop: plan, update", "update 2", 610_000.0, 1_000.0) in slices
    (args,) = [event["args"] for event in value["traceEvents"] if event["name"].startswith("step 1")]
    assert args == {"rows": 2, "decode rows": 1, "tokens": 10, "path": "decode-4", "padding": 2, "model ms": 8.0}
    assert [event["name"] for event in value["traceEvents"] if event["ph"] == "i"] == ["1 tokens", "end: length"]


def test_kernels_have_rows_of_their_own():
    trace = recorded()
    trace.kernels = (
        Kernel(name="aten::mm", device="cpu", track=7, begin=10.501, end=10.502),
        Kernel(name="decode", device="cuda:0", track=9, begin=10.503, end=10.504),
        Kernel(name="aten::add", device="cpu", track=7, begin=10.505, end=10.506),
    )
    events = trace_object(trace, model="m")["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["pid"] == KERNELS and event["name"] == "thread_name"}
    slices = [(names[event["tid"]], event["name"], event["ts"], event["dur"]) for event in events if event["pid"] == KERNELS and event["ph"] == "X"]
    assert slices == [
        ("cpu: thread 7", "aten::mm", 501_000.0, 1000.0),
        ("cuda:0: stream 9", "decode", 503_000.0, 1000.0),
        ("cpu: thread 7", "aten::add", 505_000.0, 1000.0),
    ]


async def test_a_real_engine_tells_its_kernels():
    async with engine(fake_config({"step_seconds": 0.01})) as client:
        for _ in range(2):
            recording = asyncio.create_task(client.trace(0.5, kernels=True))
            await asyncio.sleep(0)
            await collect(client, add(max_tokens=3))
            trace = await recording
            assert trace.kernels is not None
            for kernel, traced in zip(trace.kernels, trace.steps, strict=True):
                assert (kernel.name, kernel.device) == ("fake", "cpu")
                assert traced.started <= kernel.begin < kernel.end <= traced.ended
        abandoned = asyncio.create_task(client.trace(60.0, kernels=True))
        await asyncio.sleep(0)
        abandoned.cancel()
        await asyncio.gather(abandoned, return_exceptions=True)
        plain = await client.trace(0.05)
        assert plain.kernels is None
        dying = asyncio.create_task(client.trace(0.5, kernels=True))
        await asyncio.sleep(0)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(RequestFailed, match="died"):
            await dying


def test_a_profiler_that_fails_ends_no_request():
    class Broken:
        def start_profile(self) -> None:
            raise RuntimeError("no profiler")

        def stop_profile(self) -> Callable[[], tuple[Kernel, ...]]:
            raise AssertionError

    sent: list[FromEngine] = []
    recorder = KernelRecorder(Broken(), sent.append)
    recorder.record(Record(9.0, True))
    assert sent == [Kernels((), "RuntimeError: no profiler")]
    recorder.record(Record(0.0))
    assert len(sent) == 1


def test_a_request_that_never_ran_waits_to_the_end():
    trace = Trace(begin=10.0, end=15.0)
    trace.add_request(AddRequest(request_id="a", prompt_token_ids=(1,), params=SamplingParams(), arrival=11.0))
    (event,) = [event for event in trace_object(trace, model="m")["traceEvents"] if event["ph"] == "X"]
    assert (event["name"], event["ts"], event["dur"]) == ("queued", 1e6, 4e6)


def test_a_trace_is_bounded():
    trace = Trace(begin=0.0, end=1.0, max_rows=3)
    for number in range(5):
        trace.add_step(step(number, 0.1, TracedRow("a", 0, 1, 0, True), TracedRow("b", 0, 1, 0, True)))
    trace.add_output(TokenOutput(request_id="a"), 0.5)
    assert (len(trace.steps), trace.outputs, trace_object(trace, model="m")["otherData"]["complete"]) == (2, [], False)


async def test_a_real_engine_tells_its_steps():
    async with engine(fake_config({"step_seconds": 0.01})) as client:
        recording = asyncio.create_task(client.trace(1.0))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="Another trace") as refusal:
            await client.trace(1.0)
        assert refusal.value.retry_after >= 1
        request = AddRequest(request_id="a", prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=4), arrival=0.0, eos_token_ids=())
        async for _ in client.submit(request):
            pass
        trace = await recording
    rows = [row for step in trace.steps for row in step.rows]
    assert [(row.start, row.num_tokens, row.is_decode) for row in rows] == [(0, 3, False), (3, 1, True), (4, 1, True), (5, 1, True)]
    for traced in trace.steps:
        times = [traced.plan_begin, traced.plan_end, traced.started, traced.ended, traced.updated]
        assert times == sorted(times)
        assert traced.model_seconds >= 0.01
    assert trace.arrivals == {"a": 0.0}
    assert trace.outputs[-1].finish_reason == "length"


@pytest.mark.parametrize(
    "query", ["seconds=0", "seconds=-1", "seconds=61", "seconds=nan", "seconds=inf", "seconds=x", "seconds=", "seconds=11&kernels=true"]
)
async def test_seconds_are_bounded(world: World, query: str):
    refused(await world.http.post(f"{PATH}?{query}"), param="seconds")


async def test_another_field_is_refused_by_name(world: World):
    refused(await world.http.post(f"{PATH}?kernels=1"), param="kernels")
    refused(await world.http.post(f"{PATH}?second=1"), param="second")


async def test_the_answer_is_a_file_and_what_the_document_says(world: World):
    response = await world.http.post(f"{PATH}?seconds=2.5")
    assert response.headers["content-disposition"] == 'attachment; filename="headrace-trace.json"'
    body = response.json()
    assert body["otherData"]["seconds"] == 2.5
    schemas = (await world.http.get("/openapi.json")).json()["components"]["schemas"]
    assert set(body) == set(schemas["Trace"]["required"])
    world.engine.state = "restarting"
    refused(await world.http.post(PATH), 503)


async def test_who_hangs_up_makes_room_for_the_next(world: World):
    ended = asyncio.Event()

    async def endless(seconds: float, *, kernels: bool) -> Trace:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    world.engine.trace = endless  # type: ignore[method-assign]
    arriving = iter([{"type": "http.request", "body": b"", "more_body": False}, {"type": "http.disconnect"}])

    async def receive() -> dict:
        return next(arriving)

    async def send(message: dict) -> None:
        raise AssertionError("nobody is there to be answered")

    headers = [(b"host", b"x")]
    scope = {"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b"seconds=60", "headers": headers}
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("x", 80), "client": ("y", 1), "root_path": ""}
    await asyncio.wait_for(world.app(scope, receive, send), 30)
    assert ended.is_set()
