"""grpc.health.v1: what /ready says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.server.open_inference import wire
from headrace.server.service import Service

SERVICES = ("", wire.SERVICE)  # the whole server, and the protocol
WATCH_S = 0.25  # between two looks at the state


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Asks for no key, as probes have none."""

    def __init__(self, service: Service, closing: asyncio.Event) -> None:
        self._service = service
        self._closing = closing

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "There is no such service here.")
        return self._status()

    async def List(self, request: Any, context: Any) -> Any:
        return health_pb2.HealthListResponse(statuses={name: self._status() for name in SERVICES})

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """The status now and whenever it changes, to the end of the process."""
        if request.service not in SERVICES:
            yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            await self._closing.wait()
            return
        told = None
        while not self._closing.is_set():
            now = self._status()
            if now != told:
                yield now
                told = now
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), WATCH_S)

    def _status(self) -> Any:
        kinds = health_pb2.HealthCheckResponse
        return kinds(status=kinds.SERVING if self._service.state == "ready" else kinds.NOT_SERVING)
