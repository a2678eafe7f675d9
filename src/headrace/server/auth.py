"""API keys: every request needs one, but for probes. Over HTTP that is decided on raw ASGI scopes, before any route is chosen."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.config import ApiKey
from headrace.errors import AuthenticationFailed
from headrace.server.rate_limits import KeyLimits
from headrace.server.tenants import digest, tenant_of

NO_LIMITS = KeyLimits()
OPEN_PATHS = frozenset(("/health", "/ready"))  # these very spellings and no others


class KeyRing:
    """The keys that are good, and what their holders may use; one for all ports of a process.

    A tenant is a digest, so that no key shows up in the engine, in logs or in metrics. Keys are compared as digests, all of them each
    time: the time taken tells nothing about how much of a key was right.
    """

    def __init__(self, keys: Iterable[str] = (), limited: Iterable[ApiKey] = ()) -> None:
        self._limits = {digest(key.encode()): NO_LIMITS for key in keys}
        self._limits |= {digest(key.key.encode()): KeyLimits(key) for key in limited}

    def holder(self, headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, KeyLimits]:
        """Whose request it is, by headers with lower-case names, and the limits; nobody's where no keys are asked for.

        Raises `AuthenticationFailed`.
        """
        if not self._limits:
            return "", NO_LIMITS
        given = self._known_digest(list(headers))
        return tenant_of(given), self._limits[given]

    def _known_digest(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        bearers = [value.partition(b" ") for name, value in headers if name == b"authorization"]
        keys = {key.strip(b" ") if kind.lower() == b"bearer" else b"" for kind, _, key in bearers}
        keys |= {value.strip(b" ") for name, value in headers if name == b"x-api-key"}
        key = keys.pop() if len(keys) == 1 else b""  # several that contradict each other are none
        given = digest(key)
        known = [hmac.compare_digest(given, expected) for expected in self._limits]
        if not key or True not in known:
            raise AuthenticationFailed("A valid API key is required: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'.")
        return given


class ApiKeys:
    """Refuses what has no `Authorization: Bearer KEY` or `x-api-key: KEY`, and names the tenant and the limits of what has."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            state = scope.setdefault("state", {})
            is_open = scope["path"] in OPEN_PATHS
            state["tenant"], state["limits"] = ("", NO_LIMITS) if is_open else self._keys.holder(scope["headers"])
        await self._app(scope, receive, send)
