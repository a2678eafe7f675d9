"""A form with one file, written to disk while it comes in."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers

from headrace.errors import BodyTimeout, BodyTooLarge, InvalidRequest
from headrace.server.body import ClientGone, Receive

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
FORM_BYTES = 64 * 1024  # all of a form but its file
DISCARDED_BYTES = 64 * 1024 * 1024  # read beyond the limit before the refusal, so that the client sees it
LEAST_SPEED = 20_000  # bytes a second on the whole, after the time for any body


@dataclass(slots=True, kw_only=True)
class Upload:
    fields: dict[str, str]
    filename: str
    size: int  # bytes


async def receive_upload(receive: Receive, headers: Headers, path: Path, *, max_bytes: int, timeout: float) -> Upload:
    """Writes the form's `file` to `path`, synced. Raises `InvalidRequest`, `BodyTooLarge`, `BodyTimeout` or `ClientGone`.

    Where it raises, the caller removes the file.
    """
    kind, options = parse_options_header(headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequest("Send the file as multipart/form-data, with the fields file and purpose.", param="file")
    too_large = BodyTooLarge(f"The file is larger than the limit of {max_bytes} bytes.")
    with path.open("wb") as stream:
        form = _Form(boundary, stream)
        begin = time.monotonic()
        size = 0
        more = True
        while more:
            try:
                async with asyncio.timeout(begin + timeout + size / LEAST_SPEED - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise BodyTimeout("The file came too slowly.") from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            data = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(data)
            if size > max_bytes + FORM_BYTES + DISCARDED_BYTES:
                raise too_large
            if size <= max_bytes + FORM_BYTES:
                form.write(data)
        if size > max_bytes + FORM_BYTES or form.file_bytes > max_bytes:
            raise too_large
        form.finish()
        stream.flush()
        await asyncio.to_thread(os.fsync, stream.fileno())
    return Upload(fields=form.fields, filename=form.filename, size=form.file_bytes)


@dataclass(slots=True)
class _Part:
    name: str = ""
    header: bytes = b""  # name of the header being read
    value: bytes = b""
    content: bytearray = field(default_factory=bytearray)  # of a field


class _Form:
    """The parser's callbacks. Raises `InvalidRequest`."""

    def __init__(self, boundary: bytes, stream: BinaryIO) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self.file_bytes = 0
        self._has_file = False
        self._ended = False
        self._stream = stream
        self._part = _Part()
        names = ("part_begin", "part_data", "part_end", "header_field", "header_value", "header_end", "headers_finished", "end")
        try:
            self._parser = MultipartParser(boundary, {f"on_{name}": getattr(self, f"_on_{name}") for name in names})
        except FormParserError as error:
            raise InvalidRequest(f"The form cannot be read: {error}.", param="file") from None

    def write(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"The form cannot be read: {error}.", param="file") from None

    def finish(self) -> None:
        if not self._ended:
            raise InvalidRequest("The form breaks off before its end.", param="file")
        if not self._has_file:
            raise InvalidRequest("file is required: a part with the content.", param="file")

    def _on_part_begin(self) -> None:
        self._part = _Part()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._part.header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.value += data[start:end]

    def _on_header_end(self) -> None:
        part = self._part
        if part.header.lower() == b"content-disposition":
            _, options = parse_options_header(part.value)
            part.name = text_of(options.get(b"name", b""))
            if part.name == "file":
                if self._has_file:
                    raise InvalidRequest("Send one file at a time.", param="file")
                self._has_file = True
                self.filename = text_of(options.get(b"filename", b""))[:255] or "file"
        part.header = part.value = b""

    def _on_headers_finished(self) -> None:
        name = self._part.name
        if not name:
            raise InvalidRequest("Each part of the form needs a name.", param="file")
        if name != "file" and (name in self.fields or len(self.fields) >= MAX_FIELDS):
            raise InvalidRequest(f"The form has the field {name[:80]!r} twice, or too many fields.", param=name[:80])

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        if part.name == "file":
            self._stream.write(data[start:end])
            self.file_bytes += end - start
            return
        part.content += data[start:end]
        if len(part.content) > MAX_FIELD_BYTES:
            raise InvalidRequest(f"The field {part.name[:80]!r} is too long.", param=part.name[:80])

    def _on_part_end(self) -> None:
        part = self._part
        if part.name != "file":
            self.fields[part.name] = text_of(bytes(part.content))

    def _on_end(self) -> None:
        self._ended = True


def text_of(data: bytes) -> str:
    return data.decode("utf-8", "replace")
