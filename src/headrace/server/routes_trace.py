"""Records what the engine does for a few seconds, for Perfetto."""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.errors import InvalidRequest
from headrace.server.generation_route import until_disconnect
from headrace.server.perfetto import trace_object
from headrace.server.service import Service
from headrace.server.streaming import encode

DEFAULT_SECONDS, MAX_SECONDS = 5.0, 60.0
ROW_BYTES = 150  # of an event, about


def seconds_of(request: Request) -> float:
    """The query's `seconds`. Raises `InvalidRequest`."""
    unknown = sorted(set(request.query_params) - {"seconds"})
    if unknown:
        raise InvalidRequest(f"The query has no {unknown[0]}; it takes seconds.", param=unknown[0])
    text = request.query_params.get("seconds")
    try:
        seconds = DEFAULT_SECONDS if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds <= MAX_SECONDS:
        raise InvalidRequest(f"seconds must be a number above 0, of at most {MAX_SECONDS:g}.", param="seconds")
    return seconds


def routes(service: Service) -> list[Route]:
    async def trace(request: Request) -> Response:
        found = await until_disconnect(request.receive, service.engine.trace(seconds_of(request)))
        data = await service.offload(ROW_BYTES * found.num_rows, lambda: encode(trace_object(found, model=service.model_names[0])))
        headers = {"Content-Disposition": 'attachment; filename="headrace-trace.json"', "Cache-Control": "no-store"}
        return Response(data, media_type="application/json", headers=headers)

    return [Route("/debug/trace", trace, methods=["POST"])]
