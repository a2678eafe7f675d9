"""Our errors as gRPC has them: a code, a message, and in the trailers what a program needs to go on."""

from __future__ import annotations

import grpc

from headrace.errors import EngineUnavailable, QueueFull, RateLimitExceeded, RequestError
from headrace.server.open_inference import wire

CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
MAX_MESSAGE = 2000  # characters; trailers must fit what clients take for headers, 8 KiB as a rule


def code_of(error: RequestError) -> grpc.StatusCode:
    if error.code == "deadline_exceeded":  # too late is too late, whatever HTTP calls it
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return CODES.get(error.status, grpc.StatusCode.INTERNAL)


def message_of(error: RequestError) -> str:
    return error.message[:MAX_MESSAGE]


def retry_seconds(error: RequestError) -> int | None:
    """After how long the same request may be sent again; None: no time makes it right."""
    if isinstance(error, QueueFull | RateLimitExceeded):
        return max(1, error.retry_after)
    return 1 if isinstance(error, EngineUnavailable) else None


def facts(error: RequestError) -> dict[str, str]:
    """What HTTP's error object says beside the message."""
    told = {"error-code": error.code, "error-param": error.param}
    return {name: ascii(value)[1:-1][:200] for name, value in told.items() if value}


def trailers(error: RequestError) -> tuple[tuple[str, str | bytes], ...]:
    """Trailing metadata: `facts`, and when to try again in the three forms that clients look for."""
    found: list[tuple[str, str | bytes]] = list(facts(error).items())
    seconds = retry_seconds(error)
    if seconds is not None:
        info = wire.RetryInfo()
        info.retry_delay.seconds = seconds
        details = wire.Status(code=code_of(error).value[0], message=message_of(error))
        details.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=info.SerializeToString())
        found += [
            ("retry-after", str(seconds)),
            ("grpc-retry-pushback-ms", str(1000 * seconds)),
            ("grpc-status-details-bin", details.SerializeToString()),
        ]
    return tuple(found)
