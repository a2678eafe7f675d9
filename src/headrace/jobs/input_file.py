"""Reading the input file of a batch, line by line."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.jobs.records import Fault, Line

MAX_LINES = 200_000
MAX_FAULTS = 100  # so many are told; then the reading ends
MAX_CUSTOM_ID = 512  # characters
LINES_AT_ONCE = 500


class InputLine(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class InputFile:
    """`chunks()` may be iterated once; `faults` and `num_lines` grow with it. A file with faults must not run."""

    def __init__(self, path: Path, *, endpoint: str, max_line_bytes: int) -> None:
        self.faults: list[Fault] = []
        self.num_lines = 0
        self._path = path
        self._endpoint = endpoint
        self._max_line_bytes = max_line_bytes
        self._decoder = msgspec.json.Decoder(InputLine)
        self._seen: set[bytes] = set()  # digests of custom ids

    def chunks(self) -> Iterator[list[Line]]:
        """The lines, some at a time; none once a fault was found."""
        chunk: list[Line] = []
        for number, text in self._lines():
            try:
                line = self._read(number, text)
            except _LineFault as fault:
                self.faults.append(Fault(code=fault.code, message=fault.message, param=fault.param, line=number))
                if len(self.faults) >= MAX_FAULTS:
                    return
                continue
            self.num_lines += 1
            if not self.faults:
                chunk.append(line)
                if len(chunk) >= LINES_AT_ONCE:
                    yield chunk
                    chunk = []
        if not self.num_lines and not self.faults:
            self.faults.append(Fault(code="empty_file", message="The file holds no requests; give one JSON object a line."))
        if chunk and not self.faults:
            yield chunk

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Those that are not blank. One that is too long is cut; the rest of it is passed over."""
        with self._path.open("rb") as stream:
            number = 0
            while text := stream.readline(self._max_line_bytes + 1):
                number += 1
                rest = text
                while rest and not rest.endswith(b"\n"):
                    rest = stream.readline(1 << 20)
                if text.strip():
                    yield number, text

    def _read(self, number: int, text: bytes) -> Line:
        if len(text) > self._max_line_bytes:
            raise _LineFault("line_too_long", f"The line is longer than {self._max_line_bytes} bytes.")
        if self.num_lines >= MAX_LINES:
            raise _LineFault("too_many_requests", f"The file holds more than {MAX_LINES} requests; split it.")
        try:
            given = self._decoder.decode(text)
        except msgspec.ValidationError as error:
            raise _LineFault("invalid_request", f"The line is no request of a batch: {error}.") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise _LineFault("invalid_json_line", f"The line is not valid JSON: {error}.") from None
        if not 1 <= len(given.custom_id) <= MAX_CUSTOM_ID:
            raise _LineFault("invalid_custom_id", f"custom_id must have from 1 to {MAX_CUSTOM_ID} characters.", "custom_id")
        if given.method != "POST":
            raise _LineFault("invalid_method", "method must be POST.", "method")
        if given.url != self._endpoint:
            raise _LineFault("mismatched_url", f"url must be the endpoint of the batch, {self._endpoint}.", "url")
        body = bytes(given.body)
        if not body.startswith(b"{"):
            raise _LineFault("invalid_body", "body must be an object.", "body")
        digest = hashlib.blake2b(given.custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            raise _LineFault("duplicate_custom_id", f"custom_id {given.custom_id[:80]!r} is in the file twice; each must be its own.", "custom_id")
        self._seen.add(digest)
        return Line(batch_id="", number=number, custom_id=given.custom_id, body=body)


class _LineFault(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
