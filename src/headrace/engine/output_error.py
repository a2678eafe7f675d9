"""What a terminal output says, as the exception that clients know."""

from __future__ import annotations

from headrace.core.messages import TokenOutput
from headrace.errors import ContextLengthExceeded, InvalidRequest, QueueFull, RequestError, RequestFailed


def error_of(output: TokenOutput, retry_after: int | None) -> RequestError:
    """The exception that a terminal output with finish_reason "error" stands for."""
    message = output.error_message or "The engine could not compute this request."
    match output.error_code:
        case "queue_full":
            return QueueFull(message, retry_after=retry_after or 1)
        case "context_length_exceeded":
            return ContextLengthExceeded(message, param="prompt")
        case "invalid_value":
            return InvalidRequest(message)
        case code:
            return RequestFailed(message, code=code)
