"""The web application: routes, and the layers around them."""

from __future__ import annotations

import asyncio
from functools import cache

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from headrace.server import (
    routes_batches,
    routes_cache,
    routes_chat,
    routes_completions,
    routes_embeddings,
    routes_files,
    routes_operations,
    routes_status,
    routes_tokenize,
    routes_trace,
)
from headrace.server.auth import ApiKeys
from headrace.server.batch_service import ENDPOINTS, AnswerBody, BatchService
from headrace.server.errors_to_json import ErrorsToJson, routing_error
from headrace.server.generation_route import GenerationRoute
from headrace.server.messages import routes as routes_messages
from headrace.server.openapi import document as openapi
from headrace.server.request_log import RequestLog
from headrace.server.request_span import OPERATIONS
from headrace.server.responses import routes as routes_responses
from headrace.server.routes_embeddings import EmbeddingsRoute
from headrace.server.service import Service
from headrace.server.streaming import encode
from headrace.server.web_page import WebPage

RATE_LIMIT_HEADERS = tuple(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens"))
FAMILIES = (
    routes_completions,
    routes_chat,
    routes_responses,
    routes_messages,
    routes_embeddings,
    routes_tokenize,
    routes_cache,
    routes_operations,
    routes_status,
    routes_trace,
)


class Application(Starlette):
    """Leaves the server's own `send` to routes, for what follows the start of a stream: at each token it spares all layers between."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["send"] = send
        await super().__call__(scope, receive, send)


def create_app(service: Service, batches: BatchService | None = None) -> Application:
    """From the outside in: request id and log, CORS, errors, page, keys, routes.

    CORS stands outside of the keys, so that a preflight needs none and a page may read why it was refused. Our
    own page stands outside of them as well: a key is entered there.
    """
    routes: list[BaseRoute] = [route for family in FAMILIES for route in family.routes(service)]
    if batches is not None:
        batches.answers = background_answers(routes)
        routes += [*routes_files.routes(service, batches), *routes_batches.routes(service, batches)]
    routes.append(document_route(routes, secured=bool(service.config.api_keys or service.config.limited_keys)))
    paths = {route.path_format: route.path_regex for route in routes if isinstance(route, Route)}
    config = service.config
    if config.web:
        paths |= WebPage.PATHS
    service.metrics.expect_paths(paths, answering=OPERATIONS)
    layers = [
        Middleware(
            RequestLog, metrics=service.metrics, paths=paths, write_lines=config.log_requests, model=service.model_names[0], tracing=service.tracing
        )
    ]
    if config.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=("GET", "POST", "DELETE", "OPTIONS"),
                allow_headers=("*",),
                expose_headers=("X-Request-Id", "request-id", "traceparent", "Retry-After", *RATE_LIMIT_HEADERS),
            )
        )
    layers += [Middleware(ErrorsToJson)]
    if config.web:
        layers += [Middleware(WebPage)]
    layers += [Middleware(ApiKeys, keys=service.keys)]
    app = Application(routes=routes, middleware=layers, exception_handlers={HTTPException: routing_error})
    app.router.redirect_slashes = False  # another spelling of a path is another path
    return app


def document_route(routes: list[BaseRoute], *, secured: bool) -> Route:
    """What describes all routes, itself among them."""

    @cache
    def document() -> bytes:
        """Made when it is first asked for: a tenth of a second, in which a server could have started."""
        return encode(openapi.openapi([*routes, route], secured=secured))

    async def describe(request: Request) -> Response:
        return Response(await asyncio.to_thread(document), media_type="application/json")

    route = Route(openapi.PATH, describe, methods=["GET"])
    return route


def background_answers(routes: list[BaseRoute]) -> dict[str, AnswerBody]:
    """What answers the lines of batches: the routes themselves, by path."""
    kinds = GenerationRoute | EmbeddingsRoute
    found = {route.path: route.endpoint for route in routes if isinstance(route, Route) and isinstance(route.endpoint, kinds)}
    return {path: endpoint.in_background for path, endpoint in found.items() if path in ENDPOINTS}
