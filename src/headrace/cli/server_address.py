"""Where a server listens, and the words of its errors: what the command line's clients share."""

from __future__ import annotations

import http.client
import json
from urllib.parse import urlsplit

from headrace.errors import StartError


class ServerAddress:
    """`url` is where the server listens, with or without /v1. Raises `StartError` for what is no URL."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise StartError(f"--url {url} is not a URL; use http://HOST:PORT.")
        self._connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port = parts.hostname, parts.port
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")  # stands before every path

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """A connection that is opened by its first request; each answer must come within `timeout` seconds."""
        return self._connection_type(self._host, self._port, timeout=timeout)


def error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace").strip()[:300] or "no reason given"
