"""The calls of `inference.GRPCInferenceService`: who may make them, and how their errors end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc

from headrace import __version__
from headrace.errors import BodyTimeout, InvalidRequest, RequestError, RequestFailed
from headrace.server import request_span
from headrace.server.body import ClientGone
from headrace.server.open_inference import status, wire
from headrace.server.open_inference.call import Call
from headrace.server.open_inference.parse import VERSION, check_version, decode
from headrace.server.open_inference.response import OUTPUTS, error_response
from headrace.server.rate_limits import KeyLimits
from headrace.server.request_span import RequestSpan
from headrace.server.service import Service

Context = Any  # grpc.aio.ServicerContext, which has type parameters only in grpc's stubs
INPUTS = {  # name -> (datatype, size); one of the first three is needed, and every field of a body may be another
    "text_input": ("BYTES", 1),
    "input_ids": ("INT64", -1),
    "messages": ("BYTES", 1),
    "sampling_parameters": ("BYTES", 1),
    "stream": ("BOOL", 1),
}
SMALL_MESSAGE = 1024  # bytes; to compress less is not worth the time
FAULT = "The server failed to answer this request; its log says why."

logger = logging.getLogger("headrace.server")


class Servicer:
    """`closing` is set when the process is about to end: streams then take no more requests."""

    def __init__(self, service: Service, closing: asyncio.Event) -> None:
        self._service = service
        self._closing = closing

    def methods(self) -> dict[str, grpc.RpcMethodHandler]:
        """By name. Messages come and go as bytes. ModelInfer is read as a stream of one request, so that the time that takes can be bounded."""
        return {
            "ServerLive": self._question("ServerLive", self._server_live, needs_key=False),
            "ServerReady": self._question("ServerReady", self._server_ready, needs_key=False),
            "ModelReady": self._question("ModelReady", self._model_ready),
            "ServerMetadata": self._question("ServerMetadata", self._server_metadata),
            "ModelMetadata": self._question("ModelMetadata", self._model_metadata),
            "ModelInfer": grpc.stream_unary_rpc_method_handler(self._model_infer),
            "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._model_stream_infer),
        }

    def _question(self, method: str, answer: Callable[[Any, Any], None], *, needs_key: bool = True) -> grpc.RpcMethodHandler:
        request_type, response_type = wire.message(f"inference.{method}Request"), wire.message(f"inference.{method}Response")

        async def work(data: bytes, context: Context) -> bytes:
            if needs_key:
                self.holder(context)
            response = response_type()
            answer(decode(request_type, data), response)
            written: bytes = response.SerializeToString()
            return written

        async def call(data: bytes, context: Context) -> bytes:
            written: bytes = await guarded(context, work(data, context))
            return written

        return grpc.unary_unary_rpc_method_handler(call)

    async def _model_infer(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        written: bytes = await guarded(context, self._infer(requests, context))
        if len(written) < SMALL_MESSAGE:
            context.disable_next_message_compression()
        return written

    async def _infer(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        arrival = time.monotonic()
        seconds_left = context.time_remaining()
        tenant, limits = self.holder(context)
        self._service.model()  # refuses at once where nothing can be served
        responses: list[bytes] = []

        async def write(response: Any) -> None:
            responses.append(response.SerializeToString())

        data = await self._only_request(aiter(requests))
        span = self._span(context, "ModelInfer", arrival)
        call = Call(data=data, stream=False, tenant=tenant, limits=limits, arrival=arrival, seconds_left=seconds_left, write=write, span=span)
        del data
        await call.run(self._service)
        return responses[0]

    async def _only_request(self, requests: AsyncIterator[bytes]) -> bytes:
        seconds = self._service.config.body_timeout
        try:
            async with asyncio.timeout(seconds):
                data = await anext(requests, None)
                if data is None or await anext(requests, None) is not None:
                    raise InvalidRequest("ModelInfer takes exactly one request.")
                return data
        except TimeoutError:
            raise BodyTimeout(f"The request did not arrive within {seconds:g} seconds.") from None

    async def _model_stream_infer(self, requests: AsyncIterator[bytes], context: Context) -> None:
        """Requests of one stream are answered side by side; the error of one is its last response, and the others go on."""
        tenant, limits = await guarded(context, self.checked_holder(context))
        requests = aiter(requests)
        writing = asyncio.Lock()
        room = asyncio.Semaphore(self._service.admission.limit + 1)  # one more than may run, so that it is told why it may not

        async def write(response: Any) -> None:
            data = response.SerializeToString()
            async with writing:
                if len(data) < SMALL_MESSAGE:
                    context.disable_next_message_compression()
                try:
                    await context.write(data)
                except grpc.aio.BaseError:
                    raise ClientGone from None

        async def answer(data: bytes) -> None:
            arrival = time.monotonic()
            call = Call(
                data=data,
                stream=True,
                tenant=tenant,
                limits=limits,
                arrival=arrival,
                seconds_left=context.time_remaining(),
                write=write,
                span=self._span(context, "ModelStreamInfer", arrival),
            )
            del data
            try:
                await self._answered(call)
            except ClientGone:
                pass  # the call itself is cancelled, too
            finally:
                room.release()

        async with asyncio.TaskGroup() as answers:
            while (data := await self._next_request(requests, room)) is not None:
                answers.create_task(answer(data))

    async def _answered(self, call: Call) -> None:
        try:
            await call.run(self._service)
            return
        except RequestError as error:
            failure = error
        except ClientGone:
            raise
        except Exception:
            logger.exception("a request of a gRPC stream failed: a fault in the server")
            failure = RequestFailed(FAULT)
        await call.write(error_response(call.id, failure))

    async def _next_request(self, requests: AsyncIterator[bytes], room: asyncio.Semaphore) -> bytes | None:
        """None at the end of the stream or of the process."""
        await room.acquire()
        reading = asyncio.ensure_future(anext(requests, None))
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait((reading, closing), return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            reading.cancel()
            closing.cancel()
            await asyncio.gather(reading, closing, return_exceptions=True)

    def holder(self, context: Context) -> tuple[str, KeyLimits]:
        """Whose call it is. Raises `AuthenticationFailed`."""
        metadata = context.invocation_metadata() or ()
        return self._service.keys.holder((name.encode(), value.encode() if isinstance(value, str) else value) for name, value in metadata)

    def _span(self, context: Context, method: str, arrival: float) -> RequestSpan | None:
        tracing = self._service.tracing
        if tracing is None:
            return None
        found: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
        for name, value in context.invocation_metadata() or ():
            if name in found and isinstance(value, str):
                found[name].append(value)
        model = self._service.model_names[0]
        return request_span.begin(tracing, f"{wire.SERVICE}/{method}", operation="chat", model=model, arrival=arrival, **found)[1]

    async def checked_holder(self, context: Context) -> tuple[str, KeyLimits]:
        return self.holder(context)

    def _server_live(self, request: Any, response: Any) -> None:
        response.live = self._service.state != "dead"

    def _server_ready(self, request: Any, response: Any) -> None:
        response.ready = self._service.state == "ready"

    def _model_ready(self, request: Any, response: Any) -> None:
        """A model that is not there is not ready, which is no error."""
        known = request.name in self._service.model_names and request.version in ("", VERSION)
        response.ready = known and self._service.state == "ready"

    def _server_metadata(self, request: Any, response: Any) -> None:
        response.name, response.version = "headrace", __version__

    def _model_metadata(self, request: Any, response: Any) -> None:
        response.name = self._service.check_model_name(request.name or None)
        check_version(request.version)
        response.platform = "headrace"
        response.versions.append(VERSION)
        for tensors, table in ((response.inputs, INPUTS), (response.outputs, OUTPUTS)):
            for name, (datatype, size) in table.items():
                tensors.add(name=name, datatype=datatype, shape=[size])


async def guarded(context: Context, work: Coroutine[Any, Any, Any]) -> Any:
    """The result of the work; its errors end the call with their code."""
    try:
        return await work
    except RequestError as error:
        failure = error
    except Exception:
        logger.exception("a gRPC call failed: a fault in the server")
        failure = RequestFailed(FAULT)
    return await context.abort(status.code_of(failure), status.message_of(failure), status.trailers(failure))
