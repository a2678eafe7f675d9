"""Who may call, how much may come, and what operators ask."""

from __future__ import annotations

import asyncio
import logging

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tritonclient.grpc import service_pb2_grpc

from headrace.config import ApiKey
from headrace.server.open_inference import wire
from tests.server.open_inference.port import Port, refused, text, typed


@pytest.mark.parametrize("world", [{"max_requests": 1}], indirect=True)
async def test_a_full_server_says_when_to_come_back(port: Port):
    port.world.generator.pause = asyncio.Event()
    first = asyncio.ensure_future(port.infer(parameters={"max_tokens": 9}))
    await port.until_open(1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await port.stub.ModelInfer(typed())
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = dict(caught.value.trailing_metadata())
    assert trailers["retry-after"] == "1"
    assert trailers["grpc-retry-pushback-ms"] == "1000"
    details = wire.Status.FromString(trailers["grpc-status-details-bin"])
    assert details.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert details.details[0].type_url.endswith("google.rpc.RetryInfo")
    assert wire.RetryInfo.FromString(details.details[0].value).retry_delay.seconds == 1
    port.world.generator.pause.set()
    await first


@pytest.mark.parametrize("world", [{"api_keys": ("sk-1", "sk-2")}], indirect=True)
async def test_keys(port: Port):
    unauthenticated = grpc.StatusCode.UNAUTHENTICATED
    await refused(port.infer(), unauthenticated)
    await refused(port.infer(headers={"authorization": "Bearer nope"}), unauthenticated)
    await refused(port.client.get_server_metadata(), unauthenticated)
    await refused(port.client.is_model_ready("tiny"), unauthenticated)
    for call in (port.stub.ModelStreamInfer(), reflection_pb2_grpc.ServerReflectionStub(port.channel).ServerReflectionInfo()):
        assert await call.code() == unauthenticated
    await port.infer(headers={"authorization": "Bearer sk-1"})
    await port.infer(headers={"x-api-key": "sk-2"})
    tenants = [request.tenant for request in port.world.generator.requests]
    assert len(set(tenants)) == 2
    assert "" not in tenants
    assert await port.client.is_server_live()
    assert await port.client.is_server_ready()
    checked = await health_pb2_grpc.HealthStub(port.channel).Check(health_pb2.HealthCheckRequest())
    assert checked.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("world", [{"max_body_bytes": 4096}], indirect=True)
async def test_messages_are_bounded_and_may_be_compressed(port: Port):
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    noise = "".join(map(chr, np.random.default_rng(0).integers(33, 127, 9000)))
    await refused(port.infer([text("text_input", noise)]), exhausted)
    await refused(port.infer([text("text_input", noise)], compression_algorithm="gzip"), exhausted)
    bomb = text("text_input", "a" * 400_000)  # small on the wire
    await refused(port.infer([bomb], compression_algorithm="gzip"), exhausted)
    for algorithm in ("gzip", "deflate", None):
        result = await port.infer([text("text_input", "a" * 300)], compression_algorithm=algorithm, parameters={"max_tokens": 200})
        assert result.as_numpy("prompt_tokens").tolist() == [300]


@pytest.mark.parametrize("world", [{"body_timeout": 0.2}], indirect=True)
async def test_a_request_that_does_not_come(port: Port):
    method = port.channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
    assert await method().code() == grpc.StatusCode.DEADLINE_EXCEEDED
    twice = method(iter([typed().SerializeToString()] * 2))
    assert await twice.code() == grpc.StatusCode.INVALID_ARGUMENT
    torn = method(iter([b"\xff\xff"]))
    assert await torn.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_name_of_a_method_may_be_any_bytes(port: Port):
    """A frame by hand: clients of the library cannot send such a name."""
    host, _, number = port.address.rpartition(":")
    for name in (b"/inference.GRPCInferenceService/Model\xe6Ready", b"/\xff", b"/nope/Nope"):
        reader, writer = await asyncio.open_connection(host, int(number))
        fields = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", name), (b":authority", b"x"), (b"te", b"trailers"))
        block = b"".join(b"\x00%c%b%c%b" % (len(key), key, len(value), value) for key, value in (*fields, (b"content-type", b"application/grpc")))
        headers = len(block).to_bytes(3, "big") + b"\x01\x05\x00\x00\x00\x01" + block
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + headers)
        received = b""
        while b"Method not found" not in received:
            part = await asyncio.wait_for(reader.read(4096), 5)
            assert part, received
            received += part
        writer.close()
        assert await port.client.is_server_live()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await port.channel.unary_unary("/inference.GRPCInferenceService/Nope")(b"")
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    await port.infer()


