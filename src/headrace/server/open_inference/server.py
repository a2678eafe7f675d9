"""The gRPC port: the protocol, health and reflection on one server, which lives beside HTTP's on the same event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as reflection

from headrace.config import ServerConfig
from headrace.errors import StartError
from headrace.server.open_inference import wire
from headrace.server.open_inference.guarded_server import new_server
from headrace.server.open_inference.health import Health
from headrace.server.open_inference.servicer import Servicer, guarded
from headrace.server.service import Service

MORE_CALLS = 1024  # open calls beside those that generate: idle streams, probes
REFLECTION = ("grpc.reflection.v1alpha.ServerReflection", "grpc.reflection.v1.ServerReflection")  # the same messages under two names
HANDSHAKE_MS = 30_000
KEEP_ALIVE_MS = 60_000  # a silent client is asked whether it is still there
PING_TIMEOUT_MS = 20_000
COMPRESS_LOW = 1  # the level for answers; the algorithm is one that the client takes


class GrpcServer:
    """Made and used on one event loop. `open` takes the port."""

    def __init__(self, service: Service) -> None:
        self._config = service.config
        self._closing = asyncio.Event()
        self._servicer = Servicer(service, self._closing)
        options = (
            ("grpc.max_receive_message_length", self._config.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # a second server on the same port must not share its clients
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            ("grpc.keepalive_time_ms", KEEP_ALIVE_MS),
            ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.default_compression_level", COMPRESS_LOW),
        )
        self._server = new_server(options=options, maximum_concurrent_rpcs=service.admission.limit + MORE_CALLS)
        for name, methods in {wire.SERVICE: self._servicer.methods(), **self._reflection()}.items():
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
            self._server.add_registered_method_handlers(name, methods)
        health_pb2_grpc.add_HealthServicer_to_server(Health(service, self._closing), self._server)

    async def open(self, port: int) -> str:
        """Begins to answer; returns the address. Raises `StartError` that names the flag."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        try:
            credentials = server_credentials(self._config)
            address = f"{host}:{port}"
            bound = self._server.add_insecure_port(address) if credentials is None else self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise StartError(f"Cannot listen on {host} port {port}. Stop what uses it, or choose another --grpc-port.") from None
        if bound == 0:
            raise StartError(f"Cannot listen on {host} port {port} with TLS: look at --ssl-certfile and --ssl-keyfile.")
        await self._server.start()
        return f"{host}:{bound}"

    async def close(self, *, grace: float) -> None:
        """Ends idle streams at once, and others after at most `grace` seconds."""
        self._closing.set()
        await self._server.stop(grace)

    def _reflection(self) -> dict[str, dict[str, grpc.RpcMethodHandler]]:
        """Methods by service. Lets clients without the .proto find the calls. Asks for a key where one is asked for."""
        for source in (health_pb2, reflection_pb2):
            wire.POOL.Add(descriptor_pb2.FileDescriptorProto.FromString(source.DESCRIPTOR.serialized_pb))
        names = (wire.SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, REFLECTION[0])
        shown = reflection.ReflectionServicer(names, pool=wire.POOL)

        async def info(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            await guarded(context, self._servicer.checked_holder(context))
            async for response in shown.ServerReflectionInfo(requests, context):
                yield response

        handler = grpc.stream_stream_rpc_method_handler(
            info,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        return {name: {"ServerReflectionInfo": handler} for name in REFLECTION}


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """TLS as for HTTP; None without it."""
    if not config.ssl_certfile or not config.ssl_keyfile:
        return None
    return grpc.ssl_server_credentials([(Path(config.ssl_keyfile).read_bytes(), Path(config.ssl_certfile).read_bytes())])
