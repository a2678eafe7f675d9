"""Requests over HTTP for the scripts here, with the standard library and without any proxy."""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

TIMEOUT = 120.0  # seconds of silence


def connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    return http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80, timeout=TIMEOUT)


def post(url: str, path: str, body: bytes, kind: str = "application/json") -> tuple[int, bytes]:
    """(status, answer). A server that answers and closes before it read everything has answered."""
    connection = connect(url)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.request("POST", path, body, {"Content-Type": kind})
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, data


def call(url: str, path: str, fields: object) -> Any:
    """The answer, which must be one. Raises SystemExit."""
    return _checked(path, *post(url, path, json.dumps(fields).encode()))


def get_text(url: str, path: str) -> str:
    """Raises SystemExit for an answer that is none."""
    connection = connect(url)
    connection.request("GET", path)
    response = connection.getresponse()
    data = response.read()
    connection.close()
    if response.status != 200:
        raise SystemExit(f"{path} answered {response.status}: {data[:500]!r}")
    return data.decode()


def get(url: str, path: str) -> Any:
    return json.loads(get_text(url, path))


def first_model(url: str) -> str:
    name: str = get(url, "/v1/models")["data"][0]["id"]
    return name


def upload(url: str, lines: bytes) -> tuple[int, bytes]:
    """An input file for a batch: (status, answer)."""
    purpose = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = b'--x\r\nContent-Disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
    return post(url, "/v1/files", purpose + file + lines + b"\r\n--x--\r\n", "multipart/form-data; boundary=x")


def begin_batch(url: str, lines: bytes, endpoint: str) -> str:
    """The id of a batch over these lines."""
    file = _checked("/v1/files", *upload(url, lines))
    batch: str = call(url, "/v1/batches", {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"})["id"]
    return batch


def _checked(path: str, status: int, data: bytes) -> Any:
    if status != 200:
        raise SystemExit(f"{path} answered {status}: {data[:500]!r}")
    return json.loads(data)
