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
MAX_KERNEL_SECONDS = 10.0  # each operator of each step is kept in the engine until the end
ROW_BYTES = 150  # of an event, about


def query_of(request: Request) -> tuple[float, bool]:
    """The query's `seconds` and `kernels`. Raises `InvalidRequest`."""
    unknown = sorted(set(request.query_params) - {"seconds", "kernels"})
    if unknown:
        raise InvalidRequest(f"The query has no {unknown[0]}; it takes seconds and kernels.", param=unknown[0])
    wanted = request.query_params.get("kernels", "false")
    if wanted not in ("true", "false"):
        raise InvalidRequest("kernels must be true or false.", param="kernels")
    kernels = wanted == "true"
    longest = MAX_KERNEL_SECONDS if kernels else MAX_SECONDS
    text = request.query_params.get("seconds")
    try:
        seconds = DEFAULT_SECONDS if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds <= longest:
        raise InvalidRequest(f"seconds must be a number above 0, of at most {longest:g}{' with kernels' * kernels}.", param="seconds")
    return seconds, kernels


def routes(service: Service) -> list[Route]:
    async def trace(request: Request) -> Response:
        seconds, kernels = query_of(request)
        found = await until_disconnect(request.receive, service.engine.trace(seconds, kernels=kernels))
        num_rows = found.num_rows + len(found.kernels or ())
        data = await service.offload(ROW_BYTES * num_rows, lambda: encode(trace_object(found, model=service.model_names[0])))
        headers = {"Content-Disposition": 'attachment; filename="headrace-trace.json"', "Cache-Control": "no-store"}
        return Response(data, media_type="application/json", headers=headers)

    return [Route("/debug/trace", trace, methods=["POST"])]
