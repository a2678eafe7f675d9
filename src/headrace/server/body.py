"""Reading a request's body within bounds, and turning it into one JSON object.

A body is bounded in bytes (`BodyTooLarge`), in time (`BodyTimeout`) and in the number of JSON values it holds: a few megabytes of `[{},{},`
would otherwise become gigabytes of objects. Large bodies are decoded in a thread (see `Service.offload`), but the decoder keeps the interpreter
lock while it runs, so the bound on values is also what keeps the event loop's longest stall in the tens of milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import msgspec
from starlette.datastructures import Headers

from headrace.errors import BodyTimeout, BodyTooLarge, InvalidRequest, QueueFull

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

MAX_JSON_VALUES = 250_000  # numbers, texts, objects ... in one body
DISCARD_FACTOR = 4  # a body up to so many times the limit is read to its end before it is refused, so that the client sees the answer
SCAN_BYTES = 1 << 20  # an even number: the pieces in which a large body is scanned


class ClientGone(Exception):
    """The client hung up before its request was complete or answered."""


class BodyBudget:
    """Bytes that all bodies in the process may take together; each reader charges what it holds and gives it back."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0

    @contextlib.contextmanager
    def lease(self) -> Iterator[BodyLease]:
        lease = BodyLease(self)
        try:
            yield lease
        finally:
            lease.release()


class BodyLease:
    """What one request has taken from the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0

    def charge(self, count: int) -> None:
        if self._budget.used + count > self._budget.total:
            raise QueueFull("The server holds as many bytes of requests as it may; try again in a moment.")
        self._budget.used += count
        self._held += count

    def release(self) -> None:
        self._budget.used -= self._held
        self._held = 0


async def read_body(receive: Receive, headers: Headers, *, max_bytes: int, timeout: float, lease: BodyLease) -> bytes:
    """The whole body. Raises `BodyTooLarge`, `BodyTimeout`, `QueueFull`, `InvalidRequest` or `ClientGone`."""
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise InvalidRequest(f"Content-Encoding {encoding!r} is not supported; send the JSON body as it is.", param="Content-Encoding")
    declared = headers.get("content-length", "")
    length = int(declared) if declared.isascii() and declared.isdigit() else 0
    too_large = BodyTooLarge(f"The body is larger than the limit of {max_bytes} bytes.")
    if length > max_bytes and (length > DISCARD_FACTOR * max_bytes or "expect" in headers):
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                more = message.get("more_body", False)
                size += len(chunk)
                if size > max_bytes:
                    chunks.clear()
                    lease.release()
                    if size > DISCARD_FACTOR * max_bytes:
                        raise too_large
                elif chunk:
                    lease.charge(len(chunk))
                    chunks.append(chunk)
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {timeout:g} seconds.") from None
    if size > max_bytes:
        raise too_large
    return b"".join(chunks)


def count_json_values(body: bytes, *, stop_above: int) -> int:
    """An upper bound of the values in a JSON text, from its commas and brackets outside of strings; stops once above `stop_above`."""
    import numpy as np  # only such long bodies need it

    count = 0
    start = 0
    in_string = False
    while start < len(body) and count <= stop_above:
        piece = body[start : start + SCAN_BYTES]
        # An escape must not be cut in two: a run of backslashes at the end goes with the next piece.
        kept = piece.rstrip(b"\\") if len(piece) == SCAN_BYTES else piece
        piece = kept or piece
        start += len(piece)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        text = np.frombuffer(piece, np.uint8)
        # Parity of the quotes up to each byte: odd means inside a string.
        inside = (np.cumsum(text == ord('"'), dtype=np.uint8) + np.uint8(in_string)) & 1
        structural = (text == ord(",")) | (text == ord("[")) | (text == ord("{")) | (text == ord(":"))
        count += int(np.count_nonzero(structural & (inside == 0)))
        in_string = bool(inside[-1])
    return count + 1


def decode_object(body: bytes, what: str = "The body") -> dict[str, Any]:
    """Decode one JSON object, see `decode_json`."""
    value = decode_json(body, what)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} must be one JSON object.")
    return value


def decode_json(body: bytes, what: str = "The body") -> Any:
    """Decode JSON. NaN, Infinity, torn text and lone surrogates are no JSON; of doubled keys the last one counts."""
    if len(body) > MAX_JSON_VALUES and count_json_values(body, stop_above=MAX_JSON_VALUES) > MAX_JSON_VALUES:
        raise InvalidRequest(f"{what} holds more than {MAX_JSON_VALUES} JSON values; send fewer or shorter lists.")
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise InvalidRequest(f"{what} is nested too deeply.") from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}.") from None
