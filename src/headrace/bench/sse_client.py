"""One streamed request to a server, and when each piece of its answer came.

Times are taken where bytes arrive, before anything is parsed. What the events say is read only when the answer is here as a whole: it would hold up
the bytes of other answers, and with them their times.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from headrace.errors import ConfigError


@dataclass(slots=True, kw_only=True)
class Record:
    """What became of a request. Times are monotonic seconds."""

    sent: float
    first: float | None = None  # the first piece with text
    last: float | None = None  # the latest one
    gaps: list[float] = field(default_factory=list)  # seconds between successive pieces
    text: str = ""
    num_prompt_tokens: int = 0  # by the server's usage
    num_output_tokens: int = 0
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


class Target:
    """Where requests go. `url`: http(s)://HOST:PORT, with or without a path before `endpoint`. Raises `ConfigError`."""

    def __init__(self, url: str, *, endpoint: str = "/v1/completions", api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--base-url {url} is not a URL; use http://HOST:PORT.")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self.path = parts.path.rstrip("/").removesuffix("/v1") + endpoint
        self.is_chat = endpoint.endswith("chat/completions")
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def stream(self, body: dict[str, Any], *, timeout: float) -> Record:
        """Sends a body on a connection of its own and reads the answer to its end. Failures are in the record."""
        data = json.dumps(body).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        loop = asyncio.get_running_loop()
        exchange = _Exchange(f"{head}{self._authorization}Connection: close\r\n\r\n".encode() + data, loop.create_future())
        record = Record(sent=time.monotonic())
        try:
            async with asyncio.timeout(timeout):
                transport, _ = await loop.create_connection(lambda: exchange, self._host, self._port, ssl=self._tls)
                try:
                    await exchange.end
                finally:
                    transport.close()
        except TimeoutError:
            record.error = f"no end within {timeout:g} s"
        except (OSError, httptools.HttpParserError) as error:
            record.error = str(error) or type(error).__name__
        _Events(record).read(exchange)
        return record


class _Exchange(asyncio.Protocol):
    """A request, and the pieces of its answer's body with the moments at which they came."""

    def __init__(self, request: bytes, end: asyncio.Future[None]) -> None:
        self.pieces: list[tuple[float, bytes]] = []
        self.status = 0
        self.end = end  # done when the answer is here as a whole, or nothing more will come
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(error)

    # what httptools calls while it parses

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        self._finish(None)

    def _finish(self, error: Exception | None) -> None:
        if self.end.done():
            return
        if error is None:
            self.end.set_result(None)
        else:
            self.end.set_exception(error)


class _Events:
    """Reads the events of a body into a record."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._finished = False  # the stream has said so
        self._now = 0.0

    def read(self, exchange: _Exchange) -> None:
        record = self._record
        if exchange.status != 200:
            body = b"".join(body for _, body in exchange.pieces)
            record.error = record.error or f"status {exchange.status}: {body[:300].decode(errors='replace')}"
            return
        rest = b""  # of an event that is not complete
        for self._now, body in exchange.pieces:
            *events, rest = (rest + body).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                self._take(event)
        if record.error is None and not self._finished:
            record.error = "the stream ended before its end"
        elif record.error is None and record.first is None:
            record.error = "an answer without a token"
        elif record.error is None and not record.num_output_tokens:
            record.num_output_tokens = len(record.gaps) + 1  # a server that tells no usage: a token a piece, at least

    def _take(self, event: bytes) -> None:
        data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if not data:
            return
        if data == b"[DONE]":
            self._finished = True
            return
        record = self._record
        try:
            value = json.loads(data)
        except ValueError:
            record.error = f"an event that is no JSON: {data[:100].decode(errors='replace')}"
            return
        if value.get("error"):
            record.error = str(value["error"].get("message", value["error"])) if isinstance(value["error"], dict) else str(value["error"])
            return
        if usage := value.get("usage"):
            record.num_prompt_tokens, record.num_output_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        text = "".join(_text(choice) for choice in value.get("choices") or [])
        if not text:
            return
        record.text += text
        if record.last is None:
            record.first = self._now
        else:
            record.gaps.append(self._now - record.last)
        record.last = self._now


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
