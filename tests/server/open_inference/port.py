"""A gRPC port over fakes, and clients of it in the same process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from headrace.server.open_inference.server import GrpcServer
from tests.patience import eventually
from tests.server.fakes import World


class Port:
    """A server on a world, and clients of it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.server = GrpcServer(world.service)

    async def open(self) -> None:
        self.address = address = await self.server.open(0)
        self.channel = grpc.aio.insecure_channel(address)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)
        self.client = triton.InferenceServerClient(address)

    async def close(self) -> None:
        await self.client.close()
        await self.channel.close()
        await self.server.close(grace=1)

    async def infer(self, inputs: list[triton.InferInput] | None = None, /, **options: Any) -> triton.InferResult:
        given = [text("text_input", "Hi")] if inputs is None else inputs
        return await self.client.infer(options.pop("model", "tiny"), given, **options)

    async def until_open(self, count: int) -> None:
        """Until the generator holds so many requests."""
        await eventually(lambda: self.world.generator.open == count)


def tensor(name: str, datatype: str, values: Any) -> triton.InferInput:
    array = np.asarray(values)
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def text(name: str, *values: str) -> triton.InferInput:
    return tensor(name, "BYTES", np.array([value.encode() for value in values], dtype=object))


def typed(*, id: str = "", model: str = "tiny", prompt: str = "Hi", **parameters: Any) -> Any:
    """A request in typed contents."""
    request = service_pb2.ModelInferRequest(model_name=model, id=id)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(prompt.encode())
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def words(result: triton.InferResult, name: str = "text_output") -> list[str]:
    return [value.decode() for value in result.as_numpy(name)]


async def refused(work: Any, code: grpc.StatusCode) -> InferenceServerException:
    with pytest.raises(InferenceServerException) as caught:
        await work
    assert caught.value.status() == str(code), caught.value
    return caught.value


async def stream(port: Port, inputs: list[triton.InferInput], **parameters: Any) -> AsyncIterator[triton.InferResult]:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "tiny", "inputs": inputs, "parameters": parameters}

    async for result, error in port.client.stream_infer(requests()):
        assert error is None, error
        yield result