async def test_metadata(port: Port):
    client = port.client
    assert (await client.get_server_metadata()).name == "headrace"
    metadata = await client.get_model_metadata("other/name")
    assert (metadata.name, list(metadata.versions)) == ("other/name", ["1"])
    assert {item.name for item in metadata.inputs} == {"text_input", "input_ids", "messages", "sampling_parameters", "stream"}
    assert {item.name for item in metadata.outputs} >= {"text_output", "output_ids", "finish_reason"}
    await refused(client.get_model_metadata("nope"), grpc.StatusCode.NOT_FOUND)
    await refused(client.get_model_metadata("tiny", "7"), grpc.StatusCode.NOT_FOUND)
    assert await client.is_model_ready("tiny", "1")
    assert not await client.is_model_ready("nope")


async def test_health_is_what_ready_says(port: Port):
    health = health_pb2_grpc.HealthStub(port.channel)
    watching = health.Watch(health_pb2.HealthCheckRequest(service=wire.SERVICE))
    status = health_pb2.HealthCheckResponse
    assert (await watching.read()).status == status.SERVING
    port.world.engine.state = "restarting"
    assert (await watching.read()).status == status.NOT_SERVING
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == status.NOT_SERVING
    assert not await port.client.is_server_ready()
    assert not await port.client.is_model_ready("tiny")
    assert await port.client.is_server_live()
    await refused(port.infer(), grpc.StatusCode.UNAVAILABLE)
    port.world.engine.state = "dead"
    assert not await port.client.is_server_live()
    port.world.engine.state = "ready"
    assert (await watching.read()).status == status.SERVING
    unknown = health.Check(health_pb2.HealthCheckRequest(service="nope"))
    assert await unknown.code() == grpc.StatusCode.NOT_FOUND
    assert set((await health.List(health_pb2.HealthListRequest())).statuses) == {"", wire.SERVICE}


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection(port: Port, version: str):
    method = port.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    services = {service.name for service in (await call.read()).list_services_response.service}
    assert services == {wire.SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
    for service in services:
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=service))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
    await call.done_writing()


@pytest.mark.parametrize("world", [{"log_requests": True}], indirect=True)
async def test_a_line_a_request_without_its_text(port: Port, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "headrace.access"):
        await port.infer([text("text_input", "a secret")], request_id="id\n1", parameters={"max_tokens": 2})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "headrace.access"]
    assert "OK" in line
    assert "completion_tokens=2" in line
    assert "secret" not in line
    assert "\n" not in line


@pytest.mark.parametrize("world", [{"limited_keys": (ApiKey(key="sk-1", name="one", requests_per_minute=2),)}], indirect=True)
async def test_a_key_has_one_limit_on_both_ports(port: Port):
    headers = {"authorization": "Bearer sk-1"}
    await port.infer(headers=headers)
    over_http = await port.world.post("/v1/completions", {"prompt": "Hi"}, headers=headers)
    assert over_http.status_code == 200
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await port.stub.ModelInfer(typed(), metadata=tuple(headers.items()))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = dict(caught.value.trailing_metadata())
    assert trailers["error-code"] == "rate_limit_exceeded"
    assert int(trailers["retry-after"]) >= 1


async def test_long_answers_are_compressed(port: Port):
    """Counted between the client and the server."""
    port.world.service.loaded = port.world.with_context(20_000)
    host, number = port.address.rsplit(":", 1)
    received = 0

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, count: bool) -> None:
        nonlocal received
        while data := await reader.read(65536):
            received += len(data) if count else 0
            writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(number))
        await asyncio.gather(forward(reader, far_writer, count=False), forward(far_reader, writer, count=True))

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as between:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{between.sockets[0].getsockname()[1]}") as channel:
            response = await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(typed(max_tokens=5000))
        assert len(response.SerializeToString()) > 10_000
        assert received < 3000
