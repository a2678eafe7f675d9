"""Spans of requests, as a collector receives them."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headrace import __version__
from headrace.cli.values import otlp_endpoint
from headrace.engine.generation import Generator
from headrace.errors import ConfigError, RequestFailed
from headrace.observe.tracing import Tracing
from headrace.server.serve import new_tracing
from headrace.text.tokenizer import Tokenizer
from tests.engine.fake_engine import engine, fake_config
from tests.ports import free_port
from tests.server.collector import Spans, attributes, collector
from tests.server.fakes import World, load, write_model
from tests.server.open_inference.port import Port
from tests.server.test_serve import Process

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "shop=1"}


@pytest.fixture
def spans() -> Iterator[Spans]:
    with collector() as spans:
        yield spans


@pytest.fixture
def tracing(spans: Spans) -> Iterator[Tracing]:
    tracing = new_tracing(spans.url)
    yield tracing
    tracing.close()


@pytest.fixture
async def traced(tokenizer: Tokenizer, tracing: Tracing) -> AsyncIterator[World]:
    """A world around a real engine process with the fake runner."""
    world = World(tokenizer, tracing=tracing)
    async with engine(fake_config({"step_seconds": 0.002}, max_num_batched_tokens=64, max_num_seqs=8)) as client:
        world.service.engine = client
        generator = Generator(client, tokenizer)
        world.service.loaded = load(tokenizer, generator)  # type: ignore[arg-type]
        yield world
        generator.close()
    await world.close()


async def flushed(tracing: Tracing) -> None:
    await asyncio.to_thread(tracing._provider.force_flush)


async def test_a_request_and_its_parts(traced: World, tracing: Tracing, spans: Spans):
    before = time.time_ns()
    body = {
        "prompt": "y" * 150,
        "max_tokens": 6,
        "temperature": 0.5,
        "seed": 3,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    response = await traced.post("/v1/completions", body, headers=CALLER)
    after = time.time_ns()
    assert response.status_code == 200
    await flushed(tracing)
    root = spans.one("text_completion tiny")
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state, root.kind) == (TRACE, PARENT, "shop=1", 2)
    assert response.headers["traceparent"] == f"00-{TRACE}-{root.span_id.hex()}-01"
    told = attributes(root)
    assert told["gen_ai.response.id"].startswith("cmpl-")  # type: ignore[union-attr]
    assert {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "headrace",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.request.stream": True,
        "gen_ai.usage.input_tokens": 150,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "http.response.status_code": 200,
        "headrace.http_request_id": response.headers["x-request-id"],
    }.items() <= told.items()
    assert 0 < told["gen_ai.latency.time_in_queue"] < told["gen_ai.latency.time_to_first_token"] < told["gen_ai.latency.e2e"]  # type: ignore[operator]
    parts = [span for span in spans.received if span is not root]
    assert {span.parent_span_id for span in parts} == {root.span_id}
    chunks = spans.named("prefill")
    assert [attributes(span)["headrace.position"] for span in chunks] == [0, 64, 128]
    assert [attributes(span)["headrace.tokens"] for span in chunks] == [64, 64, 22]
    decode = spans.one("decode")
    assert attributes(decode)["headrace.steps"] == 5
    order = [spans.one("tokenize"), spans.one("queue"), *chunks, decode]
    for one, other in pairwise(order):
        assert one.start_time_unix_nano < one.end_time_unix_nano <= other.start_time_unix_nano + 1000
    assert sorted(span.name for span in parts) == ["decode", "detokenize", "prefill", "prefill", "prefill", "queue", "tokenize", "write"]
    assert attributes(spans.one("write"))["headrace.bytes"] == len(response.content)
    for span in spans.received:
        assert before - 10**6 <= span.start_time_unix_nano <= span.end_time_unix_nano <= after + 10**6
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano
        assert "yyy" not in str(span)
    assert spans.resource["service.name"] == "headrace"
    assert spans.resource["service.version"] == __version__


async def test_what_the_caller_does_not_sample_is_not_told(traced: World, tracing: Tracing, spans: Spans):
    response = await traced.post("/v1/completions", {"prompt": "x"}, headers={"traceparent": CALLER["traceparent"][:-1] + "0"})
    assert response.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert response.headers["traceparent"].endswith("-00")
    await flushed(tracing)
    assert spans.received == []


async def test_a_trace_may_begin_here(traced: World, tracing: Tracing, spans: Spans):
    response = await traced.chat("Hi", max_tokens=2, n=2, ignore_eos=True)
    assert (await traced.http.get("/health")).headers.get("traceparent") is None
    refused = await traced.post("/v1/completions", {"prompt": 5})
    await flushed(tracing)
    root = spans.one("chat tiny")
    assert root.parent_span_id == b""
    assert response.headers["traceparent"] == f"00-{root.trace_id.hex()}-{root.span_id.hex()}-01"
    assert attributes(root)["gen_ai.response.finish_reasons"] == ["length", "length"]
    of_choices = {attributes(span)["headrace.request_id"] for span in spans.named("decode")}
    assert len(of_choices) == 2
    failed = spans.one("POST /v1/completions")
    assert refused.headers["traceparent"].split("-")[2] == failed.span_id.hex()
    assert attributes(failed)["http.response.status_code"] == 400
    assert failed.status.code == 0  # the client's fault is no error of this server


async def test_embeddings(traced: World, tracing: Tracing, spans: Spans):
    assert (await traced.post("/v1/embeddings", {"input": ["one", "three"]})).status_code == 200
    await flushed(tracing)
    told = attributes(spans.one("embeddings tiny"))
    assert (told["gen_ai.operation.name"], told["gen_ai.usage.input_tokens"]) == ("embeddings", 8)
    assert len(spans.named("prefill")) == 2


async def test_a_long_list_does_not_flood_the_collector(traced: World, tracing: Tracing, spans: Spans):
    assert (await traced.post("/v1/embeddings", {"input": [f"text {number}" for number in range(20)]})).status_code == 200
    await flushed(tracing)
    assert attributes(spans.one("embeddings tiny"))["headrace.choices_left_out"] == 4
    assert len(spans.named("prefill")) == 16


async def test_grpc(tokenizer: Tokenizer, tracing: Tracing, spans: Spans):
    world = World(tokenizer, tracing=tracing)
    port = Port(world)
    await port.open()
    await port.infer(headers=CALLER)
    await port.close()
    await world.close()
    await flushed(tracing)
    root = spans.one("chat tiny")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    told = attributes(root)
    assert (told["rpc.system"], told["rpc.grpc.status"], told["gen_ai.response.finish_reasons"]) == ("grpc", "OK", ["length"])
    assert spans.one("tokenize").parent_span_id == root.span_id


async def test_faults_and_clients_that_hang_up(tokenizer: Tokenizer, tracing: Tracing, spans: Spans):
    world = World(tokenizer, tracing=tracing)
    world.generator.error, world.generator.error_after = RequestFailed("broken"), 2
    assert (await world.complete(prompt="x", stream=True)).status_code == 200
    world.generator.error, world.generator.pause = None, asyncio.Event()
    arriving = iter([{"type": "http.request", "body": b'{"prompt": "x"}', "more_body": False}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(arriving)

    async def send(message: Any) -> None:
        raise AssertionError("nobody is there to be answered")

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "headers": []}
    await world.app(scope | {"http_version": "1.1", "scheme": "http", "server": ("x", 80), "client": ("y", 1), "root_path": ""}, receive, send)
    await world.close()
    await flushed(tracing)
    broken, gone = (span for span in spans.received if span.parent_span_id == b"")
    assert (broken.status.code, attributes(broken)["error.type"]) == (2, "request_failed")
    assert (gone.status.code, attributes(gone)["error.type"]) == (2, "client_gone")
    assert attributes(gone)["gen_ai.response.finish_reasons"] == ["error"]


async def test_a_collector_that_is_gone_harms_nobody(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.1")
    port = free_port()
    tracing = new_tracing(f"http://127.0.0.1:{port}/v1/traces")
    world = World(tokenizer, tracing=tracing)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert (await world.complete(prompt="x")).status_code == 200
            await flushed(tracing)
        assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == [
            f"spans cannot be sent to http://127.0.0.1:{port}/v1/traces; they are dropped until it takes them"
        ]
        with collector(port) as spans:
            assert (await world.complete(prompt="x")).status_code == 200
            await flushed(tracing)
            assert spans.one("text_completion tiny")
            assert "spans are sent" in caplog.records[-1].getMessage()
            spans.status = 400
            assert (await world.complete(prompt="x")).status_code == 200
            await flushed(tracing)
            assert caplog.records[-1].levelno == logging.WARNING
    tracing.close()
    await world.close()


def test_served(tmp_path: Path, spans: Spans):
    """The flag, another name of the service, and what is still to be sent at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_SERVICE_NAME", "mill")
        process = Process(write_model(tmp_path), "--otlp-traces-endpoint", spans.url.removesuffix("/v1/traces"))
    try:
        process.wait_ready()
        assert process.complete().status_code == 200
        process.popen.terminate()
        assert process.ended() == 0
    finally:
        process.popen.kill()
        process.popen.wait()
    assert [span.name for span in spans.received if span.parent_span_id == b""] == [f"text_completion {tmp_path.name}"]
    assert spans.resource["service.name"] == "mill"


def test_nothing_is_imported_without_the_flag():
    code = "import sys, headrace.server.serve, headrace.cli.main; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint .*pip install 'headrace\[otel\]'"):
        new_tracing("http://127.0.0.1:4318/v1/traces")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("https://collector.example/", "https://collector.example/v1/traces"),
        ("http://collector:4318/otlp/v1/traces?a=b", "http://collector:4318/otlp/v1/traces?a=b"),
    ],
)
def test_endpoints(given: str, used: str):
    assert otlp_endpoint(given) == used


@pytest.mark.parametrize("given", ["localhost:4318", "grpc://localhost:4317", "http://", "x"])
def test_what_is_no_endpoint(given: str):
    with pytest.raises(ValueError, match="OTLP/HTTP"):
        otlp_endpoint(given)
