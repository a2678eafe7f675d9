"""Errors in Anthropic's shape."""

from __future__ import annotations

from typing import Any

from headrace.errors import RequestError

PATH = "/v1/messages"
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def speaks_anthropic(path: str) -> bool:
    """Whether whoever asks for this path expects this shape."""
    return path == PATH or path.startswith(PATH + "/")


def error_body(error: RequestError, request_id: str | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"type": "error", "error": {"type": TYPES.get(error.status, "api_error"), "message": error.message}}
    if request_id is not None:
        body["request_id"] = request_id
    return body
