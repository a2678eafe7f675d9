"""Answers as a list of choices, which completions and chats have in common: as chunks, or as one body."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from headrace.errors import RequestError
from headrace.server.answer import Header, Piece, Scorer, Usage
from headrace.server.parse import ParsedRequest, Prompt
from headrace.server.service import LoadedModel, Service
from headrace.server.streaming import encode, event

Parse = Callable[[bytes, Service, LoadedModel], ParsedRequest]  # thread-safe
NewScorers = Callable[[ParsedRequest, LoadedModel], Callable[[Prompt], Scorer] | None]


class Form(Protocol):
    """How a family of routes writes choices."""

    id_prefix: str
    object_name: str
    chunk_object_name: str

    def chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        """The choices of the events that a piece becomes, one an event; none for a piece that holds nothing."""

    def choice(self, pieces: list[Piece]) -> dict[str, Any]:
        """The whole choice."""


class ChoicesWire:
    """`streaming.Wire` for a form."""

    def __init__(self, form: Form, header: Header, usage: Usage, request: ParsedRequest) -> None:
        self._form = form
        self._header = header
        self._usage = usage
        self._include_usage = request.include_usage
        self._continuous_usage = request.continuous_usage
        self._chunk_fields = self._fields(form.chunk_object_name)
        self._chunk_head = b"data: " + encode(self._chunk_fields)[:-1] + b',"choices":['

    def begin(self) -> bytes:
        return b""

    def events(self, batch: list[Piece]) -> bytes:
        chunks = []
        for piece in batch:
            for choice in self._form.chunk_choices(piece):
                tail = b"]}\n\n"
                if self._include_usage:
                    tail = b'],"usage":' + (encode(self._usage.body()) if self._continuous_usage else b"null") + tail[1:]
                chunks.append(self._chunk_head + encode(choice) + tail)
        return b"".join(chunks)

    def end(self) -> bytes:
        last = event({**self._chunk_fields, "choices": [], "usage": self._usage.body()}) if self._include_usage else b""
        return last + b"data: [DONE]\n\n"

    def failed(self, error: RequestError) -> bytes:
        return event(error.body())

    def body(self, pieces: list[Piece]) -> dict[str, Any]:
        by_choice: dict[int, list[Piece]] = {}
        for piece in pieces:
            by_choice.setdefault(piece.index, []).append(piece)
        choices = [self._form.choice(by_choice[index]) for index in sorted(by_choice)]
        return {**self._fields(self._form.object_name), "choices": choices, "usage": self._usage.body()}

    def _fields(self, object_name: str) -> dict[str, Any]:
        header = self._header
        return {"id": header.answer_id, "object": object_name, "created": header.created, "model": header.model}


class ChoicesDialect:
    """`generation_route.Dialect` for a form."""

    def __init__(self, form: type[Form], *, parse: Parse, new_scorers: NewScorers) -> None:
        self.id_prefix = form.id_prefix
        self.new_scorers = new_scorers
        self._form: Callable[[ParsedRequest], Form] = form
        self._parse = parse

    def parse(self, body: bytes, service: Service, model: LoadedModel, tenant: str) -> ParsedRequest:
        return self._parse(body, service, model)

    def new_wire(self, request: ParsedRequest, header: Header, usage: Usage) -> ChoicesWire:
        return ChoicesWire(self._form(request), header, usage, request)
