"""Writing an answer: as server-sent events while it is made, or as one body at its end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from headrace.errors import RequestError, RequestFailed
from headrace.server.answer import Answer, Piece

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies shall not collect the events
]

logger = logging.getLogger("headrace.server")
encode = msgspec.json.Encoder().encode


class Wire(Protocol):
    """How a route writes one answer. Either `body` is called, once, or the others: `begin`, `events` ..., then `end` or `failed`."""

    def begin(self) -> bytes:
        """What comes before the first pieces."""

    def events(self, batch: list[Piece]) -> bytes:
        """The events that pieces become; empty if they hold nothing."""

    def end(self) -> bytes:
        """What comes after the last pieces."""

    def failed(self, error: RequestError) -> bytes:
        """The last event of a stream that cannot go on."""

    def body(self, pieces: list[Piece]) -> dict[str, Any]:
        """The whole answer from all of its pieces, as they came."""


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event, with its `event:` line where the protocol names events."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(data) + b"\n\n"


async def send_body(send: Send, answer: Answer, wire: Wire) -> None:
    """The whole answer as JSON. Raises `RequestError` instead of sending anything."""
    await send_json(send, await whole_body(answer, wire))


async def whole_body(answer: Answer, wire: Wire) -> dict[str, Any]:
    """Raises `RequestError`."""
    async with aclosing(answer.batches()) as batches:
        pieces = [piece async for batch in batches for piece in batch]
    return wire.body(pieces)


async def send_json(send: Send, body: dict[str, Any]) -> None:
    await send_encoded(send, encode(body))


async def send_encoded(send: Send, data: bytes) -> None:
    """A whole body that is JSON already."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def send_stream(send: Send, answer: Answer, wire: Wire, rest: Send) -> None:
    """Events as the answer is made; `rest` sends what follows the start.

    A `RequestError` before the first piece is raised, so that it can have its own status; a later one becomes the last event.
    """

    def write(data: bytes) -> Awaitable[None]:
        return rest({"type": "http.response.body", "body": data, "more_body": True})

    async with aclosing(answer.batches()) as batches:
        first = await anext(batches)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            if data := wire.begin() + wire.events(first):
                await write(data)
            async for batch in batches:
                if data := wire.events(batch):
                    await write(data)
            await write(wire.end())
        except RequestError as error:
            await write(wire.failed(error))
        except Exception:
            logger.exception("a stream failed: a fault in the server")
            await write(wire.failed(RequestFailed("The server failed to go on with this answer.")))
    await rest({"type": "http.response.body", "body": b"", "more_body": False})
