"""A busy service's work for the scripts here: prompts of token ids, answers of exact lengths, so many requests at a time."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_TOKEN = 10_000  # prompts are of ids up to this, which every vocabulary has
SIGMA = 0.8  # of the logarithm of lengths
TAIL_BYTES = 200  # of a stream, which hold its last events


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    prompt: tuple[int, ...]
    max_tokens: int


def busy_requests(count: int, *, seed: int) -> list[TokenRequest]:
    """Prompts lognormal around 128 tokens, 32 to 512, and answers around 64, 16 to 256. No two share a prefix."""
    draw = random.Random(seed)

    def length(median: int) -> int:
        return round(min(4 * median, max(median / 4, median * math.exp(draw.gauss(0.0, SIGMA)))))

    lengths = [(length(128), length(64)) for _ in range(count)]
    return [TokenRequest(prompt=tuple(draw.choices(range(100, MAX_TOKEN), k=size)), max_tokens=tokens) for size, tokens in lengths]


async def at_a_time(number: int, requests: Sequence[TokenRequest], run: Callable[[TokenRequest], Awaitable[None]]) -> None:
    """All of them in their order, each as soon as fewer than `number` run."""
    waiting = iter(requests)

    async def client() -> None:
        for request in waiting:
            await run(request)

    await asyncio.gather(*(client() for _ in range(number)))


class _Stream(asyncio.Protocol):
    """Keeps the beginning and the end of what comes."""

    def __init__(self) -> None:
        self.first = self.last = b""
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.first = self.first or data
        self.last = data if len(data) >= TAIL_BYTES else (self.last + data)[-TAIL_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(error)


async def stream_over_http(url: str, request: TokenRequest) -> None:
    """Reads the stream to its end and looks at as little of it as can be: the machine is the server's. Raises SystemExit for a failed one."""
    parts = urlsplit(url)
    body = {"prompt": request.prompt, "max_tokens": request.max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    transport, stream = await asyncio.get_running_loop().create_connection(_Stream, parts.hostname, parts.port)
    transport.write(f"{head}Connection: close\r\n\r\n".encode() + data)
    await stream.ended
    if not stream.first.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in stream.last or b'"error"' in stream.last:
        raise SystemExit(f"a request failed: {stream.first[:300]!r} ... {stream.last!r}")
