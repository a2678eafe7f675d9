"""Every error leaves the server in the shape of its route's API, OpenAI's as a rule; a fault of ours does not leave it as a traceback."""

from __future__ import annotations

import logging

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import (
    AuthenticationFailed,
    BodyTimeout,
    BodyTooLarge,
    EngineUnavailable,
    MethodNotAllowed,
    QueueFull,
    RateLimitExceeded,
    RequestError,
    RequestFailed,
    RouteNotFound,
)
from headrace.server.body import ClientGone
from headrace.server.messages import errors as message_errors

logger = logging.getLogger("headrace.server")


def error_response(error: RequestError, scope: Scope) -> JSONResponse:
    headers = {}
    if isinstance(error, QueueFull | RateLimitExceeded):
        headers["Retry-After"] = str(max(1, error.retry_after))
    if isinstance(error, EngineUnavailable):
        headers["Retry-After"] = "1"
    if isinstance(error, AuthenticationFailed):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyTooLarge | BodyTimeout):
        headers["Connection"] = "close"  # the rest of the body is not read
    body = error.body()
    if message_errors.speaks_anthropic(scope["path"]):
        body = message_errors.error_body(error, scope["state"]["request_id"])
    return JSONResponse(body, status_code=error.status, headers=headers)


async def routing_error(request: Request, error: Exception) -> Response:
    """The router's own refusals: an exception handler for Starlette."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:200]
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": f"{allowed}, OPTIONS"})
        response = error_response(MethodNotAllowed(f"{path} does not take {request.method[:20]}; use {allowed}."), request.scope)
        response.headers["Allow"] = allowed
        return response
    return error_response(RouteNotFound(f"There is no {path} here."), request.scope)


class ErrorsToJson:
    """Wraps everything that may refuse a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
            return
        except ClientGone:
            scope["state"]["gone"] = True
            return
        except RequestError as error:
            if started:
                raise
            response = error_response(error, scope)
        except Exception:
            logger.exception("%s %s failed: a fault in the server", scope["method"], scope["path"])
            if started:
                raise
            response = error_response(RequestFailed("The server failed to answer this request; its log says why."), scope)
        await response(scope, receive, send)
