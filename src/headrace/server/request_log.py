"""The outermost layer: gives each request an id, counts it, and writes a line about it where the operator asked for that."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.observe.metrics import Metrics
from headrace.observe.tracing import Tracing
from headrace.server import request_span
from headrace.server.messages.errors import speaks_anthropic
from headrace.server.request_span import RequestSpan
from headrace.server.trace_context import TraceContext, continued

VALID_ID = re.compile(r"[!-~]{1,128}")

logger = logging.getLogger("headrace.access")


class RequestLog:
    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        *,
        paths: Mapping[str, re.Pattern[str]],
        write_lines: bool,
        model: str,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths  # of a route, with its parameters in braces -> what paths look like that it takes
        self._write_lines = write_lines
        self._model = model
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if VALID_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        trace, span = state["trace"], state["span"] = self._trace(scope, started)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if trace is not None:
                    headers["traceparent"] = trace.header()
                headers.update(state["limits"].headers() if "limits" in state else {})
                if speaks_anthropic(scope["path"]):
                    headers["request-id"] = request_id  # where its clients look for it
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            seconds = time.monotonic() - started
            if span is not None:
                self._end(span, state, request_id, status)
            self._metrics.http_request(self._path_label(scope["path"]), status)
            if self._write_lines:
                self._write(scope, request_id, "client gone" if state.get("gone") else str(status), seconds)

    def _trace(self, scope: Scope, arrival: float) -> tuple[TraceContext | None, RequestSpan | None]:
        headers = Headers(scope=scope)
        operation = request_span.OPERATIONS.get(scope["path"]) if scope["method"] == "POST" else None
        if self._tracing is None or operation is None:
            return continued(headers.getlist("traceparent")), None
        return request_span.begin(
            self._tracing,
            f"POST {scope['path']}",
            operation=operation,
            model=self._model,
            traceparent=headers.getlist("traceparent"),
            tracestate=headers.getlist("tracestate"),
            arrival=arrival,
        )

    @staticmethod
    def _end(span: RequestSpan, state: MutableMapping[str, Any], request_id: str, status: int) -> None:
        error = "client_gone" if state.get("gone") else (str(status) if status >= 500 else None)
        span.ended({"http.response.status_code": status, "headrace.http_request_id": request_id}, error=error)

    def _path_label(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((label for label, pattern in self._paths.items() if "{" in label and pattern.match(path)), "other")

    def _write(self, scope: Scope, request_id: str, outcome: str, seconds: float) -> None:
        usage = scope["state"].get("usage")
        tokens = f" prompt_tokens={usage.prompt_tokens} completion_tokens={usage.completion_tokens}" if usage is not None else ""
        trace, limits = scope["state"]["trace"], scope["state"].get("limits")
        key = f" key={limits.name}" if limits is not None and limits.name is not None else ""
        span = f" trace={trace.trace_id} span={trace.span_id}" if trace is not None else ""
        # ascii(): what a client put into a path must not forge a line of the log
        logger.info("%s %s %s %.3fs id=%s%s", scope["method"], ascii(scope["path"][:200]), outcome, seconds, request_id, span + key + tokens)
