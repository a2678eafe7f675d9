"""A response on the wire: named events, or one body; kept in the store at its end where it is to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.errors import RequestError
from headrace.server.answer import Piece
from headrace.server.responses.builder import EventBody, ResponseBuilder
from headrace.server.streaming import event


class ResponseWire:
    """`streaming.Wire` for a response. `keep` is called with the response whenever it has ended."""

    def __init__(self, builder: ResponseBuilder, keep: Callable[[dict[str, Any]], None]) -> None:
        self.builder = builder
        self.keep = keep

    def begin(self) -> bytes:
        return encoded(self.builder.begin())

    def events(self, batch: list[Piece]) -> bytes:
        return b"".join(encoded(self.builder.push(piece)) for piece in batch)

    def end(self) -> bytes:
        events = self.builder.end()
        self.keep(self.builder.response)
        return encoded(events)

    def failed(self, error: RequestError) -> bytes:
        events = self.builder.fail(error)
        self.keep(self.builder.response)
        return encoded(events)

    def body(self, pieces: list[Piece]) -> dict[str, Any]:
        for piece in pieces:
            self.builder.push(piece)
        self.builder.end()
        self.keep(self.builder.response)
        return self.builder.response


def encoded(events: list[EventBody]) -> bytes:
    return b"".join(event(body, body["type"]) for body in events)
