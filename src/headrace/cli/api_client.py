"""A small client of a server's JSON routes, standard library only."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from headrace.cli.server_address import ServerAddress, error_text
from headrace.errors import StartError

PIECE_BYTES = 1 << 20


class ApiClient:
    """Every call raises `StartError` with the server's own words where it does not succeed."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        self._address = ServerAddress(url)
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = timeout

    def call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        with self._response(method, path, data, {"Content-Type": "application/json"}) as response:
            return self._object(response)

    def upload(self, path: str, file: Path, fields: dict[str, str]) -> dict[str, Any]:
        """Posts a form with the file, which is never in memory as a whole."""
        boundary = secrets.token_hex(16)
        head = "".join(f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n' for name, value in fields.items())
        head += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{quote(file.name)}"\r\n\r\n'
        tail = f"\r\n--{boundary}--\r\n".encode()
        with file.open("rb") as stream:
            length = len(head.encode()) + file.stat().st_size + len(tail)
            headers = {"Content-Type": f"multipart/form-data; boundary={boundary}", "Content-Length": str(length)}
            with self._response("POST", path, pieces(head.encode(), stream, tail), headers) as response:
                return self._object(response)

    @contextlib.contextmanager
    def content(self, path: str) -> Iterator[BinaryIO]:
        with self._response("GET", path, None, {}) as response:
            yield response  # type: ignore[misc]  # it reads like a file

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        connection = self._address.connect(self._timeout)
        try:
            connection.request(method, self._address.prefix + path, body=body, headers={**self._headers, **headers})
            response = connection.getresponse()
            if response.status != 200:
                raise StartError(f"{self._url} answers {response.status}: {error_text(response.read())}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise StartError(f"{self._url} does not answer: {error or type(error).__name__}. Is a server running there?") from error
        finally:
            connection.close()

    def _object(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        try:
            value = json.loads(response.read())
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise StartError(f"{self._url} is not an OpenAI-compatible server: its answer cannot be read.")
        return value


def pieces(head: bytes, stream: BinaryIO, tail: bytes) -> Iterator[bytes]:
    yield head
    while piece := stream.read(PIECE_BYTES):
        yield piece
    yield tail
