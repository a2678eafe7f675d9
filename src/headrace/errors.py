"""Every error a user can meet.

    HeadraceError
    ├── RequestError                  one request is refused or fails
    │   ├── InvalidRequest            400  the request itself is wrong
    │   │   └── ContextLengthExceeded 400  prompt and answer do not fit
    │   ├── AuthenticationFailed      401
    │   ├── ModelNotFound             404
    │   ├── RouteNotFound             404
    │   ├── ResourceNotFound          404  an id that the server does not hold
    │   ├── MethodNotAllowed          405
    │   ├── BodyTimeout               408
    │   ├── BodyTooLarge              413
    │   ├── QueueFull                 429  with Retry-After
    │   ├── RateLimitExceeded         429  with Retry-After
    │   ├── RequestFailed             500  the engine could not compute this request
    │   └── EngineUnavailable         503  starting, draining, restarting or dead
    └── StartError                    the process cannot start (exit code 1)
        ├── ConfigError               a flag or a config file is wrong (exit code 2)
        └── ModelLoadError            a model file is missing, torn or not supported

Each leaf knows its wire form: `status` (HTTP), `type` and `code` (OpenAI's error object).
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all errors that Headrace raises on purpose."""


class RequestError(HeadraceError):
    """One request is refused or fails; all others go on.

    `param` names the field of the request that is at fault, or is None.
    """

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error in OpenAI's shape."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(RequestError, ValueError):
    """The request is wrong; sending it again unchanged cannot work."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer together exceed what the model or the KV cache can hold."""

    code = "context_length_exceeded"


class AuthenticationFailed(RequestError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class ModelNotFound(RequestError):
    status = 404
    type = "not_found_error"
    code = "model_not_found"


class RouteNotFound(RequestError):
    status = 404
    type = "not_found_error"
    code = "not_found"


class ResourceNotFound(RequestError):
    """The server holds nothing under this id: it never did, or it was deleted or pushed out, or it is another key's."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class MethodNotAllowed(RequestError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class BodyTimeout(RequestError):
    status = 408
    type = "invalid_request_error"
    code = "body_timeout"


class BodyTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


class QueueFull(RequestError):
    """The queue holds as many requests as it may. `retry_after` is in whole seconds."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RateLimitExceeded(RequestError):
    """The API key has used what it may in a minute. `retry_after` is in whole seconds."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestFailed(RequestError):
    """The engine accepted the request but could not compute it."""

    status = 500
    type = "internal_error"
    code = "request_failed"


class EngineUnavailable(RequestError):
    """No engine turns right now: it starts, drains, restarts or is dead."""

    status = 503
    type = "service_unavailable_error"
    code = "engine_unavailable"


class StartError(HeadraceError):
    """The process cannot start. The message says what to do next."""

    exit_code = 1


class ConfigError(StartError, ValueError):
    """A flag or a config file is wrong; the message names it."""

    exit_code = 2


class ModelLoadError(StartError):
    """A model file is missing, torn or not supported; the message names the file or tensor."""
