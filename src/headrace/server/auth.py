"""API keys: every request needs one, but for probes. Works on raw ASGI scopes, before any route is chosen."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.errors import AuthenticationFailed

OPEN_PATHS = frozenset(("/health", "/ready"))  # these very spellings and no others


class KeyRing:
    """The keys that are good.

    A tenant is a digest, so that no key shows up in the engine, in logs or in metrics. Keys are compared as digests, all of them each
    time: the time taken tells nothing about how much of a key was right.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [digest(key.encode()) for key in keys]

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Whose request it is, by headers with lower-case names; "" where no keys are asked for. Raises `AuthenticationFailed`."""
        if not self._digests:
            return ""
        pairs = list(headers)
        bearers = [value.partition(b" ") for name, value in pairs if name == b"authorization"]
        keys = {key.strip(b" ") if kind.lower() == b"bearer" else b"" for kind, _, key in bearers}
        keys |= {value.strip(b" ") for name, value in pairs if name == b"x-api-key"}
        key = keys.pop() if len(keys) == 1 else b""  # several that contradict each other are none
        given = digest(key)
        known = [hmac.compare_digest(given, expected) for expected in self._digests]
        if not key or True not in known:
            raise AuthenticationFailed("A valid API key is required: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'.")
        return given.hex()[:16]


class ApiKeys:
    """Refuses what has no `Authorization: Bearer KEY` or `x-api-key: KEY`, and names the tenant of what has."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._ring = KeyRing(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            state = scope.setdefault("state", {})
            state["tenant"] = "" if scope["path"] in OPEN_PATHS else self._ring.tenant(scope["headers"])
        await self._app(scope, receive, send)


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
