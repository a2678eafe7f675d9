"""What operators and routers ask: models, life, readiness, metrics, version."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from headrace import __version__
from headrace.server.routes_status import work_until
from headrace.server.service import Service

Handler = Callable[[Request], Awaitable[Response]]


def model_object(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "headrace",
        "root": service.model_names[0],
        "parent": None,
        "max_model_len": service.model().info.max_model_len,
    }


def paths_object(service: Service) -> dict[str, Any]:
    """Which path serves, and how far faster ones are; nothing before a model is loaded."""
    if service.loaded is None:
        return {}
    told: dict[str, Any] = {"path": service.loaded.info.path}
    status = service.engine.compile
    if status is not None:
        told["compile"] = {
            "mode": status.mode,
            "state": status.state,
            "reason": status.reason,
            "paths": [{"name": path.name, "state": path.state, "reason": path.reason} for path in status.paths],
        }
    return told


def routes(service: Service) -> list[Route]:
    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model_object(service, name) for name in service.model_names]})

    async def model(request: Request) -> Response:
        return JSONResponse(model_object(service, service.check_model_name(request.path_params["name"])))

    async def health(request: Request) -> Response:
        """Alive, which a process without hope of an engine is not."""
        state = service.state
        return JSONResponse({"status": state}, status_code=503 if state == "dead" else 200)

    async def ready(request: Request) -> Response:
        state = service.state
        return JSONResponse({"status": state, **paths_object(service)}, status_code=200 if state == "ready" else 503)

    async def metrics(request: Request) -> Response:
        engine = service.engine
        heartbeat = engine.heartbeat
        body, content_type = service.metrics.render(
            engine.stats,
            state=service.state,
            restarts=engine.restarts_total,
            compile=engine.compile,
            work=None if heartbeat is None else work_until(heartbeat, time.monotonic()),
        )
        return Response(body, headers={"content-type": content_type})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    table: list[tuple[str, Handler]] = [
        ("/v1/models", models),
        ("/v1/models/{name:path}", model),
        ("/health", health),
        ("/ready", ready),
        ("/metrics", metrics),
        ("/version", version),
    ]
    return [Route(path, handler, methods=["GET"]) for path, handler in table]
