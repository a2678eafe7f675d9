"""One streamed request to a server, and when each piece of its answer came. Times are taken where bytes arrive, before anything is parsed."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from headrace.errors import ConfigError

PIECE_BYTES = 1 << 16


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
        record = Record(sent=time.monotonic())
        try:
            async with asyncio.timeout(timeout):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
                try:
                    writer.write(f"{head}{self._authorization}Connection: close\r\n\r\n".encode() + data)
                    await _read(reader, record)
                finally:
                    writer.close()
        except TimeoutError:
            record.error = f"no end within {timeout:g} s"
        except (OSError, httptools.HttpParserError) as error:
            record.error = str(error) or type(error).__name__
        return record


async def _read(reader: asyncio.StreamReader, record: Record) -> None:
    answer = _Answer(record)
    parser = httptools.HttpResponseParser(answer)
    answer.status_of = parser.get_status_code
    while not answer.done and (piece := await reader.read(PIECE_BYTES)):
        answer.now = time.monotonic()
        parser.feed_data(piece)
    if record.error is None and answer.status != 200:
        record.error = f"status {answer.status}: {bytes(answer.rest)[:300].decode(errors='replace')}"
    elif record.error is None and not answer.finished:
        record.error = "the stream ended before its end"
    elif record.error is None and record.first is None:
        record.error = "an answer without a token"
    elif record.error is None and not record.num_output_tokens:
        record.num_output_tokens = len(record.gaps) + 1  # a server that tells no usage: a token a piece, at least


class _Answer:
    """What httptools calls while it parses."""

    def __init__(self, record: Record) -> None:
        self.now = 0.0
        self.status = 0
        self.status_of: Callable[[], int] = int
        self.done = False  # the answer is here as a whole
        self.finished = False  # the stream has said so
        self.rest = bytearray()  # of an event that is not complete, or of an answer that is no stream
        self._record = record

    def on_headers_complete(self) -> None:
        self.status = self.status_of()

    def on_message_complete(self) -> None:
        self.done = True

    def on_body(self, body: bytes) -> None:
        self.rest += body
        if self.status != 200:
            return
        *events, rest = bytes(self.rest).replace(b"\r\n", b"\n").split(b"\n\n")
        self.rest = bytearray(rest)
        for event in events:
            self._take(event)

    def _take(self, event: bytes) -> None:
        data = b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if not data:
            return
        if data == b"[DONE]":
            self.finished = True
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
            record.first = self.now
        else:
            record.gaps.append(self.now - record.last)
        record.last = self.now


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
