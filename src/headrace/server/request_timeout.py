"""`X-Request-Timeout`: the deadline of a request from a client or proxy that does not write the body."""

from __future__ import annotations

import re

from starlette.types import Scope

from headrace.errors import InvalidRequest

NAME = "X-Request-Timeout"


def timeout_ms(scope: Scope) -> int | None:
    """The header's, which is in seconds. Raises `InvalidRequest`."""
    values = [value.decode("latin-1").strip() for name, value in scope["headers"] if name == NAME.lower().encode()]
    if not values:
        return None
    if len(values) > 1 or not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", values[0]) or not float(values[0]):
        raise InvalidRequest(f"{NAME} must be a number of seconds above 0, such as 2.5.", param=NAME)
    return max(1, int(float(values[0]) * 1000))


def earlier(one: int | None, other: int | None) -> int | None:
    return min((value for value in (one, other) if value is not None), default=None)
