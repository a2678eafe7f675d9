"""Routes that work on text alone: read, compute, answer. Nothing is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from headrace.server.body import read_body
from headrace.server.generation_route import until_disconnect
from headrace.server.service import LoadedModel, Service
from headrace.server.streaming import send_json

Work = Callable[[bytes, Service, LoadedModel, str], dict[str, Any]]  # (body, service, model, tenant) -> answer; thread-safe


class TextRoute:
    """An ASGI application around one function. It is admitted, bounded and offloaded as a request that generates is."""

    def __init__(self, service: Service, work: Work) -> None:
        self._service = service
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        model = service.model()
        config = service.config
        with service.bodies.lease() as lease:
            body = await read_body(receive, Headers(scope=scope), max_bytes=config.max_body_bytes, timeout=config.body_timeout, lease=lease)
            with service.admission.permit():
                work = service.offload(len(body), self._work, body, service, model, scope["state"]["tenant"])
                answer = await until_disconnect(receive, work)
        await send_json(send, answer)
