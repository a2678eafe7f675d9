"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.routing import Route

from headrace.errors import RequestError
from headrace.server.answer import Header, Piece, Scorer, Usage
from headrace.server.generation_route import GenerationRoute
from headrace.server.messages.builder import EventBody, MessageBuilder
from headrace.server.messages.errors import PATH, error_body
from headrace.server.messages.parse import count_tokens, parse_message
from headrace.server.parse import ParsedRequest, Prompt
from headrace.server.service import LoadedModel, Service
from headrace.server.streaming import event
from headrace.server.text_route import TextRoute


class MessageWire:
    """`streaming.Wire` for a message."""

    def __init__(self, builder: MessageBuilder) -> None:
        self._builder = builder

    def begin(self) -> bytes:
        return encoded(self._builder.begin())

    def events(self, batch: list[Piece]) -> bytes:
        return b"".join(encoded(self._builder.push(piece)) for piece in batch)

    def end(self) -> bytes:
        return encoded(self._builder.end())

    def failed(self, error: RequestError) -> bytes:
        return encoded([error_body(error)])

    def body(self, pieces: list[Piece]) -> dict[str, Any]:
        for piece in pieces:
            self._builder.push(piece)
        self._builder.end()
        return self._builder.message


def encoded(events: list[EventBody]) -> bytes:
    return b"".join(event(body, body["type"]) for body in events)


class MessageDialect:
    """`generation_route.Dialect` for messages."""

    id_prefix = "msg_"

    def parse(self, body: bytes, service: Service, model: LoadedModel, tenant: str) -> ParsedRequest:
        return parse_message(body, service, model)

    def new_scorers(self, request: ParsedRequest, model: LoadedModel) -> Callable[[Prompt], Scorer] | None:
        return None

    def new_wire(self, request: ParsedRequest, header: Header, usage: Usage) -> MessageWire:
        return MessageWire(MessageBuilder(header, usage))


def routes(service: Service) -> list[Route]:
    def count(body: bytes, service: Service, model: LoadedModel, tenant: str) -> dict[str, Any]:
        return {"input_tokens": count_tokens(body, service, model)}

    return [
        Route(PATH, GenerationRoute(service, MessageDialect()), methods=["POST"]),
        Route(PATH + "/count_tokens", TextRoute(service, count), methods=["POST"]),
    ]
