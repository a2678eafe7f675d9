"""Writing an answer: as server-sent events while it is made, or as one body at its end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from headrace.errors import RequestError, RequestFailed
from headrace.server.answer import Answer, Piece
from headrace.server.parse import ParsedRequest

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies shall not collect the events
]

logger = logging.getLogger("headrace.server")
encode = msgspec.json.Encoder().encode


class Form(Protocol):
    """How a family of routes writes choices."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of the events that a piece becomes, one an event; none for a piece that holds nothing."""

    def choice(self, pieces: list[Piece]) -> dict[str, Any]:
        """The whole choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What is the same in all chunks of an answer."""

    answer_id: str
    created: int  # Unix seconds
    model: str

    def fields(self, object_name: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": object_name, "created": self.created, "model": self.model}


def event(data: Any) -> bytes:
    return b"data: " + encode(data) + b"\n\n"


async def send_body(send: Send, answer: Answer, form: Form, header: Header) -> None:
    """The whole answer as JSON. Raises `RequestError` instead of sending anything."""
    pieces: dict[int, list[Piece]] = {}
    async with aclosing(answer.batches()) as batches:
        async for batch in batches:
            for piece in batch:
                pieces.setdefault(piece.index, []).append(piece)
    choices = [form.choice(pieces[index]) for index in sorted(pieces)]
    await send_json(send, {**header.fields(form.object_name), "choices": choices, "usage": answer.usage.body()})


async def send_json(send: Send, body: dict[str, Any]) -> None:
    await send_encoded(send, encode(body))


async def send_encoded(send: Send, data: bytes) -> None:
    """A whole body that is JSON already."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def send_stream(send: Send, answer: Answer, form: Form, header: Header, request: ParsedRequest) -> None:
    """Events as the answer is made.

    A `RequestError` before the first piece is raised, so that it can have its own status; a later one becomes the last event.
    """
    fields = header.fields(form.chunk_object_name)

    def events(batch: list[Piece]) -> bytes:
        chunks = []
        for piece in batch:
            for choice in form.chunk_choices(piece):
                chunk = {**fields, "choices": [choice]}
                if request.include_usage:
                    chunk["usage"] = answer.usage.body() if request.continuous_usage else None
                chunks.append(event(chunk))
        return b"".join(chunks)

    async def write(data: bytes) -> None:
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})

    async with aclosing(answer.batches()) as batches:
        first = await anext(batches)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            await write(events(first))
            async for batch in batches:
                await write(events(batch))
            if request.include_usage:
                await write(event({**fields, "choices": [], "usage": answer.usage.body()}))
            await write(b"data: [DONE]\n\n")
        except RequestError as error:
            await write(event(error.body()))
        except Exception:
            logger.exception("a stream failed: a fault in the server")
            await write(event(RequestFailed("The server failed to go on with this answer.").body()))
    await send({"type": "http.response.body", "body": b"", "more_body": False})
